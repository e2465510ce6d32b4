"""What the engines share: a virtual clock, a queue of events, a history, statistics.

An engine pops events in the order of (time, priority, counter) until a budget is spent. What the
events mean is the business of its subclasses: `Simulator` drives a server and its clients,
`PeerSimulator` peers that have none.
"""

from __future__ import annotations

import hashlib
import heapq
import math
import time as wall
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any, Concatenate, Literal, ParamSpec, TypedDict

import torch
from torch import Tensor, nn

from polytempo.core import events
from polytempo.core.attacks import Attack
from polytempo.core.bank import PLAIN_STORAGE, Storage
from polytempo.core.client_steps import in_use, with_offset
from polytempo.core.errors import PolytempoError
from polytempo.core.layout import ALL_SHARED, Parts
from polytempo.core.objective import Plain
from polytempo.core.rng import rng
from polytempo.core.strategy import Context, Refill, State, Strategy, as_model
from polytempo.core.task import Task
from polytempo.data import Federation
from polytempo.simulation.devices import Devices, Instant, Network, TwoSpeed
from polytempo.simulation.dropout import Dropout, NoDropout, Timeline
from polytempo.simulation.each_client import EachClient
from polytempo.simulation.extension import Extension
from polytempo.simulation.guards import Attackers
from polytempo.simulation.metrics import models_sent, over_clients
from polytempo.training import PERSONAL, ClientMemory, Exam, Executor, Job, Score, make_executor

FORMAT = 8  # of checkpoints
NOT_TESTED = Score({})
Observer = Callable[[events.Event], None]
Judge = Callable[[Mapping[str, Any]], str | None]  # of a row of the history: why to end the run
P = ParamSpec("P")


class World(TypedDict, total=False):
    """What all engines may be told, in addition to federation, module and strategy."""

    task: Task | None
    devices: Devices | None
    network: Network | None
    dropout: Dropout | None
    parts: Parts
    eval_every: int
    adapt_epochs: int
    adapt_always: bool
    seed: int
    backend: Executor | None
    storage: Storage
    attack: Attack | None


