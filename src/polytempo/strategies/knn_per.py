"""kNN-Per (Marfoq et al.: Personalized Federated Learning through Local Memorization, ICML
2022)."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, ClassVar

import torch
from pydantic import Field
from torch import Tensor
from torch.nn import functional

from polytempo.core.client_steps import CLIENT_STEPS, ClientStep
from polytempo.core.strategy import STRATEGIES, Strategy
from polytempo.core.task import Task
from polytempo.strategies.fedavg import FedAvg
from polytempo.strategies.fedbuff import FedBuff

LEAST = 1e-12  # of a probability of which the logarithm is taken


@CLIENT_STEPS.register("neighbours")
class Neighbours(ClientStep):
    """Predictions are mixed with those of the `k` nearest training samples of the client, by their
    features: `share p_knn + (1 - share) p_model`. Each neighbour counts `exp(-distance / scale)`.
    For problems other than classification it does nothing."""

    k: Annotated[int, Field(ge=1)]
    share: Annotated[float, Field(ge=0, le=1)]
    scale: Annotated[float, Field(gt=0)] = 1.0

    def answer(self, outputs: Tensor, features: Tensor, known: tuple[Tensor, Tensor]) -> Tensor:
        where, labels = known
        if outputs.dim() != 2 or labels.dim() != 1 or labels.is_floating_point():
            return outputs
        apart, nearest = torch.cdist(features, where).topk(min(self.k, len(where)), largest=False)
        counts = torch.softmax(-apart / self.scale, dim=1)
        votes = functional.one_hot(labels.long()[nearest], outputs.shape[1]).to(counts.dtype)
        neighbours = (counts[..., None] * votes).sum(1)
        mixed = torch.lerp(torch.softmax(outputs, dim=1), neighbours, self.share)
        return mixed.clamp_min(LEAST).log()  # as outputs: their softmax is the mixture


class Memorizing(Strategy):
    """Clients look their samples up when they use the model."""

    k: Annotated[int, Field(ge=1)] = 10
    share: Annotated[float, Field(ge=0, le=1)] = 0.5
    scale: Annotated[float, Field(gt=0)] = 1.0

    def task(self, client: int) -> Task:
        step = Neighbours(self.k, self.share, self.scale)
        return replace(super().task(client), client_steps=(step,))


@STRATEGIES.register("knn-per")
class KNNPer(Memorizing, FedAvg):
    """FedAvg, and each client mixes the model's predictions with those of its nearest samples.

        p(y | x) = share p_knn(y | x) + (1 - share) p_w(y | x)
        p_knn(y | x) ~ sum of exp(-|z(x) - z(x_j)| / scale) over those of the k nearest with y_j = y
    with z the features (what enters the last linear layer) under the model in use. Training, and
    what is sent, are FedAvg's; the *adapted* metric is of the model alone.

    `k`: 10 as in the paper. `share`: the paper's lambda, which each client tunes there on samples
    held out; here it is one number for all. `scale`: of distances.
    """

    family: ClassVar[str] = "synchronous, personalised"
    paper: ClassVar[str] = "Marfoq et al. 2022"


@STRATEGIES.register("knn-per-async")
class KNNPerAsync(Memorizing, FedBuff):
    """kNN-Per on arrival: the model is FedBuff's."""

    family: ClassVar[str] = "asynchronous, personalised"
    paper: ClassVar[str] = "Marfoq et al. 2022, asynchronous"
