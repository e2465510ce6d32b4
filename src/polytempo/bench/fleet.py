"""A server and its clients over the loopback interface, with mutual TLS: how soon a pushed model is
swapped in, how soon an update is acknowledged, what a crowd of clients costs, and whether memory
stays flat.

The server is a process of its own, and does all that `polytempo server` does. Times are compared
between processes: both read the system's monotonic clock.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.synchronize import Event
from pathlib import Path
from statistics import median
from typing import Any, Literal

import numpy as np
import torch

from polytempo.core.errors import PolytempoError
from polytempo.core.messages import Dispatch
from polytempo.data import Federation
from polytempo.experiments.config import make_config
from polytempo.experiments.fleet import Watch
from polytempo.experiments.fleet_plan import make_node, undertaking
from polytempo.experiments.fleet_settings import known, own_problem, problem_name
from polytempo.experiments.fleet_trainer import SolverTrainer
from polytempo.network.certificates import LOCAL, make_certificates
from polytempo.network.fleet.admission import Admission
from polytempo.network.fleet.client import FleetClient
from polytempo.network.fleet.limits import Keepalive, Limits
from polytempo.network.fleet.server import FleetServer
from polytempo.network.fleet.store import Store
from polytempo.network.session import Certificates
from polytempo.nodes.client import ClientNode, Memory
from polytempo.nodes.plan import Patience
from polytempo.nodes.star import Examine, Sums

MODELS = {"linear": "1x28x28", "lenet": "3x32x32", "resnet18": "3x32x32"}  # and their samples
PATIENCE = 120.0  # seconds for another process to answer
# A thousand clients share this machine's processors with their server: at the default, which asks
# every second and waits three, they take each other for dead.
PATIENT = Keepalive(time_ms=20_000, timeout_ms=20_000)
Trainer = Literal["native", "torch", "python", "gil"]
TRAINERS: dict[Trainer, str] = {
    "native": "LeNet, compiled code",
    "torch": "LeNet, torch",
    "python": "plain Python, steps of 20 ms",
    "gil": "one C call per step that holds the GIL for 250 ms",
}
# Model, strategy, and how long each of 1,000 clients rests between two uploads: without a rest, the
# most that there is; with one, a load that the server can bear.
LOADS = (
    ("linear", "fedasync", 0.0),
    ("lenet", "fedasync", 0.0),
    ("lenet", "fedasync", 20.0),
    ("lenet", "pace", 60.0),
)


@dataclass(frozen=True)
class Spec:
    """What the server of a measurement is like. `every`: seconds between two checkpoints."""

    model: str = "lenet"
    strategy: str = "fedasync"
    clients: int = 1
    sync: bool = True
    every: float = 60.0
    epochs: int = 1


# -- the server, in a process of its own -----------------------------------------------------------


def _serve(spec: Spec, folder: Path, orders: Connection) -> None:
    torch.set_num_threads(1)
    config = make_config(
        {
            "strategy": spec.strategy,
            "model": spec.model,
            "clients": spec.clients,
            "slots": spec.clients,
            "rounds": 10**9,
            "eval_every": 10**9,
            "epochs": spec.epochs,
        },
        "bench",
    )
    strategy = config.make("strategy")
    what = undertaking(*known(config, strategy, MODELS[spec.model], 10), strategy)
    node = make_node(what, Patience(float("inf")))
    folds = _Timed(strategy)
    multicasts: list[tuple[int, float]] = []
    watch = Watch(node, what.problem, folder, lambda done, rounds, state: None, lambda event: None)

    def listen(event: Any) -> None:
        if event.kind == "multicast":
            multicasts.append((event.dispatch, time.monotonic()))
        watch(event)

    server = FleetServer(
        node,
        Store(folder, keep=False, every=spec.every, sync=spec.sync),
        "127.0.0.1:0",
        certificates=_files(folder.parent / "certs", "server"),
        admission=Admission(folder),
        limits=Limits(messages=1e9, reconnects=1e9, keepalive=PATIENT),
        watch=listen,
    )
    over = threading.Event()
    orders.send((server.address, what.learns, len(what.model.initial)))
    node_thread = threading.get_native_id()

    def obey() -> None:
        while orders.recv() == "figures":
            orders.send(
                {
                    "rounds": node.round,
                    "cpu": time.process_time(),
                    "node_cpu": _thread_cpu(node_thread),
                    "fold_cpu": folds.seconds,
                    "commits": server.counts["fsync"],
                    "commit_seconds": 1e-6 * server.counts["fsync microseconds"],
                    "rss_mb": rss_mb(os.getpid()),
                }
            )
        over.set()

    threading.Thread(target=obey, daemon=True).start()
    server.run(over)
    orders.send(multicasts)


class _Timed:
    """CPU seconds that the strategy's arithmetic takes (it runs in one thread)."""

    def __init__(self, strategy: Any) -> None:
        self.seconds, fold = 0.0, strategy.fold

        def timed(*args: Any) -> bool:
            begin = time.thread_time()
            try:
                return bool(fold(*args))
            finally:
                self.seconds += time.thread_time() - begin

        object.__setattr__(strategy, "fold", timed)


