"""The command `polytempo`. It only talks to people: all the work is done in the layers below."""

from __future__ import annotations

import inspect
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any, cast

import typer
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from polytempo.cli.peers import register as register_peers
from polytempo.cli.settings import Config, Json, with_settings
from polytempo.cli.tables import about_run, bench_tables
from polytempo.core.errors import PolytempoError, nearest
from polytempo.core.registry import Options
from polytempo.data import available
from polytempo.experiments.compare import compare as run_comparison
from polytempo.experiments.compare import slug
from polytempo.experiments.config import FEDERATION, RunConfig, make_config, read_config
from polytempo.experiments.paper_report import write_report
from polytempo.experiments.paper_specs import (
    QUICK,
    choose_columns,
    choose_rows,
    experiments,
    load_experiment,
)
from polytempo.experiments.reproduce import Place, asides, carry_out, collect, legend
from polytempo.experiments.reproduce import table as reproduction
from polytempo.experiments.result import RunResult, percent
from polytempo.experiments.run import Attach, load_federation, resume, run
from polytempo.report import plot_labels
from polytempo.simulation import Engine
from polytempo.simulation.engine import Observer
from polytempo.strategies import STRATEGIES
from polytempo.training.executors.processes import cores


def _version(wanted: bool) -> None:
    if wanted:
        output.print(version("polytempo"), highlight=False)
        raise typer.Exit


