"""FedPer (Arivazhagan et al.: Federated Learning with Personalization Layers, 2019): a personal
head."""

from __future__ import annotations

from typing import ClassVar

from polytempo.core.strategy import STRATEGIES
from polytempo.strategies.fedavg import FedAvg
from polytempo.strategies.fedbuff import FedBuff


@STRATEGIES.register("fedper")
class FedPer(FedAvg):
    """FedAvg of the body; the last linear layer stays with its client, and all is trained together.

    Short for `fedavg --personal head`; another part is named with `--personal`. (The paper tries
    one to four personal blocks; we keep the last linear layer.)
    """

    family: ClassVar[str] = "synchronous, personalised"
    paper: ClassVar[str] = "Arivazhagan et al. 2019"
    personal: ClassVar[tuple[str, ...]] = ("head",)


@STRATEGIES.register("fedper-async")
class FedPerAsync(FedBuff):
    """FedPer on arrival: bodies are folded as in FedBuff, and the head stays with its client."""

    family: ClassVar[str] = "asynchronous, personalised"
    paper: ClassVar[str] = "Arivazhagan et al. 2019, asynchronous"
    personal: ClassVar[tuple[str, ...]] = ("head",)
