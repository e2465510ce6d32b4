"""Our figures next to published ones: bars, and accuracy against time."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from polytempo.core.errors import PolytempoError
from polytempo.report.canvas import INK, PALETTE, QUIET, bare, canvas


@dataclass(frozen=True)
class Bar:
    """A method's accuracies from 0 to 1, as far as they are known."""

    handed: float | None
    adapted: float | None = None
    published: float | None = None


def plot_bars(bars: Mapping[str, Bar], path: str | Path, title: str) -> Path:
    """Two bars per method, handed and adapted, and a line where the paper's figure is."""
    if not bars:
        raise PolytempoError("no bars to draw; run something first")
    with canvas(path, 8.0, 1.4 + 0.5 * len(bars)) as figure:
        from matplotlib.ticker import PercentFormatter

        axes = figure.add_subplot()
        series = (("handed", PALETTE[0], -0.19), ("adapted", PALETTE[2], 0.19))
        for name, colour, offset in series:
            known = {k: getattr(b, name) for k, b in enumerate(bars.values())}
            known = {k: value for k, value in known.items() if value is not None}
            places = [k + offset for k in known]
            axes.barh(places, list(known.values()), height=0.34, color=colour, label=name)
            for place, value in zip(places, known.values(), strict=True):
                inside = value > 0.12  # else there is no room in the bar
                axes.annotate(
                    f"{value:.1%}",
                    (0 if inside else value, place),
                    xytext=(4, 0),
                    textcoords="offset points",
                    va="center",
                    fontsize=8,
                    color="white" if inside else QUIET,
                )
        said = {k: bar.published for k, bar in enumerate(bars.values())}
        said = {k: value for k, value in said.items() if value is not None}
        if said:
            low, high = [k - 0.42 for k in said], [k + 0.42 for k in said]
            axes.vlines(list(said.values()), low, high, color=INK, linewidth=2, label="paper")
        axes.set_yticks(range(len(bars)), list(bars))
        axes.set_ylim(len(bars) - 0.45, -0.55)  # the first on top
        axes.set_xlim(0, 1)
        bare(axes, grid=None)
        axes.set_xticks([0, 0.25, 0.5, 0.75, 1])
        axes.xaxis.set_major_formatter(PercentFormatter(1, decimals=0))
        axes.set_title(title)
        figure.legend(loc="outside lower center", ncols=3, frameon=False, fontsize=9)
    return Path(path)


def plot_tradeoff(points: Mapping[str, tuple[float, float]], path: str | Path, title: str) -> Path:
    """Accuracy against convergence time, (time, accuracy) for each method; up and left is best."""
    if not points:
        raise PolytempoError("no points to draw; run something first")
    markers = "osD^vPX<>*"
    with canvas(path, 8.0, 4.8) as figure:
        from matplotlib.ticker import PercentFormatter

        axes = figure.add_subplot()
        for index, (label, (time, accuracy)) in enumerate(points.items()):
            axes.plot(
                [time],
                [accuracy],
                linestyle="none",
                marker=markers[index // len(PALETTE) % len(markers)],
                markersize=8,
                clip_on=False,
                color=PALETTE[index % len(PALETTE)],
                label=label,
            )
        bare(axes)
        axes.margins(0.08)
        axes.set_xlim(left=0)
        axes.yaxis.set_major_formatter(PercentFormatter(1, decimals=None))
        axes.xaxis.set_major_formatter(PercentFormatter(1, decimals=0))
        axes.set(xlabel="convergence time, share of FedAvg's", title=title)
        figure.legend(loc="outside right upper", frameon=False, fontsize=9)
    return Path(path)
