"""Plots and HTML from plain data. Matplotlib is imported only when something is drawn."""

from __future__ import annotations

from polytempo.report.bars import Bar, plot_bars, plot_tradeoff
from polytempo.report.canvas import in_formats
from polytempo.report.clusters import plot_clusters, plot_similarity
from polytempo.report.curves import Curve, Line, plot_curves
from polytempo.report.diagnosis import plot_diagnosis
from polytempo.report.distribution import plot_distribution
from polytempo.report.heatmap import plot_heatmaps
from polytempo.report.html import html_table, write_html
from polytempo.report.maps import plot_graph, plot_labels
from polytempo.report.peers import plot_peers
from polytempo.report.staleness import plot_staleness

__all__ = [
    "Bar",
    "Curve",
    "Line",
    "html_table",
    "in_formats",
    "plot_bars",
    "plot_clusters",
    "plot_curves",
    "plot_diagnosis",
    "plot_distribution",
    "plot_graph",
    "plot_heatmaps",
    "plot_labels",
    "plot_peers",
    "plot_similarity",
    "plot_staleness",
    "plot_tradeoff",
    "write_html",
]
