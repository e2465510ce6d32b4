"""From a chain of layers to what is compiled, and to what tells the compiled code its sizes.

Each sample goes through the *front* by itself (convolutions and the like, whose sizes are constants
of the C++ text), the whole batch goes through the rest (whose sizes are plain numbers: all networks
without a front are one and the same library).
"""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from polytempo.core.layout import Layout
from polytempo.training.solvers.native.chain import (
    Activation,
    Conv,
    Dense,
    Dropout,
    Filters,
    Image,
    Layer,
    Norm,
    Pair,
    Pool,
    Unfit,
    Vector,
)

Places = NDArray[np.int64]
Floats = NDArray[np.float32]
_ACTIVATIONS = {"relu": 0, "tanh": 1, "gelu": 2, "gelu_tanh": 3}
_FROZEN, _SHARED, _OWN = -1, 0, 1
_MOST = 64


def up(number: int, to: int = 8) -> int:
    """To a multiple of that."""
    return -(-number // to) * to


# -- what the compiled code is told (network.hpp) ----------------------------------------------------


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
        *((name, _Kinds) for name in ("filters", "width", "weight", "bias", "weight_is", "bias_is")),
        *((n, ctypes.c_int64) for n in ("embedding", "embedding_is", "rest", "features")),
    )


class NetStruct(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_int64) for name in ("size", "inputs", "outputs", "layers", "criterion")),
        ("layer", _LayerStruct * _MOST),
        ("words", _WordsStruct),
        ("runs", ctypes.c_int64),
        ("run_from", ctypes.c_void_p),
        ("run_to", ctypes.c_void_p),
    )


# -- where numbers are -------------------------------------------------------------------------------


@dataclass(frozen=True)
class Store:
    """An image in memory, [height][width][pixel], with a border of zeros."""

    image: Image
    pixel: int
    border: Pair = (0, 0)

    @property
    def row(self) -> int:
        return (self.image.width + 2 * self.border[1]) * self.pixel

    @property
    def size(self) -> int:
        return (self.image.height + 2 * self.border[0]) * self.row

    @property
    def start(self) -> int:
        return self.border[0] * self.row + self.border[1] * self.pixel


@dataclass
class Region:
    """Where a parameter is in our vector: its numbers in the order of torch, relative to `begin`."""

    tensor: Tensor | None
    size: int
    places: Places
    begin: int = -1
    owner: int = _FROZEN


class Table:
    """Where the vectors of words are: last, and before them one number that stands for the words
    which a client does not have.

    `hole`: of the layout's vector, if they are trained.
    """

    def __init__(self, embedding: Tensor | None, layout: Layout, begin: int) -> None:
        self.regions: list[Region] = []
        self.hole: slice | None = None
        self.rows = self.numbers = self.width = 0
        self.rest, self.begin = begin, begin + 8
        if embedding is None:
            return
        self.rows, self.numbers = embedding.shape
        self.width = up(self.numbers)
        row, number = np.indices(embedding.shape)
        places = (row * self.width + number).ravel()
        rest = Region(embedding, 8, places[:0])
        self.regions = [rest, Region(embedding, self.rows * self.width, places)]
        for tensor, place in layout.trained:
            if tensor is embedding:
                self.hole = place

    def vectors(self, numbers: Floats, words: int) -> Floats:
        """The rows of so many words."""
        block = numbers[self.begin : self.begin + words * self.width]
        return block.reshape(words, self.width)[:, : self.numbers]


