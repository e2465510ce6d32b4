"""The [n, d] matrix of per-client vectors. Every loop over n times d lives here.

Rows are stored as their displacement from `origin` (zero, or the initial model), because that is
what similarities are taken on: the origin decides whether "cosine" compares models as they are or
what training has changed in them. Mixing weights sum to 1, so they act on displacements as they do
on models.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from polytempo.core.task import Measure

FloatArray = np.ndarray[Any, np.dtype[np.float64]]


class ModelBank:
    """One vector per client; all start as `initial`."""

    def __init__(self, clients: int, initial: Tensor, origin: Tensor | None = None) -> None:
        self.origin = torch.zeros_like(initial) if origin is None else origin.clone()
        self._rows = (initial - self.origin).repeat(clients, 1)
        self._squares = torch.mv(self._rows, self._rows[0]) if clients else torch.empty(0)

    def __len__(self) -> int:
        return self._rows.shape[0]

    def row(self, client: int) -> Tensor:
        """A copy of the client's vector."""
        return self._rows[client] + self.origin

    def set(self, client: int, vector: Tensor) -> None:
        """Replace the client's vector."""
        torch.sub(vector, self.origin, out=self._rows[client])
        self._squares[client] = self._rows[client].dot(self._rows[client])

    def mix(self, vector: Tensor, weights: FloatArray) -> None:
        """`row[j] <- weights[j] * vector + (1 - weights[j]) * row[j]` for every weight not 0."""
        moved = vector - self.origin
        for j in np.flatnonzero(weights):
            row = self._rows[j]
            row.lerp_(moved, float(weights[j]))
            self._squares[j] = row.dot(row)

    def weighted_sum(self, weights: FloatArray) -> Tensor:
        """`sum_j weights[j] * row[j]`, for weights that sum to 1."""
        picked = torch.from_numpy(weights).to(self._rows.dtype)
        return self._rows.T.mv(picked) + self.origin

    def dissimilarity(self, vector: Tensor, measure: Measure) -> FloatArray:
        """How unlike `vector` every row is, on a scale on which one gamma fits all measures.

        cosine: `-cos`, in [-1, 1]; a zero vector has cosine 0 with everything.
        inner: `-<.,.>`, divided by the row's largest absolute value: in [-1, 1].
        l1, l2: distances, divided by the largest of them: in [0, 1].
        """
        moved = vector - self.origin
        if measure in ("cosine", "inner"):
            products = self._rows.mv(moved).double().numpy()
            if measure == "inner":
                largest = float(np.abs(products).max(initial=0.0))
                return np.asarray(-products / max(largest, 1e-30), dtype=np.float64)
            norms = self._squares.double().clamp_min(0).sqrt().numpy() * float(moved.norm())
            cosines: FloatArray = np.zeros_like(products)
            np.divide(products, norms, out=cosines, where=norms > 0)
            return -np.clip(cosines, -1.0, 1.0)
        power = 1.0 if measure == "l1" else 2.0
        rows = [float(torch.linalg.vector_norm(row - moved, power)) for row in self._rows]
        distances = np.array(rows, dtype=np.float64)
        return distances / max(float(distances.max(initial=0.0)), 1e-30)

    def state_dict(self) -> dict[str, Tensor]:
        return {"rows": self._rows, "squares": self._squares, "origin": self.origin}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        self._rows.copy_(state["rows"])
        self._squares.copy_(state["squares"])
        self.origin.copy_(state["origin"])
