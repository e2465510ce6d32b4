"""What clients minimise in addition to their loss: terms that refer to the *anchor*.

The anchor is the received model, or a vector that came with it. The objectives add their gradient,
in closed form, to the flat gradient vector of the loss: no autograd graph over the parameters is
needed. They are plain data and travel with the task.
"""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor

from polytempo.core.registry import Options, Registry

Measure = Literal["cosine", "inner", "l1", "l2"]


class Objective(Options):
    """Base of the objectives. One of your own overrides `add_gradient` alone.

    `isotropic`: it looks at lengths and angles of vectors only, not at coordinates.
    """

    name: ClassVar[str] = ""

    @property
    def isotropic(self) -> bool:
        return False

    def add_gradient(self, theta: Tensor, anchor: Tensor, grad: Tensor) -> None:
        """Add the gradient at theta to `grad`."""
        raise NotImplementedError


OBJECTIVES: Registry[Objective] = Registry("objective", Objective)


@OBJECTIVES.register("plain")
class Plain(Objective):
    """The local loss alone."""

    isotropic = True

    def add_gradient(self, theta: Tensor, anchor: Tensor, grad: Tensor) -> None:
        """Nothing to add."""


@OBJECTIVES.register("proximal")
class Proximal(Objective):
    """`(mu/2) ||theta - anchor||^2` (FedProx). `power=1` is the unsquared `mu ||theta - anchor||`
    of some public implementations, for replication only."""

    mu: Annotated[float, Field(ge=0)]
    power: Literal[1, 2] = 2
    isotropic = True

    def add_gradient(self, theta: Tensor, anchor: Tensor, grad: Tensor) -> None:
        if self.power == 2:
            grad.add_(theta, alpha=self.mu).sub_(anchor, alpha=self.mu)
        else:
            away = theta - anchor
            grad.addcdiv_(away, _norm(away).clamp_min(1e-12), value=self.mu)


@OBJECTIVES.register("pull")
class Pull(Objective):
    """`strength * s(theta, anchor)`, with `s` a dissimilarity (PACE Eq. 4): a pull towards the
    received model. A negative strength pushes away, as pFedGraph's public code does.

    `s` is scale free: `-cos`, `-<theta, anchor> / ||anchor||^2`, `||theta - anchor||_1 /
    ||anchor||_1` or `||theta - anchor||_2 / ||anchor||_2`.
    """

    strength: float
    measure: Measure = "cosine"

    @property
    def isotropic(self) -> bool:
        return self.measure != "l1"

    def add_gradient(self, theta: Tensor, anchor: Tensor, grad: Tensor) -> None:
        if self.measure == "cosine":
            tt, ta, aa = _dot(theta, theta), _dot(theta, anchor), _dot(anchor, anchor)
            scale = tt.sqrt() * aa.sqrt()  # the gradient of -cos is -(a / |a||t| - cos t / |t|^2)
            inverse = torch.where(scale > 0, self.strength / scale, 0.0)  # zero has cosine 0
            grad.addcmul_(theta, inverse * ta / tt.clamp_min(1e-30)).addcmul_(anchor, -inverse)
        elif self.measure == "inner":
            grad.addcmul_(anchor, -self.strength / _dot(anchor, anchor).clamp_min(1e-12))
        elif self.measure == "l1":
            scale = anchor.abs().sum().clamp_min(1e-12)
            grad.addcdiv_(torch.sign(theta - anchor), scale, value=self.strength)
        else:
            away = theta - anchor
            scale = (_norm(away) * _norm(anchor)).clamp_min(1e-12)
            grad.addcdiv_(away, scale, value=self.strength)


def _dot(a: Tensor, b: Tensor) -> Tensor:
    product: Tensor = torch.linalg.vecdot(a, b)
    return product


def _norm(a: Tensor) -> Tensor:
    return _dot(a, a).sqrt()


@OBJECTIVES.register("drift")
class Drift(Objective):
    """`<anchor, theta>`: the anchor, sent along for the purpose, is added to every gradient (the
    control variates of SCAFFOLD and FedAC)."""

    isotropic = True

    def add_gradient(self, theta: Tensor, anchor: Tensor, grad: Tensor) -> None:
        grad.add_(anchor)


def is_known(objective: Objective) -> bool:
    """Whether this is one of the objectives above and not a class derived from one, which may
    compute anything: code that takes a shortcut must ask."""
    return type(objective) in (Plain, Proximal, Pull, Drift)