class Stage:
    """A layer of the front, or several that are computed in one go."""

    def __init__(self, layer: Layer, number: int, source: Store) -> None:
        self.layer, self.k, self.source = layer, number, source
        self.relu = False
        self.pool: Pool | None = None
        self.store = source
        self.regions: list[Region] = []

    def place(self, border: Pair) -> None:
        """With a border for the next one."""
        image = (self.pool or self.layer).after
        assert isinstance(image, Image)
        self.store = Store(image, up(image.channels), border)
        layer = self.layer
        if isinstance(layer, Conv):
            run = up(layer.kernel[1] * self.source.pixel)
            outputs = layer.after.channels
            assert layer.weight is not None
            o, c, kh, kw = np.indices(layer.weight.shape)
            places = (o * layer.kernel[0] + kh) * run + kw * self.source.pixel + c
            weight = Region(layer.weight, outputs * layer.kernel[0] * run, places.ravel())
            self.regions = [weight, _bias(layer.bias, outputs)]
        elif isinstance(layer, Norm):
            self.regions = [_bias(tensor, image.channels) for tensor in (layer.weight, layer.bias)]

    @property
    def trained(self) -> bool:
        return any(region.owner != _FROZEN for region in self.regions)


def _bias(tensor: Tensor | None, numbers: int) -> Region:
    return Region(tensor, up(numbers), np.arange(numbers))


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
        return bool(self.regions) and self.regions[0].owner != _FROZEN


