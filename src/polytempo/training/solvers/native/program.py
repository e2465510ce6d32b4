"""From a chain of layers to what is compiled, and to what tells the compiled code its sizes.

Each sample goes through the *front* by itself (convolutions and the like, whose sizes are constants
of the C++ text), the whole batch goes through the rest (whose sizes are plain numbers: all networks
without a front are one and the same library).
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from torch import Tensor

from polytempo.core.layout import Layout
from polytempo.training.solvers.native import front
from polytempo.training.solvers.native.layers import (
    ACTIVATIONS,
    Activation,
    Conv,
    Dense,
    Dropout,
    Filters,
    Gated,
    Image,
    Layer,
    Norm,
    Pool,
    Unfit,
    Vector,
)
from polytempo.training.solvers.native.places import (
    FROZEN,
    OWN,
    SHARED,
    Places,
    Region,
    Table,
    bias_region,
    up,
)

_MOST = 64  # layers
_WHOLE = '#define NO_FRONT\n#include "network.hpp"'


# -- what the compiled code is told (network.hpp) --------------------------------------------------


class _LayerStruct(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_int64) for name in ("kind", "option", "inputs", "outputs")),
        *((name, ctypes.c_int64) for name in ("weight", "bias", "weight_is", "bias_is", "wanted")),
        ("number", ctypes.c_double),
    )


_Kinds = ctypes.c_int64 * 8


class _WordsStruct(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_int64) for name in ("length", "known", "most", "vector", "kinds")),
        *(
            (name, _Kinds)
            for name in ("filters", "width", "weight", "bias", "weight_is", "bias_is")
        ),
        *((n, ctypes.c_int64) for n in ("embedding", "embedding_is", "rest", "features")),
    )


_GATED = ("embedding", "input", "hidden", "input_bias", "hidden_bias")


class _RecurrentStruct(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_int64) for name in ("length", "tokens", "vector", "units")),
        *((name, ctypes.c_int64) for name in (*_GATED, *(f"{name}_is" for name in _GATED))),
    )


class NetStruct(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_int64) for name in ("size", "inputs", "outputs", "layers", "criterion")),
        ("layer", _LayerStruct * _MOST),
        ("words", _WordsStruct),
        ("recurrent", _RecurrentStruct),
        ("runs", ctypes.c_int64),
        ("run_from", ctypes.c_void_p),
        ("run_to", ctypes.c_void_p),
    )


@dataclass
class BatchLayer:
    """A layer of what the batch goes through."""

    layer: Layer
    inputs: int  # as stored
    outputs: int
    relu: bool
    regions: list[Region]

    @property
    def trained(self) -> bool:
        """Whether its matrix is."""
        return bool(self.regions) and self.regions[0].owner != FROZEN


class Program:
    """What is compiled, and how its vector of `size` numbers relates to that of a `Layout`.

    `place`: where each trained number of the layout stands among ours, but for a table of words,
    which comes last (`table`). `base`: ours, with what is frozen. `noise`: what dropout draws for
    a sample, in order: how many numbers, and the share that is dropped.
    """

    def __init__(self, layers: Sequence[Layer], layout: Layout, loss: int) -> None:
        self.filters = layers[0] if isinstance(layers[0], Filters) else None
        self.gated = layers[0] if isinstance(layers[0], Gated) else None
        self.tokens = bool(self.filters or self.gated)
        own, rest = _divided(layers[1:] if self.tokens else layers)
        self.stages = front.stages(own)
        self.batch_layers = _batch_layers(rest, self.stages)
        every: list[front.Stage | BatchLayer] = [*self.stages, *self.batch_layers]
        first = _filter_regions(self.filters) if self.filters else _gate_regions(self.gated)
        self.regions = [*first, *(region for each in every for region in each.regions)]
        embedding = self.filters.embedding if self.filters else None
        self.table = Table(embedding, layout, sum(r.size for r in self.regions))
        owners = {
            id(tensor): SHARED if place.start < layout.parameters else OWN
            for tensor, place in layout.trained
        }
        begin = 0
        for region in (*self.regions, *self.table.regions):
            region.begin, begin = begin, begin + region.size
            region.owner = owners.get(id(region.tensor), FROZEN)
        self.size = begin
        self.base = np.zeros(self.size, np.float32)
        for each in every:
            if isinstance(each.layer, Norm) and each.layer.weight is None:
                scale = each.regions[0]
                self.base[scale.begin + scale.places] = 1
        for region in (*self.regions, *self.table.regions[1:]):
            if region.owner == FROZEN and region.tensor is not None:
                numbers = region.tensor.detach().cpu().numpy().ravel()
                self.base[region.begin + region.places] = numbers
        found = {id(region.tensor): region for region in self.regions}
        where = [found[id(tensor)] for tensor, _ in layout.trained if tensor is not embedding]
        places = [r.begin + r.places for r in where] or [np.zeros(0, np.int64)]
        self.place = np.concatenate(places).astype(np.int32)
        drops = [each.layer for each in every if isinstance(each.layer, Dropout)]
        self.noise = [(layer.before.numbers, layer.share) for layer in drops]
        self.outputs = self.batch_layers[-1].outputs
        self.inputs = self.stages[0].source.size if self.stages else self.batch_layers[0].inputs
        if self.tokens:
            self.inputs = layers[0].before.numbers
        self.text = front.text(self.stages) if self.stages else _WHOLE
        self.net = self._net(loss, first)

    @property
    def used(self) -> int:
        """How many of our numbers the model at hand has."""
        words: int = self.net.words.known
        return self.size - (self.table.rows - words) * self.table.width

    def know(self, words: int) -> None:
        """The next model has this many rows in its table of words."""
        self.net.words.known = words
        if self.table.regions[-1].owner == SHARED:  # the last of the runs
            self._runs[1][-1] = self.table.begin + words * self.table.width

    def _net(self, loss: int, first: Sequence[Region]) -> NetStruct:
        net = NetStruct(size=self.size, inputs=self.inputs, outputs=self.outputs, criterion=loss)
        net.layers = len(self.batch_layers)
        if self.filters:
            self._describe_filters(net.words, self.filters, first)
        if self.gated:
            self._describe_gates(net.recurrent, self.gated, first)
        table = self.table.regions
        below = any(stage.trained for stage in self.stages)
        below |= any(region.owner != FROZEN for region in (*first, *table))
        for struct, each in zip(net.layer, self.batch_layers, strict=False):
            layer = each.layer
            struct.inputs, struct.outputs, struct.wanted = each.inputs, each.outputs, int(below)
            if isinstance(layer, Dense):
                struct.kind, struct.option = 0, int(each.relu)
            elif isinstance(layer, Activation):
                struct.kind, struct.option = 1, ACTIVATIONS[layer.kind]
            elif isinstance(layer, Dropout):
                struct.kind = 2
            else:
                assert isinstance(layer, Norm)
                struct.kind, struct.number = 3, layer.epsilon
            if each.regions:
                weight, bias = each.regions
                struct.weight, struct.bias = weight.begin, bias.begin
                struct.weight_is, struct.bias_is = weight.owner, bias.owner
                below |= weight.owner != FROZEN or bias.owner != FROZEN
        shared = [r for r in (*self.regions, *table) if r.owner == SHARED]
        self._runs = (
            np.array([r.begin for r in shared], np.int64),
            np.array([r.begin + r.size for r in shared], np.int64),
        )
        net.runs = len(shared)
        net.run_from, net.run_to = (run.ctypes.data for run in self._runs)
        return net

    def _describe_filters(
        self, words: _WordsStruct, filters: Filters, regions: Sequence[Region]
    ) -> None:
        rest, table = self.table.regions
        words.length, words.features = filters.before.numbers, filters.after.numbers
        words.vector, words.known = self.table.width, self.table.rows
        words.most = self.table.rows
        words.rest, words.embedding, words.embedding_is = rest.begin, table.begin, table.owner
        words.kinds = len(filters.weights)
        for kind, weight in enumerate(filters.weights):
            words.filters[kind], _, words.width[kind] = weight.shape
            mine, bias = regions[2 * kind : 2 * kind + 2]
            words.weight[kind], words.weight_is[kind] = mine.begin, mine.owner
            words.bias[kind], words.bias_is[kind] = bias.begin, bias.owner

    def _describe_gates(
        self, recurrent: _RecurrentStruct, gated: Gated, regions: Sequence[Region]
    ) -> None:
        recurrent.length, recurrent.units = gated.before.numbers, gated.after.numbers
        recurrent.tokens, recurrent.vector = gated.embedding.shape
        for name, region in zip(_GATED, regions, strict=True):
            setattr(recurrent, name, region.begin)
            setattr(recurrent, f"{name}_is", region.owner)


# -- dividing and fusing ---------------------------------------------------------------------------


def _divided(layers: Sequence[Layer]) -> tuple[list[Layer], list[Layer]]:
    """What each sample goes through by itself, and the rest. What follows the flattening of an
    image element by element might as well come before it."""
    alone: list[Layer] = []
    rest: list[Layer] = []
    for layer in layers:
        if not rest and isinstance(layer.before, Image):
            alone.append(layer)
            continue
        image = layer.before.image if isinstance(layer.before, Vector) else None
        single = isinstance(layer, Activation | Dropout)
        if not rest and alone and image is not None and single:
            alone.append(replace(layer, before=image, after=image))
        else:
            rest.append(layer)
    if not any(isinstance(layer, Conv | Pool | Norm) for layer in alone):
        flat = [
            replace(e, before=Vector(e.before.numbers), after=Vector(e.after.numbers))
            for e in alone
        ]
        alone, rest = [], [*flat, *rest]
    if len(rest) > _MOST:
        raise Unfit(f"it has more than {_MOST} layers")
    return alone, rest


def _batch_layers(rest: Sequence[Layer], stages: Sequence[front.Stage]) -> list[BatchLayer]:
    found: list[BatchLayer] = []
    for layer in rest:
        relu = isinstance(layer, Activation) and layer.kind == "relu"
        if relu and found and isinstance(found[-1].layer, Dense):
            found[-1].relu = True
            continue
        assert isinstance(layer.after, Vector)
        inputs = up(layer.before.numbers)
        if not found and stages:
            inputs = stages[-1].store.size
        regions: list[Region] = []
        if isinstance(layer, Dense):
            assert layer.weight is not None
            o, i = np.indices(layer.weight.shape)
            if not found and stages:  # [channel][pixel] in torch, [pixel][channel] here
                image = stages[-1].store.image
                cells = image.height * image.width
                i = i % cells * up(image.channels) + i // cells
            size = up(layer.after.numbers, 4) * inputs
            weight = Region(layer.weight, size, (o * inputs + i).ravel())
            regions = [weight, bias_region(layer.bias, layer.after.numbers)]
        elif isinstance(layer, Norm):
            regions = [
                bias_region(each, layer.after.numbers) for each in (layer.weight, layer.bias)
            ]
        found.append(BatchLayer(layer, inputs, layer.after.numbers, False, regions))
    return found


def _gate_regions(gated: Gated | None) -> list[Region]:
    """The table of tokens; weights and biases of the gates, each gate rounded up to 8 rows."""
    if gated is None:
        return []
    units, tokens = gated.after.numbers, len(gated.embedding)
    found = [_matrix(gated.embedding, np.arange(tokens), tokens)]
    row = np.arange(3 * units)
    row = row // units * up(units) + row % units
    found += [_matrix(weight, row, 3 * up(units)) for weight in (gated.input, gated.hidden)]
    found += [Region(bias, 3 * up(units), row) for bias in (gated.input_bias, gated.hidden_bias)]
    return found


def _matrix(tensor: Tensor, rows: Places, height: int) -> Region:
    """A matrix whose rows come in these places, among so many."""
    width = up(tensor.shape[1])
    places = rows[:, None] * width + np.arange(tensor.shape[1])
    return Region(tensor, up(height, 4) * width, places.ravel())


def _filter_regions(filters: Filters) -> list[Region]:
    """Weights [width][filters][word's vector], and biases, of every kind."""
    found: list[Region] = []
    for weight, bias in zip(filters.weights, filters.biases, strict=True):
        f, number, j = np.indices(weight.shape)
        count, size, width = weight.shape
        places = (j * up(count) + f) * up(size) + number
        found.append(Region(weight, width * up(count) * up(size), places.ravel()))
        found.append(bias_region(bias, count))
    return found
