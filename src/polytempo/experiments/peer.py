"""One peer of a real network from the settings of a run: what `polytempo peer` does.

The settings are those of the simulator, and so are data, initial model and order of the samples:
peer i has what client i of the simulated federation has.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

from polytempo.core.errors import PolytempoError
from polytempo.core.strategy import Context
from polytempo.experiments.config import RunConfig, write_config
from polytempo.experiments.peer_settings import networked
from polytempo.experiments.rows import write_table
from polytempo.experiments.world import load_federation
from polytempo.files import replace_text
from polytempo.models import Inputs, build
from polytempo.network.driver import Driver, PeerPlan
from polytempo.network.folder import Folder
from polytempo.network.link import Link
from polytempo.network.session import Address
from polytempo.network.wire import check_name
from polytempo.training import Learner, Score, find_device, make_solver, try_model

SAVE_ROUNDS = 100  # local rounds between two saves, unless it is said otherwise
EXCHANGE_SECONDS = 20.0  # for a model each way, unless it is said otherwise
FIXED = (  # with the data, the name of the run and the strategy: what makes a peer the same peer
    *("seed", "model", "problem", "buffers", "personal", "freeze", "trainable"),
    *("batch_size", "lr", "optimizer"),
)


def client_of(id: str, client: int | None, clients: int) -> int:
    """Whose data the peer has: what was said, else the number that its name ends with."""
    if client is None:
        digits = id[len(id.rstrip("0123456789")) :]
        if not digits:
            raise PolytempoError(
                f"whose data does {id!r} have? Give the number of a client of the data set with "
                "--client, or let the name end with it (peer-0)"
            )
        client = int(digits)
    if not 0 <= client < clients:
        raise PolytempoError(
            f"there is no client {client}: the federation has {clients}, from 0 to {clients - 1}"
        )
    return client


def run_peer(
    config: RunConfig,
    id: str,
    address: Address,
    out: Path,
    *,
    run: str = "polytempo",
    client: int | None = None,
    wait: bool = False,
    save_every: int = SAVE_ROUNDS,
    pause: float = 0.0,
    exchange_timeout: float = EXCHANGE_SECONDS,
    watch: Callable[[dict[str, Any]], None] = lambda event: None,
    interrupted: Callable[[], bool] = lambda: False,
) -> dict[str, Any]:
    """Let a peer take part until its target, and write its folder; returns the figures.

    `wait`: start once all clients of the federation are there, or after half a minute.
    """
    strategy = networked(config)
    check_name("peer", id)
    check_name("run", run)
    federation = load_federation(config)
    clients = federation.clients
    client = client_of(id, client, clients)
    module = build(config.model, Inputs.of(federation), config.seed, config.trainable)
    try_model(module, federation, config.problem_on(federation))
    solver, how, why = make_solver(
        module,
        federation,
        config.seed,
        config.parts(strategy),
        find_device(config.device),
        config.problem_on(federation),
        name=config.solver,
    )
    task = config.task()
    strategy.setup(Context(solver.layout.read(), federation.samples, task, config.seed))
    target = strategy.iterations(config.updates)
    task = replace(task, schedule=strategy.schedule(target))
    learner = Learner(solver, client, task)
    tested = list(range(clients)) if strategy.common_test else [client]

    def evaluate(learner: Learner) -> float:
        scores = learner.evaluate(tested)
        metric = solver.problem.metrics[0]
        return metric.value(sum(scores, Score({})).sums)

    plan = PeerPlan(
        run=run,
        peers=clients,
        decision=strategy.decision,
        fusion=strategy.fusion,
        target=target,
        steps=strategy.local_steps,
        messages=None if config.messages is None else max(1, config.messages // clients),
        eval_every=max(1, config.evaluation_interval // clients),
        save_every=save_every,
        wait_for=clients - 1 if wait else 0,
        pause=pause,
        exchange_timeout=exchange_timeout,
        seed=config.seed,
    )
    fixed = {"run": run, "data": federation.digest, "client": client}
    fixed |= {name: getattr(config, name) for name in FIXED}
    fixed |= {
        f"p2p:{option}": x for option, x in config.strategy_table.items() if option != "target"
    }
    folder = Folder(out, id, watch)
    try:
        driver = Driver(learner, plan, partial(Link, address=address), folder, evaluate, fixed)
        write_config(out / "config.toml", config)
        summary = {
            "strategy": "p2p",
            "federation": federation.description,
            "client": client,
            "samples": federation.samples[client],
            "tested": sum(part.stop - part.start for part in (federation.test[i] for i in tested)),
            "local_steps": strategy.local_steps,
            "solver": how + why,
            "parameters": solver.layout.size,
            "seed": config.seed,
            **driver.run(interrupted),
            "version": version("polytempo"),
        }
        write_table(out / "history.csv", driver.history)
        replace_text(out / "result.json", json.dumps(summary, indent=2) + "\n")
        return summary
    finally:
        folder.close()
