"""An `nn.Module` as a chain of known layers: a list, each the input of the next, or the reason why
the module is not such a chain."""

from __future__ import annotations

import math

import torch
from torch import nn

from polytempo.training.solvers.native.layers import (
    Dense,
    Form,
    Image,
    Layer,
    Unfit,
    Vector,
    layer_of,
)
from polytempo.training.solvers.native.texts import text_layers
from polytempo.training.solvers.native.tracing import calls


def chain(module: nn.Module, shape: tuple[int, ...], tokens: bool = False) -> list[Layer]:
    """The layers of the module, for samples of that shape; `Unfit` if it is no such chain."""
    if any(parameter.dtype != torch.float32 for parameter in module.parameters()):
        raise Unfit("its parameters are not all float32")
    if next(module.buffers(), None) is not None:
        raise Unfit("it has buffers (running statistics)")
    for part in module.modules():
        if any(getattr(part, hooks) for hooks in _HOOKS) or "forward" in vars(part):
            raise Unfit("it has hooks")
    try:
        found = text_layers(module, shape) if tokens else _layers(module, shape)
    except (LookupError, TypeError, ValueError, AttributeError) as error:  # a call like no other
        raise Unfit("its graph is not understood") from error
    ids = [id(tensor) for layer in found for tensor in layer.parameters()]
    if len(set(ids)) < len(ids):
        raise Unfit("a parameter is used twice")
    if set(ids) != {id(parameter) for parameter in module.parameters()}:
        raise Unfit("it has parameters that no layer uses")
    if not found or not isinstance(found[-1], Dense):
        raise Unfit("it does not end in a linear layer")
    return found


def _layers(module: nn.Module, shape: tuple[int, ...]) -> list[Layer]:
    parts = calls(module)
    form: Form = Image(*shape) if len(shape) == 3 else Vector(math.prod(shape))
    if len(shape) not in (1, 3):  # known only if they are flattened
        first = next(parts, None)
        if not isinstance(first, nn.Flatten):
            raise Unfit(f"its samples have {len(shape)} dimensions, and it does not flatten them")
        layer_of(first, form)
    found: list[Layer] = []
    for part in parts:
        layer = layer_of(part, form)
        if layer is not None:
            form = layer.after
            if not isinstance(part, nn.Flatten):
                found.append(layer)
    return found


_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
