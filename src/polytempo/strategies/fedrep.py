"""FedRep (Collins et al.: Exploiting Shared Representations for Personalized Federated Learning,
ICML 2021)."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, ClassVar

from pydantic import Field

from polytempo.core.strategy import STRATEGIES, Strategy
from polytempo.core.task import Task
from polytempo.strategies.fedavg import FedAvg
from polytempo.strategies.fedbuff import FedBuff


class HeadThenBody(Strategy):
    """A client trains its head with the body as it came, then the body with that head."""

    personal: ClassVar[tuple[str, ...]] = ("head",)

    head_epochs: Annotated[int, Field(ge=1)] = 5

    def task(self, client: int) -> Task:
        return replace(super().task(client), own_epochs=self.head_epochs)


@STRATEGIES.register("fedrep")
class FedRep(HeadThenBody, FedAvg):
    """FedPer in two steps: first the personal head alone, then the shared body alone.

        h_i <- argmin F_i(h, phi)       by `head_epochs` epochs from its last head, phi as received
        phi_i <- phi - gradient steps   by the epochs of the task, h_i fixed
        phi <- sum_i |D_i| phi_i / sum_i |D_i|

    `head_epochs`: 10 in the paper, followed by one epoch for the body (5 on some data). They come
    on top of the task's epochs and take simulated time.

    Where we depart: the mean is weighted by samples, and momentum starts afresh with the body.
    """

    family: ClassVar[str] = "synchronous, personalised"
    paper: ClassVar[str] = "Collins et al. 2021"


@STRATEGIES.register("fedrep-async")
class FedRepAsync(HeadThenBody, FedBuff):
    """FedRep on arrival: bodies are folded as in FedBuff."""

    family: ClassVar[str] = "asynchronous, personalised"
    paper: ClassVar[str] = "Collins et al. 2021, asynchronous"
