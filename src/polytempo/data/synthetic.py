"""Synthetic clients with known groups: Gaussian classes, and four ways for groups to differ."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

import numpy as np
from pydantic import Field

from polytempo.core.errors import PolytempoError
from polytempo.core.registry import Options
from polytempo.core.rng import rng
from polytempo.data.partition import Array, even_groups
from polytempo.data.pool import Pool
from polytempo.data.source import SOURCES, Request

Amount = Annotated[float, Field(ge=0, allow_inf_nan=False)]


@SOURCES.register("synthetic")
class Synthetic(Options):
    """Each class is a Gaussian around a random prototype; each client belongs to one group.

    groups: number of groups, even in size, spread at random over the client ids.
    kind: what sets groups apart. "labels": each has labels of its own. "rotation": the feature
        space is turned, each group its own way. "permutation": the same features bear another
        label in every group (concept shift). "noise": features are noisier from group to group,
        from half to two and a half times `noise`.
    samples: mean number per client; `skew` is the spread of the logarithm of the sizes.
    noise: standard deviation around the prototypes, which are about sqrt(2 * features) apart.
    """

    description: ClassVar[str] = "Gaussian classes in groups of clients, made from the seed"
    files: ClassVar[tuple[str, ...]] = ()

    groups: Annotated[int, Field(ge=1)] = 4
    kind: Literal["labels", "rotation", "permutation", "noise"] = "labels"
    samples: Annotated[int, Field(ge=2)] = 100
    features: Annotated[int, Field(ge=1)] = 32
    classes: Annotated[int, Field(ge=2)] = 10
    noise: Amount = 1.0
    skew: Amount = 0.3

    def __call__(self, request: Request) -> Pool:
        return self.generate(20 if request.clients is None else request.clients, request.seed)

    def generate(self, clients: int, seed: int) -> Pool:
        """The samples of that many clients, as users 0, 1, ..."""
        if self.groups > clients:
            raise PolytempoError(
                f"synthetic: groups={self.groups} for {clients} clients; use at least as many "
                "clients as groups"
            )
        if self.kind in ("labels", "permutation") and self.groups > self.classes:
            raise PolytempoError(
                f"synthetic: kind={self.kind} needs as many classes as groups, got "
                f"groups={self.groups} and classes={self.classes}; raise classes or lower groups"
            )
        member = even_groups(clients, self.groups, rng(seed, "data", "synthetic", "groups"))
        world = rng(seed, "data", "synthetic", "classes")
        prototypes = world.standard_normal((self.classes, self.features))
        order = world.permutation(self.classes)
        made = [
            self._client(int(member[client]), prototypes, order, seed, client)
            for client in range(clients)
        ]
        sizes = [len(y) for _, y in made]
        return Pool(
            name="synthetic",
            x=np.concatenate([x for x, _ in made]),
            y=np.concatenate([y for _, y in made]),
            classes=self.classes,
            users=np.repeat(np.arange(clients), sizes),
            groups=np.repeat(member, sizes),
        )

    def _client(
        self, group: int, prototypes: Array, order: Array, seed: int, client: int
    ) -> tuple[Array, Array]:
        own = rng(seed, "data", "synthetic", "client", client)
        # The mean of the lognormal factor is 1.
        factor = np.exp(self.skew * own.standard_normal() - self.skew**2 / 2)
        size = max(2, round(self.samples * float(factor)))
        held = np.arange(self.classes)
        if self.kind == "labels":
            held = np.array_split(order, self.groups)[group]
        y = own.choice(held, size)
        noise = self.noise
        if self.kind == "noise":
            noise *= float(np.linspace(0.5, 2.5, self.groups)[group])
        x = prototypes[y] + noise * own.standard_normal((size, self.features))
        if self.kind == "rotation":
            x = x @ _orthogonal(self.features, rng(seed, "data", "synthetic", "rotation", group))
        if self.kind == "permutation":
            # A shift along one random cycle: any two groups disagree about every class.
            place = np.argsort(order)
            y = order[(place[y] + group) % self.classes]
        return x.astype(np.float32), y.astype(np.int64)


def _orthogonal(size: int, random: np.random.Generator) -> Array:
    q, r = np.linalg.qr(random.standard_normal((size, size)))
    # The signs of the diagonal make the draw uniform over all rotations and reflections.
    signed: Array = q * np.sign(np.diag(r))
    return signed
