"""FedBN (Li et al.: FedBN: Federated Learning on Non-IID Features via Local Batch Normalization,
ICLR 2021): personal normalisation layers."""

from __future__ import annotations

from typing import ClassVar

from polytempo.core.strategy import STRATEGIES
from polytempo.strategies.fedavg import FedAvg
from polytempo.strategies.fedbuff import FedBuff


@STRATEGIES.register("fedbn")
class FedBN(FedAvg):
    """FedAvg of all but the normalisation layers, which stay with their client: for feature shift.

    Short for `fedavg --personal norm`: scales, shifts and running statistics of batch
    normalisation, and the scales and shifts of layer and group normalisation too. The model must
    have such layers (`--model resnet18`).
    """

    family: ClassVar[str] = "synchronous, personalised"
    paper: ClassVar[str] = "Li et al. 2021 (FedBN)"
    personal: ClassVar[tuple[str, ...]] = ("norm",)


@STRATEGIES.register("fedbn-async")
class FedBNAsync(FedBuff):
    """FedBN on arrival: the rest is folded as in FedBuff, and the norms stay with their client."""

    family: ClassVar[str] = "asynchronous, personalised"
    paper: ClassVar[str] = "Li et al. 2021 (FedBN), asynchronous"
    personal: ClassVar[tuple[str, ...]] = ("norm",)
