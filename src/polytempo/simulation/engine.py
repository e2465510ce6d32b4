"""What the engines share: a virtual clock, a queue of events, a history, statistics.

An engine pops events in the order of (time, priority, counter) until a budget is spent. What the
events mean is the business of its subclasses: `Simulator` drives a server and its clients,
`PeerSimulator` peers that have none.
"""

from __future__ import annotations

import hashlib
import heapq
import json
import math
import time as wall
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, TypedDict

import torch
from torch import Tensor, nn

from polytempo.core.bank import PLAIN_STORAGE, Storage
from polytempo.core.layout import ALL_SHARED, Parts
from polytempo.core.objective import Plain
from polytempo.core.strategy import Context, Refill, Strategy
from polytempo.core.task import Task
from polytempo.data import Federation
from polytempo.simulation.checks import Checker, PeerChecker
from polytempo.simulation.devices import Devices, Instant, Network, TwoSpeed
from polytempo.simulation.diagnosis import Diagnosis
from polytempo.simulation.dropout import Dropout, NoDropout, Timeline
from polytempo.simulation.metrics import models_sent, over_clients
from polytempo.training import PERSONAL, Backend, ClientMemory, Exam, Job, Score, make_backend

Observer = Callable[[dict[str, Any]], None]


class World(TypedDict, total=False):
    """What all engines may be told, beside federation, module and strategy."""

    task: Task | None
    devices: Devices | None
    network: Network | None
    dropout: Dropout | None
    parts: Parts
    eval_every: int
    adapt_epochs: int
    adapt_always: bool
    seed: int
    backend: Backend | None
    storage: Storage


