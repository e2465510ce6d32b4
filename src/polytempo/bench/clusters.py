"""CASA's server step as the number of clients grows, at its most expensive."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import median
from typing import Any

import numpy as np
import torch

from polytempo.bench.machine import seconds
from polytempo.core.messages import Dispatch, Staleness, Update
from polytempo.core.rng import rng
from polytempo.core.strategy import Context
from polytempo.core.task import Task
from polytempo.strategies import CASA
from polytempo.strategies.splitting import spectrum

CLIENTS = (100, 400, 1_600)
PARAMETERS = (10_000, 62_006)


def measure_clusters(clients: int, parameters: int, *, repeats: int = 15) -> dict[str, Any]:
    """Fold updates into one large cluster. All pairs are known and no two groups stand out, so that
    its spectrum is looked at on every arrival and it is never split; the buffers are full, so that
    one model has to go each time. In turns with it: the spectrum in full, which every one of these
    arrivals would take if it were not clear without it."""
    torch.manual_seed(0)
    strategy = CASA()
    strategy.setup(Context(torch.zeros(parameters), [100] * clients, Task(), 0))
    alike = rng(0, "bench", "clusters").uniform(0.3, 0.7, (clients, clients))
    strategy.alike = (alike + alike.T) / 2
    np.fill_diagonal(strategy.alike, 1.0)
    everybody, alphas = np.arange(clients), np.full(clients, 0.3)

    def send(client: int) -> None:
        strategy.dispatched(Dispatch(client, 0, strategy.model_for(client), strategy.task(client)))

    for client in range(clients):
        send(client)
        model = torch.randn(parameters) + 1
        strategy.buffer.offer(client, model, everybody, strategy.alike, alphas)

    def fold(client: int) -> float:
        send(client)
        update = Update(client, 0, strategy.model_for(client) + torch.randn(parameters) + 1, 100)
        return seconds(lambda: strategy.fold(update, Staleness(0, 0)))

    fold(0)
    turns = [
        (fold(7 * k % clients), seconds(lambda: spectrum(strategy.alike)))
        for k in range(1, repeats + 1)
    ]
    assert strategy.clusters().max() == 0  # else what is measured has become cheaper
    return {
        "clients": clients,
        "parameters": parameters,
        "fold_ms": 1e3 * median(step for step, _ in turns),
        "spectrum_ms": 1e3 * median(full for _, full in turns),
    }


def growth(rows: Sequence[dict[str, Any]]) -> float:
    """The exponent of the number of clients with which the step grows, from the first of these
    sizes to the last."""
    first, last = rows[0], rows[-1]
    ratio = math.log(last["clients"] / first["clients"])
    return math.log(last["fold_ms"] / first["fold_ms"]) / ratio
