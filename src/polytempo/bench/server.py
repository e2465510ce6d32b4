"""PACE's server step, in milliseconds and as a multiple of reading all models once."""

from __future__ import annotations

from statistics import median
from typing import Any

import torch

from polytempo.bench.machine import reading, seconds
from polytempo.core.messages import Staleness, Update
from polytempo.core.strategy import Context
from polytempo.core.task import Task
from polytempo.strategies import PACE

SIZES = ((100, 62_006), (1_000, 62_006), (100, 1_000_000), (1_000, 1_000_000))


def measure_server(clients: int, parameters: int, *, repeats: int = 15) -> dict[str, Any]:
    """Fold updates of clients in a few groups, after everybody has uploaded once."""
    torch.manual_seed(0)
    strategy = PACE()
    strategy.setup(Context(torch.zeros(parameters), [100] * clients, Task(), 0))
    groups = torch.randn(10, parameters)

    def fold(number: int) -> float:
        client = number % clients
        vector = groups[client % 10] + torch.randn(parameters)
        update = Update(client, number, vector, 100)
        return seconds(lambda: strategy.fold(update, Staleness(9, 9)))

    for client in range(clients):
        fold(client)
    turns = [(fold(7 * k), reading(clients * parameters)) for k in range(repeats)]
    touched = float((strategy.collaboration() > 0).mean())
    return {
        "clients": clients,
        "parameters": parameters,
        "touched": touched,
        "fold_ms": 1e3 * median(step for step, _ in turns),
        "read_ms": 1e3 * median(read for _, read in turns),
        "multiple": median(step / read for step, read in turns),
    }
