"""What makes the server's steps wrong: noise, bias or delay; and who has how much influence."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from polytempo.core.errors import PolytempoError
from polytempo.report.canvas import INK, PALETTE, QUIET, bare, canvas

TERMS = {
    "noise": "sampling noise (A)",
    "bias": "participation bias (B)",
    "delay": "delay (C)",
}


def plot_diagnosis(
    rows: Sequence[Mapping[str, Any]], influence: Sequence[float], path: str | Path
) -> Path:
    """The three error terms over time, as shares of the squared gradient, and the share of each
    client in all steps, in order."""
    if not rows:
        raise PolytempoError("nothing was diagnosed; run for more updates")
    updates = [row["updates"] for row in rows]
    with canvas(path, 9.6, 3.9) as figure:
        left, right = figure.subplots(1, 2, width_ratios=(3, 2))
        for colour, (term, label) in zip(PALETTE, TERMS.items(), strict=False):
            values = np.array([max(row[term], 1e-12) for row in rows])
            left.plot(updates, values, color=colour, linewidth=1.8, label=label)
        gradient = [max(row["gradient"], 1e-12) for row in rows]
        left.plot(
            updates, gradient, color=INK, linewidth=1.0, linestyle=(0, (4, 2)), label="gradient"
        )
        left.set_yscale("log")
        bare(left)
        left.set_title("squared error of the server's steps", pad=10)
        left.set(xlabel="updates folded", ylabel="squared length")
        largest = max(max(row[term] for term in (*TERMS, "gradient")) for row in rows)
        left.set_ylim(1e-5 * largest, 2 * largest)  # below that, nothing hurts
        figure.legend(
            *left.get_legend_handles_labels(), loc="outside lower left", ncols=4, frameon=False
        )
        shares = 100 * np.sort(np.asarray(influence, dtype=np.float64))[::-1]
        right.bar(np.arange(len(shares)), shares, width=0.9, color=PALETTE[0])
        right.axhline(100 / len(shares), color=INK, linewidth=1.2, linestyle=(0, (4, 2)))
        right.annotate(
            "equal shares",
            xy=(1.0, 100 / len(shares)),
            xycoords=("axes fraction", "data"),
            xytext=(0, 3),
            textcoords="offset points",
            ha="right",
            va="bottom",
            color=QUIET,
            fontsize=9,
        )
        bare(right)
        right.set_title("influence of each client", pad=10)
        right.set(xlabel="clients, most influential first", ylabel="share of all steps, %")
    return Path(path)
