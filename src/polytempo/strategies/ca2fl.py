"""CA2FL (Wang et al.: Tackling the Data Heterogeneity in Asynchronous Federated Learning with
Cached Update Calibration, ICLR 2024)."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

import torch
from pydantic import Field

from polytempo.core.bank import ModelBank
from polytempo.core.messages import Staleness, Update
from polytempo.core.strategy import STRATEGIES, Context
from polytempo.strategies.gradients import GradientStrategy


@STRATEGIES.register("ca2fl")
class CA2FL(GradientStrategy):
    """Updates are buffered as differences from each client's previous one, which is cached.

    h_i is the last gradient of client i (0 before the first), h their mean over all n clients. When
    M gradients g_i are in, from the set S of clients,
        v  = h + (1 / |S|) sum (g_i - h_i)          h as it was before this buffer
        w <- w - eta v
        h <- the mean over all clients, now with the g_i in place of the h_i
    A client that is in the buffer twice is compared with its own first gradient the second time, so
    that the sum holds its newest gradient once: hence |S|, not M. `mean_over=updates` divides by M,
    as some public code does; they differ only if a client reports twice in one buffer.

    Use it where clients differ in speed and data, and the server can afford a vector per client
    (`--bank half` or `int8` makes it smaller).

    `buffer_size`: M, 10 in the ACE paper, with 20 of 100 clients in training.
    `server_lr`: eta; it acts on gradients, so it is the product of the paper's local and global
    rates where an update is a model difference. `local_steps`: of a client; with more than
    one, g is the sum of their gradients (plain SGD, whatever the task's momentum).
    """

    paper: ClassVar[str] = "Wang et al. 2024"
    state: ClassVar[tuple[str, ...]] = ("model", "cache", "total", "change", "count", "senders")

    buffer_size: Annotated[int, Field(ge=1)] = 10
    mean_over: Literal["clients", "updates"] = "clients"

    def setup(self, context: Context) -> None:
        super().setup(context)
        zeros = torch.zeros_like(context.initial)
        self.cache = ModelBank(context.clients, zeros, storage=context.storage)  # h_i
        self.total = torch.zeros_like(zeros, dtype=torch.float64)  # n h, of before this buffer
        self.change = torch.zeros_like(self.total)  # sum of g_i - h_i over this buffer
        self.count = 0
        self.senders: list[int] = []  # S

    def fold(self, update: Update, staleness: Staleness) -> bool:
        i = update.client
        before = self.cache.row(i).double()
        self.cache.set(i, self.gradient(update))
        # (read back, for it may be kept in fewer bits: then h stays the mean of what is kept)
        self.change += self.cache.row(i) - before
        self.count += 1
        if i not in self.senders:
            self.senders.append(i)
        if self.count < self.buffer_size:
            return False
        share = len(self.senders) if self.mean_over == "clients" else self.count
        self.descend(self.total / self.context.clients + self.change / share)  # v
        self.total += self.change
        self.change = torch.zeros_like(self.total)
        self.count, self.senders = 0, []
        return True
