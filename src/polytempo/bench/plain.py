"""The baseline: asynchronous PACE as one would write it in plain torch, in one process; and
FedAsync, whose server has next to nothing to do.

A DataLoader, an optimiser, autograd; the server's arithmetic by rows. Nothing here is slow on
purpose: the graph has its closed form, the models are rows of one tensor, samples are ready for
use in memory, and there is no simulated clock at all.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters
from torch.utils.data import DataLoader, TensorDataset

from polytempo.data import Federation
from polytempo.strategies.estimators import project_to_simplex

STALENESS = 9  # of every update: the mean at a concurrency of ten


class PlainLoop:
    """State of the loop: the model that trains, and the server's."""

    def __init__(
        self, module: nn.Module, federation: Federation, lr: float, batch_size: int = 64
    ) -> None:
        self.module, self.federation = module, federation
        self.lr, self.batch_size = lr, batch_size
        self.initial = parameters_to_vector(module.parameters()).detach().clone()
        clients = federation.clients
        sizes = np.asarray(federation.samples, dtype=np.float64)
        self.prior = sizes / sizes.sum()
        self.moved = torch.zeros(clients, len(self.initial))  # models minus the initial one
        self.weights = np.tile(self.prior, (clients, 1))
        self.denominators = self.prior.copy()

    def run(self, order: Sequence[int]) -> None:
        """Train these clients one after the other."""
        for client in order:
            self.fold(client, self.train(client))

    def evaluate_all(self) -> float:
        """The mean accuracy over clients."""
        return float(np.mean([self.evaluate(client) for client in range(len(self.moved))]))

    def train(self, client: int) -> Tensor:
        vector_to_parameters(self.moved[client] + self.initial, self.module.parameters())
        self.module.train()
        optimiser = torch.optim.SGD(
            self.module.parameters(), lr=self.lr, momentum=0.9, weight_decay=1e-4
        )
        shard = self.federation.train[client]
        data = TensorDataset(self.federation.prepare(self.federation.x[shard]), self._y(shard))
        loader = DataLoader(data, batch_size=self.batch_size, shuffle=True)
        for _ in range(5):
            for x, y in loader:
                optimiser.zero_grad()
                loss = nn.functional.cross_entropy(self.module(x), y)
                torch.autograd.backward(loss)
                optimiser.step()
        return parameters_to_vector(self.module.parameters()).detach()

    def fold(self, client: int, theta: Tensor) -> None:
        moved = theta - self.initial
        self.moved[client] = moved
        lengths = self.moved.norm(dim=1).clamp_min(1e-12)
        likeness = self.moved @ moved / (lengths * lengths[client])
        row = project_to_simplex(self.prior + 0.75 * likeness.double().numpy())
        self.weights[client] = row
        self.denominators[client] = row[client]
        decay = (1 + STALENESS) ** -1.5
        for other in np.flatnonzero(self.weights[:, client]):
            if other != client:
                self.denominators[other] += self.weights[other, client]
                share = self.weights[other, client] / self.denominators[other] * decay
                self.moved[other].lerp_(moved, float(share))

    @torch.no_grad()
    def evaluate(self, client: int) -> float:
        vector_to_parameters(self.moved[client] + self.initial, self.module.parameters())
        self.module.eval()
        shard = self.federation.test[client]
        logits = self.module(self.federation.prepare(self.federation.x[shard]))
        return float((logits.argmax(1) == self._y(shard)).float().mean())

    def _y(self, shard: slice) -> Tensor:
        return self.federation.y[shard]


class PlainFedAsync(PlainLoop):
    """The same with one model for all."""

    def __init__(
        self, module: nn.Module, federation: Federation, lr: float, batch_size: int = 64
    ) -> None:
        super().__init__(module, federation, lr, batch_size)
        self.moved = torch.zeros(1, len(self.initial)).expand(federation.clients, -1)

    def fold(self, client: int, theta: Tensor) -> None:
        self.moved[0].lerp_(theta - self.initial, 0.6 * (1 + STALENESS) ** -0.5)