class Engine:
    """One run: a strategy, a federation, a world of devices, a clock."""

    concurrency: int  # clients that train at once
    refill: Refill

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
        backend: Executor | None = None,
        storage: Storage = PLAIN_STORAGE,
        attack: Attack | None = None,
    ) -> None:
        clients = federation.clients
        self.backend = backend or make_executor(
            module, federation, seed, parts, solver="torch", name="serial"
        )
        self.layout = self.backend.solver.layout
        self.problem = self.backend.solver.problem
        self.metric = self.problem.metrics[0]
        self.federation, self.strategy, self.seed = federation, strategy, seed
        self.eval_every, self.adapt_epochs = eval_every, adapt_epochs
        self.adapt_always = adapt_always
        own = {PERSONAL: self.layout.initial_personal} if self.layout.personal else {}
        self.memory = ClientMemory(clients, own)
        self.context = Context(
            self.layout.read(),
            federation.samples,
            task or Task(),
            seed,
            storage,
            self.layout.tensors,
        )
        self.devices = devices or TwoSpeed()
        self.dropout = dropout or NoDropout()
        network = (network or Instant()) if strategy.communicates else Instant()
        self.factors = self.devices.factors_among(federation, seed)
        self.bandwidths = network.bandwidths(clients, seed)
        self.changes = self.dropout.changes(clients, seed)
        self.timeline = Timeline([change for change in self.changes if change.timed])

        self.time = 0.0
        self.queue: list[tuple[float, int, int, int, int, int]] = []  # key; client, two numbers
        self.counter = 0
        self.limit, self.budget = math.inf, math.inf  # updates, and models that may be sent
        self.history: list[dict[str, Any]] = []
        self.messages = Counter(dispatch=0, upload=0, multicast=0)
        self.bytes = Counter(self.messages)
        self.staleness: Counter[int] = Counter()
        self.wall = {"training": 0.0, "server": 0.0, "evaluation": 0.0, "total": 0.0}
        self.events = 0
        self.fingerprint = ""
        self.started = False
        self.observers: list[Observer] = []
        self.judges: list[Judge] = []
        self.judged = 0  # rows of the history that they know
        self.stopped: str | None = None  # why a judge has ended the run
        self.loggers: list[Callable[[str], None]] = []  # are told of each event as a line of JSON
        self.clock = wall.perf_counter  # what `wall` is measured with
        self.extensions: dict[str, Extension] = {}
        self._scores: dict[int, tuple[object, Score]] = {}  # with the revision of the model
        self._evaluated: tuple[Tensor, dict[int, Score]] | None = None  # of a single model
        self.attack = attack
        self.attackers = frozenset[int]() if attack is None else attack.clients(clients, seed)
        self.extend(EachClient(self))
        if attack is not None:
            self.extend(Attackers(self, attack))

    # -- what an engine has of its own -----------------------------------------------------------

    @property
    def updates(self) -> int:
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

    def _spent(self) -> bool:
        """Whether no more models may be sent."""
        return self.budget < math.inf and self.sent >= self.budget

    def is_over(self) -> bool:
        """Whether the updates are done, or the budget of messages is spent."""
        return self.updates >= self.limit or self._spent()

    def run(
        self,
        updates: int,
        *,
        versions: float = math.inf,
        messages: float = math.inf,
        until: float = math.inf,
        stop: Callable[[], bool] = lambda: False,
        closing: Callable[[], None] = lambda: None,
    ) -> bool:
        """Run until `updates` trainings are done (in total), what is served has changed `versions`
        times, `messages` models have been sent, the clock passes `until`, nobody is left, a judge
        has seen enough, or `stop()` says so between two events. Returns False in that last case.

        `closing` is called before the closing evaluation, which would not be there in a longer run:
        what is saved then can be continued as if the run had been longer from the beginning."""
        self.limit, self.budget, self.stopped = updates, messages, None
        threads = torch.get_num_threads()
        torch.set_num_threads(1)  # sums in one order: same seed, same bits
        try:
            with self.backend:
                return self._run(versions, until, stop, closing)
        finally:
            torch.set_num_threads(threads)

    def _run(
        self,
        versions: float,
        until: float,
        stop: Callable[[], bool],
        closing: Callable[[], None],
    ) -> bool:
        with self._timed("total"):
            if not self.started:
                self.started = True
                self._start()
                for extension in self.extensions.values():
                    extension.started()
            self._go_on()
        while (
            not self.is_over()
            and self.version < versions
            and self.queue
            and self.queue[0][0] <= until
        ):
            self.stopped = self._judge()
            if self.stopped is not None:
                break
            if stop():
                return False
            with self._timed("total"):
                self._step()
        closing()
        with self._timed("total"):
            last = self.history[-1]
            if last["updates"] != self.updates:
                last = self._record()
            if last[self._adapted] is None and self.adapt_epochs:
                last |= self.adapted(stop) or {}
            self.backend.drain()
        self._judge()  # too late to end it
        return last[self._adapted] is not None or not self.adapt_epochs

    def _judge(self) -> str | None:
        """Tell the judges of new rows, between two events; what the first one says who has seen
        enough. An engine that was restored tells them all that is in its history."""
        new, self.judged = self.history[self.judged :], len(self.history)
        answers = [judge(dict(row)) for row in new for judge in self.judges]
        return next((answer for answer in answers if answer is not None), None)

    # -- looking at it -------------------------------------------------------------------------

    def _record(self) -> dict[str, Any]:
        with self._timed("evaluation"):
            there = self._there()
            scores = self._evaluate(there)
            means = over_clients(scores, self.problem)
            row: dict[str, Any] = {
                "time": self.time,
                "updates": self.updates,
                "version": self.version,
                **means,
                self._adapted: None,
                f"{self._adapted}_worst10": None,
                **self.messages,
                "messages": self.sent,
            }
            by_client = dict(zip(there, scores, strict=True))
            for extension in self.extensions.values():
                row |= extension.evaluated(by_client)
            self.history.append(row)
            name = self.metric.name
            self._emit(events.Evaluate, name, row[name], row["loss"])
        if self.adapt_always and self.adapt_epochs and self.updates:
            row |= self.adapted() or {}
        return row

    @property
    def _adapted(self) -> str:
        """The column of the history for the mean that `adapted` finds."""
        return f"{self.metric.name}_adapted"

    def _there(self) -> Sequence[int]:
        """The clients that figures are over: those that are honest."""
        clients = range(self.federation.clients)
        return [c for c in clients if c not in self.attackers] if self.attackers else clients

    def _evaluate(self, clients: Sequence[int]) -> list[Score]:
        """The scores of these clients' models; only models that have changed are looked at."""
        if self.strategy.single_model:
            model, tested = self._served(0), self.federation.tested
            if self._remembered(0):
                [scores] = self.backend.evaluate([self._exam(model, clients)])
                return scores
            if self._evaluated is None or self._evaluated[0] is not model:
                [scores] = self.backend.evaluate([self._exam(model, tested)])
                self._evaluated = model, dict(zip(tested, scores, strict=True))
            return [self._evaluated[1].get(client, NOT_TESTED) for client in clients]
        revisions = {
            client: (
                self.strategy.revision(client),
                *(self.memory.revision(name, client) for name in self._remembered(client)),
            )
            for client in clients
        }
        changed = [
            client
            for client, revision in revisions.items()
            if revision[0] is None or self._scores.get(client, (None,))[0] != revision
        ]
        exams = (self._exam(self._served(client), [client]) for client in changed)
        for client, [score] in zip(changed, self.backend.evaluate(exams), strict=True):
            self._scores[client] = revisions[client], score
        return [self._scores[client][1] for client in clients]

    def _served(self, client: int) -> Tensor:
        return as_model(self.strategy, "serve", self.strategy.serve(client), self.context.initial)

    def _exam(self, model: Tensor, clients: Sequence[int]) -> Exam:
        """The model, with what each of these clients has of its own."""
        steps = in_use(self.strategy.task(clients[0]).client_steps) if clients else ()
        if not clients or not self._remembered(clients[0]):
            return Exam(model, list(clients), None, steps)
        memories = [self._memory_in_use(client) for client in clients]
        return Exam(model, list(clients), memories, steps)

    def _remembered(self, client: int) -> tuple[str, ...]:
        """The names of what the client remembers and needs in order to use its model."""
        own = (PERSONAL,) if self.layout.personal else ()
        steps = in_use(self.strategy.task(client).client_steps)
        return (*own, *(name for step in steps for name in step.keeps))

    def _memory_in_use(self, client: int) -> dict[str, Tensor]:
        names = self._remembered(client)
        return {name: v for name, v in self.memory.get(client).items() if name in names}

    def in_use(self, client: int) -> Tensor:
        """The model that the client uses, as it travels."""
        model, memory = self.strategy.serve(client), self._memory_in_use(client)
        for step in in_use(self.strategy.task(client).client_steps):
            model = step.use(model, memory)
        return model

    def offset(self, client: int) -> Tensor | None:
        """What the client adds to the outputs of its model."""
        steps = with_offset(self.strategy.task(client).client_steps)
        return self.backend.solver.offset(client, steps)

    def own_part(self, client: int) -> dict[str, Tensor]:
        """What a training outside the run needs of the client's memory."""
        return {PERSONAL: self.personal(client)} if self.layout.personal else {}

    def personal(self, client: int) -> Tensor:
        """The client's own part of the model."""
        return self.memory.vector(PERSONAL, client)

    def _adaptation(self) -> Task:
        """How clients adapt: at the learning rate that was set, wherever the schedule is, so that
        the figure means the same early and late in a run."""
        return replace(
            self.context.task,
            objective=Plain(),
            epochs=self.adapt_epochs,
            steps=None,
            keep_optimizer=False,
        )

    def adaptation_time(self) -> float | None:
        """Simulated seconds until the last client has adapted its model, all at once; None if
        nobody does."""
        if self.history[-1][self._adapted] is None:
            return None
        task, samples = self._adaptation(), self.federation.samples
        return max(
            self.devices.seconds(
                self.factors[client], task.work(samples[client]), rng(self.seed, "adapt", client)
            )
            for client in self._there()
        )

    def adapted(self, stop: Callable[[], bool] = lambda: False) -> dict[str, float | None] | None:
        """The metric after every client has adapted a copy of its model by plain training, its mean
        and that of the worst tenth, as columns of the history; None if `stop` broke it off."""
        with self._timed("evaluation"):
            scores: list[Score] = []
            clients, together = self._there(), 2 * self.backend.width
            for begin in range(0, len(clients), together):  # n models need not be there at once
                jobs = [self._adapting(client) for client in clients[begin : begin + together]]
                for job in jobs:
                    self.backend.expect(job)
                exams = []
                for job in jobs:
                    if stop():
                        for unused in jobs:
                            self.backend.forget(unused)
                        return None
                    adapted, _, memory = self.backend.carry_out(job)
                    exams.append(Exam(adapted, [job.client], [memory], job.task.client_steps))
                scores += [score for [score] in self.backend.evaluate(exams)]
            by_client = dict(zip(clients, scores, strict=True))
            for extension in self.extensions.values():
                extension.adapted(by_client)
            found = over_clients(scores, self.problem)
            ends = ("", "_worst10")
            return {f"{self._adapted}{end}": found[f"{self.metric.name}{end}"] for end in ends}

    def adapted_model(self, client: int) -> tuple[Tensor, dict[str, Tensor]]:
        """The model that the client has after adapting a copy of its own, as it travels, and what
        the client then remembers: that which `adapted` has tested."""
        if not self.adapt_epochs:
            raise PolytempoError("this run has no fine-tuning: its adapt_epochs is 0")
        threads = torch.get_num_threads()
        torch.set_num_threads(1)  # same bits as in the run
        try:
            with self.backend:
                adapted, _, memory = self.backend.carry_out(self._adapting(client))
        finally:
            torch.set_num_threads(threads)
        return adapted, memory

    def _adapting(self, client: int) -> Job:
        """The training by which the client adapts a copy of its model, as it stands."""
        stream = ("adapt", client, "round", self.updates)
        steps = with_offset(self.strategy.task(client).client_steps)
        task = replace(self._adaptation(), client_steps=steps)
        return Job(client, self.in_use(client), task, stream, memory=self.own_part(client))

    # -- extensions ------------------------------------------------------------------------------

    def extend(self, extension: Extension) -> None:
        """Attach an extension to the run, before it begins or is restored."""
        if extension.name in self.extensions:
            raise PolytempoError(f"this run already has an extension {extension.name!r}")
        self.extensions[extension.name] = extension

    # -- checkpoints -----------------------------------------------------------------------------

    def state_dict(self) -> State:
        """All that the rest of the run depends on, what is under way included; as it is, so save or
        copy it before the engine continues."""
        return {
            "format": FORMAT,
            "data": self.federation.digest,
            "frozen": self.layout.frozen_digest,
            "time": self.time,
            "queue": self.queue,
            "counter": self.counter,
            "started": self.started,
            "history": self.history,
            "messages": dict(self.messages),
            "bytes": dict(self.bytes),
            "staleness": [list(pair) for pair in self.staleness.items()],
            "wall": dict(self.wall),
            "events": self.events,
            "fingerprint": self.fingerprint,
            "memory": self.memory.state_dict(),
            "extensions": {name: each.state_dict() for name, each in self.extensions.items()},
        }

    def load_state_dict(self, state: State) -> None:
        """Continue from `state`, and take it over; the engine is new, and has the settings of the
        one that was saved."""
        if state.get("format") != FORMAT:
            raise PolytempoError(
                f"the checkpoint has format {state.get('format')}, this version reads {FORMAT}; "
                "start a new run"
            )
        if state["data"] != self.federation.digest:
            raise PolytempoError(
                f"the checkpoint was made on data other than the present "
                f"{self.federation.description}; restore the old files, or start a new run"
            )
        if state.get("frozen", "") not in ("", self.layout.frozen_digest):
            raise PolytempoError(
                "the checkpoint was made with another frozen part of the model; restore the files "
                "of the pre-trained model, or start a new run"
            )
        missing = self.extensions.keys() - state["extensions"].keys()
        if missing:
            raise PolytempoError(
                f"the checkpoint was made without the {sorted(missing)[0]}, which must see a run "
                "from its beginning; resume without it, or start a new run"
            )
        self.time, self.counter = state["time"], state["counter"]
        self.queue = [tuple(item) for item in state["queue"]]
        self.started = state["started"]
        self.history = list(state["history"])
        self.messages = Counter(state["messages"])
        self.bytes = Counter(state["bytes"])
        self.staleness = Counter(dict(state["staleness"]))
        self.wall = dict(state["wall"])
        self.events, self.fingerprint = state["events"], state["fingerprint"]
        self.memory.load_state_dict(state["memory"])
        for name, extension in self.extensions.items():
            extension.load_state_dict(state["extensions"][name])

    # -- small things --------------------------------------------------------------------------

    def _count(self, kind: str, size: int) -> None:
        if self.strategy.communicates:
            self.messages[kind] += 1
            self.bytes[kind] += size

    def _push(self, time: float, priority: int, client: int, flight: int, number: int) -> int:
        self.counter += 1
        heapq.heappush(self.queue, (time, priority, self.counter, client, flight, number))
        return self.counter

    def _pop(self) -> tuple[float, int, int, int, int, int]:
        """The next item of the queue, of which the extensions are told."""
        item = heapq.heappop(self.queue)
        for extension in self.extensions.values():
            extension.popped(item[:3])
        return item

    def _emit(
        self,
        kind: Callable[Concatenate[int, float, int, int, P], events.Event],
        *fields: P.args,
        **named: P.kwargs,
    ) -> None:
        """Tell everybody of an event: its class, and its fields beyond the common head."""
        event = kind(self.events, self.time, self.updates, self.version, *fields, **named)
        self.events += 1
        line = events.to_json(event)
        self.fingerprint = hashlib.sha256((self.fingerprint + line).encode()).hexdigest()[:32]
        for extension in self.extensions.values():
            extension.happened(event)
        for observer in self.observers:
            observer(event)
        for logger in self.loggers:
            logger(line)

    def _fate(self, *name: str | int) -> Literal["arrives", "lost"] | float:
        """What becomes of the update, or the message, of that name. (Most dropout models do not ask
        for luck, and a stream of random numbers costs more than all the rest here.)"""
        if type(self.dropout).fate is Dropout.fate:
            return "arrives"
        return self.dropout.fate(rng(self.seed, "fate", *name))

    def _timed(self, what: str) -> AbstractContextManager[None]:
        return _Timed(self.wall, what, self.clock)


class _Timed:
    """Adds the time that is spent within this context. (A function with `contextmanager` takes
    several times as long, and there are four of these per update.)"""

    __slots__ = ("_begin", "_clock", "_spent", "_what")

    def __init__(self, spent: dict[str, float], what: str, clock: Callable[[], float]) -> None:
        self._spent, self._what, self._clock = spent, what, clock

    def __enter__(self) -> None:
        self._begin = self._clock()

    def __exit__(self, *error: object) -> None:
        self._spent[self._what] += self._clock() - self._begin
