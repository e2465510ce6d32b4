"""`polytempo run`: one run, new or resumed."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.markup import escape

from polytempo.cli.console import interrupted, notes, output
from polytempo.cli.options import Config, Json, Live
from polytempo.cli.settings import with_settings
from polytempo.cli.view import viewed
from polytempo.core.errors import PolytempoError
from polytempo.experiments.advice import advice
from polytempo.experiments.config import RunConfig, make_config, read_config
from polytempo.experiments.folders import new_folder, of_run
from polytempo.experiments.progress import RunProgress
from polytempo.experiments.result import RunResult
from polytempo.experiments.run import resume, run
from polytempo.experiments.wording import about_clusters, about_guards

CHANGEABLE = ("updates", "workers", "log", "plots")  # of a run that is resumed
FORMS = ("best", "worst10", "newcomers")  # of the metric, shown at the end of a run


@with_settings(*RunConfig.model_fields)
def run_command(
    *,
    config: Config = None,
    out: Annotated[
        Path | None,
        typer.Option(
            "--out", "-o", help="Output folder \\[a new one in runs, named by the settings]."
        ),
    ] = None,
    resume_from: Annotated[
        Path | None,
        typer.Option(
            "--resume", help="Resume the run in this folder (optionally with more --updates)."
        ),
    ] = None,
    live: Live = False,
    as_json: Json = False,
    settings: dict[str, Any],
) -> None:
    """Run one strategy on a federation, on a simulated clock.

    Example: polytempo run --strategy pace:graph.gamma=2 --data digits --clients 20 --updates 400

    Ctrl-C stops between two events; continue with --resume FOLDER.
    """
    with RunProgress(quiet=as_json) as progress:
        if resume_from is not None:
            resume_from = resume_from.expanduser()
            kept = {name: settings.pop(name, None) for name in CHANGEABLE}
            if settings or config or out:
                name = "config" if config else "out" if out else next(iter(settings))
                raise PolytempoError(
                    f"--resume takes its settings from {resume_from}; only --updates, --workers, "
                    f"--log and --plots can be changed, not --{name.replace('_', '-')}"
                )
            folder = resume_from
            with viewed(folder, live):
                result = resume(folder, **kept, callbacks=[progress.watch(folder.name)])
        else:
            if live:
                settings["events"] = True
            chosen = make_config({**(read_config(config) if config else {}), **settings}, "run")
            bar = progress.watch(str(chosen.strategy_table["name"]))
            place = nullcontext(out.expanduser()) if out else new_folder(of_run(chosen))
            with place as folder, viewed(folder, live):
                result = run(chosen, folder, callbacks=[bar])
    if as_json:
        output.print_json(data=result.summary)
    else:
        show_run(result, folder)
        chosen = make_config(read_config(folder / "config.toml"), "run")
        if result.summary["complete"] and (tip := advice(result, chosen)):
            notes.print(f"[yellow]note:[/] {escape(tip)}", soft_wrap=True, highlight=False)
    if not result.summary["complete"]:
        interrupted(f"polytempo run --resume {folder}")


def show_run(result: RunResult, folder: Path) -> None:
    for key, value in about_run(result, folder).items():
        line = f"{key:>20}  [bold]{escape(value)}[/]"
        output.print(line, highlight=False, soft_wrap=True)


def about_run(result: RunResult, folder: Path) -> dict[str, str]:
    """What is shown of a run at its end."""
    summary, metric = result.summary, result.metric
    name = metric.name
    best, worst, late = (metric.text(summary[f"{name}_{x}"]) for x in FORMS)
    sent = summary["messages"]
    wall = summary["wall_seconds"]
    rows = {
        "federation": summary["federation"],
        f"{name}, as handed": f"{metric.text(result.value)} (best {best}, worst tenth {worst}; "
        f"{metric.direction})",
        f"{name}, adapted": metric.text(result.adapted),
        f"{name}, newcomers": late,
        "clusters": "-" if summary["clusters"] is None else about_clusters(summary),
        result.clock: f"{result.seconds_taken:,.1f} s for {summary['arrivals']} "
        + ("local rounds" if "exchange" in sent else "updates"),
        "stopped early": summary.get("stopped") or "-",
        "staleness": f"{summary['staleness_mean']:.1f} updates on average"
        if summary["staleness"]
        else "-",
        "messages": f"{sent['exchange']} models exchanged, {sent['claim']} claims, "
        f"{sent['announce']} announcements"
        if "exchange" in sent
        else f"{sent['dispatch']} dispatched, {sent['upload']} uploaded "
        f"({sent['upload_bytes'] / 1e6:,.1f} MB), {sent['multicast']} multicast",
        "wall time": f"{wall['total']:.1f} s, of which training {wall['training']:.1f}, "
        f"server {wall['server']:.1f}, evaluation {wall['evaluation']:.1f}"
        if "training" in wall  # clients of a fleet train elsewhere
        else "-",
        "trained": summary["backend"],
        "fingerprint": summary["fingerprint"] or "-",
        "folder": str(folder),
    }
    if found := summary.get("diagnosis"):
        parts = sorted(("noise", "bias", "delay"), key=found.__getitem__, reverse=True)
        rows["what hurts"] = ", ".join(f"{part} {found[part]:.2g}" for part in parts) + (
            f" (squared lengths; the gradient's {found['gradient']:.2g}); see diagnosis.png"
        )
    rows |= about_guards(summary)
    rare = (
        *(f"{name}, newcomers", "clusters", "stopped early", "staleness", "wall time"),
        "fingerprint",
    )
    nothing = [key for key in rare if rows[key] == "-"]
    return {key: value for key, value in rows.items() if key not in nothing}
