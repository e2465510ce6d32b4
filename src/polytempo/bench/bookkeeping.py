"""What the server spends per arrival, apart from training, as clients and concurrency grow.

A `Server` is driven directly with ready-made updates, by a strategy that does next to nothing
(FedAsync, a linear model), in a process of its own: what is left are the counters, the open
dispatches, the refill and the checks.
"""

from __future__ import annotations

import multiprocessing
import time
from concurrent.futures import ProcessPoolExecutor
from statistics import median
from typing import Any

import torch

from polytempo.core.messages import Dispatch, Update
from polytempo.core.rng import rng
from polytempo.core.server import Server
from polytempo.core.strategy import Context
from polytempo.core.task import Task
from polytempo.strategies import FedAsync
from polytempo.training.footprint import peak_memory

SIZES = (  # clients, concurrency, arrivals
    (20_000, 10, 20_000),
    (20_000, 1_000, 20_000),
    (20_000, 10_000, 20_000),
    (1_000_000, 10_000, 20_000),
)
PARAMETERS = 650  # a linear model for digits
CHUNK = 200  # arrivals that are timed together


def measure_bookkeeping(clients: int, concurrency: int, arrivals: int) -> dict[str, Any]:
    """Microseconds of CPU per arrival (median over chunks of arrivals), and the peak memory."""
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=spawn) as pool:
        return pool.submit(_measure, clients, concurrency, arrivals).result()


def _measure(clients: int, concurrency: int, arrivals: int) -> dict[str, Any]:
    torch.set_num_threads(1)
    empty = peak_memory()
    begin = time.process_time()
    context = Context(torch.zeros(PARAMETERS), [100] * clients, Task(), 0)
    server = Server(FedAsync(), context, concurrency=concurrency)
    flying = [action for action in server.join(range(clients)) if isinstance(action, Dispatch)]
    started = time.process_time() - begin
    vector, spent = torch.ones(PARAMETERS), []
    order = rng(0, "bench", "bookkeeping").integers(concurrency, size=arrivals).tolist()
    for first in range(0, arrivals, CHUNK):
        begin = time.process_time()
        for place in order[first : first + CHUNK]:
            sent = flying[place]
            [action] = server.receive(Update(sent.client, sent.number, vector, 100))
            assert isinstance(action, Dispatch)
            flying[place] = action
        spent.append((time.process_time() - begin) / len(order[first : first + CHUNK]))
    return {
        "clients": clients,
        "concurrency": concurrency,
        "arrivals": arrivals,
        "arrival_us": 1e6 * median(spent),
        "slowest_us": 1e6 * max(spent),
        "start_s": started,
        "peak_mb": 1e-6 * (peak_memory() - empty),
    }
