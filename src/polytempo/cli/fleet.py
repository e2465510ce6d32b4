"""`polytempo server`, `client`, `fleet`, `admit` and `revoke`: runs between real machines."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.markup import escape

from polytempo.cli.console import complain, interrupted, notes, output, print_table
from polytempo.cli.options import Ca, Cert, Config, Json, Key, Live, certificates
from polytempo.cli.run import show_run
from polytempo.cli.settings import with_settings
from polytempo.cli.view import viewed
from polytempo.core.errors import PolytempoError
from polytempo.core.metric import MetricInfo
from polytempo.experiments.config import make_config, read_config
from polytempo.experiments.fleet_settings import (
    CLIENT_SETTINGS,
    FLEET_SETTINGS,
    SERVER_SETTINGS,
    for_fleet,
    known,
    read_limits,
    read_patience,
    read_seconds,
    server_table,
)
from polytempo.experiments.folders import RUNS, of_run
from polytempo.experiments.interrupt import interruptible
from polytempo.experiments.jobs import Report
from polytempo.experiments.progress import RunProgress
from polytempo.experiments.result import RunResult
from polytempo.network.session import require_network
from polytempo.simulation.devices import TwoSpeed

NEEDED = ("grpc", "google.protobuf", "cryptography")
UNREACHABLE = 75  # exit code: a failure that may pass (EX_TEMPFAIL)
PAUSE = 0.002  # seconds a step, where some devices are to be slower than others
Out = Annotated[Path, typer.Option("--out", "-o", help="The server's folder.")]
Deadline = Annotated[
    str,
    typer.Option(
        help="How long a client in training is waited for: auto (by its own past speed), none "
        "(forever), or seconds."
    ),
]


WaitFor = Annotated[
    int | None,
    typer.Option(min=1, help="Nobody trains before so many clients are connected \\[1]."),
]
LimitsOption = Annotated[
    str | None,
    typer.Option(
        help="What a client may take, where it differs from the usual: NAME=NUMBER,... such as "
        "messages=20,memory=4e9 (docs/deploy.md lists all).",
        metavar="NAME=NUMBER,...",
    ),
]


@with_settings("strategy", *SERVER_SETTINGS)
def server_command(
    *,
    listen: Annotated[
        str, typer.Option(help="Address to listen on: HOST:PORT.")
    ] = "127.0.0.1:7500",
    shape: Annotated[
        str | None,
        typer.Option(help="Of one sample, as in 3x32x32: for a server that has no data itself."),
    ] = None,
    outputs: Annotated[
        int | None, typer.Option(min=1, help="With --shape: labels, or numbers to predict.")
    ] = None,
    vocabulary: Annotated[
        int | None, typer.Option(min=2, help="With --shape: different tokens, if samples are text.")
    ] = None,
    config: Config = None,
    out: Annotated[
        Path, typer.Option("--out", "-o", help="Folder; a run that it holds is resumed.")
    ] = Path("runs/server"),
    ca: Ca = None,
    cert: Cert = None,
    key: Key = None,
    listed: Annotated[
        bool,
        typer.Option(
            "--listed",
            help="Let in only those that were admitted (`polytempo admit`), not everybody with a "
            "certificate.",
            metavar="",
        ),
    ] = False,
    metrics: Annotated[
        str | None,
        typer.Option(help="PORT or HOST:PORT of /metrics (Prometheus) and /healthz."),
    ] = None,
    deadline: Deadline = "auto",
    wait_for: WaitFor = None,
    limits: LimitsOption = None,
    live: Live = False,
    as_json: Json = False,
    settings: dict[str, Any],
) -> None:
    """Conduct a run with clients on other machines.

    Example: polytempo server --listen 10.0.0.1:7500 --strategy pace --data digits --clients 20
    --ca ca.pem --cert server.pem --key server.key --out runs/fleet

    Ctrl-C shuts down cleanly; the same command resumes.
    """
    require_network(*NEEDED)
    from polytempo.experiments.fleet import Site, conduct
    from polytempo.experiments.fleet_plan import undertaking
    from polytempo.network.fleet.limits import limits_of

    if shape is not None and "data" in settings:
        raise PolytempoError("give --data or --shape, not both: they say the same")
    given = {**(read_config(config) if config else {}), **settings}
    table = server_table(given)
    chosen = make_config(given, "server")
    strategy = for_fleet(chosen)
    site = Site(
        listen,
        certificates(ca, cert, key),
        "listed" if listed else "certified",
        read_patience(deadline),
        None if metrics is None else metrics if ":" in metrics else f"127.0.0.1:{metrics}",
        table["wait_for"] if wait_for is None else wait_for,
        limits_of({**table["limits"], **read_limits(limits or "")}),
    )
    complete, samples = known(chosen, strategy, shape, outputs, vocabulary)
    out = out.expanduser()
    with (
        viewed(out, live),
        interruptible() as stop,
        RunProgress(quiet=as_json) as progress,
    ):
        result = conduct(
            undertaking(complete, samples, strategy),
            out,
            site,
            report=progress.bar(str(chosen.strategy_table["name"])),
            say=print_json if as_json else say_of_server,
            interrupted=stop,
        )
    if not as_json:
        show_run(result, out)
    if not result.summary["complete"]:
        interrupted("the same command")


@with_settings(*CLIENT_SETTINGS)
def client_command(
    *,
    connect: Annotated[str, typer.Option(help="Address of the server: HOST:PORT.")],
    name: Annotated[
        str | None,
        typer.Option(help="Its name, where there are no certificates to say it."),
    ] = None,
    client: Annotated[
        int | None,
        typer.Option(
            help="Take this client's share of --data, divided by --clients, --partition and --seed."
        ),
    ] = None,
    config: Config = None,
    out: Annotated[
        Path | None,
        typer.Option("--out", "-o", help="Folder; resumes from it \\[runs/clients/NAME]."),
    ] = None,
    ca: Ca = None,
    cert: Cert = None,
    key: Key = None,
    pause: Annotated[
        float, typer.Option(min=0, help="Seconds to sleep after each step: a slower machine.")
    ] = 0.0,
    after: Annotated[
        Path | None, typer.Option(help="Connect once this file is there.", metavar="FILE")
    ] = None,
    give_up_after: Annotated[
        str,
        typer.Option(
            help="Seconds without a server after which it ends (exit code 75), or none: never. A "
            "training that is under way is finished first."
        ),
    ] = "3600",
    as_json: Json = False,
    settings: dict[str, Any],
) -> None:
    """Take part in a run with this machine's data.

    Example: polytempo client --connect 10.0.0.1:7500 --data mine.npz --out me
    --ca ca.pem --cert me.pem --key me.key

    The data stay here. Ctrl-C leaves cleanly; the same command comes back.
    """
    require_network(*NEEDED)
    from polytempo.experiments.fleet import run_client
    from polytempo.network.fleet.client import Unreachable

    patience = read_seconds("--give-up-after", give_up_after)
    given = {**(read_config(config) if config else {}), **settings}
    files = certificates(ca, cert, key)
    called = name or (cert.stem if cert else None) or (out.name if out else None)
    if called is None and client is not None:
        called = f"client-{client}"
    if called is None:
        raise PolytempoError("what is this client called? Give --name, --out or a certificate")
    folder = out.expanduser() if out else Path("runs/clients") / called
    with interruptible() as stop:
        try:
            found = run_client(
                make_config(given, "client"),
                folder,
                connect,
                name=called,
                client=client,
                own_model="model" in given,
                certificates=files,
                pause=pause,
                after=after,
                give_up_after=patience,
                say=print_json if as_json else say_of_client,
                interrupted=stop,
            )
        except Unreachable as error:
            complain(str(error))
            raise typer.Exit(UNREACHABLE) from error
    if not as_json:
        ended = found["reason"] or "interrupted"
        output.print(
            escape(f"{ended}: {found['acknowledged']} updates, folder {folder}"),
            highlight=False,
            soft_wrap=True,
        )
    if not found["complete"]:
        interrupted("the same command")


@with_settings("strategy", *FLEET_SETTINGS)
def fleet_command(
    *,
    local: Annotated[int, typer.Option(min=1, help="Number of clients, one process each.")] = 8,
    slow: Annotated[
        str | None,
        typer.Option(help="SHARE:FACTOR, as in 0.3:5: 30% of the devices are 5 times slower."),
    ] = None,
    pause: Annotated[
        float | None,
        typer.Option(
            min=0,
            help="Seconds a device rests after each step (slow ones: longer) \\[0; with "
            f"--slow {PAUSE}].",
        ),
    ] = None,
    simulate: Annotated[
        bool,
        typer.Option(
            "--simulate", help="Simulate the same federation, for comparison.", metavar=""
        ),
    ] = False,
    config: Config = None,
    out: Annotated[
        Path | None,
        typer.Option(
            "--out",
            "-o",
            help="Folder; a fleet that it holds is resumed \\[one in runs, named by the settings].",
        ),
    ] = None,
    deadline: Deadline = "auto",
    metrics: Annotated[
        str | None, typer.Option(help="PORT or HOST:PORT of /metrics and /healthz.")
    ] = None,
    live: Live = False,
    as_json: Json = False,
    settings: dict[str, Any],
) -> None:
    """Run a server and its clients on this machine, over real connections with mutual TLS.

    Example: polytempo fleet --local 8 --strategy pace --data digits --slow 0.3:5

    Ctrl-C shuts down cleanly; the same command resumes.
    """
    require_network(*NEEDED)
    from polytempo.experiments.fleet_group import Fleet, plot_beside, simulated

    given = {**(read_config(config) if config else {}), **settings, "clients": local}
    table = server_table(given)
    chosen, devices = make_config(given, "fleet"), _slow(slow)
    options = ["--deadline", deadline, *(["--metrics", metrics] if metrics else [])]
    options += ["--wait-for", str(table["wait_for"])]
    options += ["--limits", ",".join(f"{name}={n}" for name, n in table["limits"].items())]
    out = out.expanduser() if out else RUNS / f"fleet-{of_run(chosen)}"
    with viewed(out, live), RunProgress(quiet=as_json) as progress:
        bar = progress.bar(str(chosen.strategy_table["name"]))
        bar(0, chosen.updates, "the clients begin")
        watch = _Watch(bar, chosen.updates)
        rest = pause if pause is not None else PAUSE if devices else 0.0
        with (
            Fleet(chosen, out, slow=devices, pause=rest, options=options, watch=watch) as fleet,
            interruptible() as stop,
        ):
            fleet.carry_out(stop.is_set)
            failed = fleet.failed()
            result = fleet.result() if not failed.keys() & {"server"} and watch.began else None
    for failure in failed.values():
        complain(failure)
    if result is None:
        raise typer.Exit(2) if failed else typer.Exit(130)
    beside = None
    if simulate and result.summary["complete"]:
        beside = simulated(chosen, devices, out / "simulated")
        plot_beside(result, beside, out / "beside.png")
    if as_json:
        more = {} if beside is None else {"simulated": beside.summary}
        output.print_json(data={**result.summary, **more})
    else:
        _show_clients(result)
        show_run(result, out / "server")
        if beside is not None:
            print_table([compared("fleet", result), compared("simulator", beside)])
    if not result.summary["complete"]:
        interrupted("the same command")


def admit_command(
    *,
    name: Annotated[str, typer.Argument(help="The client: the name in its certificate.")],
    out: Out = Path("runs/server"),
) -> None:
    """Let a client take part (again); a running server notices within a second.

    Example: polytempo admit ann --out runs/server
    """
    require_network(*NEEDED)
    from polytempo.network.fleet.admission import admit

    admit(out.expanduser(), name)
    output.print(f"{escape(name)} is admitted", highlight=False)


def revoke_command(
    *,
    name: Annotated[str, typer.Argument(help="The client: the name in its certificate.")],
    out: Out = Path("runs/server"),
) -> None:
    """Let a client take part no longer; a running server cuts it off within a second.

    Example: polytempo revoke ann --out runs/server
    """
    require_network(*NEEDED)
    from polytempo.network.fleet.admission import revoke

    revoke(out.expanduser(), name)
    output.print(f"{escape(name)} is revoked", highlight=False)


# -- what is shown ---------------------------------------------------------------------------------


def print_json(event: dict[str, Any]) -> None:
    """One event a line."""
    sys.stdout.write(json.dumps(event) + "\n")
    sys.stdout.flush()


def say_of_server(event: dict[str, Any]) -> None:
    """What a person at the server wants to know; the rest is in the progress bar."""
    match event["event"]:
        case "listening":
            line = f"listening on {event['address']}"
        case "join" | "return":
            line = f"{event['name']} is there"
        case "leave":
            line = f"{event['name']} is away"
        case "drop":
            line = f"{event['name']}: its training is given up"
        case _:
            return
    notes.print(escape(line), highlight=False, soft_wrap=True)


def say_of_client(event: dict[str, Any]) -> None:
    """What a person at a client wants to know."""
    match event["event"]:
        case "connected":
            line = f"connected, as client {event['client']}"
        case "disconnected":
            line = f"no connection ({event['reason']}); trying again"
        case "trained":
            line = f"dispatch {event['dispatch']}: trained in {event['seconds']:.3g} s"
        case "swapped" if event["step"] is not None:
            line = f"dispatch {event['replaces']}: continues from a fresh model at step "
            line += str(event["step"])
        case "declined":
            line = f"dispatch {event['dispatch']}: not wanted any more, {event['reason']}"
        case "hurried":
            line = f"dispatch {event['dispatch']}: asked to finish"
        case "examined":
            sums = event["handed"]
            found = ", ".join(f"{key} {value:g}" for key, value in sums.items() if key != "total")
            line = f"tested on {sums['total']:g} samples: {found}"
        case _:
            return
    notes.print(escape(line), highlight=False, soft_wrap=True)


class _Watch:
    """Follows a fleet by what its server says."""

    def __init__(self, bar: Report, updates: int) -> None:
        self.bar, self.updates, self.began = bar, updates, False
        self.here: set[str] = set()
        self.state = ""

    def __call__(self, event: dict[str, Any]) -> None:
        if event["member"] != "server":
            return
        match event["event"]:
            case "listening":
                self.began = True
            case "join" | "return":
                self.here.add(event["name"])
            case "finished":
                found = event["result"]
                metric = MetricInfo(**found["metric"])
                value = metric.text(found[metric.name])
                self.state = f"t={found['seconds']:,.1f}s  {metric.name} {value}"
                self.bar(found["arrivals"], self.updates, self.state)
        if "updates" in event:
            self.state = f"t={event['time']:,.1f}s  {len(self.here)} clients"
            self.bar(event["updates"], self.updates, self.state)


def _by_number(name: str) -> tuple[str, int]:
    """client-2 before client-10."""
    stem = name.rstrip("0123456789")
    return stem, int(name[len(stem) :] or -1)


def _slow(text: str | None) -> TwoSpeed | None:
    if text is None:
        return None
    share, _, factor = text.partition(":")
    try:
        return TwoSpeed(slow=float(share), factor=float(factor or 5))
    except ValueError as error:
        raise PolytempoError(
            f"--slow {text}: give the share of slow devices and how many times slower they are, as "
            "in 0.3:5"
        ) from error


def _show_clients(result: RunResult) -> None:
    metric = result.metric
    rows = []
    for found in sorted(result.clients, key=lambda row: _by_number(row["name"])):
        seconds, stale = found["seconds"], found["staleness"]
        rows.append(
            {
                "client": found["name"],
                "samples": str(found["samples"]),
                "updates": str(found["updates"]),
                "staleness": "-" if stale is None else f"{stale:.1f}",
                "seconds a training": "-" if seconds is None else f"{seconds:.3g}",
                metric.name: metric.text(found[metric.name]),
                "adapted": metric.text(found[f"{metric.name}_adapted"]),
            }
        )
    if rows:
        print_table(rows)


def compared(label: str, result: RunResult) -> dict[str, str]:
    """A row of a table of runs, real or simulated."""
    metric, summary = result.metric, result.summary
    return {
        "": label,
        metric.name: metric.text(result.value),
        "best": metric.text(summary[f"{metric.name}_best"]),
        "adapted": metric.text(result.adapted),
        "worst tenth": metric.text(summary[f"{metric.name}_worst10"]),
        "updates": str(summary["arrivals"]),
        "staleness": "-" if not summary["staleness"] else f"{summary['staleness_mean']:.1f}",
        "multicasts": str(summary["messages"]["multicast"]),
        "seconds": f"{result.seconds_taken:.1f}",
    }
