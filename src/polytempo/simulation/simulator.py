"""The simulator: an engine that drives a `Server` on a virtual clock.

Theory of operation
-------------------
1. There is one queue of events, ordered by (time, priority, counter). The counter is unique, so
   that equal times never compare anything else and the order is total. Three things can happen:
   a client comes or goes (CHANGE), an upload arrives (ARRIVE), a message from the server reaches a
   client in training (DELIVER). At equal times they happen in this order.
2. Durations are virtual: work times device factor times jitter, plus bytes over bandwidth, from
   random streams named by client and dispatch. The wall clock is read for statistics only.
3. Training is lazy. A client's result depends only on the model sent, its data and its own random
   stream, so it is computed when it is needed, at its arrival. Until then the client in flight is
   just a `Flight`: a multicast replaces the model in it, an urgent request shortens it, and a
   checkpoint saves it as it stands.
4. A multicast that reaches a client after k of its steps makes it train the steps from k on, from
   the new model: the schedule of batches stays the same. If no step is left, it is missed, and the
   upload answers the older dispatch.
5. Evaluation and adaptation happen outside the clock and leave no trace in the run's state.
6. Every event goes to the observers (event log, invariant checker, progress bar) and into a
   running fingerprint: two runs with equal fingerprints did the same, bit for bit.
"""

from __future__ import annotations

import hashlib
import heapq
import json
import math
import time as wall
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from polytempo.core.errors import PolytempoError, Refused
from polytempo.core.messages import Action, Dispatch, Stop, Update
from polytempo.core.parameters import BufferPolicy
from polytempo.core.rng import rng
from polytempo.core.server import Server
from polytempo.core.strategy import Context, Refill, Strategy
from polytempo.core.task import Plain, Task
from polytempo.data import Federation
from polytempo.local import Backend, Job, Score, Serial, Trainer
from polytempo.simulation.checks import Checker
from polytempo.simulation.devices import Devices, Instant, Network, TwoSpeed
from polytempo.simulation.dropout import Dropout, Never, Timeline
from polytempo.simulation.metrics import over_clients

CHANGE, ARRIVE, DELIVER = 0, 1, 2  # priorities at equal times
Observer = Callable[[dict[str, Any]], None]


@dataclass
class Flight:
    """A client in training."""

    first: int  # the dispatch that started it
    number: int  # the dispatch whose model it trains (a multicast may have taken over)
    job: Job
    begin: float  # training begins, after the download
    seconds: float  # of training
    upload: float  # seconds of the upload
    lost: bool = False
    ticket: int = -1  # counter of its arrival event; an older one in the queue is void

    def steps(self, samples: int) -> int:
        """Steps of the whole task, whatever the client has done of it."""
        return self.job.task.total_steps(samples)


