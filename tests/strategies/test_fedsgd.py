"""FedSGD is SGD on the cohort's mini-batches taken together."""

import numpy as np
import pytest
import torch
from linear_model import gradient, schedule
from torch import nn

from polytempo import Task
from polytempo.core.optimizer import Sgd
from polytempo.simulation import Simulator
from polytempo.simulation.devices import TwoSpeed
from polytempo.strategies import STRATEGIES, FedAvg, FedSGD


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_it_is_sgd_with_momentum_by_the_mean_gradient(small, momentum):
    task = Task(batch_size=8, lr=0.1, optimizer=Sgd(momentum=momentum, weight_decay=0.01))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        module = nn.Linear(12, 4).double()
    strategy = FedSGD(milestones=(3, 5), gamma=0.5)
    options = {"task": task, "slots": 3, "devices": TwoSpeed(), "adapt_epochs": 0}
    simulator = Simulator(small, module, strategy, check=True, **options)
    log: list[dict] = []
    simulator.observers.append(log.append)
    simulator.run(18)
    w = simulator.context.initial.numpy().copy()
    velocity = np.zeros_like(w)
    uploads = [event for event in log if event["event"] == "upload"]
    for step in range(6):
        total, samples = np.zeros_like(w), 0
        for event in uploads[3 * step : 3 * step + 3]:
            client = event["client"]
            x = small.x[small.train[client]].double().numpy()
            y = small.y[small.train[client]].numpy()
            stream = ("client", client, "dispatch", event["dispatch"])
            [chosen] = schedule(strategy.task(client), stream, len(y))
            total += len(y) * (gradient(w, x[chosen], y[chosen]) + 0.01 * w)
            samples += len(y)
        velocity = momentum * velocity + total / samples
        w = w - [0.1, 0.1, 0.1, 0.05, 0.05, 0.025][step] * velocity
    np.testing.assert_allclose(strategy.model_for(0).numpy(), w, rtol=1e-9, atol=1e-12)
    assert simulator.version == 6


def test_milestones_lower_the_clients_rate():
    rates = []
    strategy = STRATEGIES.create("fedavg:milestones=[1,3],gamma=0.5")
    assert isinstance(strategy, FedAvg)
    strategy.context = type("Context", (), {"task": Task(lr=0.8)})
    for changes in range(5):
        strategy.changes = changes
        rates.append(strategy.task(0).lr)
    assert rates == [0.8, 0.4, 0.4, 0.2, 0.2]


@pytest.mark.parametrize("name", ["fedavg", "fedasync", "pace:omega=5"])
@pytest.mark.parametrize("budget", [7, 17, 40])
def test_a_budget_of_messages_is_spent_to_the_last(small, name, budget):
    module = nn.Sequential(nn.Flatten(), nn.Linear(12, 4))
    task = Task(epochs=1, batch_size=8)
    options = {"task": task, "adapt_epochs": 0, "slots": 4, "check": True}
    simulator = Simulator(small, module, STRATEGIES.create(name), **options)
    assert simulator.run(1000, messages=budget) is True
    assert simulator.sent == budget == sum(simulator.messages.values())
    assert simulator.history[-1]["messages"] == budget
