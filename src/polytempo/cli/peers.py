"""The commands of peers on a real network: `peer`, `peers` and `certs`."""

from __future__ import annotations

import json
import sys
import threading
from pathlib import Path
from typing import Annotated, Any

import typer
from rich import box
from rich.console import Console
from rich.live import Live
from rich.markup import escape
from rich.table import Table

from polytempo.cli.settings import Config, Json, with_settings
from polytempo.core.errors import PolytempoError
from polytempo.experiments.config import RunConfig, make_config, read_config
from polytempo.experiments.peer import EXCHANGE_SECONDS, PEER_SETTINGS, SAVE_ROUNDS
from polytempo.experiments.result import percent
from polytempo.experiments.run import interruptible
from polytempo.network.session import Address, Certificates, require_network

P2POptions = Annotated[
    str | None,
    typer.Option(
        help="p2p with its options, such as p2p:target=500,decision=always; see "
        "`polytempo strategies` \\[p2p]."
    ),
]
Save = Annotated[int, typer.Option(min=1, help="Save the peer's state after so many local rounds.")]
Pause = Annotated[
    float, typer.Option(min=0, help="Seconds of rest after each local round: a slower machine.")
]
ExchangeTimeout = Annotated[
    float, typer.Option(min=0.1, help="Seconds for a model each way: more on a slow line.")
]


