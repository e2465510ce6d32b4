"""Synthetic clients with known groups: Gaussian classes, and four ways for groups to differ."""

from __future__ import annotations

from collections.abc import Callable
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
Count = Annotated[int, Field(ge=1)]


def made_up(
    name: str,
    request: Request,
    groups: int,
    client: Callable[[int, np.random.Generator], tuple[Array, Array]],
    outputs: int,
    problem: str = "classification",
) -> Pool:
    """The samples of all clients, as users 0, 1, ..., each in one of the groups, which are even in
    size; `client` makes those of a client from its group and its own random numbers."""
    clients = 20 if request.clients is None else request.clients
    if groups > clients:
        raise PolytempoError(
            f"{name}: groups={groups} for {clients} clients; use at least as many clients as groups"
        )
    member = even_groups(clients, groups, rng(request.seed, "data", name, "groups"))
    found = [
        client(group, rng(request.seed, "data", name, "client", number))
        for number, group in enumerate(member.tolist())
    ]
    sizes = [len(y) for _, y in found]
    return Pool(
        name=name,
        x=np.concatenate([x for x, _ in found]),
        y=np.concatenate([y for _, y in found]),
        outputs=outputs,
        users=np.repeat(np.arange(clients), sizes),
        groups=np.repeat(member, sizes),
        problem=problem,
    )


def client_size(mean: int, skew: float, random: np.random.Generator) -> int:
    """A lognormal number of samples, at least 2."""
    # The mean of the lognormal factor is 1.
    factor = np.exp(skew * random.standard_normal() - skew**2 / 2)
    return max(2, round(mean * float(factor)))


@SOURCES.register("synthetic")
class Synthetic(Options):
    """Each class is a Gaussian around a random prototype; each client belongs to one group.

    groups: number of groups, even in size, spread at random over the client ids.
    kind: what sets groups apart. "labels": each has labels of its own. "rotation": the feature
        space is rotated, differently for each group. "permutation": the same features have a
        different label in every group (concept shift). "noise": features get noisier by group,
        from half to two and a half times `noise`.
    samples: mean number per client; `skew` is the spread of the logarithm of the sizes.
    noise: standard deviation around the prototypes, which are about sqrt(2 * features) apart.
    """

    description: ClassVar[str] = "Gaussian classes in groups of clients, made from the seed"

    groups: Count = 4
    kind: Literal["labels", "rotation", "permutation", "noise"] = "labels"
    samples: Annotated[int, Field(ge=2)] = 100
    features: Count = 32
    classes: Annotated[int, Field(ge=2)] = 10
    noise: Amount = 1.0
    skew: Amount = 0.3

    def __call__(self, request: Request) -> Pool:
        if self.kind in ("labels", "permutation") and self.groups > self.classes:
            raise PolytempoError(
                f"synthetic: kind={self.kind} needs as many classes as groups, got "
                f"groups={self.groups} and classes={self.classes}; raise classes or lower groups"
            )
        world = rng(request.seed, "data", "synthetic", "classes")
        prototypes = world.standard_normal((self.classes, self.features))
        order = world.permutation(self.classes)

        def client(group: int, own: np.random.Generator) -> tuple[Array, Array]:
            return self._client(group, own, prototypes, order, request.seed)

        return made_up("synthetic", request, self.groups, client, self.classes)

    def _client(
        self, group: int, own: np.random.Generator, prototypes: Array, order: Array, seed: int
    ) -> tuple[Array, Array]:
        size = client_size(self.samples, self.skew, own)
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
