"""Figures of a run, by hand."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from polytempo.simulation.metrics import convergence_time, final_accuracy, over_clients, time_to
from polytempo.training import Score


def history(*accuracies: float) -> list[dict]:
    """Evaluations at times 0, 10, 20, ...; the first one is that of the untrained model."""
    return [
        {"time": 10.0 * i, "round": 5 * i, "accuracy": accuracy}
        for i, accuracy in enumerate(accuracies)
    ]


# -- over clients ----------------------------------------------------------------------------------


def test_means_and_spread_by_hand():
    found = over_clients([Score(1, 2, 3.0), Score(3, 4, 1.0), Score(10, 10, 0.5)])
    assert found["accuracy"] == pytest.approx((0.5 + 0.75 + 1.0) / 3)
    assert found["accuracy_weighted"] == pytest.approx(14 / 16)
    # deviations -0.25, 0, 0.25
    assert found["accuracy_std"] == pytest.approx(np.sqrt(2 * 0.0625 / 3))
    assert found["loss"] == pytest.approx(4.5 / 16)
    assert all(type(value) is float for value in found.values())


@pytest.mark.parametrize(
    ("clients", "expected"),
    [
        (1, 0.00),  # the worst of one
        (9, 0.00),
        (10, 0.00),
        (19, 0.00),
        (20, 0.005),  # the mean of 0.00 and 0.01
        (30, 0.01),  # 0.00, 0.01, 0.02
        (100, 0.045),
    ],
)
def test_worst_tenth_is_the_mean_over_the_worst_clients(clients, expected):
    scores = [Score(i, 100, 0.0) for i in range(clients)]
    order = np.random.default_rng(clients).permutation(clients)
    found = over_clients([scores[i] for i in order])
    assert found["accuracy_worst10"] == pytest.approx(expected)


def test_clients_without_test_samples_do_not_count():
    some = [Score(1, 2, 3.0), Score(3, 4, 1.0)]
    assert over_clients([some[0], Score(0, 0, 0.0), some[1]]) == over_clients(some)


@settings(max_examples=50, deadline=None)
@given(
    st.lists(
        st.integers(1, 50).flatmap(lambda n: st.tuples(st.integers(0, n), st.just(n))),
        min_size=1,
        max_size=40,
    )
)
def test_figures_lie_where_they_must(pairs):
    found = over_clients([Score(correct, total, 1.0) for correct, total in pairs])
    each = [correct / total for correct, total in pairs]
    eps = 1e-12
    assert min(each) - eps <= found["accuracy_worst10"] <= found["accuracy"] + eps
    assert found["accuracy"] <= max(each) + eps
    assert min(each) - eps <= found["accuracy_weighted"] <= max(each) + eps
    assert 0 <= found["accuracy_std"] <= 0.5 + eps


# -- over time -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("accuracies", "expected"),
    [
        ((0.1, 0.2, 0.9, 0.6, 0.3), 0.6),  # the last three
        ((0.1, 0.4, 0.6), 0.5),  # the untrained model does not count
        ((0.1, 0.7), 0.7),
        ((0.1,), None),
        ((), None),
    ],
)
def test_final_accuracy_is_the_mean_of_the_last_three_trained(accuracies, expected):
    assert final_accuracy(history(*accuracies)) == (
        None if expected is None else pytest.approx(expected)
    )


@pytest.mark.parametrize(
    ("target", "expected"),
    [(0.0, 0.0), (0.1, 0.0), (0.3, 10.0), (0.5, 10.0), (0.51, 30.0), (0.9, 30.0), (0.91, None)],
)
def test_time_to_target_is_the_first_evaluation_that_reaches_it(target, expected):
    assert time_to(history(0.1, 0.5, 0.4, 0.9, 0.2), target) == expected


def test_time_to_target_of_an_empty_history_is_none():
    assert time_to([], 0.5) is None


@pytest.mark.parametrize(
    ("accuracies", "expected"),
    [
        # smoothed: 0, 0.25, 0.333, 0.5, 0.5, 0.5
        ((0.0, 0.5, 0.5, 0.5, 0.5, 0.5), 30.0),
        # smoothed: 0.5, 0.5, 0.5, 0.5: it was there from the beginning
        ((0.5, 0.5, 0.5, 0.5), 0.0),
        # smoothed: 0, 0.3, 0.4, 0.6, 0.6, 0.6, 0.4, 0.2, 0, 0, 0: it fell, and it is the end that
        # counts
        ((0.0, 0.6, 0.6, 0.6, 0.6, 0.6, 0.0, 0.0, 0.0, 0.0, 0.0), 80.0),
        # smoothed: 0, 0.1, 0.2, 0.4, 0.6: it was still rising when the run ended
        ((0.0, 0.2, 0.4, 0.6, 0.8), 40.0),
        # smoothed: 0.6, 0.6, 0.602, 0.604, 0.606, 0.606: within 0.01 throughout
        ((0.6, 0.6, 0.606, 0.606, 0.606, 0.606), 0.0),
        # smoothed: 0.6, 0.6, 0.604, 0.609, 0.613, 0.613: the first two are 0.013 off
        ((0.6, 0.6, 0.613, 0.613, 0.613, 0.613), 20.0),
        # one bad evaluation is smoothed: 0.5, 0.5, 0.5, 0.49, 0.49, 0.49, 0.5, 0.5
        ((0.5, 0.5, 0.5, 0.473, 0.5, 0.5, 0.5, 0.5), 0.0),
    ],
)
def test_convergence_time_by_hand(accuracies, expected):
    assert convergence_time(history(*accuracies)) == expected


@pytest.mark.parametrize("accuracies", [(), (0.1,), (0.5, 0.5, 0.5)])
def test_convergence_needs_more_evaluations_than_the_window(accuracies):
    assert convergence_time(history(*accuracies)) is None


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 100), min_size=4, max_size=12))
def test_from_convergence_on_the_smoothed_accuracy_stays_near_its_end(percent):
    rows = history(*[p / 100 for p in percent])
    found = convergence_time(rows)
    smooth = [np.mean(percent[max(0, i - 2) : i + 1]) / 100 for i in range(len(percent))]
    off = [abs(value - smooth[-1]) for value in smooth]
    index = next(i for i, row in enumerate(rows) if row["time"] == found)
    assert all(distance <= 0.01 + 1e-9 for distance in off[index:])
    assert index == 0 or off[index - 1] > 0.01 - 1e-9
