"""The steps from a pool of samples to a federation: order, split, encode, shift, measure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from polytempo.core.errors import PolytempoError
from polytempo.core.rng import rng
from polytempo.data.partition import Array, Assignment, even_groups
from polytempo.data.pool import Pool, take
from polytempo.data.shift import Shift
from polytempo.data.split import split
from polytempo.data.text import build_vocabulary, encode, tokenized, words


def verify(assignment: Assignment, clients: int, samples: int) -> None:
    """A partitioner may be the user's own."""
    indices = assignment.indices
    everything = np.concatenate([np.zeros(0, dtype=np.int64), *indices])
    sound = len(indices) == clients and all(len(part) for part in indices)
    sound = sound and len(np.unique(everything)) == len(everything)
    if not sound or everything.min() < 0 or everything.max() >= samples:
        raise PolytempoError(
            f"the partition gave {len(indices)} clients {len(everything)} positions; expected "
            f"{clients} clients, none empty, with distinct positions below {samples}; correct its "
            "__call__"
        )


def order_clients(
    assignment: Assignment,
    labels: Array,
    given: Array | None,
    test_fraction: float,
    seed: int,
    recordings: Array | None = None,
    validation: float = 0.0,
) -> tuple[Array, tuple[slice, ...], tuple[slice, ...]]:
    """Positions in the order of the federation, and each client's slices of it. With `validation`,
    that fraction of the training samples takes the place of the test samples."""
    order: list[Array] = []
    train: list[slice] = []
    test: list[slice] = []
    at = 0
    for client, indices in enumerate(assignment.indices):
        apart = np.zeros(len(indices), dtype=bool) if given is None else given[indices]
        if apart.any() and not apart.all():
            parts = np.flatnonzero(~apart), np.flatnonzero(apart)
        else:
            together = None if recordings is None else recordings[indices]
            stream = rng(seed, "data", "split", client)
            parts = split(labels[indices], test_fraction, stream, together)
        if validation:
            kept = parts[0]
            stream = rng(seed, "data", "validation", client)
            together = None if recordings is None else recordings[indices[kept]]
            trained, tested = split(labels[indices[kept]], validation, stream, together)
            parts = kept[trained], kept[tested]
        for part, slices in zip(parts, (train, test), strict=True):
            order.append(indices[part])
            slices.append(slice(at, at + len(part)))
            at += len(part)
    return np.concatenate(order), tuple(train), tuple(test)


def true_groups(assignment: Assignment, of_sample: Array | None) -> Array | None:
    """The partition's groups, else those of the samples if no client mixes them."""
    if assignment.groups is not None or of_sample is None:
        return assignment.groups
    held = [np.unique(of_sample[indices]) for indices in assignment.indices]
    return np.concatenate(held) if all(len(found) == 1 for found in held) else None


def to_tensor(
    pool: Pool, order: Array, train: tuple[slice, ...]
) -> tuple[torch.Tensor, int | None]:
    """The samples in that order, and the size of the vocabulary if they are text."""
    if pool.tokenizer is not None:
        if not isinstance(pool.x, list):
            raise PolytempoError(
                f"{pool.tokenizer.name} reads texts, but the samples of {pool.name} are "
                f"{pool.x.dtype} of shape {pool.x.shape[1:]}; use another model, or texts"
            )
        tokens = tokenized(pool.x, pool.tokenizer, pool.length)
        return torch.from_numpy(tokens[order].astype(np.int64)), pool.tokenizer.vocabulary
    x = take(pool.x, order)
    if isinstance(x, list):
        texts = [words(text, pool.length) for text in x]
        seen = (text for part in train for text in texts[part])
        vocabulary = build_vocabulary(seen, pool.vocabulary)
        return torch.from_numpy(encode(texts, vocabulary, pool.length)), len(vocabulary) + 2
    # A copy in torch's own memory, which is aligned: sums over other alignments may differ in
    # their last bit, and so would two runs.
    tensor = torch.from_numpy(np.ascontiguousarray(x)).clone()
    if tensor.dtype != torch.int64:
        return tensor, None
    return tensor, pool.outputs if pool.problem == "next-token" else int(tensor.max()) + 1


def apply_shift(
    shift: Shift,
    x: torch.Tensor,
    train: tuple[slice, ...],
    test: tuple[slice, ...],
    groups: Array | None,
    seed: int,
) -> Array:
    """Shift the samples of each client, in place; the groups, combined with those there were."""
    if len(shift) > len(train):
        raise PolytempoError(
            f"the shift makes {len(shift)} groups of {len(train)} clients; use fewer levels or "
            "more clients"
        )
    member = even_groups(len(train), len(shift), rng(seed, "data", "shift"))
    for client, group in enumerate(member.tolist()):
        own = slice(train[client].start, test[client].stop)
        x[own] = shift(x[own], group, rng(seed, "data", "shift", client))
    if groups is None:
        return member
    pairs = np.stack([groups, member], axis=1)
    return np.unique(pairs, axis=0, return_inverse=True)[1].reshape(-1)


def moments(
    x: torch.Tensor, train: tuple[slice, ...]
) -> tuple[tuple[float, ...] | None, tuple[float, ...] | None]:
    """Mean and deviation of each channel over the training images, on the scale 0..1."""
    if x.dtype != torch.uint8 or x.dim() != 4:
        return None, None
    levels = torch.arange(256, dtype=torch.float64) / 255
    mean, std = [], []
    for channel in range(x.shape[1]):
        counts = torch.zeros(256, dtype=torch.float64)
        for part in train:
            counts += torch.bincount(x[part, channel].reshape(-1).long(), minlength=256)
        share = counts / counts.sum()
        mean.append(float((share * levels).sum()))
        # A channel of one value has no deviation to divide by.
        std.append(float((share * (levels - mean[-1]) ** 2).sum().sqrt()) or 1.0)
    return tuple(mean), tuple(std)


def spell(table: Mapping[str, Any]) -> str:
    """The table of a named thing for people to read: `dirichlet(alpha=0.1, balanced)`."""
    shown = []
    for key, value in table.items():
        if key == "name" or value is False:
            continue
        if isinstance(value, (list, tuple)):
            value = f"[{' '.join(_number(item) for item in value)}]"
        shown.append(key if value is True else f"{key}={_number(value)}")
    return f"{table.get('name', '')}({', '.join(shown)})" if shown else str(table.get("name", ""))


def _number(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)
