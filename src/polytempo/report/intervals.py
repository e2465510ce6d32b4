"""How far values are apart over several runs, such as those of several seeds."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal

import numpy as np

Interval = Literal["std", "ci95"]
Values = Sequence[float] | np.ndarray[Any, np.dtype[np.float64]]


def deviation(values: Values) -> Any:
    """Standard deviation over runs, along the first axis."""
    return np.std(values, axis=0, ddof=1)


def confidence(values: Values) -> Any:
    """Half the width of the 95% confidence interval of the mean (Student's t), along the first
    axis."""
    from scipy import stats

    return stats.t.ppf(0.975, len(values) - 1) * stats.sem(values)


DEVIATIONS: dict[Interval, Callable[[Values], Any]] = {"std": deviation, "ci95": confidence}
IN_WORDS: dict[Interval, str] = {"std": "standard deviation", "ci95": "95% confidence interval"}
