"""Figures of a run, by hand."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from polytempo.core.errors import PolytempoError
from polytempo.core.metric import ACCURACY
from polytempo.simulation.metrics import convergence_time, final_value, over_clients, time_to
from polytempo.training import Problem, Score
from polytempo.training.problem import Classification, Metric, NextToken, Regression


def history(*values: float, metric: str = "accuracy") -> list[dict]:
    """Evaluations at times 0, 10, 20, ...; the first one is that of the untrained model."""
    return [{"time": 10.0 * i, "updates": 5 * i, metric: v} for i, v in enumerate(values)]


def score(correct: float, total: float, loss: float) -> Score:
    sums = {"correct": correct, "top5": total, "total": total, "loss": loss}
    return Score({key: float(value) for key, value in sums.items()})


def classified(scores: list[Score]) -> dict:
    return over_clients(scores, Classification())


# -- over clients ----------------------------------------------------------------------------------


def test_means_and_spread_by_hand():
    found = classified([score(1, 2, 3.0), score(3, 4, 1.0), score(10, 10, 0.5)])
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
    scores = [score(i, 100, 0.0) for i in range(clients)]
    order = np.random.default_rng(clients).permutation(clients)
    found = classified([scores[i] for i in order])
    assert found["accuracy_worst10"] == pytest.approx(expected)


def test_clients_without_test_samples_do_not_count():
    some = [score(1, 2, 3.0), score(3, 4, 1.0)]
    assert classified([some[0], score(0, 0, 0.0), some[1]]) == classified(some)


@settings(max_examples=50, deadline=None)
@given(
    st.lists(
        st.integers(1, 50).flatmap(lambda n: st.tuples(st.integers(0, n), st.just(n))),
        min_size=1,
        max_size=40,
    )
)
def test_figures_lie_where_they_must(pairs):
    found = classified([score(correct, total, 1.0) for correct, total in pairs])
    each = [correct / total for correct, total in pairs]
    eps = 1e-12
    assert min(each) - eps <= found["accuracy_worst10"] <= found["accuracy"] + eps
    assert found["accuracy"] <= max(each) + eps
    assert min(each) - eps <= found["accuracy_weighted"] <= max(each) + eps
    assert 0 <= found["accuracy_std"] <= 0.5 + eps


def squared(*errors: float, targets: tuple[float, ...] = (0.0, 2.0)) -> Score:
    """A client with these squared errors, one for each sample."""
    sums = {"total": len(errors), "loss": sum(errors), "squared": sum(errors), "absolute": 0}
    sums |= {"y.0": sum(targets), "y_squared": sum(y * y for y in targets)}
    return Score({key: float(value) for key, value in sums.items()})


def test_figures_bear_the_name_of_the_metric_and_the_worst_are_the_highest_if_lower_is_better():
    found = over_clients([squared(0.0, 1.0), squared(1.0, 3.0)], Regression())
    assert found["mse"] == pytest.approx((0.5 + 2.0) / 2)
    assert found["mse_weighted"] == pytest.approx(5 / 4) == found["loss"]
    assert found["mse_worst10"] == pytest.approx(2.0)
    assert "accuracy" not in found
    # each client's targets have a sum of squares of 2 around their mean, both together of 4
    assert found["r2"] == pytest.approx(((1 - 1 / 2) + (1 - 4 / 2)) / 2)
    assert found["r2_weighted"] == pytest.approx(1 - 5 / 4)


def test_what_is_not_defined_for_a_client_does_not_count():
    """R2 of a single sample is not a number."""
    one, more = squared(9.0, targets=(1.0,)), squared(0.0, 1.0)
    found = over_clients([one, more], Regression())
    assert found["r2"] == pytest.approx(1 - 1 / 2)
    assert found["mse"] == pytest.approx((9.0 + 0.5) / 2)
    alone = over_clients([one], Regression())
    assert alone["r2"] is None and alone["r2_weighted"] is None


class R2First(Regression):
    @property
    def metrics(self) -> tuple[Metric, ...]:
        mse, mae, r2 = super().metrics
        return r2, mse, mae


def test_a_metric_that_is_defined_for_nobody_is_an_error_that_says_so():
    one, more = squared(9.0, targets=(1.0,)), squared(0.0, 1.0)
    assert over_clients([one, more], R2First())["r2_worst10"] == pytest.approx(0.5)
    with pytest.raises(PolytempoError, match="r2 is not defined"):
        over_clients([one], R2First())


def test_perplexity_is_pooled_over_tokens_not_over_clients():
    clients = [
        Score({"total": 1.0, "loss": 3.0, "correct": 0.0}),
        Score({"total": 3.0, "loss": 3.0, "correct": 3.0}),
    ]
    found = over_clients(clients, NextToken())
    assert found["perplexity"] == pytest.approx((np.exp(3) + np.exp(1)) / 2)
    assert found["perplexity_weighted"] == pytest.approx(np.exp(6 / 4))
    assert (found["accuracy"], found["accuracy_weighted"]) == (0.5, 0.75)


def test_a_loss_that_is_the_metric_is_a_mean_over_clients():
    scores = [Score({"total": 1.0, "loss": 3.0}), Score({"total": 3.0, "loss": 3.0})]
    found = over_clients(scores, Problem.of(abs))
    assert (found["loss"], found["loss_weighted"]) == (2.0, 1.5)


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
def test_the_final_value_is_the_mean_of_the_last_three_trained(accuracies, expected):
    assert final_value(history(*accuracies), "accuracy") == (
        None if expected is None else pytest.approx(expected)
    )


@pytest.mark.parametrize(
    ("target", "expected"),
    [(0.0, 0.0), (0.1, 0.0), (0.3, 10.0), (0.5, 10.0), (0.51, 30.0), (0.9, 30.0), (0.91, None)],
)
def test_time_to_target_is_the_first_evaluation_that_reaches_it(target, expected):
    assert time_to(history(0.1, 0.5, 0.4, 0.9, 0.2), ACCURACY, target) == expected


@pytest.mark.parametrize(
    ("target", "expected"), [(9.0, 0.0), (8.0, 0.0), (7.9, 10.0), (3.0, 20.0), (1.9, None)]
)
def test_time_to_target_is_the_first_to_get_as_low_if_lower_is_better(target, expected):
    mse = Regression().metrics[0]
    assert time_to(history(8.0, 4.0, 2.0, 5.0, metric="mse"), mse, target) == expected


def test_the_tolerance_of_convergence_is_relative_unless_the_metric_is_a_share():
    """1% of 500 is 5: an error that falls by 4 has arrived, one that falls by 6 has not."""
    mse = Regression().metrics[0]
    near = history(504.0, 504.0, 504.0, 500.0, 500.0, 500.0, metric="mse")
    assert convergence_time(near, mse) == 0.0
    # smoothed: 506, 506, 506, 504, 502, 500
    far = history(506.0, 506.0, 506.0, 500.0, 500.0, 500.0, metric="mse")
    assert convergence_time(far, mse) == 30.0


def test_time_to_target_of_an_empty_history_is_none():
    assert time_to([], ACCURACY, 0.5) is None


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
    assert convergence_time(history(*accuracies), ACCURACY) == expected


@pytest.mark.parametrize("accuracies", [(), (0.1,), (0.5, 0.5, 0.5)])
def test_convergence_needs_more_evaluations_than_the_window(accuracies):
    assert convergence_time(history(*accuracies), ACCURACY) is None


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 100), min_size=4, max_size=12))
def test_from_convergence_on_the_smoothed_accuracy_stays_near_its_end(percent):
    rows = history(*[p / 100 for p in percent])
    found = convergence_time(rows, ACCURACY)
    smooth = [np.mean(percent[max(0, i - 2) : i + 1]) / 100 for i in range(len(percent))]
    off = [abs(value - smooth[-1]) for value in smooth]
    index = next(i for i, row in enumerate(rows) if row["time"] == found)
    assert all(distance <= 0.01 + 1e-9 for distance in off[index:])
    assert index == 0 or off[index - 1] > 0.01 - 1e-9
