"""`polytempo peer` and `polytempo peers`: one peer, or a group, on a real network."""

from __future__ import annotations

import json
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.live import Live
from rich.markup import escape

from polytempo.cli.board import Board, in_words, show_peers
from polytempo.cli.console import complain, notes, output
from polytempo.cli.options import Ca, Cert, Config, Json, Key, certificates
from polytempo.cli.settings import with_settings
from polytempo.core.metric import MetricInfo
from polytempo.experiments.config import RunConfig, make_config, read_config
from polytempo.experiments.folders import new_folder, of_run
from polytempo.experiments.interrupt import interruptible
from polytempo.experiments.peer import EXCHANGE_SECONDS, SAVE_ROUNDS, run_peer
from polytempo.experiments.peer_settings import PEER_SETTINGS
from polytempo.network.session import Address, require_network

P2POptions = Annotated[
    str | None,
    typer.Option(
        help="p2p and its options, such as p2p:target=500,decision=always; see "
        "`polytempo strategies` \\[p2p]."
    ),
]
Save = Annotated[int, typer.Option(min=1, help="Save the peer's state every N local rounds.")]
Pause = Annotated[
    float, typer.Option(min=0, help="Seconds to sleep after each local round: a slower machine.")
]
ExchangeTimeout = Annotated[
    float, typer.Option(min=0.1, help="Seconds to send a model each way: raise on a slow link.")
]


@with_settings(*PEER_SETTINGS)
def peer_command(
    *,
    id: Annotated[str, typer.Option("--id", help="Name of this peer, unique in the run.")],
    listen: Annotated[
        list[str], typer.Option(help="Address to listen on: tcp/HOST:PORT, or tls/HOST:PORT.")
    ],
    connect: Annotated[
        list[str] | None,
        typer.Option(help="Address of another peer to contact first; preferably several."),
    ] = None,
    client: Annotated[
        int | None,
        typer.Option(help="Client whose data it holds \\[the number its name ends with]."),
    ] = None,
    run: Annotated[str, typer.Option("--run", help="Name of the run.")] = "polytempo",
    strategy: P2POptions = None,
    config: Config = None,
    out: Annotated[
        Path | None,
        typer.Option(
            "--out", "-o", help="Folder; resumes if it holds saved state \\[runs/peers/ID]."
        ),
    ] = None,
    ca: Ca = None,
    cert: Cert = None,
    key: Key = None,
    wait: Annotated[
        bool,
        typer.Option(
            "--wait/--no-wait", help="Start once all peers are there (waits 30 s at most)."
        ),
    ] = False,
    save_every: Save = SAVE_ROUNDS,
    pause: Pause = 0.0,
    exchange_timeout: ExchangeTimeout = EXCHANGE_SECONDS,
    as_json: Json = False,
    settings: dict[str, Any],
) -> None:
    """Join a serverless run among peers, on a real network.

    Example: polytempo peer --id peer-1 --listen tcp/127.0.0.1:7448
    --connect tcp/127.0.0.1:7447 --clients 2 --strategy p2p:target=500

    Give all peers the same settings. Ctrl-C shuts down cleanly; the same command resumes.
    """
    require_network()
    files = certificates(ca, cert, key)
    if files is None and not all(map(is_local, listen)):
        notes.print(
            "[yellow]no certificates[/]: anyone who can reach this address can take part, and read "
            "the models; see `polytempo certs`"
        )

    def say(event: dict[str, Any]) -> None:
        if as_json:
            sys.stdout.write(json.dumps(event) + "\n")
            sys.stdout.flush()
        elif line := in_words(event):
            notes.print(escape(line), highlight=False, soft_wrap=True)

    with interruptible() as interrupted:
        found = run_peer(
            _settings(config, strategy, settings),
            id,
            Address(listen, connect or (), files),
            out.expanduser() if out else Path("runs/peers") / id,
            run=run,
            client=client,
            wait=wait,
            save_every=save_every,
            pause=pause,
            exchange_timeout=exchange_timeout,
            watch=say,
            interrupted=interrupted.is_set,
        )
    if not as_json:
        show_peers([found])
    if not found["complete"]:
        raise typer.Exit(130)


@with_settings(*(name for name in PEER_SETTINGS if name != "clients"))
def peers_command(
    *,
    local: Annotated[int, typer.Option(min=2, help="Number of peers, one process each.")] = 5,
    strategy: P2POptions = None,
    config: Config = None,
    out: Annotated[
        Path | None,
        typer.Option(
            "--out", "-o", help="Output folder \\[a new one in runs, named by the settings]."
        ),
    ] = None,
    tls: Annotated[
        bool, typer.Option("--tls", help="Use mutual TLS with test certificates.", metavar="")
    ] = False,
    save_every: Save = SAVE_ROUNDS,
    pause: Pause = 0.0,
    exchange_timeout: ExchangeTimeout = EXCHANGE_SECONDS,
    as_json: Json = False,
    settings: dict[str, Any],
) -> None:
    """Run a group of peers on this machine, over real network connections.

    Example: polytempo peers --local 5 --data digits --strategy p2p:target=500 --out runs/five
    """
    require_network()
    from polytempo.experiments.peer_group import Group

    chosen = _settings(config, strategy, {**settings, "clients": local})
    board = Board()
    live = notes.is_terminal and not as_json

    def watch(event: dict[str, Any]) -> None:
        board.note(event)
        if not live and not as_json and (line := in_words(event)):
            notes.print(escape(f"{event['peer']}: {line}"), highlight=False, soft_wrap=True)

    options = ["--wait", "--save-every", str(save_every), "--pause", str(pause)]
    options += ["--exchange-timeout", str(exchange_timeout)]
    shown = Live(get_renderable=board.table, console=notes, refresh_per_second=4)
    place = nullcontext(out.expanduser()) if out else new_folder(f"peers-{of_run(chosen)}")
    with (
        place as out,
        Group(chosen, out, tls=tls, options=options, watch=watch) as group,
    ):
        with interruptible() as interrupted, shown if live else nullcontext():
            for number in range(local):
                group.start(number)
            group.wait(interrupted.is_set)
        summary = group.result()
    if as_json:
        output.print_json(data=summary)
    else:
        show_peers(summary["peers"])
        line = f"{summary['messages']} models sent"
        if summary["metric"] is not None:
            metric = MetricInfo(**summary["metric"])
            line = f"{metric.name} {metric.text(summary[metric.name])}, {line}"
        output.print(f"{line}; folder [bold]{escape(str(out))}[/]", highlight=False)
    for failure in summary["failed"].values():
        complain(failure)
    if not summary["complete"]:
        raise typer.Exit(2 if summary["failed"] else 130)


def _settings(config: Path | None, strategy: str | None, settings: dict[str, Any]) -> RunConfig:
    given = {**(read_config(config) if config else {}), **settings}
    chosen = strategy or given.get("strategy", "p2p")
    return make_config({**given, "strategy": chosen}, "peer")


def is_local(endpoint: str) -> bool:
    """Whether only this machine can reach the address."""
    return endpoint.partition("/")[2].rpartition(":")[0] in ("127.0.0.1", "[::1]", "localhost")
