"""What happens in a run: one class for each kind of event. Whatever watches a run is told of these:
the event log, the invariant checker, the progress bar. docs/events.md lists them."""

from __future__ import annotations

import json
from dataclasses import dataclass, fields
from operator import attrgetter
from typing import Any, ClassVar

from polytempo.core.metric import finite


@dataclass(frozen=True, slots=True)
class Event:
    """The head that all events share."""

    kind: ClassVar[str]  # the name of the class in small letters

    n: int  # counts the events of a run, from 0
    time: float  # simulated seconds
    updates: int  # trainings that have counted, this one included if it is one
    version: int  # how often models have changed other than by local training

    def __init_subclass__(cls) -> None:
        cls.kind = cls.__name__.lower()


@dataclass(frozen=True, slots=True)
class Evaluate(Event):
    """All clients' models were tested."""

    metric: str  # its name
    value: float  # mean over clients
    loss: float


@dataclass(frozen=True, slots=True)
class ClientEvent(Event):
    """Base: what happens to one client."""

    client: int


@dataclass(frozen=True, slots=True)
class Join(ClientEvent):
    """The client is there for the first time, in a run that has begun."""


@dataclass(frozen=True, slots=True)
class Return(ClientEvent):
    """The client is there again."""


@dataclass(frozen=True, slots=True)
class Leave(ClientEvent):
    """The client is no longer there."""


# -- with a server ------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class DispatchEvent(ClientEvent):
    """Base: what becomes of one dispatch."""

    dispatch: int  # its number


@dataclass(frozen=True, slots=True)
class Dispatch(DispatchEvent):
    """The client is sent a model, to train it."""


@dataclass(frozen=True, slots=True)
class Multicast(DispatchEvent):
    """The client, in training, is sent a fresh model."""


@dataclass(frozen=True, slots=True)
class Restart(DispatchEvent):
    """A multicast has reached the client, which continues from it."""

    replaces: int  # the dispatch that it was training
    step: int  # the first step on the new model


@dataclass(frozen=True, slots=True)
class Missed(DispatchEvent):
    """A multicast came too late, or never will come."""


@dataclass(frozen=True, slots=True)
class Urgent(DispatchEvent):
    """The client is asked to stop at the end of its epoch and to report."""


@dataclass(frozen=True, slots=True)
class Upload(DispatchEvent):
    """The client's update was folded in."""

    staleness: int  # in updates
    versions: int  # in versions


@dataclass(frozen=True, slots=True)
class Drop(DispatchEvent):
    """What the client was training is lost."""


# -- among peers --------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Train(ClientEvent):
    """A local round has ended."""

    iteration: int  # local steps since the beginning


@dataclass(frozen=True, slots=True)
class TicketEvent(ClientEvent):
    """Base: what becomes of one ticket."""

    ticket: str  # owner.incarnation.number


@dataclass(frozen=True, slots=True)
class Announce(TicketEvent):
    """The peer waits for a partner."""


@dataclass(frozen=True, slots=True)
class Withdraw(TicketEvent):
    """The peer no longer waits."""


@dataclass(frozen=True, slots=True)
class Claim(TicketEvent):
    """The peer asks the owner of the ticket for it."""


@dataclass(frozen=True, slots=True)
class Grant(TicketEvent):
    """The peer, its owner, gives the ticket to a partner."""

    partner: int


@dataclass(frozen=True, slots=True)
class Exchange(TicketEvent):
    """The peer sends its model to the other of the pair."""

    progress: float  # of the model


@dataclass(frozen=True, slots=True)
class Fuse(TicketEvent):
    """The peer mixes its partner's model into its own."""

    partner: int
    weight: float  # of the partner's model


@dataclass(frozen=True, slots=True)
class Discard(TicketEvent):
    """The peer no longer trains, and leaves its partner's model unused."""

    kind: ClassVar[str] = "discard"

    partner: int


KINDS: dict[str, type[Event]] = {
    kind.kind: kind
    for kind in (
        *(Evaluate, Join, Return, Leave),
        *(Dispatch, Multicast, Restart, Missed, Urgent, Upload, Drop),
        *(Train, Announce, Withdraw, Claim, Grant, Exchange, Fuse, Discard),
    )
}


def _spelling(kind: type[Event]) -> tuple[tuple[str, ...], attrgetter[tuple[Any, ...]]]:
    """The keys of such an event in the log, in order, and what reads their values."""
    names = [field.name for field in fields(kind)]
    who = [name for name in ("client", "dispatch") if name in names]
    rest = [name for name in names if name not in ("n", "time", *who, "updates", "version")]
    keys = ("n", "time", "event", *who, "updates", "version", *rest)
    return keys, attrgetter(*("kind" if key == "event" else key for key in keys))


_ENCODER = json.JSONEncoder(allow_nan=False)
_SPELLINGS = {kind: _spelling(kind) for kind in KINDS.values()}


def as_dict(event: Event) -> dict[str, Any]:
    """The event as a line of the log lists it: its fields, and its kind as "event"."""
    keys, values = _SPELLINGS[type(event)]
    return dict(zip(keys, values(event), strict=True))


def to_json(event: Event) -> str:
    """The event as a line of the log, without the end of the line. JSON knows neither infinity nor
    NaN: they become null."""
    found = as_dict(event)
    try:
        return _ENCODER.encode(found)
    except ValueError:
        return _ENCODER.encode({key: finite(value) for key, value in found.items()})
