"""What the server of a fleet conducts: strategy, model and problem; and the node that does it."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from polytempo.core.client_steps import in_use
from polytempo.core.errors import PolytempoError
from polytempo.core.layout import Layout, digest_of
from polytempo.core.server import Server
from polytempo.core.strategy import Context, Strategy
from polytempo.core.task import TASKS
from polytempo.experiments.checkpoint import holds_run
from polytempo.experiments.config import RunConfig, make_config, read_config
from polytempo.experiments.fleet_settings import (
    AUTO,
    Samples,
    figures_of,
    problem_name,
    problem_of,
)
from polytempo.experiments.run_settings import as_before
from polytempo.models import build
from polytempo.network.fleet.store import JOURNAL
from polytempo.nodes.plan import FleetPlan, Patience
from polytempo.nodes.server import ServerNode
from polytempo.simulation.guards import require_accountant
from polytempo.storage import load_state, save_state
from polytempo.training import PROBLEMS, Problem

BEGINNING = "beginning.safetensors"  # what a server's node is made of, beside its settings


@dataclass(frozen=True)
class Model:
    """What a fleet trains: names and shapes of what travels, how it begins, and what clients must
    know to make it themselves (`about`)."""

    layout: list[list[Any]]  # name, shape, type
    initial: Tensor
    tensors: list[int]
    about: Mapping[str, Any]

    @property
    def digest(self) -> str:
        shared = ((name, shape) for name, shape, *_ in self.layout)
        return digest_of(shared, self.about.get("frozen") or "")


def model_of(config: RunConfig, samples: Samples) -> Model:
    """The model that the settings describe."""
    inputs, parts = samples.inputs, config.parts(config.make("strategy"))
    layout = Layout(build(config.model, inputs, config.seed, config.trainable), parts)
    kind = str(layout.vector.dtype).removeprefix("torch.")
    shapes = zip(layout.shared_names, layout.shared_shapes, strict=True)
    about = {
        "model": config.model,
        "shape": list(inputs.shape),
        "outputs": inputs.outputs,
        "vocabulary": inputs.vocabulary,
        "tokenizer": inputs.tokenizer,
        "scale": samples.scale,
        "personal": list(parts.personal),
        "freeze": list(parts.frozen),
        "buffers": parts.buffers,
        "trainable": config.trainable,
        "frozen": layout.frozen_digest,
    }
    entries = [[name, shape, kind] for name, shape in shapes]
    return Model(entries, layout.read(), layout.tensors, about)


@dataclass(frozen=True)
class Undertaking:
    """What a server conducts; the settings are complete."""

    config: RunConfig
    strategy: Strategy
    model: Model
    problem: Problem
    learns: str  # the name of the problem, by which clients know that they mean the same
    figures: frozenset[str]  # the sums that a client's score consists of
    about: str  # the federation


def undertaking(config: RunConfig, samples: Samples, strategy: Strategy) -> Undertaking:
    """What the (complete) settings describe."""
    problem = problem_of(config, samples)
    model, figures = model_of(config, samples), figures_of(problem, samples)
    name = problem_name(problem)
    return Undertaking(config, strategy, model, problem, name, figures, samples.about)


def make_node(what: Undertaking, patience: Patience = AUTO, wait_for: int = 1) -> ServerNode:
    """The server of an undertaking, before anybody has enrolled."""
    config, model = what.config, what.model
    assert config.clients is not None
    if not 1 <= wait_for <= config.clients:
        raise PolytempoError(
            f"wait_for = {wait_for}: expected at least 1, and at most the number of clients, "
            f"{config.clients}"
        )
    if (mechanism := config.make("dp")) is not None:
        require_accountant(mechanism)
    samples = [1] * config.clients
    context = Context(
        model.initial, samples, config.task(), config.seed, config.storage(), model.tensors
    )
    server = Server(
        what.strategy,
        context,
        concurrency=config.concurrency,
        refill=config.refill,
        schedule=config.make("lr_schedule"),
        steps=config.last_steps(),
        defence=config.make("defend"),
    )
    used = in_use(what.strategy.task(0).client_steps)
    run = {
        **model.about,
        "strategy": config.strategy_table["name"],
        "layout": model.layout,
        "problem": what.learns,
        "figures": sorted(what.figures),
        "task": TASKS.describe(replace(context.task, client_steps=used)),
        "seed": config.seed,
    }
    plan = FleetPlan(
        model=model.digest,
        problem=what.learns,
        run=json.loads(json.dumps(run)),  # as clients will read it
        updates=config.updates,
        eval_every=config.evaluation_interval,
        figures=what.figures,
        adapt_epochs=config.adapt_epochs,
        adapt_always=config.adapt_always,
        patience=patience,
        wait_for=wait_for,
    )
    return ServerNode(server, samples, plan)


@contextmanager
def one_order() -> Iterator[None]:
    """Sums in one order, however many processors there are: same records, same bits."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


# -- the folder ------------------------------------------------------------------------------------


def continued(what: Undertaking, out: Path) -> Undertaking:
    """As it was when the run in that folder began, if there is one: it must be this one."""
    if not (out / JOURNAL).exists():
        if holds_run(out):
            raise PolytempoError(
                f"{out} holds a run of another kind; choose another --out, or delete it"
            )
        return what
    if not (out / BEGINNING).exists():  # it was killed while it began
        return what
    before = read_config(out / "config.toml")
    config = as_before(what.config, before, f"the run in {out}", what.strategy)
    found = load_state(out / BEGINNING)
    model = Model(found["layout"], found["initial"], found["tensors"], found["about"])
    if model.digest != what.model.digest:
        raise PolytempoError(
            f"the run in {out} trains other parameters than those given now; give the same, or "
            "another folder"
        )
    return replace(what, config=config, model=model)


def save_beginning(folder: Path, what: Undertaking) -> None:
    """So that a replay needs neither the data nor the model."""
    model = what.model
    state = {
        "layout": model.layout,
        "initial": model.initial,
        "tensors": model.tensors,
        "about": json.loads(json.dumps(model.about)),
        "learns": what.learns,
        "figures": sorted(what.figures),
        "federation": what.about,
    }
    save_state(folder / BEGINNING, state)


def recorded(folder: Path) -> Undertaking:
    """What the server in that folder conducts."""
    if not (folder / JOURNAL).is_dir() or not (folder / BEGINNING).exists():
        inner = " (the folder of a fleet has it in server)" if (folder / "server").is_dir() else ""
        raise PolytempoError(f"{folder} is not the folder of a server: it has no log{inner}")
    config = make_config(read_config(folder / "config.toml"), str(folder / "config.toml"))
    found = load_state(folder / BEGINNING)
    model = Model(found["layout"], found["initial"], found["tensors"], found["about"])
    problem = PROBLEMS.create("classification")  # a replay scores nothing
    return Undertaking(
        config,
        config.make("strategy"),
        model,
        problem,
        found["learns"],
        frozenset(found["figures"]),
        found["federation"],
    )
