"""Plots and HTML from plain data. Matplotlib is imported only when something is drawn."""

from __future__ import annotations

from polytempo.report.html import write_html
from polytempo.report.plots import (
    Bar,
    Curve,
    plot_accuracy,
    plot_bars,
    plot_diagnosis,
    plot_graph,
    plot_heatmaps,
    plot_labels,
    plot_staleness,
    plot_tradeoff,
)

__all__ = [
    "Bar",
    "Curve",
    "plot_accuracy",
    "plot_bars",
    "plot_diagnosis",
    "plot_graph",
    "plot_heatmaps",
    "plot_labels",
    "plot_staleness",
    "plot_tradeoff",
    "write_html",
]
