"""`--check`: the invariants of a simulation, recounted from its events alone.

The checkers share no code with the server or the peers: they see what the event log sees, and
count again.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from polytempo.core.strategy import State

Event = Mapping[str, Any]


class InvariantError(AssertionError):
    """The simulator broke one of its promises: a bug of ours, not of the user."""


class Clock:
    """What holds of every engine: time never goes back, events are numbered without gaps."""

    def __init__(self) -> None:
        self.time = 0.0
        self.number = -1

    def __call__(self, event: Event) -> None:
        self._require(event["time"] >= self.time, event, f"the clock goes back from {self.time}")
        self._require(event["n"] == self.number + 1, event, f"follows event {self.number}")
        self.time, self.number = event["time"], event["n"]

    def _require(self, holds: bool, event: Event, why: str) -> None:
        if not holds:
            raise InvariantError(f"{why}: {dict(event)}")


class Checker(Clock):
    """Feed it every event in order; it raises `InvariantError` at the first broken promise.

    Clock and order, as above.
    Slots: never more clients in training than slots, but for newcomers at their first dispatch.
    Life of a dispatch: sent once, to a client that is not training (or, for a multicast, that is),
    and ended exactly once, by an upload, a drop or a multicast that takes over.
    Counters: rounds count uploads, versions never go back, staleness is the difference between now
    and the dispatch that the upload answers.
    """

    def __init__(self, slots: int) -> None:
        super().__init__()
        self.slots = slots
        self.round = 0
        self.version = 0
        self.open: dict[int, Event] = {}  # dispatches under way
        self.training: dict[int, int] = {}  # client -> the dispatch that it trains
        self.ended: set[int] = set()
        self.key = (0.0, -1, -1)
        self.newcomers: set[int] = set()  # who has joined late and was not sent anything yet

    def popped(self, key: tuple[float, int, int]) -> None:
        """The queue gave out the event of this key: keys only ever grow."""
        self._require(key > self.key, {"key": key}, f"the order of events: {self.key} came before")
        self.key = key

    def __call__(self, event: Event) -> None:
        super().__call__(event)
        self._require(event["version"] >= self.version, event, f"version was {self.version}")
        kind = event["event"]
        if kind == "upload":
            self._upload(event)
        elif kind in ("dispatch", "multicast"):
            self._send(event)
        elif kind == "drop":
            self._end(event)
            self._free(event)
        elif kind == "restart":
            self._restart(event)
        elif kind == "missed":
            self._end(event)
        elif kind == "join":
            self.newcomers.add(event["client"])
        self._require(event["round"] == self.round, event, f"{self.round} updates were folded")
        self.version = event["version"]

    def _send(self, event: Event) -> None:
        busy = event["client"] in self.training
        number = event["dispatch"]
        self._require(number not in self.open and number not in self.ended, event, "sent twice")
        self.open[number] = event
        if event["event"] == "multicast":
            self._require(busy, event, "the client is not in training")
            return
        self._require(not busy, event, "the client is in training already")
        self.training[event["client"]] = number
        room = len(self.training) <= self.slots or event["client"] in self.newcomers
        self._require(room, event, f"only {self.slots} slots")
        self.newcomers.discard(event["client"])

    def _restart(self, event: Event) -> None:
        number, client = event["dispatch"], event["client"]
        self._end(event, event["replaces"])
        trained = self.training.get(client)
        self._require(trained == event["replaces"], event, f"the client trained {trained}")
        sent = self.open.get(number, {})
        self._require(sent.get("client") == client, event, f"dispatch {number} is not open")
        self.training[client] = number

    def _upload(self, event: Event) -> None:
        sent = self._end(event)
        self._free(event)
        rounds, versions = self.round - sent["round"], self.version - sent["version"]
        self._require(event["staleness"] == rounds, event, f"{rounds} rounds passed")
        self._require(event["versions"] == versions, event, f"{versions} versions passed")
        self.round += 1

    def _end(self, event: Event, number: int | None = None) -> Event:
        number = event["dispatch"] if number is None else number
        self._require(number in self.open, event, f"dispatch {number} is not open")
        sent = self.open.pop(number)
        self._require(sent["client"] == event["client"], event, f"it went to {sent['client']}")
        self.ended.add(number)
        return sent

    def _free(self, event: Event) -> None:
        trained = self.training.pop(event["client"], None)
        self._require(trained == event["dispatch"], event, f"the client trained {trained}")


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

    def __call__(self, event: Event) -> None:
        super().__call__(event)
        kind, ticket, client = event["event"], event.get("ticket", ""), event.get("client", -1)
        if kind == "grant":
            self._require(ticket not in self.granted, event, "granted twice")
            self.granted[ticket] = [client, event["partner"]]
        elif kind == "exchange":
            pair, sent = self.granted.get(ticket, []), self.sent.setdefault(ticket, [])
            self._require(client in pair, event, f"the pair is {pair}")
            self._require(client not in sent, event, "sent twice")
            self._require(bool(sent) == (client == pair[0]), event, "the claimer sends first")
            sent.append(client)
        elif kind == "fuse":
            pair, fused = self.granted.get(ticket, []), self.fused.setdefault(ticket, [])
            self._require(client in pair and client not in fused, event, f"{fused} of {pair} have")
            self._require(len(self.sent.get(ticket, [])) == 2, event, "models were not exchanged")
            fused.append(client)

    def state_dict(self) -> State:
        return {
            "time": self.time,
            "number": self.number,
            "granted": self.granted,
            "sent": self.sent,
            "fused": self.fused,
        }

    def load_state_dict(self, state: State) -> None:
        self.time, self.number = state["time"], state["number"]
        self.granted, self.sent, self.fused = state["granted"], state["sent"], state["fused"]
