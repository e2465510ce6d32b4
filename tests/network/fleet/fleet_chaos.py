"""A fleet of real processes with mutual TLS, killed and restarted while it learns; afterwards
everything is checked.

    make chaos        or: python tests/network/fleet/fleet_chaos.py --kills 1000 --out FOLDER

Theory of operation
-------------------
1. Server and clients are processes: `polytempo.serve`, and clients whose training is a few lines of
   numpy. To start one takes seconds, most of them for importing torch; so they are forked from a
   process that has imported everything and done nothing (`--commands`: started with the commands of
   `polytempo fleet` instead, and with real training).
2. Whoever is alive is killed with SIGKILL at a random moment (seeded), in start-up as well, a
   quarter of the time the server, now and then several at once; and started again a little later.
   How many of them had got to work before is among the figures.
3. A client writes down which acknowledgements it has heard before it does anything else about them,
   and counts its acknowledged trainings in the memory that survives it.
4. In the end nobody is killed any more. The server is asked to stop, continues for some more
   updates with everybody, and all end by themselves. `check` then compares what clients heard and
   remember with what a replay of the server's journal folds.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import math
import multiprocessing
import os
import shutil
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import median

import numpy as np
import torch

from polytempo.core.rng import rng
from polytempo.experiments import fleet as fleet_module
from polytempo.experiments.config import make_config, write_config
from polytempo.experiments.fleet import take_part
from polytempo.experiments.fleet_group import SERVER, Fleet
from polytempo.experiments.fleet_own import OWN, OwnAdapter, OwnTraining, serve
from polytempo.experiments.fleet_plan import make_node, one_order, recorded
from polytempo.experiments.interrupt import interruptible
from polytempo.experiments.replay import verify
from polytempo.network.certificates import LOCAL, make_certificates
from polytempo.network.fleet.client import STATE
from polytempo.network.fleet.store import Store, history
from polytempo.network.session import Certificates, free_ports
from polytempo.nodes.client import ClientNode
from polytempo.storage import load_state

ENDLESS = 10**8  # updates, while the storm lasts
AFTERWARDS = 25  # updates for each client, when it is over
WAIT = 180.0  # seconds in which whatever should happen happens, on a busy machine
COUNT = "trainings"  # what a client remembers
HOLD = "hold"  # a file: as long as it is there, nobody trains

# -- processes -------------------------------------------------------------------------------------


class Notes:
    """Lines that outlive the process that wrote them, however it ends."""

    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)

    def __call__(self, event: Mapping) -> None:
        os.write(self._file, (json.dumps({"time": time.time(), **event}) + "\n").encode())


def read_notes(path: Path) -> list[dict]:
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text().split("\n") if line.endswith("}")]


def files(folder: Path, name: str) -> Certificates:
    certs = folder / "certs"
    return Certificates(certs / "ca.pem", certs / f"{name}.pem", certs / f"{name}.key")


def be_quiet(folder: Path, name: str) -> None:
    log = os.open(folder / f"{name}.log", os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    os.dup2(log, 1)
    os.dup2(log, 2)


def enter(host: str | None) -> None:
    """From now on this process (of one thread yet) is in that network namespace."""
    if host is not None:
        with Path("/run/netns", host).open() as file:
            if ctypes.CDLL(None, use_errno=True).setns(file.fileno(), 0):
                raise OSError(ctypes.get_errno(), f"cannot enter the network namespace {host}")


def serve_here(
    folder: Path,
    address: str,
    host: str | None,
    updates: int,
    clients: int,
    strategy: str,
    size: int,
    limits: dict[str, float],
    every: float,
):
    """The life of a server's process. `every`: seconds between two checkpoints."""
    fleet_module.Store = partial(Store, every=every)
    enter(host)
    be_quiet(folder, SERVER)
    note = Notes(folder / f"{SERVER}.jsonl")
    note({"event": "started"})
    own = files(folder, SERVER)
    serve(
        {"w": np.zeros(size, np.float32)},
        clients=clients,
        out=folder / SERVER,
        strategy=strategy,
        updates=updates,
        listen=address,
        metric="distance",
        better="lower",
        certificates=(own.ca, own.cert, own.key),
        listening=lambda address: note({"event": "listening"}),
        eval_every=400,
        concurrency=clients,  # nobody waits for the slot of another
        limits=limits,
    )
    note({"event": "ended"})


