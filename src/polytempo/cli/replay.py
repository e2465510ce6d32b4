"""`polytempo replay`: a recorded deployment again."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from polytempo.cli.console import complain, output, print_table
from polytempo.cli.fleet import NEEDED, compared
from polytempo.cli.options import Json
from polytempo.experiments.compare import settle
from polytempo.experiments.folders import slug
from polytempo.experiments.progress import RunProgress
from polytempo.experiments.result_folder import read_result
from polytempo.experiments.world import LastFederation
from polytempo.network.session import require_network


def replay_command(
    *,
    folder: Annotated[Path, typer.Argument(help="The folder of a server.")],
    strategy: Annotated[
        list[str] | None,
        typer.Option(help="Simulate this strategy on the recorded fleet; may be repeated."),
    ] = None,
    data: Annotated[
        str | None,
        typer.Option(help="What to simulate on, if the server had no data: a folder of files."),
    ] = None,
    updates: Annotated[
        int | None, typer.Option(min=1, help="Updates to simulate \\[as many as recorded].")
    ] = None,
    as_json: Json = False,
) -> None:
    """Check a fleet's log, or simulate another strategy on the recorded fleet.

    Example: polytempo replay runs/fleet/server --strategy fedbuff --strategy fedasync

    Alone, the log is fed to a new server with the recorded strategy: it must come to the same
    state, bit for bit.
    """
    require_network(*NEEDED)
    from polytempo.experiments.replay import in_simulator, verify

    folder = folder.expanduser()
    if not strategy:
        verdict = verify(folder)
        if as_json:
            output.print_json(data=verdict.about)
        elif not verdict.wrong:
            output.print(
                f"the same, bit for bit: {verdict.records} records, {verdict.updates} updates, "
                f"{verdict.events} events; the checkpoint holds {verdict.checked} records",
                highlight=False,
                soft_wrap=True,
            )
        for what in verdict.wrong[:5]:
            complain(what)
        if verdict.wrong:
            raise typer.Exit(2)
        return
    recorded = read_result(folder)
    found, load = {f"{recorded.summary['strategy']}, recorded": recorded}, LastFederation()
    with RunProgress(quiet=as_json) as progress:
        for name in strategy:
            config = in_simulator(folder, name, data=data, updates=updates)
            place = folder / "replay" / slug(name)
            found[f"{name}, simulated"] = settle(config, place, load, [progress.watch(name)])
    if as_json:
        output.print_json(data={label: result.summary for label, result in found.items()})
    else:
        print_table([compared(label, result) for label, result in found.items()])
