"""The server: what every algorithm shares.

Theory of operation
-------------------
1. The server is a state machine without I/O. An engine (the simulator or the network) hands it
   what happened (`join`, `leave`, `receive`, `lost`) and carries out the actions it returns.
2. Every model that leaves the server is a numbered dispatch. The server remembers of each client in
   training which dispatches are *open*: the one that started it and the multicasts since. An update
   answers one of them, and closes them all. (A multicast may cross the upload on the wire: then the
   update answers the older dispatch, and its staleness is counted from there.)
3. Two counters: `updates` goes up by one with each update folded, `version` each time that what is
   served has changed. Staleness is how far they have moved since the dispatch. The learning
   rate that a client is sent follows the run's schedule, by `updates`.
4. At most `concurrency` clients are in training, each in a *slot*. The *refill* says who starts
   when a slot becomes free:
   "idle"    a uniformly random client that is not in training;
   "same"    the sender, at once;
   "cohort"  nobody until all are in, then a random cohort of `concurrency` clients. A synchronous
             method is this policy plus `Strategy.close_cohort`: there is no second code path.
   A *newcomer*, a client that joins for the first time once updates have been folded, does
   not wait for a slot: it is sent a model at once. As long as there are more than `concurrency` in
   training, nobody else is started. (With "cohort" it may be chosen from the next cohort on.)
   Nobody at all is started before `wait_for` members are there; from then on it does not matter.
5. An update is checked in full before anything changes, against what its own dispatch asked for.
   What is refused leaves no trace. Then it is made what the strategy asked for: unpacked, if it
   was compressed, and cut down by the *defence* of the run, if there is one. So no strategy knows
   of either, nor of the client steps (privacy, compression) that are added to what it asks for.
6. A message costs the same however many clients exist or are in training. `open` is kept in
   the order of the last dispatch, so that it is ordered by staleness without being sorted; and one
   of the idle clients is drawn without listing them (`core/clients.py`).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import takewhile
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from polytempo.core.client_steps import ClientStep
from polytempo.core.clients import ClientSet
from polytempo.core.compression import Compression
from polytempo.core.defences import Defence
from polytempo.core.errors import PolytempoError, Refused
from polytempo.core.messages import (
    Action,
    Dispatch,
    InFlight,
    InFlights,
    Staleness,
    Stop,
    Update,
    dispatch_state,
    read_dispatch,
)
from polytempo.core.privacy import check_private
from polytempo.core.rng import rng
from polytempo.core.schedule import Constant, Schedule
from polytempo.core.strategy import (
    STRATEGIES,
    Context,
    IntArray,
    Refill,
    State,
    Strategy,
    as_model,
    prepared,
)
from polytempo.core.task import TASKS, Task

MOST_SAMPLES = 10**9  # of a client: sums that are weighted by them are finite
MANY = 1_000  # clients: among more, trying a few is quicker than finding a rank


class Open(NamedTuple):
    """A dispatch that is not answered yet: its number, the counters when it was sent, and what was
    asked for."""

    number: int
    updates: int
    version: int
    task: Task
    sent: Dispatch | None = None  # itself, if the answer must be compared with it

    def state(self) -> list[Any]:
        sent = None if self.sent is None else dispatch_state(self.sent)
        return [*self[:3], TASKS.describe(self.task), sent]

    def trained_from(self, extras: Mapping[str, Tensor]) -> Tensor:
        """The model that the client has trained, by what it uploaded along with it."""
        assert self.sent is not None, "it was kept for this"
        found = (step.trained_from(self.sent, extras) for step in self.task.client_steps)
        return next((model for model in found if model is not None), self.sent.params)


class Server:
    """Versions, staleness, concurrency and refill around one strategy."""

    def __init__(
        self,
        strategy: Strategy,
        context: Context,
        *,
        concurrency: int | None = None,
        refill: Refill | None = None,
        schedule: Schedule | None = None,
        steps: Sequence[ClientStep] = (),
        defence: Defence | None = None,
    ) -> None:
        """`steps`: what every client does in addition to what the strategy asks for, last of all.
        `defence`: what stands between updates and the strategy."""
        self.strategy = strategy
        self.context = context
        self.concurrency = context.clients if concurrency is None else concurrency
        self.refill: Refill = refill or strategy.refill
        self.schedule = schedule or Constant()
        self.steps, self.defence = tuple(steps), defence
        if not 1 <= self.concurrency <= context.clients:
            raise PolytempoError(
                f"concurrency must be between 1 and the number of clients, {context.clients}; "
                f"got {self.concurrency}"
            )
        self.updates = 0
        self.version = 0
        self.members = ClientSet(context.clients)
        self.known = ClientSet(context.clients)  # who is, or has been, a member
        self.idle = ClientSet(context.clients)  # members that are not in training
        # By client; who was sent something last comes last, in earlier updates by id. (A plain dict
        # is slow at its beginning once many entries there are gone.)
        self.open: OrderedDict[int, list[Open]] = OrderedDict()
        self.dispatches = 0  # sent so far
        self.wait_for = 1  # members without which nobody is started for the first time
        strategy.setup(context)
        prepared(strategy)
        if defence is not None:
            defence.setup()
        task, name = self._task(0), STRATEGIES.describe(strategy)["name"]
        if task.upload in ("gradient", "path"):
            task.plain_sgd(name)
        check_private(task, name)

    # -- what happens to clients ---------------------------------------------------------------

    def join(self, clients: Iterable[int]) -> list[Action]:
        """These clients are here (for the first time, or again)."""
        joining = np.unique(np.fromiter(clients, np.int64))
        for wrong in (*joining[:1].tolist(), *joining[-1:].tolist()):
            if not 0 <= wrong < self.context.clients:
                raise PolytempoError(
                    f"client {wrong} cannot join: ids go from 0 to {self.context.clients - 1}"
                )
        new: list[int] = []
        if self.updates and self.refill != "cohort":
            new = [client for client in joining.tolist() if client not in self.known]
        self.members.add_all(joining)
        self.known.add_all(joining)
        self.idle.add_all(self._not_in_training(joining))
        return [*(self._send(client, self.strategy.model_for) for client in new), *self._fill()]

    def _not_in_training(self, clients: IntArray) -> IntArray:
        if not self.open:  # there may be a million of them
            return clients
        return np.array([c for c in clients.tolist() if c not in self.open], dtype=np.int64)

    def leave(self, client: int) -> list[Action]:
        """This client is gone; if it was training, its update is lost."""
        self.away(client)
        self.strategy.left(client)
        return self._close(client, self.strategy.model_for) if client in self.open else []

    def away(self, client: int) -> None:
        """Do not start this client until it joins again; what it trains now may still come."""
        self.members.discard(client)
        self.idle.discard(client)

    def lost(self, client: int) -> list[Action]:
        """The update of a client in training will never come."""
        if client not in self.open:
            raise PolytempoError(f"client {client} is not in training: it has nothing to lose")
        self.strategy.lost(client)
        return self._close(client, self.strategy.model_for)

    def receive(self, update: Update) -> list[Action]:
        """Fold an update in, or raise `Refused` and change nothing."""
        sent, update = self._read(update)
        if self.defence is None:
            self._fold(update, sent)
        else:
            base = None if sent.sent is None else sent.trained_from(update.extras)
            moved = update.vector if base is None else update.vector - base
            left = self.defence.limit(moved)
            if left is not moved:
                update = replace(update, vector=left if base is None else base + left)
            self._fold(update, sent)
            self.defence.folded(moved, changed=left is not moved)
        self._sort_latest()
        self.updates += 1
        return self._close(update.client, self.strategy.reply_to)

    # -- how it answers ------------------------------------------------------------------------

    def staleness(self, client: int, number: int) -> Staleness:
        """How stale the client's open dispatch of that number is now."""
        return self._age(next(sent for sent in self.open[client] if sent.number == number))

    def _age(self, sent: Open) -> Staleness:
        return Staleness(self.updates - sent.updates, self.version - sent.version)

    @property
    def lets_stale(self) -> bool:
        """Whether what a client trains may be overtaken: the server's model does not change before
        a cohort is complete, and clients that share nothing have nothing to miss."""
        return self.refill != "cohort" and self.strategy.communicates

    def in_flight(self) -> InFlights:
        """The clients in training, most stale first, by what they were last sent."""
        return _InFlights(self)

    def _fold(self, update: Update, sent: Open) -> None:
        self.version += self._answered("fold", self.strategy.fold(update, self._age(sent)))

    def _answered(self, hook: str, changed: object) -> bool:
        if not isinstance(changed, bool):
            raise PolytempoError(
                f"{type(self.strategy).__qualname__}.{hook} returned {changed!r}; return True if "
                "what is served has changed, else False"
            )
        return changed

    def _sort_latest(self) -> None:
        """An update is folded: put the clients that were sent something since the one before, the
        last of `open`, in the order of their ids. So all of `open` is in order, and each dispatch
        was sorted once."""
        latest = takewhile(lambda c: self.open[c][-1].updates == self.updates, reversed(self.open))
        found = sorted(latest)
        if len(found) > 1:
            for client in found:
                self.open.move_to_end(client)

    def _close(self, client: int, model: Callable[[int], torch.Tensor]) -> list[Action]:
        """The client's training is over; `model` says what it is sent if it is answered at once."""
        del self.open[client]
        if client in self.members:
            self.idle.add(client)
        if self.refill == "cohort" and not self.open:
            self.version += self._answered("close_cohort", self.strategy.close_cohort())
        in_flight = self.in_flight()
        self.strategy.training(in_flight)
        refreshed, stopped = self.strategy.refresh(in_flight), self.strategy.urgent(in_flight)
        for named in (*refreshed, *stopped):
            if named not in self.open:
                raise ValueError(f"{self.strategy} names client {named}, which is not in training")
        actions: list[Action] = [
            self._send(named, self.strategy.model_for, preempt=True) for named in refreshed
        ]
        actions += [Stop(named, self.open[named][-1].number) for named in stopped]
        room = len(self.open) < self.concurrency  # not so if there are newcomers
        if self.refill == "same" and client in self.members and room:
            actions.append(self._send(client, model))
        return actions + self._fill()

    def _fill(self) -> list[Action]:
        if self.refill == "cohort" and self.open:
            return []
        if not self.dispatches and len(self.members) < self.wait_for:
            return []
        free = self.concurrency - len(self.open)
        if free <= 0 or not self.idle:
            return []
        stream = rng(self.context.seed, "server", "refill", self.dispatches)
        if free == 1 and self.context.clients > MANY:  # a few draws find one that is idle
            for client in stream.integers(self.context.clients, size=32).tolist():
                if client in self.idle:
                    return [self._send(client, self.strategy.model_for)]
        idle = len(self.idle)
        if min(free, idle) == 1:  # what `choice` draws, in a fifth of the time
            chosen = self.idle.at([int(stream.integers(idle))])
        else:
            chosen = self.idle.at(stream.choice(idle, size=min(free, idle), replace=False))
        return [self._send(client, self.strategy.model_for) for client in chosen]

    def _send(
        self, client: int, model: Callable[[int], torch.Tensor], preempt: bool = False
    ) -> Dispatch:
        params = as_model(self.strategy, model.__name__, model(client), self.context.initial)
        task = self._task(client)
        factor = self.schedule.factor(self.updates)
        if factor != 1:
            task = replace(task, lr=task.lr * factor)
        vectors = self.strategy.vectors_for(client)
        dispatch = Dispatch(client, self.dispatches, params, task, preempt, vectors)
        self.dispatches += 1
        self.idle.discard(client)
        compared = self.defence is not None or task.compression is not None
        kept = dispatch if compared and task.upload == "model" else None
        sent = Open(dispatch.number, self.updates, self.version, task, kept)
        self.open.setdefault(client, []).append(sent)
        self.open.move_to_end(client)
        self.strategy.dispatched(dispatch)
        return dispatch

    def _task(self, client: int) -> Task:
        task = self.strategy.task(client)
        return replace(task, client_steps=(*task.client_steps, *self.steps)) if self.steps else task

    @property
    def compressed(self) -> bool:
        """Whether clients compress what they upload."""
        return any(isinstance(step, Compression) for step in self.steps)

    def check(self, update: Update) -> None:
        """`Refused` if the update answers no open dispatch, or is bad."""
        self._read(update)

    def _read(self, update: Update) -> tuple[Open, Update]:
        """The dispatch that the update answers, and the update as the strategy asked for it."""
        client, number = update.client, update.number
        if client not in self.members and client not in self.open:
            raise Refused(f"client {client} never joined (or has left): it must join first")
        if not 0 <= number < self.dispatches:
            raise Refused(f"client {client} answers dispatch {number}, which was never sent")
        answered = [sent for sent in self.open.get(client, ()) if sent.number == number]
        if not answered:
            raise Refused(
                f"client {client} answers dispatch {number}, which is not open: this update came "
                "twice or too late, or answers another client's dispatch"
            )
        sent = answered[0]
        wanted_extras = sent.task.extras
        if set(update.extras) != set(wanted_extras):
            raise Refused(
                f"client {client} sent the extras {sorted(update.extras)}, expected "
                f"{sorted(wanted_extras)}"
            )
        if not 1 <= update.samples <= MOST_SAMPLES:
            raise Refused(
                f"client {client} claims {update.samples} samples; expected 1 or more, and at most "
                f"{MOST_SAMPLES:,}"
            )
        extras, vector = dict(update.extras), update.vector
        wanted = self.context.initial
        if (packing := sent.task.compression) is not None:
            _check_extras(update, packing.uploads)
            beside = {name: extras.pop(name) for name in packing.uploads}
            try:
                vector = packing.unpack(vector, beside, len(wanted), wanted.dtype)
                vector = vector if sent.sent is None else sent.trained_from(extras) + vector
            except Refused as refusal:
                raise Refused(f"client {client}: {refusal}") from refusal
        if vector.shape != wanted.shape:
            raise Refused(
                f"client {client} sent {list(vector.shape)} numbers, expected "
                f"{list(wanted.shape)}: it trains a different model"
            )
        if vector.dtype != wanted.dtype:
            raise Refused(f"client {client} sent {vector.dtype}, expected {wanted.dtype}")
        square = float(torch.dot(vector, vector))  # NaN or infinite if one of the numbers is
        # Differences of two such vectors must have a finite square too, and their squares, taken
        # together in double precision, a finite product: of these cosines are made.
        if not square <= min(torch.finfo(vector.dtype).max / 16, 1e150):
            bad = int((~torch.isfinite(vector)).sum())
            what = f"{bad} values that are NaN or infinite" if bad else "values that are too large"
            raise Refused(
                f"client {client} sent {what}: its training diverged; lower the learning rate"
            )
        _check_extras(update, wanted_extras)  # last: what has diverged is called so
        return sent, Update(client, number, vector, update.samples, extras, sent.task)

    # -- checkpoints ---------------------------------------------------------------------------

    def state_dict(self) -> State:
        """Everything that the server and its strategy must remember, as it is: save it before the
        server continues."""
        return {
            "updates": self.updates,
            "version": self.version,
            "members": list(self.members),
            "known": list(self.known),
            "open": [
                [client, [sent.state() for sent in all_sent]]
                for client, all_sent in self.open.items()
            ],
            "dispatches": self.dispatches,
            "strategy": self.strategy.state_dict(),
            "defence": None if self.defence is None else self.defence.state_dict(),
        }

    def load_state_dict(self, state: State) -> None:
        """Continue from `state`."""
        self.updates, self.version = state["updates"], state["version"]
        self.members, self.known, self.idle = (ClientSet(self.context.clients) for _ in range(3))
        members = np.array(state["members"], dtype=np.int64)
        self.members.add_all(members)
        self.known.add_all(np.array(state["known"], dtype=np.int64))
        self.open = OrderedDict(
            (client, [_read_open(*sent) for sent in all_sent]) for client, all_sent in state["open"]
        )
        self.idle.add_all(self._not_in_training(members))
        self.dispatches = state["dispatches"]
        self.strategy.load_state_dict(state["strategy"])
        if self.defence is not None:
            self.defence.load_state_dict(state["defence"])


def _check_extras(update: Update, wanted: Mapping[str, int]) -> None:
    for name, rows in wanted.items():
        extra = update.extras[name]
        if extra.ndim != 2 or len(extra) != rows or not bool(torch.isfinite(extra).all()):
            raise Refused(
                f"client {update.client} sent {name!r} of shape {list(extra.shape)}, expected "
                f"{rows} rows of finite numbers"
            )


def _read_open(
    number: int, updates: int, version: int, task: Any, sent: Mapping[str, Any] | None = None
) -> Open:
    """What `Open.state` described (before there were defences, without the last)."""
    dispatch = None if sent is None else read_dispatch(sent)
    return Open(number, updates, version, TASKS.create(task), dispatch)


class _InFlights:
    """What `Server.in_flight` returns: reads `open` as one goes through it."""

    def __init__(self, server: Server) -> None:
        self._server = server

    def __len__(self) -> int:
        return len(self._server.open)

    def __iter__(self) -> Iterator[InFlight]:
        for client, sent in self._server.open.items():
            yield InFlight(client, self._server._age(sent[-1]))