class CountingTraining(OwnTraining):
    """What is remembered is one more than before, once it is acknowledged."""

    def finish(self):
        vector, extras, memory = super().finish()
        return vector, extras, {COUNT: memory.get(COUNT, torch.zeros(1)) + 1}


class CountingAdapter(OwnAdapter):
    def begin(self, dispatch, client, memory):
        return CountingTraining(self, dispatch, memory)


class Walker:
    """Trains: walks a few steps towards a place of its own, but not while there is that file."""

    def __init__(self, place: float, seconds: float, hold: Path) -> None:
        self.place, self.seconds, self.hold = place, seconds, hold

    def train(self, parameters, task):
        where = parameters["w"]
        while self.hold.exists():
            time.sleep(0.02)
        for _ in range(5):
            time.sleep(self.seconds)
            where = where + np.float32(0.1) * (np.float32(self.place) - where)
            fresh = yield {"w": where}
            where = where if fresh is None else fresh["w"]

    def evaluate(self, parameters):
        return float(np.abs(parameters["w"] - self.place).mean())


def take_part_here(
    folder: Path, address: str, host: str | None, name: str, place: float, seconds: float
):
    """The life of a client's process."""
    enter(host)
    be_quiet(folder, name)
    note = Notes(folder / f"{name}.jsonl")
    note({"event": "started"})
    adapter = CountingAdapter(Walker(place, seconds, folder / HOLD), 5, folder / name)
    with interruptible() as interrupted:
        take_part(
            ClientNode("", OWN, 10, 5),
            adapter,
            folder / name,
            address,
            about="a walk",
            name=name,
            certificates=files(folder, name),
            say=note,
            interrupted=interrupted,
        )
    note({"event": "ended"})


# -- the fleet -------------------------------------------------------------------------------------


class Forked:
    """Server and clients with numpy training, forked."""

    def __init__(self, folder: Path, clients: int, strategy: str, size: int) -> None:
        self.folder, self.strategy, self.size = folder, strategy, size
        self.clients = [f"client-{number}" for number in range(clients)]
        self.updates, self.room, self.limits = ENDLESS, clients, {}
        self.every = 0.3  # seconds between two checkpoints, so that it is killed while it saves one
        self.port = free_ports(1)[0]
        names = [SERVER, *self.clients]
        make_certificates(folder / "certs", dict.fromkeys(names, self.addresses()))
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload([__name__, "polytempo.experiments.fleet_own"])
        self._processes = {}

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for process in self._processes.values():
            process.kill()
            process.join(WAIT)

    def addresses(self) -> Sequence[str]:
        """Those that the certificates are valid for."""
        return LOCAL

    def where(self, name: str) -> tuple[str, str | None]:
        """The server's address as that one knows it, and the network namespace that it lives in."""
        return f"127.0.0.1:{self.port}", None

    def start(self, name: str) -> None:
        work = (self.updates, self.room, self.strategy, self.size, self.limits, self.every)
        life = serve_here
        if name != SERVER:
            number = self.clients.index(name)
            work = (name, float(number), 0.02 if number % 4 == 3 else 0.004)
            life = take_part_here
        args = (self.folder, *self.where(name), *work)
        process = self._context.Process(target=life, args=args, daemon=True)
        process.start()
        self._processes[name] = process

    def code(self, name: str) -> int | None:
        return self._processes[name].exitcode

    def kill(self, name: str, number: int = signal.SIGKILL) -> None:
        os.kill(self._processes[name].pid, number)

    def wait(self, name: str, seconds: float = WAIT) -> int | None:
        self._processes[name].join(seconds)
        return self._processes[name].exitcode

    def notes(self, name: str) -> list[dict]:
        return read_notes(self.folder / f"{name}.jsonl")


