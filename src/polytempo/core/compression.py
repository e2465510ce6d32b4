"""Fewer bytes for an upload: what a client sends in place of its vector, and how it is read.

What is compressed is how far the client has moved the model that it received (or the gradient that
it uploads), together with what earlier compressions have left out (*error feedback*):

    x = moved + residual,    upload pack(x),    residual <- x - unpack(pack(x))

so that nothing is lost for good, only late. The residual stays in the client's memory. Rounding is
to the nearest, not at random: error feedback takes care of the bias, and no number is drawn.
The server adds what it has read to the model that it sent, so that strategies see what they asked
for.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor
from torch.nn import functional

from polytempo.core.client_steps import CLIENT_STEPS, ClientStep, Parting
from polytempo.core.errors import Refused
from polytempo.core.registry import Registry

RESIDUAL = "compression.residual"
Packed = tuple[Tensor, dict[str, Tensor]]  # the vector that travels, and what goes with it


class Compression(ClientStep):
    """Base: `pack` and `unpack` are each other's opposite, but for what is lost."""

    @property
    def keeps(self) -> tuple[str, ...]:
        return (RESIDUAL,)

    def leaving(self, parting: Parting, moved: Tensor) -> Tensor:
        whole = moved + parting.memory[RESIDUAL] if RESIDUAL in parting.memory else moved
        vector, beside = self.pack(whole)
        read = self.unpack(vector, beside, len(whole), whole.dtype)
        parting.memory[RESIDUAL] = whole - read
        parting.extras |= beside
        return vector

    def pack(self, whole: Tensor) -> Packed:
        """What travels in its place; beside the vector, exactly what `uploads` names."""
        raise NotImplementedError

    def unpack(
        self, vector: Tensor, beside: Mapping[str, Tensor], size: int, dtype: torch.dtype
    ) -> Tensor:
        """What was packed, in so many numbers of that type; `Refused` if it cannot be read."""
        raise NotImplementedError

    def nbytes(self, size: int) -> int:
        """Of what travels in place of so many numbers."""
        raise NotImplementedError


COMPRESSIONS: Registry[Compression] = Registry("compression", Compression)


@CLIENT_STEPS.register("int8")
@COMPRESSIONS.register("int8")
class Int8(Compression):
    """Whole numbers from -127 to 127, and for every `block` of them a scale in single precision:
    the block's largest number over 127. Four times fewer bytes than single precision, but 4 /
    `block` of a byte."""

    block: Annotated[int, Field(ge=1, le=65_536)] = 256

    @property
    def uploads(self) -> Mapping[str, int]:
        return {"scales": 1}

    def pack(self, whole: Tensor) -> Packed:
        blocks = functional.pad(whole, (0, -len(whole) % self.block)).view(-1, self.block)
        scales = (blocks.abs().amax(1) / 127).float()
        codes = (blocks / scales.to(blocks.dtype).clamp_min(_TINY)[:, None]).round()
        vector = codes.clamp(-127, 127).nan_to_num().to(torch.int8).flatten()[: len(whole)]
        return vector.clone(), {"scales": scales[None]}  # the scale of what is not finite is not

    def unpack(
        self, vector: Tensor, beside: Mapping[str, Tensor], size: int, dtype: torch.dtype
    ) -> Tensor:
        scales, blocks = beside["scales"], -(-size // self.block)
        _expect("scales", scales[0], (blocks,), torch.float32)
        _expect("vector", vector, (size,), torch.int8)
        return vector.to(dtype) * scales[0].to(dtype).repeat_interleave(self.block)[:size]

    def nbytes(self, size: int) -> int:
        return size + 4 * -(-size // self.block)


@CLIENT_STEPS.register("topk")
@COMPRESSIONS.register("topk")
class TopK(Compression):
    """This `share` of the numbers, those farthest from zero, as they are, and where they belong (32
    bits each)."""

    share: Annotated[float, Field(gt=0, le=1)]

    @property
    def uploads(self) -> Mapping[str, int]:
        return {"places": 1}

    def _kept(self, size: int) -> int:
        return max(1, math.ceil(self.share * size))

    def pack(self, whole: Tensor) -> Packed:
        places = whole.abs().topk(self._kept(len(whole)), sorted=False).indices.sort().values
        return whole[places], {"places": places.to(torch.int32)[None]}

    def unpack(
        self, vector: Tensor, beside: Mapping[str, Tensor], size: int, dtype: torch.dtype
    ) -> Tensor:
        places = beside["places"][0]
        _expect("places", places, (self._kept(size),), torch.int32)
        _expect("vector", vector, (self._kept(size),), dtype)
        if int(places.min()) < 0 or int(places.max()) >= size or bool((places.diff() <= 0).any()):
            raise Refused(f"its places are not increasing numbers from 0 to {size - 1}")
        found = torch.zeros(size, dtype=dtype)
        found[places.long()] = vector
        return found

    def nbytes(self, size: int) -> int:
        return 8 * self._kept(size)


_TINY = torch.finfo(torch.float32).tiny  # of a block of zeros, or of numbers too small to scale


def _expect(what: str, found: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    if found.shape != shape or found.dtype != dtype:
        raise Refused(
            f"its {what}, compressed, is {found.dtype} {list(found.shape)}, expected {dtype} "
            f"{list(shape)}"
        )
