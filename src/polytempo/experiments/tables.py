"""Figures of several runs of one kind, such as a strategy's with each seed: as text for people, as
numbers for programs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from polytempo.core.metric import MetricInfo
from polytempo.experiments.result import CLUSTERS, RunResult
from polytempo.simulation.metrics import models_sent

FAIRNESS = ("better_off", "worse_off", "gain", "gain_worst")


def spread(
    values: Sequence[float | None],
    metric: MetricInfo | None = None,
    *,
    digits: int = 1,
    none: str = "never",
) -> str:
    """Mean and, of several seeds, standard deviation; `none`, if there is no value."""
    known = [value for value in values if value is not None]
    if len(known) < len(values):
        return none if not known else f"{len(known)} of {len(values)} seeds"
    mean = float(np.mean(known))
    apart = float(np.std(known, ddof=1)) if len(known) > 1 else None
    if metric is not None:
        return metric.text(mean, apart)
    return f"{mean:,.{digits}f}" + ("" if apart is None else f" ± {apart:.{digits}f}")


def messages(result: RunResult) -> float:
    """Models sent, in either direction."""
    return float(models_sent(result.summary["messages"]))


def figures(found: Sequence[RunResult]) -> dict[str, list[float | None]]:
    """What tables are made of, one value for each run."""
    metric = found[0].metric.name
    columns: dict[str, list[float | None]] = {"handed": [result.value for result in found]}
    kept = {
        "best": f"{metric}_best",
        "adapted": f"{metric}_adapted",
        "worst10": f"{metric}_worst10",
        "best10": f"{metric}_best10",
        "client_std": f"{metric}_std",
        **{name: name for name in CLUSTERS},
    }
    for column, key in kept.items():
        columns[column] = [result.summary.get(key) for result in found]
    columns["seconds"] = [result.seconds_taken for result in found]
    columns["messages"] = [messages(result) for result in found]
    return columns


def numbers(columns: Mapping[str, Sequence[float | None]]) -> dict[str, float | None]:
    """Mean and standard deviation over the runs that have the figure; one that none has is left
    out."""
    found: dict[str, float | None] = {}
    for name, values in columns.items():
        known = [float(value) for value in values if value is not None and value == value]
        if known:
            found[name] = float(np.mean(known))
            apart = len(known) > 1 and bool(np.isfinite(known).all())
            found[f"{name}_std"] = float(np.std(known, ddof=1)) if apart else None
    return found


def gains(result: RunResult, alone: RunResult) -> dict[str, float | None]:
    """Is each client better off than alone? How many have a better model than the one that they
    train by themselves, how many a worse one, and by how much: the mean over clients, and the one
    that loses most (positive is better)."""
    name = result.metric.name
    sign = 1.0 if result.metric.better == "higher" else -1.0
    before = {row["client"]: row[name] for row in alone.clients}
    change: list[float] = [
        sign * (row[name] - before[row["client"]])
        for row in result.clients
        if row[name] is not None and before.get(row["client"]) is not None
    ]
    if not change:
        return dict.fromkeys(FAIRNESS)
    return {
        "better_off": sum(each > 0 for each in change),
        "worse_off": sum(each < 0 for each in change),
        "gain": float(np.mean(change)),
        "gain_worst": min(change),
    }


def by_column(rows: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """Rows with the same keys, as lists by key."""
    return {key: [row[key] for row in rows] for key in rows[0]}