class Commanded(Forked):
    """`polytempo server` and `polytempo client`, as `polytempo fleet` starts them, on digits."""

    def __init__(self, folder: Path, clients: int, strategy: str, size: int) -> None:
        settings = {"data": "digits", "clients": clients, "model": "mlp", "strategy": strategy}
        config = make_config({**settings, "updates": ENDLESS, "eval_every": 400})
        self.folder, self.updates = folder, ENDLESS
        self.clients = [f"client-{number}" for number in range(clients)]
        self._notes = {name: Notes(folder / f"{name}.jsonl") for name in (SERVER, *self.clients)}
        self._group = Fleet(
            config, folder, pause=0.002, watch=lambda event: self._notes[event["member"]](event)
        )
        (folder / "go").touch()

    def __exit__(self, *_):
        self._group.__exit__()

    def start(self, name: str) -> None:
        self._notes[name]({"event": "started"})
        if name == SERVER:
            config = self._group.config.model_copy(update={"updates": self.updates})
            write_config(self.folder / "config.toml", config)
            self._group.start_server()
        else:
            self._group.start_client(self.clients.index(name))

    def code(self, name: str) -> int | None:
        return self._group.processes[name].poll()

    def kill(self, name: str, number: int = signal.SIGKILL) -> None:
        self._group.processes[name].send_signal(number)

    def wait(self, name: str, seconds: float = WAIT) -> int | None:
        return self._group.processes[name].wait(seconds)


# -- the storm -------------------------------------------------------------------------------------


@dataclass
class Storm:
    """What was done: who was killed when."""

    kills: list[tuple[float, str]] = field(default_factory=list)
    began: float = field(default_factory=time.time)
    over: float = 0.0  # when the last one was back

    def __str__(self) -> str:
        counts = Counter("server" if name == SERVER else "clients" for _, name in self.kills)
        return f"{len(self.kills)} kills ({dict(counts)}), {time.time() - self.began:.0f} s"


def until(condition: Callable[[], bool], what: str, seconds: float = WAIT) -> None:
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            raise SystemExit(f"{what}: not within {seconds:.0f} s")
        time.sleep(0.1)


def torment(
    fleet: Forked, kills: int, pause: float, draws: np.random.Generator, deadline: float
) -> Storm:
    """Kill so many, one after `pause` seconds on average; stop early at the deadline."""
    storm, due = Storm(), dict[str, float]()  # who is to be started again, and when
    names = [SERVER, *fleet.clients]
    for name in names:
        fleet.start(name)
    until(lambda: all(heard(fleet, name) for name in fleet.clients), "a first acknowledgement")
    while len(storm.kills) < kills and time.time() < deadline:
        until_next = time.monotonic() + float(draws.exponential(pause))
        while time.monotonic() < until_next:
            bring_back(fleet, due)
            time.sleep(max(0.0, min(0.01, until_next - time.monotonic())))
        for name in victims(fleet, names, due, draws)[: kills - len(storm.kills)]:
            code = fleet.code(name)
            if code is not None:
                raise SystemExit(f"{name} ended with code {code} by itself: see {fleet.folder}")
            fleet.kill(name)
            storm.kills.append((time.time(), name))
            due[name] = time.monotonic() + float(draws.exponential(0.1))
            if len(storm.kills) % 50 == 0:
                sys.stderr.write(f"{storm}\n")
    while due:
        bring_back(fleet, due)
        time.sleep(0.01)
    storm.over = time.time()
    return storm


def victims(
    fleet: Forked, names: Sequence[str], due: Mapping[str, float], draws: np.random.Generator
) -> list[str]:
    """One of those that are alive; one time in eight, several."""
    alive = [name for name in names if name not in due]
    weights = np.array([len(fleet.clients) / 3 if name == SERVER else 1.0 for name in alive])
    count = 1 if draws.random() > 1 / 8 else int(draws.integers(2, len(names) + 1))
    chosen = draws.choice(alive, min(count, len(alive)), replace=False, p=weights / weights.sum())
    return [str(name) for name in chosen]


def bring_back(fleet: Forked, due: dict[str, float]) -> None:
    for name in [name for name, when in due.items() if time.monotonic() >= when]:
        fleet.wait(name)
        fleet.start(name)
        del due[name]


