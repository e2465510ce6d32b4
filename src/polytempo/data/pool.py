"""A pool of samples before it is divided among clients, and the checks on what users hand in."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from polytempo.core.errors import PolytempoError
from polytempo.core.rng import rng
from polytempo.data.partition import Array
from polytempo.data.text import Tokenizer

Features = Array | list[str]
TOKENS = 2**17  # integers from here on are taken for features that were not converted


@dataclass(frozen=True)
class Pool:
    """Samples with targets. `users`, `groups`, `test` and `recordings` say something about each
    sample.

    outputs: how many numbers a model outputs, per sample or token.
    problem: what the targets are for (see `targets`).
    """

    name: str
    x: Features
    y: Array
    outputs: int
    users: Array | None = None
    groups: Array | None = None  # the true group of each sample's user
    test: Array | None = None  # True where the owner of the data has set it apart for testing
    recordings: Array | None = None  # samples of one overlap: none is trained on if one is tested
    mean: tuple[float, ...] | None = None
    std: tuple[float, ...] | None = None
    length: int = 128  # words kept of each text
    vocabulary: int = 32_000  # at most, for text
    problem: str = "classification"
    names: tuple[str, ...] | None = None  # of the users, in the order of their numbers
    tokenizer: Tokenizer | None = None  # of a pre-trained model, for text

    def subset(self, limit: int | None, seed: int) -> Pool:
        """A random subset of at most `limit` samples, in their original order."""
        if limit is not None and limit < 1:
            raise PolytempoError(f"limit={limit}: at least 1 sample is needed; omit it to use all")
        if limit is None or limit >= len(self.y):
            return self
        kept = np.sort(rng(seed, "data", "limit").choice(len(self.y), limit, replace=False))
        return replace(
            self,
            x=take(self.x, kept),
            y=self.y[kept],
            users=None if self.users is None else self.users[kept],
            groups=None if self.groups is None else self.groups[kept],
            test=None if self.test is None else self.test[kept],
            recordings=None if self.recordings is None else self.recordings[kept],
        )


def take(x: Features, indices: Array) -> Features:
    """The samples at these positions, always as a new object."""
    if isinstance(x, list):
        return [x[i] for i in indices]
    return np.asarray(x[indices])


def features(given: Any, who: str) -> Features:
    """Samples in one of the forms that a federation holds.

    uint8 is images: [N, C, H, W], or [N, H, W] or [N, H, W, C], which are brought into that form.
    Other integers are tokens [N, length]. Numbers of any other kind become float32. Strings are
    text.
    """
    if isinstance(given, torch.Tensor):
        given = given.detach().cpu()
        given = (given.float() if given.is_floating_point() else given).numpy()
    # Lists of texts stay lists: as an array, every text would take the space of the longest.
    if isinstance(given, (list, tuple)) and given and all(isinstance(s, str) for s in given):
        return list(given)
    try:
        x = np.asarray(given)
    except ValueError as error:
        raise PolytempoError(
            f"{who}: the samples are not of one shape ({error}); pad or crop them to the same shape"
        ) from error
    if x.ndim >= 1 and len(x) == 0:
        raise PolytempoError(f"{who}: there are no samples; omit clients without data")
    if x.ndim == 1 and all(isinstance(item, str) for item in x):
        return [str(item) for item in x]
    if x.ndim < 2:
        raise PolytempoError(
            f"{who}: X has shape {x.shape}, expected [samples, ...]; for one feature per sample "
            "use X.reshape(-1, 1)"
        )
    if x.dtype == np.uint8:
        return _channels_first(x)
    if x.dtype.kind in "iu":
        return _tokens(x, who)
    if x.dtype.kind not in "fb":
        raise PolytempoError(
            f"{who}: X has type {x.dtype}, expected numbers (uint8 images, float features or "
            "integer tokens) or strings; convert it first"
        )
    with np.errstate(over="ignore"):
        x = x.astype(np.float32)
    finite = np.isfinite(x)
    if not finite.all():
        row = int(np.argwhere(~finite)[0][0])
        raise PolytempoError(
            f"{who}: X holds {int((~finite).sum())} values that are NaN or infinite, the first in "
            f"sample {row}; remove or fill them"
        )
    return x


def _channels_first(x: Array) -> Array:
    if x.ndim == 3:
        return x[:, None]
    if x.ndim == 4 and x.shape[-1] in (1, 3, 4) and x.shape[1] not in (1, 3, 4):
        return np.moveaxis(x, -1, 1)
    return x


def _tokens(x: Array, who: str) -> Array:
    if x.ndim != 2 or x.min() < 0:
        raise PolytempoError(
            f"{who}: X of type {x.dtype}, shape {x.shape} and minimum {x.min()} is not a table of "
            "tokens [samples, length] from 0 up; convert features to float32, images to uint8"
        )
    if x.max() >= TOKENS:
        raise PolytempoError(
            f"{who}: X of type {x.dtype} would be read as tokens, but holds {x.max()}: convert "
            "features to float32"
        )
    return x.astype(np.int64)


def as_array(given: Any) -> Array:
    """y as an array; lists that are not of one shape as an array of objects, to be refused."""
    if isinstance(given, torch.Tensor):
        given = given.detach().cpu()
        # numpy has no bfloat16
        return np.asarray((given.float() if given.dtype == torch.bfloat16 else given).numpy())
    try:
        return np.asarray(given)
    except ValueError:
        ragged = np.empty(len(given), dtype=object)
        ragged[:] = given
        return ragged


def names(given: Any) -> Array | None:
    """Labels that are names, as an array of text; None if they are something else."""
    found = as_array(given)
    if found.dtype.kind == "O" and found.size and all(isinstance(n, str) for n in found.flat):
        found = found.astype(str)
    if found.dtype.kind == "S":
        found = found.astype(str)
    return found if found.dtype.kind == "U" else None


def number_of_classes(y: Array, who: str, given: int | None) -> int:
    """As given, or one more than the largest label, if that is plausible."""
    if given is not None:
        return given
    largest, distinct = int(y.max()), len(np.unique(y))
    if largest >= max(1000, 10 * distinct):
        raise PolytempoError(
            f"{who}: {distinct} different labels, but the largest is {largest}: they are not "
            "numbered from 0 up; renumber them with numpy.unique(y, return_inverse=True), or give "
            "the number of classes"
        )
    return largest + 1


def user_ids(given: Any, samples: int, who: str) -> Array:
    """Whom each sample belongs to, as numbers or text."""
    users = np.asarray(given)
    if users.shape != (samples,):
        raise PolytempoError(
            f"{who}: users has shape {users.shape}, expected ({samples},), one user per sample"
        )
    if users.dtype.kind == "f" and np.isnan(users).any():
        raise PolytempoError(f"{who}: some users are NaN; name the user of every sample")
    if users.dtype.kind == "O":
        if any(user is None or user != user for user in users):
            raise PolytempoError(f"{who}: some users are missing; name the user of every sample")
        users = users.astype(str)
    return users


def labels(given: Any, samples: int, who: str, classes: int | None = None) -> Array:
    """Labels as int64, one per sample, within 0 .. classes - 1. Names are numbered in order."""
    y = as_array(given)
    if y.ndim == 2 and y.shape[1] == 1:
        y = y[:, 0]
    if y.shape != (samples,):
        other = "; for targets of another kind, say problem=multilabel, regression or next-token"
        raise PolytempoError(
            f"{who}: y has shape {y.shape}, expected ({samples},), one label per sample of X"
            + (other if y.ndim > 1 and len(y) == samples else "")
        )
    if (named := names(y)) is not None:
        y = np.unique(named, return_inverse=True)[1]
    if y.dtype.kind not in "iubf" or not (np.isfinite(y).all() and (y == np.floor(y)).all()):
        raise PolytempoError(
            f"{who}: labels must be whole numbers from 0 up, got type {y.dtype} starting with "
            f"{y[0]!s}; number the classes first"
        )
    y = y.astype(np.int64)
    if y.min() < 0 or (classes is not None and y.max() >= classes):
        wrong = int(y.min() if y.min() < 0 else y.max())
        upper = "up" if classes is None else f"to {classes - 1}"
        raise PolytempoError(
            f"{who}: label {wrong} is out of range, expected 0 {upper}; renumber the labels or "
            "give the right number of classes"
        )
    return y
