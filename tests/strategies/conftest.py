"""Runs of methods whose clients upload gradients, to be done again in double precision."""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import pytest
import torch
from linear_model import gradient, schedule
from torch import nn

from polytempo.core.events import as_dict
from polytempo.simulation import Simulator
from polytempo.simulation.devices import TwoSpeed


class Arrival(NamedTuple):
    """An update: from whom, how many had come before its client was sent its model, and what is
    uploaded if that model was w (the sum of the gradients of the local steps)."""

    client: int
    sent: int
    upload: Callable[[np.ndarray], np.ndarray]


@pytest.fixture
def simulated(small):
    """Run a strategy on a linear model; who came when."""

    def run(strategy, task, updates=80, dtype=torch.float64, **options):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            module = nn.Linear(12, 4).to(dtype)
        given = {"adapt_epochs": 0, "eval_every": 10_000, "check": True} | options
        given.setdefault("devices", TwoSpeed(factor=5.0))
        simulator = Simulator(small, module, strategy, task=task, **given)
        log, arrivals, sent, came = [], [], {}, 0
        simulator.observers.append(lambda event: log.append(as_dict(event)))
        simulator.run(updates)
        for event in log:
            if event["event"] == "dispatch":
                sent[event["client"]] = came
            if event["event"] == "upload":
                client, number = event["client"], event["dispatch"]
                arrivals.append(Arrival(client, sent[client], uploads(client, number, strategy)))
                came += 1
        return simulator, arrivals

    def uploads(client, number, strategy):
        task = strategy.context.task
        x = small.prepare(small.x[small.train[client]]).double().numpy()
        y = small.y[small.train[client]].numpy()
        batches = schedule(strategy.task(client), ("client", client, "dispatch", number), len(y))
        parts = [(x[rows], y[rows]) for rows in batches]
        local = getattr(strategy, "local", "gradient")  # FedBuff has none
        plain = local == "gradient"
        assert len(parts) == strategy.local_steps or not plain
        momentum = 0.0 if plain else task.optimizer.momentum  # else whatever the task says

        def upload(w):
            theta, total, velocity = w.copy(), np.zeros_like(w), np.zeros_like(w)
            for part in parts:
                g = gradient(theta, *part) + task.optimizer.weight_decay * theta
                total += g
                velocity = momentum * velocity + g
                theta = theta - task.lr * velocity
            ways = {"mean": total / len(parts), "displacement": w - theta, "gradient": total}
            return ways[local]

        return upload

    return run
