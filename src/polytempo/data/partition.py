"""Who holds what: ways to divide a pool of labelled samples among clients.

(Targets that are not labels are binned for this purpose: see `targets.strata`.)

A partitioner is called with the labels and returns, for each client, the positions of its samples.
Positions are disjoint and no client is empty; all samples are used, except by `natural` when it
takes only some of the users. Ground truth groups are returned where the partition has them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Protocol

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from polytempo.core.errors import PolytempoError
from polytempo.core.registry import Options, Registry

Array = NDArray[Any]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Size = Annotated[int, Field(ge=1)]

# The worst case in use, CIFAR-10 with 100 clients, Dirichlet(0.1) balanced and 40 samples at least,
# accepts about one draw in 400; this many draws take a few seconds before we give up.
TRIES = 10_000


@dataclass(frozen=True)
class Assignment:
    """The positions of each client's samples, and each client's true group where there is one."""

    indices: list[Array]
    groups: Array | None = None


class Partitioner(Protocol):
    """Divides samples with labels `y` (and user ids `users`, if known) among `clients`."""

    def __call__(
        self, y: Array, clients: int, rng: np.random.Generator, users: Array | None = None
    ) -> Assignment: ...


PARTITIONS: Registry[Partitioner] = Registry("partition")


def even_groups(clients: int, groups: int, rng: np.random.Generator) -> Array:
    """A group for each client, at random, sizes as even as possible.

    At random, because low client ids in one group would confound it with whatever else goes by id.
    """
    return rng.permutation(np.arange(clients) % groups)


def proportional(total: int, weights: Sequence[float] | Array) -> Array:
    """Cut `total` into whole parts in proportion to `weights`, by the largest remainder."""
    share = np.asarray(weights, dtype=np.float64)
    share = share / share.sum() * total
    # A hair more, or 0.3 of 10 labels might be 2 and a remainder of almost 1.
    parts: Array = np.floor(share + 1e-9).astype(np.int64)
    remainder = share - parts
    parts[np.argsort(-remainder, kind="stable")[: total - int(parts.sum())]] += 1
    return parts


def _none_empty(parts: Array) -> Array:
    """Lift empty parts to 1, at the cost of the largest."""
    for empty in np.flatnonzero(parts == 0):
        parts[np.argmax(parts)] -= 1
        parts[empty] = 1
    return parts


def _check(y: Array, clients: int) -> None:
    if clients < 1:
        raise PolytempoError(f"clients={clients}: at least 1 is needed")
    if clients > len(y):
        raise PolytempoError(
            f"{clients} clients cannot share {len(y)} samples: use at most {len(y)} clients, "
            "or more data"
        )


def _deal(y: Array, labels: Array, counts: Array, rng: np.random.Generator) -> list[Array]:
    """Give `counts[label, client]` samples, drawn at random, to every client."""
    held: list[list[Array]] = [[] for _ in range(counts.shape[1])]
    for label, row in zip(labels, counts, strict=True):
        shuffled = rng.permutation(np.flatnonzero(y == label))
        for client, part in enumerate(np.split(shuffled, np.cumsum(row)[:-1])):
            held[client].append(part)
    return [np.sort(np.concatenate(parts)) for parts in held]


def _draw_dirichlet(
    sizes: Array, clients: int, alpha: float, balanced: bool, rng: np.random.Generator
) -> Array:
    """One draw of counts[label, client]; only counts, so that a rejected draw costs little."""
    full = sizes.sum() / clients
    held = np.zeros(clients, dtype=np.int64)
    counts = np.zeros((len(sizes), clients), dtype=np.int64)
    for label, size in enumerate(sizes):
        share = rng.dirichlet(np.full(clients, alpha))
        if balanced:
            # Before the last label is dealt, the clients together hold less than N, so somebody
            # is always below N/n; but all who are may have drawn a share of exactly 0.
            below = held < full
            share = np.where(below, share, 0.0)
            share = share / share.sum() if share.sum() > 0 else below / below.sum()
        cuts = (np.cumsum(share) * size).astype(np.int64)
        # Rounding must not take samples from the last client with a share, nor give them to one
        # that is full: the rest goes to whoever has the largest share.
        counts[label] = np.diff(np.minimum(cuts, size), prepend=0)
        counts[label, int(np.argmax(share))] += size - counts[label].sum()
        held += counts[label]
    return counts


def _until(draw: Callable[[], Array], least: int, what: str) -> Array:
    """Draw counts until every client holds at least `least` samples."""
    for _ in range(TRIES):
        counts = draw()
        if counts.sum(axis=0).min() >= least:
            return counts
    raise PolytempoError(
        f"{what}: none of {TRIES} draws gave each of {counts.shape[1]} clients "
        f"{least} samples; raise alpha, use fewer clients"
        + (", or lower min_size" if least > 1 else ", or another partition, such as iid")
    )


def _least(given: int | None, usual: int, samples: int, clients: int) -> int:
    """The minimum size: as given, or the usual one, lowered when there is little data to share."""
    if given is None:
        return max(1, min(usual, samples // (10 * clients)))
    if given * clients > samples:
        raise PolytempoError(
            f"min_size={given} for {clients} clients needs {given * clients} samples, but there "
            f"are {samples}; use min_size={samples // clients} or less, or fewer clients"
        )
    return given


@PARTITIONS.register("iid")
class IID(Options):
    """Every client gets a random sample of the same size."""

    def __call__(
        self, y: Array, clients: int, rng: np.random.Generator, users: Array | None = None
    ) -> Assignment:
        _check(y, clients)
        parts = np.array_split(rng.permutation(len(y)), clients)
        return Assignment([np.sort(part) for part in parts])


@PARTITIONS.register("dirichlet")
class Dirichlet(Options):
    """Label skew: each label is divided among the clients by a draw from Dirichlet(alpha).

    alpha: small is more skewed (0.1 in most papers).
    balanced: clients that already hold N/n samples get nothing of the labels that follow, as PACE's
        authors do. It changes the level of accuracy, so figures must say which form they use.
    min_size: draw again until every client has that many samples (usually 10, balanced 40; by
        default lowered to a tenth of the mean size when that is smaller).
    """

    by_label: ClassVar[bool] = True

    alpha: Positive = 0.1
    balanced: bool = False
    min_size: Size | None = None

    def __call__(
        self, y: Array, clients: int, rng: np.random.Generator, users: Array | None = None
    ) -> Assignment:
        _check(y, clients)
        labels, sizes = np.unique(y, return_counts=True)
        least = _least(self.min_size, 40 if self.balanced else 10, len(y), clients)
        counts = _until(
            lambda: _draw_dirichlet(sizes, clients, self.alpha, self.balanced, rng),
            least,
            f"dirichlet(alpha={self.alpha:g}{', balanced' if self.balanced else ''})",
        )
        return Assignment(_deal(y, labels, counts, rng))


@PARTITIONS.register("pathological")
class Pathological(Options):
    """Each client holds only a few labels (#C in the papers), all in equal parts.

    labels: labels per client.
    grouped: False draws the labels of each client at random, every label with as many owners as
        any other (give or take one). True forms groups of clients with the same labels, 0 and 1,
        2 and 3, ...: CIFAR-10 with 100 clients and 2 labels gives five groups of twenty. When the
        labels do not divide evenly, the last group has fewer.
    """

    by_label: ClassVar[bool] = True

    labels: Size = 2
    grouped: bool = False

    def __call__(
        self, y: Array, clients: int, rng: np.random.Generator, users: Array | None = None
    ) -> Assignment:
        _check(y, clients)
        labels, sizes = np.unique(y, return_counts=True)
        if self.labels > len(labels):
            raise PolytempoError(
                f"pathological: labels={self.labels}, but the data has {len(labels)} labels; "
                f"use {len(labels)} or fewer"
            )
        groups = None
        if self.grouped:
            groups, owns = self._group(len(labels), clients, rng)
        else:
            owns = self._draw(len(labels), clients, rng)
        counts = np.zeros(owns.shape, dtype=np.int64)
        for label, size in enumerate(sizes):
            # Shuffled, so that the odd samples do not all go to the first clients.
            owners = rng.permutation(np.flatnonzero(owns[label]))
            counts[label, owners] = size // len(owners)
            counts[label, owners[: size % len(owners)]] += 1
        if (counts.sum(axis=0) == 0).any():
            raise PolytempoError(
                f"pathological: some label has fewer samples than the clients that share it "
                f"({sizes.min()} samples in the smallest); use fewer clients or more data"
            )
        return Assignment(_deal(y, labels, counts, rng), groups)

    def _draw(self, labels: int, clients: int, rng: np.random.Generator) -> Array:
        if clients * self.labels < labels:
            raise PolytempoError(
                f"pathological: {clients} clients with {self.labels} labels each cannot own all "
                f"{labels} labels; use at least {-(-labels // self.labels)} clients or "
                f"{-(-labels // clients)} labels"
            )
        owns = np.zeros((labels, clients), dtype=bool)
        for client in range(clients):
            # The labels with the fewest owners so far, ties at random: no label stays behind.
            order = np.lexsort((rng.random(labels), owns.sum(axis=1)))
            owns[order[: self.labels], client] = True
        return owns

    def _group(self, labels: int, clients: int, rng: np.random.Generator) -> tuple[Array, Array]:
        groups = -(-labels // self.labels)
        if clients < groups:
            raise PolytempoError(
                f"pathological: {labels} labels in groups of {self.labels} make {groups} groups, "
                f"more than {clients} clients; use at least {groups} clients or more labels each"
            )
        member = even_groups(clients, groups, rng)
        return member, (np.arange(labels) // self.labels)[:, None] == member[None, :]


@PARTITIONS.register("label-groups")
class LabelGroups(Options):
    """CASA's label skew: groups of clients, each with labels of its own.

    proportions: the groups' shares, of the clients and of the labels alike.
    alpha: Dirichlet skew among the clients of one group.
    min_size: as for `dirichlet`.
    """

    by_label: ClassVar[bool] = True

    proportions: tuple[Positive, ...] = (0.2, 0.2, 0.3, 0.3)
    alpha: Positive = 1.0
    min_size: Size | None = None

    def __call__(
        self, y: Array, clients: int, rng: np.random.Generator, users: Array | None = None
    ) -> Assignment:
        _check(y, clients)
        labels, sizes = np.unique(y, return_counts=True)
        groups = len(self.proportions)
        if not 1 <= groups <= min(clients, len(labels)):
            raise PolytempoError(
                f"label-groups: {groups} proportions for {clients} clients and {len(labels)} "
                "labels; give at least one, and no more than there are clients or labels"
            )
        of_client = np.repeat(
            np.arange(groups), _none_empty(proportional(clients, self.proportions))
        )
        of_client = rng.permutation(of_client)
        of_label = np.repeat(
            np.arange(groups), _none_empty(proportional(len(labels), self.proportions))
        )
        least = _least(self.min_size, 10, len(y), clients)
        counts = np.zeros((len(labels), clients), dtype=np.int64)
        for group in range(groups):
            members, own = np.flatnonzero(of_client == group), np.flatnonzero(of_label == group)
            counts[np.ix_(own, members)] = self._draw(sizes[own], len(members), least, rng)
        return Assignment(_deal(y, labels, counts, rng), of_client)

    def _draw(self, sizes: Array, clients: int, least: int, rng: np.random.Generator) -> Array:
        def draw() -> Array:
            return _draw_dirichlet(sizes, clients, self.alpha, False, rng)

        return _until(draw, least, f"label-groups(alpha={self.alpha:g})")


@PARTITIONS.register("natural")
class Natural(Options):
    """One client per user of the data set; with fewer clients, that many users drawn at random.

    min_size: leave out users with fewer samples, training and test together.
    """

    min_size: Size | None = None

    def eligible(self, users: Array) -> Array:
        """The users that may become clients."""
        known, sizes = np.unique(users, return_counts=True)
        kept = known[sizes >= (self.min_size or 1)]
        if len(kept) == 0:
            raise PolytempoError(
                f"natural: min_size={self.min_size}, but the largest user has {sizes.max()} "
                "samples; use a smaller min_size"
            )
        return kept

    def __call__(
        self, y: Array, clients: int, rng: np.random.Generator, users: Array | None = None
    ) -> Assignment:
        if users is None:
            raise PolytempoError(
                "natural: this data set has no users; choose another partition, such as dirichlet"
            )
        _check(y, clients)
        known = self.eligible(users)
        if clients > len(known):
            enough = f" with {self.min_size} samples or more" if self.min_size else ""
            raise PolytempoError(
                f"natural: {clients} clients, but the data has {len(known)} users{enough}; "
                f"use clients={len(known)} or fewer"
            )
        if clients < len(known):
            known = np.sort(rng.choice(known, clients, replace=False))
        return Assignment([np.flatnonzero(users == user) for user in known])


@PARTITIONS.register("quantity")
class Quantity(Options):
    """Quantity skew: the same mixture of labels for all, sizes lognormal.

    sigma: spread of the logarithm of the sizes; 0 is all equal.
    min_size: given to every client first (10, or a tenth of the mean size when that is smaller).
    """

    sigma: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 1.0
    min_size: Size | None = None

    def __call__(
        self, y: Array, clients: int, rng: np.random.Generator, users: Array | None = None
    ) -> Assignment:
        _check(y, clients)
        least = _least(self.min_size, 10, len(y), clients)
        # Relative to the largest, so that no sigma overflows.
        weights = self.sigma * rng.standard_normal(clients)
        spare = len(y) - least * clients
        sizes = least + proportional(spare, np.exp(weights - weights.max()))
        parts = np.split(rng.permutation(len(y)), np.cumsum(sizes)[:-1])
        return Assignment([np.sort(part) for part in parts])