class Simulator:
    """One run: a strategy, a federation, a world of devices, a clock."""

    def __init__(
        self,
        federation: Federation,
        module: nn.Module,
        strategy: Strategy,
        *,
        task: Task | None = None,
        slots: int | None = None,
        refill: Refill | None = None,
        devices: Devices | None = None,
        network: Network | None = None,
        dropout: Dropout | None = None,
        buffers: BufferPolicy = "share",
        eval_every: int = 20,
        adapt_epochs: int = 5,
        adapt_always: bool = False,
        seed: int = 0,
        check: bool = False,
        backend: Backend | None = None,
    ) -> None:
        clients = federation.clients
        trainer = Trainer(module, federation, seed, buffers)
        self.space = trainer.space
        self.backend: Backend = Serial(trainer) if backend is None else backend
        self.federation, self.strategy, self.seed = federation, strategy, seed
        self.eval_every, self.adapt_epochs = eval_every, adapt_epochs
        self.adapt_always = adapt_always

        context = Context(trainer.space.read(), federation.samples, task or Task(), seed)
        if strategy.all_slots and refill is None:
            slots = clients
        elif slots is None:
            slots = min(clients, max(4, math.ceil(clients / 10)))
        self.server = Server(strategy, context, slots=slots, refill=refill)
        self.devices = devices or TwoSpeed()
        self.dropout = dropout or Never()
        network = (network or Instant()) if strategy.communicates else Instant()
        self.factors = self.devices.factors(clients, seed)
        self.bandwidths = network.bandwidths(clients, seed)

        self.time = 0.0
        self.queue: list[tuple[float, int, int, int, int, int]] = []  # key; client, flight, number
        self.counter = 0
        self.flights: dict[int, Flight] = {}
        self.transit: dict[int, Dispatch] = {}  # multicasts on their way
        self.changes = self.dropout.changes(clients, seed)
        self.timeline = Timeline(self.changes)

        self.history: list[dict[str, Any]] = []
        self.messages = Counter(dispatch=0, upload=0, multicast=0)
        self.staleness: Counter[int] = Counter()
        self.wall = {"training": 0.0, "server": 0.0, "evaluation": 0.0, "total": 0.0}
        self.events = 0
        self.fingerprint = ""
        self.started = False
        self.observers: list[Observer] = []
        self.checker = Checker(slots) if check else None

    # -- running -------------------------------------------------------------------------------

    def run(
        self,
        rounds: int,
        *,
        until: float = math.inf,
        stop: Callable[[], bool] = lambda: False,
    ) -> bool:
        """Go on until `rounds` updates are folded (in total), the clock passes `until`, nobody is
        left, or `stop()` says so between two events. Returns False in that last case."""
        threads = torch.get_num_threads()
        torch.set_num_threads(1)  # sums in one order: same seed, same bits
        begin = wall.perf_counter()
        try:
            if not self.started:
                self._start()
            while self.server.round < rounds and self.queue and self.queue[0][0] <= until:
                if stop():
                    return False
                self._step()
            if not self.history or self.history[-1]["round"] != self.server.round:
                self._record()
            if self.history[-1]["accuracy_adapted"] is None and self.adapt_epochs:
                self.history[-1]["accuracy_adapted"] = self.adapted()
            return True
        finally:
            self.wall["total"] += wall.perf_counter() - begin
            torch.set_num_threads(threads)

    def _start(self) -> None:
        self.started = True
        self._record()
        absent = set()
        for index, change in enumerate(self.changes):
            if change.time <= 0 and not change.available:
                absent.add(change.client)
            elif change.time <= 0:
                absent.discard(change.client)
            else:
                self._push(change.time, CHANGE, change.client, index, 0)
        self._act(self.server.join(c for c in range(self.federation.clients) if c not in absent))

    def _step(self) -> None:
        self.time, priority, counter, client, flight, number = heapq.heappop(self.queue)
        if priority == CHANGE:
            self._change(flight)
        elif priority == DELIVER:
            self._deliver(client, flight, number)
        elif client in self.flights and self.flights[client].ticket == counter:
            self._arrive(client)

    def _arrive(self, client: int) -> None:
        flight = self.flights.pop(client)
        if flight.lost:
            self._drop(client, flight, self.server.lost)
            return
        with self._timed("training"):
            [vector] = self.backend.train([flight.job])
        update = Update(client, flight.number, vector, self.federation.samples[client])
        stale = self.server.staleness(client, flight.number)
        with self._timed("server"):
            try:
                actions = self.server.receive(update)
            except Refused as refusal:
                raise PolytempoError(
                    f"round {self.server.round}, simulated time {self.time:g}: {refusal}"
                ) from refusal
        self.staleness[stale.rounds] += 1
        self._count("upload")
        details = {"staleness": stale.rounds, "versions": stale.versions}
        self._emit("upload", client, flight.number, **details)
        self._act(actions)
        if self.server.round % self.eval_every == 0:
            self._record()

    def _drop(self, client: int, flight: Flight, tell: Callable[[int], list[Action]]) -> None:
        actions = tell(client)
        self._emit("drop", client, flight.number)
        self._act(actions)

    def _change(self, index: int) -> None:
        change = self.changes[index]
        client = change.client
        if change.available:
            actions = self.server.join([client])
            self._emit("return", client)
            self._act(actions)
            return
        self._emit("leave", client)
        if not change.for_good:
            self.server.away(client)
        elif client in self.flights:
            self._drop(client, self.flights.pop(client), self.server.leave)
        else:
            self.server.leave(client)

    # -- what the server asks for --------------------------------------------------------------

    def _act(self, actions: Sequence[Action]) -> None:
        for action in actions:
            client = action.client
            if isinstance(action, Stop):
                self._emit("urgent", client, action.number)
                self._push(self.time, DELIVER, client, self.flights[client].first, action.number)
            elif action.preempt:
                self._count("multicast")
                self._emit("multicast", client, action.number)
                self.transit[action.number] = action
                arrival = self.time + self._transfer(client)
                self._push(arrival, DELIVER, client, self.flights[client].first, action.number)
            else:
                self._count("dispatch")
                self._emit("dispatch", client, action.number)
                self._launch(action)

    def _launch(self, dispatch: Dispatch) -> None:
        client, number = dispatch.client, dispatch.number
        stream = rng(self.seed, "device", client, "dispatch", number)
        work = dispatch.task.work(self.federation.samples[client])
        seconds = self.devices.seconds(self.factors[client], work, stream)
        now = self.timeline.at(client, self.time)
        if now is not None and now.latency is not None:
            seconds = now.latency
        fate = self.dropout.fate(rng(self.seed, "fate", client, "dispatch", number))
        if isinstance(fate, float):
            seconds *= fate
        job = Job(client, dispatch.params, dispatch.task, ("client", client, "dispatch", number))
        transfer = self._transfer(client)
        flight = Flight(number, number, job, self.time + transfer, seconds, transfer)
        flight.lost = fate == "lost"
        self.flights[client] = flight
        self._expect(flight, flight.begin + seconds + transfer)

    def _expect(self, flight: Flight, arrival: float) -> None:
        """Queue the arrival of the flight's upload, once the client is there to send it."""
        possible = self.timeline.next_available(flight.job.client, arrival)
        if math.isinf(possible):
            flight.lost, possible = True, arrival
        flight.ticket = self._push(possible, ARRIVE, flight.job.client, flight.first, flight.number)

    def _deliver(self, client: int, first: int, number: int) -> None:
        """A multicast or an urgent request reaches the client, in training or not any more."""
        flight = self.flights.get(client)
        samples = self.federation.samples[client]
        multicast = self.transit.pop(number, None)
        same = flight is not None and flight.first == first
        share = (self.time - flight.begin) / flight.seconds if flight is not None else 0.0
        if multicast is not None:
            # the step in progress is finished before the new model is swapped in
            done = math.ceil(max(0.0, share) * flight.steps(samples)) if flight is not None else 0
            if (
                flight is None
                or not same
                or done >= (flight.job.last_step or flight.steps(samples))
            ):
                self._emit("missed", client, number)
                return
            replaced, flight.number = flight.number, number
            flight.job = replace(flight.job, params=multicast.params, first_step=done)
            self._emit("restart", client, number, replaces=replaced, step=done)
        elif flight is not None and same:
            total, epoch = flight.steps(samples), flight.job.task.batches(samples)
            last = (math.floor(max(0.0, share) * total / epoch) + 1) * epoch
            if last < total:
                flight.job = replace(flight.job, last_step=last)
                self._expect(flight, flight.begin + flight.seconds * last / total + flight.upload)

    # -- looking at it -------------------------------------------------------------------------

    def handed(self) -> list[Tensor]:
        """The model that each client would be handed now."""
        return [self.strategy.model_for(client) for client in range(self.federation.clients)]

    def _record(self) -> None:
        with self._timed("evaluation"):
            models = self.handed()
            if all(model is models[0] for model in models):  # one model for all: load it once
                [scores] = self.backend.evaluate([(models[0], range(len(models)))])
            else:
                one_each = [(model, [client]) for client, model in enumerate(models)]
                scores = [score for [score] in self.backend.evaluate(one_each)]
            row = {
                "time": self.time,
                "round": self.server.round,
                "version": self.server.version,
                **over_clients(scores),
                "accuracy_adapted": None,
                **self.messages,
            }
            adapt = self.adapt_always and self.adapt_epochs and self.server.round
            self.history.append(row)
            self._emit("evaluate", None, accuracy=row["accuracy"], loss=row["loss"])
        if adapt:
            row["accuracy_adapted"] = self.adapted()

    def adapted(self) -> float:
        """Mean accuracy after every client has adapted a copy of its model by plain training."""
        with self._timed("evaluation"):
            task = replace(
                self.server.context.task, objective=Plain(), epochs=self.adapt_epochs, steps=None
            )
            jobs = [
                Job(client, model, task, ("adapt", client, "round", self.server.round))
                for client, model in enumerate(self.handed())
            ]
            scores: list[Score] = []
            for job in jobs:  # one at a time: n adapted models need not be alive at once
                [model] = self.backend.train([job])
                [[score]] = self.backend.evaluate([(model, [job.client])])
                scores.append(score)
            return over_clients(scores)["accuracy"]

    # -- small things --------------------------------------------------------------------------

    def _transfer(self, client: int) -> float:
        return self.server.context.initial.nbytes / self.bandwidths[client]

    def _count(self, kind: str) -> None:
        if self.strategy.communicates:
            self.messages[kind] += 1

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
        event |= {"round": self.server.round, "version": self.server.version, **details}
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
