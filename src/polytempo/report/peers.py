"""The accuracy of every peer by itself."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from polytempo.report.canvas import PALETTE, QUIET, bare, canvas
from polytempo.report.curves import Line, on_common_grid


def plot_peers(
    peers: Mapping[str, Line], path: str | Path, clock: str = "simulated time (s)"
) -> Path:
    """Accuracy over time, one line for each peer, by name: few are told apart by colour, many are
    grey around their mean."""
    few = len(peers) <= len(PALETTE)
    with canvas(path, 8.0, 4.6) as figure:
        from matplotlib.ticker import PercentFormatter

        axes = figure.add_subplot()
        for number, (name, (times, accuracy)) in enumerate(peers.items()):
            look: Any = {"color": QUIET, "alpha": 0.5, "linewidth": 0.8}
            if few:
                look = {"color": PALETTE[number], "linewidth": 1.8}
                look["label"] = f"{name}: {accuracy[-1]:.1%}"
            axes.plot(times, accuracy, drawstyle="steps-post", **look)
        if not few:
            grid, values = on_common_grid(list(peers.values()))
            mean = values.mean(axis=0)
            look = {"color": PALETTE[0], "linewidth": 2, "label": f"mean: {mean[-1]:.1%}"}
            axes.plot(grid, mean, drawstyle="steps-post", **look)
        bare(axes)
        axes.margins(x=0.01)
        axes.yaxis.set_major_formatter(PercentFormatter(1, decimals=None))
        axes.set(xlabel=clock, title="accuracy of each peer")
        figure.legend(loc="outside lower center", ncols=2, frameon=False, fontsize=9)
    return Path(path)
