"""Layers that compiled code knows, and modules as such layers.

Layers are taken by their exact type: a subclass may compute anything.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from polytempo.models.feedforward import Halve


class Unfit(Exception):
    """Why the module is not a chain of known layers."""


@dataclass(frozen=True)
class Image:
    """Numbers per sample: channels of height by width."""

    channels: int
    height: int
    width: int

    @property
    def numbers(self) -> int:
        return self.channels * self.height * self.width


@dataclass(frozen=True)
class Vector:
    """Numbers per sample; `image`: what they were before they were flattened."""

    numbers: int
    image: Image | None = None


ACTIVATIONS = {"relu": 0, "tanh": 1, "gelu": 2, "gelu_tanh": 3}  # as layers.hpp has them
Form = Image | Vector
Pair = tuple[int, int]


@dataclass(frozen=True, eq=False)
class Layer:
    """A layer of the chain: what goes in and what comes out, per sample."""

    before: Form
    after: Form

    def parameters(self) -> list[Tensor]:
        return [value for value in vars(self).values() if isinstance(value, Tensor)]


@dataclass(frozen=True, eq=False)
class Conv(Layer):
    before: Image
    after: Image
    weight: Tensor | None
    bias: Tensor | None
    kernel: Pair
    stride: Pair
    padding: Pair


@dataclass(frozen=True, eq=False)
class Pool(Layer):
    """`across`: of equals in a square of 2x2, which wins is found across first, else down first."""

    before: Image
    after: Image
    kind: str  # max, mean
    kernel: Pair
    stride: Pair
    padding: Pair
    padded: bool = True
    across: bool = True


@dataclass(frozen=True, eq=False)
class Activation(Layer):
    kind: str  # relu, tanh, gelu, gelu_tanh


@dataclass(frozen=True, eq=False)
class Dropout(Layer):
    share: float


@dataclass(frozen=True, eq=False)
class Norm(Layer):
    """Group normalisation of images, layer normalisation of vectors."""

    weight: Tensor | None
    bias: Tensor | None
    groups: int
    epsilon: float


@dataclass(frozen=True, eq=False)
class Filters(Layer):
    """Filters over words, each maximised over time, then ReLU. Word 0 is padding."""

    before: Vector  # tokens
    after: Vector
    embedding: Tensor
    weights: tuple[Tensor, ...]  # [filters, numbers per word, width]
    biases: tuple[Tensor, ...]

    def parameters(self) -> list[Tensor]:
        return [self.embedding, *self.weights, *self.biases]


@dataclass(frozen=True, eq=False)
class Gated(Layer):
    """One layer of gated recurrent units over tokens: states [length, units]. Token 0 is padding.

    `input`, `hidden`: weights and biases of the gates, [3 units, ...], as nn.GRU has them.
    """

    before: Vector  # tokens
    after: Vector  # of one place
    embedding: Tensor
    input: Tensor
    hidden: Tensor
    input_bias: Tensor
    hidden_bias: Tensor


@dataclass(frozen=True, eq=False)
class Dense(Layer):
    before: Vector
    after: Vector
    weight: Tensor | None
    bias: Tensor | None


_KNOWN = {nn.ReLU: "relu", nn.Tanh: "tanh"}


def layer_of(part: nn.Module, form: Form) -> Layer | None:
    """The module as a layer for inputs of that form; None if it changes nothing."""
    kind = type(part)
    if kind is nn.Identity:
        return None
    if kind is nn.Flatten:
        assert isinstance(part, nn.Flatten)
        if part.start_dim != 1 or part.end_dim != -1:
            raise Unfit("it flattens something else than samples")
        flat = form if isinstance(form, Vector) else Vector(form.numbers, form)
        return Layer(form, flat)
    if kind in _KNOWN:
        return Activation(form, form, _KNOWN[kind])
    if kind is nn.GELU:
        return Activation(form, form, "gelu" if part.approximate == "none" else "gelu_tanh")
    if kind is nn.Dropout:
        assert isinstance(part, nn.Dropout)
        if part.p == 1:
            raise Unfit("it drops everything")
        return Dropout(form, form, part.p) if part.p else None
    if kind is nn.Linear:
        assert isinstance(part, nn.Linear)
        if not isinstance(form, Vector) or form.numbers != part.in_features:
            raise Unfit("a linear layer is not applied to whole samples")
        after = Vector(part.out_features)
        return Dense(form, after, part.weight, part.bias)
    if kind is nn.LayerNorm and isinstance(form, Vector) and form.image is None:
        assert isinstance(part, nn.LayerNorm)
        if part.normalized_shape != (form.numbers,):
            raise Unfit("layer normalisation is not over whole samples")
        return Norm(form, form, part.weight, part.bias, 1, part.eps)
    if not isinstance(form, Image):
        raise Unfit(f"{kind.__name__} is not a known layer for vectors")
    if kind is nn.GroupNorm:
        assert isinstance(part, nn.GroupNorm)
        weight, bias = part.weight, part.bias
        return Norm(form, form, weight, bias, part.num_groups, part.eps)
    if kind is nn.Conv2d:
        assert isinstance(part, nn.Conv2d)
        return _convolution(part, form)
    return _pooling(part, form)


def _convolution(part: nn.Conv2d, form: Image) -> Conv:
    if part.groups != 1 or part.dilation != (1, 1) or part.padding_mode != "zeros":
        raise Unfit("a convolution has groups, dilation or padding other than zeros")
    kernel, stride = _pair(part.kernel_size), _pair(part.stride)
    if part.padding == "valid":
        padding = (0, 0)
    elif part.padding == "same":
        if kernel[0] % 2 == 0 or kernel[1] % 2 == 0:
            raise Unfit("a convolution pads one side more than the other")
        padding = (kernel[0] // 2, kernel[1] // 2)
    else:
        padding = _pair(part.padding)
    after = _slid(form, part.out_channels, kernel, stride, padding)
    weight, bias = part.weight, part.bias
    return Conv(form, after, weight, bias, kernel, stride, padding)


def _pooling(part: nn.Module, form: Image) -> Pool:
    kind, two = type(part), (2, 2)
    if kind is Halve:
        after = _slid(form, form.channels, two, two, (0, 0))
        return Pool(form, after, "max", two, two, (0, 0), across=False)
    if kind is nn.AdaptiveAvgPool2d:
        assert isinstance(part, nn.AdaptiveAvgPool2d)
        if _pair(part.output_size) != (1, 1):
            raise Unfit("adaptive pooling is to more than one pixel")
        whole = form.height, form.width
        return Pool(form, Image(form.channels, 1, 1), "mean", whole, whole, (0, 0))
    if kind is not nn.MaxPool2d and kind is not nn.AvgPool2d:
        raise Unfit(f"{kind.__name__} is not a known layer")
    assert isinstance(part, nn.MaxPool2d | nn.AvgPool2d)
    if part.ceil_mode or getattr(part, "divisor_override", None):
        raise Unfit("pooling rounds up, or has a divisor of its own")
    padded = True
    if isinstance(part, nn.MaxPool2d):
        if _pair(part.dilation) != (1, 1) or part.return_indices:
            raise Unfit("pooling has dilation, or returns indices")
    else:
        padded = part.count_include_pad
    kernel, padding = _pair(part.kernel_size), _pair(part.padding)
    stride = kernel if part.stride is None else _pair(part.stride)
    after = _slid(form, form.channels, kernel, stride, padding)
    name = "max" if kind is nn.MaxPool2d else "mean"
    return Pool(form, after, name, kernel, stride, padding, padded)


def _pair(value: Any) -> Pair:
    pair = (value, value) if isinstance(value, int) else tuple(value)
    if len(pair) != 2 or not all(isinstance(side, int) for side in pair):
        raise Unfit(f"{value} is not a pair of numbers")
    return pair[0], pair[1]


def _slid(form: Image, channels: int, kernel: Pair, stride: Pair, padding: Pair) -> Image:
    """What comes out where a window slides over the image."""
    sides = (form.height, form.width)
    found = [
        math.floor((side + 2 * pad - size) / step) + 1
        for side, size, step, pad in zip(sides, kernel, stride, padding, strict=True)
    ]
    if min(found) < 1:
        raise Unfit("an image is smaller than the window that slides over it")
    return Image(channels, *found)