def _thread_cpu(thread: int) -> float:
    try:
        fields = Path(f"/proc/self/task/{thread}/stat").read_text().rpartition(")")[2].split()
    except OSError:  # not Linux
        return float("nan")
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def rss_mb(process: int) -> float:
    """Resident memory."""
    try:
        pages = int(Path(f"/proc/{process}/statm").read_text().split()[1])
    except OSError:
        return float("nan")
    return 1e-6 * pages * os.sysconf("SC_PAGE_SIZE")


class Served:
    """A server that runs, as the measuring process sees it."""

    def __init__(self, spec: Spec, folder: Path, names: Sequence[str]) -> None:
        self.certs = folder / "certs"
        make_certificates(self.certs, {name: LOCAL for name in ("server", *names)})
        spawn = multiprocessing.get_context("spawn")
        self._orders, theirs = spawn.Pipe()
        (folder / "server").mkdir()
        self.process = spawn.Process(target=_serve, args=(spec, folder / "server", theirs))
        self.process.start()
        self.multicasts: list[tuple[int, float]] = []
        try:
            self.address, self.learns, self.numbers = self._answer()
        except BaseException:
            self.process.kill()
            raise

    def _answer(self) -> Any:
        if not self._orders.poll(PATIENCE):
            raise PolytempoError("the server does not answer; is the machine overloaded?")
        return self._orders.recv()

    def figures(self) -> dict[str, float]:
        self._orders.send("figures")
        return dict(self._answer())

    def close(self) -> None:
        try:
            if self.process.is_alive():
                self._orders.send("over")
                self.multicasts = self._answer()
                self.process.join(PATIENCE)
        finally:
            self.process.kill()
            self.process.join()


@contextmanager
def serving(spec: Spec, names: Sequence[str]) -> Iterator[Served]:
    with tempfile.TemporaryDirectory(prefix="polytempo-bench-") as folder:
        server = Served(spec, Path(folder), names)
        try:
            yield server
        finally:
            server.close()


def _files(folder: Path, name: str) -> Certificates:
    return Certificates(folder / "ca.pem", folder / f"{name}.pem", folder / f"{name}.key")


# -- light clients ---------------------------------------------------------------------------------


class Light:
    """A process full of light clients (`fleet_light.py`)."""

    def __init__(self, server: Served, names: Sequence[str], rest: float) -> None:
        script = Path(__file__).with_name("fleet_light.py")
        source = str(Path(__file__).resolve().parents[2])
        path = os.pathsep.join(filter(None, (source, os.environ.get("PYTHONPATH"))))
        # Not the script's own folder: it has names of the standard library's.
        self._process = subprocess.Popen(
            [sys.executable, "-P", str(script)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": path},
        )
        options = [*PATIENT.options(), ("grpc.use_local_subchannel_pool", 1)]
        self._say(
            {
                "connect": server.address,
                "certificates": str(server.certs),
                "names": list(names),
                "problem": server.learns,
                "numbers": server.numbers,
                "rest": rest,
                "options": options,
            }
        )

    def _say(self, order: Any) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(order) + "\n")
        self._process.stdin.flush()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        found = self._process.stdout.readline()
        if not found:
            raise PolytempoError("light clients ended too early: see their message above")
        said: dict[str, Any] = json.loads(found)
        if said.get("failures"):
            raise PolytempoError(f"light clients failed: {said['failures'][:3]}")
        return said

    def connected(self) -> float:
        """Wait until all are: the seconds that it took."""
        return float(self._answer()["seconds"])

    def begin(self) -> None:
        self._say("begin")
        self._answer()

    def end(self) -> list[float]:
        """Seconds from each upload to its acknowledgement, since `begin`."""
        self._say("end")
        answer = self._answer()
        self.lost = int(answer["lost"])  # connections
        latencies: list[float] = answer["latencies"]
        self._process.wait(PATIENCE)
        return latencies

    def close(self) -> None:
        self._process.kill()
        self._process.wait()


