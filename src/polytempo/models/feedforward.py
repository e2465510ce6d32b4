"""Plain stacks: linear, MLP, and the two small convolutional networks of the papers."""

from __future__ import annotations

import itertools
import math
from typing import Annotated, Any

import torch
from pydantic import BeforeValidator, Field
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from polytempo.core.registry import Options
from polytempo.models.spec import MODELS, Inputs, require_image, require_numbers


def _one_or_many(value: Any) -> Any:
    """`hidden=300` on the command line means the same as `hidden=[300]`."""
    return (value,) if isinstance(value, int) else value


Widths = Annotated[tuple[Annotated[int, Field(ge=1)], ...], BeforeValidator(_one_or_many)]


def _dense(widths: list[int]) -> list[nn.Module]:
    """Fully connected layers of these widths, with ReLU between them."""
    layers: list[nn.Module] = []
    for before, after in itertools.pairwise(widths):
        layers += [nn.Linear(before, after), nn.ReLU()]
    return layers[:-1]


class _Halve(torch.autograd.Function):
    """Maxima of 2x2 squares, first down, then across: whole-row operations, several times as fast
    as torch's pooling on CPUs. A gradient goes to the maximum (of equals, to one of them)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        height, width = (side // 2 * 2 for side in x.shape[-2:])
        upper, lower = x[..., 0:height:2, :width], x[..., 1:height:2, :width]
        tall = torch.maximum(upper, lower)
        left, right = tall[..., 0::2], tall[..., 1::2]
        halved = torch.maximum(left, right)
        # ones and zeros as numbers: multiplying by booleans is several times as slow
        above, before = (upper - lower).ge_(0), (left - right).ge_(0)
        ctx.save_for_backward(above, before)
        ctx.shape = x.shape
        return halved

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        above, before = ctx.saved_tensors
        tall = grad.new_empty(above.shape)
        torch.mul(grad, before, out=tall[..., 0::2])
        torch.sub(grad, tall[..., 0::2], out=tall[..., 1::2])
        height, width = above.shape[-2] * 2, above.shape[-1]
        whole = grad.new_empty(ctx.shape)
        whole[..., height:, :] = 0
        whole[..., width:] = 0
        upper = whole[..., 0:height:2, :width]
        torch.mul(tall, above, out=upper)
        torch.sub(tall, upper, out=whole[..., 1:height:2, :width])
        return whole


class Halve(nn.Module):
    """`nn.MaxPool2d(2)`, faster."""

    def forward(self, x: Tensor) -> Tensor:
        halved: Tensor = _Halve.apply(x)  # type: ignore[no-untyped-call]
        return halved


def _convolutional(
    name: str, inputs: Inputs, filters: tuple[int, int], hidden: tuple[int, int]
) -> nn.Module:
    """Two unpadded 5x5 convolutions, each halved by max-pooling, then fully connected layers.

    ReLU comes after the pooling, where there is a quarter of the numbers: it gives the same.
    """
    channels, height, width = require_image(name, inputs, smallest=16)
    cells = math.prod(((side - 4) // 2 - 4) // 2 for side in (height, width))
    return nn.Sequential(
        nn.Conv2d(channels, filters[0], 5),
        Halve(),
        nn.ReLU(),
        nn.Conv2d(filters[0], filters[1], 5),
        Halve(),
        nn.ReLU(),
        nn.Flatten(),
        *_dense([filters[1] * cells, *hidden, inputs.outputs]),
    )


@MODELS.register("linear")
class Linear(Options):
    """One layer on the flattened sample: logistic regression, or linear, as the loss has it."""

    def build(self, inputs: Inputs) -> nn.Module:
        require_numbers("linear", inputs)
        return nn.Sequential(nn.Flatten(), *_dense([math.prod(inputs.shape), inputs.outputs]))


@MODELS.register("mlp")
class MLP(Options):
    """Fully connected layers on the flattened sample (900-300-5 for windows of sensor data).

    hidden: the widths of the hidden layers
    """

    hidden: Widths = (300,)

    def build(self, inputs: Inputs) -> nn.Module:
        require_numbers("mlp", inputs)
        widths = [math.prod(inputs.shape), *self.hidden, inputs.outputs]
        return nn.Sequential(nn.Flatten(), *_dense(widths))


@MODELS.register("lenet")
class LeNet(Options):
    """LeNet as in pFedGraph: 6 and 16 filters, then 120 and 84 units (62,006 on CIFAR-10)."""

    def build(self, inputs: Inputs) -> nn.Module:
        return _convolutional("lenet", inputs, filters=(6, 16), hidden=(120, 84))


@MODELS.register("cnn64")
class CNN64(Options):
    """The CNN of AFL-Lib: twice 64 filters, then 120 and 64 units (307,842 on CIFAR-10)."""

    def build(self, inputs: Inputs) -> nn.Module:
        return _convolutional("cnn64", inputs, filters=(64, 64), hidden=(120, 64))
