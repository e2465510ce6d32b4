"""Clients and their data: the object that simulations and experiments take."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from html import escape
from pathlib import Path
from typing import Any

import numpy as np
import torch

from polytempo.core.errors import PolytempoError
from polytempo.core.rng import rng
from polytempo.data.assemble import (
    apply_shift,
    moments,
    order_clients,
    spell,
    to_tensor,
    true_groups,
    verify,
)
from polytempo.data.npz import pool_clients, read_npz
from polytempo.data.own import arrays_of, group_numbers, listed
from polytempo.data.partition import PARTITIONS, Array, Natural, Partitioner
from polytempo.data.pool import Pool, features, user_ids
from polytempo.data.shift import SHIFTS, Shift
from polytempo.data.source import Request
from polytempo.data.sources import is_path, open_pool
from polytempo.data.targets import LABELLED, kind_of, number_of_outputs, strata, targets
from polytempo.data.text import Tokenizer

PartitionSpec = str | Mapping[str, Any] | Partitioner
ShiftSpec = str | Mapping[str, Any] | Shift


@dataclass(frozen=True, eq=False, repr=False)
class Federation:
    """The data of all clients, ordered by client: its training samples, then its test samples.

    So every client's shard is a view, `x[train[i]]` or `x[test[i]]`, and nothing is copied.

    x: uint8 images [N, C, H, W], float32 features, or int64 tokens [N, length].
    y: what the problem is about: labels [N], 0 or 1 [N, labels], numbers [N] or [N, outputs], or
        tokens [N, length].
    outputs: how many numbers a model outputs, per sample or (next-token) per token.
    problem: "classification", "multilabel", "regression" or "next-token".
    groups: the true group of each client, where there is one.
    mean, std: per channel, for images; `prepare` applies them.
    partition: how the samples were divided, as a table of settings.
    names: what clients are called, where they have names.
    tokenizer: digest of the tokenizer whose tokens these are; None: texts are numbered words.
    """

    name: str
    x: torch.Tensor
    y: torch.Tensor
    train: tuple[slice, ...]
    test: tuple[slice, ...]
    outputs: int
    groups: Array | None
    mean: tuple[float, ...] | None
    std: tuple[float, ...] | None
    vocabulary: int | None
    description: str
    partition: Mapping[str, Any]
    problem: str = "classification"
    names: tuple[str, ...] | None = None
    tokenizer: str | None = None

    @cached_property
    def digest(self) -> str:
        """A hash of all samples and of who holds them."""
        digest = hashlib.blake2b(repr((self.train, self.test)).encode(), digest_size=16)
        for tensor in (self.x, self.y):
            digest.update(tensor.contiguous().numpy().view(np.uint8).data)
        return digest.hexdigest()

    @property
    def clients(self) -> int:
        """Number of clients."""
        return len(self.train)

    def __repr__(self) -> str:
        shape = "x".join(map(str, self.shape))
        train, test = sum(self.samples), sum(part.stop - part.start for part in self.test)
        return (
            f"<Federation {self.description}: {train:,} training and {test:,} test samples of "
            f"{shape}, {self.problem} with {self.outputs} outputs>"
        )

    def _repr_html_(self) -> str:
        sizes = np.array(self.samples)
        rows = {
            "clients": f"{self.clients:,}",
            "problem": f"{self.problem}, {self.outputs} outputs",
            "a sample": f"{str(self.x.dtype).removeprefix('torch.')} of shape {list(self.shape)}",
            "training samples": f"{sizes.sum():,}; per client {sizes.min():,} to {sizes.max():,}, "
            f"median {np.median(sizes):,.0f}",
            "test samples": f"{sum(part.stop - part.start for part in self.test):,}",
            "true groups": "-" if self.groups is None else str(len(np.unique(self.groups))),
        }
        lines = "".join(f"<tr><th>{k}</th><td>{escape(v)}</td></tr>" for k, v in rows.items())
        return f"<p>{escape(self.description)}</p><table>{lines}</table>"

    def name_of(self, client: int) -> str:
        """What the client is called: its own name, else its number."""
        return str(client) if self.names is None else self.names[client]

    @cached_property
    def samples(self) -> list[int]:
        """Number of training samples of each client."""
        return [part.stop - part.start for part in self.train]

    @cached_property
    def tested(self) -> list[int]:
        """The clients that have test samples."""
        return [client for client, part in enumerate(self.test) if part.stop > part.start]

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of one sample."""
        return tuple(self.x.shape[1:])

    def prepare(self, x: torch.Tensor) -> torch.Tensor:
        """A batch as a model wants it: uint8 becomes normalised float32, the rest is unchanged."""
        if x.dtype != torch.uint8:
            return x
        ready = x.to(torch.float32).div_(255)
        if self._scale is None:
            return ready
        mean, std = (each.to(x.device) for each in self._scale)
        return ready.sub_(mean).div_(std)

    @cached_property
    def _scale(self) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Mean and deviation, in the shape of images."""
        if self.mean is None or self.std is None:
            return None
        return torch.tensor(self.mean).view(-1, 1, 1), torch.tensor(self.std).view(-1, 1, 1)

    @property
    def labelled(self) -> bool:
        """Whether samples have labels."""
        return self.problem in LABELLED

    @property
    def classes(self) -> int:
        """Number of labels."""
        if not self.labelled:
            raise PolytempoError(
                f"{self.name} has no labels: it is for {self.problem}, with {self.outputs} outputs"
            )
        return self.outputs

    def label_counts(self) -> Array:
        """Samples of each label that each client holds, [clients, classes], train and test."""
        if not self.labelled:
            raise PolytempoError(
                f"{self.name} is for {self.problem} and has no labels to count; use data for "
                "classification or multilabel"
            )
        y = self.y.numpy()
        if self.problem == "multilabel":
            return np.stack(
                [
                    y[train.start : test.stop].sum(axis=0).astype(np.int64)
                    for train, test in zip(self.train, self.test, strict=True)
                ]
            )
        return np.stack(
            [
                np.bincount(y[train], minlength=self.classes)
                + np.bincount(y[test], minlength=self.classes)
                for train, test in zip(self.train, self.test, strict=True)
            ]
        )

    @classmethod
    def load(
        cls,
        name: str | Path | Mapping[str, Any],
        *,
        clients: int | None = None,
        partition: PartitionSpec | None = None,
        shift: ShiftSpec | None = None,
        test_fraction: float = 0.25,
        seed: int = 0,
        data_dir: str | Path | None = None,
        limit: int | None = None,
        problem: str | None = None,
        validation: float = 0.0,
        tokenizer: Tokenizer | None = None,
    ) -> Federation:
        """A named data set, divided among clients. The seed decides everything.

        name: a known data set (see `available`), with options if it has any, such as
            `synthetic:groups=3,kind=rotation`; an .npz file or a folder of them (see `from_npz`);
            or `hub:owner/dataset`.
        clients: number of clients; by default all users of the data set, else 20.
        partition: how to divide the samples, such as `iid`, `dirichlet:alpha=0.5` or an object;
            by default `natural` if the data has users, else `dirichlet:alpha=0.1,balanced=true`
            (for next-token `iid`). The "label" is the first of several, for regression the decile
            of the first number; next-token data cannot be divided by label.
        shift: `rotation` or `noise`, to make groups of clients see different features.
        test_fraction: fraction of each client's samples held out for testing.
        data_dir: folder with the data files; by default that of the environment variable
            POLYTEMPO_DATA, else the one in the user's cache that `polytempo data get` fills.
        limit: use only that many samples, drawn at random.
        problem: what the targets in files of your own are for, where it cannot be guessed.
        validation: for tuning: the test samples are left out, and this fraction of each client's
            training samples takes their place.
        tokenizer: that of a pre-trained model, for texts: `polytempo.tokenizer("hf:PATH")`.
        """
        pool = open_pool(name, Request(data_dir, clients, seed), problem)
        if isinstance(name, Mapping):
            title = spell(name)
        else:
            title = pool.name if is_path(name) else str(name)
        pool = replace(pool, tokenizer=tokenizer)
        return cls._divide(
            pool, title, clients, partition, shift, test_fraction, seed, limit, validation
        )

    @classmethod
    def from_pool(
        cls,
        x: Any,
        y: Any,
        users: Any = None,
        *,
        name: str = "own",
        clients: int | None = None,
        partition: PartitionSpec | None = None,
        shift: ShiftSpec | None = None,
        test_fraction: float = 0.25,
        seed: int = 0,
        limit: int | None = None,
        classes: int | None = None,
        problem: str | None = None,
        length: int = 128,
        vocabulary: int = 32_000,
        tokenizer: Tokenizer | None = None,
    ) -> Federation:
        """Pooled samples of your own, divided among clients as by `load`.

        x: arrays or tensors as in `from_arrays`, or a list of texts (of which `length` words are
            kept, and `vocabulary` words known; `tokenizer` as in `load`). y, problem: as in
            `from_arrays`.
        users: whom each sample belongs to.
        """
        found = features(x, name)
        if users is not None:
            users = user_ids(users, len(found), name)
        problem = kind_of([(found, y)], classes, problem)
        known = targets(y, found, name, problem, classes)
        pool = Pool(
            name=name,
            x=found,
            y=known,
            outputs=number_of_outputs(known, found, name, problem, classes),
            users=users,
            length=length,
            vocabulary=vocabulary,
            problem=problem,
            tokenizer=tokenizer,
        )
        return cls._divide(pool, name, clients, partition, shift, test_fraction, seed, limit)

    @classmethod
    def from_arrays(
        cls,
        clients: Iterable[Any] | Mapping[str, Any],
        *,
        name: str = "own",
        test_fraction: float = 0.25,
        seed: int = 0,
        classes: int | None = None,
        problem: str | None = None,
        names: Sequence[Any] | None = None,
        groups: Sequence[Any] | None = None,
        target: str | None = None,
        tokenizer: Tokenizer | None = None,
    ) -> Federation:
        """Your own clients, each a pair (X, y) of arrays or tensors; by name, if they are a
        dictionary.

        X is uint8 images ([N, C, H, W], [N, H, W] or [N, H, W, C]), float features of any shape,
        integer tokens [N, length], or a list of texts. (X, y, X_test, y_test) brings a test split
        of its own.

        A client may also be a pandas frame, whose column `target` is y and whose other columns are
        features; or a torch dataset of pairs (sample, target); or two of these, for training and
        for testing. X and y may be frames and series, too.

        y is labels [N] (classification), 0 or 1 [N, labels] (multilabel), numbers [N] or
        [N, outputs] (regression), or tokens in the shape of X (next-token; 0 or -100 where nothing
        is to be predicted). Numbers are used as they are: standardise them if they are large.
        classes: how many labels or tokens there are; by default as many as occur.
        problem: one of these four, where it cannot be guessed from y.
        names: what the clients are called. groups: the true group of each, a number or a word.
        tokenizer: as in `load`.
        """
        found, called = listed(clients, names)
        who = [f"client {called[i] if called else i}" for i in range(len(found))]
        given = [arrays_of(client, label, target) for client, label in zip(found, who, strict=True)]
        known = group_numbers(groups, len(found))
        pool = pool_clients(name, given, who, classes, problem, known, called)
        pool = replace(pool, tokenizer=tokenizer)
        return cls._divide(pool, name, None, None, None, test_fraction, seed, None)

    @classmethod
    def from_npz(
        cls,
        path: str | Path,
        *,
        clients: int | None = None,
        partition: PartitionSpec | None = None,
        shift: ShiftSpec | None = None,
        test_fraction: float = 0.25,
        seed: int = 0,
        limit: int | None = None,
        classes: int | None = None,
        problem: str | None = None,
    ) -> Federation:
        """Your own .npz files.

        Either a folder with one file per client (arrays X and y; with X_test and y_test, these are
        the test split as given), or a single file with X, y and optionally `user`, which is divided
        as by `load`. The arrays are as in `from_arrays`.
        """
        pool = read_npz(path, classes, problem)
        return cls._divide(pool, pool.name, clients, partition, shift, test_fraction, seed, limit)

    @classmethod
    def _divide(
        cls,
        pool: Pool,
        title: str,
        clients: int | None,
        partition: PartitionSpec | None,
        shift: ShiftSpec | None,
        test_fraction: float,
        seed: int,
        limit: int | None,
        validation: float = 0.0,
    ) -> Federation:
        pool = pool.subset(limit, seed)
        if partition is None:
            usual: dict[str, Any] = {"name": "dirichlet", "alpha": 0.1, "balanced": True}
            if pool.problem == "next-token":
                usual = {"name": "iid"}
            partition = usual if pool.users is None else "natural"
        divider = PARTITIONS.create(partition)
        if pool.problem == "next-token" and getattr(divider, "by_label", False):
            name = PARTITIONS.describe(divider)["name"]
            raise PolytempoError(
                f"partition {name} goes by labels, but {title} has none: it is for next-token; use "
                + ("natural, iid or quantity" if pool.users is not None else "iid or quantity")
            )
        given = None
        if isinstance(divider, Natural) and pool.users is not None:
            given = pool.test
            clients = len(divider.eligible(pool.users)) if clients is None else clients
        clients = 20 if clients is None else clients
        assignment = divider(
            strata(pool.y, pool.problem), clients, rng(seed, "data", "partition"), pool.users
        )
        verify(assignment, clients, len(pool.y))

        # Only labels are stratified: bins of numbers would be too small inside one client.
        labels = pool.y if pool.problem == "classification" else np.zeros(len(pool.y))
        order, train, test = order_clients(
            assignment, labels, given, test_fraction, seed, pool.recordings, validation
        )
        groups = true_groups(assignment, pool.groups)
        names = None
        if isinstance(divider, Natural) and pool.names is not None and pool.users is not None:
            names = tuple(pool.names[pool.users[held[0]]] for held in assignment.indices)
        x, vocabulary = to_tensor(pool, order, train)
        about = [title, f"{clients} clients", spell(PARTITIONS.describe(divider))]
        if validation:
            about.append(f"{validation:.0%} of the training samples in place of the test samples")
        if pool.problem != "classification":
            about.insert(1, pool.problem)
        if shift is not None:
            changer = SHIFTS.create(shift)
            groups = apply_shift(changer, x, train, test, groups, seed)
            about.append(spell(SHIFTS.describe(changer)))
        if limit is not None:
            about.append(f"{len(pool.y)} samples")
        mean, std = (pool.mean, pool.std) if pool.mean else moments(x, train)
        return cls(
            name=pool.name,
            x=x,
            y=torch.from_numpy(pool.y[order]),
            train=train,
            test=test,
            outputs=pool.outputs,
            groups=groups,
            mean=mean,
            std=std,
            vocabulary=vocabulary,
            description=", ".join(about),
            partition=PARTITIONS.describe(divider),
            problem=pool.problem,
            names=names,
            tokenizer=None if pool.tokenizer is None else pool.tokenizer.digest,
        )
