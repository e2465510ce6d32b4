"""The files of a reproduced table or figure: Markdown, plots and HTML."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from polytempo.core.metric import ACCURACY
from polytempo.experiments import result_folder
from polytempo.experiments.compare import PLOTS
from polytempo.experiments.folders import slug
from polytempo.experiments.paper_specs import FIGURES, QUICK, Experiment, filled
from polytempo.experiments.paper_tables import Results, asides, converged, legend, ratio, table
from polytempo.experiments.reproduce import Place, collect, final
from polytempo.experiments.result import RunResult
from polytempo.report import (
    Bar,
    in_formats,
    plot_bars,
    plot_curves,
    plot_heatmaps,
    plot_tradeoff,
    write_html,
)

AGAINST = {
    "time": "simulated time",
    "updates": "uploads",
    "versions": "server steps",
    "messages": "models sent",
}


Draw = Callable[[Callable[..., Path], Path], Path]  # a plot in the formats that are wanted


def write_report(place: Place, dataset: str, command: str, plots: str = "png") -> Path | None:
    """table.md, the plots and report.html of a data set: of every split with finished runs, from
    whichever call. None if there are none. `plots`: as of a run."""
    experiment = place.experiment
    own = [column for column in experiment.columns if column.partition("/")[0] == dataset]
    results = {column: collect(place, column) for column in own}
    columns = [column for column in own if any(results[column].values())]
    if not columns:
        return None
    folder = place.report(dataset)
    folder.mkdir(parents=True, exist_ok=True)
    tables = {column: table(place, column, results[column]) for column in columns}
    images: dict[str, list[tuple[str, Path]]] = {column: [] for column in columns}
    maps: list[tuple[str, Path]] = []
    if result_folder.can_plot():
        draw = partial(in_formats, plots=plots)
        images = {c: _draw(place, folder, c, results[c], draw) for c in columns}
        if experiment.plot == "heatmap":
            maps = [_draw_map(place, folder, {c: results[c] for c in columns}, draw)]
    title = f"{experiment.title}: {experiment.dataset_title(dataset)}"
    notes = experiment.notes(columns)
    warning = [QUICK] if place.quick else []
    text = [f"# {title}", *(f"**{line}**" for line in warning), experiment.about]
    text += [legend(experiment), *(f"![{caption}]({image.name})" for caption, image in maps)]
    for column in columns:
        text += [f"## {experiment.heading(column)}", markdown(tables[column])]
        text += asides(place, column, results[column])
        text += [f"![{caption}]({image.name})" for caption, image in images[column]]
    text += ["## Remarks", "\n".join(f"- {note}" for note in notes)]
    text += ["## Make it again", f"```\n{command}\n```"]
    settings = experiment.settings | experiment.datasets[dataset].settings
    settings = experiment.adjusted(settings, place.quick)
    methods = _spelled(experiment, settings)
    text += ["As Polytempo spells the methods:", markdown(methods)]
    (folder / "table.md").write_text("\n\n".join(text) + "\n", encoding="utf8")
    said = [
        f"{experiment.heading(column)}: {line}"
        for column in columns
        for line in asides(place, column, results[column])
    ]
    write_html(
        folder / "report.html",
        title=title,
        intro="\n\n".join([*warning, experiment.about, legend(experiment), *said, *notes]),
        table=[
            {"split": experiment.column(column)[1].title, **line}
            for column in columns
            for line in tables[column]
        ],
        images=[*maps, *(image for column in columns for image in images[column])],
        settings=settings | {line["method"]: line["strategy"] for line in methods},
        command=command,
    )
    return folder


def markdown(lines: Sequence[Mapping[str, str]]) -> str:
    """A table in Markdown."""
    head, *rest = [list(lines[0]), *(list(line.values()) for line in lines)]
    rows = [head, ["---"] * len(head), *rest]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def _spelled(experiment: Experiment, settings: Mapping[str, Any]) -> list[dict[str, str]]:
    methods = {row: experiment.strategies[row] for row in experiment.rows}
    return [
        {
            "method": experiment.label(row),
            "strategy": filled(method.strategy, {**settings, **method.settings}),
            "settings": ", ".join(f"{k} = {v}" for k, v in (method.settings | method.grid).items()),
        }
        for row, method in methods.items()
    ]


def _draw(
    place: Place, folder: Path, column: str, results: Results, draw: Draw
) -> list[tuple[str, Path]]:
    experiment, split = place.experiment, column.partition("/")[2]
    heading = ("QUICK, " if place.quick else "") + experiment.heading(column)
    label = {row: experiment.label(row) for row in experiment.rows}
    run = {row: found for row, found in results.items() if found}
    curves = {label[row]: [r.curve(experiment.figure) for r in found] for row, found in run.items()}
    images = []
    for x in experiment.against:
        stem = f"accuracy_{split}" if x == "time" else f"accuracy_{split}_{x}"
        of = FIGURES[experiment.figure][1]
        path = draw(partial(plot_curves, curves, ACCURACY, x=x, of=of), folder / f"{stem}.png")
        images.append((f"{heading}: accuracy against {AGAINST[x]}", path))
    if experiment.plot == "bars":
        bars = {label[row]: _bar(place, row, column, results[row]) for row in experiment.rows}
        path = draw(partial(plot_bars, bars, title=heading), folder / f"bars_{split}.png")
        images.append((f"{heading}: handed, adapted, and the paper's figure", path))
    if experiment.plot == "clusters":
        images += _of_runs(place, folder, column, run)
    if experiment.plot == "tradeoff":
        times = {row: ratio(found, results["fedavg"], converged) for row, found in run.items()}
        points = {
            label[row]: (time, final(place, run[row]))
            for row, time in times.items()
            if time is not None
        }
        if points:
            title = f"{heading}: handed accuracy"
            path = draw(
                partial(plot_tradeoff, points, title=title), folder / f"tradeoff_{split}.png"
            )
            images.append((f"{heading}: handed accuracy against convergence time", path))
    return images


def _of_runs(place: Place, folder: Path, column: str, run: Results) -> list[tuple[str, Path]]:
    """Clusters and similarity of each method's first run, as that has drawn them."""
    split, images = column.partition("/")[2], []
    for row, found in run.items():
        seed = found[0].summary["seed"]
        for name in ("clusters.png", "similarity.png"):
            drawn = place.run(row, column, seed, {}) / name
            if drawn.exists():
                path = folder / f"{split}_{slug(row)}_{name}"
                for suffix in (".png", ".pdf", ".svg"):
                    if (each := drawn.with_suffix(suffix)).exists():
                        path.with_suffix(suffix).write_bytes(each.read_bytes())
                what = f"{place.experiment.label(row)}: {PLOTS[name]} (seed {seed})"
                images.append((what, path))
    return images


