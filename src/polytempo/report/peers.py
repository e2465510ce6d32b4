"""The metric of every peer, or client, by itself."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from polytempo.core.metric import MetricInfo
from polytempo.report.canvas import PALETTE, QUIET, bare, canvas, metric_axis
from polytempo.report.curves import Line, on_common_grid


def plot_peers(
    peers: Mapping[str, Line],
    metric: MetricInfo,
    path: str | Path,
    clock: str = "simulated time (s)",
    who: str = "peer",
) -> Path:
    """The metric over time, one line for each peer, by name: few are told apart by colour, many are
    grey around their mean."""
    few = len(peers) <= len(PALETTE)
    with canvas(path, 8.0, 4.6) as figure:
        axes = figure.add_subplot()
        for number, (name, (times, values)) in enumerate(peers.items()):
            look: Any = {"color": QUIET, "alpha": 0.5, "linewidth": 0.8}
            if few:
                look = {"color": PALETTE[number], "linewidth": 1.8}
                look["label"] = f"{name}: {metric.text(values[-1])}"
            axes.plot(times, values, drawstyle="steps-post", **look)
        if not few:
            grid, each = on_common_grid(list(peers.values()))
            mean = each.mean(axis=0)
            look = {"color": PALETTE[0], "linewidth": 2}
            look["label"] = f"mean: {metric.text(float(mean[-1]))}"
            axes.plot(grid, mean, drawstyle="steps-post", **look)
        bare(axes)
        axes.margins(x=0.01)
        metric_axis(axes, metric, [value for _, values in peers.values() for value in values])
        axes.set(xlabel=clock, title=f"{metric.label} of each {who}")
        figure.legend(loc="outside lower center", ncols=2, frameon=False, fontsize=9)
    return Path(path)