class Program:
    """What is compiled, and how its vector of `size` numbers relates to that of a `Layout`.

    `place`: where each trained number of the layout stands among ours, but for a table of words,
    which comes last (`table`). `base`: ours, with what is frozen. `noise`: what dropout draws for
    a sample, in order: how many numbers, and the share that is dropped.
    """

    def __init__(self, layers: Sequence[Layer], layout: Layout, loss: int) -> None:
        self.filters = layers[0] if isinstance(layers[0], Filters) else None
        front, rest = _divided(layers[1:] if self.filters else layers)
        self.stages = _stages(front)
        self.batch_layers = _batch_layers(rest, self.stages)
        every: list[Stage | BatchLayer] = [*self.stages, *self.batch_layers]
        filters = _filter_regions(self.filters)
        self.regions = [*filters, *(region for each in every for region in each.regions)]
        embedding = self.filters.embedding if self.filters else None
        self.table = Table(embedding, layout, sum(r.size for r in self.regions))
        owners = {
            id(tensor): _SHARED if place.start < layout.parameters else _OWN
            for tensor, place in layout.trained
        }
        begin = 0
        for region in (*self.regions, *self.table.regions):
            region.begin, begin = begin, begin + region.size
            region.owner = owners.get(id(region.tensor), _FROZEN)
        self.size = begin
        self.base = np.zeros(self.size, np.float32)
        for each in every:
            if isinstance(each.layer, Norm) and each.layer.weight is None:
                scale = each.regions[0]
                self.base[scale.begin + scale.places] = 1
        for region in (*self.regions, *self.table.regions[1:]):
            if region.owner == _FROZEN and region.tensor is not None:
                numbers = region.tensor.detach().cpu().numpy().ravel()
                self.base[region.begin + region.places] = numbers
        found = {id(region.tensor): region for region in self.regions}
        where = [found[id(tensor)] for tensor, _ in layout.trained if tensor is not embedding]
        places = [r.begin + r.places for r in where] or [np.zeros(0, np.int64)]
        self.place = np.concatenate(places).astype(np.int32)
        drops = [each.layer for each in every if isinstance(each.layer, Dropout)]
        self.noise = [(layer.before.numbers, layer.share) for layer in drops]
        self.outputs = self.batch_layers[-1].outputs
        self.inputs = self.stages[0].source.size if front else self.batch_layers[0].inputs
        if self.filters:
            self.inputs = self.filters.before.numbers
        self.text = "\n".join(self._text())
        self.net = self._net(loss, filters)

    @property
    def used(self) -> int:
        """How many of our numbers the model at hand has."""
        words: int = self.net.words.known
        return self.size - (self.table.rows - words) * self.table.width

    def know(self, words: int) -> None:
        """The next model has this many rows in its table of words."""
        self.net.words.known = words
        if self.table.regions[-1].owner == _SHARED:  # the last of the runs
            self._runs[1][-1] = self.table.begin + words * self.table.width

    def _net(self, loss: int, filters: Sequence[Region]) -> NetStruct:
        net = NetStruct(size=self.size, inputs=self.inputs, outputs=self.outputs, criterion=loss)
        net.layers = len(self.batch_layers)
        self._describe_words(net.words, filters)
        table = self.table.regions
        below = any(stage.trained for stage in self.stages)
        below |= any(region.owner != _FROZEN for region in (*filters, *table))
        for struct, each in zip(net.layer, self.batch_layers, strict=False):
            layer = each.layer
            struct.inputs, struct.outputs, struct.wanted = each.inputs, each.outputs, int(below)
            if isinstance(layer, Dense):
                struct.kind, struct.option = 0, int(each.relu)
            elif isinstance(layer, Activation):
                struct.kind, struct.option = 1, _ACTIVATIONS[layer.kind]
            elif isinstance(layer, Dropout):
                struct.kind = 2
            else:
                assert isinstance(layer, Norm)
                struct.kind, struct.number = 3, layer.epsilon
            if each.regions:
                weight, bias = each.regions
                struct.weight, struct.bias = weight.begin, bias.begin
                struct.weight_is, struct.bias_is = weight.owner, bias.owner
                below |= weight.owner != _FROZEN or bias.owner != _FROZEN
        shared = [r for r in (*self.regions, *table) if r.owner == _SHARED]
        self._runs = (
            np.array([r.begin for r in shared], np.int64),
            np.array([r.begin + r.size for r in shared], np.int64),
        )
        net.runs = len(shared)
        net.run_from, net.run_to = (run.ctypes.data for run in self._runs)
        return net

    def _describe_words(self, words: _WordsStruct, regions: Sequence[Region]) -> None:
        if self.filters is None:
            return
        rest, table = self.table.regions
        words.length, words.features = self.filters.before.numbers, self.filters.after.numbers
        words.vector, words.known = self.table.width, self.table.rows
        words.most = self.table.rows
        words.rest, words.embedding, words.embedding_is = rest.begin, table.begin, table.owner
        words.kinds = len(self.filters.weights)
        for kind, weight in enumerate(self.filters.weights):
            words.filters[kind], _, words.width[kind] = weight.shape
            mine, bias = regions[2 * kind : 2 * kind + 2]
            words.weight[kind], words.weight_is[kind] = mine.begin, mine.owner
            words.bias[kind], words.bias_is[kind] = bias.begin, bias.owner

    # -- C++ ---------------------------------------------------------------------------------------

    def _text(self) -> Iterator[str]:
        if not self.stages:
            yield '#define NO_FRONT\n#include "network.hpp"'
            return
        stages, last = self.stages, self.stages[-1]
        noise, at = 0, {}
        for stage in stages:
            at[stage.k] = noise
            if isinstance(stage.layer, Dropout):
                noise += stage.layer.before.numbers
        rooms = [room for stage in stages for room in _room(stage, stage is last)]
        first = next((stage.k for stage in stages if stage.trained), len(stages))
        yield '#include "conv.hpp"\n#include "layers.hpp"'
        yield f"enum {{ FEATURES = {last.store.size}, SAMPLE = {self.inputs}, FRONT_NOISE = {noise} }};"
        for stage in stages:
            yield _geometry(stage)
        yield "struct Front {\n    float *grad;"
        yield from (f"    {kind} *{name};" for kind, name, _ in rooms)
        yield "};\nstatic void *take(size_t numbers);"
        yield f"static float *front_out(Front &s) {{ return s.a{last.k}; }}"
        yield f"static float *front_gradient(Front &s) {{ return s.g{last.k}; }}"
        yield "static void front_space(Front &s, long n, float *grad)\n{\n    s.grad = grad;"
        yield from (f"    s.{name} = ({kind} *)take({numbers});" for kind, name, numbers in rooms)
        yield "}\nstatic void front_free(Front &s)\n{"
        yield from (f"    free(s.{name});" for _, name, _ in rooms)
        yield "}\nstatic void front_begin(Front &s, const float *w)\n{"
        for stage in stages:
            if isinstance(stage.layer, Conv):
                yield f"    turn<G{stage.k}>(w + {stage.regions[0].begin}, s.f{stage.k});"
        arguments = "Front &s, const float *w, const float *x, long k, long n, const float *noise"
        yield f"}}\nstatic void front_forward({arguments})\n{{"
        for stage in stages:
            yield f"    {_forward(stage, at[stage.k])}"
        yield "}\nstatic void front_begin_gradient(Front &s)\n{"
        for region in (r for stage in stages for r in stage.regions if r.owner != _FROZEN):
            yield f"    memset(s.grad + {region.begin}, 0, {4 * region.size});"
        yield f"}}\nstatic void front_backward({arguments})\n{{"
        for stage in reversed(stages[first:]):
            yield from (
                f"    {line}" for line in _backward(stage, at[stage.k], stage.k > first, stage is last)
            )
        yield "}\nstatic void front_step(Front &s, float *w, const Step *how)\n{"
        for stage in stages[first:]:
            for number, region in enumerate(stage.regions):
                if region.owner == _FROZEN:
                    continue
                where = f"how[{region.owner}]", f"s.grad + {region.begin}", f"w + {region.begin}"
                if isinstance(stage.layer, Conv) and number == 0:
                    yield f"    conv_step<G{stage.k}>({', '.join(where)});"
                else:
                    yield f"    move_all({where[0]}, {region.size}, {where[1]}, {where[2]});"
        yield '}\n#include "network.hpp"'
        yield _loader(stages[0].source)


