"""How local training is executed: behind one interface, so that nobody else needs to know."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from polytempo.local.training import Job, Score, Trainer


class Backend(Protocol):
    """Carries out trainings and evaluations. The results depend on the requests alone."""

    def train(self, jobs: Sequence[Job]) -> list[Tensor]:
        """The upload of each job."""
        ...

    def evaluate(self, models: Sequence[tuple[Tensor, Sequence[int]]]) -> list[list[Score]]:
        """Each model on the test splits of the clients named beside it."""
        ...


class Serial:
    """Everything in this process, one after the other."""

    def __init__(self, trainer: Trainer) -> None:
        self.trainer = trainer

    def train(self, jobs: Sequence[Job]) -> list[Tensor]:
        return [self.trainer.train(job) for job in jobs]

    def evaluate(self, models: Sequence[tuple[Tensor, Sequence[int]]]) -> list[list[Score]]:
        return [self.trainer.evaluate(params, clients) for params, clients in models]
