"""Figures of a run, from its history of evaluations (one row each, in order of time)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from polytempo.core.errors import PolytempoError
from polytempo.training import Score

Row = Mapping[str, Any]
LAST = 3  # evaluations that make up the final accuracy, and the window of smoothing
TOLERANCE = 0.01
MODELS = ("dispatch", "upload", "multicast", "exchange")  # kinds of messages that carry a model


def models_sent(messages: Mapping[str, Any]) -> int:
    """All messages that carry a model, from counts by kind (kinds that do not occur may lack)."""
    return sum(int(messages.get(kind, 0)) for kind in MODELS)


def over_clients(scores: Sequence[Score]) -> dict[str, float]:
    """Accuracy over clients: plain mean, mean over all test samples, spread, worst tenth.

    `accuracy_weighted` counts every test sample once: for methods with a single model it is the
    accuracy on the pooled test set. Clients without test samples do not count.
    """
    tested = [score for score in scores if score.total]  # a client of one sample has no test split
    if not tested:
        raise PolytempoError("no client has a sample to be tested on; use fewer clients")
    correct = np.array([score.sums["correct"] for score in tested], dtype=np.float64)
    total = np.array([score.total for score in tested], dtype=np.float64)
    each = correct / total
    worst = np.sort(each)[: max(1, len(each) // 10)]
    return {
        "accuracy": float(each.mean()),
        "accuracy_weighted": float(correct.sum() / total.sum()),
        "accuracy_std": float(each.std()),
        "accuracy_worst10": float(worst.mean()),
        "loss": float(sum(score.sums["loss"] for score in tested) / total.sum()),
    }


def final_accuracy(history: Sequence[Row], figure: str = "accuracy") -> float | None:
    """Mean of the last evaluations (the untrained model's does not count)."""
    trained = [row[figure] for row in history if row["round"] > 0 and row[figure] is not None]
    return float(np.mean(trained[-LAST:])) if trained else None


def time_to(history: Sequence[Row], target: float) -> float | None:
    """Simulated time of the first evaluation that reaches the target accuracy."""
    return next((row["time"] for row in history if row["accuracy"] >= target), None)


def convergence_time(history: Sequence[Row]) -> float | None:
    """When the run had got where it ended: the first time from which on the smoothed accuracy
    (mean of the last 3 evaluations) stays within 0.01 of its final level."""
    if len(history) <= LAST:
        return None
    accuracy = np.array([row["accuracy"] for row in history])
    smooth = np.array([accuracy[max(0, i - LAST + 1) : i + 1].mean() for i in range(len(accuracy))])
    outside = np.flatnonzero(np.abs(smooth - smooth[-1]) > TOLERANCE)
    first = int(outside[-1]) + 1 if len(outside) else 0
    return float(history[first]["time"])
