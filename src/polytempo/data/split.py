"""Train and test inside one client, stratified by label where its samples allow it."""

from __future__ import annotations

import numpy as np

from polytempo.core.errors import PolytempoError
from polytempo.data.partition import Array


def split(
    y: Array, test_fraction: float, rng: np.random.Generator, recordings: Array | None = None
) -> tuple[Array, Array]:
    """Positions of one client's training and test samples.

    Each label gives `test_fraction` of its samples to the test, rounded up or down by the largest
    remainder (ties at random), but never all of them: a label that occurs once is trained on, not
    tested. With two samples or more there is at least one of each kind, if need be without
    stratification; a single sample is for training.

    Samples of one recording stay together: each label then gives whole recordings, as many as come
    nearest to `test_fraction` of its samples. With one recording of each label, one of all is for
    the test; with a single one, its samples are split like any others.
    """
    if not 0 < test_fraction < 1:
        raise PolytempoError(
            f"test_fraction={test_fraction}: expected a number between 0 and 1, such as 0.25"
        )
    everything = np.arange(len(y))
    if len(y) < 2:
        return everything, everything[:0]
    if recordings is not None and len(np.unique(recordings)) > 1:
        return _split_recordings(y, test_fraction, rng, recordings)
    labels, counts = np.unique(y, return_counts=True)
    labels, counts = labels[counts > 1], counts[counts > 1]
    if len(labels) == 0:
        test = rng.choice(everything, 1)
        return np.setdiff1d(everything, test), test
    quota = test_fraction * counts
    take = np.minimum(np.floor(quota).astype(np.int64), counts - 1)
    wanted = max(1, int(np.floor(quota.sum() + 0.5)))
    order = np.lexsort((rng.random(len(labels)), take - quota))
    # What a label cannot give without giving all is not made up by labels whose quota is whole.
    order = order[((take < counts - 1) & (take < quota))[order]]
    take[order[: max(0, wanted - int(take.sum()))]] += 1
    chosen = [
        rng.choice(np.flatnonzero(y == label), size, replace=False)
        for label, size in zip(labels, take, strict=True)
    ]
    test = np.sort(np.concatenate(chosen))
    return np.setdiff1d(everything, test), test


def _split_recordings(
    y: Array, test_fraction: float, rng: np.random.Generator, recordings: Array
) -> tuple[Array, Array]:
    numbers, first, sizes = np.unique(recordings, return_index=True, return_counts=True)
    chosen: list[int] = []
    for label in np.unique(y[first]):
        mine = rng.permutation(np.flatnonzero(y[first] == label))
        left = test_fraction * sizes[mine].sum()
        for recording in mine[:-1]:  # one at least is trained on
            if abs(left - sizes[recording]) >= abs(left):
                continue
            left -= sizes[recording]
            chosen.append(recording)
    if not chosen:
        chosen = [int(rng.integers(len(numbers)))]
    tested = np.isin(recordings, numbers[chosen])
    return np.flatnonzero(~tested), np.flatnonzero(tested)
