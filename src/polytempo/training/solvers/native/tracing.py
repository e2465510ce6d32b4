"""What a module computes, traced with torch.fx: its layers, one after the other."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import fx, nn
from torch.nn import functional

from polytempo.training.solvers.native.layers import Unfit


class _Tracer(fx.Tracer):
    """Modules without children are layers."""

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return next(m.children(), None) is None


def traced(module: nn.Module) -> fx.Graph:
    """What it does in training; `Unfit` if it does something else outside of it, but to drop."""
    graph, tested = (_graph(module, training) for training in (True, False))
    if [_spelt(node) for node in graph.nodes] != [_spelt(node) for node in tested.nodes]:
        raise Unfit("it does something else outside of training")
    for node in tested.nodes:
        if node.target is functional.dropout and node.kwargs.get("training") is not False:
            raise Unfit("it drops numbers outside of training, too")
    return graph


def calls(module: nn.Module) -> Iterator[nn.Module]:
    """The layers that the module calls, one after the other; functions as layers."""
    last: fx.Node | None = None
    for node in traced(module).nodes:
        if node.op == "placeholder":
            if last is not None:
                raise Unfit("it takes several inputs")
            last = node
        elif node.op == "output":
            if node.args != (last,):
                raise Unfit("its output is not that of its last layer")
        elif is_size(node):
            continue
        else:
            if not node.args or node.args[0] is not last:
                raise Unfit(f"{name_of(node)} does not take the output of the layer before it")
            if any(other is last for other in node.all_input_nodes[1:]):
                raise Unfit(f"{name_of(node)} takes the output of the layer before it twice")
            yield called(module, node)
            last = node


def _graph(module: nn.Module, training: bool) -> fx.Graph:
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


def is_size(node: fx.Node) -> bool:
    """x.size(0), x.shape, x.shape[0]: such as a batch is flattened by."""
    if node.op == "call_method":
        return node.target == "size"
    return node.op == "call_function" and node.target in (getattr, operator.getitem)


def called(module: nn.Module, node: fx.Node) -> nn.Module:
    """What is called, as a layer."""
    arguments, options = node.args[1:], dict(node.kwargs)
    if node.op == "call_module":
        if arguments or options:
            raise Unfit(f"{name_of(node)} takes more than one argument")
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
                raise Unfit(f"{name_of(node)} with these arguments is not known") from error
        if node.target in ("view", "reshape", torch.reshape) and _flattens(arguments):
            return nn.Flatten()
    raise Unfit(f"{name_of(node)} is not a known layer")


def name_of(node: fx.Node) -> str:
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
    functional.adaptive_max_pool1d: nn.AdaptiveMaxPool1d,
    **dict.fromkeys((torch.flatten, "flatten"), _flatten),
}
