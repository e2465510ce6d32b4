"""Plots and HTML from plain data. Matplotlib is imported only when something is drawn."""

from __future__ import annotations

from polytempo.report.html import write_html
from polytempo.report.plots import (
    Curve,
    plot_accuracy,
    plot_graph,
    plot_labels,
    plot_staleness,
)

__all__ = [
    "Curve",
    "plot_accuracy",
    "plot_graph",
    "plot_labels",
    "plot_staleness",
    "write_html",
]
