"""What travels between the server and its clients.

A *dispatch* hands a model to a client; an *update* answers exactly one dispatch. Dispatches are
numbered over the whole run, so a late, repeated or invented update is recognised by its number.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import Tensor

from polytempo.core.task import Task


@dataclass(frozen=True)
class Dispatch:
    """Server to client: train this model as the task says.

    With `preempt` the client is in training already (a multicast): it swaps this model in at a
    step boundary and goes on with the local steps that it has left.
    `anchor` is the vector that the task's objective refers to, if not the received model; or, for a
    task in which the client chooses, the other models [models, parameters].
    """

    client: int
    number: int
    params: Tensor
    task: Task
    preempt: bool = False
    anchor: Tensor | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of the vectors that travel."""
        return self.params.nbytes + (0 if self.anchor is None else self.anchor.nbytes)


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
    """

    client: int
    number: int
    vector: Tensor
    samples: int
    extras: Mapping[str, Tensor] = field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        """Bytes of the vectors that travel."""
        return self.vector.nbytes + sum(extra.nbytes for extra in self.extras.values())


@dataclass(frozen=True)
class Staleness:
    """How much happened between a dispatch and its update, the update itself not counted."""

    rounds: int  # updates folded
    versions: int  # times the served model(s) changed


@dataclass(frozen=True)
class InFlight:
    """A client that is training now, and how stale the model is that it was last sent."""

    client: int
    staleness: Staleness
