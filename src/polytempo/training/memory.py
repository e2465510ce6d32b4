"""What clients remember from one training to the next."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from polytempo.core.bank import BoolArray, ModelBank
from polytempo.core.errors import PolytempoError


class ClientMemory:
    """Named vectors of every client: its own part of the model, the moments of its optimiser, and
    whatever client steps keep. Clients that were treated alike share rows.

    `initial`: what clients remember before their first training. A vector of another name is
    remembered by those clients alone that have brought it back from a training.
    """

    def __init__(self, clients: int, initial: Mapping[str, Tensor]) -> None:
        self.clients = clients
        self._banks: dict[str, ModelBank] = {}
        self._known: dict[str, BoolArray] = {}  # of each name: who remembers such a vector
        for name, vector in initial.items():
            self._add(name, vector)
            self._known[name][:] = True

    def _add(self, name: str, initial: Tensor) -> None:
        self._banks[name] = ModelBank(self.clients, initial)
        self._known[name] = np.zeros(self.clients, dtype=np.bool_)

    def get(self, client: int) -> dict[str, Tensor]:
        """All that the client remembers: copies."""
        return {
            name: bank.row(client)
            for name, bank in self._banks.items()
            if self._known[name][client]
        }

    def vector(self, name: str, client: int) -> Tensor:
        """One of its vectors: a copy."""
        if name not in self._known or not self._known[name][client]:
            raise PolytempoError(f"client {client} remembers no vector {name!r}")
        return self._banks[name].row(client)

    def set(self, client: int, memory: Mapping[str, Tensor]) -> None:
        """The client has come back from a training with this memory."""
        for name, vector in memory.items():
            if name not in self._banks:
                self._add(name, torch.zeros_like(vector))
            bank = self._banks[name]
            if vector.shape != bank.origin.shape:
                raise PolytempoError(
                    f"client {client} remembers {name!r} with shape {list(vector.shape)}, others "
                    f"with {list(bank.origin.shape)}; under one name all must keep vectors of one "
                    "length: pad them"
                )
            bank.set(client, vector)
            self._known[name][client] = True

    def revision(self, name: str, client: int) -> int:
        """A number that changes whenever this vector of the client does."""
        return self._banks[name].revision(client) if name in self._banks else 0

    def state_dict(self) -> dict[str, Any]:
        return {
            name: {"known": self._known[name], "bank": bank.state_dict()}
            for name, bank in self._banks.items()
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        for name, saved in state.items():
            if name not in self._banks:
                self._add(name, torch.zeros_like(saved["bank"]["origin"]))
            self._banks[name].load_state_dict(saved["bank"])
            self._known[name][:] = saved["known"]
