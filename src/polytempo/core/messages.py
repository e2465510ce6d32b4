"""What travels between the server and its clients.

A *dispatch* hands a model to a client; an *update* answers exactly one dispatch. Dispatches are
numbered over the whole run, so a late, repeated or invented update is recognised by its number.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from torch import Tensor

from polytempo.core.task import TASKS, Task


@dataclass(frozen=True)
class Dispatch:
    """Server to client: train this model as the task says.

    With `preempt` the client is already in training (a multicast): it swaps this model in at a
    step boundary and continues with the local steps that it has left.
    `vectors` is what else the client needs, by name: "anchor" is what the task's objective refers
    to, if that is not the received model; "candidate 1", "candidate 2", ... are the other models
    of a task in which the client chooses.
    """

    client: int
    number: int
    params: Tensor
    task: Task
    preempt: bool = False
    vectors: Mapping[str, Tensor] = field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        """Bytes of the vectors that travel."""
        return self.params.nbytes + sum(vector.nbytes for vector in self.vectors.values())


@dataclass(frozen=True)
class Stop:
    """Server to client in training: finish the current epoch and report (an urgent request)."""

    client: int
    number: int


Action = Dispatch | Stop


@dataclass(frozen=True)
class Update:
    """Client to server: the answer to dispatch `number`.

    `vector` is what the task asked for: the trained model, its difference from the model that was
    received, or a gradient. `samples` is the number of training samples behind it. `extras` is
    what else the task asked for, by name (`Task.extras`).
    `asked` does not travel: the server, which knows the task of every open dispatch, fills it in
    for the strategy.
    """

    client: int
    number: int
    vector: Tensor
    samples: int
    extras: Mapping[str, Tensor] = field(default_factory=dict)
    asked: Task | None = None

    @property
    def task(self) -> Task:
        """The task of the dispatch that it answers, with the learning rate that was sent."""
        if self.asked is None:
            raise ValueError(f"update {self.number} has no task yet: `Server.receive` fills it in")
        return self.asked

    @property
    def nbytes(self) -> int:
        """Bytes of the vectors that travel."""
        return self.vector.nbytes + sum(extra.nbytes for extra in self.extras.values())


@dataclass(frozen=True)
class Staleness:
    """How much happened between a dispatch and its update, the update itself not counted."""

    updates: int  # updates folded
    versions: int  # times the served model(s) changed


@dataclass(frozen=True)
class InFlight:
    """A client that is training now, and how stale the model is that it was last sent."""

    client: int
    staleness: Staleness


class InFlights(Protocol):
    """The clients in training, most stale first; those of equal staleness by their ids (those whose
    staleness is 0 in any order). It is read from the server lazily, so that a reader that stops
    early pays only for what it has looked at. Valid only during the call that it is handed to."""

    def __len__(self) -> int: ...

    def __iter__(self) -> Iterator[InFlight]: ...


def dispatch_state(dispatch: Dispatch) -> dict[str, Any]:
    """A dispatch as checkpoints hold it."""
    return {
        "client": dispatch.client,
        "number": dispatch.number,
        "params": dispatch.params,
        "task": TASKS.describe(dispatch.task),
        "preempt": dispatch.preempt,
        "vectors": dict(dispatch.vectors),
    }


def read_dispatch(found: Mapping[str, Any]) -> Dispatch:
    """What `dispatch_state` described."""
    return Dispatch(**{**found, "task": TASKS.create(found["task"])})
