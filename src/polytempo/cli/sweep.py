"""`polytempo sweep`: every combination of some values of settings."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.markup import escape

from polytempo.cli.console import complain, interrupted, notes, output, print_table
from polytempo.cli.options import Config, Live, TableFormat, print_as
from polytempo.cli.settings import with_settings
from polytempo.cli.view import viewed
from polytempo.core.errors import PolytempoError
from polytempo.experiments.config import RunConfig, make_config, read_config
from polytempo.experiments.folders import RUNS, slug, title
from polytempo.experiments.grid import read_grid
from polytempo.experiments.jobs import Watch
from polytempo.experiments.progress import RunProgress
from polytempo.experiments.search import search
from polytempo.experiments.sweep import How, Sweep, sweep
from polytempo.training.executors.processes import cores


@with_settings(*(name for name in RunConfig.model_fields if name != "seed"))
def sweep_command(
    *,
    grid: Annotated[
        list[str],
        typer.Option(
            "--grid",
            help="A setting and its values, as in lr=0.01,0.05; repeat it for others. Options are "
            "written strategy.alpha=0.1,0.5. For --search also a range: lr=0.001..0.1:log.",
        ),
    ],
    trials: Annotated[
        int | None,
        typer.Option(
            "--search",
            min=1,
            metavar="TRIALS",
            help="Try so many points that Optuna proposes, on validation samples, and run the best "
            "one on the test samples (needs the extra `search`) \\[all points].",
        ),
    ] = None,
    seeds: Annotated[
        int, typer.Option(min=1, help="Number of seeds, counting from --first-seed.")
    ] = 1,
    first_seed: Annotated[int, typer.Option(help="The first seed.")] = 0,
    baseline: Annotated[
        list[str] | None,
        typer.Option(
            help="Values of the grid, as in strategy=fedbuff: every point is tested against the "
            "one with these and otherwise its own."
        ),
    ] = None,
    figure: Annotated[
        str,
        typer.Option(help="What is tested, or searched by: handed, best, adapted or worst10."),
    ] = "handed",
    interval: Annotated[
        str, typer.Option(help="What follows ±: std, or ci95 (95% confidence of the mean).")
    ] = "std",
    config: Config = None,
    jobs: Annotated[
        int | None,
        typer.Option("--jobs", "-j", min=1, help="Runs at once, a core each \\[processors]."),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            "--out",
            "-o",
            help="Output folder; finished runs in it are reused \\[one in runs, named by the grid "
            "and the settings].",
        ),
    ] = None,
    form: TableFormat = "text",
    live: Live = False,
    settings: dict[str, Any],
) -> None:
    """Run every combination of some values of settings, with several seeds, or search for the best.

    Example: polytempo sweep --grid lr=0.01,0.05 --grid strategy=pace,fedbuff --seeds 3
    --baseline strategy=fedbuff, or polytempo sweep --grid lr=0.001..0.1:log --search 20

    Run the same command again to continue an interrupted sweep.
    """
    if interval not in ("std", "ci95"):
        raise PolytempoError(f"--interval {interval}: choose std or ci95")
    values = read_grid(grid)
    base = {**(read_config(config) if config else {}), **settings}
    if "seed" in base:
        raise PolytempoError("sweep: seed is not a setting here; give --first-seed and --seeds")
    if trials is not None and baseline:
        raise PolytempoError("--baseline is for all points of a grid; a --search reports one point")
    if live:
        base["events"] = True
    jobs = jobs or cores()
    if jobs > 1:
        base.setdefault("workers", 1)
    folder = out.expanduser() if out else _usual_folder(list(values), base)
    against = {name: found[-1] for name, found in read_grid(baseline or (), "--baseline").items()}

    @contextmanager
    def progress(updates: int) -> Iterator[Watch]:
        with RunProgress(quiet=form != "text", updates=updates) as bars:
            yield bars.bar

    how: How = {
        "figure": figure,
        "interval": "ci95" if interval == "ci95" else "std",
        "jobs": jobs,
        "progress": progress,
    }
    chosen = range(first_seed, first_seed + seeds)
    with viewed(folder, live):
        if trials is None:
            found = sweep(values, base, folder, seeds=chosen, baseline=against or None, **how)
        else:
            found = search(values, trials, base, folder, seeds=chosen, **how)
    if form != "text":
        print_as(form, found.table(), found.numbers())
    elif found.points:
        _show_trials(found.trials, folder)
        print_table(found.table())
        output.print(found.legend(), highlight=False)
        output.print(f"tables and report: [bold]{escape(str(folder))}[/]", soft_wrap=True)
    for failure in (found.failed or {}).values():
        complain(failure)
    if not found.complete:
        interrupted("run the same command again")
    if found.failed:
        raise typer.Exit(2)


def _show_trials(trials: Sweep | None, folder: Path) -> None:
    """Those of a search, on validation samples; a trial that diverged is no failure of it."""
    if trials is None:
        return
    for failure in (trials.failed or {}).values():
        notes.print(f"[yellow]diverged:[/] {escape(failure)}", highlight=False, soft_wrap=True)
    print_table(trials.table())
    where = escape(str(folder / "trials"))
    output.print(f"trials, on validation samples: [bold]{where}[/]", soft_wrap=True)


def _usual_folder(names: list[str], base: dict[str, Any]) -> Path:
    """The same for the same command, which continues."""
    strategy = [] if "strategy" in names else [str(base.get("strategy", "pace"))]
    words = "-".join(["sweep", *names, *strategy])
    return RUNS / slug(title(make_config(base, "sweep"), words))
