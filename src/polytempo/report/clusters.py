"""Clusters of clients: who belongs where, when; and how alike clients are."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from polytempo.core.errors import PolytempoError
from polytempo.report.canvas import INK, QUIET, bare, canvas

Array = NDArray[Any]
Change = tuple[int, float, int, int]  # round, time, client, cluster
# Ten that can be told apart side by side; all but the ten largest clusters are grey.
COLOURS = (
    *("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9"),
    *("#d55e00", "#7f3c8d", "#f0e442", "#1f2328", "#a5673f"),
)
OTHERS, NOBODY, UNKNOWN = "#c3c9d0", "#ffffff", "#d7dce1"
ACROSS = 800  # columns of pixels over the run
PANELS = 5


def plot_clusters(
    changes: Sequence[Change],
    clients: int,
    updates: int,
    path: str | Path,
    groups: Array | None = None,
) -> Path:
    """One strip per client, in the colour of its cluster, from the first to the last update.
    Clients are ordered by true group, and within a group by their final cluster."""
    if not changes or updates < 1:
        raise PolytempoError("no clusters to draw; run for more updates")
    grid = strips(changes, clients, updates)
    order = np.lexsort((grid[:, -1], np.zeros(clients) if groups is None else groups))
    area = Counter(grid[grid >= 0].tolist())
    largest = sorted(cluster for cluster, _ in area.most_common(len(COLOURS)))
    shown = np.full(grid.shape, len(COLOURS), dtype=np.int64)
    shown[grid < 0] = len(COLOURS) + 1
    for colour, cluster in enumerate(largest):
        shown[grid == cluster] = colour
    with canvas(path, 9.6, min(8.0, 2.2 + 0.035 * max(clients, 40))) as figure:
        from matplotlib.colors import ListedColormap
        from matplotlib.patches import Patch

        axes = figure.add_subplot()
        palette = ListedColormap([*COLOURS, OTHERS, NOBODY])
        axes.imshow(
            shown[order],
            cmap=palette,
            vmin=-0.5,
            vmax=len(COLOURS) + 1.5,
            aspect="auto",
            interpolation="nearest",
            extent=(0, updates, clients - 0.5, -0.5),
        )
        _mark_groups(axes, groups, order, "y", "y")
        bare(axes, grid=None)
        axes.xaxis.set_major_formatter("{x:,.0f}")
        axes.set(xlabel="updates folded", title="who belongs to which cluster, when")
        if groups is None:
            axes.set_ylabel("clients")
        names = [(COLOURS[k], f"cluster {cluster}") for k, cluster in enumerate(largest)]
        more = len(area) - len(largest)
        names += [(OTHERS, f"{more} others")] if more else []
        names += [(NOBODY, "in none")] if (grid < 0).any() else []
        figure.legend(
            handles=[Patch(fc=colour, ec=QUIET, lw=0.5, label=name) for colour, name in names],
            loc="outside right upper",
            frameon=False,
            fontsize=9,
        )
    return Path(path)


def strips(changes: Sequence[Change], clients: int, updates: int) -> Array:
    """The cluster of each client in each of up to `ACROSS` equal parts of the run, at its end."""
    ends = np.linspace(0, updates, min(ACROSS, updates) + 1)[1:]
    grid = np.full((clients, len(ends)), -1, dtype=np.int64)
    for round_, _, client, cluster in changes:
        grid[client, np.searchsorted(ends, round_) :] = cluster
    return grid


def plot_similarity(
    matrices: Sequence[tuple[int, float, Array]], path: str | Path, groups: Array | None = None
) -> Path:
    """How alike clients are, a few times over the run, on one scale of colours."""
    if not matrices:
        raise PolytempoError("no similarities to draw; run for more updates")
    chosen = np.unique(np.linspace(0, len(matrices) - 1, min(PANELS, len(matrices))).round())
    panels = [matrices[int(k)] for k in chosen]
    clients = len(panels[0][2])
    order = np.arange(clients) if groups is None else np.argsort(groups, kind="stable")
    apart = ~np.eye(clients, dtype=bool)
    values = np.concatenate([m[apart & np.isfinite(m)] for _, _, m in panels])
    low, high = np.percentile(values, [1, 100]) if len(values) else (0.0, 1.0)
    with canvas(path, 1.7 + 1.8 * max(2, len(panels)), 2.7) as figure:
        import matplotlib

        palette = matplotlib.colormaps["viridis"].with_extremes(bad=UNKNOWN)
        all_axes = figure.subplots(1, len(panels), squeeze=False)[0]
        for axes, (round_, _, matrix) in zip(all_axes, panels, strict=True):
            cells = np.where(apart, matrix, np.nan)[np.ix_(order, order)]
            image = axes.imshow(cells, cmap=palette, vmin=low, vmax=high, interpolation="nearest")
            bare(axes, grid=None)
            axes.set_xticks([])
            axes.set_yticks([])
            _mark_groups(axes, groups, order, "xy", "xy" if axes is all_axes[0] else "")
            axes.set_title(f"{round_:,} updates", fontsize=10)
        if groups is None:
            all_axes[0].set(xlabel="clients", ylabel="clients")
        bar = figure.colorbar(image, ax=all_axes, shrink=0.75, pad=0.01, aspect=15)
        bar.outline.set_visible(False)
        bar.set_label("likeness (grey: not known)", color=QUIET)
    return Path(path)


def _mark_groups(axes: Any, groups: Array | None, order: Array, along: str, named: str) -> None:
    """Lines between the true groups along some axes, and their names at some."""
    if groups is None:
        return
    kinds, first, sizes = np.unique(groups[order], return_index=True, return_counts=True)
    middles = first + (sizes - 1) / 2
    for axis, line in (("x", axes.axvline), ("y", axes.axhline)):
        for edge in first[1:] if axis in along else ():
            line(edge - 0.5, color="white", linewidth=2.2)
            line(edge - 0.5, color=INK, linewidth=0.9)
    if "y" in named:
        axes.set_yticks(middles, [f"group {kind}" for kind in kinds])
    if "x" in named:
        axes.set_xticks(middles, [str(kind) for kind in kinds])