# -- dividing and fusing -----------------------------------------------------------------------------


def _divided(layers: Sequence[Layer]) -> tuple[list[Layer], list[Layer]]:
    """What each sample goes through by itself, and the rest. What follows the flattening of an image
    element by element might as well come before it."""
    front: list[Layer] = []
    rest: list[Layer] = []
    for layer in layers:
        if not rest and isinstance(layer.before, Image):
            front.append(layer)
            continue
        image = layer.before.image if isinstance(layer.before, Vector) else None
        single = isinstance(layer, Activation | Dropout)
        if not rest and front and image is not None and single:
            front.append(replace(layer, before=image, after=image))
        else:
            rest.append(layer)
    if not any(isinstance(layer, Conv | Pool | Norm) for layer in front):
        flat = [replace(e, before=Vector(e.before.numbers), after=Vector(e.after.numbers)) for e in front]
        front, rest = [], [*flat, *rest]
    if len(rest) > _MOST:
        raise Unfit(f"it has more than {_MOST} layers")
    return front, rest


def _stages(front: Sequence[Layer]) -> list[Stage]:
    found: list[Stage] = []
    for layer in front:
        last = found[-1] if found else None
        conv = last is not None and isinstance(last.layer, Conv)
        if last is not None and conv and isinstance(layer, Activation) and layer.kind == "relu":
            last.relu = True
        elif last is not None and conv and last.pool is None and _halves(layer):
            assert isinstance(layer, Pool)
            last.pool = layer
        else:
            found.append(Stage(layer, len(found), _NOWHERE))
    if found:
        image, padding = found[0].layer.before, _padding(found[0].layer)
        assert isinstance(image, Image)
        first = isinstance(found[0].layer, Conv)
        source = Store(image, image.channels if first else up(image.channels), padding)
        for stage, after in itertools.zip_longest(found, found[1:]):
            stage.source = source
            stage.place(_padding(after.layer) if after is not None else (0, 0))
            source = stage.store
    return found


_NOWHERE = Store(Image(0, 0, 0), 0)


def _halves(layer: Layer) -> bool:
    if not isinstance(layer, Pool):
        return False
    two = (2, 2)
    return (layer.kind, layer.kernel, layer.stride, layer.padding) == ("max", two, two, (0, 0))


def _padding(layer: Layer) -> Pair:
    return layer.padding if isinstance(layer, Conv) else (0, 0)


