"""How a peer mixes a partner's model into its own (Sad et al. 2025, Sec. 3.5).

`W_i <- W_i - sum_j wf_ij (W_i - W_j)`: a step towards each partner. The rules differ in the fusion
weights wf_ij. `W_i` are the *current* weights, local steps since the exchange included.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, ClassVar

from pydantic import Field
from torch import Tensor

from polytempo.core.registry import Options, Registry
from polytempo.nodes.protocol import Snapshot


class FusionRule(Options):
    """Base of the rules: flat vectors, several partners at once if there are several."""

    name: ClassVar[str] = ""

    def weights(self, own_progress: float, others: Sequence[float]) -> list[float]:
        """The fusion weight of each partner, from its progress and ours."""
        raise NotImplementedError

    def fuse(self, current: Tensor, snapshots: Sequence[Snapshot], own_progress: float) -> Tensor:
        """The current weights after the fusion, as a new vector."""
        weights = self.weights(own_progress, [snapshot.progress for snapshot in snapshots])
        fused = current.clone()
        for weight, snapshot in zip(weights, snapshots, strict=True):
            fused += weight * (snapshot.params - current)  # - wf_ij g_ij
        return fused


FUSIONS: Registry[FusionRule] = Registry("fusion rule", FusionRule)


@FUSIONS.register("progress")
class ProgressWeighted(FusionRule):
    """A partner counts by its share of the progress (Eq. 3; Eq. 4 for several):
    `wf_ij = wf0 p_j / (p_i + sum_k p_k)`.

    The two weights of a pair sum to `wf0`. A beginner hardly moves an advanced peer and is moved
    far itself. When nobody has made progress, all count alike; the paper leaves that case open.
    """

    wf0: Annotated[float, Field(ge=0, le=2)] = 1.0

    def weights(self, own_progress: float, others: Sequence[float]) -> list[float]:
        total = own_progress + sum(others)
        if total == 0:
            return [self.wf0 / (1 + len(others))] * len(others)
        return [self.wf0 * progress / total for progress in others]


@FUSIONS.register("naive")
class Naive(FusionRule):
    """Each partner counts `weight`, whatever the progress; several partners share it.

    The control experiment of Sec. 4.3, which takes the weight 1: the partner's model replaces ours.
    """

    weight: Annotated[float, Field(ge=0, le=2)] = 0.5

    def weights(self, own_progress: float, others: Sequence[float]) -> list[float]:
        return [self.weight / len(others) for _ in others]
