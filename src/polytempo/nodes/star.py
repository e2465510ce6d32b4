"""The vocabulary of a server and its clients on a network: what they say to each other, what the
server writes down, and what a driver is asked to do. All are plain values.

Names are those of certificates. A client's *number* is its place in the federation, given when it
enrols and kept for good.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from torch import Tensor

from polytempo.core import events
from polytempo.core.messages import Dispatch

PROTOCOL = 1
Sums: TypeAlias = Mapping[str, float]  # of a metric, to be merged over clients

# -- what a client says -------------------------------------------------------------------------


@dataclass(frozen=True)
class Hello:
    """The first message on every connection: who could take part, and what it holds.

    `model`: digest of the layout of the model that it trains ("" before it has one: it takes the
    server's). `problem`: what it learns. `samples`, `tested`: of its training and test data.
    `training`: the dispatch that it is training; `offering`: the one that its unacknowledged
    update answers.
    """

    protocol: int
    model: str
    problem: str
    samples: int
    tested: int
    training: int | None = None
    offering: int | None = None


@dataclass(frozen=True)
class Upload:
    """An update, offered until it is acknowledged or declined. `seconds`: how long the client
    trained."""

    number: int  # of the dispatch that it answers
    vector: Tensor
    samples: int
    extras: Mapping[str, Tensor] = field(default_factory=dict)
    seconds: float = 0.0


@dataclass(frozen=True)
class Swapped:
    """A multicast has reached the client in training, which continues from it; or (`step` None) it
    was missed, because the client has trained `replaces` already. (It trains nothing and offers
    nothing: then `replaces` is the number of the multicast itself.)"""

    number: int
    replaces: int
    step: int | None


@dataclass(frozen=True)
class Scores:
    """What a client's test data say of the model that it was asked to examine: sums, as handed and
    after adaptation (None: not asked for)."""

    exam: int
    handed: Sums
    adapted: Sums | None = None


FromClient: TypeAlias = Hello | Upload | Swapped | Scores

# -- what the server says -----------------------------------------------------------------------


@dataclass(frozen=True)
class Welcome:
    """The client takes part, under this number. `run` is what it must know of the run (model, seed,
    problem, parts of the model)."""

    client: int
    run: Mapping[str, Any]


@dataclass(frozen=True)
class Work:
    """Train this. With `dispatch.preempt`: swap it in, if you are in training; or say that it was
    missed."""

    dispatch: Dispatch


@dataclass(frozen=True)
class Hurry:
    """The epoch in progress is the last one (an urgent request)."""

    number: int


@dataclass(frozen=True)
class Acknowledge:
    """The update is safe: folded in, and on disk."""

    number: int


@dataclass(frozen=True)
class Decline:
    """The update is not wanted (any more), nor is the training that would lead to it."""

    number: int
    reason: str


@dataclass(frozen=True)
class Examine:
    """Test this model (and, with `adapt_epochs`, the same after so much local training), keep it,
    and report."""

    exam: int
    params: Tensor
    adapt_epochs: int = 0


@dataclass(frozen=True)
class Finished:
    """The run is over."""

    reason: str


FromServer: TypeAlias = Welcome | Work | Hurry | Acknowledge | Decline | Examine | Finished

# -- what the server writes down before it acts --------------------------------------------------


@dataclass(frozen=True)
class Record:
    """Base. The server's state is a function of its records, in order."""

    time: float  # seconds since the run began


@dataclass(frozen=True)
class Started(Record):
    """The server is up, for the first time or again: nobody is there yet. The run is to have this
    many updates, and to begin once `wait_for` clients are there."""

    updates: int
    wait_for: int = 1


@dataclass(frozen=True)
class Enrolled(Record):
    """A client that nobody knew takes the next number."""

    name: str
    samples: int
    tested: int


@dataclass(frozen=True)
class Joined(Record):
    """The client is there (again)."""

    name: str


@dataclass(frozen=True)
class Away(Record):
    """The client is not there; what it trains may still come."""

    name: str


@dataclass(frozen=True)
class Left(Record):
    """The client is gone for good (revoked), and so is what it trains."""

    name: str


@dataclass(frozen=True)
class GivenUp(Record):
    """The client took too long, or what it offered was bad: what it trains is lost."""

    name: str
    number: int  # of a dispatch that is open
    reason: str = ""  # why its update is bad; "": it took too long
    away: bool = False  # it is not connected, and others could have its slot


@dataclass(frozen=True)
class Offered(Record):
    """An update came in. (Whether it counts is decided when it is folded.)"""

    name: str
    upload: Upload


@dataclass(frozen=True)
class Continued(Record):
    """What has become of a multicast."""

    name: str
    swapped: Swapped


@dataclass(frozen=True)
class Scored(Record):
    """A client has examined its model."""

    name: str
    scores: Scores


@dataclass(frozen=True)
class Closed(Record):
    """The last exam is in, or was waited for long enough: the run is over."""


AnyRecord: TypeAlias = (
    Started | Enrolled | Joined | Away | Left | GivenUp | Offered | Continued | Scored | Closed
)

# -- what a driver is asked to do ----------------------------------------------------------------


@dataclass(frozen=True)
class Write:
    """Write this down, safely; then hand it to `ServerNode.apply`, in order."""

    record: AnyRecord


@dataclass(frozen=True)
class Send:
    """Tell the client of that name, if it is connected; if it is not, forget it."""

    name: str
    message: FromServer


@dataclass(frozen=True)
class Drop:
    """Break off the connection, with this reason."""

    name: str
    reason: str


@dataclass(frozen=True)
class Report:
    """Something happened: for the event log and for whoever watches."""

    event: events.Event


ServerAction: TypeAlias = Write | Send | Drop | Report


# -- and that of a client -----------------------------------------------------------------------


@dataclass(frozen=True)
class Say:
    """Send it to the server, if there is a connection; if there is none, forget it."""

    message: FromClient


@dataclass(frozen=True)
class Begin:
    """Start to train this; whatever was being trained is abandoned. The end is reported to
    `ClientNode.trained`."""

    dispatch: Dispatch


@dataclass(frozen=True)
class Swap:
    """Swap this model in at the next step; tell `ClientNode.swapped` whether it was in time."""

    dispatch: Dispatch


@dataclass(frozen=True)
class Shorten:
    """End the training with the epoch in progress."""


@dataclass(frozen=True)
class Abandon:
    """Stop training; nothing comes of it."""


@dataclass(frozen=True)
class Save:
    """Write down `ClientNode.state_dict()`, safely, before anything else is done."""


@dataclass(frozen=True)
class Assess:
    """Examine the model with the client's own data and memory; report to `ClientNode.tested`."""

    examine: Examine


@dataclass(frozen=True)
class End:
    """Take part no longer."""

    reason: str


ClientAction: TypeAlias = Say | Begin | Swap | Shorten | Abandon | Save | Assess | End
