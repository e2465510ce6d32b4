"""Asynchronous SGD: as it is, and with steps that shrink with the delay (Koloskova et al.: Sharper
Convergence Guarantees for Asynchronous SGD, 2022)."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from polytempo.core.messages import InFlights, Staleness, Update
from polytempo.core.strategy import STRATEGIES, Context, Refill
from polytempo.strategies.gradients import GradientStrategy


@STRATEGIES.register("vanilla-asgd")
class VanillaASGD(GradientStrategy):
    """Every gradient moves the global model as soon as it arrives, however old it is.

    `w <- w - eta g`. The baseline of asynchronous methods: faster clients have more influence. It
    is FedBuff with a buffer of one. Every client computes all the time; set the refill to "idle" to
    limit them to its concurrency.

    `server_lr`: eta, 0.2 sqrt(n / T) in the ACE paper. `local_steps`: of a client, 1 in the paper;
    with more, g is the sum of their gradients (plain SGD, whatever the task's momentum).
    """

    paper: ClassVar[str] = "Mishchenko et al. 2022"
    refill: ClassVar[Refill] = "same"
    all_train: ClassVar[bool] = True
    state: ClassVar[tuple[str, ...]] = ("model",)

    def fold(self, update: Update, staleness: Staleness) -> bool:
        self.descend(self.gradient(update))
        return True


@STRATEGIES.register("delay-adaptive-asgd")
class DelayAdaptiveASGD(VanillaASGD):
    """Every gradient moves the global model; by less if it is older than usual.

    With tau the updates that have come since the client was sent its model, and tau_C the
    concurrency,
        w <- w - eta g                      while tau <= tau_C
        w <- w - eta (tau_C / tau) g        beyond, or no step at all (`beyond=drop`)
    The theory allows any step below min(eta, 1 / (4 L tau)) beyond tau_C; L is not known, so the
    step shrinks from eta on without a jump.

    `threshold`: tau_C; None takes the number of clients that were in training when the update
    before this one came (or got lost). When everybody always computes, that is n, and tau is n - 1
    on average.
    `server_lr`: eta, 0.2 sqrt(n / T) in the ACE paper. `local_steps`: of a client, 1 in the paper;
    with more, g is the sum of their gradients (plain SGD, whatever the task's momentum).
    """

    paper: ClassVar[str] = "Koloskova et al. 2022"
    state: ClassVar[tuple[str, ...]] = ("model", "concurrency")

    threshold: Annotated[float, Field(gt=0)] | None = None
    beyond: Literal["shrink", "drop"] = "shrink"

    def setup(self, context: Context) -> None:
        super().setup(context)
        self.concurrency = 1  # until the first update has come, which is never late

    def fold(self, update: Update, staleness: Staleness) -> bool:
        tau, bound = staleness.updates, self.threshold or self.concurrency  # tau_C
        if tau <= bound:
            self.descend(self.gradient(update))
        elif self.beyond == "shrink":
            self.descend(self.gradient(update), self.server_lr * bound / tau)
        else:
            return False
        return True

    def training(self, in_flight: InFlights) -> None:
        self.concurrency = len(in_flight) + 1  # with the one that has just answered
