"""CFL (Sattler et al.: Clustered Federated Learning, TNNLS 2020): as published, and asynchronous as
CASA's baseline."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

import numpy as np
import torch
from pydantic import Field

from polytempo.core.bank import FloatArray
from polytempo.core.strategy import STRATEGIES, IntArray, Refill
from polytempo.strategies.update_similarity import ArrivalUpdates, CohortUpdates, Updates

Linkage = Literal["single", "complete"]


def bipartition(similarity: FloatArray, linkage: Linkage = "single") -> IntArray:
    """Two groups: 0 for that of the first client, 1 for the other.

    By single linkage (the most similar pairs are joined first, until two groups are left) the
    largest similarity across is the least possible: a pair that is more alike cannot be parted.
    """
    from scipy.cluster.hierarchy import cut_tree
    from scipy.cluster.hierarchy import linkage as tree

    distances = 1 - similarity[np.triu_indices(len(similarity), 1)]
    labels = cut_tree(tree(distances, linkage), 2)[:, 0]
    return np.asarray(labels != labels[0], dtype=np.int64)


class Bipartition(Updates):
    """Sattler's condition: the cluster's mean update is short, while some client's is not."""

    eps_1: Annotated[float, Field(ge=0)] = 0.4
    eps_2: Annotated[float, Field(ge=0)] = 0.7
    linkage: Linkage = "single"

    def parts(self, members: IntArray, similarity: FloatArray) -> IntArray | None:
        if self.lengths[members].max() <= self.eps_2:
            return None
        mean = float(torch.linalg.vector_norm(self.mean_update(members)))
        return bipartition(similarity, self.linkage) if mean < self.eps_1 else None


@STRATEGIES.register("cfl")
class CFL(Bipartition, CohortUpdates):
    """A cluster whose clients pull apart while their mean hardly moves is split in two.

    Each cluster's model moves by the sample-weighted mean of its clients' updates. The split makes
    the largest cosine across the parts as small as possible; a cluster of two is not split, nor one
    with clients that have not uploaded yet.

    `eps_1`: a cluster is split only if the mean of its clients' last updates is shorter than this;
    `eps_2`: and the longest of them longer than this (CASA's values for both). They are lengths of
    whole updates, so they depend on the model, the learning rate and the local epochs.
    `linkage=complete` splits as public code does, into parts more equal in size, which is not the
    published criterion. Sattler's acceptance test (gamma_max) is omitted, as it is there.
    """

    family: ClassVar[str] = "synchronous, clustered"
    paper: ClassVar[str] = "Sattler et al. 2020"
    refill: ClassVar[Refill] = "cohort"


@STRATEGIES.register("cfl-async")
class CFLAsync(Bipartition, ArrivalUpdates):
    """CFL made asynchronous in the naive way: `w_k <- (1 - alpha) w_k + alpha theta`, and the last
    update of each client is kept; the condition is checked on every arrival."""

    family: ClassVar[str] = "asynchronous, clustered"
    paper: ClassVar[str] = "Liu et al. 2024 (CASA), baseline; our reading"

    eps_2: Annotated[float, Field(ge=0)] = 1.0
