"""What the tests of a fleet share: a model of a few numbers, a trainer that needs no torch module,
and servers and clients as threads of this process."""

import threading
import time
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch

import polytempo.strategies  # noqa: F401  (registers them)
from polytempo.core.server import Server
from polytempo.core.strategy import STRATEGIES, Context
from polytempo.core.task import Task
from polytempo.network.certificates import LOCAL, make_certificates
from polytempo.network.fleet.admission import Admission
from polytempo.network.fleet.client import FleetClient
from polytempo.network.fleet.server import FleetServer, Limits
from polytempo.network.fleet.store import Store
from polytempo.network.session import Certificates
from polytempo.nodes.client import ClientNode
from polytempo.nodes.plan import FleetPlan
from polytempo.nodes.server import ServerNode

FIGURES = frozenset({"loss", "count"})


def make_node(
    strategy="fedasync", clients=4, updates=8, size=12, steps=20, concurrency=None, every=4, **plan
):
    """A server's node for a model of `size` numbers; a training has so many steps."""
    samples = [1] * clients
    task = Task(steps=steps, batch_size=1)
    context = Context(torch.zeros(size), samples, task, seed=0)
    server = Server(STRATEGIES.create(strategy), context, concurrency=concurrency)
    plan = {"closing": 5.0, "run": {"toy": True}, **plan}
    return ServerNode(
        server,
        samples,
        FleetPlan("toy", "toy", updates=updates, eval_every=every, figures=FIGURES, **plan),
    )


class ToyTraining:
    def __init__(self, trainer, dispatch):
        self.trainer, self.vector = trainer, dispatch.params.clone()
        self.step, self.last = 0, dispatch.task.steps

    def advance(self, steps):
        for _ in range(min(steps, self.last - self.step)):
            time.sleep(self.trainer.seconds)
            self.vector += 0.1 * (self.trainer.target - self.vector)
            self.step += 1
        return self.step >= self.last

    def swap(self, dispatch):
        self.vector = dispatch.params.clone()
        self.trainer.swapped.append((time.monotonic(), dispatch.number, self.step))
        return self.step

    def shorten(self):
        self.last = min(self.last, self.step + 1)

    def finish(self):
        return self.vector, {}, {"trainings": self.trainer.remembered + 1}


class ToyTrainer:
    """Moves what it is sent towards its own target. `seconds`: of a step."""

    def __init__(self, target=1.0, seconds=0.0):
        self.target, self.seconds = target, seconds
        self.swapped, self.kept, self.begun = [], [], []

    def welcome(self, run):
        self.run = run

    def begin(self, dispatch, client, memory):
        self.begun.append((time.monotonic(), dispatch.number))
        self.remembered = memory.get("trainings", torch.zeros(1))
        return ToyTraining(self, dispatch)

    def examine(self, examine, client, memory):
        loss = float((examine.params - self.target).square().sum())
        return {"loss": loss, "count": 1.0}, None

    def keep(self, params, memory):
        self.kept.append(params)


def same(left, right):
    """Whether two states, or parts of them, are equal, bit for bit."""
    if isinstance(left, np.ndarray):
        left, right = torch.from_numpy(left), torch.from_numpy(right)
    if isinstance(left, torch.Tensor):
        return left.dtype == right.dtype and torch.equal(left, right)
    if isinstance(left, dict):
        return left.keys() == right.keys() and all(same(left[key], right[key]) for key in left)
    if isinstance(left, list | tuple):
        return len(left) == len(right) and all(map(same, left, right))
    if hasattr(left, "__dict__") and not isinstance(left, type):
        return type(left) is type(right) and same(vars(left), vars(right))
    return bool(left == right)


def certificates(folder: Path, names, days=365):
    """Certificates for these names, all valid for this machine."""
    make_certificates(folder, {name: LOCAL for name in names}, days=days)
    return {
        name: Certificates(folder / "ca.pem", folder / f"{name}.pem", folder / f"{name}.key")
        for name in names
    }


class Running:
    """A server or a client in a thread: what it returned, or what went wrong."""

    def __init__(self, run):
        self.interrupted = threading.Event()
        self.result = self.error = None
        self._thread = threading.Thread(target=self._work, args=(run,), daemon=True)
        self._thread.start()

    def _work(self, run):
        try:
            self.result = run(self.interrupted)
        except Exception as error:
            self.error = error

    @property
    def over(self):
        return not self._thread.is_alive()

    def wait(self, seconds=60.0):
        """What it returned."""
        self._thread.join(seconds)
        assert self.over, "still running"
        if self.error is not None:
            raise self.error
        return self.result

    def stop(self, seconds=60.0):
        self.interrupted.set()
        return self.wait(seconds)


class Fleet:
    """A folder with a server's and its clients' folders, and who runs now. With `secure`, mutual
    TLS."""

    def __init__(self, folder, names=(), secure=True):
        self.folder, self.running = folder, []
        self.files = certificates(folder / "certs", ["server", *names]) if secure else {}

    def serve(self, node, *, listen="127.0.0.1:0", store=None, limits=None, **options):
        """A server that runs; `events`: what it reported."""
        folder = self.folder / "server"
        folder.mkdir(parents=True, exist_ok=True)
        events = []
        server = FleetServer(
            node,
            store or Store(folder),
            listen,
            certificates=self.files.get("server"),
            admission=Admission(folder),
            limits=limits or Limits(),
            watch=events.append,
            **options,
        )
        server.events = events
        server.running = Running(server.run)
        self.running.append(server.running)
        self.address = server.address
        return server

    def client(
        self, name, trainer=None, *, files=None, model="toy", pause=0.0, address=None, **more
    ):
        node = ClientNode(model, "toy", 10, 5)
        said = []
        client = FleetClient(
            node,
            trainer or ToyTrainer(),
            self.folder / name,
            address or self.address,
            certificates=files or self.files.get(name),
            name=None if self.files else name,
            watch=said.append,
            pause=pause,
            **more,
        )
        client.said = said
        client.running = Running(client.run)
        self.running.append(client.running)
        return client

    def close(self):
        for running in self.running:
            running.interrupted.set()
        for running in self.running:
            running._thread.join(30)


def until(condition, seconds=30.0):
    """Wait until it holds."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.01)


@contextmanager
def fleet_in(folder, names=(), secure=True):
    fleet = Fleet(folder, names, secure)
    try:
        yield fleet
    finally:
        fleet.close()
