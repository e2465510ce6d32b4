"""SCAFFOLD, done again by hand: over cohorts and on arrival."""

import numpy as np
import pytest
import torch
from replay import COHORT, MOMENTUM, RATE, START, TASK, gradient, replayed, simulated

from polytempo import PolytempoError, Refused, Task, Update
from polytempo.core.messages import Staleness
from polytempo.core.optimizer import Sgd
from polytempo.core.strategy import Context
from polytempo.strategies import SCAFFOLD


@pytest.mark.parametrize("momentum", [0.0, MOMENTUM])
@pytest.mark.parametrize("asynchronous", [False, True], ids=["cohorts", "on arrival"])
def test_clients_correct_their_gradients(small, asynchronous, momentum):
    """c is the mean of all c_i at any time, as it must be; and each c_i by its definition."""
    task = Task(epochs=2, batch_size=8, lr=RATE, optimizer=Sgd(0.01, momentum))
    name = f"scaffold-async:buffer_size={COHORT}" if asynchronous else "scaffold"
    simulator, log = simulated(small, name, task=task)
    sent, control = {}, np.zeros_like(START)  # by dispatch: what c was

    def train(client, x):
        nonlocal control
        c, own = sent[client.stream[-1]], client.memory.get("c", np.zeros_like(x))
        y, speed, weight = x, np.zeros_like(x), 0.0
        batches = list(client.batches(task))
        for number, (xs, ys) in enumerate(batches):
            g = gradient(y, xs, ys) + 0.01 * y - own + c
            speed = momentum * speed + g
            y = y - RATE * speed
            # how often this gradient has acted by the end
            weight += sum(momentum**k for k in range(len(batches) - number))
        client.memory["c"] = own - c + (x - y) / (weight * RATE)
        control = control + (client.memory["c"] - own) / 8
        return y

    def sending(number):
        sent[number] = control

    w, clients = replayed(small, log, train, asynchronous, sending=sending)
    np.testing.assert_allclose(simulator.strategy.model_for(0).numpy(), w, rtol=1e-9, atol=1e-11)
    found = simulator.strategy.control.numpy()
    np.testing.assert_allclose(found, control, rtol=1e-8, atol=1e-11)
    assert np.abs(control).max() > 1e-3
    kept = [client.memory["c"] for client in clients if client.memory]
    np.testing.assert_allclose(found, np.sum(kept, axis=0) / 8, rtol=1e-7, atol=1e-11)


def test_both_travel_both_ways(small):
    plain, scaffold = (simulated(small, name)[0] for name in ("fedavg", "scaffold"))
    for kind in ("dispatch", "upload"):
        assert scaffold.bytes[kind] == 2 * plain.bytes[kind]
    assert scaffold.time == plain.time


def test_the_server_may_take_longer_steps(small):
    ends = [
        simulated(small, f"scaffold:server_lr={rate}", updates=COHORT)[0].strategy.model_for(0)
        for rate in (0.5, 1)
    ]
    half, whole = (end.numpy() - START for end in ends)
    np.testing.assert_allclose(whole, 2 * half, rtol=1e-9, atol=1e-12)


def test_a_variate_of_another_length_is_refused():
    strategy = SCAFFOLD()
    strategy.setup(Context(torch.zeros(5), [3, 4], TASK, seed=0))
    extras = {"variate": torch.zeros(1, 4)}
    with pytest.raises(Refused, match="client 1 sent a variate of 4 numbers, expected 5"):
        strategy.fold(Update(1, 0, torch.zeros(5), 4, extras), Staleness(0, 0))
    assert not strategy.samples


def test_momentum_that_is_kept_cannot_be_told_from_gradients():
    with pytest.raises(PolytempoError, match=r"^scaffold cannot tell momentum"):
        SCAFFOLD().setup(Context(torch.zeros(5), [3], Task(keep_optimizer=True), seed=0))
