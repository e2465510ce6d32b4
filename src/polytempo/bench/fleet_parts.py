"""What measurements of a fleet share: a server in a process of its own, which does all that
`polytempo server` does, and light clients, many in one process.
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
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import torch

from polytempo.core.errors import PolytempoError
from polytempo.experiments.callbacks import Callbacks
from polytempo.experiments.config import make_config
from polytempo.experiments.fleet import Watch
from polytempo.experiments.fleet_plan import make_node, undertaking
from polytempo.experiments.fleet_settings import known
from polytempo.network.certificates import LOCAL, make_certificates
from polytempo.network.fleet.admission import Admission
from polytempo.network.fleet.limits import Keepalive, Limits
from polytempo.network.fleet.server import FleetServer
from polytempo.network.fleet.store import Store
from polytempo.network.session import Certificates
from polytempo.nodes.plan import Patience

MODELS = {"linear": "1x28x28", "lenet": "3x32x32", "resnet18": "3x32x32"}  # and their samples
PATIENCE = 120.0  # seconds for another process to answer
# A thousand clients share this machine's processors with their server: at the default, which asks
# every second and waits three, they take each other for dead.
PATIENT = Keepalive(time_ms=20_000, timeout_ms=20_000)


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
            "concurrency": spec.clients,
            "updates": 10**9,
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
    watch = Watch(
        node,
        what.problem,
        folder,
        report=lambda done, updates, state: None,
        say=lambda event: None,
        callbacks=Callbacks(()),
    )

    def listen(event: Any) -> None:
        if event.kind == "multicast":
            multicasts.append((event.dispatch, time.monotonic()))
        watch(event)

    server = FleetServer(
        node,
        Store(folder, keep=False, every=spec.every, sync=spec.sync),
        "127.0.0.1:0",
        certificates=files_of(folder.parent / "certs", "server"),
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
                    "updates": node.updates,
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


def files_of(folder: Path, name: str) -> Certificates:
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
