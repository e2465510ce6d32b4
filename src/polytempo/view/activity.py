"""What an event log says, kept small: who does what now, who trained when, and the counts.

One event costs O(1), and memory is bounded: of trainings, only the latest are kept.
"""

from __future__ import annotations

import json
import math
from collections import Counter, deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

IDLE, TRAINING, SENDING, GONE = range(4)
STATES = ("idle", "training", "uploading", "gone")  # by these numbers
DONE, LOST, UNDER_WAY = range(3)
FATES = ("done", "lost", "under way")  # what became of a training, by these numbers
MODELS = ("dispatch", "upload", "multicast", "exchange")  # events that are messages with a model
MOST = 1_000_000  # clients: a larger number is not one
KEPT = 50_000  # trainings
SAMPLES = 1_000  # of the counts of messages, over the run
Bar = tuple[int, float, float, int, int]  # client, start, end, staleness, fate


@dataclass(slots=True)
class Client:
    """What is known of one."""

    state: int = IDLE
    dispatch: int | None = None  # that it trains
    since: float | None = None  # when that began
    updates: int = 0
    lost: int = 0
    staleness: int = 0  # of its last update
    stale: int = 0  # summed over its updates
    busy: float = 0.0  # seconds in trainings that are over
    trainings: int = 0
    sent: int = -1  # the event in which it last sent its model


@dataclass(frozen=True, slots=True)
class Point:
    """An evaluation."""

    time: float
    updates: int
    messages: int
    value: float | None
    loss: float | None


class Activity:
    """Fed with the lines of events.jsonl in order. `absent`: clients are gone until they come."""

    def __init__(self, absent: bool = False) -> None:
        self.absent = absent
        self.clients: dict[int, Client] = {}
        self.trainings: deque[Bar] = deque(maxlen=KEPT)
        self.over = 0  # trainings, kept or not
        self.counts: Counter[str] = Counter()  # events by kind
        self.staleness: Counter[int] = Counter()
        self.points: list[Point] = []
        self.sent: list[tuple[float, tuple[int, ...]]] = []  # messages by kind, now and then
        self._stride = 1  # events from one of these to the next
        self.metric: str | None = None
        self.time, self.updates, self.version, self.events = 0.0, 0, 0, 0
        self.unreadable = 0  # lines

    def feed(self, lines: Iterable[bytes]) -> None:
        for line in lines:
            try:
                event = json.loads(line)
                self._note(event)
            except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
                self.unreadable += 1

    @property
    def messages(self) -> int:
        """That carry a model."""
        return sum(self.counts[kind] for kind in MODELS)

    def client(self, number: Any) -> Client:
        if type(number) is not int or not 0 <= number < MOST:
            raise ValueError(f"{number!r} is not a client")
        found = self.clients.get(number)
        if found is None:
            found = self.clients[number] = Client(GONE if self.absent else IDLE)
        return found

    def _note(self, event: dict[str, Any]) -> None:
        kind, time = event["event"], float(event["time"])
        if not isinstance(kind, str) or not math.isfinite(time):
            raise ValueError("not an event")
        updates, version = int(event["updates"]), int(event["version"])
        if kind == "evaluate":
            self._evaluated(event, time, updates)
        elif "client" in event:
            self._happened(kind, event, self.client(event["client"]), time)
        self.counts[kind] += 1
        self.time, self.updates, self.version = max(self.time, time), updates, version
        self.events += 1
        if self.events % self._stride == 0:
            self.sent.append((self.time, self.sent_now()))
            if len(self.sent) >= SAMPLES:  # half of them will do
                self.sent, self._stride = self.sent[1::2], 2 * self._stride

    def sent_now(self) -> tuple[int, ...]:
        """Messages by kind."""
        return tuple(self.counts[kind] for kind in MODELS)

    def _evaluated(self, event: dict[str, Any], time: float, updates: int) -> None:
        self.metric = str(event["metric"])
        value, loss = (
            float(x) if isinstance(x := event.get(key), int | float) else None
            for key in ("value", "loss")
        )
        self.points.append(Point(time, updates, self.messages, value, loss))

    def _happened(self, kind: str, event: dict[str, Any], client: Client, time: float) -> None:
        number = event["client"]
        match kind:
            case "dispatch":
                client.state, client.dispatch, client.since = TRAINING, event["dispatch"], time
            case "restart":
                client.dispatch = event["dispatch"]
            case "upload":
                stale = int(event["staleness"])
                self._over(number, client, time, stale, DONE)
                self.staleness[stale] += 1
                client.staleness, client.sent = stale, self.events
                client.stale += stale
                client.updates += 1
            case "drop" if client.dispatch == event["dispatch"]:
                self._over(number, client, time, 0, LOST)
                client.lost += 1
            case "leave":
                client.state = GONE
            case "join" | "return":
                client.state = IDLE if client.dispatch is None else TRAINING
                if client.dispatch is None:  # a peer begins its local round again
                    client.since = time
            case _:
                self._among_peers(kind, number, client, time)

    def _over(self, number: int, client: Client, time: float, stale: int, fate: int) -> None:
        """A training has ended."""
        if client.since is not None:
            self._keep((number, client.since, time, stale, fate))
            client.busy += time - client.since
            client.trainings += 1
        client.since = client.dispatch = None
        if client.state != GONE:
            client.state = IDLE

    def _among_peers(self, kind: str, number: int, client: Client, time: float) -> None:
        match kind:
            case "train":
                began = client.since or 0.0
                self._keep((number, began, time, 0, DONE))
                client.busy += time - began
                client.trainings += 1
                client.updates += 1
                client.since, client.state = time, TRAINING
            case "exchange":
                client.state, client.sent = SENDING, self.events
            case "fuse" | "discard":
                client.state = TRAINING

    def _keep(self, bar: Bar) -> None:
        self.trainings.append(bar)
        self.over += 1

    def bars(self, chosen: set[int], most: int) -> list[Bar]:
        """The latest bars of these clients, those that are under way among them."""
        found: list[Bar] = [
            (number, client.since, self.time, 0, UNDER_WAY)
            for number in chosen
            if (client := self.clients.get(number)) is not None
            and client.dispatch is not None
            and client.since is not None
        ]
        for bar in reversed(self.trainings):
            if len(found) >= most:
                break
            if bar[0] in chosen:
                found.append(bar)
        return found
