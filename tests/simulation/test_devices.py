"""How long things take in the simulated world."""

import numpy as np
import pytest
from scipy.stats import chisquare, kstest

from polytempo.core.errors import PolytempoError
from polytempo.core.rng import rng
from polytempo.data import Federation
from polytempo.simulation.devices import DEVICES, NETWORKS


def seconds(devices, factor, work, draws=1, name="test") -> np.ndarray:
    return np.array([devices.seconds(factor, work, rng(i, name)) for i in range(draws)])


# -- devices ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "factor"), [("two-speed", 5.0), ("severe", 10.0)])
@pytest.mark.parametrize(
    ("clients", "slow"), [(100, 30), (10, 3), (8, 2), (7, 2), (3, 1), (1, 0), (12, 4)]
)
def test_thirty_percent_are_slow(name, factor, clients, slow):
    factors = DEVICES.create(name).factors(clients, seed=0)
    assert sorted(factors) == [1.0] * (clients - slow) + [factor] * slow


def test_the_slow_ones_are_chosen_at_random_not_by_their_number():
    devices, runs, clients = DEVICES.create("two-speed"), 400, 10
    counts = sum(np.array(devices.factors(clients, seed)) > 1 for seed in range(runs))
    # three of ten without replacement: the statistic is (n - 1) / (n - k) too small
    assert chisquare(counts).statistic * 9 / 7 < 27.9  # 9 degrees of freedom, p = 0.001
    lowest = [1] * 3 + [0] * 7
    chosen = {tuple(np.array(devices.factors(clients, seed)) > 1) for seed in range(50)}
    assert len(chosen) > 30 and sum(c == tuple(map(bool, lowest)) for c in chosen) <= 1


def test_factors_depend_on_the_seed_alone():
    for name in ("two-speed", "uniform", "boards"):
        devices = DEVICES.create(name)
        assert devices.factors(50, 4) == devices.factors(50, 4)
        assert devices.factors(50, 4) != devices.factors(50, 5)


def test_share_and_factor_of_the_slow_are_options():
    factors = DEVICES.create("two-speed:slow=0.5,factor=3").factors(20, 0)
    assert sorted(factors) == [1.0] * 10 + [3.0] * 10
    assert DEVICES.create("two-speed:slow=0").factors(20, 0) == [1.0] * 20
    assert DEVICES.create("two-speed:slow=1").factors(20, 0) == [5.0] * 20


def test_equal_devices_are_equal():
    assert DEVICES.create("equal").factors(5, 0) == [1.0] * 5


def test_uniform_factors_fill_one_to_five():
    factors = np.array(DEVICES.create("uniform").factors(2000, 0))
    assert kstest(factors, "uniform", (1, 4)).pvalue > 1e-3
    narrow = DEVICES.create("uniform:low=2,high=2.5").factors(100, 0)
    assert min(narrow) >= 2 and max(narrow) <= 2.5


@pytest.mark.parametrize("registry", [DEVICES, NETWORKS], ids=["devices", "network"])
def test_bounds_in_the_wrong_order_are_an_error_of_the_users(registry):
    with pytest.raises(PolytempoError, match="low"):
        made = registry.create("uniform:low=5,high=1")
        made.factors(3, 0) if registry is DEVICES else made.bandwidths(3, 0)


def test_boards_are_the_three_that_casa_measured_in_equal_parts():
    factors = DEVICES.create("boards").factors(3000, 0)
    values, counts = np.unique(factors, return_counts=True)
    assert values.tolist() == [1.0, 1.8125, 11.625]
    assert chisquare(counts).pvalue > 1e-3


@pytest.mark.parametrize("name", ["equal", "two-speed", "severe", "uniform", "boards"])
def test_training_time_is_proportional_to_work_and_factor(name):
    devices = DEVICES.create(name)
    one = devices.seconds(1.0, 250, rng(0, "x"))
    assert devices.seconds(1.0, 500, rng(0, "x")) == pytest.approx(2 * one)
    assert devices.seconds(5.0, 250, rng(0, "x")) == pytest.approx(5 * one)
    assert devices.seconds(11.625, 1000, rng(0, "x")) == pytest.approx(46.5 * one)


def test_without_jitter_time_is_work_times_unit_times_factor():
    devices = DEVICES.create("two-speed:unit=0.01,jitter=0")
    assert seconds(devices, 5.0, 300, draws=3) == pytest.approx([15.0] * 3)


