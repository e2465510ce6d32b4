"""How a metric is written, and which of two values is the better one."""

import math

import pytest

from polytempo.core.errors import PolytempoError
from polytempo.core.metric import ACCURACY, MetricInfo
from polytempo.training.problem import Classification

MSE = MetricInfo("mse", "mean squared error", "lower", False)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.2143, "0.2143"),
        (0.21434, "0.2143"),
        (3.14159, "3.142"),
        (3141.59, "3,142"),
        (31415.9, "31,416"),
        (0.0, "0.000"),
        (-0.5, "-0.5000"),
        (0.000123456, "0.0001235"),
        (0.0000123456, "1.235e-05"),
        (1.5e260, "1.5e+260"),
        (math.inf, "inf"),
        (math.nan, "-"),
        (None, "-"),
    ],
)
def test_numbers_have_four_digits(value, text):
    assert MSE.text(value) == text


def test_a_spread_has_as_many_places_as_its_mean():
    assert MSE.text(0.2143, 0.02) == "0.2143 ± 0.0200"
    assert MSE.text(52.143, 1.2) == "52.14 ± 1.20"


def test_shares_are_in_per_cent():
    assert ACCURACY.text(0.9314) == "93.1%"
    assert ACCURACY.text(0.9314, 0.004) == "93.1 ± 0.4%"
    assert ACCURACY.text(0.0) == "0.0%"


def test_the_direction_decides_what_is_reached_best_and_worst():
    assert ACCURACY.reaches(0.8, 0.8) and not ACCURACY.reaches(0.79, 0.8)
    assert MSE.reaches(0.8, 0.8) and MSE.reaches(0.79, 0.8) and not MSE.reaches(0.81, 0.8)
    assert (ACCURACY.best([0.1, 0.3, 0.2]), ACCURACY.worst([0.1, 0.3, 0.2])) == (0.3, 0.1)
    assert (MSE.best([0.1, 0.3, 0.2]), MSE.worst([0.1, 0.3, 0.2])) == (0.1, 0.3)
    assert (ACCURACY.direction, MSE.direction) == ("higher is better", "lower is better")


def test_what_a_result_says_of_a_metric_is_the_metric_again():
    assert MetricInfo(**MSE.about) == MSE
    assert Classification().metrics[0].about == ACCURACY.about


@pytest.mark.parametrize("name", ["macro f1", "", "../f1", "2nd", "time", "seed", "history"])
def test_a_name_that_cannot_be_a_column_or_means_something_else_is_refused(name):
    with pytest.raises(PolytempoError, match=f"invalid metric name: {name!r}"):
        MetricInfo(name, "a label", "higher", True)
