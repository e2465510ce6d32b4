"""FedALA (Zhang et al.: Adaptive Local Aggregation for Personalized Federated Learning, AAAI
2023)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Annotated, ClassVar

import torch
from pydantic import Field
from torch import Tensor

from polytempo.core.client_steps import CLIENT_STEPS, ClientStep, Session
from polytempo.core.objective import Plain
from polytempo.core.optimizer import Sgd
from polytempo.core.strategy import STRATEGIES, Strategy
from polytempo.core.task import Task
from polytempo.strategies.fedavg import FedAvg
from polytempo.strategies.fedbuff import FedBuff

OWN, WEIGHTS = "own model", "weights"


@CLIENT_STEPS.register("local-aggregation")
class LocalAggregation(ClientStep):
    """Before training, the client mixes the received model w into its own last one v, with a weight
    for each number: `v + (w - v) * W`. It learns W by gradient descent, number by number, for
    `part` of the model; elsewhere W is 1. It uses what it gets by mixing so."""

    part: str = "head"
    rate: Annotated[float, Field(gt=0)] = 1.0
    share: Annotated[float, Field(gt=0, le=1)] = 0.8
    first_passes: Annotated[int, Field(ge=1)] = 5

    @property
    def keeps(self) -> tuple[str, ...]:
        return (OWN, WEIGHTS)

    def steps(self, task: Task, samples: int) -> int:
        """In which the weights are learned."""
        return max(1, math.ceil(self.share * samples / task.batch_size))

    def work(self, task: Task, samples: int) -> float:
        return self.share * samples

    def before(self, session: Session) -> None:
        own = session.memory.get(OWN)
        if own is None:  # there is nothing to mix with yet
            return
        gap = session.received - own
        weights = session.memory[WEIGHTS]
        learned = session.places(self.part)
        learned[session.parameters :] = False  # statistics have no gradient
        gradient = replace(
            session.task,
            objective=Plain(),
            optimizer=Sgd(momentum=0.0, weight_decay=0.0),
            upload="gradient",
            own_epochs=None,
        )
        untouched = bool((weights == 1).all())
        steps = self.steps(session.task, session.samples) * (self.first_passes if untouched else 1)
        for step in range(steps if bool(learned.any()) else 0):
            mixed = own + gap * weights
            slope = session.train(mixed, gradient, f"weights {step}") * gap  # dF/dW
            weights = torch.where(learned, (weights - self.rate * slope).clamp(0, 1), weights)
        session.memory[WEIGHTS] = weights
        session.put(own + gap * weights)

    def after(self, session: Session) -> None:
        session.memory[OWN] = session.trained()
        session.memory.setdefault(WEIGHTS, torch.ones_like(session.received))

    def use(self, served: Tensor, memory: Mapping[str, Tensor]) -> Tensor:
        if OWN not in memory:
            return served
        return memory[OWN] + (served - memory[OWN]) * memory[WEIGHTS]


class AggregatingLocally(Strategy):
    """Clients mix what they receive into what they have, before they train."""

    part: str = "head"
    rate: Annotated[float, Field(gt=0)] = 1.0
    share: Annotated[float, Field(gt=0, le=1)] = 0.8
    first_passes: Annotated[int, Field(ge=1)] = 5

    def task(self, client: int) -> Task:
        step = LocalAggregation(self.part, self.rate, self.share, self.first_passes)
        return replace(super().task(client), client_steps=(step,))


@STRATEGIES.register("fedala")
class FedALA(AggregatingLocally, FedAvg):
    """FedAvg whose clients take of the global model what helps them, number by number.

    With v the model that client i had after its last training and w the one that it receives:
        W <- clip(W - rate dF_i/dW, 0, 1) at v + (w - v) * W, some mini-batches of its samples
        theta <- v + (w - v) * W, then trained as in FedAvg and uploaded
    W is one number per parameter of `part`; in all other layers w replaces v. A client uses
    `v + (w - v) * W` with the W that it learned last, without learning it again.

    `part`: head (the paper's p = 1: the last layers), or a pattern of names (`*`: all).
    `rate`: 1, as in the paper. `share`: W sees 80% of the client's samples at each training.
    `first_passes`: the first time, so many times as much. (The paper goes on until the loss has
    settled.) Learning W takes one pass over that share of the samples in simulated time.

    Where we depart: mini-batches for W are drawn afresh for each step, and in a client's first
    training, when all have the same model, it learns nothing.
    """

    family: ClassVar[str] = "synchronous, personalised"
    paper: ClassVar[str] = "Zhang et al. 2023 (FedALA)"


@STRATEGIES.register("fedala-async")
class FedALAAsync(AggregatingLocally, FedBuff):
    """FedALA on arrival: what is folded, as in FedBuff, is how far the trained model is from the
    global one that the client was sent."""

    family: ClassVar[str] = "asynchronous, personalised"
    paper: ClassVar[str] = "Zhang et al. 2023 (FedALA), asynchronous"
