"""What clustered methods share: who is in which cluster, and a model for each."""

from __future__ import annotations

from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from polytempo.core.bank import FloatArray
from polytempo.core.strategy import Context, IntArray, Strategy


class Clustered(Strategy):
    """All clients begin in one cluster, 0. A cluster that is split keeps its number for the part
    with its first client; the other parts get new numbers, and begin with its model."""

    state: ClassVar[tuple[str, ...]] = ("cluster", "models", "revisions", "changes")

    def setup(self, context: Context) -> None:
        super().setup(context)
        self.cluster: IntArray = np.zeros(context.clients, dtype=np.int64)  # -1: in none yet
        self.models: list[Tensor] = [context.initial]
        self.revisions: list[int] = [0]  # of each cluster: which change was its last
        self.changes = 0

    def members(self, number: int) -> IntArray:
        """The clients of that cluster, in their order."""
        return np.flatnonzero(self.cluster == number)

    def model_for(self, client: int) -> Tensor:
        """The model of the client's cluster; for one that is in none, the mean of all clusters'
        models by their sizes."""
        number = int(self.cluster[client])
        if number >= 0:
            return self.models[number]
        sizes = np.bincount(self.cluster[self.cluster >= 0], minlength=len(self.models))
        weights = torch.from_numpy(sizes / sizes.sum()).to(self.models[0].dtype)
        mean: Tensor = weights @ torch.stack(self.models)
        return mean

    def revision(self, client: int) -> int:
        number = int(self.cluster[client])
        return self.revisions[number] if number >= 0 else self.changes

    def clusters(self) -> IntArray:
        return self.cluster.copy()

    def change(self, number: int, model: Tensor) -> None:
        """The cluster's model is this one from now on."""
        self.changes += 1
        self.models[number] = model
        self.revisions[number] = self.changes

    def split(self, number: int, parts: IntArray) -> None:
        """`parts`: of each member of the cluster, in the order of `members`, the number of its
        part; that of the first member is 0."""
        members = self.members(number)
        for part in range(1, int(parts.max()) + 1):
            self.cluster[members[parts == part]] = len(self.models)
            self.models.append(self.models[number])
            self.revisions.append(self.revisions[number])


def unknown(clients: int) -> FloatArray:
    """Similarities of which none is known yet."""
    similarity: FloatArray = np.full((clients, clients), np.nan)
    np.fill_diagonal(similarity, 1.0)
    return similarity