def _draw_map(
    place: Place, folder: Path, results: Mapping[str, Results], draw: Draw
) -> tuple[str, Path]:
    """A map for each method, if columns have two coordinates; else one of methods and columns."""
    experiment = place.experiment
    panels: dict[str, dict[tuple[str, str], float]] = {}
    for column, of_column in results.items():
        split = experiment.column(column)[1]
        title = experiment.labels.get(column, split.title)
        for row, found in of_column.items():
            label = experiment.label(row)
            panel, at = (label, split.at) if split.at else ("", (title, label))
            if found:
                panels.setdefault(panel, {})[at] = final(place, found)
    x, y = experiment.axes
    drawn = partial(plot_heatmaps, panels, x=x, y=y, title="QUICK" * place.quick)
    path = draw(drawn, folder / "map.png")
    return f"Final accuracy (%), {FIGURES[experiment.figure][1]}", path


def _bar(place: Place, row: str, column: str, found: Sequence[RunResult]) -> Bar:
    published = place.experiment.published(row, column)
    adapted = [r.accuracy_adapted for r in found if r.accuracy_adapted is not None]
    return Bar(
        handed=final(place, found) if found else None,
        adapted=float(np.mean(adapted)) if adapted else None,
        published=published[0] / 100 if published and place.comparable(column) else None,
    )