def test_jitter_is_uniform_up_to_its_bound():
    found = seconds(DEVICES.create("equal:unit=0.01,jitter=0.5"), 1.0, 100, draws=2000)
    assert found.min() >= 1.0 and found.max() <= 1.5
    assert kstest(found, "uniform", (1.0, 0.5)).pvalue > 1e-3
    default = seconds(DEVICES.create("equal"), 1.0, 1000, draws=300)
    assert 1.0 <= default.min() < 1.01 and 1.09 < default.max() <= 1.1


def test_exponential_times_have_their_mean_whatever_the_work():
    devices = DEVICES.create("exponential:beta=2")
    found = seconds(devices, 1.0, 100, draws=3000)
    assert kstest(found, "expon", (0, 2)).pvalue > 1e-3
    assert found.mean() == pytest.approx(2, abs=4 * 2 / np.sqrt(3000))
    assert np.array_equal(seconds(devices, 9.0, 1, draws=3000), found)
    assert devices.factors(3, 0) == [1.0] * 3


@pytest.mark.parametrize(
    "wrong",
    [
        "two-speed:slow=1.5",
        "two-speed:slow=-0.1",
        "two-speed:factor=0",
        "equal:unit=0",
        "equal:jitter=-1",
        "exponential:beta=0",
        "uniform:low=0",
    ],
)
def test_impossible_worlds_are_refused(wrong):
    with pytest.raises(PolytempoError, match=wrong.split(":")[1].split("=")[0]):
        DEVICES.create(wrong)


# -- networks --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "low", "high"),
    [("wifi", 150, 600), ("4g", 20, 100), ("5g", 50, 1000), ("uniform:low=3,high=8", 3, 8)],
)
def test_bandwidths_fill_their_range_in_bytes_per_second(name, low, high):
    found = np.array(NETWORKS.create(name).bandwidths(1500, 2))
    mbit = found * 8 / 1e6
    assert low <= mbit.min() and mbit.max() <= high
    assert kstest(mbit, "uniform", (low, high - low)).pvalue > 1e-3


def test_a_megabyte_takes_as_long_as_it_should():
    [bandwidth] = NETWORKS.create("uniform:low=80,high=80").bandwidths(1, 0)
    assert 1_000_000 / bandwidth == pytest.approx(0.1)  # 8 Mbit at 80 Mbit/s


def test_instant_messages_take_no_time():
    assert [1e9 / b for b in NETWORKS.create("instant").bandwidths(3, 0)] == [0.0] * 3


def test_bandwidths_depend_on_the_seed_alone_and_not_on_the_devices():
    wifi = NETWORKS.create("wifi")
    assert wifi.bandwidths(20, 1) == wifi.bandwidths(20, 1)
    assert wifi.bandwidths(20, 1) != wifi.bandwidths(20, 2)
    speeds = DEVICES.create("uniform").factors(300, 1)
    assert abs(np.corrcoef(wifi.bandwidths(300, 1), speeds)[0, 1]) < 4 / np.sqrt(300)


def test_mixed_exponential_times_have_two_means():
    devices = DEVICES.create("mixed-exponential:slow=0.2,fast=0.5,beta=5")
    factors = np.array(devices.factors(100, 0))
    assert sorted(np.unique(factors)) == [1, 10] and (factors > 1).sum() == 20
    stream = rng(0, "test")
    for factor, mean in ((1, 0.5), (10, 5)):
        drawn = [devices.seconds(factor, 1000, stream) for _ in range(4000)]
        assert np.mean(drawn) == pytest.approx(mean, rel=0.1)


@pytest.mark.parametrize("name", ["two-speed:slow=0.5,factor=4", "mixed-exponential:slow=0.5"])
def test_slow_devices_may_be_chosen_by_their_labels(name):
    federation = Federation.load("digits", clients=10, partition="pathological:labels=1")
    commonest = federation.label_counts().argmax(axis=1)
    slow = np.array(DEVICES.create(f"{name},by_label=true").factors_among(federation, 0)) > 1
    assert slow.sum() == 5 and commonest[slow].min() >= commonest[~slow].max()
    drawn = DEVICES.create(name)
    assert drawn.factors_among(federation, 0) == drawn.factors(10, 0)
