"""Accuracy over the course of a run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from polytempo.core.errors import PolytempoError, nearest
from polytempo.report.canvas import DASHES, PALETTE, QUIET, bare, canvas

Floats = NDArray[np.float64]
AXES = {"time": "simulated time (s)", "rounds": "arrivals", "messages": "messages"}


@dataclass(frozen=True)
class Curve:
    """The evaluations of one run, in order; `adapted` is the final accuracy after adaptation."""

    time: Sequence[float]
    rounds: Sequence[int]
    messages: Sequence[int]
    accuracy: Sequence[float]
    adapted: float | None = None

    def __post_init__(self) -> None:
        sizes = [len(self.time), len(self.rounds), len(self.messages), len(self.accuracy)]
        if len(set(sizes)) != 1 or not sizes[0]:
            raise PolytempoError(
                "a curve needs equally many times, rounds, messages and accuracies, at least one, "
                f"but has {', '.join(map(str, sizes))}; evaluate the run at least once"
            )


def on_common_grid(curves: Sequence[Curve], x: str) -> tuple[Floats, Floats]:
    """The points at which any curve changes, and each curve's accuracy there, [curves, points].

    An accuracy holds until the next evaluation, and the last one to the end: a run that is over
    still has its model. Points before every curve has begun are left out.
    """
    positions = [np.asarray(getattr(curve, x), dtype=float) for curve in curves]
    grid = np.unique(np.concatenate(positions))
    grid = grid[grid >= max(p[0] for p in positions)]
    values = [
        np.asarray(curve.accuracy, dtype=float)[np.searchsorted(p, grid, side="right") - 1]
        for curve, p in zip(curves, positions, strict=True)
    ]
    return grid, np.stack(values)


def plot_accuracy(
    curves: Mapping[str, Sequence[Curve]], path: str | Path, *, x: str = "time"
) -> Path:
    """Accuracy against "time", "rounds" or "messages", one line for each label.

    Several curves under one label are several seeds: the line is their mean, and the band reaches
    from the lowest to the highest. A hollow diamond is the final accuracy after local adaptation.
    """
    if x not in AXES:
        raise PolytempoError(f"accuracy cannot be drawn against {x!r}{nearest(x, AXES)}")
    if not curves or not all(curves.values()):
        empty = [label for label, runs in curves.items() if not runs]
        raise PolytempoError(f"no curves to draw for {empty or 'any label'}; run something first")
    with canvas(path, 9.0, max(4.4, 1.6 + 0.21 * len(curves))) as figure:
        from matplotlib.ticker import PercentFormatter

        axes = figure.add_subplot()
        ends = []
        for index, (label, runs) in enumerate(curves.items()):
            colour = PALETTE[index % len(PALETTE)]
            look: Any = {"color": colour, "linestyle": DASHES[index // len(PALETTE) % len(DASHES)]}
            grid, values = on_common_grid(runs, x)
            mean = values.mean(axis=0)
            axes.plot(grid, mean, **look, linewidth=1.8, drawstyle="steps-post")
            if len(runs) > 1:
                low, high = values.min(axis=0), values.max(axis=0)
                axes.fill_between(grid, low, high, color=colour, alpha=0.16, lw=0, step="post")
            adapted = [run.adapted for run in runs if run.adapted is not None]
            final = float(np.mean(adapted)) if adapted else None
            ends.append(_End(label, look, float(mean[-1]), final))
        bare(axes)
        axes.margins(x=0.01)
        axes.yaxis.set_major_formatter(PercentFormatter(1, decimals=None))
        axes.xaxis.set_major_formatter("{x:,.0f}" if axes.get_xlim()[1] > 10 else "{x:g}")
        axes.set(xlabel=AXES[x], title="accuracy, mean over clients")
        _label_ends(axes, ends)
        _explain(axes, curves)
    return Path(path)


@dataclass(frozen=True)
class _End:
    """What stands to the right of a line: its label, and its final accuracies."""

    label: str
    look: dict[str, Any]
    handed: float
    adapted: float | None


def _diamond(colour: str) -> dict[str, Any]:
    return {
        "marker": "D",
        "markersize": 7,
        "markerfacecolor": "white",
        "markeredgecolor": colour,
        "markeredgewidth": 1.6,
        "linestyle": "none",
    }


def spread(positions: Sequence[float], gap: float, low: float, high: float) -> list[float]:
    """The positions, moved as little as keeps neighbours `gap` apart and all in [low, high]."""
    order = np.argsort(positions, kind="stable")
    gap = min(gap, (high - low) / max(1, len(positions) - 1))
    steps = gap * np.arange(len(positions))
    # Without the steps, "gap apart" is "not decreasing": merge neighbours that are out of order.
    blocks: list[list[float]] = []
    for value in np.asarray(positions, dtype=float)[order] - steps:
        blocks.append([value])
        while len(blocks) > 1 and np.mean(blocks[-2]) > np.mean(blocks[-1]):
            blocks[-2:] = [blocks[-2] + blocks[-1]]
    flat = np.concatenate([np.full(len(block), np.mean(block)) for block in blocks])
    flat = np.clip(flat, low, high - steps[-1]) + steps
    placed = np.empty(len(positions))
    placed[order] = flat
    return [float(value) for value in placed]


def lanes(heights: Sequence[float], gap: float) -> list[int]:
    """For each mark the first lane in which it comes closer than `gap` to no earlier one."""
    found: list[int] = []
    for height in heights:
        taken = {
            lane for lane, other in zip(found, heights, strict=False) if abs(other - height) < gap
        }
        found.append(min(set(range(len(heights))) - taken))
    return found


def _label_ends(axes: Any, ends: list[_End]) -> None:
    """Write each label in the right margin at the height where its line ends.

    The diamonds stand in that margin too, beside the axis: adaptation happens after the run, at no
    time of its own. Those that would touch stand side by side.
    """
    marks = [end for end in ends if end.adapted is not None]
    values = [end.handed for end in ends] + [end.adapted for end in ends if end.adapted is not None]
    low, high = axes.get_ylim()
    low, high = min(low, min(values) - 0.01), min(1.02, max(high, max(values) + 0.02))
    axes.set_ylim(low, high)
    axes.figure.draw_without_rendering()  # the layout fixes the height
    inch = (high - low) / (axes.get_window_extent().height / axes.figure.dpi)
    margin = _right_margin(axes)

    lane = lanes([end.adapted or 0.0 for end in marks], 0.16 * inch)
    for end, place in zip(marks, lane, strict=True):
        diamond = _diamond(end.look["color"])
        axes.plot(
            [14 + 12 * place], [end.adapted], transform=margin, clip_on=False, zorder=5, **diamond
        )
    edge = 8 + 12 * (max(lane, default=-1) + 1)
    heights = spread([end.handed for end in ends], 0.2 * inch, low, high)
    for end, height in zip(ends, heights, strict=True):
        corners = [2, edge, edge + 14], [end.handed, end.handed, height]
        axes.plot(*corners, transform=margin, clip_on=False, linewidth=1.0, **end.look)
        text = f"{end.label}  {end.handed:.1%}"
        text += "" if end.adapted is None else f"  \N{WHITE DIAMOND} {end.adapted:.1%}"
        style: Any = {"va": "center", "fontweight": "bold", "fontsize": 9.0}
        axes.text(edge + 17, height, text, transform=margin, color=end.look["color"], **style)


def _right_margin(axes: Any) -> Any:
    """Coordinates beside the plot: x in points from its right edge, y in accuracy."""
    from matplotlib.transforms import Affine2D, ScaledTranslation, blended_transform_factory

    points = Affine2D().scale(1 / 72) + axes.figure.dpi_scale_trans
    edge = ScaledTranslation(1, 0, axes.transAxes)
    return blended_transform_factory(points + edge, axes.transData)


def _explain(axes: Any, curves: Mapping[str, Sequence[Curve]]) -> None:
    """A legend for what the labels do not say: the band and the diamond, where there are any."""
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    seeds = sorted({len(runs) for runs in curves.values()})
    handles: list[Any] = []
    if seeds[-1] > 1:
        count = str(seeds[0]) if len(seeds) == 1 else f"{seeds[0]} to {seeds[-1]}"
        handles.append(Line2D([], [], color=QUIET, linewidth=1.8, label=f"mean of {count} seeds"))
        handles.append(Patch(color=QUIET, alpha=0.2, linewidth=0, label="lowest to highest seed"))
    if any(run.adapted is not None for runs in curves.values() for run in runs):
        handles.append(Line2D([], [], label="final, after local adaptation", **_diamond(QUIET)))
    if handles:
        axes.figure.legend(
            handles=handles, loc="outside lower center", ncols=3, frameon=False, fontsize=9
        )
