"""A fleet on a bad network, simulated: the shipping `ServerNode` and `ClientNode`s, many histories.

A history is one run with some clients, drawn from a seed. Nothing of the nodes is modelled. What is
modelled is around them:

- connections, which end at any moment; what is on its way is then lost (or, if a process has died,
  may still arrive), and each side notices in its own time, the server perhaps after the client has
  connected again. Messages keep their order,
  but a small one may overtake a model or an update; of these only the newest waits to be sent.
- the server's disk: records are synced in groups of any size, and applied one after another; a
  crash leaves a beginning of what was being written, and a failing disk nothing of it. A server
  that comes back continues from its last checkpoint and the records after it.
- clients, whose processes are killed at any moment, even between two of a node's actions, some for
  good; who stop making progress, who send rubbish, whose updates come twice, or once more later;
  who are revoked, and admitted again.

Training is arithmetic on three numbers. For a while there are faults, then none; then the run must
come to its end. An `Oracle` that knows nothing of the nodes but what they write down, report and
say holds them to their promises at every step. `python tests/nodes/bad_network.py` explores a
million histories on all cores; `--minutes 30` stops earlier, and says how to go on from there.
"""

from __future__ import annotations

import argparse
import math
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable
from concurrent.futures import ProcessPoolExecutor
from heapq import heappop, heappush
from itertools import count
from random import Random
from typing import Any

import numpy as np
import torch

import polytempo.strategies  # noqa: F401
from polytempo.core import events
from polytempo.core.messages import Dispatch
from polytempo.core.server import Server
from polytempo.core.strategy import STRATEGIES, Context
from polytempo.core.task import Task
from polytempo.nodes.client import ClientNode
from polytempo.nodes.plan import FleetPlan, Patience
from polytempo.nodes.server import ServerNode
from polytempo.nodes.star import (
    Abandon,
    Acknowledge,
    AnyRecord,
    Assess,
    Away,
    Begin,
    ClientAction,
    Closed,
    Decline,
    Drop,
    End,
    Enrolled,
    Examine,
    Finished,
    FromServer,
    GivenUp,
    Hello,
    Joined,
    Left,
    Offered,
    Report,
    Save,
    Say,
    Send,
    ServerAction,
    Shorten,
    Started,
    Swap,
    Swapped,
    Upload,
    Welcome,
    Work,
    Write,
)
from polytempo.storage import restored

SIZE = 3
TASK = Task(epochs=1)
LARGE = (Work, Examine, Upload)
FIGURES = frozenset({"samples", "correct"})
PATIENCE = Patience(factor=4.0, least=4.0, first=15.0, away=2.5)
PORTION = 1_000  # histories that a process explores at a time
CLOSING = 20.0  # simulated seconds for the last exam
PATIENT_ENOUGH = 3_000.0  # simulated seconds within which a run without faults must end
STRATEGIES_USED: list[tuple[str, dict[str, Any]]] = [
    ("fedasync", {"rho": 0}),
    ("fedavg", {}),
    ("port", {"bound": 1, "buffer_size": 2}),
    ("fedasync", {"rho": 0}),
    ("fedavg", {}),
    ("pace", {"omega": 0.5}),
]


class Violation(AssertionError):
    """A promise was broken: which one, and how."""

    def __init__(self, promise: str, how: Any = "") -> None:
        super().__init__(f"{promise}: {how}" if how != "" else promise)
        self.promise = promise


def require(holds: bool, promise: str, how: Any = "") -> None:
    if not holds:
        raise Violation(promise, how)


def chained(remembered: float, number: int) -> float:
    """What a client remembers after one more training: all of them, in order."""
    return (remembered * 31 + number + 1) % 1_000_003


def same(a: Any, b: Any) -> bool:
    """Equal to the bit, wherever in a state."""
    if type(a) in (int, float, str, bool):
        return bool(a == b)
    if isinstance(a, torch.Tensor):
        return isinstance(b, torch.Tensor) and a.dtype == b.dtype and a.tolist() == b.tolist()
    if isinstance(a, np.ndarray):
        return a.dtype == b.dtype and a.tobytes() == b.tobytes()
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    return bool(a == b)


# -- what must hold ------------------------------------------------------------------------------


