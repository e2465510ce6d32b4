"""Torch's way over the rows of a bank: tile by tile (some rows, some columns), in the cache."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor

from polytempo.core.objective import Measure
from polytempo.core.precision import Exact

FloatArray = np.ndarray[Any, np.dtype[np.float64]]
BoolArray = np.ndarray[Any, np.dtype[np.bool_]]
# Carries out work on all parts: in turn, or on threads that each take the next one.
Spread = Callable[[Callable[[Iterator[Any]], None], Sequence[Any]], None]

TILE = 2**19  # numbers in a tile, at most
WIDTH = 2**16  # columns in a tile, at most: longer sums lose digits, and single rows are slow


def in_turn(work: Callable[[Iterator[Any]], None], parts: Sequence[Any]) -> None:
    """The usual way."""
    work(iter(parts))


class Tiles:
    """How rows of that many numbers, stored in that format, are taken apart."""

    def __init__(self, size: int, dtype: torch.dtype, form: Exact) -> None:
        """`dtype`: of the numbers, whatever the precision in which they are stored."""
        self.form = form
        self.width = min(-(-size // form.group) * form.group, WIDTH)
        self.columns = [slice(k, min(k + self.width, size)) for k in range(0, size, self.width)]
        self.rows = TILE // self.width
        self._shape, self._dtype = (2, self.rows, self.width), dtype
        self._rooms: list[Tensor] = []  # that nobody is working in

    @contextmanager
    def room(self) -> Iterator[Tensor]:
        """For two tiles; each thread has its own."""
        room = self._rooms.pop() if self._rooms else torch.empty(self._shape, dtype=self._dtype)
        yield room
        self._rooms.append(room)

    def lifted(self, rows: Tensor, columns: slice, room: Tensor) -> Tensor:
        """A tile in the precision of the numbers: itself, or a copy in `room`."""
        tile = self.form.unpack(rows[:, self.form.place(columns)], room)
        return tile.narrow(1, 0, columns.stop - columns.start)

    def sweep(
        self,
        runs: Callable[[int], Iterable[tuple[slice, Tensor]]],
        longest: int,
        moved: Tensor,
        shares: FloatArray,
        measure: Measure,
        spread: Spread,
    ) -> tuple[FloatArray, ...]:
        """Of each row: its product and (if measured) its distance with `moved`, towards which it
        then moves by its share; and its squared norm after that, for rows in fewer bits, where
        rounding keeps the norm from following from the product. `runs`: rows that are neighbours,
        so many at most (a tile, or `longest`), and their numbers."""
        products, distances, squares = torch.zeros(3, len(shares), dtype=moved.dtype)
        mixing = torch.from_numpy(shares).to(moved.dtype)[:, None]
        touched, far = shares != 0, measure in ("l1", "l2")
        # Memory is read fastest in large parts, but what is used twice should stay in the cache.
        twice = far or self.form.rounds or touched.mean() > 0.5
        found = runs(self.rows if twice else longest)
        # (The plan is made in advance because Python is slow when a tile has the cache.)
        plan = [(slots, rows, mixing[slots], spans(touched[slots])) for slots, rows in found]

        def work(parts: Iterator[tuple[slice, Tensor, Tensor, list[slice]]]) -> None:
            with self.room() as room:
                for slots, rows, weights, changing in parts:
                    for columns in self.columns:
                        stored, part = rows[:, self.form.place(columns)], moved[columns]
                        tile = self.lifted(rows, columns, room[0])
                        products[slots].addmv_(tile, part)
                        if far:
                            gap = torch.sub(tile, part, out=room[1, : len(tile), : len(part)])
                            size = gap.abs_() if measure == "l1" else gap.square_()
                            distances[slots] += size.sum(1)
                        for span in changing:
                            mixed = tile[span].lerp_(part, weights[span])
                            if self.form.rounds:
                                stored[span] = self.form.pack(mixed)
                                kept = self.lifted(rows[span], columns, room[0, span])
                                squares[slots][span] += kept.square_().sum(1)

        (in_turn if self.form.draws_in_order else spread)(work, plan)
        if measure == "l2":
            distances.sqrt_()
        return tuple(each.double().numpy() for each in (products, distances, squares))


def spans(mask: BoolArray) -> list[slice]:
    """Where the mask is true, as ranges."""
    padded = np.zeros(len(mask) + 2, dtype=np.bool_)
    padded[1:-1] = mask
    edges = np.flatnonzero(padded[1:] != padded[:-1]).tolist()
    return [slice(a, b) for a, b in zip(edges[::2], edges[1::2], strict=True)]
