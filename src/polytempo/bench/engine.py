"""What an update costs where there is next to nothing to compute: the engine itself.

`measure_engine` makes whole runs of a linear model with eight local steps, in this process, as
`polytempo run` does: history, event log, a checkpoint, evaluations at the usual interval. All CPU
time counts, the arithmetic included. Evaluations alone are given apart, since their interval is a
setting. Of the rest, *training* is all that happens between asking for a client's result and having
it (streams of random numbers, samples, the steps themselves), *server* what `Server.receive` does
(checks, the strategy's arithmetic, the next dispatch), *bookkeeping* everything else: clock and
queue, events, log, history, checkpoint.

`measure_crowd` is the same engine with very many registered clients, in a process of its own.
"""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch

from polytempo.core.rng import rng
from polytempo.core.task import Task
from polytempo.data import Federation
from polytempo.files import Appended
from polytempo.models import Inputs, build
from polytempo.simulation import Simulator
from polytempo.storage import save_state
from polytempo.strategies import STRATEGIES
from polytempo.training import make_executor
from polytempo.training.footprint import peak_memory

SPEEDS = ("fedasync", "fedbuff", "pace")
UPDATES = 2_000
CROWDS = ("fedasync", "fedbuff")
CROWD = (1_000_000, 10_000, 20_000)  # clients, concurrency, updates
STEPS = 8
SHARDS, TRAINED, TESTED = 1_000, 24, 8  # of a crowd: shards, and their samples
FEATURES, CLASSES = 32, 10


def measure_engine(
    strategy: str, *, updates: int = UPDATES, repeats: int = 5, clients: int = 20
) -> dict[str, Any]:
    """Microseconds of CPU per update: medians over runs, after one to warm up."""
    federation = Federation.load("synthetic", clients=clients)
    turns = []
    for _ in range(repeats + 1):
        simulator = _simulator(federation, strategy, eval_every=max(1, updates // 40))
        turns.append(_turn(simulator, updates))
    per_update = {name: median(turn[name] for turn in turns[1:]) for name in turns[0]}
    return {
        "strategy": strategy,
        "clients": clients,
        "concurrency": simulator.concurrency,
        "parameters": simulator.layout.size,
        "steps": STEPS,
        "backend": simulator.backend.name,
        "updates": updates,
        "repeats": repeats,
        **per_update,
        "updates_per_s": 1e6 / per_update["update_us"],
    }


def _turn(simulator: Simulator, updates: int) -> dict[str, float]:
    with TemporaryDirectory() as folder, Appended(Path(folder, "events.jsonl")) as log:
        simulator.loggers.append(log.add)

        def checkpoint() -> None:
            log.flush()
            save_state(Path(folder, "checkpoint.safetensors"), simulator.state_dict())

        spent = _cpu(lambda: simulator.run(updates, closing=checkpoint))
    found = {name: simulator.wall[name] for name in ("training", "server", "evaluation")}
    found["update"] = spent - found["evaluation"]
    found["bookkeeping"] = found["update"] - found["training"] - found["server"]
    return {f"{name}_us": 1e6 * seconds / updates for name, seconds in found.items()}


def measure_crowd(strategy: str, clients: int, concurrency: int, updates: int) -> dict[str, Any]:
    """Microseconds of CPU per update, without evaluations; CPU seconds until the first update is
    in; and how much memory all of it takes."""
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=spawn) as pool:
        return pool.submit(_measure_crowd, strategy, clients, concurrency, updates).result()


def _measure_crowd(strategy: str, clients: int, concurrency: int, updates: int) -> dict[str, Any]:
    torch.set_num_threads(1)
    empty, begin = peak_memory(), time.process_time()
    simulator = _simulator(crowd(clients), strategy, concurrency=concurrency, eval_every=10**9)
    simulator.run(1)
    started, evaluated = time.process_time() - begin, simulator.wall["evaluation"]
    spent = _cpu(lambda: simulator.run(1 + updates)) - simulator.wall["evaluation"] + evaluated
    return {
        "strategy": strategy,
        "clients": clients,
        "concurrency": concurrency,
        "parameters": simulator.layout.size,
        "steps": STEPS,
        "backend": simulator.backend.name,
        "updates": updates,
        "update_us": 1e6 * spent / updates,
        "updates_per_s": updates / spent,
        "start_s": started,
        "peak_mb": 1e-6 * (peak_memory() - empty),
    }


def crowd(clients: int) -> Federation:
    """Clients of 24 training samples. A thousand shards serve them all, so that memory is not the
    samples'; and the first thousand have test samples, so that an evaluation is not all of it."""
    stream, size = rng(0, "bench", "crowd"), TRAINED + TESTED
    shards = [slice(k * size, k * size + TRAINED) for k in range(SHARDS)]
    tests, none = [slice(shard.stop, shard.stop + TESTED) for shard in shards], slice(0, 0)
    x = stream.standard_normal((SHARDS * size, FEATURES), dtype=np.float32)
    return Federation(
        name="crowd",
        x=torch.from_numpy(x),
        y=torch.from_numpy(stream.integers(0, CLASSES, len(x))),
        train=tuple(shards[client % SHARDS] for client in range(clients)),
        test=tuple(tests[client] if client < SHARDS else none for client in range(clients)),
        outputs=CLASSES,
        groups=None,
        mean=None,
        std=None,
        vocabulary=None,
        description=f"a crowd of {clients} clients",
        partition={"name": "natural"},
    )


def _simulator(federation: Federation, strategy: str, **options: Any) -> Simulator:
    module = build("linear", Inputs(federation.shape, federation.outputs), 0)
    simulator = Simulator(
        federation,
        module,
        STRATEGIES.create(strategy),
        task=Task(steps=STEPS),
        adapt_epochs=0,
        backend=make_executor(module, federation, 0, name="serial"),
        **options,
    )
    simulator.clock = time.process_time
    return simulator


def _cpu(action: Callable[[], object]) -> float:
    begin = time.process_time()
    action()
    return time.process_time() - begin
