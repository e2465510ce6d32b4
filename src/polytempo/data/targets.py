"""What the samples of a federation are to be mapped to: four kinds of targets, and their checks.

classification   int64 [N]           one label per sample, numbered from 0
multilabel       float32 [N, labels] 1 where a label is present, else 0
regression       float32 [N] or [N, outputs], as they come: nothing is standardised
next-token       int64 [N, length]   of the shape of X; 0 is padding, and is never predicted
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from polytempo.core.errors import PolytempoError, nearest
from polytempo.data.partition import Array
from polytempo.data.pool import TOKENS, Features, as_array, labels, number_of_classes
from polytempo.data.text import PADDING

PROBLEMS = ("classification", "multilabel", "regression", "next-token")
LABELLED = ("classification", "multilabel")
IGNORED = -100  # what torch takes for a target that does not count; we read it as padding
BINS = 10  # of equal size, into which partitions by label divide numbers


def kind_of(parts: Sequence[tuple[Features, Any]], classes: int | None, given: str | None) -> str:
    """The problem that pairs (X, y) pose: as given, else as far as y leaves no doubt.

    Numbers with fractions are regression, a matrix of 0 and 1 is multi-label, whole numbers of the
    shape of tokens X are next tokens. All else is classification, whose checks ask if in doubt.
    """
    if given is not None:
        if given not in PROBLEMS:
            raise PolytempoError(f"unknown problem {given!r}{nearest(given, PROBLEMS)}")
        return given
    found = [(x, as_array(y)) for x, y in parts]
    if any(y.dtype.kind not in "iufb" for _, y in found):
        return "classification"
    fractions = any((np.isfinite(y) & (y != np.floor(y))).any() for _, y in found)
    if not all(y.ndim == 2 and y.shape[1] > 1 for _, y in found):
        return "regression" if fractions and classes is None else "classification"
    if fractions:
        return "regression"
    binary = all(((y == 0) | (y == 1)).all() for _, y in found)
    tokens = all(_are_tokens(x) and np.shape(x) == y.shape for x, y in found)
    if binary == tokens:
        return "classification"
    return "multilabel" if binary else "next-token"


def targets(given: Any, x: Features, who: str, problem: str, classes: int | None) -> Array:
    """The targets of samples x, in the form of the problem."""
    if problem == "classification":
        return labels(given, len(x), who, classes)
    y = as_array(given)
    if y.dtype.kind not in "iufb":
        raise PolytempoError(
            f"{who}: y has type {y.dtype}, but {problem} needs numbers; convert it first"
        )
    if not np.isfinite(y).all():
        row = int(np.argwhere(~np.isfinite(y))[0][0])
        raise PolytempoError(
            f"{who}: y holds {int((~np.isfinite(y)).sum())} values that are NaN or infinite, the "
            f"first in sample {row}; remove these samples"
        )
    check = {"multilabel": _present, "regression": _numbers, "next-token": _next_tokens}
    return check[problem](y, x, who, classes)


def number_of_outputs(y: Array, x: Features, who: str, problem: str, classes: int | None) -> int:
    """How many numbers a model outputs, per sample or token."""
    if problem == "classification":
        return number_of_classes(y, who, classes)
    if problem == "next-token":
        return classes or int(max(np.max(x), y.max())) + 1
    return 1 if y.ndim == 1 else y.shape[1]


def strata(y: Array, problem: str) -> Array:
    """What partitions by label go by: the label; the first label that is present (samples without
    any are a stratum of their own); the tenth of all samples in which the first number lies."""
    if problem == "classification":
        return y
    if problem == "multilabel":
        first: Array = np.where(y.any(axis=1), y.argmax(axis=1), y.shape[1])
        return first
    if problem == "regression":
        number = y if y.ndim == 1 else y[:, 0]
        ordered = np.sort(number)
        below, upto = (np.searchsorted(ordered, number, side) for side in ("left", "right"))
        return (below + upto - 1) * BINS // (2 * len(y))  # by the middle rank of equal numbers
    return np.zeros(len(y), dtype=np.int64)


def _present(y: Array, x: Features, who: str, classes: int | None) -> Array:
    expected = f"[{len(x)}, {classes or 'labels'}]"
    if y.ndim != 2 or len(y) != len(x) or (classes is not None and y.shape[1] != classes):
        raise PolytempoError(
            f"{who}: y has shape {y.shape}, but multilabel needs {expected}, one column per label"
        )
    if not ((y == 0) | (y == 1)).all():
        wrong = y[(y != 0) & (y != 1)][0]
        raise PolytempoError(
            f"{who}: y holds {wrong:g}, but multilabel needs 1 where a label is present, else 0; "
            "for numbers to be predicted use problem=regression"
        )
    return y.astype(np.float32)


def _numbers(y: Array, x: Features, who: str, classes: int | None) -> Array:
    if classes is not None:
        raise PolytempoError(
            f"{who}: classes={classes}, but the problem is regression, which has none; omit it"
        )
    if y.ndim == 2 and y.shape[1] == 1:
        y = y[:, 0]
    if y.ndim not in (1, 2) or len(y) != len(x) or y.size == 0:
        raise PolytempoError(
            f"{who}: y has shape {y.shape}, but regression needs ({len(x)},) or "
            f"({len(x)}, outputs), one row per sample of X"
        )
    with np.errstate(over="ignore"):
        found = y.astype(np.float32)
    if not np.isfinite(found).all():
        raise PolytempoError(
            f"{who}: y holds {np.abs(y).max():g}, too large for float32; rescale the targets"
        )
    return found


def _next_tokens(y: Array, x: Features, who: str, classes: int | None) -> Array:
    if not _are_tokens(x):
        kind = "text" if isinstance(x, list) else str(x.dtype)
        raise PolytempoError(
            f"{who}: next-token needs X to be integer tokens [samples, length], got {kind}; "
            "number the words or characters from 1 up (0 is padding), as int64"
        )
    if y.shape != np.shape(x):
        raise PolytempoError(
            f"{who}: y has shape {y.shape}, but next-token needs that of X, {np.shape(x)}: the "
            "token that follows each one; from sequences s, use X = s[:, :-1] and y = s[:, 1:]"
        )
    y = np.where(y == IGNORED, PADDING, y)
    upper = min(classes or TOKENS, TOKENS)
    for name, tokens in (("X", np.asarray(x)), ("y", y)):
        strange = tokens[(tokens != np.floor(tokens)) | (tokens < 0) | (tokens >= upper)]
        if len(strange):
            raise PolytempoError(
                f"{who}: {name} holds {strange[0]:g}, expected tokens 0 to "
                f"{upper - 1} (0 is padding; in y, {IGNORED} too); renumber them"
            )
    if not (y != PADDING).any(axis=1).all():
        row = int(np.flatnonzero(~(y != PADDING).any(axis=1))[0])
        raise PolytempoError(
            f"{who}: all targets of sample {row} are padding (0 or {IGNORED}), so there is nothing "
            "to learn from it; omit it, or number the tokens from 1 up"
        )
    return y.astype(np.int64)


def _are_tokens(x: Features) -> bool:
    return not isinstance(x, list) and x.dtype == np.int64
