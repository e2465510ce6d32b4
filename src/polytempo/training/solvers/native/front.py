"""What each sample goes through by itself, as C++: convolutions and the like.

All sizes are constants of the text: the kernels are templates over them.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

import numpy as np

from polytempo.training.solvers.native.layers import (
    ACTIVATIONS,
    Activation,
    Conv,
    Dropout,
    Image,
    Layer,
    Norm,
    Pair,
    Pool,
)
from polytempo.training.solvers.native.places import (
    FROZEN,
    Region,
    Store,
    bias_region,
    up,
)


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
            self.regions = [weight, bias_region(layer.bias, outputs)]
        elif isinstance(layer, Norm):
            self.regions = [
                bias_region(tensor, image.channels) for tensor in (layer.weight, layer.bias)
            ]

    @property
    def trained(self) -> bool:
        return any(region.owner != FROZEN for region in self.regions)


def stages(layers: Sequence[Layer]) -> list[Stage]:
    found: list[Stage] = []
    for layer in layers:
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


# -- the C++ of all of them ------------------------------------------------------------------------


def text(stages: Sequence[Stage]) -> str:
    """What network.hpp wants of the front."""
    return "\n".join(_lines(stages))


def _lines(stages: Sequence[Stage]) -> Iterator[str]:
    last = stages[-1]
    noise, at = 0, {}
    for stage in stages:
        at[stage.k] = noise
        if isinstance(stage.layer, Dropout):
            noise += stage.layer.before.numbers
    rooms = [room for stage in stages for room in _room(stage, stage is last)]
    first = next((stage.k for stage in stages if stage.trained), len(stages))
    yield '#include "conv.hpp"\n#include "layers.hpp"'
    sizes = f"FEATURES = {last.store.size}, SAMPLE = {stages[0].source.size}"
    yield f"enum {{ {sizes}, FRONT_NOISE = {noise} }};"
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
    for region in (r for stage in stages for r in stage.regions if r.owner != FROZEN):
        yield f"    memset(s.grad + {region.begin}, 0, {4 * region.size});"
    yield f"}}\nstatic void front_backward({arguments})\n{{"
    for stage in reversed(stages[first:]):
        yield from (
            f"    {line}" for line in _backward(stage, at[stage.k], stage.k > first, stage is last)
        )
    yield "}\nstatic void front_step(Front &s, float *w, const Step *how)\n{"
    for stage in stages[first:]:
        for number, region in enumerate(stage.regions):
            if region.owner == FROZEN:
                continue
            where = f"how[{region.owner}]", f"s.grad + {region.begin}", f"w + {region.begin}"
            if isinstance(stage.layer, Conv) and number == 0:
                yield f"    conv_step<G{stage.k}>({', '.join(where)});"
            else:
                yield f"    move_all({where[0]}, {region.size}, {where[1]}, {where[2]});"
    yield '}\n#include "network.hpp"'
    yield _loader(stages[0].source)


# -- the C++ of one stage --------------------------------------------------------------------------


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
        call = f"({float(layer.epsilon)!r}f, {source}, {scale}, {shift}, {out}, {kept});"
        return f"group_norm_forward<G{k}>{call}"
    if isinstance(layer, Dropout):
        return f"drop_image<G{k}>({_noise(layer, noise)}, {source}, {out});"
    assert isinstance(layer, Activation)
    return f"activate_image<G{k}>({ACTIVATIONS[layer.kind]}, {source}, {out});"


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
        if bias.owner != FROZEN:
            yield f"conv_bias_backward<G{k}>({g}, s.grad + {bias.begin});"
        if weight.owner != FROZEN:
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
        yield f"activate_image_backward<G{k}>({ACTIVATIONS[layer.kind]}, {source}, {g}, {dx});"


def _loader(source: Store) -> str:
    """Samples [channel][pixel], bytes or numbers, as the front takes them."""
    image, to = source.image, f"to + {source.start}"
    sizes = (image.channels, image.height, image.width, source.pixel, source.row, source.size)
    call = f"load<{', '.join(map(str, sizes))}>(n, from, scale, shift, {to});"
    rest = "const float *scale, const float *shift, float *to"
    return "\n".join(
        f'extern "C" void {name}(long n, const {kind} *from, {rest})\n{{\n    {call}\n}}'
        for name, kind in (("load_bytes", "uint8_t"), ("load_numbers", "float"))
    )
