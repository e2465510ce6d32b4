"""Synthetic clients for the problems other than classification, in groups that disagree.

In each, the same samples call for other targets in every group: one model for all does badly, one
model per group as well as the noise allows.
"""

from __future__ import annotations

from typing import Annotated, ClassVar

import numpy as np
from pydantic import Field

from polytempo.core.errors import PolytempoError
from polytempo.core.registry import Options
from polytempo.core.rng import rng
from polytempo.data.partition import Array, Positive
from polytempo.data.pool import Pool
from polytempo.data.source import SOURCES, Request
from polytempo.data.synthetic import Amount, Count, client_size, made_up

Size = Annotated[int, Field(ge=2)]


@SOURCES.register("synthetic-regression")
class SyntheticRegression(Options):
    """Each group has a random linear map of its own from Gaussian features to numbers.

    The targets' variance is about 1 + noise^2 for each output. The best model of a group has a mean
    squared error of noise^2.

    samples: mean number per client; `skew` is the spread of the logarithm of the sizes.
    """

    name: ClassVar[str]
    description: ClassVar[str] = "a linear map per group of clients, made from the seed"
    problem: ClassVar[str] = "regression"

    groups: Count = 4
    samples: Size = 100
    features: Count = 16
    outputs: Count = 1
    noise: Amount = 0.1
    skew: Amount = 0.3

    def __call__(self, request: Request) -> Pool:
        world = rng(request.seed, "data", self.name, "maps")
        maps = world.standard_normal((self.groups, self.features, self.outputs))
        maps /= np.sqrt(self.features)

        def client(group: int, own: np.random.Generator) -> tuple[Array, Array]:
            size = client_size(self.samples, self.skew, own)
            x = own.standard_normal((size, self.features))
            y = x @ maps[group] + self.noise * own.standard_normal((size, self.outputs))
            y = y[:, 0] if self.outputs == 1 else y
            return x.astype(np.float32), y.astype(np.float32)

        return made_up(self.name, request, self.groups, client, self.outputs, self.problem)


@SOURCES.register("synthetic-multilabel")
class SyntheticMultilabel(Options):
    """Each label is present on one side of a random plane, for about three samples of ten; the same
    plane has a different label in every group.

    samples: mean number per client; `skew` is the spread of the logarithm of the sizes.
    noise: relative to the spread of the samples across a plane.
    """

    name: ClassVar[str]
    description: ClassVar[str] = "labels by planes, exchanged between groups, made from the seed"
    problem: ClassVar[str] = "multilabel"

    groups: Count = 4
    samples: Size = 100
    features: Count = 32
    labels: Size = 8
    noise: Amount = 0.1
    skew: Amount = 0.3

    def __call__(self, request: Request) -> Pool:
        if self.groups > self.labels:
            raise PolytempoError(
                f"{self.name}: groups={self.groups} and labels={self.labels}; it needs as many "
                "labels as groups, so raise labels or lower groups"
            )
        world = rng(request.seed, "data", self.name, "planes")
        planes = world.standard_normal((self.features, self.labels)) / np.sqrt(self.features)

        def client(group: int, own: np.random.Generator) -> tuple[Array, Array]:
            size = client_size(self.samples, self.skew, own)
            x = own.standard_normal((size, self.features))
            across = x @ planes + self.noise * own.standard_normal((size, self.labels))
            y = np.roll(across > 0.5, group, axis=1)
            return x.astype(np.float32), y.astype(np.float32)

        return made_up(self.name, request, self.groups, client, self.labels, self.problem)


@SOURCES.register("synthetic-text")
class SyntheticText(Options):
    """Sequences of tokens 1, 2, ..., in which the next depends on the one before (a Markov chain);
    each group has a chain of its own.

    samples: mean number of sequences per client; `skew`: spread of the logarithm of the sizes.
    alpha: what follows a token is a draw from Dirichlet(alpha); small is easier to predict.
    """

    name: ClassVar[str]
    description: ClassVar[str] = "a Markov chain per group of clients, made from the seed"
    problem: ClassVar[str] = "next-token"

    groups: Count = 4
    samples: Size = 50
    length: Count = 20
    tokens: Size = 12
    alpha: Positive = 0.2
    skew: Amount = 0.3

    def __call__(self, request: Request) -> Pool:
        world = rng(request.seed, "data", self.name, "chains")
        chains = world.dirichlet(np.full(self.tokens, self.alpha), (self.groups, self.tokens))

        def client(group: int, own: np.random.Generator) -> tuple[Array, Array]:
            size = client_size(self.samples, self.skew, own)
            below = chains[group].cumsum(axis=1)
            below[:, -1] = 1  # whatever rounding says
            sequence = np.empty((size, self.length + 1), dtype=np.int64)
            sequence[:, 0] = own.integers(0, self.tokens, size)
            for place in range(self.length):
                drawn = own.random((size, 1))
                sequence[:, place + 1] = (drawn < below[sequence[:, place]]).argmax(axis=1)
            return sequence[:, :-1] + 1, sequence[:, 1:] + 1

        return made_up(self.name, request, self.groups, client, self.tokens + 1, self.problem)
