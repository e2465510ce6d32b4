"""Ditto (Li et al.: Ditto: Fair and Robust Federated Learning Through Personalization, ICML
2021)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Annotated, ClassVar

from pydantic import Field
from torch import Tensor

from polytempo.core.client_steps import CLIENT_STEPS, ClientStep, Session
from polytempo.core.objective import Proximal
from polytempo.core.strategy import STRATEGIES, Strategy
from polytempo.core.task import Task
from polytempo.strategies.fedavg import FedAvg
from polytempo.strategies.fedbuff import FedBuff

OWN = "own model"


@CLIENT_STEPS.register("own-model")
class OwnModel(ClientStep):
    """The client trains a second model, which it keeps and uses:
    `v <- argmin F_i(v) + (lam/2) ||v - w||^2`, w the model that it received, from its last v."""

    lam: Annotated[float, Field(ge=0)]
    epochs: Annotated[int, Field(ge=1)] | None = None

    @property
    def keeps(self) -> tuple[str, ...]:
        return (OWN,)

    def its_task(self, task: Task) -> Task:
        """How v is trained: as w is, or for its own number of epochs."""
        task = replace(task, objective=Proximal(self.lam), upload="model", own_epochs=None)
        return task if self.epochs is None else replace(task, epochs=self.epochs, steps=None)

    def work(self, task: Task, samples: int) -> float:
        return replace(self.its_task(task), client_steps=()).work(samples)

    def after(self, session: Session) -> None:
        own = session.memory.get(OWN, session.received)
        task = self.its_task(session.task)
        session.memory[OWN] = session.train(own, task, OWN, anchor=session.received)

    def use(self, served: Tensor, memory: Mapping[str, Tensor]) -> Tensor:
        return memory.get(OWN, served)


class WithOwnModel(Strategy):
    """Every client has a model of its own beside the global one."""

    lam: Annotated[float, Field(ge=0)] = 0.1
    own_epochs: Annotated[int, Field(ge=1)] | None = None

    def task(self, client: int) -> Task:
        return replace(super().task(client), client_steps=(OwnModel(self.lam, self.own_epochs),))


@STRATEGIES.register("ditto")
class Ditto(WithOwnModel, FedAvg):
    """A global model as in FedAvg, and one of each client's own that is held near it.

        w_i <- from w, as in FedAvg: uploaded
        v_i <- argmin F_i(v) + (lam/2) ||v - w||^2, from its last v: kept and used

    `lam`: 0.1 to 2 in the paper, chosen per data set. `own_epochs`: of v (default: as many as of
    w). Training twice takes twice the time. A client that has not been trained yet uses w.

    The own models do not depend on each other: what is averaged is FedAvg's, bit for bit.
    """

    family: ClassVar[str] = "synchronous, personalised"
    paper: ClassVar[str] = "Li et al. 2021 (Ditto)"


@STRATEGIES.register("ditto-async")
class DittoAsync(WithOwnModel, FedBuff):
    """Ditto on arrival: the global model is FedBuff's."""

    family: ClassVar[str] = "asynchronous, personalised"
    paper: ClassVar[str] = "Li et al. 2021 (Ditto), asynchronous"
