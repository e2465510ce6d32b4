"""The server: what every algorithm shares.

Theory of operation
-------------------
1. The server is a state machine without I/O. An engine (the simulator or the network) hands it
   what happened (`join`, `leave`, `receive`, `lost`) and carries out the actions it returns.
2. Every model that leaves the server is a numbered dispatch. The server remembers of each client in
   training which dispatches are *open*: the one that started it and the multicasts since. An update
   answers one of them, and closes them all. (A multicast may cross the upload on the wire: then the
   update answers the older dispatch, and its staleness is counted from there.)
3. Two counters: `round` goes up by one with each update folded, `version` each time that what is
   served has changed. Staleness is the difference to what they were at the dispatch.
4. At most `slots` clients are in training. Who is started when a slot falls free is the *refill*:
   "idle"    a uniformly random client that is not in training;
   "same"    the sender, at once;
   "cohort"  nobody until all are in, then a random cohort as large as `slots`. A synchronous method
             is this policy plus `Strategy.close_cohort`: there is no second code path.
   A *newcomer*, a client that joins for the first time when updates have been folded already, does
   not wait for a slot: it is sent a model at once. As long as there are more than `slots` in
   training, nobody else is started. (With "cohort" it may be chosen from the next cohort on.)
5. An update is checked in full before anything changes. What is refused leaves no trace.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

import torch

from polytempo.core.errors import PolytempoError, Refused
from polytempo.core.messages import Action, Dispatch, InFlight, Staleness, Stop, Update
from polytempo.core.rng import rng
from polytempo.core.strategy import Context, Refill, State, Strategy

MANY = 1_000  # clients: among more, it would take long to list those that are idle


class Open(NamedTuple):
    """A dispatch that is not answered yet: its number, and the counters when it was sent."""

    number: int
    round: int
    version: int


class Server:
    """Versions, staleness, slots and refill around one strategy."""

    def __init__(
        self,
        strategy: Strategy,
        context: Context,
        *,
        slots: int | None = None,
        refill: Refill | None = None,
    ) -> None:
        self.strategy = strategy
        self.context = context
        self.slots = context.clients if slots is None else slots
        self.refill: Refill = refill or strategy.refill
        if not 1 <= self.slots <= context.clients:
            raise PolytempoError(
                f"slots must be between 1 and the number of clients, {context.clients}; "
                f"got {self.slots}"
            )
        self.round = 0
        self.version = 0
        self.members: set[int] = set()
        self.known: set[int] = set()  # who is, or has been, a member
        self.open: dict[int, list[Open]] = {}
        self.owners: list[int] = []  # client of each dispatch ever sent
        strategy.setup(context)

    # -- what happens to clients ---------------------------------------------------------------

    def join(self, clients: Iterable[int]) -> list[Action]:
        """These clients are here (for the first time, or again)."""
        joining = set(clients)
        for client in joining:
            if not 0 <= client < self.context.clients:
                raise PolytempoError(
                    f"client {client} cannot join: ids go from 0 to {self.context.clients - 1}"
                )
        new = sorted(joining - self.known) if self.round and self.refill != "cohort" else []
        self.members |= joining
        self.known |= joining
        return [*(self._send(client, self.strategy.model_for) for client in new), *self._fill()]

    def leave(self, client: int) -> list[Action]:
        """This client is gone; if it was training, its update is lost."""
        self.members.discard(client)
        self.strategy.left(client)
        return self._give_up(client) if client in self.open else []

    def away(self, client: int) -> None:
        """This client is not started any more until it joins again; what it trains now may come."""
        self.members.discard(client)

    def lost(self, client: int) -> list[Action]:
        """The update of a client in training will never come."""
        if client not in self.open:
            raise PolytempoError(f"client {client} is not in training: nothing of it can be lost")
        self.strategy.lost(client)
        return self._give_up(client)

    def receive(self, update: Update) -> list[Action]:
        """Fold an update in, or raise `Refused` and change nothing."""
        self._check(update)
        changed = self.strategy.fold(update, self.staleness(update.client, update.number))
        del self.open[update.client]
        self.round += 1
        self.version += changed
        return self._proceed(update.client, self.strategy.reply_to)

    # -- how it answers ------------------------------------------------------------------------

    def staleness(self, client: int, number: int) -> Staleness:
        """How stale the client's open dispatch of that number is now."""
        sent = next(sent for sent in self.open[client] if sent.number == number)
        return Staleness(self.round - sent.round, self.version - sent.version)

    def in_flight(self) -> list[InFlight]:
        """The clients in training, in the order of their ids, by what they were last sent."""
        return [
            InFlight(client, self.staleness(client, self.open[client][-1].number))
            for client in sorted(self.open)
        ]

    def _give_up(self, client: int) -> list[Action]:
        del self.open[client]
        return self._proceed(client, self.strategy.model_for)

    def _proceed(self, answer: int, model: Callable[[int], torch.Tensor]) -> list[Action]:
        if self.refill == "cohort" and not self.open:
            self.version += self.strategy.close_cohort()
        in_flight = self.in_flight()
        refreshed, stopped = self.strategy.refresh(in_flight), self.strategy.urgent(in_flight)
        for client in (*refreshed, *stopped):
            if client not in self.open:
                raise ValueError(f"{self.strategy} names client {client}, which is not in training")
        actions: list[Action] = [
            self._send(client, self.strategy.model_for, preempt=True) for client in refreshed
        ]
        actions += [Stop(client, self.open[client][-1].number) for client in stopped]
        room = len(self.open) < self.slots  # not so if there are newcomers
        if self.refill == "same" and answer in self.members and room:
            actions.append(self._send(answer, model))
        return actions + self._fill()

    def _fill(self) -> list[Action]:
        if self.refill == "cohort" and self.open:
            return []
        free = self.slots - len(self.open)
        if free <= 0:
            return []
        stream = rng(self.context.seed, "server", "refill", len(self.owners))
        if free == 1 and self.context.clients > MANY:  # a few draws find one that is idle
            for client in stream.integers(self.context.clients, size=32).tolist():
                if client in self.members and client not in self.open:
                    return [self._send(client, self.strategy.model_for)]
        idle = sorted(self.members - self.open.keys())
        chosen = stream.choice(idle, size=min(free, len(idle)), replace=False) if idle else ()
        return [self._send(int(client), self.strategy.model_for) for client in chosen]

    def _send(
        self, client: int, model: Callable[[int], torch.Tensor], preempt: bool = False
    ) -> Dispatch:
        params, task = model(client), self.strategy.task(client)
        anchor = self.strategy.anchor_for(client)
        number = len(self.owners)
        self.owners.append(client)
        self.open.setdefault(client, []).append(Open(number, self.round, self.version))
        return Dispatch(client, number, params, task, preempt, anchor)

    def _check(self, update: Update) -> None:
        client, number = update.client, update.number
        if client not in self.members and client not in self.open:
            raise Refused(f"client {client} never joined (or has left): it must join first")
        if not 0 <= number < len(self.owners):
            raise Refused(f"client {client} answers dispatch {number}, which was never sent")
        if self.owners[number] != client:
            raise Refused(
                f"client {client} answers dispatch {number}, which went to client "
                f"{self.owners[number]}"
            )
        if all(sent.number != number for sent in self.open.get(client, [])):
            raise Refused(
                f"client {client} answers dispatch {number}, which is closed: "
                "this update came twice, or too late"
            )
        vector = update.vector
        wanted = self.context.initial
        if vector.shape != wanted.shape:
            raise Refused(
                f"client {client} sent {list(vector.shape)} numbers, expected "
                f"{list(wanted.shape)}: it trains another model"
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
        wanted_extras = self.strategy.task(client).extras
        if set(update.extras) != set(wanted_extras):
            raise Refused(
                f"client {client} sent the extras {sorted(update.extras)}, expected "
                f"{sorted(wanted_extras)}"
            )
        for name, rows in wanted_extras.items():
            extra = update.extras[name]
            if extra.ndim != 2 or len(extra) != rows or not bool(torch.isfinite(extra).all()):
                raise Refused(
                    f"client {client} sent {name!r} of shape {list(extra.shape)}, expected "
                    f"{rows} rows of finite numbers"
                )
        if update.samples < 1:
            raise Refused(f"client {client} claims {update.samples} samples; expected 1 or more")

    # -- checkpoints ---------------------------------------------------------------------------

    def state_dict(self) -> State:
        """Everything that the server and its strategy must remember, as it is: save it before the
        server goes on."""
        return {
            "round": self.round,
            "version": self.version,
            "members": sorted(self.members),
            "known": sorted(self.known),
            "open": [[client, sent] for client, sent in self.open.items()],
            "owners": list(self.owners),
            "strategy": self.strategy.state_dict(),
        }

    def load_state_dict(self, state: State) -> None:
        """Continue from `state`."""
        self.round, self.version = state["round"], state["version"]
        self.members, self.known = set(state["members"]), set(state["known"])
        self.open = {client: [Open(*s) for s in sent] for client, sent in state["open"]}
        self.owners = list(state["owners"])
        self.strategy.load_state_dict(state["strategy"])