def _batch_layers(rest: Sequence[Layer], stages: Sequence[Stage]) -> list[BatchLayer]:
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
            regions = [weight, _bias(layer.bias, layer.after.numbers)]
        elif isinstance(layer, Norm):
            regions = [_bias(each, layer.after.numbers) for each in (layer.weight, layer.bias)]
        found.append(BatchLayer(layer, inputs, layer.after.numbers, False, regions))
    return found


def _filter_regions(filters: Filters | None) -> list[Region]:
    """Weights [width][filters][word's vector], and biases, of every kind."""
    found: list[Region] = []
    for weight, bias in zip(filters.weights, filters.biases, strict=True) if filters else ():
        f, number, j = np.indices(weight.shape)
        count, size, width = weight.shape
        places = (j * up(count) + f) * up(size) + number
        found.append(Region(weight, width * up(count) * up(size), places.ravel()))
        found.append(_bias(bias, count))
    return found


# -- the C++ of one stage ----------------------------------------------------------------------------


def _enum(name: str, **sizes: int) -> str:
    listed = ", ".join(f"{key} = {value}" for key, value in sizes.items())
    return f"struct {name} {{ enum {{ {listed} }}; }};"


def _geometry(stage: Stage) -> str:
    layer, source, store = stage.layer, stage.source, stage.store
    out = {"OH": store.image.height, "OW": store.image.width, "OUT": store.row}
    into = {"H": source.image.height, "W": source.image.width, "ROW": source.row}
    if isinstance(layer, Conv | Pool):
        into |= {"KH": layer.kernel[0], "KW": layer.kernel[1]}
        into |= {"SH": layer.stride[0], "SW": layer.stride[1]}
    if isinstance(layer, Pool):
        into |= {"PH": layer.padding[0], "PW": layer.padding[1], "PADDED": int(layer.padded)}
    if isinstance(layer, Conv):
        out["O"] = layer.after.channels
    if isinstance(layer, Norm):
        out["GROUPS"] = layer.groups
    return _enum(f"G{stage.k}", C=source.image.channels, S=source.pixel, **into, **out)


def _offsets(stage: Stage) -> int:
    """How many winners of pooling are remembered per sample."""
    pooled = stage.pool is not None or (isinstance(stage.layer, Pool) and stage.layer.kind == "max")
    return stage.store.image.height * stage.store.image.width * stage.store.pixel if pooled else 0


def _room(stage: Stage, last: bool) -> Iterator[tuple[str, str, str]]:
    k, size = stage.k, stage.store.size
    yield "float", f"a{k}", f"n * {size}"
    yield "float", f"g{k}", f"n * {size}" if last else str(size)
    if _offsets(stage):
        yield "int32_t", f"o{k}", f"n * {_offsets(stage)}"
    if isinstance(stage.layer, Conv):
        yield "float", f"f{k}", f"Sizes<G{k}>::TURNED"
    if isinstance(stage.layer, Norm):
        yield "float", f"k{k}", f"n * {2 * stage.source.pixel}"


def _input(stage: Stage) -> str:
    return f"s.a{stage.k - 1} + k * {stage.source.size}" if stage.k else "x"


def _places(stage: Stage) -> tuple[str, str]:
    """What comes out of the stage, and the winners of its pooling, for sample k."""
    out = f"s.a{stage.k} + k * {stage.store.size} + {stage.store.start}"
    return out, f"s.o{stage.k} + k * {_offsets(stage)}" if _offsets(stage) else "0"