def register(app: typer.Typer, output: Console, notes: Console) -> None:
    """Add the commands to the application."""

    @app.command("peer")
    @with_settings(*PEER_SETTINGS)
    def peer_command(
        *,
        id: Annotated[str, typer.Option("--id", help="Name of this peer, its own in the run.")],
        listen: Annotated[
            list[str], typer.Option(help="Address to listen on: tcp/HOST:PORT, or tls/HOST:PORT.")
        ],
        connect: Annotated[
            list[str] | None,
            typer.Option(help="Address of another peer to call first; better name several."),
        ] = None,
        client: Annotated[
            int | None,
            typer.Option(help="Whose data it has \\[the number that its name ends with]."),
        ] = None,
        run: Annotated[str, typer.Option("--run", help="Name of the run.")] = "polytempo",
        strategy: P2POptions = None,
        config: Config = None,
        out: Annotated[
            Path | None,
            typer.Option(
                "--out", "-o", help="Folder; one with a state is gone on with \\[runs/peers/ID]."
            ),
        ] = None,
        ca: Annotated[Path | None, typer.Option(help="PEM: the authority that admits.")] = None,
        cert: Annotated[Path | None, typer.Option(help="PEM: this peer's certificate.")] = None,
        key: Annotated[Path | None, typer.Option(help="PEM: its private key.")] = None,
        wait: Annotated[
            bool,
            typer.Option(
                "--wait/--no-wait", help="Begin when all peers are there (half a minute at most)."
            ),
        ] = False,
        save_every: Save = SAVE_ROUNDS,
        pause: Pause = 0.0,
        exchange_timeout: ExchangeTimeout = EXCHANGE_SECONDS,
        as_json: Json = False,
        settings: dict[str, Any],
    ) -> None:
        """Take part in a run among peers, on a real network, without a server.

        Example: polytempo peer --id peer-1 --listen tcp/127.0.0.1:7448
        --connect tcp/127.0.0.1:7447 --clients 2 --strategy p2p:target=500

        All peers are given the same settings. Ctrl-C ends it orderly; the same command goes on.
        """
        require_network()
        from polytempo.experiments.peer import run_peer

        files = [file for file in (ca, cert, key) if file is not None]
        if len(files) not in (0, 3):
            raise PolytempoError("mutual TLS needs all of --ca, --cert and --key")
        certificates = Certificates(*files) if files else None
        if certificates is None and not all(map(is_local, listen)):
            notes.print(
                "[yellow]no certificates[/]: whoever reaches this address can take part, and read "
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
                Address(listen, connect or (), certificates),
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
            _show(output, [found])
        if not found["complete"]:
            raise typer.Exit(130)

    @app.command("peers")
    @with_settings(*(name for name in PEER_SETTINGS if name != "clients"))
    def peers_command(
        *,
        local: Annotated[int, typer.Option(min=2, help="How many peers, a process each.")] = 5,
        strategy: P2POptions = None,
        config: Config = None,
        out: Annotated[Path, typer.Option("--out", "-o", help="Folder to write.")] = Path(
            "runs/group"
        ),
        tls: Annotated[
            bool, typer.Option("--tls", help="With mutual TLS and test certificates.", metavar="")
        ] = False,
        save_every: Save = SAVE_ROUNDS,
        pause: Pause = 0.0,
        exchange_timeout: ExchangeTimeout = EXCHANGE_SECONDS,
        as_json: Json = False,
        settings: dict[str, Any],
    ) -> None:
        """Let a group of peers learn together on this machine, over real connections.

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
        group = Group(chosen, out.expanduser(), tls=tls, options=options, watch=watch)
        shown = Live(get_renderable=board.table, console=notes, refresh_per_second=4)
        with interruptible() as interrupted:
            if live:
                shown.start()
            try:
                for number in range(local):
                    group.start(number)
            except BaseException:
                group.stop()
                raise
            finally:
                group.wait(interrupted.is_set)
                shown.stop()
        summary = group.result()
        if as_json:
            output.print_json(data=summary)
        else:
            _show(output, summary["peers"])
            line = f"accuracy {percent(summary['accuracy'])}, {summary['messages']} models sent"
            output.print(f"{line}; folder [bold]{escape(str(out))}[/]", highlight=False)
        for failure in summary["failed"].values():
            notes.print(f"[bold red]error:[/] {escape(failure)}", soft_wrap=True, highlight=False)
        if not summary["complete"]:
            raise typer.Exit(2 if summary["failed"] else 130)

    @app.command("certs")
    def certs_command(
        *,
        out: Annotated[Path, typer.Option("--out", "-o", help="Folder to write: keep it secret.")],
        names: Annotated[
            str, typer.Option(help="Peers: ann,bob, or with an address: ann=10.0.0.1,bob=10.0.0.2")
        ],
    ) -> None:
        """Make a test authority and a certificate for each peer, for mutual TLS.

        Example: polytempo certs --out certificates --names ann,bob=192.168.1.7

        Without an address a certificate is for this machine (127.0.0.1, ::1, localhost).
        """
        require_network()
        from polytempo.network.certificates import LOCAL, make_certificates
        from polytempo.network.wire import check_name

        peers: dict[str, list[str]] = {}
        for part in filter(None, map(str.strip, names.split(","))):
            name, _, where = part.partition("=")
            peers.setdefault(check_name("peer", name), []).extend([where] if where else LOCAL)
        if not peers or "ca" in peers:
            raise PolytempoError(
                f"--names {names!r}: name at least one peer, and none of them 'ca'"
            )
        for file in make_certificates(out.expanduser(), peers):
            output.print(escape(str(file)), highlight=False, soft_wrap=True)


def _settings(config: Path | None, strategy: str | None, settings: dict[str, Any]) -> RunConfig:
    given = {**(read_config(config) if config else {}), **settings}
    chosen = strategy or given.get("strategy", "p2p")
    return make_config({**given, "strategy": chosen}, "peer")


def is_local(endpoint: str) -> bool:
    """Whether nobody but this machine can reach the address."""
    return endpoint.partition("/")[2].rpartition(":")[0] in ("127.0.0.1", "[::1]", "localhost")


def in_words(event: dict[str, Any]) -> str | None:
    """What a person wants to know of an event, if anything."""
    match event["event"]:
        case "evaluated":
            return (
                f"iteration {event['iteration']}: accuracy {percent(event['accuracy'])}, "
                f"{event['fusions']} fusions, {event['messages']} models sent"
            )
        case "fused":
            return f"iteration {event['iteration']}: fused with {event['partner'][0]}"
        case "discarded":
            partner = event["partner"][0]
            return f"iteration {event['iteration']}: a model of {partner} came too late to train on"
        case "joined" | "left" as what:
            return f"{event['who'][0]} {what}"
        case "alone":
            return f"begins with {event['others']} of {event['expected']} others"
        case "refused":
            return f"refused: {event['why']}"
    return None


class Board:
    """Where all peers of a group are, for a table that is drawn again and again."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._rows: dict[str, dict[str, Any]] = {}

    def note(self, event: dict[str, Any]) -> None:
        with self._lock:
            row = self._rows.setdefault(event["peer"], {"fused": 0, "partner": "-"})
            row["iteration"] = event["iteration"]
            row |= {key: event[key] for key in ("target", "accuracy", "phase") if key in event}
            if event["event"] == "fused":
                row["fused"] += 1
                row["partner"] = event["partner"][0]
            if event["event"] == "stopped":
                row["phase"] = "done"

    def table(self) -> Table:
        table = Table(box=box.SIMPLE_HEAD)
        for column in ("peer", "iteration", "accuracy", "fusions", "last partner", "phase"):
            table.add_column(column, justify="left" if column == "peer" else "right")
        with self._lock:
            for name, row in sorted(self._rows.items()):
                table.add_row(
                    name,
                    f"{row['iteration']}/{row.get('target', '?')}",
                    percent(row.get("accuracy")),
                    str(row["fused"]),
                    row["partner"],
                    str(row.get("phase", "-")).lower(),
                )
        return table


def _show(output: Console, peers: list[dict[str, Any]]) -> None:
    table = Table(box=box.SIMPLE_HEAD)
    for column in ("peer", "iterations", "accuracy", "fusions", "models sent", "announcements"):
        table.add_column(column, justify="left" if column == "peer" else "right")
    for row in peers:
        figures = (str(row[key]) for key in ("fusions", "messages", "announcements"))
        table.add_row(row["id"], str(row["iterations"]), percent(row["accuracy"]), *figures)
    output.print(table)
