"""A run of a personalised method, done again in numpy: a small network by hand, and who came when.

The network is 12 - 5 - 4 with a rectifier; its vector is [W1, b1, W2, b2], the last two its head.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import torch
from linear_model import schedule
from torch import nn

from polytempo import Federation, Task
from polytempo.core.events import as_dict
from polytempo.core.layout import ALL_SHARED, Parts
from polytempo.core.optimizer import Sgd
from polytempo.simulation import Simulator
from polytempo.simulation.devices import TwoSpeed
from polytempo.strategies import STRATEGIES
from polytempo.training import make_executor

BODY, SIZE = 12 * 5 + 5, 12 * 5 + 5 + 5 * 4 + 4
HEAD = np.arange(SIZE) >= BODY
RATE, MOMENTUM, DECAY = 0.05, 0.9, 0.01
TASK = Task(epochs=2, batch_size=8, lr=RATE, optimizer=Sgd(DECAY, MOMENTUM))
COHORT = 3


def module() -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(12, 5), nn.ReLU(), nn.Linear(5, 4)).double()


START = nn.utils.parameters_to_vector(module().parameters()).detach().numpy()


def gradient(theta, x, y, offset=0.0):
    """Of the mean cross-entropy, with this added to the outputs."""
    w1, b1, w2, b2 = np.split(theta, [60, 65, 85])
    w1, w2 = w1.reshape(5, 12), w2.reshape(4, 5)
    inner = x @ w1.T + b1
    z = np.maximum(inner, 0)
    scores = z @ w2.T + b2 + offset
    p = np.exp(scores - scores.max(1, keepdims=True))
    p /= p.sum(1, keepdims=True)
    p[np.arange(len(y)), y] -= 1
    p /= len(y)
    back = (p @ w2) * (inner > 0)
    return np.concatenate([(back.T @ x).ravel(), back.sum(0), (p.T @ z).ravel(), p.sum(0)])


@dataclass
class Client:
    """A client's samples, what it remembers, and the stream of the training under way."""

    x: np.ndarray
    y: np.ndarray
    memory: dict = field(default_factory=dict)
    stream: tuple = ()

    def batches(self, task=TASK, *name):
        for rows in schedule(task, (*self.stream, *name), len(self.y)):
            yield self.x[rows], self.y[rows]

    def sgd(self, theta, batches, *, rate=RATE, pull=None, moving=None, offset=0.0, more=None):
        """Steps of SGD with momentum from theta: `pull` is (lam, anchor), `moving` says which
        numbers do, `more` is added to every gradient."""
        theta, speed = theta.copy(), np.zeros_like(theta)
        for x, y in batches:
            g = gradient(theta, x, y, offset) + DECAY * theta
            if pull is not None:
                g += pull[0] * (theta - pull[1])
            if more is not None:
                g += more
            if moving is not None:
                g = np.where(moving, g, 0.0)
            speed = MOMENTUM * speed + g
            theta = theta - rate * speed
        return theta


def simulated(small: Federation, spec: str, personal=(), updates=24, task=TASK, **options):
    """The run, and its events."""
    parts = Parts(list(personal)) if personal else ALL_SHARED
    backend = make_executor(module(), small, 0, parts, solver="torch", name="serial")
    given = {"concurrency": COHORT, "adapt_epochs": 0, "eval_every": 1000, "check": True} | options
    simulator = Simulator(
        small,
        backend.solver.layout.module,
        STRATEGIES.create(spec),
        task=task,
        devices=TwoSpeed(factor=5.0),
        backend=backend,
        **given,
    )
    log = []
    simulator.observers.append(lambda event: log.append(as_dict(event)))
    simulator.run(updates)
    return simulator, log


def replayed(
    small: Federation,
    log,
    train: Callable[[Client, np.ndarray], np.ndarray],
    asynchronous: bool,
    start: np.ndarray = START,
    sending: Callable[[int], None] = lambda number: None,
):
    """The global model and the clients after the same events: `train` makes, of a client and the
    model that it was sent, the one that it uploads. Folded as in FedAvg, or in FedBuff. `sending`
    is told of each dispatch."""
    clients = [
        Client(small.x[rows].double().numpy(), small.y[rows].numpy()) for rows in small.train
    ]
    w, total, weight, version, count, sent = start, 0.0, 0.0, 0, 0, {}
    for event in log:
        if event["event"] == "dispatch":
            sent[event["client"]] = w, version
            sending(event["dispatch"])
        if event["event"] != "upload":
            continue
        client = clients[event["client"]]
        client.stream = ("client", event["client"], "dispatch", event["dispatch"])
        received, then = sent[event["client"]]
        theta = train(client, received)
        if asynchronous:
            total = total + (1 + version - then) ** -0.5 * (theta - received)
            weight += 1
        else:
            total, weight = total + len(client.y) * theta, weight + len(client.y)
        count += 1
        if count % COHORT == 0:
            w = w + total / weight if asynchronous else total / weight
            total, weight, version = 0.0, 0.0, version + 1
    return w, clients