def _forward(stage: Stage, noise: int) -> str:
    k, layer, source = stage.k, stage.layer, _input(stage)
    out, off = _places(stage)
    relu = str(stage.relu).lower()
    if isinstance(layer, Conv):
        rest = f"({source}, s.f{k}, w + {stage.regions[1].begin}, {out}"
        if stage.pool is None:
            return f"conv_forward<G{k}, {relu}>{rest});"
        down = str(not stage.pool.across).lower()
        return f"conv_pool_forward<G{k}, {relu}, {down}>{rest}, {off});"
    if isinstance(layer, Pool):
        if layer.kind == "max":
            return f"max_pool_forward<G{k}>({source}, {out}, {off});"
        return f"mean_pool_forward<G{k}>({source}, {out});"
    if isinstance(layer, Norm):
        scale, shift = (f"w + {region.begin}" for region in stage.regions)
        kept = f"s.k{k} + k * {2 * stage.source.pixel}"
        call = f"({layer.epsilon!r}f, {source}, {scale}, {shift}, {out}, {kept});"
        return f"group_norm_forward<G{k}>{call}"
    if isinstance(layer, Dropout):
        return f"drop_image<G{k}>({_noise(layer, noise)}, {source}, {out});"
    assert isinstance(layer, Activation)
    return f"activate_image<G{k}>({_ACTIVATIONS[layer.kind]}, {source}, {out});"


def _noise(layer: Dropout, before: int) -> str:
    return f"noise ? noise + n * {before} + k * {layer.before.numbers} : 0"


def _backward(stage: Stage, noise: int, wanted: bool, last: bool) -> Iterator[str]:
    k, layer, source = stage.k, stage.layer, _input(stage)
    _, off = _places(stage)
    whole = f"s.g{k} + k * {stage.store.size}" if last else f"s.g{k}"
    if stage.relu:
        yield f"mask_gradient({stage.store.size}, s.a{k} + k * {stage.store.size}, {whole});"
    g, dx = f"{whole} + {stage.store.start}", f"s.g{k - 1}"
    if wanted and isinstance(layer, Conv | Pool):
        yield f"memset({dx}, 0, {4 * stage.source.size});"
    if isinstance(layer, Conv):
        weight, bias = stage.regions
        kind = f"<G{k}, {str(stage.pool is not None).lower()}>"
        if bias.owner != _FROZEN:
            yield f"conv_bias_backward<G{k}>({g}, s.grad + {bias.begin});"
        if weight.owner != _FROZEN:
            yield f"conv_weights_backward{kind}({source}, {off}, {g}, s.grad + {weight.begin});"
        if wanted:
            yield f"conv_data_backward{kind}({off}, {g}, w + {weight.begin}, {dx});"
    elif isinstance(layer, Pool) and wanted:
        if layer.kind == "max":
            yield f"max_pool_backward<G{k}>({off}, {g}, {dx});"
        else:
            yield f"mean_pool_backward<G{k}>({g}, {dx});"
    elif isinstance(layer, Norm):
        scale, shift = (f"s.grad + {region.begin}" for region in stage.regions)
        kept = f"s.k{k} + k * {2 * stage.source.pixel}"
        given = f"{source}, w + {stage.regions[0].begin}, {kept}, {g}, {scale}, {shift}"
        yield f"group_norm_backward<G{k}>({given}, {dx if wanted else 0});"
    elif isinstance(layer, Dropout) and wanted:
        yield f"drop_image_backward<G{k}>({_noise(layer, noise)}, {g}, {dx});"
    elif isinstance(layer, Activation) and wanted:
        yield f"activate_image_backward<G{k}>({_ACTIVATIONS[layer.kind]}, {source}, {g}, {dx});"


def _loader(source: Store) -> str:
    """Samples [channel][pixel], bytes or numbers, as the front takes them."""
    image = source.image
    sizes = f"{image.channels}, {image.height}, {image.width}, {source.pixel}, {source.row}, {source.size}"
    return f"""extern "C" void load_bytes(long n, const uint8_t *from, const float *scale, const float *shift, float *to)
{{
    load<{sizes}>(n, from, scale, shift, to + {source.start});
}}
extern "C" void load_numbers(long n, const float *from, const float *scale, const float *shift, float *to)
{{
    load<{sizes}>(n, from, scale, shift, to + {source.start});
}}"""
