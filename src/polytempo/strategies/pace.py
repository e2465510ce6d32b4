"""PACE: Personalization under Asynchronous Collaboration Estimation (Liu et al., INFOCOM 2026).

What the server does on the arrival of theta from client i, whose staleness is tau:

    phi_i <- theta
    W_i   <- argmin ||x - p||^2 + gamma <s(theta, phi), x>            (Eq. 2)
    D_i   <- W_ii                         (i's upload empties the sequence pi_i)
    for every other client j:
        D_j     <- D_j + W_ji
        alpha_j <- W_ji / D_j * (1 + tau)^-a                          (Eq. 6, 11)
        phi_j   <- alpha_j theta + (1 - alpha_j) phi_j                (Eq. 5)
    multicast fresh models to the most stale clients in training      (Eq. 16)

D_j is the denominator of Eq. 6, kept up to date instead of summed again. With a = 0 it makes phi_j
the W_j-weighted mean of j's own upload and everything folded in since, in whatever order it came.

Nothing that is mixed depends on the new W_i, so the likeness to all phi_j and their mixing are one
pass over the bank.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Annotated, ClassVar, Literal

import numpy as np
from pydantic import Field
from torch import Tensor

from polytempo.core.messages import InFlights, Staleness, Update
from polytempo.core.strategy import STRATEGIES, Context
from polytempo.strategies.collaboration import ArrivalGraph


@STRATEGIES.register("pace")
class PACE(ArrivalGraph):
    """A personal model per client, learned with similar clients as updates arrive.

    Use it when clients differ in their data and in their speed. The server's copy of each model is
    refreshed by every update from a client it collaborates with, less so the staler the update;
    clients that have trained on an old model for too long are sent a fresh one while they train.

    `graph`: how W is estimated. PACE's own way is pFedGraph's; with fedamp or fedsac (the plug-in
    forms of Table III) everything else stays the same.
    `a`: exponent of the staleness decay. `omega`: the multicast threshold on the sum of squared
    staleness. `latency_ms`, `bandwidth_mhz`, `snr_db`: the downlink that bounds a multicast to
    `latency * bandwidth * log2(1 + SNR) / 8` bytes.
    `reply`, where the sender is answered at once (refill "same"): "buffered", the paper's
    Algorithm 1, answers with the client's model as it stood before its update was folded in;
    "fresh" with the model after.
    `buffer`, `multicast`, `staleness_decay`: the components of Fig. 5, each a switch; with all
    three off this is the naive form, pfedgraph-async.

    Where we depart from the paper: likeness is judged by what training has changed, as pFedGraph
    does (`graph.reference=model` compares the models as they are, the paper's formula, which hardly
    separates clients that share an initialisation); W_j before j's first upload is p (the paper
    leaves it open); of the groups that satisfy Eq. 16 we take the smallest, most stale clients
    first; s is a dissimilarity throughout (the paper's Eq. 13 takes the cosine itself).
    """

    family: ClassVar[str] = "asynchronous, personalised"
    paper: ClassVar[str] = "Liu et al. 2026"
    state: ClassVar[tuple[str, ...]] = (*ArrivalGraph.state, "denominators")

    a: Annotated[float, Field(ge=0)] = 1.5
    omega: Annotated[float, Field(ge=0)] = 2500.0
    latency_ms: Annotated[float, Field(ge=0)] = 300.0
    bandwidth_mhz: Annotated[float, Field(ge=0)] = 10.0
    snr_db: float = 10.0
    reply: Literal["buffered", "fresh"] = "buffered"
    buffer: bool = True
    multicast: bool = True
    staleness_decay: bool = True

    def setup(self, context: Context) -> None:
        super().setup(context)
        self.denominators = self.prior.copy()  # D, with W_j = p before j's first upload
        # The last sender, and its model before its update: the reply. Not part of the state: the
        # reply is asked for in the same call of the server that folds, never after a checkpoint.
        self._before: tuple[int, Tensor] | None = None

    def enrolled(self, client: int) -> None:
        before = self.prior.copy()
        super().enrolled(client)
        unset = self.rows.unset()
        self.denominators[unset] += (self.prior - before)[unset]  # W_ii is p_i there

    def fold(self, update: Update, staleness: Staleness) -> bool:
        if not self.buffer:
            return super().fold(update, staleness)
        self.note_basis(update)
        i, theta = update.client, update.vector
        self._before = (i, self.bank.row(i)) if self.reply == "buffered" else None
        self.bank.set(i, theta)
        taken = self.rows.column(i)  # W_ji
        taken[i] = 0.0
        self.denominators += taken
        share = np.divide(taken, self.denominators, out=np.zeros_like(taken), where=taken > 0)
        decay = (1 + staleness.updates) ** -self.a if self.staleness_decay else 1.0
        self.estimate(i, self.bank.sweep(theta, self.graph.measure, share * decay))
        self.denominators[i] = self.rows.row(i)[i]
        return True

    def reply_to(self, client: int) -> Tensor:
        if self._before is not None and self._before[0] == client:
            return self._before[1]
        return self.model_for(client)

    @property
    def budget(self) -> int:
        """How many models fit into one multicast."""
        capacity = math.log2(1 + 10 ** (self.snr_db / 10)) / 8
        available = self.latency_ms / 1e3 * self.bandwidth_mhz * 1e6 * capacity
        return int(available // (self.context.initial.nbytes))

    def refresh(self, in_flight: InFlights) -> Sequence[int]:
        """Eq. 16: the smallest group, most stale first (equally stale ones by their ids), whose
        squared staleness exceeds omega."""
        if not self.multicast:
            return ()
        chosen: list[int] = []
        total, most = 0, min(self.budget, len(in_flight))
        for flight in in_flight:
            square = flight.staleness.updates**2
            if total + square * (most - len(chosen)) <= self.omega:
                return ()  # the others are no staler: as many as fit would not exceed it
            chosen.append(flight.client)
            total += square
            if total > self.omega:
                return chosen
        return ()
