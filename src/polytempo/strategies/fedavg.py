"""FedAvg (McMahan et al., AISTATS 2017) and FedProx (Li et al., MLSys 2020)."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, ClassVar, Literal

import torch
from pydantic import Field, model_validator
from pydantic_core import ArgsKwargs
from torch import Tensor

from polytempo.core.errors import PolytempoError
from polytempo.core.messages import Staleness, Update
from polytempo.core.objective import Proximal
from polytempo.core.strategy import STRATEGIES, Context, Refill, Strategy
from polytempo.core.task import Task


@STRATEGIES.register("fedavg")
class FedAvg(Strategy):
    """Synchronous averaging: a cohort trains the global model, and their mean replaces it.

    `w <- sum_i |D_i| theta_i / sum_i |D_i|` over the cohort. A communication round lasts as long
    as its slowest client. A client whose update is lost is left out of the mean.
    """

    family: ClassVar[str] = "synchronous, one model"
    paper: ClassVar[str] = "McMahan et al. 2017"
    refill: ClassVar[Refill] = "cohort"
    single_model: ClassVar[bool] = True
    state: ClassVar[tuple[str, ...]] = ("model", "total", "samples")

    @model_validator(mode="before")
    @classmethod
    def _moved(cls, given: ArgsKwargs) -> ArgsKwargs:
        for option in {"milestones", "gamma"} & (given.kwargs or {}).keys():
            raise PolytempoError(
                f"{cls.name} no longer has the option {option!r}: all strategies share a "
                "learning-rate schedule, --lr-schedule steps:at=[...],gamma=0.1 (lr_schedule in "
                "TOML and Python), which counts updates, not cohorts"
            )
        return given

    def setup(self, context: Context) -> None:
        super().setup(context)
        self.model = context.initial
        self.total = torch.zeros_like(self.model, dtype=torch.float64)
        self.samples = 0

    def model_for(self, client: int) -> Tensor:
        return self.model

    def fold(self, update: Update, staleness: Staleness) -> bool:
        self.total.add_(update.vector, alpha=update.samples)
        self.samples += update.samples
        return False  # nothing new is served before the cohort is complete

    def close_cohort(self) -> bool:
        if not self.samples:
            return False
        self.model = self.replacement(self.total / self.samples)
        self.total.zero_()
        self.samples = 0
        return True

    def replacement(self, mean: Tensor) -> Tensor:
        """The next model, from the mean of what the cohort has uploaded."""
        return mean.to(self.model.dtype)


@STRATEGIES.register("fedprox")
class FedProx(FedAvg):
    """FedAvg whose clients are held near the global model by `(mu/2) ||theta - w||^2`.

    `mu`: 0.5 in PACE's experiments, 0.05 in CASA's. `norm_power=1` replaces the square by the
    plain norm, `mu ||theta - w||`, as AFL-Lib does: for replication only.
    """

    paper: ClassVar[str] = "Li et al. 2020"

    mu: Annotated[float, Field(ge=0)] = 0.5
    norm_power: Literal[1, 2] = 2

    def task(self, client: int) -> Task:
        return replace(super().task(client), objective=Proximal(self.mu, self.norm_power))
