"""The simulator: an engine that drives a `Server` on a virtual clock.

Theory of operation
-------------------
1. There is one queue of events, ordered by (time, priority, counter). The counter is unique, so
   that equal times never compare anything else and the order is total. Four things can happen: a
   client comes or goes (CHANGE), an upload arrives (ARRIVE), a multicast (DELIVER) or an urgent
   request (STOP) reaches a client in training. At equal times they happen in this order.
2. Durations are virtual: work times device factor times jitter, plus bytes over bandwidth, from
   random streams named by client and dispatch. The wall clock is read for statistics only.
3. Training is lazy. A client's result depends only on the model sent, its data and its own random
   stream, so nothing depends on when it is computed. A client in flight is just a `Flight`: a
   multicast replaces the model in it, an urgent request shortens it, and a checkpoint saves it as
   it stands. The backend is told of it, and may train it ahead of its arrival, on whatever workers
   it has; if the flight changes, the backend is told to forget what it did.
4. A multicast that reaches a client after k of its steps makes it train the steps from k on, from
   the new model: the schedule of batches stays the same. If no step is left, it is missed, and the
   upload answers the older dispatch.
5. Evaluation and adaptation happen outside the clock and leave no trace in the run's state. They
   come at fixed intervals of updates; of a synchronous method, when the cohort that reaches that
   number is complete, so that a model is not dated later than it was there. Metrics are over the
   clients that are or have been there: a newcomer counts from when it joins.
6. Every event (`core/events.py`) goes to the extensions (invariant checker, clusters), to the
   observers (event log, progress bar) and into a running fingerprint: two runs with equal
   fingerprints did the same, bit for bit.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Unpack

import torch
from torch import Tensor, nn

from polytempo.core import events
from polytempo.core.client_steps import ClientStep
from polytempo.core.defences import Defence
from polytempo.core.errors import Diverged, PolytempoError, Refused
from polytempo.core.messages import (
    Action,
    Dispatch,
    Stop,
    Update,
    dispatch_state,
    read_dispatch,
)
from polytempo.core.privacy import Gaussian
from polytempo.core.rng import rng
from polytempo.core.schedule import Schedule
from polytempo.core.server import Server
from polytempo.core.strategy import Refill, State, Strategy
from polytempo.data import Federation
from polytempo.simulation.checks import Checker
from polytempo.simulation.clusters import Clusters
from polytempo.simulation.diagnosis import Diagnosis
from polytempo.simulation.dropout import Change, late
from polytempo.simulation.engine import Engine, World
from polytempo.simulation.flight import Flight, flight_state, read_flight
from polytempo.simulation.guards import Account, Defended
from polytempo.simulation.newcomers import Newcomers
from polytempo.simulation.rehearsal import RehearsedServer
from polytempo.training import Job

CHANGE, ARRIVE, DELIVER, STOP = 0, 1, 2, 3  # priorities at equal times
WATCHED = 100  # dispatches at the beginning whose models nobody may change


def concurrency_of(
    strategy: Strategy, clients: int, concurrency: int | None, refill: Refill | None
) -> int:
    """Clients that train at once: as many as were asked for, else a tenth; all, if in this strategy
    everybody trains all the time."""
    if strategy.all_train and refill is None:
        return clients
    return min(clients, max(4, math.ceil(clients / 10))) if concurrency is None else concurrency


class Simulator(Engine):
    """A run with a server."""

    def __init__(
        self,
        federation: Federation,
        module: nn.Module,
        strategy: Strategy,
        *,
        concurrency: int | None = None,
        refill: Refill | None = None,
        schedule: Schedule | None = None,
        steps: Sequence[ClientStep] = (),
        defence: Defence | None = None,
        check: bool = False,
        diagnose: int | None = None,
        **world: Unpack[World],
    ) -> None:
        super().__init__(federation, module, strategy, **world)
        concurrency = concurrency_of(strategy, federation.clients, concurrency, refill)
        if not strategy.communicates:  # nothing leaves a client, and nothing comes to a server
            steps, defence = (), None
        kind = RehearsedServer if check else Server
        self.server = kind(
            strategy,
            self.context,
            concurrency=concurrency,
            refill=refill,
            schedule=schedule,
            steps=steps,
            defence=defence,
        )
        self.server.wait_for = self.dropout.quorum()
        self.concurrency, self.refill = concurrency, self.server.refill
        self.flights: dict[int, Flight] = {}
        self.transit: dict[int, Dispatch] = {}  # multicasts on their way
        self.late = late(self.changes)
        self.changes_by = {kind: _by_count(self.changes, kind) for kind in ("updates", "version")}
        if check:
            self.extend(Checker(concurrency))
        if diagnose:
            diagnosis = Diagnosis(self, diagnose)
            self.server.strategy = diagnosis.stand_in()
            self.extend(diagnosis)
        self.extend(Clusters(self))
        for step in steps:
            if isinstance(step, Gaussian):
                self.extend(Account(step, federation.clients))
        if defence is not None:
            self.extend(Defended(defence))
        if self.late:
            self.extend(Newcomers(self))

    @property
    def updates(self) -> int:
        return self.server.updates

    @property
    def version(self) -> int:
        return self.server.version

    # -- running -------------------------------------------------------------------------------

    def _start(self) -> None:
        for index, change in enumerate(self.changes):
            if change.timed and change.time > 0:  # for others, see `_counted`
                self._push(change.time, CHANGE, change.client, index, 0)
        everybody = range(self.federation.clients)
        actions = self.server.join(client for client in everybody if client not in self.late)
        self._record()
        self._act(actions)

    def _go_on(self) -> None:
        for flight in self.flights.values():  # those of a checkpoint
            self._announce(flight)

    def _step(self) -> None:
        time, priority, counter, client, index, number = self._pop()
        flight = self.flights.get(client)
        if priority == ARRIVE and (flight is None or flight.ticket != counter):
            return  # the client has left, or an urgent request has moved its arrival
        self.time = time
        if priority == CHANGE:
            self._change(index)
        elif priority == ARRIVE:
            self._arrive(client)
        elif priority == DELIVER:
            self._deliver(client, index, number)
        elif flight is not None and flight.first == index:
            self._stop(flight)

    def _arrive(self, client: int) -> None:
        flight = self.flights[client]
        if flight.lost:
            self._drop(client, self.server.lost)
            return
        if flight.seen is not None and not _same(flight.seen, _sum(flight.job.params)):
            raise PolytempoError(
                f"{type(self.strategy).__qualname__} changed a model in place after sending it to "
                f"client {client}, which trains it; make a new tensor: write model + change, not "
                "model.add_(change)"
            )
        with self._timed("training"):
            vector, extras, memory = self.backend.carry_out(flight.job)
        samples = self.federation.samples[client]
        update = Update(client, flight.number, vector, samples, extras)
        stale = self.server.staleness(client, flight.number)
        with self._timed("server"):
            version = self.server.version
            try:
                actions = self.server.receive(update)
            except Refused as refusal:
                self._expect(flight, self.time)  # as if it had not happened
                why = str(refusal)
                if not bool(torch.isfinite(flight.job.latest).all()):
                    why = f"{self.strategy} served client {client} a model that is NaN or infinite"
                raise Diverged(
                    f"update {self.server.updates}, simulated time {self.time:g}: {why}"
                ) from refusal
        del self.flights[client]
        self.memory.set(client, memory)
        if self.server.lets_stale:
            self.staleness[stale.updates] += 1
        self._count("upload", update.nbytes)
        self._emit(events.Upload, client, flight.number, stale.updates, stale.versions)
        self._act(actions)
        self._counted(self.server.updates - 1, version)

    def _drop(self, client: int, tell: Callable[[int], list[Action]]) -> None:
        version = self.server.version
        flight = self.flights.pop(client)
        self.backend.forget(flight.job)
        actions = tell(client)
        self._emit(events.Drop, client, flight.number)
        self._act(actions)
        self._counted(self.server.updates, version)

    def _counted(self, updates: int, version: int) -> None:
        """The counters were these, and may have gone up. Clients that come or go with an update, or
        a version of the model, do so now; and evaluations are due with updates."""
        server = self.server
        if self.changes:
            passed = {
                "updates": range(updates + 1, server.updates + 1),
                "version": range(version + 1, server.version + 1),
            }
            due = [
                index
                for kind, counts in passed.items()
                for count in counts
                for index in self.changes_by[kind].get(count, ())
            ]
            for index in sorted(due):
                self._change(index)
        evaluate = (
            server.updates // self.eval_every > self.history[-1]["updates"] // self.eval_every
        )
        if evaluate and (server.refill != "cohort" or server.version > version):
            self._record()

    def _change(self, index: int) -> None:
        change = self.changes[index]
        client = change.client
        if change.available:
            new = client not in self.server.known
            actions = self.server.join([client])
            self._emit(events.Join if new and self.server.updates else events.Return, client)
            self._act(actions)
            return
        self._emit(events.Leave, client)
        if not change.for_good:
            self.server.away(client)
        elif client in self.flights:
            self._drop(client, self.server.leave)
        else:
            self.server.leave(client)

    # -- what the server asks for --------------------------------------------------------------

    def _act(self, actions: Sequence[Action]) -> None:
        for action in actions:
            client = action.client
            if isinstance(action, Stop):
                self._emit(events.Urgent, client, action.number)
                self._post(STOP, action, 0.0)
            elif self._spent():
                return  # the run ends here
            elif action.preempt:
                self._count("multicast", action.nbytes)
                self._emit(events.Multicast, client, action.number)
                if self._post(DELIVER, action, action.nbytes / self.bandwidths[client]):
                    self.transit[action.number] = action
                else:
                    self._emit(events.Missed, client, action.number)
            else:
                self._count("dispatch", action.nbytes)
                self._emit(events.Dispatch, client, action.number)
                self._launch(action)

    def _post(self, priority: int, message: Action, delay: float) -> bool:
        """Send a message to a client in training; False if the client will never be there."""
        client = message.client
        arrival = self.timeline.next_available(client, self.time + delay)
        if math.isinf(arrival):
            return False
        self._push(arrival, priority, client, self.flights[client].first, message.number)
        return True

    def _launch(self, dispatch: Dispatch) -> None:
        client, number = dispatch.client, dispatch.number
        luck = rng(self.seed, "device", client, "dispatch", number)
        work = dispatch.task.work(self.federation.samples[client])
        seconds = self.devices.seconds(self.factors[client], work, luck)
        now = self.timeline.at(client, self.time)
        if now is not None and now.latency is not None:
            seconds = now.latency
        fate = self._fate(client, "dispatch", number)
        if isinstance(fate, float):
            seconds *= fate
        stream = ("client", client, "dispatch", number)
        vectors, memory, task = dispatch.vectors, self.memory.get(client), dispatch.task
        if self.attack is not None and client in self.attackers and self.strategy.communicates:
            task = self.attack.on(task)
        job = Job(client, dispatch.params, task, stream, vectors=vectors, memory=memory)
        download = dispatch.nbytes / self.bandwidths[client]
        upload = task.upload_bytes(dispatch.params) / self.bandwidths[client]
        flight = Flight(number, number, job, self.time + download, seconds, upload)
        flight.lost = fate == "lost"
        flight.seen = _sum(dispatch.params) if number < WATCHED else None
        self.flights[client] = flight
        self._expect(flight, flight.begin + seconds + upload)
        self._announce(flight)

    def _announce(self, flight: Flight) -> None:
        """What the client trains is certain, unless a message reaches it on the way."""
        if not flight.lost:
            self.backend.expect(flight.job, flight.begin + flight.seconds)

    def _change_job(self, flight: Flight, job: Job) -> None:
        self.backend.forget(flight.job)
        flight.job = job
        self._announce(flight)

    def _expect(self, flight: Flight, arrival: float) -> None:
        """Queue the arrival of the flight's upload, once the client is there to send it."""
        possible = self.timeline.next_available(flight.job.client, arrival)
        if math.isinf(possible):
            flight.lost, possible = True, arrival
        flight.ticket = self._push(possible, ARRIVE, flight.job.client, flight.first, flight.number)

    def _deliver(self, client: int, first: int, number: int) -> None:
        """A multicast reaches the client, which may no longer be in training."""
        multicast = self.transit.pop(number)
        flight = self.flights.get(client)
        if flight is not None and flight.first == first:
            total = flight.job.task.total_steps(self.federation.samples[client])
            # the step in progress is finished before the new model is swapped in
            done = math.ceil(flight.progress(self.time) * total)
            if done < (flight.job.last_step or total):
                replaced, flight.number, flight.seen = flight.number, number, None
                self._change_job(flight, flight.job.swapped(done, multicast))
                self._emit(events.Restart, client, number, replaced, done)
                return
        self._emit(events.Missed, client, number)

    def _stop(self, flight: Flight) -> None:
        """An urgent request reaches the client: the epoch in progress is its last."""
        task, samples = flight.job.task, self.federation.samples[flight.job.client]
        total = task.total_steps(samples)
        done = max(flight.progress(self.time) * total, flight.job.since)
        last = task.end_of_epoch(done, samples)
        if last < (flight.job.last_step or total):
            self._expect(flight, flight.begin + flight.seconds * last / total + flight.upload)
            self._change_job(flight, replace(flight.job, last_step=last))

    # -- looking at it -------------------------------------------------------------------------

    def _there(self) -> Sequence[int]:
        """The honest clients with test samples that are or have been there; if nobody has been
        yet, all of them. (Others have no figures, and there may be a million.)"""
        tested, known = self.federation.tested, self.server.known
        if self.attackers:
            tested = [client for client in tested if client not in self.attackers]
        return [client for client in tested if client in known] if known else tested

    # -- checkpoints ---------------------------------------------------------------------------

    def state_dict(self) -> State:
        return super().state_dict() | {
            "server": self.server.state_dict(),
            "flights": [flight_state(flight) for flight in self.flights.values()],
            "transit": [dispatch_state(dispatch) for dispatch in self.transit.values()],
        }

    def load_state_dict(self, state: State) -> None:
        super().load_state_dict(state)
        self.server.load_state_dict(state["server"])
        flights = [read_flight(found) for found in state["flights"]]
        self.flights = {flight.job.client: flight for flight in flights}
        self.transit = {found["number"]: read_dispatch(found) for found in state["transit"]}


def _sum(model: Tensor) -> float:
    return float(model.sum(dtype=torch.float64))


def _same(a: float, b: float) -> bool:
    return a == b or math.isnan(b)  # a model that has diverged is noticed elsewhere


def _by_count(changes: Sequence[Change], kind: str) -> dict[int, list[int]]:
    """The indices of those changes that come with an update (or a version), by its number."""
    found: defaultdict[int, list[int]] = defaultdict(list)
    for index, change in enumerate(changes):
        count = getattr(change, kind)
        if count is not None:
            found[count].append(index)
    return dict(found)
