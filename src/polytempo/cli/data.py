"""`polytempo data`: the list of data sets, and how one is divided among clients."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.markup import escape

from polytempo.cli.console import listing, output
from polytempo.cli.options import Config, Json
from polytempo.cli.settings import with_settings
from polytempo.data import available
from polytempo.experiments.config import FEDERATION, make_config, read_config
from polytempo.experiments.run import load_federation
from polytempo.report import plot_labels


@with_settings(*FEDERATION, "seed")
def data_command(
    *,
    config: Config = None,
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="PNG file for a plot of the labels.")
    ] = None,
    as_json: Json = False,
    settings: dict[str, Any],
) -> None:
    """List the data sets, or show how one is divided among clients.

    Example: polytempo data --data digits --clients 20 --partition dirichlet:alpha=0.1 -o labels.png
    """
    base = {**(read_config(config) if config else {}), **settings}
    if base.keys() <= {"data_dir", "seed"} and out is None:
        _list_data(base.get("data_dir"), as_json)
        return
    federation = load_federation(make_config(base, "data"))
    figures: dict[str, Any] = {
        "federation": federation.description,
        "problem": federation.problem,
        "clients": federation.clients,
        "classes" if federation.labelled else "outputs": federation.outputs,
        "shape": list(federation.shape),
        "training_samples": sum(federation.samples),
        "smallest_client": min(federation.samples),
        "largest_client": max(federation.samples),
        "groups": None if federation.groups is None else len(set(federation.groups.tolist())),
    }
    if federation.labelled or out is not None:
        counts = federation.label_counts()
        figures |= {
            "labels_per_client": float((counts > 0).sum(1).mean()),
            "commonest_label": float((counts.max(1) / counts.sum(1)).mean()),
            "commonest_label_by_sample": float(counts.max(1).sum() / counts.sum()),
        }
    if out is not None:
        figures["plot"] = str(plot_labels(counts, out, federation.groups, federation.description))
    if as_json:
        output.print_json(data=figures)
    else:
        width = max(len(key) for key in figures)
        for key, value in figures.items():
            text = f"{value:.2f}" if isinstance(value, float) else str(value)
            text = "-" if value is None else escape(text)
            line = f"{key.replace('_', ' '):>{width}}  {text}"
            output.print(line, highlight=False, soft_wrap=True)
        if out is None and federation.labelled:
            output.print("[dim]add --out labels.png for a plot of the labels per client[/]")


def _list_data(data_dir: str | None, as_json: bool) -> None:
    found = available(data_dir)
    if as_json:
        output.print_json(data=[vars(info) for info in found])
        return
    table = listing("Data sets", "name", "here", "samples", "classes", "what")
    for info in found:
        here = "[green]yes[/]" if info.available else "[red]no[/]"
        samples = "-" if info.samples is None else f"{info.samples:,}"
        classes = "-" if info.classes is None else str(info.classes)
        what = info.description
        if info.problem != "classification":
            what = f"{info.problem}: {what}"
        table.add_row(info.name, here, samples, classes, what)
    output.print(table)
    output.print(
        "Files are looked for in the folder named by --data-dir or POLYTEMPO_DATA.\n"
        "Also: the path of an .npz file, of a folder with one .npz file per client, or\n"
        'hub:owner/name for the Hugging Face hub (pip install "polytempo\\[hub]").'
    )
