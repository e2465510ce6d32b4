"""The metric over the course of a run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from polytempo.core.errors import PolytempoError, nearest
from polytempo.core.metric import MetricInfo
from polytempo.report.canvas import DASHES, PALETTE, bare, canvas, metric_axis
from polytempo.report.intervals import DEVIATIONS, IN_WORDS, Interval

Floats = NDArray[np.float64]
AXES = {
    "time": "simulated time (s)",
    "updates": "updates",
    "versions": "server steps",
    "messages": "models sent",
}

_STRETCH = 5.0  # between the longest and the shortest method: more, and the latter is squeezed


@dataclass(frozen=True)
class Curve:
    """The evaluations of one run, in order; `final` is the figure that it is known by (the last
    evaluation, if not given), `adapted` the same after local adaptation."""

    time: Sequence[float]
    updates: Sequence[int]
    messages: Sequence[int]
    values: Sequence[float]  # of the metric
    adapted: float | None = None
    final: float | None = None
    versions: Sequence[int] = ()  # of the server's model

    def __post_init__(self) -> None:
        sizes = [len(self.time), len(self.updates), len(self.messages), len(self.values)]
        sizes += [len(self.versions)] if self.versions else []
        if len(set(sizes)) != 1 or not sizes[0]:
            raise PolytempoError(
                "a curve needs as many times as updates, messages, values (and versions), at least "
                f"one, but has {', '.join(map(str, sizes))}; evaluate the run at least once"
            )


Line = tuple[Sequence[float], Sequence[float]]  # positions and values, one for each evaluation


def on_common_grid(lines: Sequence[Line]) -> tuple[Floats, Floats]:
    """The points at which any line changes, and each line's value there, [lines, points].

    A value holds until the next evaluation, and the last one to the end: a run that is over
    still has its model. Points before every line has begun are left out.
    """
    positions = [np.asarray(where, dtype=float) for where, _ in lines]
    grid = np.unique(np.concatenate(positions))
    grid = grid[grid >= max(p[0] for p in positions)]
    values = [
        np.asarray(found, dtype=float)[np.searchsorted(p, grid, side="right") - 1]
        for (_, found), p in zip(lines, positions, strict=True)
    ]
    return grid, np.stack(values)


def plot_curves(
    curves: Mapping[str, Sequence[Curve]],
    metric: MetricInfo,
    path: str | Path,
    *,
    x: str = "time",
    of: str = "mean over clients",
    clock: str = AXES["time"],
    interval: Interval = "std",
) -> Path:
    """The metric against "time", "updates", "versions" or "messages", one line for each label.

    Several curves under one label are several seeds: the line is their mean, and the band reaches
    as far to either side as the `interval` says. A hollow diamond is the final value after local
    adaptation. Where the first rise would flatten the rest, the axis of values leaves it out; where
    one method takes many times as long as another, that of time is logarithmic. `clock`: what that
    axis is called.
    """
    axis = clock if x == "time" else AXES.get(x)
    if x not in AXES:
        raise PolytempoError(f"{metric.name} cannot be drawn against {x!r}{nearest(x, AXES)}")
    if not curves or not all(curves.values()):
        empty = [label for label, runs in curves.items() if not runs]
        raise PolytempoError(f"no curves to draw for {empty or 'any label'}; run something first")
    if not all(len(getattr(curve, x)) for runs in curves.values() for curve in runs):
        raise PolytempoError(
            f"{metric.name} cannot be drawn against {x!r}: a curve does not have it"
        )
    rows = (len(curves) + 1) // 2
    with canvas(path, 8.0, 4.6 + 0.2 * rows) as figure:
        from matplotlib.lines import Line2D
        from matplotlib.ticker import LogLocator, NullLocator

        axes = figure.add_subplot()
        handles, grids = [], []
        drawn: list[float] = []
        late: list[float] = []  # of the last two thirds
        for index, (label, runs) in enumerate(curves.items()):
            colour = PALETTE[index % len(PALETTE)]
            look: Any = {"color": colour, "linestyle": DASHES[index // len(PALETTE) % len(DASHES)]}
            grid, values = on_common_grid([(getattr(run, x), run.values) for run in runs])
            grids.append(grid)
            mean = values.mean(axis=0)
            apart = DEVIATIONS[interval](values) if len(runs) > 1 else np.zeros_like(mean)
            low, high = mean - apart, mean + apart
            drawn += [*low, *high]
            late += [*low[len(grid) // 3 :], *high[len(grid) // 3 :]]
            axes.plot(grid, mean, **look, linewidth=1.8, drawstyle="steps-post")
            if x == "messages" and grid[-1] == 0:  # who sends nothing is as good at any price
                axes.axhline(mean[-1], color=colour, linewidth=1.2, linestyle=DASHES[2])
            if len(runs) > 1:
                axes.fill_between(grid, low, high, color=colour, alpha=0.16, lw=0, step="post")
            finals = [run.values[-1] if run.final is None else run.final for run in runs]
            text = f"{label}: {metric.text(float(np.mean(finals)))}"
            adapted = [run.adapted for run in runs if run.adapted is not None]
            if adapted:
                height = float(np.mean(adapted))
                drawn.append(height)
                late.append(height)
                axes.plot([grid[-1]], [height], clip_on=False, zorder=5, **_diamond(colour))
                text += f", \N{WHITE DIAMOND} {metric.text(height)}"
            handles.append(Line2D([], [], **look, linewidth=1.8, label=text))
        bare(axes)
        axes.margins(x=0.01)
        metric_axis(axes, metric, _closer(axes, metric, drawn, late))
        axes.set(xlabel=axis, title=_title(curves, of, interval))
        ends = [grid[-1] for grid in grids]
        if x == "time" and max(ends) > _STRETCH * min(ends) > 0:
            axes.set_xscale("log")
            axes.xaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
            axes.xaxis.set_minor_locator(NullLocator())
            axes.set(xlim=(min(grid[grid > 0][0] for grid in grids), 1.05 * max(ends)))
            axes.set_xlabel(f"{axis}, logarithmic")
        whole = axes.get_xscale() == "linear" and axes.get_xlim()[1] > 10
        axes.xaxis.set_major_formatter("{x:,.0f}" if whole else "{x:,g}")
        figure.legend(
            handles=handles, loc="outside lower center", ncols=2, frameon=False, fontsize=9
        )
    return Path(path)


def _closer(
    axes: Any, metric: MetricInfo, drawn: Sequence[float], late: Sequence[float]
) -> Sequence[float]:
    """Leave out what the values were at first, if that is most of the axis; what is left on it."""
    wide, narrow = (np.ptp([v for v in x if np.isfinite(v)] or [0.0]) for x in (drawn, late))
    if not 0 < narrow < wide / 2:
        return drawn
    end, room = metric.worst(value for value in late if np.isfinite(value)), 0.08 * narrow
    left = [value for value in drawn if np.isfinite(value) and metric.reaches(value, end)]
    axes.set_ylim(min(left) - room, max(left) + room)
    return left


def _title(curves: Mapping[str, Sequence[Curve]], of: str, interval: Interval) -> str:
    """What the marks mean."""
    title = of
    seeds = max(len(runs) for runs in curves.values())
    if seeds > 1:
        title += f"; mean ± {IN_WORDS[interval]} over {seeds} seeds"
    if any(run.adapted is not None for runs in curves.values() for run in runs):
        title += "; \N{WHITE DIAMOND} after local adaptation"
    return title


def _diamond(colour: str) -> dict[str, Any]:
    return {
        "marker": "D",
        "markersize": 7,
        "markerfacecolor": "white",
        "markeredgecolor": colour,
        "markeredgewidth": 1.6,
        "linestyle": "none",
    }
