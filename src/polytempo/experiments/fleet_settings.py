"""Settings of a run between real machines: what they mean to a server, and what it has no use for.

Each setting of `RunConfig`, other than `strategy`, is in one of the groups below.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from polytempo.core.errors import PolytempoError, nearest
from polytempo.core.strategy import Strategy
from polytempo.data import Federation
from polytempo.data.assemble import spell
from polytempo.data.npz import read_client
from polytempo.data.sources import is_path
from polytempo.experiments.config import FEDERATION, RunConfig
from polytempo.experiments.peer import client_of
from polytempo.experiments.peer_settings import refuse
from polytempo.experiments.run_settings import resolve
from polytempo.experiments.world import load_federation
from polytempo.models import Inputs, tokenizer
from polytempo.nodes.plan import Patience
from polytempo.simulation.simulator import concurrency_of
from polytempo.training import PROBLEMS, Problem, problem_for
from polytempo.training.problem import Own

OF_SERVER = (
    *("model", "problem", "buffers", "personal", "freeze", "trainable", "updates", "concurrency"),
    *("refill", "epochs", "steps", "batch_size", "lr", "lr_schedule", "optimizer", "momentum"),
    *("weight_decay", "keep_optimizer", "eval_every", "adapt_epochs", "adapt_always", "bank"),
    *("seed", "dp", "compress", "defend", "log", "plots"),
)
OF_CLIENT = ("solver", "device")  # how it trains; and whose data it has
SERVER_SETTINGS = (*FEDERATION, *OF_SERVER)
CLIENT_SETTINGS = (*FEDERATION, "model", "problem", *OF_CLIENT, "seed", "dp")
FLEET_SETTINGS = (*(name for name in FEDERATION if name != "clients"), *OF_SERVER, *OF_CLIENT)
END = "a fleet ends after so many --updates"
MEASURED = "it can be had of the same fleet with `polytempo replay`"
SIMULATED = {  # of simulations, and what there is instead
    "devices": "devices are as fast as they are (`polytempo fleet --slow 0.3:5` slows some down)",
    "network": "the network is a real one",
    "dropout": "clients come and go as they please",
    "backend": "clients train where they are",
    "workers": "clients train where they are",
    "versions": END,
    "messages": END,
    "until": END,
    "stop": END,
    "attack": "nobody is asked to attack a real fleet",
    "check": MEASURED,
    "diagnose": MEASURED,
}
AUTO = Patience()
EITHER_WAY = ("events",)  # a fleet's are always written
OF_CLIENTS = (
    "what clients bring: "  # how the folder of a server speaks of data that it has not seen
)


def for_fleet(config: RunConfig, strategy: Strategy | None = None) -> Strategy:
    """The strategy, if the settings are for a server between real machines."""
    strategy = strategy or config.make("strategy")
    assert isinstance(strategy, Strategy)
    name = config.strategy_table["name"]
    if strategy.engine != "server":
        more = "; see `polytempo peer`" if strategy.engine == "peers" else ""
        raise PolytempoError(f"{name} is not a strategy with a server{more}")
    refuse(config, SIMULATED, "is for simulations, not for machines on a network")
    return strategy


# -- the server's side -----------------------------------------------------------------------------


@dataclass(frozen=True)
class Samples:
    """What a server knows of its clients' data. `scale`: mean and deviation of images, where they
    are known; `targets`: a few."""

    inputs: Inputs
    about: str
    clients: int
    scale: tuple[Sequence[float], Sequence[float]] | None
    targets: Tensor


def samples_of(federation: Federation) -> Samples:
    """A server that has the data set, or a part of it, knows all of this from there."""
    mean, std = federation.mean, federation.std
    return Samples(
        Inputs.of(federation),
        federation.description,
        federation.clients,
        None if mean is None or std is None else (mean, std),
        federation.y[:2],
    )


def samples_like(
    shape: Sequence[int],
    outputs: int,
    vocabulary: int | None,
    problem: str,
    clients: int,
    model: str | Mapping[str, Any] = "auto",
) -> Samples:
    """A server that has none is told; the tokens of texts, by the model's tokenizer."""
    digest = None
    if (found := tokenizer(model)) is not None:
        vocabulary, digest = found.vocabulary, found.digest
    inputs = Inputs(tuple(shape), outputs, vocabulary, problem, digest)
    targets = {
        "classification": torch.zeros(2, dtype=torch.int64),
        "multilabel": torch.zeros(2, outputs, dtype=torch.int64),
        "regression": torch.zeros(2, outputs),
        "next-token": torch.zeros(2, *shape, dtype=torch.int64),
    }
    words = [f"shape {'x'.join(map(str, shape))}", f"{outputs} outputs", problem]
    words += [] if vocabulary is None else [f"{vocabulary} tokens"]
    return Samples(
        inputs,
        f"{OF_CLIENTS}{', '.join(words)}",
        clients,
        None,
        targets.get(problem, torch.zeros(2)),
    )


