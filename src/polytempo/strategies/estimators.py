"""How a client's row of the collaboration graph is estimated: pFedGraph's way, FedAMP's, FedSaC's.

An estimator is an object of its own, an option of the strategies that use one (`PACE(graph=...)`,
`--strategy pace:graph=fedamp,graph.sigma=5`), shared by the synchronous form of a method, its naive
asynchronous form and its form on PACE's machinery. It is told how unlike a client is all others and
answers with weights that sum to 1.

pFedGraph and FedSaC solve

    minimise  ||x - p||^2 + <q, x>   over the probability simplex,

with p the relative sample sizes and q a penalty on each client. Completing the square, x is the
Euclidean projection of `p - q / 2` onto the simplex: a sort and a cumulative sum, exact, no solver.
"""

from __future__ import annotations

from typing import Annotated, Literal

import numpy as np
import torch
from pydantic import BeforeValidator, Field
from torch import Tensor

from polytempo.core.bank import FloatArray
from polytempo.core.errors import Refused
from polytempo.core.objective import Measure
from polytempo.core.registry import Options, Registry
from polytempo.core.strategy import State


def project_to_simplex(point: FloatArray) -> FloatArray:
    """The nearest point with non-negative entries that sum to 1."""
    descending = np.sort(point)[::-1]
    # the threshold that makes the k largest entries sum to 1, for k = 1, 2, ...
    thresholds = (np.cumsum(descending) - 1.0) / np.arange(1, len(point) + 1)
    kept = np.flatnonzero(descending > thresholds)[-1]
    projected: FloatArray = np.maximum(point - thresholds[kept], 0.0)
    return projected


class GraphEstimator(Options):
    """Base of the estimators. Override `row`.

    `reference`: models are compared as they are ("model", the papers' formulas) or by their
    displacement from the common initial model (pFedGraph's practice: far more telling, since models
    that share an initialisation all look alike).
    """

    reference: Literal["model", "displacement"] = "displacement"

    @property
    def measure(self) -> Measure:
        """How models are compared (`ModelBank.dissimilarity`)."""
        return "cosine"

    @property
    def directions(self) -> int:
        """Principal directions of its features that each client uploads; with 0, none."""
        return 0

    def row(
        self, me: int, unlike: FloatArray, prior: FloatArray, overlap: FloatArray | None
    ) -> FloatArray:
        """The weights of client `me`, which is `unlike[j]` client j and whose features overlap
        `overlap[j]` (0 to 1) with those of client j."""
        raise NotImplementedError


GRAPHS: Registry[GraphEstimator] = Registry("graph", GraphEstimator)
Graph = Annotated[GraphEstimator, BeforeValidator(GRAPHS.create)]


@GRAPHS.register("pfedgraph")
class Likeness(GraphEstimator):
    """pFedGraph's and PACE's: `q = gamma * unlike` (PACE Eq. 2 and 15).

    `gamma`: how much likeness counts against sample size (PACE's gamma and alpha; the reciprocal of
    the alpha of pFedGraph's public code). `similarity`: cosine, inner, l1 or l2. `clip`: cosines
    above it count as 1 (pFedGraph's practice, 0.9).
    """

    gamma: Annotated[float, Field(ge=0)] = 1.5
    similarity: Measure = "cosine"
    clip: float | None = None

    @property
    def measure(self) -> Measure:
        return self.similarity

    def row(
        self, me: int, unlike: FloatArray, prior: FloatArray, overlap: FloatArray | None
    ) -> FloatArray:
        clip = self.clip if self.similarity == "cosine" else None
        return project_to_simplex(prior - self.gamma / 2 * clipped(unlike, clip))


