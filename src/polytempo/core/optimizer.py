"""How a local step is taken: SGD, Adam, AdamW.

An optimiser is plain data: it travels with the task. What it remembers from step to step, its
*moments*, are named vectors, kept by the code that trains. A step has two halves, so that a solver
may add the gradient straight into the memory that it acts through, without storing it first:

    total, keep = optimizer.accumulator(moments)   # total <- keep * total + gradient
    optimizer.descend(theta, moments, lr)          # theta <- theta - ...
"""

from __future__ import annotations

from typing import Annotated, ClassVar

import torch
from pydantic import Field
from torch import Tensor

from polytempo.core.registry import Options, Registry

Moments = dict[str, Tensor]


class Optimizer(Options):
    """Base of the optimisers. All numbers may be vectors, or matrices with a model in every row."""

    name: ClassVar[str] = ""
    kept: ClassVar[tuple[str, ...]] = ()  # moments that a client may keep until its next training

    weight_decay: Annotated[float, Field(ge=0)] = 1e-4

    def begin(self, theta: Tensor) -> Moments:
        """The moments before the first step."""
        raise NotImplementedError

    def regularise(self, theta: Tensor, grad: Tensor) -> None:
        """Add the gradient of `weight_decay / 2 ||theta||^2`."""
        if self.weight_decay:
            grad.add_(theta, alpha=self.weight_decay)

    def accumulator(self, moments: Moments) -> tuple[Tensor, float]:
        """Where the gradient is to be added, and by what that is multiplied first."""
        raise NotImplementedError

    def descend(self, theta: Tensor, moments: Moments, lr: float) -> None:
        """Take the step that the accumulated gradient calls for."""
        raise NotImplementedError

    def step(self, theta: Tensor, grad: Tensor, moments: Moments, lr: float) -> None:
        """Both halves of a step, with a gradient that is there already."""
        total, keep = self.accumulator(moments)
        if keep:
            total.mul_(keep).add_(grad)
        else:
            total.copy_(grad)
        self.descend(theta, moments, lr)


OPTIMIZERS: Registry[Optimizer] = Registry("optimizer", Optimizer)


@OPTIMIZERS.register("sgd")
class Sgd(Optimizer):
    """`v <- momentum v + g; theta <- theta - lr v`, with weight decay as a part of g."""

    kept: ClassVar[tuple[str, ...]] = ("momentum",)

    momentum: Annotated[float, Field(ge=0, lt=1)] = 0.9

    def begin(self, theta: Tensor) -> Moments:
        return {"momentum": torch.zeros_like(theta)}

    def accumulator(self, moments: Moments) -> tuple[Tensor, float]:
        return moments["momentum"], self.momentum

    def descend(self, theta: Tensor, moments: Moments, lr: float) -> None:
        theta.sub_(moments["momentum"], alpha=lr)


@OPTIMIZERS.register("adam")
class Adam(Optimizer):
    """Adam (Kingma and Ba 2015), with weight decay as a part of the gradient."""

    kept: ClassVar[tuple[str, ...]] = ("first", "second", "count")

    beta1: Annotated[float, Field(ge=0, lt=1)] = 0.9
    beta2: Annotated[float, Field(ge=0, lt=1)] = 0.999
    epsilon: Annotated[float, Field(gt=0)] = 1e-8

    def begin(self, theta: Tensor) -> Moments:
        zeros = {name: torch.zeros_like(theta) for name in ("gradient", "first", "second")}
        return {**zeros, "count": torch.zeros(1, dtype=theta.dtype)}

    def accumulator(self, moments: Moments) -> tuple[Tensor, float]:
        return moments["gradient"], 0.0

    def descend(self, theta: Tensor, moments: Moments, lr: float) -> None:
        gradient, first, second = (moments[name] for name in ("gradient", "first", "second"))
        moments["count"] += 1
        steps = int(moments["count"])
        first.lerp_(gradient, 1 - self.beta1)
        second.mul_(self.beta2).addcmul_(gradient, gradient, value=1 - self.beta2)
        scale = second.div(1 - self.beta2**steps).sqrt_().add_(self.epsilon)
        theta.addcdiv_(first, scale, value=-lr / (1 - self.beta1**steps))


@OPTIMIZERS.register("adamw")
class AdamW(Adam):
    """Adam with decoupled weight decay (Loshchilov and Hutter 2019):
    `theta <- (1 - lr weight_decay) theta` with the step. Its gradients hold no weight decay."""

    def regularise(self, theta: Tensor, grad: Tensor) -> None:
        """Nothing: the decay is not part of the gradient."""

    def descend(self, theta: Tensor, moments: Moments, lr: float) -> None:
        theta.mul_(1 - lr * self.weight_decay)
        super().descend(theta, moments, lr)
