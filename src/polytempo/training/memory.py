"""What clients remember from one training to the next."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from polytempo.core.bank import ModelBank


class ClientMemory:
    """Named vectors of every client: its own part of the model, the moments of its optimiser, and
    whatever client steps keep. Clients that were treated alike share rows.

    `initial`: what clients remember before their first training. A vector of another name is zero
    for all until some client brings it back from a training.
    """

    def __init__(self, clients: int, initial: Mapping[str, Tensor]) -> None:
        self.clients = clients
        self._banks = {name: ModelBank(clients, vector) for name, vector in initial.items()}

    def get(self, client: int) -> dict[str, Tensor]:
        """All that the client remembers: copies."""
        return {name: bank.row(client) for name, bank in self._banks.items()}

    def vector(self, name: str, client: int) -> Tensor:
        """One of its vectors: a copy."""
        return self._banks[name].row(client)

    def set(self, client: int, memory: Mapping[str, Tensor]) -> None:
        """The client has come back from a training with this memory."""
        for name, vector in memory.items():
            if name not in self._banks:
                self._banks[name] = ModelBank(self.clients, torch.zeros_like(vector))
            self._banks[name].set(client, vector)

    def revision(self, name: str, client: int) -> int:
        """A number that changes whenever this vector of the client does."""
        return self._banks[name].revision(client) if name in self._banks else 0

    def state_dict(self) -> dict[str, Any]:
        return {name: bank.state_dict() for name, bank in self._banks.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        for name, saved in state.items():
            if name not in self._banks:
                zeros = torch.zeros_like(saved["origin"])
                self._banks[name] = ModelBank(self.clients, zeros)
            self._banks[name].load_state_dict(saved)
