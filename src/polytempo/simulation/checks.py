"""`--check`: the invariants of a simulation, recounted from its events alone.

The checkers share no code with the server or the peers: they see what the event log sees, and
count again.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from polytempo.core import events
from polytempo.core.strategy import State
from polytempo.simulation.extension import Extension, Key


class InvariantError(AssertionError):
    """The simulator broke one of its promises: our bug, not the user's mistake."""


class Clock(Extension):
    """What holds of every engine: time never goes back, events are numbered without gaps."""

    name = "checker"

    def __init__(self) -> None:
        self.time = 0.0
        self.number = -1

    def happened(self, event: events.Event) -> None:
        self._require(event.time >= self.time, event, f"the clock goes back from {self.time}")
        self._require(event.n == self.number + 1, event, f"follows event {self.number}")
        self.time, self.number = event.time, event.n

    def state_dict(self) -> State:
        return {"time": self.time, "number": self.number}

    def load_state_dict(self, state: State) -> None:
        self.time, self.number = state["time"], state["number"]

    def _require(self, holds: bool, what: Any, why: str) -> None:
        if not holds:
            raise InvariantError(f"{why}: {what}")


class Sent(NamedTuple):
    """A dispatch under way: to whom, and the counters when it was sent."""

    client: int
    updates: int
    version: int


class Checker(Clock):
    """Feed it every event in order; it raises `InvariantError` at the first broken promise.

    Clock and order, as above.
    Concurrency: never more clients in training, but for newcomers at their first dispatch.
    Life of a dispatch: sent once (numbers only grow), to a client that is not training (or, for a
    multicast, that is), and ended exactly once: by an upload, a drop, or a multicast that takes
    over.
    Counters: updates count uploads, versions never go back, staleness is the difference between now
    and the dispatch that the upload answers.
    """

    def __init__(self, concurrency: int) -> None:
        super().__init__()
        self.concurrency = concurrency
        self.updates = 0
        self.version = 0
        self.last = -1  # the number of the last dispatch
        self.open: dict[int, Sent] = {}  # dispatches under way
        self.training: dict[int, int] = {}  # client -> the dispatch that it trains
        self.key: Key = (0.0, -1, -1)
        self.newcomers: set[int] = set()  # who has joined late and was not sent anything yet

    def popped(self, key: Key) -> None:
        self._require(key > self.key, key, f"the order of events: {self.key} came before")
        self.key = key

    def happened(self, event: events.Event) -> None:
        super().happened(event)
        self._require(event.version >= self.version, event, f"version was {self.version}")
        match event:
            case events.Upload():
                self._upload(event)
            case events.Dispatch() | events.Multicast():
                self._send(event)
            case events.Drop():
                self._end(event, event.dispatch)
                self._free(event)
            case events.Restart():
                self._restart(event)
            case events.Missed():
                self._end(event, event.dispatch)
            case events.Join():
                self.newcomers.add(event.client)
        self._require(event.updates == self.updates, event, f"{self.updates} updates were folded")
        self.version = event.version

    def _send(self, event: events.Dispatch | events.Multicast) -> None:
        client, busy = event.client, event.client in self.training
        self._require(event.dispatch > self.last, event, "sent twice")
        self.last = event.dispatch
        self.open[event.dispatch] = Sent(client, event.updates, event.version)
        if isinstance(event, events.Multicast):
            self._require(busy, event, "the client is not in training")
            return
        self._require(not busy, event, "the client is in training already")
        self.training[client] = event.dispatch
        room = len(self.training) <= self.concurrency or client in self.newcomers
        self._require(room, event, f"concurrency is {self.concurrency}")
        self.newcomers.discard(client)

    def _restart(self, event: events.Restart) -> None:
        self._end(event, event.replaces)
        trained = self.training.get(event.client)
        self._require(trained == event.replaces, event, f"the client trained {trained}")
        sent = self.open.get(event.dispatch)
        known = sent is not None and sent.client == event.client
        self._require(known, event, f"dispatch {event.dispatch} is not open")
        self.training[event.client] = event.dispatch

    def _upload(self, event: events.Upload) -> None:
        sent = self._end(event, event.dispatch)
        self._free(event)
        updates, versions = self.updates - sent.updates, self.version - sent.version
        self._require(event.staleness == updates, event, f"{updates} updates passed")
        self._require(event.versions == versions, event, f"{versions} versions passed")
        self.updates += 1

    def _end(self, event: events.DispatchEvent, number: int) -> Sent:
        self._require(number in self.open, event, f"dispatch {number} is not open")
        sent = self.open.pop(number)
        self._require(sent.client == event.client, event, f"it went to {sent.client}")
        return sent

    def _free(self, event: events.DispatchEvent) -> None:
        trained = self.training.pop(event.client, None)
        self._require(trained == event.dispatch, event, f"the client trained {trained}")

    def state_dict(self) -> State:
        return super().state_dict() | {
            "updates": self.updates,
            "version": self.version,
            "last": self.last,
            "open": [[number, *sent] for number, sent in self.open.items()],
            "training": [list(pair) for pair in self.training.items()],
            "key": list(self.key),
            "newcomers": sorted(self.newcomers),
        }

    def load_state_dict(self, state: State) -> None:
        super().load_state_dict(state)
        self.updates, self.version, self.last = state["updates"], state["version"], state["last"]
        self.open = {number: Sent(*sent) for number, *sent in state["open"]}
        self.training = dict(state["training"])
        time, priority, counter = state["key"]
        self.key, self.newcomers = (time, priority, counter), set(state["newcomers"])


class PeerChecker(Clock):
    """The same for peers.

    A ticket is granted to one claimer at most. Two models are sent for it, first the claimer's,
    then the owner's. Only these two fuse, each once, after that.
    """

    def __init__(self) -> None:
        super().__init__()
        self.granted: dict[str, list[int]] = {}  # ticket -> owner, claimer
        self.sent: dict[str, list[int]] = {}  # ticket -> who has sent a model for it
        self.fused: dict[str, list[int]] = {}

    def happened(self, event: events.Event) -> None:
        super().happened(event)
        match event:
            case events.Grant(ticket=ticket, client=client):
                self._require(ticket not in self.granted, event, "granted twice")
                self.granted[ticket] = [client, event.partner]
            case events.Exchange(ticket=ticket, client=client):
                pair, sent = self.granted.get(ticket, []), self.sent.setdefault(ticket, [])
                self._require(client in pair, event, f"the pair is {pair}")
                self._require(client not in sent, event, "sent twice")
                self._require(bool(sent) == (client == pair[0]), event, "the claimer sends first")
                sent.append(client)
            case events.Fuse(ticket=ticket, client=client):
                pair, fused = self.granted.get(ticket, []), self.fused.setdefault(ticket, [])
                first = client in pair and client not in fused
                self._require(first, event, f"{fused} of {pair} have")
                both = len(self.sent.get(ticket, [])) == 2
                self._require(both, event, "models were not exchanged")
                fused.append(client)

    def state_dict(self) -> State:
        own = {"granted": self.granted, "sent": self.sent, "fused": self.fused}
        return super().state_dict() | own

    def load_state_dict(self, state: State) -> None:
        super().load_state_dict(state)
        self.granted, self.sent, self.fused = state["granted"], state["sent"], state["fused"]
