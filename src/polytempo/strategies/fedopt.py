"""FedOpt: FedAdam, FedYogi, FedAdagrad (Reddi et al.: Adaptive Federated Optimization, ICLR
2021)."""

from __future__ import annotations

from typing import Annotated, ClassVar

import torch
from pydantic import Field
from torch import Tensor

from polytempo.core.strategy import STRATEGIES, Context
from polytempo.strategies.fedavg import FedAvg


class FedOpt(FedAvg):
    """The mean displacement of a cohort is a gradient, for an adaptive optimizer at the server."""

    paper: ClassVar[str] = "Reddi et al. 2021"
    state: ClassVar[tuple[str, ...]] = (*FedAvg.state, "first", "second")

    server_lr: Annotated[float, Field(gt=0)] = 0.01
    beta1: Annotated[float, Field(ge=0, lt=1)] = 0.9
    tau: Annotated[float, Field(gt=0)] = 1e-3

    def setup(self, context: Context) -> None:
        super().setup(context)
        self.first = torch.zeros_like(self.total)  # m
        self.second = torch.full_like(self.total, self.tau**2)  # v
        # what follows the trained numbers are statistics: of these the mean is taken
        self.trained = sum(context.tensors) or len(self.total)

    def replacement(self, mean: Tensor) -> Tensor:
        delta = mean - self.model
        self.first = torch.lerp(delta, self.first, self.beta1)  # m <- beta1 m + (1 - beta1) Delta
        self.second = self.moved(delta.square())
        step = self.server_lr * self.first / (self.second.sqrt() + self.tau)
        step[self.trained :] = delta[self.trained :]
        return super().replacement(self.model + step)  # w <- w + eta m / (sqrt(v) + tau)

    def moved(self, square: Tensor) -> Tensor:
        """v, given Delta^2"""
        raise NotImplementedError


@STRATEGIES.register("fedadam")
class FedAdam(FedOpt):
    """FedAvg with Adam at the server.

        Delta = mean (theta_i - w) over the cohort, weighted by samples
        m <- beta1 m + (1 - beta1) Delta,   v <- beta2 v + (1 - beta2) Delta^2
        w <- w + server_lr m / (sqrt(v) + tau)

    `tau`: how adaptive it is (large: momentum SGD); v begins as tau^2, without bias correction, as
    in the paper, whose betas are 0.9 and 0.99. `server_lr`: the paper's grids end between 0.001 and
    1, depending on the data; no number moves by much more than that in a cohort.
    """

    beta2: Annotated[float, Field(ge=0, lt=1)] = 0.99

    def moved(self, square: Tensor) -> Tensor:
        return torch.lerp(square, self.second, self.beta2)


@STRATEGIES.register("fedyogi")
class FedYogi(FedOpt):
    """FedAvg with Yogi at the server: `v <- v - (1 - beta2) Delta^2 sign(v - Delta^2)`.

    All else is as in FedAdam. v forgets large steps more slowly.
    """

    beta2: Annotated[float, Field(ge=0, lt=1)] = 0.99

    def moved(self, square: Tensor) -> Tensor:
        return self.second - (1 - self.beta2) * square * torch.sign(self.second - square)


@STRATEGIES.register("fedadagrad")
class FedAdagrad(FedOpt):
    """FedAvg with Adagrad at the server: `v <- v + Delta^2`, so steps only get smaller.

    All else is as in FedAdam; the paper has no momentum here.
    """

    beta1: Annotated[float, Field(ge=0, lt=1)] = 0.0

    def moved(self, square: Tensor) -> Tensor:
        return self.second + square
