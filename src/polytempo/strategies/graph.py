"""Who learns from whom: the collaboration graph of pFedGraph and PACE.

Client i's row of the graph solves (PACE Eq. 2 and 15)

    minimise  ||x - p||^2 + gamma <s, x>   over the probability simplex,

with p the relative sample sizes and s_j how unlike client i's model and client j's are. Completing
the square, x is the Euclidean projection of `p - (gamma / 2) s` onto the simplex: a sort and a
cumulative sum, exact, no solver.
"""

from __future__ import annotations

import numpy as np
from torch import Tensor

from polytempo.core.bank import FloatArray, ModelBank
from polytempo.core.task import Measure


def project_to_simplex(point: FloatArray) -> FloatArray:
    """The nearest point with non-negative entries that sum to 1."""
    descending = np.sort(point)[::-1]
    # the threshold that makes the k largest entries sum to 1, for k = 1, 2, ...
    thresholds = (np.cumsum(descending) - 1.0) / np.arange(1, len(point) + 1)
    kept = np.flatnonzero(descending > thresholds)[-1]
    projected: FloatArray = np.maximum(point - thresholds[kept], 0.0)
    return projected


def collaboration_row(
    bank: ModelBank,
    vector: Tensor,
    prior: FloatArray,
    gamma: float,
    measure: Measure = "cosine",
    clip: float | None = None,
) -> FloatArray:
    """The row of a client whose model is `vector`, over the clients of `bank`.

    `clip` (pFedGraph's practice, 0.9): cosines above it count as 1.
    """
    unlike = bank.dissimilarity(vector, measure)
    if clip is not None and measure == "cosine":
        unlike = np.where(-unlike > clip, -1.0, unlike)
    return project_to_simplex(prior - gamma / 2 * unlike)