def heard(fleet: Forked, name: str, since: float = 0.0, what: str = "acknowledged") -> bool:
    """Whether that client has heard an acknowledgement since then."""
    return any(note["event"] == what and note["time"] > since for note in fleet.notes(name))


def end_well(fleet: Forked, storm: Storm) -> None:
    """Everybody gets on; the server is asked to stop, goes on for more updates, and all end."""
    for name in fleet.clients:
        until(lambda: heard(fleet, name, storm.over), f"{name} gets on after the storm")  # noqa: B023
    fleet.kill(SERVER, signal.SIGTERM)
    if fleet.wait(SERVER) not in (0, 130):
        raise SystemExit(f"the server ended with code {fleet.code(SERVER)}: see {fleet.folder}")
    done = sum('"event":"upload"' in line for line in _event_lines(fleet.folder))
    fleet.updates = done + AFTERWARDS * len(fleet.clients)
    # A client may wait ten seconds before it tries again; nobody is to miss the end.
    hold, since = fleet.folder / HOLD, time.time()
    hold.touch()
    fleet.start(SERVER)
    for name in fleet.clients:
        until(lambda: heard(fleet, name, since, "connected"), f"{name} is back")  # noqa: B023
    hold.unlink()
    for name in (SERVER, *fleet.clients):
        if fleet.wait(name) != 0:
            raise SystemExit(f"{name} ended with code {fleet.code(name)}: see {fleet.folder}")


def _event_lines(folder: Path) -> Iterator[str]:
    with (folder / SERVER / "events.jsonl").open(encoding="utf8") as file:
        for line in file:
            yield line.replace('": "', '":"')


# -- what has come of it ---------------------------------------------------------------------------


@dataclass
class Found:
    """What server and clients have left behind. Updates are (client's name, dispatch number)."""

    heard: list[tuple[str, int]]  # acknowledgements, as clients noted them; some several times
    folded: list[tuple[str, int]]  # what a replay of the journal folds, in order
    reported: list[tuple[str, int]]  # what the server said that it folds (events.jsonl)
    remembered: dict[str, int]  # by client: trainings that it takes for acknowledged
    wrong: list[str] = field(default_factory=list)  # where the replay differs from the server


def collect(fleet: Forked) -> Found:
    folder = fleet.folder / SERVER
    acknowledged = [
        (name, note["dispatch"])
        for name in fleet.clients
        for note in fleet.notes(name)
        if note["event"] == "acknowledged"
    ]
    folded, names = fold_again(folder)
    reported = []
    for line in _event_lines(fleet.folder):
        if '"event":"upload"' in line:
            event = json.loads(line)
            reported.append((names[event["client"]], event["dispatch"]))
    remembered = {}
    if not isinstance(fleet, Commanded):
        for name in fleet.clients:
            memory = load_state(fleet.folder / name / STATE)["memory"]
            remembered[name] = int(memory[COUNT])
    return Found(acknowledged, folded, reported, remembered, verify(folder).wrong)


def fold_again(folder: Path) -> tuple[list[tuple[str, int]], list[str]]:
    """What a new server folds when it is fed the journal; and the names of its clients."""
    node, folded = make_node(recorded(folder)), []
    receive = node.server.receive

    def noting(update):
        actions = receive(update)
        folded.append((node.roster[update.client], update.number))
        return actions

    node.server.receive = noting
    with one_order():
        for record in history(folder):
            node.apply(record)
    return folded, node.roster


def check(found: Found) -> list[str]:
    """What should not have happened."""
    counts = Counter(found.folded)
    return [
        *(f"lost: {update} was acknowledged" for update in {*found.heard} - {*counts}),
        *(f"folded {n} times: {update}" for update, n in counts.items() if n > 1),
        *(
            f"{name} remembers {count} acknowledged trainings, the server has folded {n}"
            for name, count in found.remembered.items()
            if count != (n := sum(who == name for who, _ in found.folded))
        ),
        *(["the event log is not what the journal leads to"] * (found.reported != found.folded)),
        *found.wrong,
    ]