def read_shape(text: str) -> tuple[int, ...]:
    """`3x32x32`, or `64`."""
    try:
        shape = tuple(int(side) for side in text.lower().split("x"))
    except ValueError:
        shape = ()
    if not shape or min(shape) < 1:
        raise PolytempoError(f"--shape {text}: write the sides of one sample as in 3x32x32, or 64")
    return shape


def problem_of(config: RunConfig, samples: Samples) -> Problem:
    """What is learned."""
    found = PROBLEMS.create(samples.inputs.problem if config.problem is None else config.problem)
    assert isinstance(found, Problem)
    return found


def problem_name(problem: Problem) -> str:
    """By which server and client know that they mean the same."""
    return spell(PROBLEMS.describe(problem))


def figures_of(problem: Problem, samples: Samples) -> frozenset[str]:
    """The names of the sums that a client's score consists of."""
    if isinstance(problem, Own):
        return frozenset({"total", "loss"} | ({"measure"} if problem.measure else set()))
    outputs = samples.inputs.outputs
    shape = (*samples.targets.shape, outputs) if problem.targets == "next-token" else (2, outputs)
    targets = samples.targets
    return frozenset(problem.sums(torch.zeros(shape), targets))


def resolved(config: RunConfig, strategy: Strategy, clients: int, about: str) -> RunConfig:
    """The settings with everything filled in that was left open, where there is no federation to
    ask."""
    updates = strategy.updates_of_run(config.updates, clients)
    return config.model_copy(
        update={
            "updates": updates,
            "clients": clients,
            "data": about,
            "concurrency": concurrency_of(strategy, clients, config.concurrency, config.refill),
            "refill": config.refill or strategy.refill,
            "eval_every": config.eval_every or max(1, updates // 40),
        }
    )


def known(
    config: RunConfig,
    strategy: Strategy,
    shape: str | None = None,
    outputs: int | None = None,
    vocabulary: int | None = None,
) -> tuple[RunConfig, Samples]:
    """What the server knows of the data, and the settings complete."""
    if shape is None:
        for name, value in (("outputs", outputs), ("vocabulary", vocabulary)):
            if value is not None:
                raise PolytempoError(f"--{name} goes with --shape; with --data it is known")
        federation = load_federation(config)
        return resolve(config, federation, strategy), samples_of(federation)
    if outputs is None or config.clients is None:
        lacking = "--outputs" if outputs is None else "--clients"
        raise PolytempoError(
            f"a server that has no data needs {lacking} too: --shape 3x32x32 --outputs 10 "
            "--clients 20"
        )
    kind = config.make("problem").targets if config.problem is not None else None
    samples = samples_like(
        read_shape(shape),
        outputs,
        vocabulary,
        kind or "classification",
        config.clients,
        config.model,
    )
    return resolved(config, strategy, samples.clients, samples.about), samples


def read_patience(text: str) -> Patience:
    """`auto`, `none`, or seconds."""
    if text in ("auto", "none"):
        return AUTO if text == "auto" else Patience(math.inf)
    seconds = read_seconds("--deadline", text, "auto, none,")
    return Patience(0.0, seconds, seconds)


def read_seconds(option: str, text: str, words: str = "none") -> float:
    """`none` (infinite), or seconds. `words`: what may be said instead of a number."""
    if text == "none":
        return math.inf
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < math.inf:
        raise PolytempoError(f"{option} {text}: give {words} or a number of seconds above 0")
    return seconds


def server_table(given: dict[str, Any]) -> dict[str, Any]:
    """Take the table `[server]` out of the settings of a TOML file: `wait_for` and `limits`."""
    table = given.pop("server", {})
    if not isinstance(table, dict):
        raise PolytempoError(f"server = {table!r}: write a table, [server]")
    found = {key.replace("-", "_"): value for key, value in table.items()}
    for key in found.keys() - {"wait_for", "limits"}:
        near = nearest(key, ("wait_for", "limits"))
        raise PolytempoError(f"[server]: unknown setting {key!r}{near}; it has wait_for and limits")
    wait_for, limits = found.get("wait_for", 1), found.get("limits", {})
    if not isinstance(wait_for, int) or isinstance(wait_for, bool):
        raise PolytempoError(f"[server]: wait_for = {wait_for!r}: give a number of clients")
    if not isinstance(limits, dict):
        raise PolytempoError(f"[server]: limits = {limits!r}: write a table, [server.limits]")
    limits = {key.replace("-", "_"): value for key, value in limits.items()}
    return {"wait_for": wait_for, "limits": limits}


def read_limits(text: str) -> dict[str, float]:
    """`messages=20,memory=4e9`."""
    found = {}
    for part in filter(None, text.split(",")):
        name, _, value = part.partition("=")
        try:
            found[name.strip().replace("-", "_")] = float(value)
        except ValueError:
            raise PolytempoError(
                f"--limits {text}: write names and numbers, as in messages=20,memory=4e9"
            ) from None
    return found


# -- a client's side -------------------------------------------------------------------------------


def own_samples(config: RunConfig, name: str, client: int | None) -> Federation:
    """The data of one client: an .npz file of its own, or its share of a data set that is divided
    as the settings say."""
    path = Path(config.data).expanduser()
    if client is None and is_path(config.data) and not path.is_dir():
        kind = config.make("problem").targets if config.problem is not None else None
        if not path.is_file():
            raise PolytempoError(
                f"{path}: no such file; save it with numpy.savez(file, X=..., y=...)"
            )
        found = Federation.from_arrays(
            [read_client(path)],
            name=path.stem,
            test_fraction=config.test_fraction,
            seed=config.seed,
            problem=kind,
            tokenizer=tokenizer(config.model),
        )
        return _checked(found, path.name)
    federation = load_federation(config)
    return _checked(alone(federation, client_of(name, client, federation.clients)), name)


def _checked(data: Federation, whose: str) -> Federation:
    if not data.samples[0]:
        raise PolytempoError(f"{whose} has no sample to train on; give it data of its own")
    return data


def alone(federation: Federation, client: int) -> Federation:
    """That client's part of the federation, prepared as the whole of it is."""
    train, test = federation.train[client], federation.test[client]
    begin, count = train.start, train.stop - train.start
    return replace(
        federation,
        x=federation.x[begin : test.stop].clone(),
        y=federation.y[begin : test.stop].clone(),
        train=(slice(0, count),),
        test=(slice(count, test.stop - begin),),
        groups=None,
        description=f"client {client} of {federation.description}",
    )


def own_problem(config: RunConfig, data: Federation) -> Problem:
    """What this client learns."""
    return problem_for(data, config.problem)
