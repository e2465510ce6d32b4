"""`polytempo compare`: several strategies on the same federation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.markup import escape

from polytempo.cli.console import complain, interrupted, output, print_table
from polytempo.cli.options import Config, Json, Live, TableFormat, print_as
from polytempo.cli.settings import with_settings
from polytempo.cli.view import viewed
from polytempo.core.errors import PolytempoError
from polytempo.experiments.compare import compare
from polytempo.experiments.config import RunConfig, make_config, read_config
from polytempo.experiments.folders import RUNS, slug, title
from polytempo.experiments.progress import RunProgress


@with_settings(*(name for name in RunConfig.model_fields if name not in ("strategy", "seed")))
def compare_command(
    strategies: Annotated[
        list[str], typer.Argument(help="Strategies, with options: fedavg pace pace:graph.gamma=2")
    ],
    *,
    config: Config = None,
    out: Annotated[
        Path | None,
        typer.Option(
            "--out",
            "-o",
            help="Output folder; finished runs in it are reused \\[one in runs, named by the "
            "strategies and settings].",
        ),
    ] = None,
    seeds: Annotated[int, typer.Option(help="Number of seeds, counting from --first-seed.")] = 1,
    first_seed: Annotated[int | None, typer.Option(help="The first seed \\[0].")] = None,
    target: Annotated[
        str | None,
        typer.Option(
            help="Value of the metric for the column 's to': a number such as 0.8 (for 80%), or "
            "one of the strategies, meaning its best \\[fedavg, or the first]."
        ),
    ] = None,
    fine_tuned: Annotated[
        bool,
        typer.Option(
            "--fine-tuned",
            help="Add a row for every method with one model, fine-tuned by each client.",
        ),
    ] = False,
    references: Annotated[
        bool, typer.Option("--references", help="Add the rows standalone and majority.")
    ] = False,
    fairness: Annotated[
        bool,
        typer.Option(
            "--fairness",
            help="Add columns: how unequal clients are and, beside standalone, how many are better "
            "off than alone.",
        ),
    ] = False,
    form: TableFormat = "text",
    live: Live = False,
    as_json: Json = False,
    settings: dict[str, Any],
) -> None:
    """Run several strategies on the same federation, devices and seeds.

    Example: polytempo compare pace fedavg fedasync standalone --seeds 3 --out runs/mine

    Run the same command again to continue an interrupted comparison.
    """
    if seeds < 1:
        raise PolytempoError(f"--seeds must be 1 or more, got {seeds}")
    base = {**(read_config(config) if config else {}), **settings}
    if live:
        base["events"] = True
    first = base.pop("seed", 0) if first_seed is None else first_seed
    out = out.expanduser() if out else _usual_folder(strategies, base)
    with viewed(out, live), RunProgress(quiet=as_json or form != "text") as progress:
        comparison = compare(
            strategies,
            base,
            out,
            seeds=range(first, first + seeds),
            target=target,
            fine_tuned=fine_tuned,
            references=references,
            fairness=fairness,
            watch=lambda label, seed: progress.watch(f"{label} seed {seed}"),
        )
    if as_json:
        output.print_json(data=comparison.summaries())
    elif form != "text":
        print_as(form, comparison.table(), comparison.numbers())
    elif comparison.complete and comparison.results:
        print_table(comparison.table())
        metric = comparison.metric
        output.print(f"handed, best, adapted, worst 10%: {metric.label}, {metric.direction}")
        output.print(f"plots and report: [bold]{escape(str(out))}/report.html[/]")
    if not comparison.complete:
        interrupted("run the same command again")
    for failure in comparison.failed.values():
        complain(failure)
    if comparison.failed:
        raise typer.Exit(2)


def _usual_folder(strategies: Sequence[str], base: Mapping[str, Any]) -> Path:
    """The same for the same command, which continues."""
    words = "-".join(["compare", *dict.fromkeys(strategies)])
    return RUNS / slug(title(make_config(base, "compare"), words))
