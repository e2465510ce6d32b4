"""Noise on uploads, and what it is said to be worth."""

import math

import numpy as np
import pytest
import torch
from scipy.optimize import brentq
from scipy.special import log_ndtr

from polytempo import Context, PolytempoError, Server, Task, simulate
from polytempo.core.compression import Int8
from polytempo.core.privacy import Gaussian
from polytempo.core.rng import rng
from polytempo.simulation.guards import epsilon, spent
from polytempo.strategies import STRATEGIES


class Leaving:
    """What a step sees of a client whose upload leaves."""

    def __init__(self, size=8, seed=0):
        self.received, self.memory, self.extras, self.seed = torch.zeros(size), {}, {}, seed

    def stream(self, name):
        return rng(self.seed, name)


@pytest.mark.parametrize(("clip", "length"), [(2.0, 5.0), (5.0, 5.0), (7.0, 5.0)])
def test_what_is_too_long_is_cut_to_length(clip, length):
    moved = torch.tensor([3.0, 0.0, -4.0])
    left = Gaussian(clip, noise=0).leaving(Leaving(3), moved)
    torch.testing.assert_close(left, moved * min(clip, length) / 5, rtol=1e-6, atol=0)


def test_the_noise_is_normal_and_as_wide_as_it_should_be():
    moved = torch.full((40_000,), 1.0)  # of length 200
    drawn = (Gaussian(2.0, 0.5).leaving(Leaving(40_000), moved) - moved / 100).double()
    assert float(drawn.mean()) == pytest.approx(0, abs=4 / 200)
    assert float(drawn.std()) == pytest.approx(1.0, rel=0.02)
    assert float((drawn.abs() < 1).double().mean()) == pytest.approx(math.erf(0.5**0.5), abs=0.01)
    again = Gaussian(2.0, 0.5).leaving(Leaving(40_000, seed=1), moved)
    assert abs(np.corrcoef(again, drawn)[0, 1]) < 0.03


def exactly(multiplier, uploads, delta):
    """Epsilon of that many Gaussian mechanisms, which are one with less noise (Balle and Wang 2018,
    theorem 8: delta as a function of epsilon)."""
    mu = math.sqrt(uploads) / multiplier

    def excess(found):
        first = math.exp(log_ndtr(mu / 2 - found / mu))
        second = math.exp(found + log_ndtr(-mu / 2 - found / mu))
        return first - second - delta

    return brentq(excess, 0, mu * mu / 2 + 10 * mu + 50)


@pytest.mark.parametrize("noise", [0.2, 0.8, 2.0, 10.0, 50.0])
@pytest.mark.parametrize("uploads", [1, 20])
def test_epsilon_is_that_of_the_gaussian_mechanism(noise, uploads):
    """Two uploads before the noise are 2 clip apart at most. The closed form of Rényi divergences,
    alpha / (2 sigma^2), converted at the best order (Canonne, Kamath and Steinke 2020); and never
    less than the exact epsilon."""
    found, sigma, delta = epsilon(Gaussian(3.0, noise, 1e-6), uploads), noise / 2, 1e-6
    orders = 1 + np.geomspace(1e-4, 1e4, 200_001)
    renyi = uploads * orders / (2 * sigma**2)
    converted = renyi + np.log1p(-1 / orders) - (np.log(delta) + np.log(orders)) / (orders - 1)
    assert found == pytest.approx(converted.min(), rel=5e-3)
    assert exactly(sigma, uploads, delta) <= found <= 1.4 * exactly(sigma, uploads, delta)


def test_figures_are_over_clients():
    mechanism = Gaussian(1.0, 4.0)
    figures, rows = spent(mechanism, [0, 1, 5])
    assert [row["uploads"] for row in rows] == [0, 1, 5]
    assert rows[0]["epsilon"] == 0
    assert figures["epsilon_max"] == rows[2]["epsilon"] > rows[1]["epsilon"]
    assert figures["epsilon_median"] == rows[1]["epsilon"]
    without, _ = spent(Gaussian(1.0, 0.0), [0, 3])
    assert without["epsilon_max"] is None  # clipping alone promises nothing


def server(name, *steps):
    context = Context(torch.zeros(10), [5] * 6, Task(), seed=0)
    return Server(STRATEGIES.create(name), context, steps=steps)


@pytest.mark.parametrize("name", ["fedsac", "ifca", "scaffold"])
def test_what_would_leave_without_noise_is_refused(name):
    with pytest.raises(PolytempoError, match="to which no noise is added"):
        server(name, Gaussian(1.0, 1.0))


def test_a_mask_of_the_received_model_tells_nothing():
    assert server("casa+", Gaussian(1.0, 1.0), Int8()).steps


def test_an_accountant_that_is_missing_is_missed_before_the_run(small, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(PolytempoError, match=r"polytempo\[privacy\]"):
        simulate(small, model="linear", updates=1, dp="clip=1,noise=1")
    simulate(small, model="linear", updates=1, dp="clip=1,noise=0", adapt_epochs=0)
