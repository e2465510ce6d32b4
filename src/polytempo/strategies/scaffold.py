"""SCAFFOLD (Karimireddy et al.: SCAFFOLD: Stochastic Controlled Averaging for Federated Learning,
ICML 2020)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Annotated, ClassVar

import torch
from pydantic import Field
from torch import Tensor

from polytempo.core.client_steps import CLIENT_STEPS, ClientStep, Session
from polytempo.core.errors import Refused
from polytempo.core.messages import Staleness, Update
from polytempo.core.objective import Drift
from polytempo.core.strategy import STRATEGIES, Context, Strategy
from polytempo.core.task import Task
from polytempo.strategies.fedac import effective_steps
from polytempo.strategies.fedavg import FedAvg
from polytempo.strategies.fedbuff import FedBuff

CONTROL, VARIATE = "control", "variate"


@CLIENT_STEPS.register("control-variate")
class ControlVariate(ClientStep):
    """The client keeps its variate c_i, adds `c - c_i` to the gradient of every step, with the
    control c that it is sent, and uploads by how much c_i has changed."""

    @property
    def keeps(self) -> tuple[str, ...]:
        return (VARIATE,)

    @property
    def uploads(self) -> Mapping[str, int]:
        return {VARIATE: 1}

    def before(self, session: Session) -> None:
        control = session.vectors[CONTROL]
        own = session.memory.get(VARIATE, torch.zeros_like(control))
        session.vectors = {**session.vectors, "anchor": control - own}

    def after(self, session: Session) -> None:
        control = session.vectors[CONTROL]
        own = session.memory.get(VARIATE, torch.zeros_like(control))
        steps = effective_steps(session.task, session.samples)
        mean = (session.received - session.trained()) / (steps * session.task.lr)
        change = mean - control  # c_i+ = c_i - c + (x - y) / (K eta)
        change[session.parameters :] = 0  # statistics have no gradient
        session.memory[VARIATE] = own + change
        session.extras[VARIATE] = change[None]


class Controlled(Strategy):
    """What clients drift by is taken out of their steps."""

    single_model: ClassVar[bool] = True

    def setup(self, context: Context) -> None:
        super().setup(context)
        context.task.plain_sgd(self.name)
        self.control = torch.zeros_like(context.initial)  # c

    def task(self, client: int) -> Task:
        return replace(super().task(client), objective=Drift(), client_steps=(ControlVariate(),))

    def vectors_for(self, client: int) -> Mapping[str, Tensor]:
        return {CONTROL: self.control}

    def fold(self, update: Update, staleness: Staleness) -> bool:
        change = update.extras[VARIATE]
        if change.shape[1] != len(self.control):
            raise Refused(
                f"client {update.client} sent a variate of {change.shape[1]} numbers, expected "
                f"{len(self.control)}"
            )
        self.control = self.control + change[0] / self.context.clients  # c <- c + (1/n) sum dc_i
        return super().fold(update, staleness)


@STRATEGIES.register("scaffold")
class SCAFFOLD(Controlled, FedAvg):
    """FedAvg whose clients correct their gradients by where they drift and where all should go.

        y <- y - eta (g_i(y) - c_i + c)               K steps from the received x
        c_i+ = c_i - c + (x - y) / (K eta)            kept by the client (the paper's option II)
        x <- x + server_lr mean (y_i - x),  c <- c + (1/n) sum (c_i+ - c_i)
    Model and control travel both ways: twice FedAvg's bytes.

    Local momentum acts on the corrected gradients; K is then what makes `(x - y) / (K eta)` a mean
    of gradients (`effective_steps`), as in our FedAC. The task's optimizer must be SGD.

    Where we depart: the mean is weighted by samples; a variate changes although its upload may be
    lost on the way, since the client cannot know.
    """

    family: ClassVar[str] = "synchronous, one model"
    paper: ClassVar[str] = "Karimireddy et al. 2020"
    state: ClassVar[tuple[str, ...]] = (*FedAvg.state, "control")

    server_lr: Annotated[float, Field(gt=0)] = 1.0

    def replacement(self, mean: Tensor) -> Tensor:
        return super().replacement(torch.lerp(self.model.to(mean.dtype), mean, self.server_lr))


@STRATEGIES.register("scaffold-async")
class SCAFFOLDAsync(Controlled, FedBuff):
    """SCAFFOLD on arrival: displacements are folded as in FedBuff, the control with each update."""

    family: ClassVar[str] = "asynchronous, one model"
    paper: ClassVar[str] = "Karimireddy et al. 2020, asynchronous"
    state: ClassVar[tuple[str, ...]] = (*FedBuff.state, "control")