class Engine:
    """One run: a strategy, a federation, a world of devices, a clock."""

    slots: int  # clients that train at once
    refill: Refill
    checker: Checker | PeerChecker | None = None
    diagnosis: Diagnosis | None = None

    def __init__(
        self,
        federation: Federation,
        module: nn.Module,
        strategy: Strategy,
        *,
        task: Task | None = None,
        devices: Devices | None = None,
        network: Network | None = None,
        dropout: Dropout | None = None,
        parts: Parts = ALL_SHARED,
        eval_every: int = 20,
        adapt_epochs: int = 5,
        adapt_always: bool = False,
        seed: int = 0,
        backend: Backend | None = None,
        storage: Storage = PLAIN_STORAGE,
    ) -> None:
        clients = federation.clients
        self.backend = backend or make_backend(
            module, federation, seed, parts, solver="torch", name="serial"
        )
        self.space = self.backend.solver.space
        self.federation, self.strategy, self.seed = federation, strategy, seed
        self.eval_every, self.adapt_epochs = eval_every, adapt_epochs
        self.adapt_always = adapt_always
        own = {PERSONAL: self.space.initial_personal} if self.space.personal else {}
        self.memory = ClientMemory(clients, own)
        places = [place for _, place in self.space.trained]  # the shared ones come first
        tensors = [p.stop - p.start for p in places if p.stop <= self.space.parameters]
        self.context = Context(
            self.space.read(), federation.samples, task or Task(), seed, storage, tensors
        )
        self.devices = devices or TwoSpeed()
        self.dropout = dropout or NoDropout()
        network = (network or Instant()) if strategy.communicates else Instant()
        self.factors = self.devices.factors(clients, seed)
        self.bandwidths = network.bandwidths(clients, seed)
        self.changes = self.dropout.changes(clients, seed)
        self.timeline = Timeline([change for change in self.changes if change.timed])

        self.time = 0.0
        self.queue: list[tuple[float, int, int, int, int, int]] = []  # key; client, two numbers
        self.counter = 0
        self.limit, self.budget = math.inf, math.inf  # rounds, and models that may be sent
        self.history: list[dict[str, Any]] = []
        self.messages = Counter(dispatch=0, upload=0, multicast=0)
        self.bytes = Counter(self.messages)
        self.staleness: Counter[int] = Counter()
        self.wall = {"training": 0.0, "server": 0.0, "evaluation": 0.0, "total": 0.0}
        self.events = 0
        self.fingerprint = ""
        self.started = False
        self.observers: list[Observer] = []
        self._scores: dict[int, tuple[object, Score]] = {}  # with the revision of the model
        self._evaluated: tuple[Tensor, list[Score]] | None = None  # the same, of a single model

    # -- what an engine has of its own -----------------------------------------------------------

    @property
    def round(self) -> int:
        """Local trainings that are done and have counted."""
        raise NotImplementedError

    @property
    def version(self) -> int:
        """How often models have changed other than by local training."""
        raise NotImplementedError

    def _start(self) -> None:
        """Time 0: record the untrained models, and queue the first events."""
        raise NotImplementedError

    def _go_on(self) -> None:
        """At the beginning of each `run`: after the start, or from a checkpoint."""

    def _step(self) -> None:
        """Let the next event of the queue happen."""
        raise NotImplementedError

    # -- running ---------------------------------------------------------------------------------

    @property
    def sent(self) -> int:
        """Models sent so far, whatever the direction."""
        return models_sent(self.messages)

    def is_over(self) -> bool:
        """Whether the rounds are done, or the budget of messages is spent."""
        return self.round >= self.limit or self.sent >= self.budget

    def run(
        self,
        rounds: int,
        *,
        versions: float = math.inf,
        messages: float = math.inf,
        until: float = math.inf,
        stop: Callable[[], bool] = lambda: False,
    ) -> bool:
        """Go on until `rounds` trainings are done (in total), what is served has changed `versions`
        times, `messages` models have been sent, the clock passes `until`, nobody is left, or
        `stop()` says so between two events. Returns False in that last case."""
        self.limit, self.budget = rounds, messages
        threads = torch.get_num_threads()
        torch.set_num_threads(1)  # sums in one order: same seed, same bits
        try:
            with self.backend:
                return self._run(versions, until, stop)
        finally:
            torch.set_num_threads(threads)

    def _run(self, versions: float, until: float, stop: Callable[[], bool]) -> bool:
        with self._timed("total"):
            if not self.started:
                self._start()
            self._go_on()
        while (
            not self.is_over()
            and self.version < versions
            and self.queue
            and self.queue[0][0] <= until
        ):
            if stop():
                return False
            with self._timed("total"):
                self._step()
        with self._timed("total"):
            last = self.history[-1]
            if last["round"] != self.round:
                last = self._record()
            if last["accuracy_adapted"] is None and self.adapt_epochs:
                last["accuracy_adapted"] = self.adapted(stop)
            self.backend.drain()
        return last["accuracy_adapted"] is not None or not self.adapt_epochs

    # -- looking at it -------------------------------------------------------------------------

    def _record(self) -> dict[str, Any]:
        with self._timed("evaluation"):
            there = self._there()
            scores = self._evaluate(there)
            row = {
                "time": self.time,
                "round": self.round,
                "version": self.version,
                **over_clients(scores),
                "accuracy_adapted": None,
                **self.messages,
                "messages": self.sent,
                **self._more(dict(zip(there, scores, strict=True))),
            }
            self.history.append(row)
            self._emit("evaluate", None, accuracy=row["accuracy"], loss=row["loss"])
        if self.adapt_always and self.adapt_epochs and self.round:
            row["accuracy_adapted"] = self.adapted()
        return row

    def _there(self) -> Sequence[int]:
        """The clients that accuracies are over."""
        return range(self.federation.clients)

    def _more(self, scores: Mapping[int, Score]) -> dict[str, Any]:
        """What else an engine has to say at an evaluation; `scores` by client."""
        return {}

    def _evaluate(self, clients: Sequence[int]) -> list[Score]:
        """The scores of these clients' models; only models that have changed are looked at."""
        if self.strategy.single_model:
            model, everybody = self.strategy.model_for(0), range(self.federation.clients)
            if self.space.personal:
                [scores] = self.backend.evaluate([self._exam(model, clients)])
                return scores
            if self._evaluated is None or self._evaluated[0] is not model:
                [scores] = self.backend.evaluate([self._exam(model, everybody)])
                self._evaluated = model, scores
            return [self._evaluated[1][client] for client in clients]
        revisions = {
            client: (self.strategy.revision(client), self.memory.revision(client))
            for client in clients
        }
        changed = [
            client
            for client, revision in revisions.items()
            if revision[0] is None or self._scores.get(client, (None,))[0] != revision
        ]
        exams = (self._exam(self.strategy.model_for(client), [client]) for client in changed)
        for client, [score] in zip(changed, self.backend.evaluate(exams), strict=True):
            self._scores[client] = revisions[client], score
        return [self._scores[client][1] for client in clients]

    def _exam(self, model: Tensor, clients: Sequence[int]) -> Exam:
        """The model, with what each of these clients has of its own."""
        if not self.space.personal:
            return Exam(model, list(clients))
        return Exam(model, list(clients), [self.personal(client) for client in clients])

    def personal(self, client: int) -> Tensor:
        """The client's own part of the model."""
        return self.memory.vector(PERSONAL, client)

    def adapted(self, stop: Callable[[], bool] = lambda: False) -> float | None:
        """Mean accuracy after every client has adapted a copy of its model by plain training;
        None if `stop` broke it off."""
        with self._timed("evaluation"):
            task = replace(
                self.context.task,
                objective=Plain(),
                epochs=self.adapt_epochs,
                steps=None,
                keep_optimizer=False,
            )
            scores: list[Score] = []
            clients, together = self._there(), 2 * self.backend.width
            for begin in range(0, len(clients), together):  # n models need not be there at once
                jobs = []
                for client in clients[begin : begin + together]:
                    stream = ("adapt", client, "round", self.round)
                    model, memory = self.strategy.model_for(client), self.memory.get(client)
                    jobs.append(Job(client, model, task, stream, memory=memory))
                    self.backend.expect(jobs[-1])
                exams = []
                for job in jobs:
                    if stop():
                        for unused in jobs:
                            self.backend.forget(unused)
                        return None
                    adapted, _, memory = self.backend.carry_out(job)
                    own = [memory[PERSONAL]] if PERSONAL in memory else None
                    exams.append(Exam(adapted, [job.client], own))
                scores += [score for [score] in self.backend.evaluate(exams)]
            return over_clients(scores)["accuracy"]

    # -- small things --------------------------------------------------------------------------

    def _count(self, kind: str, size: int) -> None:
        if self.strategy.communicates:
            self.messages[kind] += 1
            self.bytes[kind] += size

    def _push(self, time: float, priority: int, client: int, flight: int, number: int) -> int:
        self.counter += 1
        heapq.heappush(self.queue, (time, priority, self.counter, client, flight, number))
        return self.counter

    def _emit(
        self, kind: str, client: int | None, dispatch: int | None = None, **details: Any
    ) -> None:
        event: dict[str, Any] = {"n": self.events, "time": self.time, "event": kind}
        if client is not None:
            event["client"] = client
        if dispatch is not None:
            event["dispatch"] = dispatch
        event |= {"round": self.round, "version": self.version, **details}
        self.events += 1
        chained = self.fingerprint + json.dumps(event)
        self.fingerprint = hashlib.sha256(chained.encode()).hexdigest()[:32]
        if self.checker:
            self.checker(event)
        for observer in self.observers:
            observer(event)

    @contextmanager
    def _timed(self, what: str) -> Iterator[None]:
        begin = wall.perf_counter()
        try:
            yield
        finally:
            self.wall[what] += wall.perf_counter() - begin
