"""Past global models, for methods that ask where the server has moved while a client trained."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from polytempo.core.messages import InFlight
from polytempo.core.strategy import State


class History:
    """A vector of the server by version: the current one, and those that clients still hold.

    `add` is to be called exactly when `fold` returns True, so that versions here are those of the
    server; `keep` from a hook that is told who is in training (`refresh` or `urgent`). Memory is
    one vector for each version that somebody in training was sent: at most one per slot, plus the
    current one, which whoever starts next is sent.
    """

    def __init__(self, initial: Tensor) -> None:
        self.version = 0
        self._vectors = {0: initial}

    def __len__(self) -> int:
        return len(self._vectors)

    @property
    def current(self) -> Tensor:
        return self._vectors[self.version]

    def ago(self, versions: int) -> Tensor:
        """The vector so many versions ago."""
        return self._vectors[self.version - versions]

    def add(self, vector: Tensor) -> None:
        """The next version."""
        self.version += 1
        self._vectors[self.version] = vector

    def keep(self, in_flight: Sequence[InFlight]) -> None:
        """Forget what nobody in training was sent; the current version stays."""
        held = {self.version - flight.staleness.versions for flight in in_flight}
        wanted = sorted(held | {self.version})
        self._vectors = {version: self._vectors[version] for version in wanted}

    def state_dict(self) -> State:
        vectors = {str(version): vector for version, vector in self._vectors.items()}
        return {"version": self.version, "vectors": vectors}

    def load_state_dict(self, state: State) -> None:
        self.version = state["version"]
        self._vectors = {int(version): vector for version, vector in state["vectors"].items()}


def cosine(a: Tensor, b: Tensor) -> float:
    """Of the angle between two vectors; a zero vector has cosine 0 with everything."""
    lengths = float(torch.linalg.vector_norm(a)) * float(torch.linalg.vector_norm(b))
    return min(1.0, max(-1.0, float(a.dot(b)) / lengths)) if lengths > 0 else 0.0
