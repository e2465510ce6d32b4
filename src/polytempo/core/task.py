"""What a client is asked to do: how long it trains, with which solver, on which objective.

A task is plain data (it travels to the client and into checkpoints); `polytempo.training` carries
it out. The objectives add a term to the local loss that refers to the *anchor*: the received model,
or a vector that came with it. They do so by adding their gradient, in closed form, to the flat
gradient vector of the loss: no autograd graph over the parameters is needed.
"""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor

from polytempo.core.registry import Options

Measure = Literal["cosine", "inner", "l1", "l2"]


class Plain(Options):
    """The local loss alone.

    As all objectives, it takes single vectors, or matrices with a model in every row.
    """

    kind: Literal["plain"] = "plain"
    isotropic: ClassVar[bool] = True  # knows lengths and angles of vectors only, no coordinates
    linear: ClassVar[bool] = True  # `coefficients` gives the gradient

    def coefficients(self, tt: Tensor, ta: Tensor, aa: Tensor) -> tuple[Tensor, Tensor]:
        """The gradient is `u theta + v anchor`: u and v from the products of theta and anchor with
        themselves and each other."""
        return torch.zeros_like(tt), torch.zeros_like(tt)

    def add_gradient(self, theta: Tensor, anchor: Tensor, grad: Tensor) -> None:
        """Nothing to add."""


class Proximal(Options):
    """`(mu/2) ||theta - anchor||^2` (FedProx). `power=1` is the unsquared `mu ||theta - anchor||`
    of some public implementations, for replication only."""

    mu: Annotated[float, Field(ge=0)]
    power: Literal[1, 2] = 2
    kind: Literal["proximal"] = "proximal"
    isotropic: ClassVar[bool] = True

    @property
    def linear(self) -> bool:
        return self.power == 2  # the length of the difference would drown in rounding

    def coefficients(self, tt: Tensor, ta: Tensor, aa: Tensor) -> tuple[Tensor, Tensor]:
        return torch.full_like(tt, self.mu), torch.full_like(tt, -self.mu)

    def add_gradient(self, theta: Tensor, anchor: Tensor, grad: Tensor) -> None:
        if self.power == 2:
            grad.add_(theta, alpha=self.mu).sub_(anchor, alpha=self.mu)
        else:
            away = theta - anchor
            grad.addcdiv_(away, _norm(away).clamp_min(1e-12), value=self.mu)


class Pull(Options):
    """`strength * s(theta, anchor)`, with `s` a dissimilarity (PACE Eq. 4): a pull towards the
    received model. A negative strength pushes away, as pFedGraph's public code does.

    `s` is scale free: `-cos`, `-<theta, anchor> / ||anchor||^2`, `||theta - anchor||_1 /
    ||anchor||_1` or `||theta - anchor||_2 / ||anchor||_2`.
    """

    strength: float
    measure: Measure = "cosine"
    kind: Literal["pull"] = "pull"

    @property
    def isotropic(self) -> bool:
        return self.measure != "l1"

    @property
    def linear(self) -> bool:
        return self.measure in ("cosine", "inner")

    def coefficients(self, tt: Tensor, ta: Tensor, aa: Tensor) -> tuple[Tensor, Tensor]:
        if self.measure == "inner":
            return torch.zeros_like(tt), -self.strength / aa.clamp_min(1e-12)
        scale = tt.sqrt() * aa.sqrt()  # the gradient of -cos is -(a / |a||t| - cos t / |t|^2)
        inverse = torch.where(scale > 0, self.strength / scale, 0.0)  # zero has cosine 0
        return inverse * ta / tt.clamp_min(1e-30), -inverse

    def add_gradient(self, theta: Tensor, anchor: Tensor, grad: Tensor) -> None:
        if self.linear:
            products = _dot(theta, theta), _dot(theta, anchor), _dot(anchor, anchor)
            u, v = self.coefficients(*products)
            grad.addcmul_(theta, u).addcmul_(anchor, v)
        elif self.measure == "l1":
            scale = anchor.abs().sum(-1, keepdim=True).clamp_min(1e-12)
            grad.addcdiv_(torch.sign(theta - anchor), scale, value=self.strength)
        else:
            away = theta - anchor
            scale = (_norm(away) * _norm(anchor)).clamp_min(1e-12)
            grad.addcdiv_(away, scale, value=self.strength)


