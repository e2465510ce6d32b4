"""Standalone: every client trains alone. The baseline: does collaborating pay at all?"""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor

from polytempo.core.bank import ModelBank
from polytempo.core.messages import Staleness, Update
from polytempo.core.strategy import STRATEGIES, Context, Refill, Strategy


@STRATEGIES.register("standalone")
class Standalone(Strategy):
    """Local training alone: no collaboration, no communication.

    Use it in every comparison. All clients train at once, each from its own last model,
    whatever the concurrency; a client's k-th local round ends at k times its latency, so fast
    clients train more often. Set the refill to "idle" to give it the concurrency, and each client
    the number of trainings, that a method with a server has.
    """

    family: ClassVar[str] = "baseline"
    paper: ClassVar[str] = "none"
    refill: ClassVar[Refill] = "same"
    all_train: ClassVar[bool] = True
    communicates: ClassVar[bool] = False
    state: ClassVar[tuple[str, ...]] = ("models",)

    def setup(self, context: Context) -> None:
        super().setup(context)
        self.models = ModelBank(context.clients, context.initial, storage=context.storage)

    def model_for(self, client: int) -> Tensor:
        return self.models.row(client)

    def revision(self, client: int) -> int:
        return self.models.revision(client)

    def fold(self, update: Update, staleness: Staleness) -> bool:
        self.models.set(update.client, update.vector)
        return True