def seconds_to_resume(fleet: Forked, storm: Storm) -> dict[str, list[float]]:
    """From the start of a server's process to the first acknowledgement that a client hears of it,
    and from the start of a client's to its welcome: of those that were not killed before, and (of
    clients) had a server all the while."""
    down = sorted(when for when, name in storm.kills if name == SERVER)
    acks = sorted(
        note["time"]
        for name in fleet.clients
        for note in fleet.notes(name)
        if note["event"] == "acknowledged"
    )
    server, client = [], []
    for start in [note["time"] for note in fleet.notes(SERVER) if note["event"] == "started"][1:]:
        killed = next((when for when in down if when > start), math.inf)
        first = next((ack for ack in acks if ack > start), math.inf)
        server += [first - start] if first < killed else []
    for name in fleet.clients:
        began = None
        for note in fleet.notes(name):
            if note["event"] == "started":
                began = note["time"]
            elif note["event"] == "connected" and began is not None:
                quiet = not any(began - 3 < when < note["time"] for when in down)
                client += [note["time"] - began] if quiet else []
                began = None
    return {"server": server, "client": client}


def lives(fleet: Forked, name: str, sign: str) -> int:
    """Processes of that name that came so far as to say this."""
    count, said = 0, False
    for note in fleet.notes(name):
        said = said and note["event"] != "started"
        if note["event"] == sign and not said:
            count, said = count + 1, True
    return count


def summary(values: Sequence[float]) -> str:
    if not values:
        return "none"
    return f"median {median(values):.2f} s, max {max(values):.2f} s, of {len(values)}"


def run(
    folder: Path,
    *,
    kills: int,
    clients: int = 8,
    strategy: str = "pace",
    size: int = 2_000,
    pause: float = 1.2,
    seed: int = 0,
    commands: bool = False,
    minutes: float = 40.0,
) -> tuple[list[str], dict[str, object]]:
    """The whole of it: what went wrong, and figures."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
        os.environ[name] = "1"  # read by the process that the others are forked from
    kind = Commanded if commands else Forked
    with kind(folder, clients, strategy, size) as fleet:
        deadline = time.time() + 60 * minutes
        storm = torment(fleet, kills, pause, rng(seed, "fleet chaos"), deadline)
        sys.stderr.write(f"{storm}; now it ends\n")
        end_well(fleet, storm)
        found = collect(fleet)
        times = seconds_to_resume(fleet, storm)
        # The last of each client, and the last two of the server, ended without a kill.
        listening = lives(fleet, SERVER, "listening") - 2
        welcomed = sum(lives(fleet, name, "connected") - 1 for name in fleet.clients)
    wrong = check(found)
    figures = {
        "kills": len(storm.kills),
        "of the server": sum(name == SERVER for _, name in storm.kills),
        "of those that listened, of clients that were welcomed": [listening, welcomed],
        "seconds": round(storm.over - storm.began),
        "updates folded": len(found.folded),
        "acknowledgements heard": len(found.heard),
        "acknowledged updates lost": len({*found.heard} - {*found.folded}),
        "folded twice": len(found.folded) - len({*found.folded}),
        "equal to a replay, bit for bit": not found.wrong,
        "server, start to first acknowledgement": summary(times["server"]),
        "client, start to welcome": summary(times["client"]),
    }
    return wrong, figures


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    options.add_argument("--kills", type=int, default=1_000)
    options.add_argument("--clients", type=int, default=8)
    options.add_argument("--strategy", default="pace")
    options.add_argument("--size", type=int, default=2_000, help="numbers of the model")
    options.add_argument("--pause", type=float, default=1.2, help="seconds between two kills")
    options.add_argument("--seed", type=int, default=0)
    options.add_argument("--minutes", type=float, default=40.0, help="the storm lasts no longer")
    options.add_argument("--commands", action="store_true", help="kill the commands themselves")
    options.add_argument("--out", type=Path, default=Path("runs/fleet-chaos"))
    chosen = vars(options.parse_args())
    wrong, figures = run(chosen.pop("out"), **chosen)
    sys.stdout.write("\n".join(f"{name}: {value}" for name, value in figures.items()) + "\n")
    sys.stdout.write("\n".join([*wrong[:50], f"{len(wrong)} violations"]) + "\n")
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
