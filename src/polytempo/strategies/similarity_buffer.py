"""CASA's buffers: whose models each client's next upload will be compared with (Alg. 2).

A model in `buf_j` is one that client j, when it came, had not started too long before (CASA's
`store`), so that the two are about aligned when j uploads; how much later j starts is not limited,
as in the paper. An upload is stored once, however many buffers hold it; the budget M is on
stored models, which is what takes memory.

The paper's Eq. 11 asks for the models of the greatest value, `sum 1 / alpha_j` over the buffers
that hold a model of a client whose likeness to j is not known yet. Since every stored model takes
the same room, that is solved by dropping the one of the least value.
"""

from __future__ import annotations

import numpy as np
from torch import Tensor

from polytempo.core.bank import BoolArray, FloatArray, IntArray, ModelBank
from polytempo.core.errors import PolytempoError
from polytempo.core.strategy import State


class SimilarityBuffer:
    """At most `budget` uploads, and who is to be compared with which."""

    def __init__(self, clients: int, budget: int, bank: ModelBank) -> None:
        """`bank` has a row for each stored upload, and one more."""
        self.budget, self.bank = budget, bank
        self.holds = np.full((clients, clients), -1, dtype=np.int32)  # [j, i]: the row of i's model
        self.references = np.zeros(budget + 1, dtype=np.int64)  # to each row; 0: it is free
        self.ages = np.zeros(budget + 1, dtype=np.int64)  # of each row: when it was stored
        self.stored = 0  # ever

    def __len__(self) -> int:
        """Stored models."""
        return int(np.count_nonzero(self.references))

    def authors(self, client: int) -> IntArray:
        """Whose models are in the client's buffer."""
        return np.flatnonzero(self.holds[client] >= 0)

    def cosines(self, client: int, vector: Tensor) -> FloatArray:
        """Of the vector and each of the models in the client's buffer, in the order of
        `authors` (Eq. 10)."""
        rows = self.holds[client, self.authors(client)]
        if not len(rows):
            return np.empty(0)
        unlike = self.bank.dissimilarity(vector, "cosine")
        return np.asarray(-unlike[rows])

    def mean(self, client: int, authors: IntArray, weights: FloatArray) -> Tensor:
        """The weighted mean of these authors' models in the client's buffer (Eq. 15)."""
        shares = np.zeros(len(self.bank))
        shares[self.holds[client, authors]] = weights / weights.sum()
        return self.bank.weighted_sum(shares)

    def clear(self, client: int) -> None:
        """Empty the client's buffer."""
        self._forget(np.full(1, client), self.authors(client))

    def keep(self, wanted: BoolArray) -> None:
        """Empty all buffers of what is not wanted there [clients, clients]."""
        self._forget(*np.nonzero((self.holds >= 0) & ~wanted))

    def offer(
        self,
        author: int,
        vector: Tensor,
        readers: IntArray,
        alike: FloatArray,
        alphas: FloatArray,
    ) -> None:
        """Put the author's model into the buffers of those readers that hold none of its yet (the
        first is kept: a later one is *recurring*). Over budget, the model of least value goes.

        `alike` [clients, clients]: how alike they are, NaN where that is not known; `alphas`: the
        decay of each client's updates, small for slow clients, who go first.
        """
        readers = readers[(self.holds[readers, author] < 0) & (readers != author)]
        if not len(readers):
            return
        row = int(np.argmin(self.references))  # there is always one that is free
        self.bank.set(row, vector)
        self.ages[row] = self.stored
        self.stored += 1
        self.holds[readers, author] = row
        self.references[row] = len(readers)
        if len(self) > self.budget:
            self._forget(*np.nonzero(self.holds == self._least(alike, alphas)))

    def _least(self, alike: FloatArray, alphas: FloatArray) -> int:
        """The row that matters least: for pairs not computed yet, then at all; then the oldest."""
        values, count = 1 / alphas, len(self.ages)
        every = np.bincount(self.holds.ravel() + 1, np.repeat(values, len(alphas)), count + 1)[1:]
        readers, authors = np.nonzero(np.isnan(alike) & (self.holds >= 0))
        new = np.bincount(self.holds[readers, authors], values[readers], count)
        order = np.lexsort((self.ages, every, new))  # the last key counts first
        return int(order[self.references[order] > 0][0])

    def _forget(self, readers: IntArray, authors: IntArray) -> None:
        """Take these entries out of the buffers."""
        rows = self.holds[readers, authors]
        self.references -= np.bincount(rows, minlength=len(self.references))
        self.holds[readers, authors] = -1

    def state_dict(self) -> State:
        return {
            "holds": self.holds,
            "references": self.references,
            "ages": self.ages,
            "stored": self.stored,
            "bank": self.bank.state_dict(),
        }

    def load_state_dict(self, state: State) -> None:
        if state["holds"].shape != self.holds.shape or len(state["ages"]) != len(self.ages):
            raise PolytempoError(
                f"the checkpoint has buffers for {len(state['holds'])} clients and "
                f"{len(state['ages']) - 1} models, expected {len(self.holds)} and {self.budget}; "
                "start a new run"
            )
        self.holds[:], self.ages[:] = state["holds"], state["ages"]
        self.references[:], self.stored = state["references"], state["stored"]
        self.bank.load_state_dict(state["bank"])