class Oracle:
    """Keeps its own accounts, by what was written down safely and what then was reported."""

    def __init__(self, strategy: str, concurrency: int, initial: list[float]) -> None:
        self.strategy, self.concurrency = strategy, concurrency
        self.numbers: dict[str, int] = {}  # of clients, by name
        self.sent: dict[int, tuple[int, int]] = {}  # by dispatch: to whom, after how many folds
        self.latest: dict[int, int] = {}  # by client: what it was sent last
        self.training: dict[int, list[int]] = {}  # by client: the dispatches that are open
        self.folded: dict[int, int] = {}  # by dispatch: after how many others
        self.last_folded: dict[int, int] = {}  # by client
        self.remembered: dict[int, float] = {}  # by client: what it is to remember
        self.acknowledged: set[int] = set()
        self.updates = 0
        self.closed = False
        self.model = initial
        self.cohort: list[tuple[int, list[float]]] = []
        self.hurried: set[int] = set()  # clients in training
        self.up = 0.0  # when the server was started last
        self.newcomer = -1
        self.wait_for = 1
        self.there: set[int] = set()  # clients that are connected
        self.away: dict[int, float] = {}  # and since when the others are not
        self.since: dict[int, float] = {}  # by client in training

    @property
    def over(self) -> bool:
        return len(self.folded) >= self.updates

    def applied(self, record: AnyRecord, actions: list[ServerAction]) -> None:
        """This record was safe, and was applied."""
        match record:
            case Started():
                self.updates, self.up, self.wait_for = record.updates, record.time, record.wait_for
                self.closed = self.closed and self.over
                self.there.clear()
                self.away = dict.fromkeys(self.numbers.values(), record.time)
                self.since = dict.fromkeys(self.since, record.time)
            case Enrolled(name=name) | Joined(name=name):
                self.there.add(self.numbers.setdefault(name, len(self.numbers)))
            case Away(name=name) | Left(name=name):
                client = self.numbers[name]
                if client in self.there:
                    self.there.discard(client)
                    self.away[client] = record.time
            case GivenUp(name=name, away=True):
                dropped = any(isinstance(a, Report) and a.event.kind == "drop" for a in actions)
                back = self.numbers[name] in self.there
                require(not (back and dropped), "who is back in time is not given up", record)
            case Closed():
                self.closed = self.over
        self.newcomer = -1
        for action in actions:
            if isinstance(action, Report):
                self.reported(action.event, record)

    def reported(self, event: events.Event, record: AnyRecord) -> None:
        match event:
            case events.Join(client=client):
                self.newcomer = client
            case events.Dispatch(client=client, dispatch=number):
                require(client not in self.training, "nobody trains two things", event)
                gathered = bool(self.sent) or len(self.there) >= self.wait_for
                promise = "nobody begins before all are there that are waited for"
                require(gathered, promise, (self.there, self.wait_for))
                require(client in self.there, "only who is connected is sent work", event)
                self.since[client] = event.time
                require(number not in self.sent, "a dispatch has one number", event)
                self.training[client] = [number]
                room = len(self.training) <= self.concurrency or client == self.newcomer
                require(room, "no more in training than concurrency", self.training)
                self.sent[number] = (client, len(self.folded))
                self.latest[client] = number
            case events.Multicast(client=client, dispatch=number):
                self.training[client].append(number)
                self.sent[number] = (client, len(self.folded))
                self.latest[client] = number
            case events.Urgent(client=client):
                self.hurried.add(client)
            case events.Drop(client=client):
                del self.training[client]
                self.hurried.discard(client)
                self.close_cohort()
            case events.Upload(client=client, dispatch=number):
                require(isinstance(record, Offered), "only updates are folded", record)
                require(number not in self.folded, "no update is folded twice", event)
                require(number in self.training.get(client, ()), "only what is open is folded")
                tau = len(self.folded) - self.sent[number][1]
                require(event.staleness == tau, "staleness is as counted", (event, tau))
                self.folded[number] = len(self.folded)
                self.last_folded[client] = number
                self.remembered[client] = chained(self.remembered.get(client, 0.0), number)
                del self.training[client]
                self.hurried.discard(client)
                self.fold(record.upload, tau)

    def fold(self, upload: Upload, tau: int) -> None:
        vector = upload.vector.tolist()
        if self.strategy == "fedasync":
            weight = 0.6 * (1 + tau) ** -0.5
            self.model = [w + weight * (v - w) for w, v in zip(self.model, vector, strict=True)]
        self.cohort.append((upload.samples, vector))
        self.close_cohort()

    def close_cohort(self) -> None:
        if self.strategy == "fedavg" and not self.training and self.cohort:
            total = sum(samples for samples, _ in self.cohort)
            columns = zip(*(vector for _, vector in self.cohort), strict=True)
            weights = [samples / total for samples, _ in self.cohort]
            self.model = [
                sum(w * v for w, v in zip(weights, column, strict=True)) for column in columns
            ]
            self.cohort = []

    def told(self, name: str, message: FromServer) -> None:
        """The server says this. It must follow from what is safe."""
        client = self.numbers.get(name)
        match message:
            case Acknowledge(number=number):
                mine = number in self.folded and self.sent[number][0] == client
                require(mine, "what is acknowledged is safe and folded", (name, message))
                self.acknowledged.add(number)
            case Work(dispatch=dispatch):
                mine = client in self.training and self.latest[client] == dispatch.number
                require(mine, "what is sent is safe, and the latest", (name, dispatch.number))
            case Decline(number=number):
                wanted = client is not None and self.last_folded.get(client) == number
                require(not wanted, "what was folded is not declined", (name, message))
            case Welcome(client=number):
                require(number == client, "a client keeps its number", (name, message))
            case Finished():
                require(self.closed, "the run is closed when clients hear so", name)

    def examine(self, node: ServerNode) -> None:
        """At the end: what was acknowledged is in the model."""
        require(self.acknowledged <= self.folded.keys(), "no acknowledged update is lost")
        require(node.server.updates == len(self.folded), "updates count updates")
        require(sum(node.staleness.values()) == len(self.folded), "staleness counts updates")
        if self.strategy in ("fedasync", "fedavg"):
            found = node.server.strategy.model.tolist()
            require(
                bool(np.allclose(found, self.model, rtol=1e-4, atol=1e-5)),
                "the model is made of what was folded",
                (found, self.model),
            )