def percentiles(seconds: Sequence[float]) -> dict[str, float]:
    """In milliseconds."""
    found = np.percentile(seconds, (50, 99, 100)) * 1e3
    return dict(zip(("p50_ms", "p99_ms", "worst_ms"), map(float, found), strict=True))


# -- (a) a model is pushed to a client in training -------------------------------------------------


def measure_swap(trainer: Trainer, *, repeats: int = 200, epochs: int = 10**6) -> dict[str, Any]:
    """From the server's decision to send a fresh model until the client in training has swapped it
    in, or a newer one that has overtaken it on the way. (Another client's uploads, every fifth of a
    second, are what makes the server decide.)"""
    spec = Spec("lenet", "pace:omega=0", clients=2, epochs=epochs)
    with ExitStack() as stack, serving(spec, ["busy", "other"]) as server:
        spawn = multiprocessing.get_context("spawn")
        over, (mine, theirs) = spawn.Event(), spawn.Pipe()
        folder = server.certs.parent / "busy"
        client = spawn.Process(target=_train, args=(trainer, server.address, folder, over, theirs))
        client.start()
        stack.callback(client.kill)
        _await(mine, "the client does not train")
        light = Light(server, ["other"], rest=0.2)
        stack.callback(light.close)
        light.connected()
        end = time.monotonic() + 0.3 * repeats + 60
        while (rounds := server.figures()["rounds"]) < repeats and time.monotonic() < end:
            time.sleep(0.1)
        light.end()
        time.sleep(1.0)
        over.set()
        swapped = _await(mine, "the client does not end")
        client.join(PATIENCE)
        server.close()
    seconds = delays(server.multicasts, swapped)
    if len(seconds) < repeats // 2:
        raise PolytempoError(f"only {len(seconds)} of {rounds:.0f} multicasts were swapped in")
    row = {"trainer": trainer, "what": TRAINERS[trainer], "swaps": len(seconds)}
    more = {"megabytes": 4e-6 * server.numbers, "overtaken": len(seconds) - len(swapped)}
    return {**row, **more, **percentiles(seconds)}


def delays(
    decided: Sequence[tuple[int, float]], swapped: Sequence[tuple[int, float]]
) -> list[float]:
    """From each decision until that model, or a newer one that has overtaken it, is swapped in."""
    found = []
    for number, begin in decided:
        ends = [end for newer, end in swapped if newer >= number]
        if ends:
            found.append(min(ends) - begin)
    return found


def _await(pipe: Connection, otherwise: str) -> Any:
    if not pipe.poll(PATIENCE):
        raise PolytempoError(f"{otherwise}; is the machine overloaded?")
    return pipe.recv()


def _train(kind: Trainer, address: str, folder: Path, over: Event, pipe: Connection) -> None:
    """The client in training, in a process of its own."""
    torch.set_num_threads(1)
    draws = torch.Generator().manual_seed(0)
    x, y = torch.rand(400, 3, 32, 32, generator=draws), torch.arange(400) % 10
    data = Federation.from_arrays([(x.numpy(), y.numpy())], problem="classification")
    problem = own_problem(make_config({}, "bench"), data)
    own = kind in ("python", "gil")
    trainer: Any = _Holder(kind) if own else SolverTrainer(data, problem, solver=kind)  # type: ignore[arg-type]
    swapped: list[tuple[int, float]] = []

    def watch(event: dict[str, Any]) -> None:
        if event["event"] == "swapped" and event["step"] is not None:
            swapped.append((event["dispatch"], time.monotonic()))
        elif event["event"] == "begun":
            pipe.send("begun")

    client = FleetClient(
        ClientNode("", problem_name(problem), data.samples[0], 5),
        trainer,
        folder,
        address,
        certificates=_files(folder.parent / "certs", "busy"),
        watch=watch,
    )
    interrupted = threading.Event()

    def wait() -> None:
        over.wait()
        interrupted.set()

    threading.Thread(target=wait, daemon=True).start()
    client.run(interrupted)
    pipe.send(swapped)


