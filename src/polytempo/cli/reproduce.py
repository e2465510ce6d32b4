"""`polytempo reproduce`: rerun a paper's table or figure."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.markup import escape

from polytempo.cli.console import complain, interrupted, listing, output, print_table
from polytempo.cli.options import Json
from polytempo.cli.settings import with_settings
from polytempo.experiments.jobs import Watch
from polytempo.experiments.paper_report import write_report
from polytempo.experiments.paper_specs import (
    QUICK,
    choose_columns,
    choose_rows,
    experiments,
    load_experiment,
)
from polytempo.experiments.paper_tables import asides, legend, table
from polytempo.experiments.progress import RunProgress
from polytempo.experiments.reproduce import Place, carry_out, collect
from polytempo.training.executors.processes import cores


@with_settings("data_dir", "workers", "plots")
def reproduce_command(
    experiment: Annotated[
        str | None, typer.Argument(help="Table or figure, such as pace/table2 \\[omit it to list].")
    ] = None,
    *,
    dataset: Annotated[str | None, typer.Option(help="One data set \\[all].")] = None,
    partition: Annotated[
        str | None, typer.Option(help="One split of it, such as dir0.1 \\[all of the paper's].")
    ] = None,
    only: Annotated[
        str | None, typer.Option(help="Run only these rows: pace,fedavg,standalone \\[all].")
    ] = None,
    variant: Annotated[
        str | None,
        typer.Option(help="Another reading of the paper, such as afl-lib \\[as its text says]."),
    ] = None,
    model: Annotated[
        str | None, typer.Option(help="Another model, such as resnet18 \\[the experiment's].")
    ] = None,
    updates: Annotated[
        int | None,
        typer.Option(min=1, help="Another length, in updates, such as 50000 \\[the experiment's]."),
    ] = None,
    seeds: Annotated[
        int, typer.Option(min=1, help="Number of seeds, counting from --first-seed.")
    ] = 1,
    first_seed: Annotated[int, typer.Option(help="The first seed.")] = 0,
    quick: Annotated[
        bool,
        typer.Option(
            "--quick", help="Scaled down: takes minutes, not comparable to the paper.", metavar=""
        ),
    ] = False,
    jobs: Annotated[
        int | None,
        typer.Option("--jobs", "-j", min=1, help="Runs at once, a core each \\[processors]."),
    ] = None,
    out: Annotated[
        Path, typer.Option("--out", "-o", help="Output folder; finished runs in it are reused.")
    ] = Path("runs/reproduce"),
    as_json: Json = False,
    settings: dict[str, Any],
) -> None:
    """Rerun a paper's table or figure, and show its numbers next to ours.

    Example: polytempo reproduce pace/table2 --dataset cifar10 --only pace,standalone --quick

    Run the same command again to continue an interrupted one. Experiments of a paper share runs.
    """
    if experiment is None:
        _list_experiments(as_json)
        return
    chosen = load_experiment(experiment, model, updates, variant)
    columns, rows = choose_columns(chosen, dataset, partition), choose_rows(chosen, only)
    place = Place(out.expanduser(), chosen, quick)
    jobs = jobs or cores()
    if jobs > 1:
        settings.setdefault("workers", 1)

    @contextmanager
    def progress(updates: int) -> Iterator[Watch]:
        with RunProgress(quiet=as_json, updates=updates) as bars:
            yield bars.bar

    complete, failed = carry_out(
        place,
        columns,
        rows,
        range(first_seed, first_seed + seeds),
        progress,
        jobs,
        **settings,
    )
    folders = []
    for name in dict.fromkeys(column.partition("/")[0] for column in columns):
        again = f"polytempo reproduce {experiment} --dataset {name}" + " --quick" * quick
        again += f" --variant {variant}" if variant else ""
        again += f" --model {model}" if model else ""
        again += f" --updates {updates}" if updates else ""
        folders.append(write_report(place, name, again, settings.get("plots", "png")))
    results = {column: collect(place, column) for column in columns}
    tables = {column: table(place, column, results[column]) for column in columns}
    if as_json:
        about = {"title": chosen.title, "quick": quick, "remarks": chosen.notes(columns)}
        output.print_json(data=about | {"tables": tables})
    else:
        output.print(f"[bold]{escape(chosen.title)}[/]", highlight=False)
        if quick:
            output.print(f"[bold yellow]{QUICK}[/]", highlight=False)
        for column in columns:
            output.print(f"\n{escape(chosen.heading(column))}", highlight=False)
            print_table(tables[column])
            for line in asides(place, column, results[column]):
                output.print(escape(line), highlight=False)
        for remark in (legend(chosen), *chosen.notes(columns)):
            output.print(f"- {escape(remark)}", highlight=False)
        for folder in filter(None, folders):
            output.print(f"table, plots and report: [bold]{escape(str(folder))}[/]", soft_wrap=True)
    for failure in failed:
        complain(failure)
    if not complete:
        interrupted("run the same command again")
    if failed:
        raise typer.Exit(2)


def _list_experiments(as_json: bool) -> None:
    found = [load_experiment(name) for name in experiments()]
    if as_json:
        keys = ("name", "title", "about", "columns", "rows")
        output.print_json(data=[{key: getattr(each, key) for key in keys} for each in found])
        return
    shown = listing("polytempo reproduce NAME", "name", "what", "data set/partition")
    for each in found:
        shown.add_row(each.name, escape(each.title), ", ".join(each.columns))
    output.print(shown)
