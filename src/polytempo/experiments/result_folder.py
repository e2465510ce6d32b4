"""The folder that a result is written to and read from: figures, tables, plots and the report."""

from __future__ import annotations

import importlib.util
import json
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from polytempo.core.errors import PolytempoError
from polytempo.experiments.about import origin, read_about
from polytempo.experiments.result import RunResult
from polytempo.experiments.rows import read_table, write_table
from polytempo.experiments.wording import figures_in_words
from polytempo.files import replace_text, replacing
from polytempo.report import (
    in_formats,
    plot_clusters,
    plot_diagnosis,
    plot_distribution,
    plot_graph,
    plot_peers,
    plot_similarity,
    plot_staleness,
    write_html,
)
from polytempo.simulation import Engine, Extension
from polytempo.simulation.each_client import known

PLOTS: dict[str, tuple[str, Callable[..., Path]]] = {  # of what extensions have to show
    "peers": ("Each peer by itself", plot_peers),
    "clients": ("Each client by itself", plot_peers),
    "diagnosis": ("Why the steps are wrong, and who moves the model", plot_diagnosis),
    "clusters": ("Clusters: who belongs where, when", plot_clusters),
    "similarity": ("How alike the server finds clients, over the run", plot_similarity),
    "graph": ("Collaboration graph: who learns from whom", plot_graph),
}


def write_result(folder: Path, result: RunResult, settings: Mapping[str, Any]) -> None:
    """history.csv, result.json, the plots and the report. Needs matplotlib for the last two."""
    replace_text(folder / "result.json", json.dumps(result.summary, indent=2) + "\n")
    if not result.history:  # nobody has tested anything yet
        return
    write_table(folder / "history.csv", result.history)
    extensions = result.all_extensions()
    for extension in extensions:
        _write_files(folder, extension)
    if not can_plot():
        return
    images = _plots(folder, result, extensions, settings.get("plots", "png"))
    about = read_about(folder)
    write_html(
        folder / "report.html",
        title=f"{result.summary['strategy']} on {result.summary['federation']}",
        intro=f"Seed {result.summary['seed']}, {result.summary['arrivals']} updates folded"
        + ("." if result.summary["complete"] else ", interrupted.")
        + f" Metric: {result.metric.label}, {result.metric.direction}.",
        table=[figures_in_words(result)],
        images=images,
        settings={**settings, **origin(about)},
        command=about.get("command"),
    )


def write_so_far(folder: Path, simulator: Engine) -> None:
    """What a run that goes on has to show: its history, and the tables and arrays of extensions."""
    if simulator.history:
        write_table(folder / "history.csv", simulator.history, durable=False)
    for extension in simulator.extensions.values():
        _write_files(folder, extension, durable=False)


def _write_files(folder: Path, extension: Extension, durable: bool = True) -> None:
    """The tables and arrays that it has to show."""
    for name, rows in extension.tables().items():
        if rows:
            write_table(folder / f"{name}.csv", rows, durable)
    write_arrays(folder, extension, durable)


def write_arrays(folder: Path, extension: Extension, durable: bool = True) -> None:
    for name, arrays in extension.arrays().items():
        with (
            replacing(folder / f"{name}.npz", durable=durable) as partial,
            partial.open("wb") as file,
        ):
            np.savez_compressed(file, **arrays)


def can_plot() -> bool:
    """Whether matplotlib is there; if not, says how to get it."""
    if importlib.util.find_spec("matplotlib") is not None:
        return True
    warnings.warn('no plots without matplotlib: pip install "polytempo[plots]"', stacklevel=2)
    return False


def _plots(
    folder: Path, result: RunResult, extensions: Sequence[Extension], plots: str
) -> list[tuple[str, Path]]:
    metric = result.metric
    path = in_formats(result.plot, folder / f"{metric.name}.png", plots)
    images = [(f"{metric.heading} against {result.clock}", path)]
    counts = {int(k): v for k, v in result.summary["staleness"].items()}
    if any(counts):  # else all updates were fresh
        path = in_formats(partial(plot_staleness, counts), folder / "staleness.png", plots)
        images.append(("Staleness of the updates", path))
    clients = result.clients
    columns = {"handed": metric.name, "adapted": f"{metric.name}_adapted"}
    spread = {
        label: [values]
        for label, column in columns.items()
        if len(values := known(clients, column).tolist()) > 1
    }
    if spread:
        draw = partial(plot_distribution, spread, metric)
        path = in_formats(draw, folder / "distribution.png", plots)
        images.append(("How clients differ: sorted, and as boxes", path))
    for name, given in ((n, g) for each in extensions for n, g in each.plots().items()):
        caption, shown = PLOTS[name]
        path = in_formats(partial(shown, **given), folder / f"{name}.png", plots)
        images.append((caption, path))
    return images


def read_result(folder: Path) -> RunResult:
    """A result as `write_result` left it."""
    if not (folder / "result.json").exists():
        raise PolytempoError(
            f"{folder} holds no result: it has no result.json" + run_inside(folder, "result.json")
        )
    try:
        summary = json.loads((folder / "result.json").read_text(encoding="utf8"))
        history = read_table(folder / "history.csv")
        each = folder / "clients.csv"  # not there for a very great number of clients
        clients = read_table(each) if each.exists() else []
    except (OSError, ValueError) as error:
        raise PolytempoError(f"{folder} holds no readable result: {error}") from error
    return RunResult(summary, history, rows=clients)


def run_inside(folder: Path, file: str) -> str:
    """For a folder that is not a run's but perhaps holds some: one of them."""
    inner = sorted(path.parent for path in folder.glob(f"**/{file}"))[:1]
    return f"; name one of the runs in it, such as {inner[0]}" if inner else ""