app = typer.Typer(
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
output = Console()
notes = Console(stderr=True)
_WIDE = 1000  # characters of a line that is not on a terminal


@app.callback()
def options_of_all(
    show: Annotated[
        bool,
        typer.Option(
            "--version", help="Print the version.", callback=_version, is_eager=True, metavar=""
        ),
    ] = False,
) -> None:
    """Asynchronous, personalised federated learning: simulate it, compare it, trust it."""


def main() -> None:
    """Entry point: a mistake of the user's is one line, not a traceback."""
    sys.path.insert(0, "")  # so that module:Class finds the user's module in this folder
    try:
        code = app(standalone_mode=False)
    except PolytempoError as error:
        _complain(str(error))
        code = 2
    except (typer.Abort, KeyboardInterrupt):
        code = 130
    except Exception as error:
        if not hasattr(error, "format_message"):
            raise
        # What the command line itself could not read (its class differs between versions of typer).
        message = error.format_message()
        if not message:  # `polytempo` alone: its help was shown
            sys.exit(2)
        where = getattr(getattr(error, "ctx", None), "command_path", "polytempo")
        _complain(f"{message.rstrip('.')}; see {where} --help")
        code = 2
    sys.exit(code)


def _complain(what: str) -> None:
    notes.print(f"[bold red]error:[/] {escape(what)}", soft_wrap=True, highlight=False)


# -- commands -------------------------------------------------------------------------------------


@app.command("run")
@with_settings(*RunConfig.model_fields)
def run_command(
    *,
    config: Config = None,
    out: Annotated[
        Path | None,
        typer.Option("--out", "-o", help="Folder to write \\[a new one in runs]."),
    ] = None,
    resume_from: Annotated[
        Path | None,
        typer.Option(
            "--resume", help="Go on with the run of this folder (perhaps with more --rounds)."
        ),
    ] = None,
    as_json: Json = False,
    settings: dict[str, Any],
) -> None:
    """Run one strategy on a federation, on a simulated clock.

    Example: polytempo run --strategy pace:graph.gamma=2 --data digits --clients 20 --rounds 400

    Ctrl-C stops between two events and leaves a folder that --resume continues.
    """
    with _progress(as_json) as progress:
        if resume_from is not None:
            resume_from = resume_from.expanduser()
            rounds, workers = settings.pop("rounds", None), settings.pop("workers", None)
            if settings or config or out:
                name = "config" if config else "out" if out else next(iter(settings))
                raise PolytempoError(
                    f"--resume takes its settings from {resume_from}; only --rounds and --workers "
                    f"can be changed, not --{name.replace('_', '-')}"
                )
            folder = resume_from
            observer = _watch(progress, folder.name)
            result = resume(folder, rounds=rounds, workers=workers, observer=observer)
        else:
            chosen = make_config({**(read_config(config) if config else {}), **settings}, "run")
            folder = out.expanduser() if out else _free_folder(chosen)
            observer = _watch(progress, str(chosen.strategy_table["name"]))
            try:
                result = run(chosen, folder, observer=observer)
            finally:
                if not out and not any(folder.iterdir()):  # nothing came of it
                    folder.rmdir()
    if as_json:
        output.print_json(data=result.summary)
    else:
        _show(result, folder)
    if not result.summary["complete"]:
        _stopped(f"polytempo run --resume {folder}")


@app.command("compare")
@with_settings(*(name for name in RunConfig.model_fields if name not in ("strategy", "seed")))
def compare_command(
    strategies: Annotated[
        list[str], typer.Argument(help="Strategies, with options: fedavg pace pace:graph.gamma=2")
    ],
    *,
    config: Config = None,
    out: Annotated[
        Path, typer.Option("--out", "-o", help="Folder to write; what is in it is not run again.")
    ] = Path("runs/compare"),
    seeds: Annotated[int, typer.Option(help="How many seeds, from --first-seed on.")] = 1,
    first_seed: Annotated[int | None, typer.Option(help="The first seed \\[0].")] = None,
    target: Annotated[
        str | None,
        typer.Option(
            help="Accuracy for the column 'time to': a number such as 0.8, or one of the "
            "strategies, meaning its best \\[fedavg, or the first]."
        ),
    ] = None,
    as_json: Json = False,
    settings: dict[str, Any],
) -> None:
    """Run several strategies on the same federation, devices and seeds.

    Example: polytempo compare pace fedavg fedasync standalone --seeds 3 --out runs/mine

    Calling it again goes on where it was interrupted.
    """
    if seeds < 1:
        raise PolytempoError(f"--seeds must be 1 or more, got {seeds}")
    base = {**(read_config(config) if config else {}), **settings}
    out = out.expanduser()
    first = base.pop("seed", 0) if first_seed is None else first_seed
    with _progress(as_json) as progress:
        comparison = run_comparison(
            strategies,
            base,
            out,
            seeds=range(first, first + seeds),
            target=target,
            watch=lambda label, seed: _watch(progress, f"{label} seed {seed}"),
        )
    if as_json:
        output.print_json(data=comparison.summaries())
    elif comparison.complete and comparison.results:
        _print_table(comparison.table())
        output.print(f"plots and report: [bold]{escape(str(out))}/report.html[/]")
    if not comparison.complete:
        _stopped("the same command again")
    for failure in comparison.failed.values():
        _complain(failure)
    if comparison.failed:
        raise typer.Exit(2)


@app.command("reproduce")
@with_settings("data_dir", "workers")
def reproduce_command(
    experiment: Annotated[
        str | None, typer.Argument(help="Table or figure, such as pace/table2 \\[list them].")
    ] = None,
    *,
    dataset: Annotated[str | None, typer.Option(help="One data set \\[all].")] = None,
    partition: Annotated[
        str | None, typer.Option(help="One split of it, such as dir0.1 \\[all of the paper's].")
    ] = None,
    only: Annotated[
        str | None, typer.Option(help="Run only these rows: pace,fedavg,standalone \\[all].")
    ] = None,
    model: Annotated[
        str | None, typer.Option(help="Another model, such as resnet18 \\[the experiment's].")
    ] = None,
    rounds: Annotated[
        int | None,
        typer.Option(min=1, help="Another length, in updates, such as 50000 \\[the experiment's]."),
    ] = None,
    seeds: Annotated[int, typer.Option(min=1, help="How many seeds, from --first-seed on.")] = 1,
    first_seed: Annotated[int, typer.Option(help="The first seed.")] = 0,
    quick: Annotated[
        bool,
        typer.Option("--quick", help="Scaled down: minutes, and not comparable.", metavar=""),
    ] = False,
    out: Annotated[
        Path, typer.Option("--out", "-o", help="Folder to write; what is in it is not run again.")
    ] = Path("runs/reproduce"),
    as_json: Json = False,
    settings: dict[str, Any],
) -> None:
    """Run a paper's table or figure again, and show its figures beside ours.

    Example: polytempo reproduce pace/table2 --dataset cifar10 --only pace,standalone --quick

    Calling it again goes on where it was interrupted. All experiments of a paper share their runs.
    """
    if experiment is None:
        _list_experiments(as_json)
        return
    chosen = load_experiment(experiment, model, rounds)
    columns, rows = choose_columns(chosen, dataset, partition), choose_rows(chosen, only)
    place = Place(out.expanduser(), chosen, quick)
    with _progress(as_json) as progress:
        complete, failed = carry_out(
            place,
            columns,
            rows,
            range(first_seed, first_seed + seeds),
            watch=lambda label, seed: _watch(progress, f"{label} seed {seed}"),
            **settings,
        )
    folders = []
    for name in dict.fromkeys(column.partition("/")[0] for column in columns):
        again = f"polytempo reproduce {experiment} --dataset {name}" + " --quick" * quick
        again += f" --model {model}" if model else ""
        again += f" --rounds {rounds}" if rounds else ""
        folders.append(write_report(place, name, again))
    results = {column: collect(place, column) for column in columns}
    tables = {column: reproduction(place, column, results[column]) for column in columns}
    if as_json:
        about = {"title": chosen.title, "quick": quick, "remarks": chosen.notes(columns)}
        output.print_json(data=about | {"tables": tables})
    else:
        output.print(f"[bold]{escape(chosen.title)}[/]", highlight=False)
        if quick:
            output.print(f"[bold yellow]{QUICK}[/]", highlight=False)
        for column in columns:
            output.print(f"\n{escape(chosen.heading(column))}", highlight=False)
            _print_table(tables[column])
            for line in asides(place, column, results[column]):
                output.print(escape(line), highlight=False)
        for remark in (legend(chosen), *chosen.notes(columns)):
            output.print(f"- {escape(remark)}", highlight=False)
        for folder in filter(None, folders):
            output.print(f"table, plots and report: [bold]{escape(str(folder))}[/]", soft_wrap=True)
    for failure in failed:
        _complain(failure)
    if not complete:
        _stopped("the same command again")
    if failed:
        raise typer.Exit(2)


@app.command("strategies")
def strategies_command(as_json: Json = False) -> None:
    """List the strategies with their papers and options."""
    found = []
    for name in STRATEGIES:
        cls = cast(Any, STRATEGIES[name])
        about = inspect.getdoc(cls) or ""
        found.append(
            {
                "name": name,
                "family": cls.family,
                "paper": cls.paper,
                "summary": about.partition("\n")[0],
                "parameters": _parameters(cls()),
                "description": about,
            }
        )
    if as_json:
        output.print_json(data=found)
        return
    table = Table(
        title="Strategies: use as NAME or NAME:option=value,option=value",
        box=box.SIMPLE_HEAD,
        show_lines=True,
    )
    for column in ("name", "what it is", "options and defaults"):
        table.add_column(column, style="bold" if column == "name" else None, overflow="fold")
    for row in found:
        options = "\n".join(f"{k}={v}" for k, v in row["parameters"].items())
        about = f"{row['summary']}\n[dim]{row['family']}; {escape(row['paper'])}[/]"
        table.add_row(row["name"], about, options or "-")
    output.print(table)


def _parameters(thing: Any) -> dict[str, Any]:
    """The options and their values, those of options included (`graph.gamma`)."""
    found: dict[str, Any] = {}
    for name in (field.name for field in fields(thing) if field.init):
        value = getattr(thing, name)
        if isinstance(value, Options):
            found[name] = cast(Any, value).name
            found |= {f"{name}.{key}": inner for key, inner in _parameters(value).items()}
        else:
            found[name] = value
    return found


@app.command("data")
@with_settings(*FEDERATION, "seed")
def data_command(
    *,
    config: Config = None,
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="PNG to draw the label distribution in.")
    ] = None,
    as_json: Json = False,
    settings: dict[str, Any],
) -> None:
    """List the data sets, or show how one is spread over clients.

    Example: polytempo data --data digits --clients 20 --partition dirichlet:alpha=0.1 -o labels.png
    """
    base = {**(read_config(config) if config else {}), **settings}
    if base.keys() <= {"data_dir", "seed"} and out is None:
        _list_data(base.get("data_dir"), as_json)
        return
    federation = load_federation(make_config(base, "data"))
    counts = federation.label_counts()
    figures = {
        "federation": federation.description,
        "clients": federation.clients,
        "classes": federation.classes,
        "shape": list(federation.shape),
        "training_samples": sum(federation.samples),
        "smallest_client": min(federation.samples),
        "largest_client": max(federation.samples),
        "labels_per_client": float((counts > 0).sum(1).mean()),
        "commonest_label": float((counts.max(1) / counts.sum(1)).mean()),
        "commonest_label_by_sample": float(counts.max(1).sum() / counts.sum()),
        "groups": None if federation.groups is None else len(set(federation.groups.tolist())),
    }
    if out is not None:
        figures["plot"] = str(plot_labels(counts, out, federation.groups, federation.description))
    if as_json:
        output.print_json(data=figures)
    else:
        for key, value in figures.items():
            line = f"{key.replace('_', ' '):>18}  {escape(str(value))}"
            output.print(line, highlight=False, soft_wrap=True)
        if out is None:
            output.print("[dim]add --out labels.png for a picture of the labels per client[/]")


