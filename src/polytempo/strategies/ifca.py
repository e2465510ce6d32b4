"""IFCA (Ghosh et al.: An Efficient Framework for Clustered Federated Learning, NeurIPS 2020): as
published, and asynchronous as CASA's baseline."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Annotated, ClassVar

import torch
from pydantic import Field
from torch import Tensor

from polytempo.core.client_steps import Choose
from polytempo.core.errors import Refused
from polytempo.core.messages import Staleness, Update
from polytempo.core.strategy import STRATEGIES, Context, Refill
from polytempo.core.task import Task
from polytempo.strategies.clustered import Clustered


class Choosing(Clustered):
    """`k` models that start independently; every client is handed them all, chooses the one with
    the least loss on its training samples, trains it and says which it was. A client's model is
    the one that it chose last; before its first choice, the first."""

    k: Annotated[int, Field(ge=2)] = 4

    def setup(self, context: Context) -> None:
        super().setup(context)
        self.cluster[:] = -1
        self.models += [context.another_initial(number) for number in range(1, self.k)]
        self.revisions = [0] * self.k

    def task(self, client: int) -> Task:
        return replace(self.context.task, client_steps=(Choose(self.k),))

    def order(self, client: int) -> list[int]:
        """The numbers of the models as they are sent: the client's last choice comes first, so that
        it wins ties."""
        first = max(int(self.cluster[client]), 0)
        return [first, *(number for number in range(self.k) if number != first)]

    def model_for(self, client: int) -> Tensor:
        return self.models[self.order(client)[0]]

    def revision(self, client: int) -> int:
        number = self.order(client)[0]
        return self.revisions[number] * self.k + number

    def vectors_for(self, client: int) -> Mapping[str, Tensor]:
        others = enumerate(self.order(client)[1:], start=1)
        return {f"candidate {place}": self.models[number] for place, number in others}

    def note_choice(self, update: Update) -> int:
        """The client is in the cluster that it chose."""
        choice = update.extras["choice"]
        index = int(choice[0, 0]) if choice.numel() == 1 else -1
        if not 0 <= index < self.k:
            raise Refused(
                f"client {update.client} chose model {choice.tolist()}, expected one number from 0 "
                f"to {self.k - 1}"
            )
        number = self.order(update.client)[index]
        self.cluster[update.client] = number
        return number


@STRATEGIES.register("ifca")
class IFCA(Choosing):
    """A fixed number of clusters; a client is in the one whose model fits its data best.

    A cohort chooses and trains; each cluster's model becomes the sample-weighted mean of those that
    chose it, and stays as it is if nobody did. `k`: the number of clusters. All k models are
    downloaded each time.
    """

    family: ClassVar[str] = "synchronous, clustered"
    paper: ClassVar[str] = "Ghosh et al. 2020"
    refill: ClassVar[Refill] = "cohort"
    state: ClassVar[tuple[str, ...]] = (*Choosing.state, "totals", "samples")

    def setup(self, context: Context) -> None:
        super().setup(context)
        self.totals = torch.zeros(self.k, len(context.initial), dtype=torch.float64)
        self.samples = [0] * self.k

    def fold(self, update: Update, staleness: Staleness) -> bool:
        number = self.note_choice(update)
        self.totals[number].add_(update.vector, alpha=update.samples)
        self.samples[number] += update.samples
        return False

    def close_cohort(self) -> bool:
        if not any(self.samples):
            return False
        for number, samples in enumerate(self.samples):
            if samples:
                mean = self.totals[number] / samples
                self.change(number, mean.to(self.models[number].dtype))
        self.totals.zero_()
        self.samples = [0] * self.k
        return True


@STRATEGIES.register("ifca-async")
class IFCAAsync(Choosing):
    """IFCA made asynchronous in the naive way: `w_k <- (1 - alpha) w_k + alpha theta`."""

    family: ClassVar[str] = "asynchronous, clustered"
    paper: ClassVar[str] = "Liu et al. 2024 (CASA), baseline"

    alpha: Annotated[float, Field(gt=0, lt=1)] = 0.3

    def fold(self, update: Update, staleness: Staleness) -> bool:
        number = self.note_choice(update)
        self.change(number, torch.lerp(self.models[number], update.vector, self.alpha))
        return True
