"""A set of clients: a byte for each that there is, and any rank is found without sorting."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

BLOCK = 1024  # clients that are counted together


class ClientSet:
    """A mark per client, and how many there are in each block. A rank is found by its block, so
    that it costs microseconds among a million clients, whether few of them are in the set or most.
    (A Python set would have to be sorted and, once it has been large, is slow to go through even
    when it is almost empty; and it takes sixty times the memory.)"""

    def __init__(self, clients: int) -> None:
        blocks = -(-clients // BLOCK)
        self._marks = np.zeros(blocks * BLOCK, dtype=np.bool_)
        self._counts = np.zeros(blocks, dtype=np.int64)
        self._size = 0

    def __len__(self) -> int:
        return self._size

    def __contains__(self, client: int) -> bool:
        return 0 <= client < len(self._marks) and bool(self._marks[client])

    def __iter__(self) -> Iterator[int]:
        return iter(np.flatnonzero(self._marks).tolist())

    def add(self, client: int) -> None:
        self._mark(client, True)

    def add_all(self, clients: NDArray[np.int64]) -> None:
        """Clients that are all different."""
        new = clients[~self._marks[clients]]
        self._marks[new] = True
        self._counts += np.bincount(new // BLOCK, minlength=len(self._counts))
        self._size += len(new)

    def discard(self, client: int) -> None:
        self._mark(client, False)

    def at(self, ranks: NDArray[np.int64] | Sequence[int]) -> list[int]:
        """The clients of these ranks (from 0) in the order of their ids."""
        if len(ranks) != 1:
            found: list[int] = np.flatnonzero(self._marks)[ranks].tolist()
            return found
        ends = self._counts.cumsum()
        block = int(ends.searchsorted(ranks[0], side="right"))
        begin = block * BLOCK
        rank = int(ranks[0] - ends[block])  # from the end of the block
        return [begin + int(np.flatnonzero(self._marks[begin : begin + BLOCK])[rank])]

    def _mark(self, client: int, there: bool) -> None:
        if self._marks[client] != there:
            self._marks[client] = there
            change = 1 if there else -1
            self._counts[client // BLOCK] += change
            self._size += change