@GRAPHS.register("fedamp")
class Attention(GraphEstimator):
    """FedAMP's, in its heuristic form: a fixed weight for oneself, the rest by a softmax.

    `x_i = self_weight`, `x_j = (1 - self_weight) e^(sigma cos_ij) / sum_h e^(sigma cos_ih)` over
    all others.
    """

    sigma: Annotated[float, Field(ge=0)] = 10.0
    self_weight: Annotated[float, Field(ge=0, le=1)] = 0.7

    def row(
        self, me: int, unlike: FloatArray, prior: FloatArray, overlap: FloatArray | None
    ) -> FloatArray:
        others = np.delete(-self.sigma * unlike, me)
        if not len(others):
            return np.ones(1)
        weights = np.exp(others - others.max())
        row = (1 - self.self_weight) * weights / weights.sum()
        return np.insert(row, me, self.self_weight)


@GRAPHS.register("fedsac")
class Complement(GraphEstimator):
    """FedSaC's: `q = alpha * overlap + beta * unlike`: models that are alike, features that differ.

    `overlap` is the cosine of the mean principal angle between the spaces in which the clients'
    features vary most (`k` principal directions each); of a client that has not uploaded yet it
    counts as 1, so that nobody is preferred for being unknown. `clip` as in pFedGraph.
    """

    alpha: Annotated[float, Field(ge=0)] = 1.5
    beta: Annotated[float, Field(ge=0)] = 1.5
    k: Annotated[int, Field(ge=1)] = 3
    clip: float | None = 0.9

    @property
    def directions(self) -> int:
        return self.k

    def row(
        self, me: int, unlike: FloatArray, prior: FloatArray, overlap: FloatArray | None
    ) -> FloatArray:
        assert overlap is not None
        penalty = self.alpha * overlap + self.beta * clipped(unlike, self.clip)
        return project_to_simplex(prior - penalty / 2)


def clipped(unlike: FloatArray, clip: float | None) -> FloatArray:
    """Cosines (`-unlike`) above `clip` count as 1."""
    return unlike if clip is None else np.where(-unlike > clip, -1.0, unlike)


class Bases:
    """The last basis of its features that each client uploaded."""

    def __init__(self, clients: int) -> None:
        self._known = np.zeros(clients, dtype=np.bool_)
        self._bases = torch.empty(clients, 0, 0, dtype=torch.float64)

    def check(self, client: int, basis: Tensor) -> None:
        """Refuse what is not a basis, or cannot be compared with the others."""
        products = basis.double() @ basis.double().T  # a projection, if rows are rotated too
        if not bool((products @ products - products).abs().max() < 0.01):
            raise Refused(
                f"client {client} sent a basis whose rows are neither orthonormal nor zero: send "
                "the principal directions of the features"
            )
        if self._known.any() and basis.shape != self._bases.shape[1:]:
            raise Refused(
                f"client {client} sent a basis of shape {list(basis.shape)}, others "
                f"{list(self._bases.shape[1:])}: it trains a different model"
            )

    def set(self, client: int, basis: Tensor) -> None:
        """Remember the client's basis, whose rows are orthonormal (zero, beyond its rank)."""
        self.check(client, basis)
        if not self._known.any():
            self._bases = basis.new_zeros(len(self._known), *basis.shape, dtype=torch.float64)
        self._bases[client] = basis
        self._known[client] = True

    def overlap(self, client: int) -> FloatArray:
        """Of the client's space with everybody's: the cosine of the mean principal angle, 1 if
        either is not known or a point. The cosines of the angles are the singular values of
        `A B^T`; there are as many angles as the smaller space has dimensions."""
        overlap: FloatArray = np.ones(len(self._known))
        if not self._known[client]:
            return overlap
        bases = self._bases[torch.from_numpy(self._known)]
        angles = torch.linalg.svdvals(bases @ self._bases[client].T).clamp(0, 1).arccos()
        ranks = bases.square().sum((1, 2)).round()  # the trace of a projection
        common = ranks.clamp(max=float(self._bases[client].square().sum().round()))
        counted = torch.arange(angles.shape[1]) < common[:, None]  # the others are of zero rows
        means = (angles * counted).sum(1) / common.clamp(min=1)
        overlap[self._known] = means.cos().numpy()
        overlap[client] = 1.0
        return overlap

    def state_dict(self) -> State:
        return {"known": self._known, "bases": self._bases}

    def load_state_dict(self, state: State) -> None:
        self._known, self._bases = np.array(state["known"]), state["bases"].clone()
