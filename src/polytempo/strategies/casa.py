"""CASA: Clustered Federated Learning with Asynchronous Clients (Liu et al., KDD 2024).

What the server does on the arrival of w_i, the t-th, from client i of cluster C_k, whose model is
tau_i arrivals old (Alg. 1-3):

    a newcomer joins the cluster that represents it best                          (Eq. 15)
    A_ij  <- cos(w_i, w_j) for every w_j in buf_i, which is emptied                (Eq. 10)
    split C_k, if all of A in it is known and its spectrum has a wide gap          (Eq. 12-14)
    w_i   -> buf_j for those j of C_k that started about when i did                (Alg. 2)
    w_k   <- alpha_i w_i + (1 - alpha_i) w_k                                       (Eq. 9)

with alpha_i of Eq. 6-8. The buffers are in `similarity_buffer`, the spectrum in `splitting`.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Annotated, ClassVar, Literal

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from polytempo.core.bank import FloatArray, ModelBank
from polytempo.core.client_steps import Mask
from polytempo.core.errors import Refused
from polytempo.core.masks import unpack
from polytempo.core.messages import Dispatch, Staleness, Update
from polytempo.core.rng import rng
from polytempo.core.strategy import STRATEGIES, Context, IntArray
from polytempo.core.task import Task
from polytempo.strategies.clustered import Clustered, unknown
from polytempo.strategies.history import cosine
from polytempo.strategies.similarity_buffer import SimilarityBuffer
from polytempo.strategies.splitting import gap_by_chance, groups, spectrum, stays_whole

GONE = -2  # in place of the update at which a client started


def omega(t: int, k: float) -> float:
    """`Omega(t) = (e / 2.8)^(k t)`: falls slowly from 1 (App. A.2.3)."""
    return math.exp(k * t * (1 - math.log(2.8)))


def cluster_decay(alpha_0: float, fading: float, size: FloatArray | int) -> FloatArray:
    """`alpha_c = alpha_0 Omega / log2(|C| + 3)` (Eq. 6). The paper does not name the base of the
    logarithm: with 2, a hundred clients have 0.3, the paper's value for all other methods; with e,
    clusters of up to four would have more than 1."""
    return np.asarray(alpha_0 * fading / np.log2(np.add(size, 3.0)))


def usual_staleness(fading: float, size: FloatArray | int) -> FloatArray:
    """`r_c = |C| (2 - Omega)`: the staleness that is usual in a cluster of that size (Eq. 8)."""
    return np.asarray(np.multiply(size, 2 - fading))


def client_decay(alpha_c: FloatArray, r_c: FloatArray, tau: FloatArray | int) -> FloatArray:
    """`alpha_i = alpha_c`, divided by `sqrt(tau)` beyond the usual staleness (Eq. 7)."""
    late = np.maximum(tau, 1.0)
    return np.where(np.asarray(tau) <= r_c, alpha_c, alpha_c / np.sqrt(late))


@STRATEGIES.register("casa")
class CASA(Clustered):
    """Clusters that are found while updates arrive, each with a model of its own.

    Use it when clients fall into groups of similar data and differ in speed. All start in one
    cluster.
    Two clients are compared when one uploads, with a model of the other that started at about the
    same time, kept in a buffer for the purpose; a cluster is split when all its pairs have been
    compared and its similarity matrix falls apart.

    `alpha_0`, `k`: size and fading of the decay. `gamma`: exponent of the eigengap in the splitting
    condition `alpha_c < gap^gamma`; smaller splits sooner. `shuffles`: a split also needs a gap
    that is wider than in so many matrices with the same similarities in random places (0, the
    default: it does not). The paper's condition alone hardly binds, and less and less as alpha_c
    fades: with 25 clients any gap above 0.003 will do. `budget`: M, models in the buffers
    (none: as many as there are clients). `reference`: what is compared: what training has changed
    in the model that the client was handed ("update"), the models as they are ("model", the paper's
    formula) or their displacement from the common initial model ("displacement").
    `clock`: what staleness counts: arrivals of the client's own cluster ("cluster"), the measure of
    `r_c = |C| (2 - Omega)`, or all arrivals ("updates", the paper's text taken literally), by which
    nearly all updates are late once there are small clusters.
    `founders`: a client that has not uploaded by arrival number `founders` times n is not waited
    for: it leaves the first cluster, and is a newcomer when it does upload (Eq. 15).
    `clustering`, `bilevel`: the components of the ablation, each a switch; without the latter all
    updates count with `alpha`.

    Where we depart from the paper: clients are compared by their updates, as in CFL, since models
    that share a past have cosines of 0.9 and more whatever the data, and the widest gap in the
    spectrum then says "one cluster" forever; the budget is on stored models rather than on entries
    of buffers, since a model in many buffers is stored once; `founders` decides which clients are
    newcomers; a newcomer is first handed the mean of all clusters' models, and before it has a
    cluster, models of all clusters go to its buffer; entries between clients that a split has
    separated are dropped; a cluster of two is not split; cosines below 0 count as 0.
    """

    family: ClassVar[str] = "asynchronous, clustered"
    paper: ClassVar[str] = "Liu et al. 2024"
    state: ClassVar[tuple[str, ...]] = (
        *Clustered.state,
        *("t", "seen", "started", "begun", "folded", "received", "alike", "buffer"),
    )

    alpha_0: Annotated[float, Field(gt=0, le=2)] = 2.0
    k: Annotated[float, Field(ge=0)] = 0.001
    gamma: Annotated[float, Field(gt=0)] = 0.15
    shuffles: Annotated[int, Field(ge=0)] = 0
    budget: Annotated[int, Field(ge=1)] | None = None
    reference: Literal["update", "model", "displacement"] = "update"
    clock: Literal["updates", "cluster"] = "cluster"
    founders: Annotated[float, Field(gt=0)] = 10.0
    clustering: bool = True
    bilevel: bool = True
    alpha: Annotated[float, Field(gt=0, lt=1)] = 0.3

    def setup(self, context: Context) -> None:
        super().setup(context)
        n, initial = context.clients, context.initial
        self.t = 0
        self.seen = np.zeros(n, dtype=np.bool_)
        # Update at which who is in training received its model; -1: it is not in training.
        self.started = np.full(n, -1)
        # What its cluster had folded by then; -1: it was in none, or is in none any more.
        self.begun = np.full(n, -1)
        self.folded = [0]  # updates, by cluster, those before it was split off included
        self.received: dict[str, Tensor] = {}  # and that model, if updates are compared
        self.alike = unknown(n)  # A
        stored = (self.budget or n) if self.clustering else 0
        self.bank = ModelBank(stored + 1, torch.zeros_like(initial), storage=context.storage)
        self.buffer = SimilarityBuffer(n, stored, self.bank)

    def similarity(self) -> FloatArray:
        return self.alike.copy()

    def decays(self, size: FloatArray | int, tau: FloatArray | int) -> tuple[FloatArray, ...]:
        """alpha_c, r_c and alpha_i in clusters of these sizes at these stalenesses."""
        fading = omega(self.t, self.k)
        r_c = usual_staleness(fading, size)
        if not self.bilevel:
            constant = np.full(np.shape(size), self.alpha)
            return constant, r_c, constant
        alpha_c = cluster_decay(self.alpha_0, fading, size)
        return alpha_c, r_c, client_decay(alpha_c, r_c, tau)

    def dispatched(self, dispatch: Dispatch) -> None:
        """Note who started when, and from what."""
        client = dispatch.client
        self.started[client] = self.t
        number = int(self.cluster[client])
        self.begun[client] = self.folded[number] if number >= 0 else -1
        if self.clustering and self.reference == "update":
            self.received[str(client)] = dispatch.params

    def lost(self, client: int) -> None:
        """There will be nothing to compare with what is in its buffer."""
        self.started[client] = -1
        self.received.pop(str(client), None)
        self.buffer.clear(client)

    def left(self, client: int) -> None:
        super().left(client)
        self.started[client] = GONE

    def split(self, number: int, parts: IntArray) -> None:
        super().split(number, parts)
        self.folded += [self.folded[number]] * (len(self.models) - len(self.folded))

    def leave_cluster(self, clients: IntArray) -> None:
        """They are in none from now on, until their next upload."""
        self.cluster[clients] = self.begun[clients] = -1

    def ages(self, updates: FloatArray) -> FloatArray:
        """tau of every client, whose models are that many updates old; of those whose cluster is
        not the one that they began in, nothing else is known."""
        if self.clock == "updates":
            return updates
        folded = np.array(self.folded)[self.cluster]
        return np.where(self.begun >= 0, folded - self.begun, updates)

    def age(self, client: int, updates: int) -> int:
        return int(self.ages(np.full(self.context.clients, updates))[client])

    def staleness(self) -> FloatArray:
        """tau of every client at this arrival; 0 for those that are not in training."""
        now = self.t - 1  # updates folded before this one
        return np.where(self.started < 0, 0, self.ages(now - self.started))

    def fold(self, update: Update, staleness: Staleness) -> bool:
        i, tau = update.client, self.age(update.client, staleness.updates)
        self.t += 1
        self.started[i] = -1
        if self.clustering:
            seen = self.likeness(update)
            self.compare(update, seen)
            self.cut(int(self.cluster[i]))
            self.store(i, seen, tau)
        number = int(self.cluster[i])
        self.folded[number] += 1
        alpha = self.decays(len(self.members(number)), tau)[2]
        self.change(number, self.mixed(self.models[number], update, float(alpha)))  # Eq. 9
        return True

    def mixed(self, model: Tensor, update: Update, alpha: float) -> Tensor:
        """The cluster's model after the update."""
        return torch.lerp(model, update.vector, alpha)

    def likeness(self, update: Update) -> Tensor:
        """What of the update is compared with those of others."""
        if self.reference == "model":
            return update.vector
        received = self.received.pop(str(update.client), self.context.initial)
        return update.vector - received  # or the initial model, of which nothing is noted

    def compare(self, update: Update, w: Tensor) -> None:
        """Alg. 1, lines 4-6, and Alg. 3, lines 1-2."""
        i = update.client
        self.seen[i] = True
        if self.t > self.founders * self.context.clients:
            awaited = np.flatnonzero((self.cluster == 0) & ~self.seen)
            self.leave_cluster(awaited)
            for client in awaited[self.started[awaited] < 0]:
                self.buffer.clear(client)
        if self.cluster[i] < 0:
            self.cluster[i] = self.best_cluster(update, w)
        others = self.buffer.authors(i)
        self.alike[i, others] = self.alike[others, i] = self.buffer.cosines(i, w)
        self.buffer.clear(i)

    def best_cluster(self, update: Update, w: Tensor) -> int:
        """The cluster whose representative is most like the newcomer: the mean of what there is of
        it in the newcomer's buffer (Eq. 15); if that is empty, the cluster's model, by what has
        changed in it since the initial one, whatever `reference` says."""
        authors = self.buffer.authors(update.client)
        if not len(authors):
            initial = self.context.initial
            moved = update.vector - initial
            return int(np.argmax([cosine(model - initial, moved) for model in self.models]))
        found = {}
        for number in np.unique(self.cluster[authors]):
            ours = authors[self.cluster[authors] == number]
            mean = self.buffer.mean(update.client, ours, self.context.shares()[ours])
            found[int(number)] = cosine(mean, w)
        return max(found, key=found.__getitem__)

    def cut(self, number: int) -> None:
        """Split the cluster, if it is time (Eq. 14). Clients that are gone are not waited for: one
        that has not been compared with all others is in no part, and a newcomer if it comes back.
        """
        members = self.members(number)
        everybody = len(members) == len(self.alike)
        alike = self.alike if everybody else self.alike[np.ix_(members, members)]
        gaps = np.isnan(alike.sum(1))
        away = gaps & (self.started[members] == GONE)
        members, missing = members[~away], members[away]
        if len(missing):
            alike = alike[np.ix_(~away, ~away)]
        if len(members) < 3 or np.isnan(alike.sum()):
            return
        alpha_c = float(self.decays(len(members), 0)[0])
        if stays_whole(alike, needed=alpha_c ** (1 / self.gamma)):
            return
        found = spectrum(alike)
        if found.parts > 1 and alpha_c < found.gap**self.gamma and self.surely(alike, found.gap):
            self.leave_cluster(missing)
            self.split(number, groups(found))
            reader, author = self.cluster[:, None], self.cluster
            self.buffer.keep((author >= 0) & ((reader == author) | (reader < 0)))

    def surely(self, alike: FloatArray, gap: float) -> bool:
        """Whether the gap is wider than by chance."""
        stream = rng(self.context.seed, "casa", "shuffles", self.t)
        return not self.shuffles or gap > gap_by_chance(alike, self.shuffles, stream)

    def store(self, i: int, w: Tensor, tau: int) -> None:
        """Alg. 2: into the buffers of i's cluster, and of those in training that have none yet,
        unless their owner started too long before i did (`tau_j - tau_i >= r_c`) or is gone."""
        sizes = np.bincount(self.cluster + 1)[self.cluster + 1].astype(np.float64)
        taus = self.staleness()
        _, r_c, alphas = self.decays(sizes, taus)
        here = (self.cluster == self.cluster[i]) & (self.started != GONE)
        near = here | ((self.cluster < 0) & (self.started >= 0))
        readers = np.flatnonzero(near & (taus - tau < r_c[i]))
        self.buffer.offer(i, w, readers, self.alike, alphas)


@STRATEGIES.register("casa-c")
class CASAC(CASA):
    """CASA without clustering (the paper's ablation): one model for all, and the bi-level decay."""

    clustering: bool = False


@STRATEGIES.register("casa-d")
class CASAD(CASA):
    """CASA without the bi-level decay (the paper's ablation): every update counts with `alpha`."""

    bilevel: bool = False


@STRATEGIES.register("casa+")
class CASAPlus(CASA):
    """CASA whose slow clients train only a part of their model, so that they are less late.

    A client whose last update was staler than usual leaves the smallest parameters of the model
    that it receives as they are, a share

        `S_i = s_0 / 2 (alpha_c - alpha_i) (1 + cos((t - 1) pi / R_end))`     (Eq. 17)

    of them, and only what it has trained is mixed into the cluster's model (Eq. 16).

    `s_0`: 0.3 is where the paper begins (its other values are not named). `r_end`: the arrivals
    after which everybody trains everything again; the paper's runs have 50,000.
    """

    state: ClassVar[tuple[str, ...]] = (*CASA.state, "late")

    s_0: Annotated[float, Field(ge=0, le=1)] = 0.3
    r_end: Annotated[int, Field(ge=1)] = 50_000

    def setup(self, context: Context) -> None:
        super().setup(context)
        self.late = np.zeros(context.clients, dtype=np.int64)  # staleness of the last update

    def sparsity(self, client: int) -> float:
        """Eq. 17, at the arrival that is the latest now."""
        size = int(np.count_nonzero(self.cluster == self.cluster[client]))
        alpha_c, _, alpha_i = self.decays(size, int(self.late[client]))
        passed = min(max(self.t - 1, 0) / self.r_end, 1.0)
        return self.s_0 / 2 * float(alpha_c - alpha_i) * (1 + math.cos(math.pi * passed))

    def task(self, client: int) -> Task:
        return replace(self.context.task, client_steps=(Mask(self.sparsity(client)),))

    def fold(self, update: Update, staleness: Staleness) -> bool:
        bits = update.extras["mask"]
        if bits.dtype != torch.uint8 or bits.shape[1] != -(-len(update.vector) // 8):
            raise Refused(
                f"client {update.client} sent a mask of {list(bits.shape)} {bits.dtype}, expected "
                f"a bit for each of {len(update.vector)} parameters, packed in bytes"
            )
        self.late[update.client] = self.age(update.client, staleness.updates)
        return super().fold(update, staleness)

    def mixed(self, model: Tensor, update: Update, alpha: float) -> Tensor:
        """Eq. 16"""
        mask = unpack(update.extras["mask"], len(model))
        return torch.where(mask, super().mixed(model, update, alpha), model)