@app.command("bench")
def bench_command(
    parts: Annotated[
        list[str] | None,
        typer.Argument(
            help="What to measure: lenet mlp textcnn server clusters scale exchange \\[all]."
        ),
    ] = None,
    *,
    workers: Annotated[int | None, typer.Option(help="Worker processes \\[processors].")] = None,
    repeats: Annotated[int, typer.Option(min=1, help="Turns; figures are their medians.")] = 5,
    quick: Annotated[
        bool, typer.Option("--quick", help="Fewer updates, smaller sizes: rougher.", metavar="")
    ] = False,
    out: Annotated[Path | None, typer.Option("--out", "-o", help="JSON file to write.")] = None,
    as_json: Json = False,
) -> None:
    """Measure speed against a plain torch loop, in turns with it, and the machine's own limits.

    Example: polytempo bench lenet mlp --repeats 3 --out bench.json

    All of it takes about an hour; --quick about five minutes. Close other programs first.
    """
    from polytempo.bench import PARTS, run_bench

    for part in parts or ():
        if part not in PARTS:
            raise PolytempoError(f"bench has no part {part!r}{nearest(part, PARTS)}")
    if out is not None and not out.parent.is_dir():
        raise PolytempoError(f"{out} cannot be written: there is no folder {out.parent}")
    with notes.status("measuring") as status:
        found = run_bench(
            parts or PARTS,
            workers=workers or cores(),
            repeats=repeats,
            quick=quick,
            watch=lambda now: status.update(f"measuring: {now}"),
        )
    if out is not None:
        out.write_text(json.dumps(found, indent=2) + "\n", encoding="utf8")
    if as_json:
        output.print_json(data=found)
    else:
        _show_bench(found)


