"""Accuracy over two settings at once."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from polytempo.core.errors import PolytempoError
from polytempo.report.canvas import INK, bare, canvas

Panel = Mapping[tuple[str, str], float]  # accuracy from 0 to 1 at (x, y)
ACROSS = 3  # panels in a row


def plot_heatmaps(
    panels: Mapping[str, Panel], path: str | Path, *, x: str, y: str, title: str = ""
) -> Path:
    """One map per label, all on one colour scale. What is missing stays white.

    Values of x and y stand in the order in which they first come.
    """
    if not any(panels.values()):
        raise PolytempoError("no accuracies to draw; run something first")
    places = [place for panel in panels.values() for place in panel]
    across, down = (list(dict.fromkeys(place[k] for place in places)) for k in (0, 1))
    values = [value for panel in panels.values() for value in panel.values()]
    low, high = min(values), max(values)
    columns = min(ACROSS, len(panels))
    rows = math.ceil(len(panels) / columns)
    width, height = 0.8 + 0.55 * len(across), 0.9 + 0.42 * len(down)
    names = 0.06 * max(map(len, down))
    size = max(6.5, 1.2 + columns * (width + names)), max(3.8, 0.8 + rows * height)
    with canvas(path, *size) as figure:
        from matplotlib.ticker import PercentFormatter

        grid = figure.subplots(rows, columns, squeeze=False)
        for axes in grid.flat[len(panels) :]:
            axes.set_visible(False)
        for axes, (label, panel) in zip(grid.flat, panels.items(), strict=False):
            cells = np.array([[panel.get((a, b), np.nan) for a in across] for b in down])
            image = axes.imshow(cells, cmap="Blues", vmin=low, vmax=high, aspect="auto")
            for i, j in np.argwhere(~np.isnan(cells)):
                dark = cells[i, j] - low > 0.6 * (high - low)
                axes.text(
                    j,
                    i,
                    f"{100 * cells[i, j]:.1f}",
                    ha="center",
                    va="center",
                    fontsize=8,
                    color="white" if dark else INK,
                )
            axes.set_xticks(range(len(across)), across, fontsize=8)
            axes.set_yticks(range(len(down)), down, fontsize=8)
            axes.set(xlabel=x, ylabel=y, title=label)
            bare(axes, grid=None)
        bar = figure.colorbar(image, ax=grid, shrink=0.7, pad=0.02)
        bar.ax.yaxis.set_major_formatter(PercentFormatter(1, decimals=0))
        bar.outline.set_visible(False)
        if title:
            figure.suptitle(title, fontsize=11)
    return Path(path)