def _dot(a: Tensor, b: Tensor) -> Tensor:
    """Row by row."""
    products: Tensor = torch.linalg.vecdot(a, b)
    return products.unsqueeze(-1)


def _norm(a: Tensor) -> Tensor:
    return _dot(a, a).sqrt()


class Drift(Options):
    """`<anchor, theta>`: the anchor, sent along for the purpose, is added to every gradient (the
    control variates of SCAFFOLD and FedAC)."""

    kind: Literal["drift"] = "drift"
    isotropic: ClassVar[bool] = True
    linear: ClassVar[bool] = True

    def coefficients(self, tt: Tensor, ta: Tensor, aa: Tensor) -> tuple[Tensor, Tensor]:
        return torch.zeros_like(tt), torch.ones_like(tt)

    def add_gradient(self, theta: Tensor, anchor: Tensor, grad: Tensor) -> None:
        grad.add_(anchor)


Objective = Annotated[Plain | Proximal | Pull | Drift, Field(discriminator="kind")]
# Of whom `isotropic` and `linear` can be believed. A subclass inherits them, and may mean neither.
OBJECTIVES = (Plain, Proximal, Pull, Drift)


class Task(Options):
    """Local training by SGD. `steps`, where given, replaces `epochs`.

    `upload` says what comes back: the trained model, its difference from the received one
    ("delta"), or the gradient of the first mini-batch with no step taken ("gradient"; weight decay
    and the objective's pull included).
    `basis`: after training, so many principal directions of the client's features (what enters the
    last linear layer) are uploaded too (FedSaC).
    `choose`: the client is handed so many models, trains the one whose loss on its training samples
    is least, and uploads which one it was as `choice` (IFCA). All but the first come as the rows of
    the anchor, so that the objective has none; choosing takes no simulated time.
    `sparsity`: this share of the parameters, the smallest of the received model, stays as it is,
    and the training takes less time in proportion; which ones do not is uploaded as `mask`, in bits
    (CASA+). With 0, a mask that drops nothing is uploaded all the same.
    """

    epochs: Annotated[int, Field(ge=1)] = 5
    steps: Annotated[int, Field(ge=1)] | None = None
    batch_size: Annotated[int, Field(ge=1)] = 64
    lr: Annotated[float, Field(gt=0)] = 0.01
    momentum: Annotated[float, Field(ge=0, lt=1)] = 0.9
    weight_decay: Annotated[float, Field(ge=0)] = 1e-4
    objective: Objective = Field(default_factory=Plain)
    upload: Literal["model", "delta", "gradient"] = "model"
    basis: Annotated[int, Field(ge=0)] = 0
    choose: Annotated[int, Field(ge=0)] = 0
    sparsity: Annotated[float, Field(ge=0, lt=1)] | None = None

    @property
    def extras(self) -> dict[str, int]:
        """What is uploaded beside the vector: names, and the number of rows of each."""
        rows = {
            "basis": self.basis,
            "choice": int(self.choose > 0),
            "mask": int(self.sparsity is not None),
        }
        return {name: count for name, count in rows.items() if count}

    def batches(self, samples: int) -> int:
        """Steps in one epoch. A last batch of one single sample joins the batch before it (batch
        normalisation cannot train on one sample)."""
        full, rest = divmod(samples, self.batch_size)
        return max(1, full + (rest > 1))

    def total_steps(self, samples: int) -> int:
        """Steps of the whole task on a client with that many training samples."""
        if self.upload == "gradient":
            return 1
        return self.steps if self.steps is not None else self.epochs * self.batches(samples)

    def work(self, samples: int) -> float:
        """Samples that the client pushes through the model (for steps, batches of mean size):
        what simulated time is made of."""
        passes = self.total_steps(samples) / self.batches(samples)
        return passes * samples * (1 - (self.sparsity or 0.0))