register_peers(app, output, notes)


# -- showing --------------------------------------------------------------------------------------


def _list_data(data_dir: str | None, as_json: bool) -> None:
    found = available(data_dir)
    if as_json:
        output.print_json(data=[vars(info) for info in found])
        return
    table = Table(title="Data sets", box=box.SIMPLE_HEAD)
    for column in ("name", "here", "samples", "classes", "what"):
        table.add_column(column, style="bold" if column == "name" else None, overflow="fold")
    for info in found:
        here = "[green]yes[/]" if info.available else "[red]no[/]"
        samples = "-" if info.samples is None else f"{info.samples:,}"
        classes = "-" if info.classes is None else str(info.classes)
        table.add_row(info.name, here, samples, classes, info.description)
    output.print(table)
    output.print(
        "Files are looked for in the folder named by --data-dir or POLYTEMPO_DATA.\n"
        "Also: the path of an .npz or of a folder with one .npz a client, and hub:owner/name\n"
        'of the Hugging Face hub (pip install "polytempo\\[hub]").'
    )


def _list_experiments(as_json: bool) -> None:
    found = [load_experiment(name) for name in experiments()]
    if as_json:
        keys = ("name", "title", "about", "columns", "rows")
        output.print_json(data=[{key: getattr(each, key) for key in keys} for each in found])
        return
    listing = Table(title="polytempo reproduce NAME", box=box.SIMPLE_HEAD)
    for heading in ("name", "what", "data set/partition"):
        listing.add_column(heading, style="bold" if heading == "name" else None, overflow="fold")
    for each in found:
        listing.add_row(each.name, escape(each.title), ", ".join(each.columns))
    output.print(listing)


