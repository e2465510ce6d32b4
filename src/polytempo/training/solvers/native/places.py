"""Where numbers are in the vectors of compiled code."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from polytempo.core.layout import Layout
from polytempo.training.solvers.native.layers import Image, Pair

Places = NDArray[np.int64]
Floats = NDArray[np.float32]
FROZEN, SHARED, OWN = -1, 0, 1  # whose a parameter is, as network.hpp has it


def up(number: int, to: int = 8) -> int:
    """To a multiple of that."""
    return -(-number // to) * to


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
    """Where a parameter is in our vector: its numbers in torch's order, from `begin` on."""

    tensor: Tensor | None
    size: int
    places: Places
    begin: int = -1
    owner: int = FROZEN


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


def bias_region(tensor: Tensor | None, numbers: int) -> Region:
    return Region(tensor, up(numbers), np.arange(numbers))
