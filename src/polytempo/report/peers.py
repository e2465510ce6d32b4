"""The accuracy of every peer by itself."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from polytempo.report.canvas import PALETTE, QUIET, bare, canvas


def plot_peers(
    rows: Sequence[Mapping[str, Any]], factors: Sequence[float], path: str | Path
) -> Path:
    """Accuracy against simulated time, one line for each peer: few are told apart by colour, many
    are grey around their mean. `factors`: how many times slower than the fastest each device is."""
    peers = len(factors)
    times = [row["time"] for row in rows[::peers]]
    accuracy = np.array([row["accuracy"] for row in rows]).reshape(-1, peers)
    few = peers <= len(PALETTE)
    with canvas(path, 8.0, 4.6) as figure:
        from matplotlib.ticker import PercentFormatter

        axes = figure.add_subplot()
        for peer in range(peers):
            speed = f", {factors[peer]:g} times slower" if factors[peer] > 1 else ""
            look: Any = {"color": QUIET, "alpha": 0.5, "linewidth": 0.8}
            if few:
                look = {"color": PALETTE[peer], "linewidth": 1.8}
                look["label"] = f"peer {peer}{speed}: {accuracy[-1, peer]:.1%}"
            axes.plot(times, accuracy[:, peer], drawstyle="steps-post", **look)
        if not few:
            mean = accuracy.mean(axis=1)
            label = f"mean: {mean[-1]:.1%}"
            axes.plot(
                times, mean, color=PALETTE[0], linewidth=2, drawstyle="steps-post", label=label
            )
        bare(axes)
        axes.margins(x=0.01)
        axes.yaxis.set_major_formatter(PercentFormatter(1, decimals=None))
        axes.set(xlabel="simulated time (s)", title="accuracy of each peer")
        figure.legend(loc="outside lower center", ncols=2, frameon=False, fontsize=9)
    return Path(path)
