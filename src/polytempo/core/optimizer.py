"""How a local step is taken: SGD, Adam, AdamW.

An optimiser is plain data: it travels with the task. What it remembers from step to step, its
*moments*, are named vectors, kept by the code that trains.
"""

from __future__ import annotations

from typing import Annotated, ClassVar

import torch
from pydantic import Field
from torch import Tensor

from polytempo.core.registry import Options, Registry

Moments = dict[str, Tensor]


class Optimizer(Options):
    """Base of the optimisers."""

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

    def step(self, theta: Tensor, grad: Tensor, moments: Moments, lr: float) -> None:
        """Take the step that the gradient calls for."""
        raise NotImplementedError

    def end(self, theta: Tensor, moments: Moments) -> None:
        """No further step will be taken."""


OPTIMIZERS: Registry[Optimizer] = Registry("optimizer", Optimizer)


@OPTIMIZERS.register("sgd")
class Sgd(Optimizer):
    """`v <- momentum v + g; theta <- theta - lr v`, with weight decay as a part of g."""

    kept: ClassVar[tuple[str, ...]] = ("momentum",)

    momentum: Annotated[float, Field(ge=0, lt=1)] = 0.9

    def begin(self, theta: Tensor) -> Moments:
        return {"momentum": torch.zeros_like(theta)}

    def step(self, theta: Tensor, grad: Tensor, moments: Moments, lr: float) -> None:
        total = moments["momentum"]
        if self.momentum:
            total.mul_(self.momentum).add_(grad)
        else:
            total.copy_(grad)
        theta.sub_(total, alpha=lr)

    def mean_gradient(self, way: Tensor, momentum: Tensor, steps: int, lr: float) -> Tensor:
        """The mean of the gradients of `steps` steps at one rate, concluded from the way that they
        led (`theta` at the end minus at the start) and the momentum that is left: with V the sum of
        all v, the gradients add up to `V - momentum (V - v)`."""
        return torch.lerp(way / -lr, momentum, self.momentum) / steps


@OPTIMIZERS.register("adam")
class Adam(Optimizer):
    """Adam (Kingma and Ba 2015), with weight decay as a part of the gradient."""

    kept: ClassVar[tuple[str, ...]] = ("first", "second", "count")

    beta1: Annotated[float, Field(ge=0, lt=1)] = 0.9
    beta2: Annotated[float, Field(ge=0, lt=1)] = 0.999
    epsilon: Annotated[float, Field(gt=0)] = 1e-8

    def begin(self, theta: Tensor) -> Moments:
        zeros = {name: torch.zeros_like(theta) for name in ("first", "second")}
        return {**zeros, "count": torch.zeros(1, dtype=theta.dtype)}

    def step(self, theta: Tensor, grad: Tensor, moments: Moments, lr: float) -> None:
        first, second = moments["first"], moments["second"]
        moments["count"] += 1
        steps = int(moments["count"])
        first.lerp_(grad, 1 - self.beta1)
        second.mul_(self.beta2).addcmul_(grad, grad, value=1 - self.beta2)
        scale = second.div(1 - self.beta2**steps).sqrt_().add_(self.epsilon)
        theta.addcdiv_(first, scale, value=-lr / (1 - self.beta1**steps))


@OPTIMIZERS.register("adamw")
class AdamW(Adam):
    """Adam with decoupled weight decay (Loshchilov and Hutter 2019):
    `theta <- (1 - lr weight_decay) theta` with the step. Its gradients hold no weight decay."""

    def regularise(self, theta: Tensor, grad: Tensor) -> None:
        """Nothing: the decay is not part of the gradient."""

    def step(self, theta: Tensor, grad: Tensor, moments: Moments, lr: float) -> None:
        theta.mul_(1 - lr * self.weight_decay)
        super().step(theta, grad, moments, lr)