def _print_table(rows: Sequence[Mapping[str, str]]) -> None:
    """Columns with nothing in them are left out; in a file, lines are as long as need be."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    first, *others = rows[0]
    others = [column for column in others if any(row[column] not in ("-", "") for row in rows)]
    table.add_column(first, min_width=10, overflow="fold")
    for column in others:
        table.add_column(column, justify="right", overflow="fold")
    for row in rows:
        table.add_row(*(escape(row[column]) for column in (first, *others)))
    (output if output.is_terminal else Console(file=output.file, width=_WIDE)).print(table)


def _show(result: RunResult, folder: Path) -> None:
    for key, value in about_run(result.summary, folder).items():
        line = f"{key:>20}  [bold]{escape(value)}[/]"
        output.print(line, highlight=False, soft_wrap=True)


def _show_bench(found: dict[str, Any]) -> None:
    limits = found["machine"]
    output.print(
        f"{limits['processor']}, {limits['cores']} cores; one thread: matrix products "
        f"{limits['gemm_gflops']:.0f} GFLOP/s, reading {limits['read_gb_per_s']:.1f} GB/s",
        highlight=False,
    )
    for table in bench_tables(found):
        if table:
            _print_table(table)


def _stopped(how: str) -> None:
    notes.print(f"[yellow]interrupted[/]; to go on: [bold]{escape(how)}[/]")
    raise typer.Exit(130)


def _free_folder(config: RunConfig) -> Path:
    strategy, data = str(config.strategy_table["name"]), Path(config.data).name
    stem = f"runs/{slug(strategy)}-{slug(data)}-seed{config.seed}"
    folder, number = Path(stem), 2
    folder.parent.mkdir(parents=True, exist_ok=True)
    while True:  # several commands may look for one at once
        try:
            folder.mkdir()
            return folder
        except FileExistsError:
            folder, number = Path(f"{stem}-{number}"), number + 1


@contextmanager
def _progress(quiet: bool) -> Iterator[Progress]:
    """Bars on standard error, which appear with the first of them."""
    bars = Progress(
        TextColumn("[bold]{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[state]}"),
        TimeRemainingColumn(),
        console=notes,
        disable=quiet,
    )
    try:
        yield bars
    finally:
        if bars.live.is_started:
            bars.stop()


def _watch(progress: Progress, label: str) -> Attach:
    """A progress bar with rounds, simulated time and the latest accuracy."""

    def attach(simulator: Engine, rounds: int) -> Observer:
        bar = progress.add_task(label, total=rounds, state="")
        progress.start()

        def observe(event: dict[str, Any] | None = None) -> None:
            accuracy = simulator.history[-1]["accuracy"] if simulator.history else None
            state = f"t={simulator.time:,.1f}s  accuracy {percent(accuracy)}"
            progress.update(bar, completed=simulator.round, state=state)

        observe()
        return observe

    return attach
