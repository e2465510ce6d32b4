"""CA2FL against its formula, and against what public code of it gets wrong."""

import numpy as np
import pytest
import torch

from polytempo import Context, Staleness, Task, Update
from polytempo.core.bank import Storage
from polytempo.core.optimizer import Sgd
from polytempo.storage import load_state, save_state
from polytempo.strategies import CA2FL

TASK = Task(batch_size=7, lr=0.03, optimizer=Sgd(momentum=0.9, weight_decay=0.01))


def ready(strategy, clients=4, storage=None) -> CA2FL:
    initial = torch.zeros(2, dtype=torch.float64)
    storage = storage or Storage()
    strategy.setup(Context(initial, [10] * clients, TASK, seed=0, storage=storage))
    return strategy


def fold(strategy, client, *values) -> bool:
    vector = torch.tensor(values, dtype=torch.float64)
    return strategy.fold(Update(client, 0, vector, 10), Staleness(99, 99))


def moved(strategy, *arrivals) -> list[float]:
    """How far the model moves when the buffer is filled with these."""
    before = strategy.model_for(0)
    changed = [fold(strategy, *arrival) for arrival in arrivals]
    assert changed == [False] * (len(arrivals) - 1) + [True]
    return (strategy.model_for(0) - before).tolist()


def by_the_formula(arrivals, initial, n, strategy):
    w, h, buffer = [initial], [np.zeros_like(initial) for _ in range(n)], []
    mean = np.mean(h, axis=0)
    for client, sent, upload in arrivals:
        g = upload(w[sent])
        buffer.append((client, g - h[client]))
        h[client] = g
        if len(buffer) < strategy.buffer_size:
            w.append(w[-1])
            continue
        share = len({c for c, _ in buffer}) if strategy.mean_over == "clients" else len(buffer)
        v = mean + sum(difference for _, difference in buffer) / share
        w.append(w[-1] - strategy.server_lr * v)
        mean, buffer = np.mean(h, axis=0), []
    return w


@pytest.mark.parametrize("mean_over", ["clients", "updates"])
@pytest.mark.parametrize("local_steps", [1, 3])
def test_a_run_is_its_formula(simulated, mean_over, local_steps):
    strategy = CA2FL(buffer_size=4, mean_over=mean_over, server_lr=0.3, local_steps=local_steps)
    simulator, arrivals = simulated(strategy, TASK, concurrency=4)
    senders = [a.client for a in arrivals]
    assert any(len(set(senders[k : k + 4])) < 4 for k in range(0, 80, 4))  # somebody comes twice
    w = by_the_formula(arrivals, simulator.server.context.initial.numpy(), 8, strategy)
    np.testing.assert_allclose(strategy.model_for(0).numpy(), w[-1], rtol=1e-9, atol=1e-12)
    assert simulator.server.version == 20


def test_the_mean_of_the_cache_is_that_of_before_the_buffer():
    strategy = ready(CA2FL(buffer_size=2, server_lr=1.0))
    assert moved(strategy, (0, 4.0, 0.0), (1, 8.0, 0.0)) == [-6.0, 0.0]  # 0 + (4 + 8) / 2
    # h = (4 + 8 + 0 + 0) / 4 = 3; then ((6 - 4) + (2 - 0)) / 2 = 2. With the h of after the buffer
    # it would be 4 + 2, and without differences the mean of the cache alone
    assert moved(strategy, (0, 6.0, 0.0), (2, 2.0, 0.0)) == [-5.0, 0.0]
    # h = (6 + 8 + 2 + 0) / 4 = 4; nobody has changed its mind: the step is h
    assert moved(strategy, (1, 8.0, 0.0), (2, 2.0, 0.0)) == [-4.0, 0.0]


@pytest.mark.parametrize(("mean_over", "expected"), [("clients", -7.0), ("updates", -14 / 3)])
def test_who_reports_twice_in_one_buffer_counts_once(mean_over, expected):
    strategy = ready(CA2FL(buffer_size=3, mean_over=mean_over, server_lr=1.0))
    # client 0: 4 - 0, then 6 - 4; client 1: 8 - 0; together 14, from two clients in three updates
    found = moved(strategy, (0, 4.0, 0.0), (1, 8.0, 0.0), (0, 6.0, 0.0))
    assert found == pytest.approx([expected, 0.0])
    # h = (6 + 8) / 4; who was in the last buffer is forgotten
    found = moved(strategy, (2, 0.0, 3.0), (3, 0.0, 3.0), (0, 6.0, 3.0))
    assert found == pytest.approx([-3.5, -3.0])


def test_who_is_in_the_buffer_survives_the_disk(tmp_path):
    strategy = ready(CA2FL(buffer_size=3, server_lr=1.0))
    fold(strategy, 0, 4.0, 0.0)
    fold(strategy, 1, 8.0, 0.0)
    save_state(tmp_path / "state", strategy.state_dict())
    again = ready(CA2FL(buffer_size=3, server_lr=1.0))
    again.load_state_dict(load_state(tmp_path / "state"))
    assert again.senders == [0, 1]
    assert moved(again, (0, 6.0, 0.0)) == [-7.0, 0.0]


def test_with_a_buffer_of_one_the_change_acts_in_full():
    strategy = ready(CA2FL(buffer_size=1, server_lr=1.0))
    assert moved(strategy, (0, 4.0, 0.0)) == [-4.0, 0.0]
    assert moved(strategy, (0, 8.0, 0.0)) == [-5.0, 0.0]  # 4 / 4 + (8 - 4), not ACE's 8 / 4


@pytest.mark.parametrize("bits", [8, 16])
def test_in_fewer_bits_h_stays_the_mean_of_what_is_kept(bits):
    strategy = ready(CA2FL(buffer_size=3, server_lr=1.0), storage=Storage(bits))
    stream = np.random.default_rng(0)
    for k in range(600):
        fold(strategy, k % 4, *stream.normal(size=2))
    rows = torch.stack([strategy.cache.row(client) for client in range(4)])
    torch.testing.assert_close(strategy.total, rows.sum(0), rtol=0, atol=1e-12)
