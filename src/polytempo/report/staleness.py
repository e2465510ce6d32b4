"""How stale the folded updates were."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np

from polytempo.core.errors import PolytempoError
from polytempo.report.canvas import INK, PALETTE, bare, canvas


def plot_staleness(counts: Mapping[int, int], path: str | Path) -> Path:
    """How many updates had which staleness, with the mean marked."""
    total = sum(counts.values())
    if total <= 0:
        raise PolytempoError(f"no staleness to draw in {dict(counts)!r}; fold an update first")
    values = np.array(sorted(counts))
    weights = np.array([counts[int(value)] for value in values])
    mean = float(values @ weights) / total
    width = 1 + int(values[-1]) // 60  # at most 60 bars, each of a whole number of values
    edges = np.arange(0, values[-1] + width + 1, width)
    heights, _ = np.histogram(values, bins=edges, weights=weights)
    with canvas(path, 7.2, 3.8) as figure:
        axes = figure.add_subplot()
        middles = edges[:-1] + (width - 1) / 2
        axes.bar(middles, heights, width=width * 0.9, color=PALETTE[0])
        axes.set_xlim(-0.7 * width, max(edges[-1], 5))
        axes.axvline(mean, color=INK, linewidth=1.4, linestyle=(0, (4, 2)))
        right = mean < (values[-1] + width) / 2
        axes.annotate(
            f"mean {mean:.1f}",
            xy=(mean, 1.0),
            xycoords=("data", "axes fraction"),
            xytext=(5 if right else -5, 0),
            textcoords="offset points",
            ha="left" if right else "right",
            va="bottom",
            fontweight="bold",
        )
        bare(axes)
        axes.set_ylim(0, heights.max() * 1.05)
        axes.set_title("staleness (updates folded while the client trained)", pad=20)
        bars = "" if width == 1 else f" (each bar: {width} values)"
        axes.set(xlabel=f"staleness{bars}", ylabel="updates")
        axes.xaxis.get_major_locator().set_params(integer=True)
        axes.yaxis.get_major_locator().set_params(integer=True)
        axes.yaxis.set_major_formatter("{x:,.0f}")
    return Path(path)