class _Holder:
    """A trainer whose steps keep the interpreter to themselves: in plain Python, which lets other
    threads have it every 5 ms, or in a single call of C, which does not."""

    def __init__(self, kind: str) -> None:
        self.plain = kind == "python"
        begin = time.perf_counter()
        sum(range(10**7))
        self.count = int(0.25 * 10**7 / (time.perf_counter() - begin))

    def welcome(self, run: Mapping[str, Any]) -> None:
        pass

    def begin(self, dispatch: Dispatch, client: int, memory: Memory) -> _Holder:
        self.vector = dispatch.params.clone()
        return self

    def advance(self, steps: int) -> bool:
        for _ in range(steps):
            if self.plain:
                end = time.perf_counter() + 0.02
                while time.perf_counter() < end:
                    pass
            else:
                sum(range(self.count))
        return False

    def swap(self, dispatch: Dispatch) -> int:
        self.vector = dispatch.params.clone()
        return 0

    def shorten(self) -> None:
        pass

    def finish(self) -> tuple[torch.Tensor, Memory, Memory]:
        return self.vector, {}, {}

    def examine(self, examine: Examine, client: int, memory: Memory) -> tuple[Sums, Sums | None]:
        return {}, None

    def keep(self, params: torch.Tensor, memory: Memory) -> None:
        pass


# -- (b) an update is acknowledged -----------------------------------------------------------------


def measure_upload(model: str, *, sync: bool, repeats: int = 50) -> dict[str, Any]:
    """From the first byte of an update to its acknowledgement, one client."""
    with ExitStack() as stack, serving(Spec(model, sync=sync), ["one"]) as server:
        light = Light(server, ["one"], rest=0.0)
        stack.callback(light.close)
        light.connected()
        _rounds(server, 3)
        before = server.figures()
        light.begin()
        _rounds(server, before["rounds"] + repeats)
        latencies, after = light.end(), server.figures()
    commits = after["commits"] - before["commits"]
    return {
        "model": model,
        "megabytes": 4e-6 * server.numbers,
        "fsync": sync,
        "repeats": len(latencies),
        "commit_ms": 1e3 * (after["commit_seconds"] - before["commit_seconds"]) / commits,
        **percentiles(latencies),
    }


def _rounds(server: Served, rounds: float) -> None:
    end = time.monotonic() + PATIENCE
    while server.figures()["rounds"] < rounds:
        if time.monotonic() > end:
            raise PolytempoError("updates do not arrive; is the machine overloaded?")
        time.sleep(0.02)


# -- (c) a crowd -----------------------------------------------------------------------------------


@contextmanager
def crowd(spec: Spec, rest: float, processes: int = 4) -> Iterator[tuple[Served, list[Light], Any]]:
    """A server with light clients, all connected; and how that went."""
    names = [f"light-{number}" for number in range(spec.clients)]
    with ExitStack() as stack, serving(spec, names) as server:
        empty = server.figures()["rss_mb"]
        lights = []
        for part in range(min(processes, spec.clients)):
            lights.append(Light(server, names[part::processes], rest))
            stack.callback(lights[-1].close)
        took = max(light.connected() for light in lights)
        yield server, lights, {"connect_s": took, "empty_mb": empty}


def measure_load(
    model: str,
    strategy: str,
    *,
    clients: int = 1_000,
    rest: float = 0.0,
    seconds: float = 20.0,
) -> dict[str, Any]:
    """Clients that upload again as soon as they are sent work (or after a rest of about so many
    seconds): what the server does in a second, and what it costs."""
    with crowd(Spec(model, strategy, clients), rest) as (server, lights, how):
        time.sleep(min(5.0, seconds / 2) + rest)  # the first round of everybody is over
        for light in lights:
            light.begin()
        before, begin = server.figures(), time.perf_counter()
        time.sleep(seconds)
        after, took = server.figures(), time.perf_counter() - begin
        latencies = [found for light in lights for found in light.end()]
    updates = after["rounds"] - before["rounds"]
    each = {key: (after[key] - before[key]) / updates * 1e3 for key in ("cpu", "node_cpu")}
    return {
        "model": model,
        "megabytes": 4e-6 * server.numbers,
        "strategy": strategy,
        "clients": clients,
        "rest_s": rest,
        "seconds": took,
        "connect_s": how["connect_s"],
        "updates": updates,
        "updates_per_s": updates / took,
        "server_cpu_ms": each["cpu"],
        "node_cpu_ms": each["node_cpu"],
        "fold_cpu_ms": (after["fold_cpu"] - before["fold_cpu"]) / updates * 1e3,
        "cores_busy": (after["cpu"] - before["cpu"]) / took,
        "per_commit": updates / (after["commits"] - before["commits"]),
        "memory_mb": after["rss_mb"],
        "empty_mb": how["empty_mb"],
        "lost_connections": sum(light.lost for light in lights),
        **percentiles(latencies),
    }


