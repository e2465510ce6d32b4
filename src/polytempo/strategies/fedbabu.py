"""FedBABU (Oh et al.: FedBABU: Towards Enhanced Representation for Federated Image Classification,
ICLR 2022)."""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

from polytempo.core.strategy import STRATEGIES, Strategy
from polytempo.core.task import Task
from polytempo.strategies.fedavg import FedAvg
from polytempo.strategies.fedbuff import FedBuff


class BodyAlone(Strategy):
    """Clients train the body; the head stays as it was drawn until a client fine-tunes."""

    personal: ClassVar[tuple[str, ...]] = ("head",)
    to_fine_tune: ClassVar[bool] = True

    def task(self, client: int) -> Task:
        return replace(super().task(client), own_epochs=0)


@STRATEGIES.register("fedbabu")
class FedBABU(BodyAlone, FedAvg):
    """FedAvg of the body under one random head that nobody trains; fine-tuning trains everything.

    Judge it by the *adapted* metric, which is after fine-tuning (`--adapt-epochs`, 5 as in most of
    the paper's tables): the model that is handed out still has the random head. The head is the
    same for all, so it is never sent.
    """

    family: ClassVar[str] = "synchronous, personalised"
    paper: ClassVar[str] = "Oh et al. 2022"


@STRATEGIES.register("fedbabu-async")
class FedBABUAsync(BodyAlone, FedBuff):
    """FedBABU on arrival: bodies are folded as in FedBuff."""

    family: ClassVar[str] = "asynchronous, personalised"
    paper: ClassVar[str] = "Oh et al. 2022, asynchronous"
