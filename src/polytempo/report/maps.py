"""Two maps: who learns from whom, and which client holds which labels."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from polytempo.core.errors import PolytempoError
from polytempo.report.canvas import INK, PALETTE, QUIET, bare, canvas

Ints = NDArray[np.int64]
FEW = 40  # up to this many clients, each is named on the axis


def plot_graph(weights: Any, path: str | Path, groups: Any = None) -> Path:
    """The collaboration graph: row i shows how much client i takes from every client j.

    Clients are ordered by their true group where that is known, and otherwise by hierarchical
    clustering, so that clients which work together stand together.
    """
    matrix = np.asarray(weights, dtype=float)
    if matrix.ndim != 2 or matrix.shape[0] != matrix.shape[1] or not matrix.size:
        raise PolytempoError(
            f"a graph of shape {matrix.shape} cannot be drawn; give one row and column per client"
        )
    if not np.isfinite(matrix).all():
        raise PolytempoError("the graph holds weights that are not finite; did training diverge?")
    clients = len(matrix)
    order = by_cluster(matrix) if groups is None else by_group(groups, clients)
    others = matrix[~np.eye(clients, dtype=bool)]
    top, where = colour_top(others)
    with canvas(path, 7.4, 6.2) as figure:
        axes = figure.add_subplot()
        low = min(0.0, float(others.min(initial=0.0)))
        image = axes.imshow(
            matrix[np.ix_(order, order)], cmap="Blues", vmin=low, vmax=top, interpolation="none"
        )
        extend = "max" if matrix.max() > top else "neither"
        bar = figure.colorbar(image, ax=axes, extend=extend, shrink=0.82, pad=0.02)
        bar.set_label(f"weight (scale ends at the {where} off the diagonal)", color=INK)
        bar.outline.set_visible(False)
        for axis, line in ((axes.xaxis, axes.axvline), (axes.yaxis, axes.axhline)):
            _name_clients(axis, line, order, groups)
        how = "by clustering" if groups is None else "by true group"
        axes.set_xlabel("... from client j (column)")
        axes.set_ylabel("client i (row) learns ...")
        axes.set_title(f"collaboration graph, clients ordered {how}")
        bare(axes, grid=None)
    return Path(path)


def plot_labels(counts: Any, path: str | Path, groups: Any = None, title: str = "") -> Path:
    """Which labels each client holds, from `counts` [clients, classes], and how many samples."""
    table = np.asarray(counts, dtype=float)
    if table.ndim != 2 or not table.size or table.min() < 0:
        raise PolytempoError(
            f"label counts of shape {table.shape} cannot be drawn; give one row per client, one "
            "column per class, and no negative numbers"
        )
    clients, classes = table.shape
    order = np.arange(clients) if groups is None else by_group(groups, clients)
    table = table[order]
    totals = table.sum(axis=1)
    shares = np.divide(table, totals[:, None], where=totals[:, None] > 0, out=np.zeros_like(table))
    with canvas(path, 9.0, min(8.0, 2.4 + 0.17 * max(classes, 10))) as figure:
        from matplotlib import colormaps
        from matplotlib.colors import ListedColormap, PowerNorm
        from matplotlib.ticker import MaxNLocator, PercentFormatter

        above, axes = figure.subplots(
            2, 1, sharex=True, gridspec_kw={"height_ratios": [1, max(3.0, 0.17 * classes)]}
        )
        above.bar(np.arange(clients), totals, width=0.8, color=PALETTE[0])
        above.set_ylabel("samples")
        above.yaxis.set_major_locator(MaxNLocator(3, integer=True))
        above.yaxis.set_major_formatter("{x:,.0f}")
        above.set_title(title or "labels of each client")
        bare(above)

        # White is none at all; a small share is already tinted, and the square root keeps it so.
        tints = colormaps["Blues"](np.linspace(0.14, 1.0, 256))
        blues = ListedColormap(tints).with_extremes(bad="white")
        image = axes.pcolormesh(
            np.arange(clients + 1) - 0.5,
            np.arange(classes + 1) - 0.5,
            np.ma.masked_equal(shares.T, 0),
            cmap=blues,
            norm=PowerNorm(0.5, vmin=0, vmax=shares.max() or 1.0),
            edgecolors="white",
            linewidth=0.4 if clients > FEW else 1.0,
        )
        axes.invert_yaxis()
        axes.set_yticks(np.arange(0, classes, 1 if classes <= 20 else 5))
        axes.set_ylabel("label")
        bare(axes, grid=None)
        _name_clients(axes.xaxis, axes.axvline, order, groups)
        axes.set_xlabel("client" if groups is None else "client, ordered by true group")
        above.tick_params(axis="x", length=0)
        figure.align_ylabels([above, axes])
        bar = figure.colorbar(image, ax=[above, axes], shrink=0.7, pad=0.01, aspect=30)
        bar.ax.yaxis.set_major_formatter(PercentFormatter(1, decimals=0))
        bar.set_label("share of the client's samples", color=INK)
        bar.outline.set_visible(False)
    return Path(path)


def by_group(groups: Any, clients: int) -> Ints:
    """The clients sorted by group, in their own order inside each."""
    given = np.asarray(groups)
    if given.shape != (clients,):
        raise PolytempoError(
            f"groups of shape {given.shape} do not fit {clients} clients; give one per client"
        )
    return np.argsort(given, kind="stable")


def by_cluster(matrix: NDArray[np.float64]) -> Ints:
    """The clients in the leaf order of a hierarchical clustering of whom they work with."""
    clients = len(matrix)
    if clients < 3:
        return np.arange(clients)
    from scipy.cluster.hierarchy import leaves_list, linkage
    from scipy.spatial.distance import pdist

    both = (matrix + matrix.T) / 2
    np.fill_diagonal(both, 0.0)
    np.fill_diagonal(both, both.max(axis=1))  # a client is as close to itself as to its nearest
    tree = linkage(pdist(both), method="average", optimal_ordering=clients <= 300)
    return np.asarray(leaves_list(tree), dtype=np.int64)


def colour_top(others: NDArray[np.float64]) -> tuple[float, str]:
    """The weight of the darkest colour, and what it is among the weights between clients.

    What clients keep of themselves would drown all else, so the scale follows the rest only.
    """
    if not (others > 0).any():
        return 1.0, "maximum"
    top = float(np.percentile(others, 99))
    # In a very sparse graph the percentile is nothing at all.
    return (top, "99th percentile") if top > 0 else (float(others.max()), "maximum")


def _name_clients(axis: Any, line: Any, order: Ints, groups: Any) -> None:
    """Name each client if they are few, and each group if there are some; draw its borders."""
    clients = len(order)
    ticks: dict[float, str] = {}
    if clients <= FEW:
        ticks = {place: str(client) for place, client in enumerate(order)}
    if groups is not None:
        in_order = np.asarray(groups)[order]
        starts = [0, *(np.flatnonzero(in_order[1:] != in_order[:-1]) + 1).tolist(), clients]
        for start in starts[1:-1]:
            line(start - 0.5, color=QUIET, linewidth=0.9)
        for start, end in itertools.pairwise(starts if len(starts) <= 25 else []):
            name = f"group {in_order[start]}" if len(starts) <= 9 else str(in_order[start])
            middle = (start + end - 1) // 2 if ticks else (start + end - 1) / 2
            client = ticks.get(middle)
            if client is None:
                ticks[middle] = name
            else:
                ticks[middle] = (
                    f"{client}\n{name}" if axis.axis_name == "x" else f"{name}  {client}"
                )
    elif clients > FEW and np.array_equal(order, np.arange(clients)):
        axis.get_major_locator().set_params(integer=True)
        return
    axis.set_ticks(list(ticks), list(ticks.values()), fontsize=8 if clients <= FEW else 9)