# -- (d) steady load -------------------------------------------------------------------------------


def measure_steady(
    model: str = "lenet",
    strategy: str = "fedasync",
    *,
    clients: int = 1_000,
    rest: float = 20.0,
    minutes: float = 10.0,
) -> dict[str, Any]:
    """Memory of the server, sampled every second, under a load that stays the same. A checkpoint is
    made every 20 seconds, or three times if the whole is shorter."""
    every = min(20.0, 20 * minutes)
    with crowd(Spec(model, strategy, clients, every=every), rest) as (server, lights, how):
        time.sleep(min(1.5 * rest, 30 * minutes))
        for light in lights:
            light.begin()
        assert server.process.pid is not None
        before, begin = server.figures(), time.perf_counter()
        samples = []
        while (now := time.perf_counter() - begin) < 60 * minutes:
            samples.append((now, rss_mb(server.process.pid)))
            time.sleep(min(1.0, 3 * minutes))
        after = server.figures()
        latencies = [found for light in lights for found in light.end()]
    times, memory = np.array(samples).T
    slope = float(np.polyfit(times / 60, memory, 1)[0])
    parts = [float(np.median(part)) for part in np.array_split(memory, 5)]
    return {
        "model": model,
        "strategy": strategy,
        "clients": clients,
        "rest_s": rest,
        "minutes": minutes,
        "updates": after["rounds"] - before["rounds"],
        "updates_per_s": (after["rounds"] - before["rounds"]) / (60 * minutes),
        "server_cpu_ms": (after["cpu"] - before["cpu"])
        / (after["rounds"] - before["rounds"])
        * 1e3,
        "empty_mb": how["empty_mb"],
        "lost_connections": sum(light.lost for light in lights),
        "fifths_mb": parts,
        "peak_mb": float(memory.max()),
        "mb_per_minute": slope,
        **percentiles(latencies),
    }


# -- all of it -------------------------------------------------------------------------------------


def middle(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Of several runs of one measurement: the median of each figure, and the runs."""
    first = rows[0]
    found = {
        key: median(row[key] for row in rows)
        if isinstance(value, float | int) and not isinstance(value, bool)
        else value
        for key, value in first.items()
    }
    return {**found, "runs": len(rows)}


def measure_fleet(
    parts: Sequence[str],
    clients: int,
    minutes: float,
    repeats: int,
    quick: bool = False,
    watch: Callable[[str], None] = lambda now: None,
) -> dict[str, list[dict[str, Any]]]:
    """The parts of `polytempo bench fleet`."""
    found: dict[str, list[dict[str, Any]]] = {part: [] for part in parts}

    def add(part: str, measure: Callable[..., dict[str, Any]], *args: Any, **options: Any) -> None:
        rows = []
        for number in range(repeats):
            again = f", {number + 1} of {repeats}" if repeats > 1 else ""
            watch(f"{part}, {', '.join(map(str, (*args, *options.values())))}{again}")
            rows.append(measure(*args, **options))
        found[part].append(middle(rows))

    if "fleet-swap" in parts:
        for trainer in TRAINERS:
            add("fleet-swap", measure_swap, trainer, repeats=20 if quick else 100)
    if "fleet-upload" in parts:
        for model, times in (("lenet", 100), ("resnet18", 12)):
            for sync in (True, False):
                often = max(3, times // 5) if quick else times
                add("fleet-upload", measure_upload, model, sync=sync, repeats=often)
    if "fleet-load" in parts:
        for model, strategy, rest in LOADS:
            seconds = 5.0 if quick else 20.0
            add(
                "fleet-load",
                measure_load,
                *(model, strategy),
                clients=clients,
                rest=rest * clients / 1_000,
                seconds=seconds,
            )
    if "fleet-steady" in parts:
        watch(f"fleet-steady, {minutes:g} minutes")
        rest = 20 * clients / 1_000  # 50 updates per second
        found["fleet-steady"].append(measure_steady(clients=clients, rest=rest, minutes=minutes))
    return found
