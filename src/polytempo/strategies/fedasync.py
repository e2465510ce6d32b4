"""FedAsync (Xie, Koyejo, Gupta: Asynchronous Federated Optimization, 2019)."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor

from polytempo.core.messages import Staleness, Update
from polytempo.core.objective import Proximal
from polytempo.core.strategy import STRATEGIES, Context, Strategy
from polytempo.core.task import Task


@STRATEGIES.register("fedasync")
class FedAsync(Strategy):
    """Each update is mixed into the global model at once, weighted down by its staleness.

    `w <- (1 - alpha s(tau)) w + alpha s(tau) theta`, tau in updates, with s one of
        constant     1
        polynomial   (1 + tau)^-a              (a = 0.5)
        hinge        1 if tau <= b else 1 / (a (tau - b) + 1)    (a = 10, b = 4)
    `a` defaults to the original paper's value for the weighting. PACE and CASA compare with
    `weighting=hinge,alpha=0.3,a=1,b=4,rho=0`. `rho` is the proximal term of the client's
    objective.
    """

    family: ClassVar[str] = "asynchronous, one model"
    paper: ClassVar[str] = "Xie et al. 2019"
    single_model: ClassVar[bool] = True
    state: ClassVar[tuple[str, ...]] = ("model",)

    weighting: Literal["constant", "polynomial", "hinge"] = "polynomial"
    alpha: Annotated[float, Field(gt=0, le=1)] = 0.6
    a: Annotated[float, Field(ge=0)] | None = None
    b: Annotated[float, Field(ge=0)] = 4.0
    rho: Annotated[float, Field(ge=0)] = 0.005

    def setup(self, context: Context) -> None:
        super().setup(context)
        self.model = context.initial
        self.asked = context.task
        if self.rho:
            self.asked = replace(context.task, objective=Proximal(self.rho))

    def task(self, client: int) -> Task:
        return self.asked

    def model_for(self, client: int) -> Tensor:
        return self.model

    def weight(self, tau: int) -> float:
        """s(tau)"""
        if self.weighting == "constant":
            return 1.0
        if self.weighting == "polynomial":
            return float((1 + tau) ** -(0.5 if self.a is None else self.a))
        a = 10.0 if self.a is None else self.a
        return 1.0 if tau <= self.b else 1.0 / (a * (tau - self.b) + 1.0)

    def fold(self, update: Update, staleness: Staleness) -> bool:
        mixing = self.alpha * self.weight(staleness.updates)
        self.model = torch.lerp(self.model, update.vector, mixing)
        return True
