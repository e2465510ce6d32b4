"""The [n, d] matrix of per-client vectors. Every loop over n times d lives here.

Rows are stored as their displacement from `origin` (zero, or the initial model), because that is
what similarities are taken on: the origin decides whether "cosine" compares models as they are or
what training has changed in them. Mixing weights sum to 1, so they act on displacements as they do
on models.

Clients that have been treated alike so far share one row: memory is the number of *distinct* rows
times d. `_slots` says which row is whose; clients part when they are treated differently, and do
not meet again. Rows lie in blocks, which are allocated when they are first needed and never copied,
and are worked on tile by tile, in the cache.

A large bank may be worked on by compiled code and on several threads, which are for the engine to
bring (`Storage`): nothing here compiles anything, or starts a thread.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from polytempo.core.errors import PolytempoError
from polytempo.core.objective import Measure
from polytempo.core.precision import Exact, Half, Int8
from polytempo.core.tiles import BoolArray as BoolArray
from polytempo.core.tiles import FloatArray as FloatArray
from polytempo.core.tiles import Spread, Tiles, in_turn, spans

IntArray = np.ndarray[Any, np.dtype[np.int64]]
Allocator = Callable[[tuple[int, int], torch.dtype], Tensor]
# Does what `Tiles.sweep` does with the rows that it is given, as they are stored, with a float32
# vector: returns products, distances (of l2, their squares) and squared norms. It takes the rows,
# their shares, and a number that names what is drawn at random for the first of them.
Pass = Callable[[Tensor, FloatArray, int], FloatArray]
Kernel = Callable[[Tensor, Measure], Pass]

BLOCK = 2**26  # bytes in a block, about
SHARD = 2**20  # numbers of a large bank that are taken at a time, about, but four rows at least
SMALL = 2**16  # numbers of a bank that is worked on in one piece
ALIGN = 16  # rows begin at multiples of it: the last bits of a sum depend on the alignment


def in_memory(shape: tuple[int, int], dtype: torch.dtype) -> Tensor:
    """The usual allocator."""
    return torch.empty(shape, dtype=dtype)


def no_kernel() -> Kernel | None:
    """The usual one: torch does all of it."""
    return None


@dataclass(frozen=True)
class Storage:
    """How a bank keeps its rows.

    `bits`: of each number; the arithmetic keeps the precision of the vectors in any case.
    32: as the vectors are.
    16: in half precision, which halves the memory. A row is rounded to 11 bits each time that it
    changes: an error of 5e-4 of each number (3e-8 for those below 6e-5), so that what is mixed in
    with a weight below 5e-4 may be lost.
    8: as integers with a scale for each 128 neighbours, a quarter of the memory. A row is rounded
    at random each time that it changes, right on average, by up to 1/127 of the largest number
    among the neighbours: meant for rows that are replaced (gradients). Where they are mixed again
    and again with small weights, the errors add up.
    `seed`: names the random numbers of that rounding.
    `allocate`: where blocks come from, not necessarily initialised; `polytempo.storage.mapped` has
    them on disk.
    `kernel`, `spread`: compiled code for large banks, which is asked for when it is first needed
    (None: there is none), and threads for them; both in `polytempo.native.sweep`. Threads do not
    change a bit. Compiled code takes sums in another order than torch, and draws other random
    numbers for the rounding. `large`: from how many numbers on they pay.
    """

    bits: Literal[8, 16, 32] = 32
    allocate: Allocator = in_memory
    seed: int = 0
    kernel: Callable[[], Kernel | None] = no_kernel
    spread: Spread = in_turn
    large: int = 2**22

    def format(self, dtype: torch.dtype) -> Exact:
        """How vectors of that type are written down."""
        if self.bits == 8:
            return Int8(self.seed)
        return Half() if self.bits == 16 else Exact(dtype)


PLAIN_STORAGE = Storage()


class ModelBank:
    """One vector per client; all start as `initial`."""

    def __init__(
        self,
        clients: int,
        initial: Tensor,
        origin: Tensor | None = None,
        storage: Storage = PLAIN_STORAGE,
    ) -> None:
        self.origin = torch.zeros_like(initial) if origin is None else origin.clone()
        self.storage = storage
        self._slots = np.zeros(clients, dtype=np.int64)  # of each client: the number of its row
        self._distinct = 1  # rows: never more than clients, for each is somebody's
        # with room for rows to come, so that a new one copies nothing
        self._room_squares = np.zeros(clients)
        self._room_revisions = np.zeros(clients, dtype=np.int64)
        self._room_owners = np.zeros(clients, dtype=np.int64)
        self._owners[0] = clients
        self._changes = 0

        size = len(initial)
        self._format = storage.format(initial.dtype)
        self._tiles = Tiles(size, initial.dtype, self._format)
        self._stored: int = self._format.place(slice(0, size)).stop  # length of a row, as kept
        self._stride = -(-self._stored // ALIGN) * ALIGN
        rows = max(BLOCK // (self._stride * self._format.dtype.itemsize), self._tiles.rows)
        self._block_rows = min(clients, rows)
        self._blocks: list[Tensor] = []
        self._write(0, initial - self.origin)

    def __len__(self) -> int:
        return len(self._slots)

    def row(self, client: int) -> Tensor:
        """A copy of the client's vector."""
        return self.origin + self._values(self._row(self._slots[client]), self._format)

    def revision(self, client: int) -> int:
        """A number that changes whenever `row(client)` may have changed."""
        return int(self._revisions[self._slots[client]])

    def set(self, client: int, vector: Tensor) -> None:
        """Replace the client's vector."""
        shared = self._slots[client]
        if self._owners[shared] > 1:
            self._slots[client] = own = self._copies(self._slots[[client]])[0]
            self._owners[shared] -= 1
            self._owners[own] = 1
        self._write(self._slots[client], vector - self.origin)

    def mix(self, vector: Tensor, weights: FloatArray) -> None:
        """`row[j] <- weights[j] * vector + (1 - weights[j]) * row[j]` for every weight not 0."""
        self.sweep(vector, "inner", weights)

    def weighted_sum(self, weights: FloatArray) -> Tensor:
        """`sum_j weights[j] * row[j]`, for weights that sum to 1."""
        shares = np.bincount(self._slots, weights, minlength=len(self._squares))
        factors = torch.from_numpy(shares).to(self.origin.dtype)
        total = self.origin.clone()
        with self._tiles.room() as room:
            for slots, rows in self._runs(self._tiles.rows, shares != 0):
                for columns in self._tiles.columns:
                    tile = self._tiles.lifted(rows, columns, room[0])
                    total[columns].addmv_(tile.T, factors[slots])
        return total

    def dissimilarity(self, vector: Tensor, measure: Measure) -> FloatArray:
        """How unlike `vector` every row is, on a scale on which one gamma fits all measures.

        cosine: `-cos`, in [-1, 1]; a zero vector has cosine 0 with everything.
        inner: `-<.,.>`, divided by the row's largest absolute value: in [-1, 1].
        l1, l2: distances, divided by the largest of them: in [0, 1].
        """
        return self.sweep(vector, measure)

    def sweep(
        self, vector: Tensor, measure: Measure, weights: FloatArray | None = None
    ) -> FloatArray:
        """`dissimilarity`, then `mix`, in one pass over memory. Rows of weight 0 are only read."""
        moved = vector - self.origin
        shares = np.zeros_like(self._squares) if weights is None else self._split(weights)
        products, distances, squares = self._pass(moved, shares, measure)
        square = self._square(moved)
        if measure == "cosine":
            norms = np.sqrt(self._squares * square)
            cosines = np.divide(products, norms, out=np.zeros_like(norms), where=norms > 0)
            unlike = -np.minimum(np.maximum(cosines, -1.0), 1.0)
        else:
            unlike = -products if measure == "inner" else distances
            unlike /= max(float(np.abs(unlike).max()), 1e-30)

        changed = np.flatnonzero(shares)
        if len(changed):
            a, s, p = shares[changed], self._squares[changed], products[changed]
            mixed = (1 - a) ** 2 * s + 2 * a * (1 - a) * p + a**2 * square
            self._squares[changed] = (
                squares[changed] if self._format.rounds else np.maximum(mixed, 0.0)
            )
            self._changes += 1
            self._revisions[changed] = self._changes
        return np.asarray(unlike[self._slots], dtype=np.float64)

    def _pass(self, moved: Tensor, shares: FloatArray, measure: Measure) -> tuple[FloatArray, ...]:
        """`Tiles.sweep` over all rows, or the same by compiled code."""
        numbers = self._distinct * len(moved)
        large = numbers >= self.storage.large
        small = numbers <= SMALL and len(self._blocks) == 1 and not large
        if small and not self._format.rounds and measure in ("cosine", "inner"):
            return self._small_pass(moved, shares)
        longest = max(SHARD // len(moved), 4) if large else self._block_rows
        spread = self.storage.spread if large else in_turn
        kernel = self.storage.kernel() if large and moved.dtype == torch.float32 else None
        if kernel is None:
            return self._tiles.sweep(self._runs, longest, moved, shares, measure, spread)
        found = np.zeros((3, len(shares)))
        read, key = kernel(moved, measure), self._format.key() if shares.any() else 0

        def work(parts: Iterator[tuple[slice, Tensor]]) -> None:
            for slots, rows in parts:
                found[:, slots] = read(rows, shares[slots], key + slots.start)

        spread(work, list(self._runs(longest)))
        products, distances, squares = found
        return products, np.sqrt(distances) if measure == "l2" else distances, squares

    def _small_pass(self, moved: Tensor, shares: FloatArray) -> tuple[FloatArray, ...]:
        """The same for a bank so small that every operation costs more than what it computes: the
        rows that move do so together, as copies."""
        rows = self._blocks[0][: self._distinct, : self._stored]
        products = moved.new_zeros(len(rows)).addmv_(rows, moved)
        moving = np.flatnonzero(shares)
        if len(moving):
            which = torch.from_numpy(moving)
            weights = torch.from_numpy(shares[moving]).to(moved.dtype)[:, None]
            mixed = rows.index_select(0, which).lerp_(moved, weights)
            rows.index_copy_(0, which, mixed)
        nothing = np.empty(0)  # neither distances nor rounding
        return products.double().numpy(), nothing, nothing

    # -- rows --------------------------------------------------------------------------------------

    @property
    def _squares(self) -> FloatArray:
        """Of each row: its squared norm."""
        return self._room_squares[: self._distinct]

    @property
    def _revisions(self) -> IntArray:
        """Of each row: which change was its last."""
        return self._room_revisions[: self._distinct]

    @property
    def _owners(self) -> IntArray:
        """Of each row: how many clients have it."""
        return self._room_owners[: self._distinct]

    def _split(self, weights: FloatArray) -> FloatArray:
        """The weight of each row, once clients that share one but differ in weight have parted."""
        shares = np.zeros_like(self._squares)
        shares[self._slots] = weights  # one client of each row speaks for it
        apart = np.flatnonzero(shares[self._slots] != weights)
        if not len(apart):
            return shares
        # complex numbers are sorted by their real, then their imaginary part: as pairs
        pairs, which = np.unique(self._slots[apart] + 1j * weights[apart], return_inverse=True)
        self._slots[apart] = self._copies(pairs.real.astype(np.int64))[which]
        self._owners[:] = np.bincount(self._slots)
        return np.append(shares, pairs.imag)

    def _copies(self, slots: IntArray) -> IntArray:
        """New rows, equal to these."""
        new = np.arange(len(slots)) + self._distinct
        for source, target in zip(slots, new, strict=True):
            self._row(target).copy_(self._row(source))
        self._distinct += len(slots)
        self._squares[new] = self._squares[slots]
        self._revisions[new] = self._revisions[slots]
        return new

    def _row(self, slot: int | np.integer) -> Tensor:
        """The row itself, as it is stored."""
        block, place = divmod(int(slot), self._block_rows)
        while block >= len(self._blocks):
            shape = (self._block_rows, self._stride)
            self._blocks.append(self.storage.allocate(shape, self._format.dtype))
        row: Tensor = self._blocks[block].select(0, place).narrow(0, 0, self._stored)
        return row

    def _runs(
        self, longest: int, wanted: BoolArray | None = None
    ) -> Iterator[tuple[slice, Tensor]]:
        """The wanted rows (or all) and their numbers, neighbours in a block together."""
        wanted = np.full(len(self._squares), True) if wanted is None else wanted
        for number, block in enumerate(self._blocks):
            start = number * self._block_rows
            for run in spans(wanted[start : start + self._block_rows]):
                for first in range(run.start, run.stop, longest):
                    last = min(first + longest, run.stop)
                    yield slice(start + first, start + last), block[first:last, : self._stored]

    def _values(self, row: Tensor, form: Exact) -> Tensor:
        """What a row that is stored in that format stands for."""
        if not form.rounds:
            return row
        room = torch.empty(1, len(row), dtype=self.origin.dtype)
        return form.unpack(row[None], room)[0].narrow(0, 0, len(self.origin))

    def _square(self, vector: Tensor) -> float:
        whole, columns = vector.to(self.origin.dtype), self._tiles.columns
        parts = [whole[part] for part in columns] if len(columns) > 1 else [whole]
        return sum(float(part.dot(part)) for part in parts)

    def _write(self, slot: int | np.integer, moved: Tensor) -> None:
        packed = self._format.pack(moved[None])[0]
        square = self._square(self._values(packed, self._format))
        if self._format.largest and not math.isfinite(square):
            raise PolytempoError(
                f"a model has parameters beyond {self._format.largest:g}, which {self.storage.bits}"
                " bits cannot hold; keep the models in full precision"
            )
        self._row(slot).copy_(packed)
        self._squares[slot] = square
        self._changes += 1
        self._revisions[slot] = self._changes

    # -- checkpoints -------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Who has which row, and the distinct rows; as they are, not copied."""
        return {
            "slots": self._slots,
            "rows": [rows for _, rows in self._runs(self._block_rows)],
            "squares": self._squares,
            "origin": self.origin,
            "draws": self._format.draws,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state`, whatever the storage that it comes from."""
        slots, origin = state["slots"], state["origin"]
        if len(slots) != len(self) or len(origin) != len(self.origin):
            raise PolytempoError(
                f"the checkpoint has {len(slots)} clients with {len(origin)} parameters, expected "
                f"{len(self)} with {len(self.origin)}; start a new run"
            )
        self._slots[:] = slots
        self._distinct = len(state["squares"])
        self._squares[:] = state["squares"]
        self._owners[:] = np.bincount(slots)
        self.origin.copy_(origin)
        self._format.draws = state.get("draws", 0)
        rows = (row for run in state["rows"] for row in run)
        for slot, row in zip(range(len(self._squares)), rows, strict=True):
            if row.dtype == self._format.dtype:
                self._row(slot).copy_(row)
            else:
                form = Int8() if row.dtype == torch.int8 else Exact(row.dtype)
                self._write(slot, self._values(row, form))
        self._changes += 1
        self._revisions[:] = self._changes
