"""FedSGD is SGD on the cohort's mini-batches taken together."""

import numpy as np
import pytest
import torch
from linear_model import gradient, schedule
from torch import nn

from polytempo import PolytempoError, Task
from polytempo.core.events import as_dict
from polytempo.core.optimizer import Sgd
from polytempo.core.schedule import Steps
from polytempo.simulation import Simulator
from polytempo.simulation.devices import TwoSpeed
from polytempo.strategies import STRATEGIES, FedAvg, FedSGD


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_it_is_sgd_with_momentum_by_the_mean_gradient(small, momentum):
    task = Task(batch_size=8, lr=0.1, optimizer=Sgd(momentum=momentum, weight_decay=0.01))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        module = nn.Linear(12, 4).double()
    strategy, decay = FedSGD(), Steps((9, 15), gamma=0.5)
    options = {"task": task, "concurrency": 3, "devices": TwoSpeed(), "adapt_epochs": 0}
    simulator = Simulator(small, module, strategy, schedule=decay, check=True, **options)
    log: list[dict] = []
    simulator.observers.append(lambda event: log.append(as_dict(event)))
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


@pytest.mark.parametrize("name", ["fedavg", "fedprox", "fedsgd"])
@pytest.mark.parametrize("option", ["milestones=[3,5]", "gamma=0.5"])
def test_options_that_became_a_setting_name_it(name, option):
    with pytest.raises(
        PolytempoError, match=f"{name} no longer has the option '{option[:5]}.*--lr-schedule"
    ):
        STRATEGIES.create(f"{name}:{option}")


def test_options_that_became_a_setting_name_it_in_python_too():
    with pytest.raises(PolytempoError, match=r"lr_schedule in TOML and Python"):
        FedAvg(milestones=(3, 5))


@pytest.mark.parametrize("name", ["fedavg", "fedasync", "pace:omega=5"])
@pytest.mark.parametrize("budget", [7, 17, 40])
def test_a_budget_of_messages_is_spent_to_the_last(small, name, budget):
    module = nn.Sequential(nn.Flatten(), nn.Linear(12, 4))
    task = Task(epochs=1, batch_size=8)
    options = {"task": task, "adapt_epochs": 0, "concurrency": 4, "check": True}
    simulator = Simulator(small, module, STRATEGIES.create(name), **options)
    assert simulator.run(1000, messages=budget) is True
    assert simulator.sent == budget == sum(simulator.messages.values())
    assert simulator.history[-1]["messages"] == budget
