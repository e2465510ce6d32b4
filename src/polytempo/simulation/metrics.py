"""Figures of a run, from its history of evaluations (one row each, in order of time)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from polytempo.core.errors import PolytempoError
from polytempo.core.metric import MetricInfo
from polytempo.training import Problem, Score, merged

Row = Mapping[str, Any]
LAST = 3  # evaluations that make up the final value, and the window of smoothing
TOLERANCE = 0.01  # of shares; of other metrics, this part of their final level
MODELS = ("dispatch", "upload", "multicast", "exchange")  # kinds of messages that carry a model


def models_sent(messages: Mapping[str, Any]) -> int:
    """All messages that carry a model, from counts by kind (kinds may be missing)."""
    return sum(int(messages.get(kind, 0)) for kind in MODELS)


def over_clients(scores: Sequence[Score], problem: Problem) -> dict[str, float | None]:
    """The problem's metrics over clients. Of the first, m: plain mean, pooled, spread and worst
    tenth; of the others plain mean and pooled, None where they are not defined.

    Pooled (`m_weighted`) is that of all test samples together: for methods with a single model it
    is the metric on the pooled test set, and so is `loss`. Clients without test samples do not
    count, nor do those for which a metric is not defined (NaN).
    """
    tested = [score for score in scores if score.total]  # a client of one sample has no test split
    if not tested:
        raise PolytempoError("no client has a test sample; use fewer clients")
    metric, *others = problem.metrics
    pooled = merged(tested)
    each = _defined([metric.value(score.sums) for score in tested])
    if not len(each):
        raise PolytempoError(
            f"{metric.name} is not defined (NaN) for any client; use fewer clients, so that each "
            "has more test samples, or list another metric first in the problem"
        )
    with np.errstate(invalid="ignore"):  # a perplexity may be infinite
        apart = float(each.std())
    ordered = np.sort(each) if metric.better == "higher" else np.sort(each)[::-1]
    found: dict[str, float | None] = {
        metric.name: float(each.mean()),
        f"{metric.name}_weighted": float(metric.value(pooled)),
        f"{metric.name}_std": apart,
        f"{metric.name}_worst10": float(ordered[: max(1, len(each) // 10)].mean()),
    }
    if "loss" in pooled:  # training code of a user's own may not say
        found.setdefault("loss", pooled["loss"] / pooled["total"])  # unless it is the metric
    for other in others:
        each = _defined([other.value(score.sums) for score in tested])
        found.setdefault(other.name, float(each.mean()) if len(each) else None)
        together = other.value(pooled)
        found[f"{other.name}_weighted"] = None if math.isnan(together) else together
    return found


def _defined(values: Sequence[float]) -> NDArray[np.float64]:
    array = np.array(values, dtype=np.float64)
    return array[~np.isnan(array)]


def final_value(history: Sequence[Row], figure: str, last: int = LAST) -> float | None:
    """Mean of that column over the last evaluations (the untrained model's does not count)."""
    trained = [row[figure] for row in history if row["updates"] > 0 and row[figure] is not None]
    return float(np.mean(trained[-last:])) if trained else None


def time_to(history: Sequence[Row], metric: MetricInfo, target: float) -> float | None:
    """Simulated time of the first evaluation that reaches the target, or gets below it."""
    reached = (row["time"] for row in history if metric.reaches(row[metric.name], target))
    return next(reached, None)


def convergence_time(history: Sequence[Row], metric: MetricInfo) -> float | None:
    """When the run had reached its final level: the first time from which the smoothed metric (mean
    of the last 3 evaluations) stays near its final level: within 0.01 of a share, within 1% of
    anything else."""
    if len(history) <= LAST:
        return None
    values = np.array([row[metric.name] for row in history])
    smooth = np.array([values[max(0, i - LAST + 1) : i + 1].mean() for i in range(len(values))])
    if not math.isfinite(smooth[-1]):
        return None
    near = TOLERANCE if metric.share else TOLERANCE * abs(smooth[-1])
    outside = np.flatnonzero(np.abs(smooth - smooth[-1]) > near)
    first = int(outside[-1]) + 1 if len(outside) else 0
    return float(history[first]["time"])
