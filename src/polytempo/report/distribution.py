"""How a metric is distributed over clients."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from polytempo.core.errors import PolytempoError
from polytempo.core.metric import MetricInfo
from polytempo.report.canvas import DASHES, INK, PALETTE, bare, canvas, metric_axis


def plot_distribution(
    values: Mapping[str, Sequence[Sequence[float]]], metric: MetricInfo, path: str | Path
) -> Path:
    """The metric of every client, under each label: sorted from the worst to the best, and as a box
    (quartiles, median; whiskers from the 10th to the 90th percentile).

    Several lists under one label are several seeds: their clients are shown together.
    """
    pooled = {label: np.array([*chain(*lists)], dtype=float) for label, lists in values.items()}
    if not pooled or not all(len(found) for found in pooled.values()):
        empty = [label for label, found in pooled.items() if not len(found)]
        raise PolytempoError(f"no clients to draw for {empty or 'any label'}; run something first")
    rows = (len(pooled) + 1) // 2
    with canvas(path, 8.0, 4.2 + 0.2 * rows) as figure:
        from matplotlib.lines import Line2D

        curve, box = figure.subplots(1, 2, sharey=True, width_ratios=(3, 2))
        handles = []
        for index, (label, found) in enumerate(pooled.items()):
            look: Any = {
                "color": PALETTE[index % len(PALETTE)],
                "linestyle": DASHES[index // len(PALETTE) % len(DASHES)],
                "linewidth": 1.8,
            }
            ordered = np.sort(found) if metric.better == "higher" else np.sort(found)[::-1]
            share = (np.arange(len(ordered)) + 0.5) / len(ordered)
            curve.plot(share, ordered, **look)
            shown = box.boxplot(
                found, positions=[index], widths=0.6, whis=(10, 90), showfliers=False,
                patch_artist=True,
            )  # fmt: skip
            for part in chain(*shown.values()):
                part.set(color=look["color"])
            for patch in shown["boxes"]:
                patch.set(facecolor=look["color"], alpha=0.35)
            for line in shown["medians"]:
                line.set(color=INK, linewidth=1.8)
            text = f"{label}: median {metric.text(float(np.median(found)))}"
            handles.append(Line2D([], [], **look, label=text))
        for axes in (curve, box):
            bare(axes)
        metric_axis(curve, metric, [float(x) for x in np.concatenate([*pooled.values()])])
        curve.set(xlabel="clients, from the worst to the best", title="each client")
        curve.xaxis.set_major_formatter("{x:.0%}")
        curve.margins(x=0.01)
        box.set(title="quartiles, 10% and 90%")
        box.set_xticks([])
        figure.legend(
            handles=handles, loc="outside lower center", ncols=2, frameon=False, fontsize=9
        )
    return Path(path)
