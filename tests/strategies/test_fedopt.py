"""Adaptive optimizers at the server: by scalars, one coordinate at a time."""

import math

import numpy as np
import pytest
import torch

from polytempo import Context, Task, Update
from polytempo.core.messages import Staleness
from polytempo.strategies import STRATEGIES

INITIAL = [0.3, -1.0, 0.0, 2.0]
SAMPLES = [10, 30, 20]


def started(spec, tensors=()):
    strategy = STRATEGIES.create(spec)
    initial = torch.tensor(INITIAL, dtype=torch.float64)
    strategy.setup(Context(initial, SAMPLES, Task(), seed=0, tensors=tensors))
    return strategy


def displacements(number):
    """What the clients of that round have moved by."""
    return np.random.default_rng(number).normal(scale=0.1, size=(3, 4))


def after(strategy, updates):
    """The model when that many cohorts of all three clients have trained."""
    for number in range(updates):
        model = strategy.model_for(0)
        for client, moved in enumerate(displacements(number)):
            vector = model + torch.from_numpy(moved)
            strategy.fold(Update(client, 0, vector, SAMPLES[client]), Staleness(0, 0))
        strategy.close_cohort()
    return strategy.model_for(0).tolist()


SECOND = {
    "fedadam": lambda v, d: 0.95 * v + 0.05 * d * d,
    "fedyogi": lambda v, d: v - 0.05 * d * d if v > d * d else v + 0.05 * d * d,
    "fedadagrad": lambda v, d: v + d * d,
}


@pytest.mark.parametrize("name", SECOND)
def test_fedopt_by_its_definition(name):
    more = "" if name == "fedadagrad" else ",beta2=0.95"
    found = after(started(f"{name}:server_lr=0.05,beta1=0.8,tau=0.01{more}"), 6)
    for place, w in enumerate(INITIAL):
        m, v = 0.0, 0.01**2
        for number in range(6):
            moved = displacements(number)[:, place]
            d = (10 * moved[0] + 30 * moved[1] + 20 * moved[2]) / 60
            m = 0.8 * m + 0.2 * d
            v = SECOND[name](v, d)
            w += 0.05 * m / (math.sqrt(v) + 0.01)
        assert found[place] == pytest.approx(w, rel=1e-12)


def test_adagrad_has_no_momentum_unless_told_so():
    assert started("fedadagrad").beta1 == 0 and started("fedyogi").beta1 == 0.9


def test_statistics_are_averaged():
    """Two trained numbers; the other two are buffers."""
    found = after(started("fedadam", tensors=[2]), 3)
    expected = np.array(INITIAL) + sum(
        np.average(displacements(number), axis=0, weights=SAMPLES) for number in range(3)
    )
    assert found[2:] == pytest.approx(expected[2:].tolist())
    assert found[:2] != pytest.approx(expected[:2].tolist(), rel=1e-3)


@pytest.mark.parametrize("patience", [1, 4])
def test_fadas_by_its_definition(patience):
    strategy = started(f"fadas:buffer_size=2,server_lr=0.05,beta2=0.9,patience={patience}")
    draws = np.random.default_rng(3)
    moved, stale = draws.normal(scale=0.1, size=(12, 4)), [0, 1, 2, 3, 0, 0, 5, 1, 1, 1, 4, 0]
    moved[5:] *= 0.1  # v falls, its largest value stays
    for number, (vector, tau) in enumerate(zip(moved, stale, strict=True)):
        update = Update(0, number, torch.from_numpy(vector), 10)
        assert strategy.fold(update, Staleness(9, tau)) == bool(number % 2)
    for place, w in enumerate(INITIAL):
        m = v = largest = 0.0
        for pair in range(6):
            d = (moved[2 * pair, place] + moved[2 * pair + 1, place]) / 2
            tau = max(stale[2 * pair : 2 * pair + 2])
            m, v = 0.9 * m + 0.1 * d, 0.9 * v + 0.1 * d * d
            largest = max(largest, v)
            rate = 0.05 / tau if tau > patience else 0.05
            w += rate * m / (math.sqrt(largest) + 1e-8)
        assert strategy.model_for(0)[place].item() == pytest.approx(w, rel=1e-12)


def test_fadas_averages_statistics_too():
    strategy = started("fadas:buffer_size=1", tensors=[2])
    strategy.fold(Update(0, 0, torch.full((4,), 0.5, dtype=torch.float64), 10), Staleness(0, 0))
    assert strategy.model_for(0)[2:].tolist() == [0.5, 2.5]
    assert strategy.model_for(0)[0].item() == pytest.approx(0.3 + 0.01 * 0.05 / 0.05, rel=1e-4)
