"""An `nn.Module` as a chain of known layers.

The module is traced with torch.fx. What comes out is a list of layers, each the input of the next,
or the reason why the module is not such a chain. Layers are taken by their exact type: a subclass
may compute anything.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn import functional

from polytempo.models.feedforward import Halve
from polytempo.models.recurrent import RecurrentNetwork
from polytempo.models.textcnn import TextNetwork


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


def chain(module: nn.Module, shape: tuple[int, ...], tokens: bool = False) -> list[Layer]:
    """The layers of the module, for samples of that shape; `Unfit` if it is no such chain."""
    if any(parameter.dtype != torch.float32 for parameter in module.parameters()):
        raise Unfit("its parameters are not all float32")
    if next(module.buffers(), None) is not None:
        raise Unfit("it has buffers (running statistics)")
    for part in module.modules():
        if any(getattr(part, hooks) for hooks in _HOOKS) or "forward" in vars(part):
            raise Unfit("it has hooks")
    found = _text_layers(module, shape) if tokens else _layers(module, shape)
    ids = [id(tensor) for layer in found for tensor in layer.parameters()]
    if len(set(ids)) < len(ids):
        raise Unfit("a parameter is used twice")
    if set(ids) != {id(parameter) for parameter in module.parameters()}:
        raise Unfit("it has parameters that no layer uses")
    if not found or not isinstance(found[-1], Dense):
        raise Unfit("it does not end in a linear layer")
    return found


def _layers(module: nn.Module, shape: tuple[int, ...]) -> list[Layer]:
    form: Form
    if len(shape) == 3:
        form = Image(*shape)
    elif len(shape) == 1:
        form = Vector(shape[0])
    else:
        raise Unfit(f"its samples have {len(shape)} dimensions")
    found: list[Layer] = []
    for part in _calls(module):
        layer = _layer(part, form)
        if layer is not None:
            form = layer.after
            if not isinstance(part, nn.Flatten):
                found.append(layer)
    return found


def _text_layers(module: nn.Module, shape: tuple[int, ...]) -> list[Layer]:
    """Of the networks for tokens that are known."""
    if type(module) is RecurrentNetwork:
        gru, states = module.recurrent, Vector(module.recurrent.hidden_size)
        named = dict(gru.named_parameters())
        names = ("weight_ih_l0", "weight_hh_l0", "bias_ih_l0", "bias_hh_l0")
        gates = (named[name] for name in names)
        first = Gated(Vector(shape[0]), states, module.embedding.weight, *gates)
        output = _layer(module.output, states)
        assert output is not None
        return [first, output]
    if type(module) is TextNetwork:
        return _filter_layers(module, shape[0])
    raise Unfit("of networks for tokens only textcnn and gru are known")


def _filter_layers(module: TextNetwork, length: int) -> list[Layer]:
    convolutions = [layer for layer in module.convolutions if isinstance(layer, nn.Conv1d)]
    weights = [layer.weight for layer in convolutions]
    biases = [layer.bias for layer in convolutions if layer.bias is not None]
    if len(weights) > _KINDS or max(len(weight) for weight in weights) > _FILTERS:
        raise Unfit(f"it has more than {_KINDS} kinds, or {_FILTERS} of a kind, of filters")
    if length < max(module.widths):
        raise Unfit("its texts are shorter than a filter is wide")
    features = Vector(sum(len(weight) for weight in weights))
    embedding = module.embedding.weight
    layers: list[Layer] = [
        Filters(Vector(length), features, embedding, tuple(weights), tuple(biases))
    ]
    for part in (module.dropout, module.output):
        layer = _layer(part, features)
        layers += [layer] if layer is not None else []
    return layers


_KINDS, _FILTERS = 8, 1024
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


class _Tracer(fx.Tracer):
    """Modules without children are layers."""

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return next(m.children(), None) is None


def _calls(module: nn.Module) -> Iterator[nn.Module]:
    """The layers that the module calls, one after the other; functions as layers."""
    graph, tested = (_traced(module, training) for training in (True, False))
    if [_spelt(node) for node in graph.nodes] != [_spelt(node) for node in tested.nodes]:
        raise Unfit("it does something else outside of training")
    for node in tested.nodes:
        if node.target is functional.dropout and node.kwargs.get("training") is not False:
            raise Unfit("it drops numbers outside of training, too")
    last: fx.Node | None = None
    for node in graph.nodes:
        if node.op == "placeholder":
            if last is not None:
                raise Unfit("it takes several inputs")
            last = node
        elif node.op == "output":
            if node.args != (last,):
                raise Unfit("its output is not that of its last layer")
        elif _is_batch_size(node):
            continue
        else:
            if not node.args or node.args[0] is not last:
                raise Unfit(f"{_name(node)} does not take the output of the layer before it")
            if any(other is last for other in node.all_input_nodes[1:]):
                raise Unfit(f"{_name(node)} takes the output of the layer before it twice")
            yield _called(module, node)
            last = node


def _traced(module: nn.Module, training: bool) -> fx.Graph:
    was_training = module.training
    try:
        return _Tracer().trace(module.train(training))
    except Exception as error:  # whatever forward() does with what is not a tensor
        raise Unfit("its forward() depends on its input") from error
    finally:
        module.train(was_training)


def _spelt(node: fx.Node) -> tuple[str, ...]:
    """The node in words, but for whether it is training."""
    options = {key: value for key, value in node.kwargs.items() if key != "training"}
    return node.op, str(node.target), str(node.args), str(options)


def _is_batch_size(node: fx.Node) -> bool:
    """x.size(0), x.shape, x.shape[0]: what a batch is flattened by."""
    if node.op == "call_method":
        return node.target == "size"
    return node.op == "call_function" and node.target in (getattr, operator.getitem)


def _called(module: nn.Module, node: fx.Node) -> nn.Module:
    """What is called, as a layer."""
    arguments, options = node.args[1:], dict(node.kwargs)
    if node.op == "call_module":
        if arguments or options:
            raise Unfit(f"{_name(node)} takes more than one argument")
        return module.get_submodule(str(node.target))
    if node.op in ("call_function", "call_method"):
        options.pop("inplace", None)
        maker = _FUNCTIONS.get(node.target)
        if options.pop("training", None) is False:  # dropout that is switched off
            return nn.Identity()
        if maker is not None:
            try:
                return maker(*arguments, **options)
            except (TypeError, ValueError) as error:
                raise Unfit(f"{_name(node)} with these arguments is not known") from error
        if node.target in ("view", "reshape", torch.reshape) and _flattens(arguments):
            return nn.Flatten()
    raise Unfit(f"{_name(node)} is not a known layer")


def _name(node: fx.Node) -> str:
    """What is called there."""
    return str(getattr(node.target, "__name__", node.target))


def _flattens(sizes: tuple[Any, ...]) -> bool:
    """Whether x.view(*sizes) is x.flatten(1); the number of features is
    checked with the next layer."""
    if len(sizes) == 1 and isinstance(sizes[0], tuple | list):
        sizes = tuple(sizes[0])
    if len(sizes) != 2:
        return False
    batch, rest = sizes
    return isinstance(rest, int) and (isinstance(batch, fx.Node) or (batch == -1 and rest > 0))


def _flatten(start_dim: int = 0, end_dim: int = -1) -> nn.Module:
    return nn.Flatten(start_dim, end_dim)


_FUNCTIONS: dict[Any, Callable[..., nn.Module]] = {
    **dict.fromkeys((functional.relu, torch.relu, "relu"), nn.ReLU),
    **dict.fromkeys((functional.tanh, torch.tanh, "tanh"), nn.Tanh),
    functional.gelu: nn.GELU,
    functional.dropout: nn.Dropout,
    **dict.fromkeys((functional.max_pool2d, torch.max_pool2d), nn.MaxPool2d),
    functional.avg_pool2d: nn.AvgPool2d,
    functional.adaptive_avg_pool2d: nn.AdaptiveAvgPool2d,
    **dict.fromkeys((torch.flatten, "flatten"), _flatten),
}
_KNOWN = {nn.ReLU: "relu", nn.Tanh: "tanh"}


def _layer(part: nn.Module, form: Form) -> Layer | None:
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