# -- what lies between ---------------------------------------------------------------------------


class Wire:
    """One connection. `under_way`: how many messages are."""

    def __init__(self, world: World, client: Device) -> None:
        self.world, self.client, self.name = world, client, client.name
        self.alive = True
        self.draining: bool | None = None  # up or down: what was sent that way still arrives
        self.under_way = 0
        self._last = {True: 0.0, False: 0.0}  # up or down: when the last small one arrives
        self._waiting: dict[tuple[bool, type], Any] = {}
        self._busy: set[tuple[bool, type]] = set()

    def send(self, up: bool, message: Any) -> None:
        world = self.world
        if not self.alive:
            world.counts["messages lost"] += 1
            return
        if not isinstance(message, LARGE):
            self.under_way += 1
            arrival = max(self._last[up], world.now + world.random.random() * world.delay)
            self._last[up] = arrival
            world.at(arrival, self.arrive, up, message)
            return
        slot = (up, type(message))
        if slot in self._waiting:
            world.counts["models never sent, for a newer one"] += 1
        else:
            self.under_way += 1
        self._waiting[slot] = message
        if slot not in self._busy:
            self._busy.add(slot)
            world.after(world.random.random() * world.lag, self.begin, slot)

    def begin(self, slot: tuple[bool, type]) -> None:
        if self.alive or self.draining is slot[0]:
            earliest = self.world.now + self.world.random.random() * 2 * self.world.delay
            arrival = max(self._last[slot[0]], earliest)
            self.world.at(arrival, self.arrived, slot, self._waiting.pop(slot))

    def arrived(self, slot: tuple[bool, type], message: Any) -> None:
        if not self.alive and self.draining is not slot[0]:
            self.world.counts["messages lost"] += 1
            return
        if slot in self._waiting:
            self.world.after(0.0, self.begin, slot)
        else:
            self._busy.discard(slot)
        self.arrive(slot[0], message)

    def arrive(self, up: bool, message: Any) -> None:
        if not self.alive and self.draining is not up:
            self.world.counts["messages lost"] += 1
            return
        self.world.counts["messages of a process that has died"] += not self.alive
        self.under_way -= 1
        if up:
            self.world.host.hears(self, message)
        else:
            self.client.hears(self, message)

    def cut(self, draining: bool | None = None) -> None:
        """Both sides will notice."""
        if self.alive:
            world, self.alive = self.world, False
            self.draining = draining if world.random.random() < 0.5 else None
            world.after(world.random.random(), self.client.lost, self)
            world.after(world.random.random() * 4, world.host.lost, self)


# -- the server's process and disk -----------------------------------------------------------------


