"""Figures of several runs of one kind, such as a strategy's with each seed: as text for people, as
numbers for programs."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from polytempo.core.metric import MetricInfo, finite
from polytempo.experiments.result import RunResult
from polytempo.experiments.rows import csv_text
from polytempo.report.intervals import DEVIATIONS, Interval, confidence, deviation
from polytempo.simulation import clusters
from polytempo.simulation.metrics import models_sent

FAIRNESS = ("better_off", "worse_off", "gain", "gain_worst")


def spread(
    values: Sequence[float | None],
    metric: MetricInfo | None = None,
    *,
    digits: int = 1,
    none: str = "never",
    interval: Interval = "std",
) -> str:
    """Mean and, of several seeds, standard deviation or confidence interval; `none`, if there is no
    value."""
    known = [value for value in values if value is not None]
    if len(known) < len(values):
        return none if not known else f"{len(known)} of {len(values)} seeds"
    mean = float(np.mean(known))
    apart = float(DEVIATIONS[interval](known)) if len(known) > 1 else None
    if metric is not None:
        return metric.text(mean, apart)
    return f"{mean:,.{digits}f}" + ("" if apart is None else f" ± {apart:.{digits}f}")


def messages(result: RunResult) -> float:
    """Models sent, in either direction."""
    return float(models_sent(result.summary["messages"]))


def uploaded(result: RunResult) -> float | None:
    """Megabytes of what clients sent to the server."""
    found = result.summary["messages"].get("upload_bytes")
    return None if found is None else float(found) / 1e6


def epsilon(result: RunResult) -> float | None:
    """What the client with most uploads has spent of its privacy."""
    found = result.summary.get("privacy")
    return None if found is None else found["epsilon_max"]


def figures(found: Sequence[RunResult]) -> dict[str, list[float | None]]:
    """What tables are made of, one value for each run."""
    metric = found[0].metric.name
    columns: dict[str, list[float | None]] = {"handed": [result.value for result in found]}
    kept = {
        "best": f"{metric}_best",
        "adapted": f"{metric}_adapted",
        "best10": f"{metric}_best10",
        "client_std": f"{metric}_std",
        **{name: name for name in clusters.FIGURES},
    }
    for column, key in kept.items():
        columns[column] = [result.summary.get(key) for result in found]
    # The summary, being JSON, knows no infinity: the history does.
    columns["worst10"] = [result.history[-1][f"{metric}_worst10"] for result in found]
    columns["seconds"] = [result.seconds_taken for result in found]
    columns["messages"] = [messages(result) for result in found]
    columns["uploaded_mb"] = [uploaded(result) for result in found]
    columns["epsilon"] = [epsilon(result) for result in found]
    return columns


def numbers(
    columns: Mapping[str, Sequence[float | None]], intervals: bool = False
) -> dict[str, float | None]:
    """Mean and standard deviation (and `intervals` of 95% confidence) over the runs that have the
    figure; one that none has is left out."""
    found: dict[str, float | None] = {}
    for name, values in columns.items():
        known = [float(value) for value in values if value is not None and value == value]
        if known:
            found[name] = float(np.mean(known))
            apart = len(known) > 1 and bool(np.isfinite(known).all())
            found[f"{name}_std"] = float(deviation(known)) if apart else None
            if intervals:
                found[f"{name}_ci95"] = float(confidence(known)) if apart else None
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


# -- formats ---------------------------------------------------------------------------------------

_LATEX = {"\\": r"\textbackslash{}", "±": r"$\pm$", "~": r"\textasciitilde{}"}
_LATEX |= {sign: f"\\{sign}" for sign in "%&_#{}$"} | {"^": r"\textasciicircum{}"}


def formatted(
    form: str, table: Sequence[Mapping[str, str]], numbers: Sequence[Mapping[str, Any]]
) -> str:
    """A table for a document (markdown, latex), or its numbers for a program (csv, json)."""
    if form == "json":
        return json.dumps(finite(list(numbers)), indent=2)
    if form == "csv":
        return csv_text(numbers).rstrip("\n")
    rows = [list(table[0]), *(list(row.values()) for row in table)]
    if form == "latex":
        return _latex(rows)
    lines = [" | ".join(cell.replace("|", r"\|") for cell in row) for row in rows]
    rule = " | ".join(["---", *["---:"] * (len(rows[0]) - 1)])
    return "\n".join(f"| {line} |" for line in (lines[0], rule, *lines[1:]))


def _latex(rows: Sequence[Sequence[str]]) -> str:
    """With the rules of the package booktabs."""
    head, *body = (
        " & ".join("".join(_LATEX.get(sign, sign) for sign in cell) for cell in row) + r" \\"
        for row in rows
    )
    columns = "l" + "r" * (len(rows[0]) - 1)
    begin, end = rf"\begin{{tabular}}{{{columns}}}", r"\end{tabular}"
    return "\n".join([begin, r"\toprule", head, r"\midrule", *body, r"\bottomrule", end])
