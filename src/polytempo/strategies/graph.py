"""Who learns from whom: how the collaboration graph W is kept. `estimators` has how it is found."""

from __future__ import annotations

import numpy as np

from polytempo.core.bank import BoolArray, FloatArray
from polytempo.core.errors import PolytempoError
from polytempo.core.strategy import State


class CollaborationGraph:
    """W: its row i says how much client i learns from every client.

    A row is the prior until it is set, and takes memory only from then on. Rows are kept in single
    precision: half the memory, and still nearer to what was set (6e-8 of each weight) than models
    in single precision can tell.
    """

    def __init__(self, prior: FloatArray) -> None:
        self.prior = prior
        self._places = np.full(len(prior), -1)  # of each client's row in `_rows`; -1: none yet
        self._rows = np.empty((0, len(prior)), dtype=np.float32)

    def row(self, client: int) -> FloatArray:
        """W[client, :]"""
        place = self._places[client]
        return np.array(self.prior if place < 0 else self._rows[place], dtype=np.float64)

    def known(self, client: int) -> bool:
        """Whether the client's row has been set."""
        return bool(self._places[client] >= 0)

    def set_row(self, client: int, row: FloatArray) -> None:
        """Replace W[client, :]."""
        if self._places[client] < 0:
            place = int(self._places.max()) + 1
            if place == len(self._rows):
                size = min(max(2 * place, 8), len(self.prior))
                grown = np.empty((size, len(self.prior)), dtype=np.float32)
                grown[:place] = self._rows
                self._rows = grown
            self._places[client] = place
        self._rows[self._places[client]] = row

    def unset(self) -> BoolArray:
        """Whose rows are the prior."""
        return self._places < 0

    def column(self, client: int) -> FloatArray:
        """W[:, client]"""
        column: FloatArray = np.full(len(self.prior), self.prior[client])
        known = np.flatnonzero(self._places >= 0)
        column[known] = self._rows[self._places[known], client]
        return column

    def matrix(self) -> FloatArray:
        """W, dense: 8 n^2 bytes."""
        matrix: FloatArray = np.tile(self.prior, (len(self.prior), 1))
        known = np.flatnonzero(self._places >= 0)
        matrix[known] = self._rows[self._places[known]]
        return matrix

    def state_dict(self) -> State:
        return {"places": self._places, "rows": self._rows[: self._places.max() + 1]}

    def load_state_dict(self, state: State) -> None:
        if len(state["places"]) != len(self.prior):
            raise PolytempoError(
                f"the saved graph has {len(state['places'])} clients, expected "
                f"{len(self.prior)}; start a new run"
            )
        self._places, self._rows = np.array(state["places"]), np.array(state["rows"])
