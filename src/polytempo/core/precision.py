"""How the numbers of a bank are written down: as they are, in 16 bits, or in 8.

A format packs a matrix of numbers into what is stored, and unpacks it again; a range of columns is
found in a range of what is stored.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional

from polytempo.core.rng import rng, stream_seed

GROUP = 128  # numbers that share a scale
SCALE = 4  # bytes of a scale, a float32 number


class Exact:
    """As they are."""

    largest: ClassVar[float | None] = None  # numbers beyond it cannot be held
    rounds: ClassVar[bool] = False  # whether numbers change when they are written down
    draws_in_order: ClassVar[bool] = False  # whether `pack` draws random numbers
    group: int = 1  # columns can be taken apart at multiples of it

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self.draws = 0  # how often random numbers have been drawn

    def place(self, columns: slice) -> slice:
        """Where these columns are stored."""
        return columns

    def pack(self, values: Tensor) -> Tensor:
        """What is stored of a matrix of numbers."""
        return values.to(self.dtype)

    def key(self) -> int:
        """A new name for random numbers that compiled code draws in place of `pack`."""
        return 0

    def unpack(self, stored: Tensor, room: Tensor) -> Tensor:
        """The numbers again: what is stored itself, or written to `room`, which has their precision
        and at least as many rows and columns."""
        return stored


class Half(Exact):
    """In half precision: each number is rounded to 11 bits."""

    largest = 65504
    rounds = True

    def __init__(self) -> None:
        super().__init__(torch.float16)

    def unpack(self, stored: Tensor, room: Tensor) -> Tensor:
        rows, columns = stored.shape
        return room[:rows, :columns].copy_(stored)


class Int8(Exact):
    """As integers from -127 to 127, times a scale that `GROUP` neighbours share.

    They are rounded up or down at random, so that the mean of what comes back is what went in:
    `x` lies between `k scale` and `(k + 1) scale`, and becomes the latter with the probability
    `x / scale - k`. No number changes by more than its scale, 1/127 of the largest in its group.

    The integers of a group are followed by its scale: 132 bytes for 128 numbers. The random numbers
    of the k-th `pack` (or pass of compiled code) are named by the seed and k, so that `draws` is
    all there is to remember.
    """

    largest = 1e19  # whose square is a float32 number
    rounds = draws_in_order = True

    def __init__(self, seed: int = 0) -> None:
        super().__init__(torch.int8)
        self.seed = seed
        self.group = GROUP

    def place(self, columns: slice) -> slice:
        each = self.group + SCALE
        return slice(columns.start // self.group * each, -(-columns.stop // self.group) * each)

    def pack(self, values: Tensor) -> Tensor:
        padded = functional.pad(values, (0, -values.shape[1] % self.group))
        groups = padded.view(len(values), -1, self.group)
        scales = (groups.abs().amax(2, keepdim=True) / 127).float()
        exact = torch.where(scales > 0, groups / scales, 0.0)
        below = exact.floor()
        stream = rng(self.seed, "rounding", self.draws)
        self.draws += 1
        chance = torch.from_numpy(stream.random(tuple(exact.shape), dtype="float32"))
        codes = (below + (chance < exact - below)).clamp_(-127, 127).to(torch.int8)
        return torch.cat([codes, scales.view(torch.int8)], 2).flatten(1)

    def key(self) -> int:
        self.draws += 1
        return stream_seed(self.seed, "rounding", self.draws - 1)

    def unpack(self, stored: Tensor, room: Tensor) -> Tensor:
        groups = stored.view(len(stored), -1, self.group + SCALE)
        values = room[: len(stored), : groups.shape[1] * self.group]
        codes, scales = groups[:, :, : self.group], groups[:, :, self.group :]
        values.view(groups.shape[0], -1, self.group).copy_(codes).mul_(scales.view(torch.float32))
        return values