class Host:
    """Drives the server's node, and restarts it."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.log: list[AnyRecord] = []  # on disk
        self.checkpoint: tuple[dict[str, Any], int] | None = None  # a state, after so many records
        self.wires: dict[str, Wire] = {}  # by name: the newest that has said hello
        self.banned: set[str] = set()
        self.up = False
        self.life = 0
        self.node = world.server_node()
        self.start()

    def start(self) -> None:
        self.up, self.life = True, self.life + 1
        self.accepted: deque[AnyRecord] = deque()
        self.writing: list[AnyRecord] = []
        self.safe: deque[AnyRecord] = deque()  # on disk, to be applied
        self.do(self.node.started(self.world.now))
        for name in sorted(self.banned):
            self.do(self.node.revoke(name, self.world.now))
        self.world.after(1.0, self.tick, self.life)

    @property
    def quiet(self) -> bool:
        return self.up and not (self.accepted or self.writing or self.safe)

    # -- the network

    def hears(self, wire: Wire, message: Any) -> None:
        node, now, name, counts = self.node, self.world.now, wire.name, self.world.counts
        if not self.up:
            return
        if isinstance(message, Hello):
            if name in self.banned:
                wire.cut()
                return
            older = self.wires.get(name)
            if older is not None:
                counts["connections replaced before their end was noticed"] += 1
                older.cut()
                older.draining = None
            self.wires[name] = wire
            if not wire.alive:  # of a process that has died
                self.world.after(self.world.random.random() * 4, self.lost, wire)
            counts["hello with an update"] += message.offering is not None
            counts["hello in training"] += message.training is not None
            self.do(node.connected(name, message, now))
        elif self.wires.get(name) is wire:
            self.do(node.received(name, message, now))
            if isinstance(message, Upload) and self.world.fault(0.1):
                counts["uploads that came twice"] += 1
                self.do(node.received(name, message, now))

    def lost(self, wire: Wire) -> None:
        if self.up and self.wires.get(wire.name) is wire:
            del self.wires[wire.name]
            self.do(self.node.disconnected(wire.name, self.world.now))

    def do(self, actions: list[ServerAction]) -> None:
        for action in actions:
            match action:
                case Write(record=record):
                    self.accepted.append(record)
                    self.flush()
                case Send(name=name, message=message):
                    self.world.oracle.told(name, message)
                    self.world.counts[type(message).__name__] += 1
                    if (wire := self.wires.get(name)) is not None:
                        wire.send(False, message)
                case Drop(name=name):
                    if (wire := self.wires.pop(name, None)) is not None:
                        wire.cut()
                        if self.world.random.random() < 0.5:  # either is allowed
                            self.do(self.node.disconnected(name, self.world.now))

    def tick(self, life: int) -> None:
        if self.up and life == self.life:
            actions = self.node.tick(self.world.now)
            if any(isinstance(a, Write) and isinstance(a.record, Closed) for a in actions):
                self.closing()
            self.do(actions)
            if self.quiet:
                self.world.look()
            self.world.after(1.0, self.tick, life)

    def closing(self) -> None:
        exam = self.node.exams[-1]
        missing = [c for c in self.node.server.members if c not in exam.handed]
        late = self.world.now > max(exam.time, self.world.oracle.up) + CLOSING
        require(late or not missing, "who is there is examined before the end", missing)
        self.world.counts["last exams that were not answered by all"] += late

    # -- the disk

    def flush(self) -> None:
        if self.writing or not self.accepted or not self.up:
            return
        random = self.world.random
        size = random.randint(1, len(self.accepted))
        self.world.counts["groups of records synced together"] += size > 1
        self.writing = [self.accepted.popleft() for _ in range(size)]
        if self.world.fault(0.002):
            self.world.counts["disk failures"] += 1
            self.writing = []
            self.crash()
        else:
            self.world.after(random.random() * self.world.disk, self.synced, self.life)

    def synced(self, life: int) -> None:
        if life == self.life and self.up:
            self.log += self.writing
            self.safe.extend(self.writing)
            self.writing = []
            self.apply(life)
            self.flush()

    def apply(self, life: int) -> None:
        if life != self.life or not self.up or not self.safe:
            return
        random = self.world.random
        for _ in range(random.randint(1, len(self.safe))):
            self.do(self.take(self.safe.popleft()))
        if self.safe:
            self.world.after(random.random() * 0.05, self.apply, life)
        if random.random() < 0.03:
            self.world.counts["checkpoints"] += 1
            self.checkpoint = (restored(self.node.state_dict()), self.node.applied)

    def take(self, record: AnyRecord) -> list[ServerAction]:
        """The record counts."""
        actions = self.node.apply(record)
        self.world.oracle.applied(record, actions)
        self.world.counts[type(record).__name__] += 1
        if isinstance(record, GivenUp):
            counts, there = self.world.counts, self.world.oracle.there
            counts["bad updates"] += record.reason != ""
            counts["given up because they were gone"] += record.away
            back = record.away and self.node.names[record.name] in there
            counts["returns before that was applied"] += back
        for action in actions:
            if isinstance(action, Report):
                self.world.counts[action.event.kind] += 1
        return actions

    def crash(self, kept: int | None = None) -> None:
        """The process is gone; of what was being written a beginning is on disk."""
        if not self.up:
            return
        world, self.up = self.world, False
        world.counts["server crashes"] += 1
        if self.writing:
            kept = world.random.randint(0, len(self.writing))
            world.counts["records lost in writing"] += kept < len(self.writing)
            world.counts["records on disk that were not applied"] += kept > 0
            self.log += self.writing[:kept]
            self.safe.extend(self.writing[:kept])
        world.counts["records lost before writing"] += bool(self.accepted)
        self.wires.clear()
        for client in world.clients:
            if client.wire is not None:
                client.wire.cut(draining=False)
        world.after(world.random.random() * 4, self.restart)

    def restart(self) -> None:
        """From the checkpoint and the log: the state is that of a node that never stopped."""
        while self.safe:
            self.take(self.safe.popleft())
        before, self.node = self.node, self.replayed(self.checkpoint)
        match = same(before.state_dict(), self.node.state_dict())
        require(match, "a restarted server is as one that never stopped", len(self.log))
        self.start()

    def replayed(self, checkpoint: tuple[dict[str, Any], int] | None) -> ServerNode:
        node, applied = self.world.server_node(), 0
        if checkpoint is not None:
            state, applied = checkpoint
            node.load_state_dict(restored(state))
        for record in self.log[applied:]:
            node.apply(record)
        return node


# -- a client's process, disk and training ---------------------------------------------------------


class Training:
    def __init__(self, dispatch: Dispatch, remembered: float, begun: float) -> None:
        self.number, self.params, self.remembered = dispatch.number, dispatch.params, remembered
        self.begun = begun
        self.swap: Dispatch | None = None
        self.short = False


class Device:
    """Drives one client's node, and restarts it."""

    def __init__(self, world: World, place: int) -> None:
        self.world, self.name, self.speed = world, "abcdef"[place], 1 + world.random.random() * 2
        self.samples = place + 1
        self.saved: dict[str, Any] | None = None
        self.wire: Wire | None = None
        self.life = 0
        self.up = self.ended = self.dead = False  # dead: will never be back
        self.old: list[Upload] = []  # updates that it has offered
        self.node = world.client_node(self.samples)
        world.after(world.random.random() * 6, self.start)

    def start(self) -> None:
        if self.dead or self.up:
            return
        self.up, self.life = True, self.life + 1
        self.node = self.world.client_node(self.samples)
        if self.saved is not None:
            self.node.load_state_dict(self.saved)
        self.training: Training | None = None
        self.connect(self.life)

    def crash(self, for_good: bool = False) -> None:
        self.dead |= for_good
        if self.up:
            self.up = False
            self.world.counts["client crashes"] += 1
            self.world.counts["client crashes in training"] += self.training is not None
            self.training = None
            if self.wire is not None:
                self.wire.cut(draining=True)
                self.wire = None
            self.world.after(self.world.random.random() * 8, self.start)

    # -- the network

    def connect(self, life: int) -> None:
        if life != self.life or not self.up or self.ended or self.wire is not None:
            return
        if not self.world.host.up:
            self.world.after(1.0, self.connect, life)
            return
        self.wire = Wire(self.world, self)
        self.do(self.node.connected())

    def lost(self, wire: Wire) -> None:
        if self.wire is wire:
            self.wire = None
            self.world.after(self.world.random.random(), self.connect, self.life)

    def hears(self, wire: Wire, message: FromServer) -> None:
        if self.wire is wire:
            self.do(self.node.received(message))

    def do(self, actions: list[ClientAction]) -> None:
        counts = self.world.counts
        for action in actions:
            if self.world.fault(0.006):
                counts["client crashes between two actions"] += 1
                self.crash()
                return
            match action:
                case Say(message=message):
                    counts["multicasts missed"] += (
                        isinstance(message, Swapped) and message.step is None
                    )
                    if isinstance(message, Upload):
                        self.old.append(message)
                    if self.wire is not None:
                        self.wire.send(True, message)
                case Save():
                    self.saved = self.node.state_dict()
                case Begin(dispatch=dispatch):
                    self.begin(dispatch)
                case Swap(dispatch=dispatch):
                    require(self.training is not None, "a swap needs a training", dispatch.number)
                    if self.training.swap is not None:  # the newer one takes its place
                        missed = self.training.swap.number
                        self.do(self.node.swapped(missed, self.training.number, None))
                    if self.training is not None:
                        self.training.swap = dispatch
                        delay = self.world.random.random() * 0.3
                        self.world.after(delay, self.swap, self.training, dispatch)
                case Shorten():
                    require(self.training is not None, "nothing to shorten")
                    counts["trainings shortened"] += 1
                    self.training.short = True
                    self.world.after(2 * self.world.random.random(), self.finish, self.training)
                case Abandon():
                    require(self.training is not None, "nothing to abandon")
                    counts["trainings abandoned"] += 1
                    self.training = None
                case Assess(examine=examine):
                    delay = self.world.random.random()
                    self.world.after(delay, self.test, self.life, examine.exam)
                case End():
                    self.ended = True
                    self.training = None
                    if self.wire is not None:
                        self.wire.cut()
                        self.wire = None

    # -- training

    def begin(self, dispatch: Dispatch) -> None:
        world, node = self.world, self.node
        again = self.training is not None and self.training.number == dispatch.number
        require(not again, "nobody begins twice what it trains", dispatch.number)
        require(node.pending is None, "nobody trains while it offers", dispatch.number)
        world.counts["trainings replaced by newer work"] += self.training is not None
        remembered = world.oracle.remembered.get(node.client, 0.0)
        require(
            self.remembered == remembered,
            "a client remembers exactly what was folded",
            (self.name, self.remembered, remembered),
        )
        self.training = Training(dispatch, self.remembered, world.now)
        seconds = self.speed * (0.3 + world.random.random())
        if world.fault(0.1):
            world.counts["trainings that hang"] += 1
            seconds = 10 * PATIENT_ENOUGH
        world.after(seconds, self.finish, self.training)

    @property
    def remembered(self) -> float:
        found = self.node.memory.get("all")
        return 0.0 if found is None else float(found)

    def swap(self, training: Training, dispatch: Dispatch) -> None:
        if self.training is training and training.swap is dispatch:
            replaced = training.number
            training.number, training.params, training.swap = dispatch.number, dispatch.params, None
            self.world.counts["multicasts swapped in"] += 1
            self.do(self.node.swapped(dispatch.number, replaced, 1))

    def finish(self, training: Training) -> None:
        if self.training is not training:
            return
        if training.swap is not None:
            self.do(self.node.swapped(training.swap.number, training.number, None))
            if self.training is not training:
                return
        self.training = None
        vector = training.params * 0.5 + (0.1 * self.samples + 0.01 * training.number)
        if self.world.fault(0.03):
            vector = vector * math.nan
        remembered = chained(training.remembered, training.number)
        memory = {"all": torch.tensor(remembered, dtype=torch.float64)}
        seconds = self.world.now - training.begun
        self.do(self.node.trained(training.number, vector, {}, memory, seconds))

    def test(self, life: int, exam: int) -> None:
        if self.up and life == self.life and not self.ended:
            self.do(self.node.tested(exam, {"samples": 1.0, "correct": 0.5}, None))


