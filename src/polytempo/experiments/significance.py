"""Is a difference between methods more than chance?"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from scipy import stats


def paired(values: Sequence[float], baseline: Sequence[float]) -> tuple[float, float | None]:
    """Mean difference, and the p value of the paired t-test over seeds; None if there is none: with
    one seed, or differences that are all the same."""
    apart = np.asarray(values, dtype=np.float64) - np.asarray(baseline, dtype=np.float64)
    mean = float(apart.mean())
    if len(apart) < 2 or not np.isfinite(apart).all():
        return mean, None
    if np.ptp(apart) <= 1e-12 * max(1.0, float(np.abs(apart).max())):
        return mean, None
    return mean, float(stats.ttest_rel(values, baseline).pvalue)


def holm(values: Sequence[float | None]) -> list[float | None]:
    """P values for as many tests as there are (Holm's step-down correction)."""
    known = sorted((p, index) for index, p in enumerate(values) if p is not None)
    found: list[float | None] = [None] * len(values)
    largest = 0.0
    for rank, (p, index) in enumerate(known):
        largest = max(largest, min(1.0, (len(known) - rank) * p))
        found[index] = largest
    return found
