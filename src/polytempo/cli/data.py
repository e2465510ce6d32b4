"""`polytempo data`: the list of data sets, getting them, and how one is divided among clients."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.markup import escape
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

from polytempo.cli.console import interrupted, listing, notes, output
from polytempo.cli.options import Config, Json
from polytempo.cli.settings import with_settings
from polytempo.core.errors import PolytempoError
from polytempo.data import DatasetInfo, Got, available, data_folder, get
from polytempo.data.download import Report
from polytempo.data.origin import megabytes
from polytempo.experiments.config import FEDERATION, make_config, read_config
from polytempo.experiments.world import load_federation
from polytempo.report import plot_labels

data_group = typer.Typer(add_completion=False, invoke_without_command=True)
DataDir = Annotated[
    str | None,
    typer.Option(
        "--data-dir",
        help="Folder with the data files \\[POLYTEMPO_DATA, else data in the user's cache].",
        show_default=False,
    ),
]


@data_group.callback()
@with_settings(*FEDERATION, "seed")
def data_command(
    *,
    context: typer.Context,
    config: Config = None,
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="PNG file for a plot of the labels.")
    ] = None,
    as_json: Json = False,
    settings: dict[str, Any],
) -> None:
    """List the data sets, get them, or show how one is divided among clients.

    Example: polytempo data get cifar10 mnist

    Example: polytempo data --data digits --clients 20 --partition dirichlet:alpha=0.1 -o labels.png
    """
    base = {**(read_config(config) if config else {}), **settings}
    if context.invoked_subcommand:
        if base or out or as_json:
            raise PolytempoError(
                f"options of `polytempo data {context.invoked_subcommand}` come after it"
            )
        return
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


@data_group.command("list")
def list_command(*, data_dir: DataDir = None, as_json: Json = False) -> None:
    """List the data sets: which are here, which can be got, their size and licence.

    Example: polytempo data list --json
    """
    _list_data(data_dir, as_json)


@data_group.command("get")
def get_command(
    names: Annotated[list[str], typer.Argument(help="Data sets, such as cifar10 mnist uci-har.")],
    *,
    data_dir: DataDir = None,
    files: Annotated[
        list[Path] | None,
        typer.Option(
            "--from",
            help="An archive, file or folder of the publisher's that is here already, instead of a "
            "download; repeat it for several.",
        ),
    ] = None,
    urls: Annotated[
        list[str] | None,
        typer.Option(
            "--url",
            help="Download from here instead: a folder, ending in /, with files of the official "
            "names, or the address of the file (repeated, of each file).",
        ),
    ] = None,
    force: Annotated[
        bool, typer.Option("--force", help="Get it again, though it is here.", metavar="")
    ] = False,
    as_json: Json = False,
) -> None:
    """Download data sets, check them and convert them; an interrupted download is resumed.

    Example: polytempo data get cifar10 uci-har

    Example: polytempo data get mnist --from train-images-idx3-ubyte.gz --from
    train-labels-idx1-ubyte.gz --from t10k-images-idx3-ubyte.gz --from t10k-labels-idx1-ubyte.gz
    """
    if len(names) > 1 and (files or not all(url.endswith("/") for url in urls or ())):
        raise PolytempoError(
            f"--from and --url FILE are for one data set, but {len(names)} are named; call it once "
            "for each"
        )
    found = []
    try:
        for name in names:
            with _bars() as report:
                one = get(
                    name,
                    data_dir=data_dir,
                    files=files or (),
                    urls=urls or (),
                    force=force,
                    report=report,
                )
            found.append({**vars(one), "path": str(one.path)})
            if not as_json:
                _show(one)
    except KeyboardInterrupt:
        interrupted(shlex.join(["polytempo", *sys.argv[1:]]))
    if as_json:
        output.print_json(data=found)


def _show(one: Got) -> None:
    what = "is here" if not one.new else "is here now"
    if one.samples:
        what += f", {one.samples:,} samples"
    output.print(f"{one.name} {what}: {one.path}", markup=False, highlight=False, soft_wrap=True)
    for remark in one.remarks:
        notes.print(f"[yellow]note:[/] {escape(remark)}", highlight=False, soft_wrap=True)


@contextmanager
def _bars() -> Iterator[Report]:
    """A bar for each file, on standard error."""
    bars = Progress(
        TextColumn("[bold]{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        console=notes,
        transient=True,
    )
    shown = {}

    def report(file: str, done: int, total: int) -> None:
        if file not in shown:
            shown[file] = bars.add_task(file, total=None)
        bars.update(shown[file], completed=done, total=total or None)

    with bars:
        yield report


def _list_data(data_dir: str | None, as_json: bool) -> None:
    found = available(data_dir)
    if as_json:
        output.print_json(data=[vars(info) for info in found])
        return
    table = listing("Data sets", "name", "here", "samples", "classes", "what")
    for column in table.columns[:-1]:
        column.no_wrap = True
    for info in found:
        counts = ["-" if count is None else f"{count:,}" for count in (info.samples, info.classes)]
        what = info.description
        if info.problem != "classification":
            what = f"{info.problem}: {what}"
        if info.licence:
            what += f" [dim](licence: {info.licence})[/]"
        table.add_row(info.name, _here(info), *counts, what)
    output.print(table)
    output.print(
        f"Files are in {escape(str(data_folder(data_dir)))} (--data-dir, POLYTEMPO_DATA).\n"
        "Get those that are not here: polytempo data get NAME ...\n"
        "Also: the path of an .npz file, of a folder with one .npz file per client, or\n"
        'hub:owner/name for the Hugging Face hub (pip install "polytempo\\[hub]").',
        highlight=False,
        soft_wrap=True,
    )


def _here(info: DatasetInfo) -> str:
    if info.available:
        return "[green]yes[/]"
    return "[red]no[/]" if info.download is None else f"[red]get[/] {megabytes(info.download)}"