# -- one history -----------------------------------------------------------------------------------


class World:
    """One history. `run` ends, or raises a `Violation`; `counts` says what has happened."""

    def __init__(
        self,
        seed: int,
        server: type[ServerNode] = ServerNode,
        client: type[ClientNode] = ClientNode,
    ) -> None:
        self.seed, self.random = seed, Random(seed)
        self.server_class, self.client_class = server, client
        self.now = 0.0
        self.counts: Counter[str] = Counter()
        self._queue: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._number = count()
        draw = self.random.random
        self.strategy, self.options = STRATEGIES_USED[seed % len(STRATEGIES_USED)]
        places = self.random.randint(2, 4)
        self.places = places + (draw() < 0.2)  # perhaps one remains empty
        self.concurrency = self.random.randint(1, places)
        self.refill = "same" if self.strategy != "fedavg" and draw() < 0.3 else None
        self.updates = self.random.randint(3, 7)
        self.eval_every = self.random.randint(2, 6)
        self.calm = 3 + draw() * 10  # from then on there are no faults
        self.rate = draw() ** 2 * 1.5  # of faults, per second
        # How long things take at most, in seconds: messages, models until they are sent, the disk.
        self.delay = self.random.choice((0.1, 0.3, 1.0))
        self.lag = self.random.choice((0.02, 0.1, 1.0))
        self.disk = self.random.choice((0.02, 0.3, 2.0))
        self.wait_for = self.random.randint(2, places) if draw() < 0.4 else 1
        self.counts["runs that waited for more than one"] += self.wait_for > 1
        self.oracle = Oracle(self.strategy, self.concurrency, [1.0, -1.0, 0.5])
        self.clients: list[Device] = []
        self.host: Host = Host(self)
        self.clients += [Device(self, place) for place in range(places)]
        self.after(self.pause(), self.strike)
        self.at(self.calm + 5, self.wait_no_longer)

    # -- time

    def at(self, when: float, what: Callable[..., None], *given: Any) -> None:
        heappush(self._queue, (when, next(self._number), what, given))

    def after(self, seconds: float, what: Callable[..., None], *given: Any) -> None:
        heappush(self._queue, (self.now + seconds, next(self._number), what, given))

    def fault(self, probability: float) -> bool:
        return self.now < self.calm and self.random.random() < probability

    def pause(self) -> float:
        return self.random.expovariate(max(self.rate, 0.05))

    # -- nodes

    def server_node(self) -> ServerNode:
        samples = [1] * self.places
        context = Context(torch.tensor([1.0, -1.0, 0.5]), samples, TASK, self.seed)
        strategy = STRATEGIES.create({"name": self.strategy, **self.options})
        server = Server(strategy, context, concurrency=self.concurrency, refill=self.refill)
        plan = FleetPlan(
            "layout",
            "classification",
            {"id": "run"},
            self.updates,
            self.eval_every,
            FIGURES,
            patience=PATIENCE,
            closing=CLOSING,
            wait_for=self.wait_for,
        )
        return self.server_class(server, samples, plan)

    def client_node(self, samples: int) -> ClientNode:
        return self.client_class("", "classification", samples, 5)

    # -- faults

    def wait_no_longer(self) -> None:
        """Some will never come: the server is started again, for fewer."""
        if not self.oracle.sent:
            self.counts["waits that were cut short by a restart"] += 1
            self.wait_for = 1
            self.host.crash()

    def strike(self) -> None:
        """Something goes wrong."""
        if self.now >= self.calm:
            return
        self.after(self.pause(), self.strike)
        victim = self.random.choice(self.clients)
        kind = self.random.random()
        if kind < 0.4:
            if victim.wire is not None:
                self.counts["connections cut"] += 1
                victim.wire.cut()
        elif kind < 0.65:
            self.host.crash()
        elif kind < 0.85:
            victim.crash()
        elif kind < 0.9:
            others = [client for client in self.clients if client is not victim]
            if any(not client.dead and client.name not in self.host.banned for client in others):
                self.counts["clients that never come back"] += 1
                victim.crash(for_good=True)
        elif kind < 0.95:
            self.revoke(victim)
        elif victim.old and (wire := self.host.wires.get(victim.name)) is not None:
            self.counts["old updates offered again"] += 1
            self.host.hears(wire, self.random.choice(victim.old))

    def revoke(self, victim: Device) -> None:
        banned = self.host.banned
        others = [client for client in self.clients if client is not victim]
        if any(not client.dead and client.name not in banned for client in others):
            self.counts["clients revoked"] += 1
            banned.add(victim.name)
            if self.host.up:
                self.host.do(self.host.node.revoke(victim.name, self.now))
            if self.random.random() < 0.6:
                self.after(self.random.random() * 10, self.admit, victim.name)

    def admit(self, name: str) -> None:
        self.counts["clients admitted again"] += 1
        self.host.banned.discard(name)

    # -- what must hold whenever nothing is under way

    def look(self) -> None:
        """Nothing is being written. Those whose connection is sound and silent: does each of them
        do what the server believes, and is everybody who could be in training?"""
        node, oracle, silent = self.host.node, self.oracle, True
        for client in self.clients:
            wire = self.host.wires.get(client.name)
            if wire is None and client.name in oracle.numbers:
                away = oracle.numbers[client.name] not in node.server.members
                require(away, "who is not connected is away", (self.now, client.name))
            if wire is None or not wire.alive or client.wire is not wire or wire.under_way:
                silent = False
                continue
            if not client.node.welcomed:
                continue
            number = oracle.numbers[client.name]
            there = number in node.server.members
            require(there, "who is connected is not away", (self.now, client.name))
            offering = client.node.pending
            answered = offering is None or oracle.over
            require(answered, "who offers an update is answered", client.name)
            if client.training is not None and not oracle.over:
                wanted = client.training.number in oracle.training.get(number, ())
                require(wanted, "nobody trains in vain when all is silent", client.name)
            if number in oracle.training and not oracle.over:
                training, where = client.training, (self.now, client.name)
                require(training is not None, "who is waited for is in training", where)
                latest = training.number == oracle.latest[number] or training.swap is not None
                require(latest, "a multicast reaches a client in training", where)
                hurried = training.short or number not in oracle.hurried
                require(hurried, "a request to hurry reaches a client in training", where)
        if silent:
            self.counts["moments when all was silent"] += 1
        idle = [c for c in node.server.members if c not in oracle.training]
        room = len(oracle.training) < oracle.concurrency
        if node.server.refill == "cohort":
            room = not oracle.training
        gathered = bool(oracle.sent) or len(oracle.there) >= oracle.wait_for
        free = room and idle and gathered
        require(not free, "no slot is free while somebody is idle", (self.now, idle))
        for client in oracle.training.keys() - oracle.there:
            gone = self.now - max(oracle.since[client], oracle.away[client]) > PATIENCE.away
            keeps = gone and idle and not oracle.over
            require(not keeps, "who is gone keeps no slot from others", (self.now, client))

    # -- from beginning to end

    def run(self) -> World:
        self.play()
        if self.random.random() < 0.15:
            self.extend()
            self.play()
        self.finish()
        return self

    def play(self) -> None:
        """Until the run is closed and everybody knows."""
        limit = max(self.now, self.calm) + PATIENT_ENOUGH
        queue = self._queue
        while not self.ended:
            self.now, _, what, given = heappop(queue)
            if self.now > limit:
                raise Violation("a run comes to its end", self.state())
            what(*given)

    @property
    def ended(self) -> bool:
        if not (self.oracle.closed and self.host.quiet and self.now > self.calm):
            return False
        banned = self.host.banned
        return all(c.ended or c.dead or c.name in banned for c in self.clients)

    def state(self) -> str:
        found = [
            (c.name, c.up, c.dead, c.wire is not None, c.node.training, c.node.pending is not None)
            for c in self.clients
        ]
        return f"{self.strategy} {len(self.oracle.folded)} of {self.updates} {found}"

    def extend(self) -> None:
        """The run is to have more updates: the server is started again, and so are the clients."""
        self.counts["runs extended"] += 1
        self.updates += self.random.randint(1, 4)
        self.calm = self.now + self.random.random() * 8
        self.after(self.pause(), self.strike)
        self.host.crash()
        for client in self.clients:
            client.up = client.ended = False
            self.after(self.random.random() * 3, client.start)

    def finish(self) -> None:
        node, oracle = self.host.node, self.oracle
        oracle.examine(node)
        for client in self.clients:
            if client.ended:
                number = oracle.numbers.get(client.name, -1)  # -1: it came after the end
                remembered = oracle.remembered.get(number, 0.0)
                require(client.remembered == remembered, "a client remembers what was folded")
                require(client.node.pending is None or oracle.over, "nothing is left to offer")
        require(node.exams[-1].updates == node.server.updates, "the last model is examined")
        if self.random.random() < 0.3:  # it takes as long as all the rest
            again = self.host.replayed(None)
            require(same(node.state_dict(), again.state_dict()), "the log alone gives the state")
        require(node.applied == len(self.host.log), "records are applied once")
        self.counts["histories"] += 1
        self.counts["extended" if self.counts["runs extended"] else "not extended"] += 1


