"""Asynchronous SGD, as it is and adapted to the delay, against its formulas."""

import numpy as np
import pytest
import torch

from polytempo import Context, Server, Staleness, Task, Update
from polytempo.core.optimizer import Sgd
from polytempo.simulation.dropout import Drop
from polytempo.strategies import DelayAdaptiveASGD, FedBuff, VanillaASGD

TASK = Task(batch_size=7, lr=0.03, optimizer=Sgd(momentum=0.9, weight_decay=0.01))


def moved(strategy, tau) -> float:
    """How far a gradient of 1 carries the model."""
    before = strategy.model_for(0)
    gradient = torch.ones(1, dtype=torch.float64)
    changed = strategy.fold(Update(0, 0, gradient, 10), Staleness(updates=tau, versions=77))
    found = float(strategy.model_for(0) - before)
    assert changed == (found != 0)
    return found


def ready(strategy):
    strategy.setup(Context(torch.zeros(1, dtype=torch.float64), [10] * 4, TASK, seed=0))
    return strategy


@pytest.mark.parametrize("local_steps", [1, 3])
def test_a_run_of_vanilla_asgd_is_its_formula(simulated, local_steps):
    strategy = VanillaASGD(server_lr=0.1, local_steps=local_steps)
    simulator, arrivals = simulated(strategy, TASK)
    w = [simulator.server.context.initial.numpy()]
    for arrival in arrivals:
        w.append(w[-1] - 0.1 * arrival.upload(w[arrival.sent]))
    np.testing.assert_allclose(strategy.model_for(0).numpy(), w[-1], rtol=1e-9, atol=1e-12)
    assert simulator.server.version == 80


@pytest.mark.parametrize("beyond", ["shrink", "drop"])
@pytest.mark.parametrize("threshold", [5.0, None])
@pytest.mark.parametrize("dropout", [None, Drop(probability=0.2)])
def test_a_run_of_delay_adaptive_asgd_is_its_formula(simulated, beyond, threshold, dropout):
    strategy = DelayAdaptiveASGD(server_lr=0.1, threshold=threshold, beyond=beyond)
    simulator, arrivals = simulated(strategy, TASK, dropout=dropout)
    w, late = [simulator.server.context.initial.numpy()], 0
    bound = threshold or 8  # all of the 8 clients, always
    for k, arrival in enumerate(arrivals):
        tau = k - arrival.sent
        late += tau > bound
        rate = 0.1 if tau <= bound else 0.1 * bound / tau * (beyond == "shrink")
        w.append(w[-1] - rate * arrival.upload(w[arrival.sent]))
    np.testing.assert_allclose(strategy.model_for(0).numpy(), w[-1], rtol=1e-9, atol=1e-12)
    assert late > 3
    assert simulator.server.version == 80 - late * (beyond == "drop")


def test_vanilla_asgd_is_fedbuff_with_a_buffer_of_one(simulated):
    task = Task(steps=3, batch_size=7, lr=0.03, optimizer=Sgd(momentum=0.0))
    vanilla = VanillaASGD(server_lr=0.03 * 0.5, local_steps=3)
    simulated(vanilla, task)
    fedbuff = FedBuff(buffer_size=1, server_lr=0.5, weighting="constant")
    fedbuff.local_steps = 3  # what the fixture asks for
    simulated(fedbuff, task, concurrency=8, refill="same")
    torch.testing.assert_close(vanilla.model_for(0), fedbuff.model_for(0), rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    ("tau", "step"),
    [(0, -1.0), (4, -1.0), (5, -0.8), (8, -0.5), (16, -0.25), (400, -0.01)],
)
def test_the_step_shrinks_beyond_the_threshold(tau, step):
    assert moved(ready(DelayAdaptiveASGD(server_lr=1.0, threshold=4)), tau) == pytest.approx(step)
    dropped = moved(ready(DelayAdaptiveASGD(server_lr=1.0, threshold=4, beyond="drop")), tau)
    assert dropped == (-1.0 if tau <= 4 else 0.0)
    assert moved(ready(VanillaASGD(server_lr=1.0)), tau) == -1.0


def test_the_threshold_follows_the_number_of_clients_in_training():
    strategy = DelayAdaptiveASGD(server_lr=1.0)
    server = Server(strategy, Context(torch.zeros(1), [10] * 6, TASK, seed=0))
    sent = {action.client: action.number for action in server.join(range(6))}

    def arrives(client):
        before = strategy.model_for(0)
        for action in server.receive(Update(client, sent[client], torch.ones(1), 10)):
            sent[action.client] = action.number
        return round(float(strategy.model_for(0) - before), 6)

    for _ in range(9):
        assert arrives(0) == -1.0
    assert strategy.concurrency == 6
    assert arrives(1) == round(-6 / 9, 6)  # nine have come since
    for gone in (2, 3):
        server.leave(gone)
    arrives(0)
    assert strategy.concurrency == 4
    assert arrives(4) == round(-4 / 11, 6)
    fixed = ready(DelayAdaptiveASGD(server_lr=1.0, threshold=2))
    fixed.concurrency = 50
    assert moved(fixed, 4) == -0.5
