"""Past global models, for methods that ask where the server has moved while a client trained."""

from __future__ import annotations

from collections import Counter

import torch
from torch import Tensor

from polytempo.core.strategy import State


class History:
    """A vector of the server by version: the current one, and those that clients still hold.

    `add` is to be called exactly when `fold` returns True, so that versions here are those of the
    server; `hold` from `dispatched`; `release` from `fold`, after the last use, and from `lost`.
    Memory is one vector for each version that somebody in training was sent: at most one per slot,
    plus the current one, which whoever starts next is sent.
    """

    def __init__(self, initial: Tensor) -> None:
        self.version = 0
        self._vectors = {0: initial}
        self._held: dict[int, int] = {}  # by client: the version that it was sent
        self._holders: Counter[int] = Counter()  # by version: how many hold it

    def __len__(self) -> int:
        return len(self._vectors)

    @property
    def current(self) -> Tensor:
        return self._vectors[self.version]

    def ago(self, versions: int) -> Tensor:
        """The vector that many versions ago."""
        return self._vectors[self.version - versions]

    def add(self, vector: Tensor) -> None:
        """The next version."""
        self.version += 1
        self._vectors[self.version] = vector
        self._forget(self.version - 1)

    def hold(self, client: int) -> None:
        """The client is sent the current version, and no longer holds any other."""
        self.release(client)
        self._held[client] = self.version
        self._holders[self.version] += 1

    def release(self, client: int) -> None:
        """What the client was sent is no longer needed (or it was sent nothing)."""
        version = self._held.pop(client, None)
        if version is not None:
            self._holders[version] -= 1
            self._forget(version)

    def _forget(self, version: int) -> None:
        """Unless it is the current one, or somebody holds it."""
        if version != self.version and not self._holders[version]:
            del self._vectors[version], self._holders[version]

    def state_dict(self) -> State:
        vectors = {str(version): vector for version, vector in self._vectors.items()}
        held = [[client, version] for client, version in self._held.items()]
        return {"version": self.version, "vectors": vectors, "held": held}

    def load_state_dict(self, state: State) -> None:
        self.version = state["version"]
        self._vectors = {int(version): vector for version, vector in state["vectors"].items()}
        self._held = dict(state["held"])
        self._holders = Counter(self._held.values())


def cosine(a: Tensor, b: Tensor) -> float:
    """Of the angle between two vectors; a zero vector has cosine 0 with everything."""
    lengths = float(torch.linalg.vector_norm(a)) * float(torch.linalg.vector_norm(b))
    return min(1.0, max(-1.0, float(a.dot(b)) / lengths)) if lengths > 0 else 0.0