def explore(
    seeds: Iterable[int],
    server: type[ServerNode] = ServerNode,
    client: type[ClientNode] = ClientNode,
) -> tuple[Counter[str], dict[str, tuple[int, str]]]:
    """Histories of these seeds: what has happened in them, and of each promise that was broken, the
    first seed and how."""
    torch.set_num_threads(1)
    counts: Counter[str] = Counter()
    broken: dict[str, tuple[int, str]] = {}
    for seed in seeds:
        try:
            counts += World(seed, server, client).run().counts
        except Violation as violation:
            broken.setdefault(violation.promise, (seed, str(violation)))
        except Exception as error:
            broken.setdefault("no node fails", (seed, repr(error)))
    return counts, broken


def main() -> int:
    """Explore histories on all cores, and say what was found."""
    from rich.console import Console
    from rich.progress import Progress

    options = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    options.add_argument("--histories", type=int, default=1_000_000)
    options.add_argument("--first", type=int, default=0, help="the seed of the first")
    options.add_argument("--minutes", type=float, default=90.0, help="then it stops early")
    chosen = options.parse_args()
    console = Console()
    counts: Counter[str] = Counter()
    broken: dict[str, tuple[int, str]] = {}
    last = chosen.first + chosen.histories
    portions = [range(k, min(k + PORTION, last)) for k in range(chosen.first, last, PORTION)]
    began, done = time.monotonic(), chosen.first
    with ProcessPoolExecutor() as pool, Progress(console=console) as progress:
        bar = progress.add_task("histories of a fleet on a bad network", total=chosen.histories)
        for seeds, (happened, found) in zip(portions, pool.map(explore, portions), strict=True):
            counts += happened
            for promise, (seed, how) in found.items():
                if promise not in broken:
                    console.print(f"seed {seed}: {how}", style="red", soft_wrap=True)
                broken.setdefault(promise, (seed, how))
            done = seeds.stop
            progress.advance(bar, len(seeds))
            if time.monotonic() - began > 60 * chosen.minutes:
                pool.shutdown(cancel_futures=True)
                break
    for what, times in sorted(counts.items()):
        console.print(f"{times:>12,} {what}", soft_wrap=True)
    console.print(
        f"{done - chosen.first:,} histories (seeds {chosen.first} to {done - 1}) in "
        f"{time.monotonic() - began:,.0f} s, promises broken: {sorted(broken) or 'none'}",
        soft_wrap=True,
    )
    if done < last:
        console.print(f"to go on: --first {done} --histories {last - done}", soft_wrap=True)
    return len(broken)


if __name__ == "__main__":
    raise SystemExit(main())
