"""PACE's server step: by torch and by compiled code, on one thread and on two, in turns.

Each size in a process of its own, whose memory is measured. What everything is to be compared with
is the time that it takes to read all models once.
"""

from __future__ import annotations

import dataclasses
import multiprocessing
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from statistics import median
from typing import Any, Literal

import torch

from polytempo.bench.machine import reading, seconds
from polytempo.core.bank import Kernel, Storage, no_kernel
from polytempo.core.messages import Staleness, Update
from polytempo.core.strategy import Context
from polytempo.core.task import Task
from polytempo.native.sweep import compiled_sweep, on_threads
from polytempo.strategies import PACE
from polytempo.training.footprint import peak_memory

LINEAR = 7_850  # parameters of a linear model for digits of 28 x 28
SIZES = (  # clients, parameters, clients that have uploaded
    (100, 62_006, 100),
    (1_000, 62_006, 1_000),
    (100, 1_000_000, 100),
    (1_000, 1_000_000, 1_000),
    (10_000, LINEAR, 10_000),
    (100_000, LINEAR, 2_000),
)
BANKS: dict[str, Literal[8, 16, 32]] = {"memory": 32, "half": 16, "int8": 8}
WAYS: dict[str, Callable[[], Kernel | None]] = {"torch": no_kernel, "compiled": compiled_sweep}
THREADS = (1, 2)


def measure_server(
    clients: int, parameters: int, uploads: int, bank: str = "memory", *, repeats: int = 15
) -> dict[str, Any]:
    """Fold updates of clients in a few groups, after `uploads` of them have uploaded once."""
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=spawn) as pool:
        return pool.submit(_measure, clients, parameters, uploads, bank, repeats).result()


def _measure(
    clients: int, parameters: int, uploads: int, bank: str, repeats: int
) -> dict[str, Any]:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    empty = peak_memory()
    storage = Storage(BANKS[bank], kernel=compiled_sweep, spread=on_threads(max(THREADS)))
    strategy = PACE()
    strategy.setup(Context(torch.zeros(parameters), [100] * clients, Task(), 0, storage))
    groups, touched = torch.randn(10, parameters), list[float]()

    def fold(number: int) -> float:
        client = number % uploads
        vector = groups[client % 10] + torch.randn(parameters)
        update = Update(client, number, vector, 100)
        touched.append(float((strategy.rows.column(client) > 0).mean()))
        return seconds(lambda: strategy.fold(update, Staleness(9, 9)))

    for client in range(uploads):
        fold(client)
    peak = peak_memory() - empty
    touched.clear()
    found: dict[str, dict[str, list[float]]] = {
        way: {str(threads): [] for threads in THREADS} for way in WAYS
    }
    reads, count = [], 0
    for _ in range(repeats):
        for way, kernel in WAYS.items():
            for threads in THREADS:
                strategy.bank.storage = dataclasses.replace(
                    storage, kernel=kernel, spread=on_threads(threads)
                )
                found[way][str(threads)].append(fold(7 * count))
                count += 1
        reads.append(reading(uploads * parameters))
    return {
        "clients": clients,
        "parameters": parameters,
        "uploads": uploads,
        "bank": bank,
        "touched": median(touched),
        "read_ms": _median_ms(reads),
        **{
            f"{way}_ms": {threads: _median_ms(each) for threads, each in by_threads.items()}
            for way, by_threads in found.items()
        },
        "compiled": compiled_sweep() is not None,
        "peak_mb": 1e-6 * peak,
    }


def _median_ms(times: Sequence[float]) -> float:
    return 1e3 * median(times)
