"""Networks for tokens: filters over words, each maximised over time (TextCNN), and one layer of
gated recurrent units.

Everybody spells them in another way, so we follow what becomes of the tokens through the traced
graph: each node has a value, which says what is known of it.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import fx, nn
from torch.nn import functional

from polytempo.models.textcnn import TextNetwork
from polytempo.training.solvers.native.layers import (
    Dropout,
    Filters,
    Gated,
    Layer,
    Unfit,
    Vector,
    layer_of,
)
from polytempo.training.solvers.native.tracing import called, is_size, name_of, traced

_KINDS, _FILTERS = 8, 1024  # of filters, and of one kind, at most


@dataclass(frozen=True)
class _Tokens:
    """The tokens of a text."""


@dataclass(frozen=True)
class _Words:
    """The vectors of its words, [length, numbers]; `turned`: [numbers, length]."""

    table: nn.Embedding
    turned: bool = False


@dataclass(frozen=True)
class _Responses:
    """Of filters: in all windows [filters, windows], the highest [filters, 1] or [filters]; of
    several kinds side by side, these."""

    table: nn.Embedding
    filters: tuple[nn.Conv1d, ...]
    relu: bool = False
    form: Literal["windows", "highest", "flat"] = "windows"


@dataclass(frozen=True)
class _Both:
    """A pair, of which only the first is known."""

    first: _Responses | tuple[Layer, ...]


_Value = _Tokens | _Words | _Responses | _Both | tuple[Layer, ...] | None  # None: not known


def text_layers(module: nn.Module, shape: tuple[int, ...]) -> list[Layer]:
    """The layers of a network for that many tokens."""
    if type(module) is TextNetwork:  # the same in another order, which depends on the tokens
        convolutions = [layer for layer in module.convolutions if isinstance(layer, nn.Conv1d)]
        layers = _filter_layers(module.embedding, convolutions, shape[0])
        for part in (module.dropout, module.output):
            layers = _extended(layers, part)
        return list(layers)
    values: dict[fx.Node, _Value] = {}
    for node in traced(module).nodes:
        if node.op == "output":
            break
        if node.op == "placeholder":
            if values:
                raise Unfit("it takes several inputs")
            values[node] = _Tokens()
        elif not node.users and not is_size(node):
            raise Unfit(f"nothing is done with what {name_of(node)} finds")
        else:
            values[node] = _value(module, node, values, shape[0])
    last = values.get(node.args[0])
    if not isinstance(last, tuple):
        raise Unfit("its output is not that of a layer")
    return list(last)


def _value(
    module: nn.Module, node: fx.Node, values: Mapping[fx.Node, _Value], length: int
) -> _Value:
    if node.target in _JOINING:
        return _joined(node, values)
    value = values.get(node.args[0]) if node.args and isinstance(node.args[0], fx.Node) else None
    if isinstance(value, _Both) and is_size(node):  # [0], [1] or .values
        return value.first if node.args[1] in (0, "values") else None
    if is_size(node):
        return None
    if isinstance(value, _Words) and node.target in _TURNING:
        if _places(node) not in _SWAPS:
            raise Unfit(f"{name_of(node)} does more than to turn words and their vectors around")
        return replace(value, turned=not value.turned)
    if isinstance(value, _Responses):
        found = _of_responses(module, node, values, length)
        if found is not None:
            return found
        if value.form == "flat":
            value = _filter_layers(value.table, value.filters, length, value.relu)
    for part in [called(module, node)] if value is not None else []:
        if isinstance(value, _Tokens) and type(part) is nn.Embedding:
            return _Words(_table(part))
        if isinstance(value, _Words) and type(part) is nn.Conv1d and value.turned:
            return _Responses(value.table, (_filters(part),))
        if isinstance(value, _Words) and type(part) is nn.GRU and not value.turned:
            return _Both((_gated(part, value.table, length),))
        if isinstance(value, tuple):
            return _extended(value, part)
    raise Unfit(f"{name_of(node)} is not known at this place of a network for tokens")


# -- single steps ----------------------------------------------------------------------------------


def _of_responses(
    module: nn.Module, node: fx.Node, values: Mapping[fx.Node, _Value], length: int
) -> _Responses | _Both | None:
    """The highest of all windows, in any spelling, before or after ReLU; None: something else."""
    value = values[node.all_input_nodes[0]]
    assert isinstance(value, _Responses)
    if node.target in {"windows": _MOST, "highest": _SQUEEZING, "flat": ()}[value.form]:
        if _places(node) not in ((2,), (-1,)):
            raise Unfit(f"{name_of(node)} is not over time")
        found = replace(value, form="flat")
        return _Both(found) if node.target in _PAIRING else found
    if value.form == "windows" and node.target in _POOLING:
        if not _is_whole(node, values, length - value.filters[0].kernel_size[0] + 1):
            raise Unfit(f"{name_of(node)} is not over all of the time")
        return replace(value, form="highest")
    part = called(module, node)
    if type(part) is nn.ReLU:
        return replace(value, relu=True)
    if type(part) is nn.AdaptiveMaxPool1d and value.form == "windows":
        if part.output_size not in (1, (1,)) or part.return_indices:
            raise Unfit("adaptive pooling is to more than one number")
        return replace(value, form="highest")
    if type(part) is nn.Flatten and value.form == "highest" and part.start_dim == 1:
        return replace(value, form="flat")
    return None


def _joined(node: fx.Node, values: Mapping[fx.Node, _Value]) -> _Responses:
    """What the filters of all kinds find, side by side."""
    given: Any = node.args[0] if node.args else node.kwargs["tensors"]
    parts = [values.get(part) for part in given]
    found = [p for p in parts if isinstance(p, _Responses) and p.form == "flat"]
    if len(found) < len(parts) or _places(node) not in ((1,), (-1,)):
        raise Unfit("it joins something else than what filters have found")
    first = found[0]
    if any((part.table, part.relu) != (first.table, first.relu) for part in found):
        raise Unfit("its kinds of filters differ in more than their width")
    return replace(first, filters=tuple(kind for part in found for kind in part.filters))


def _filter_layers(
    table: nn.Embedding, filters: Sequence[nn.Conv1d], length: int, relu: bool = True
) -> tuple[Layer, ...]:
    weights = tuple(part.weight for part in filters)
    biases = tuple(part.bias for part in filters if part.bias is not None)
    if not relu:
        raise Unfit("its filters are not followed by ReLU")
    if len(weights) > _KINDS or max(len(weight) for weight in weights) > _FILTERS:
        raise Unfit(f"it has more than {_KINDS} kinds, or {_FILTERS} of a kind, of filters")
    if length < max(weight.shape[2] for weight in weights):
        raise Unfit("its texts are shorter than a filter is wide")
    features = Vector(sum(len(weight) for weight in weights))
    return (Filters(Vector(length), features, table.weight, weights, biases),)


def _gated(part: nn.GRU, table: nn.Embedding, length: int) -> Gated:
    if part.num_layers > 1 or part.bidirectional or not part.bias or not part.batch_first:
        raise Unfit("of recurrent units one layer is known, in one direction, samples first")
    names = ("weight_ih_l0", "weight_hh_l0", "bias_ih_l0", "bias_hh_l0")
    gates = (getattr(part, name) for name in names)
    return Gated(Vector(length), Vector(part.hidden_size), table.weight, *gates)


def _extended(layers: Sequence[Layer], part: nn.Module) -> tuple[Layer, ...]:
    layer = layer_of(part, layers[-1].after)
    if isinstance(layers[0], Gated) and isinstance(layer, Dropout):
        raise Unfit("it drops states of recurrent units")
    if layer is None or type(part) is nn.Flatten:
        return tuple(layers)
    return (*layers, layer)


def _table(part: nn.Embedding) -> nn.Embedding:
    if part.padding_idx != 0:
        raise Unfit("token 0 is not the padding_idx of its embedding")
    if part.max_norm is not None or part.scale_grad_by_freq or part.sparse:
        raise Unfit("its embedding has max_norm, scale_grad_by_freq or sparse")
    return part


def _filters(part: nn.Conv1d) -> nn.Conv1d:
    if (part.stride, part.dilation, part.groups) != ((1,), (1,), 1) or part.bias is None:
        raise Unfit("its filters have a stride, dilation or groups, or no bias")
    if part.padding not in ((0,), "valid"):
        raise Unfit("its filters see beyond the text")
    return part


# -- how these are spelled -------------------------------------------------------------------------

_JOINING = (torch.cat, torch.concat)
_TURNING = ("transpose", torch.transpose, "permute", torch.permute)
_SWAPS = ((1, 2), (2, 1), (-1, -2), (-2, -1), (1, -1), (-1, 1), (0, 2, 1), (0, -1, 1))
_PAIRING = ("max", torch.max)  # with where the highest is
_MOST = ("amax", torch.amax, *_PAIRING)
_POOLING = (functional.max_pool1d, torch.max_pool1d)
_POOLING_DEFAULTS = {
    "stride": None,
    "padding": 0,
    "dilation": 1,
    "ceil_mode": False,
    "return_indices": False,
}
_SQUEEZING = ("squeeze", torch.squeeze)


def _places(node: fx.Node) -> tuple[Any, ...]:
    """The dimensions that it is given."""
    named = {key: value for key, value in node.kwargs.items() if key not in ("input", "tensors")}
    if named.keys() - {"dim", "dims", "dim0", "dim1"}:
        raise Unfit(f"{name_of(node)} with these arguments is not known")
    given = [*node.args[1:], *named.values()]
    if len(given) == 1 and isinstance(given[0], tuple | list):
        given = list(given[0])
    return tuple(given)


def _is_whole(node: fx.Node, values: Mapping[fx.Node, _Value], windows: int) -> bool:
    """Whether pooling takes in all windows: their number, x.size(2) or x.shape[2]."""
    named: dict[str, Any] = dict(node.kwargs)
    given: list[Any] = [*node.args[1:], named.pop("kernel_size", None)]
    size, *more = [each for each in given if each is not None]
    if more or named.items() - _POOLING_DEFAULTS.items():
        return False
    if not isinstance(size, fx.Node):
        return isinstance(size, int) and size == windows
    seen, place = _measured(size)
    windows_of = [values.get(each) for each in (seen, node.all_input_nodes[0]) if each is not None]
    forms = [(v.form, v.filters) for v in windows_of if isinstance(v, _Responses)]
    return len(forms) == 2 and forms[0] == forms[1] and place in (2, -1)


def _measured(size: fx.Node) -> tuple[fx.Node | None, object]:
    """Of x.size(2) or x.shape[2]: x and 2."""
    source, place = (*size.args, None)[:2]
    if size.target is operator.getitem and isinstance(source, fx.Node):
        source, what = source.args
        place = place if what == "shape" else None
    elif size.target != "size":
        return None, None
    return source if isinstance(source, fx.Node) else None, place
