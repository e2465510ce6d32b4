"""What is shared by methods whose server takes the steps: clients upload gradients."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, ClassVar, Literal

from pydantic import Field
from torch import Tensor

from polytempo.core.errors import PolytempoError
from polytempo.core.messages import Update
from polytempo.core.optimizer import Sgd
from polytempo.core.strategy import STRATEGIES, Context, Strategy
from polytempo.core.task import Task


class GradientStrategy(Strategy):
    """One model, which the server moves against the gradients of its clients.

    `server_lr`: eta, the length of a step. The ACE paper takes `0.2 sqrt(n / T)` for all methods,
    n the clients and T the steps of the whole run (c sqrt(n / T), c tuned among 10, 5, 2, 1, 0.5,
    0.2, 0.1): 0.09 for 100 clients and 500 steps. A strategy does not know T, so the default is
    about right for 20 clients and 400 steps; set it accordingly.
    `local_steps`: K. With one, the default, a client returns the gradient of one mini-batch at the
    model that it received, and the task's learning rate, momentum, epochs and steps have no
    meaning. With more, it takes K plain SGD steps with the task's learning rate and returns its
    displacement; divided by the learning rate, that is the sum of K gradients, so divide a
    server_lr that suits K = 1 by K. The task's momentum is not used: with it, the displacement
    would not be a sum of gradients. Weight decay is part of the gradients, as the task says. Other
    optimizers than SGD are refused.
    `local`: what a client does. "gradient": the above. With "mean" and "displacement" it trains as
    the task says, for all its epochs and with its momentum, and uploads the mean of the gradients
    along its way, or that way itself (server_lr = 1 then takes all of it): what ACE's public script
    has its clients do, the first for ACE and ACED, the second for all other methods.

    Batch-norm statistics have no gradient: they would keep their initial values. Use models
    without batch normalisation.
    """

    family: ClassVar[str] = "asynchronous, one model"
    single_model: ClassVar[bool] = True

    server_lr: Annotated[float, Field(gt=0)] = 0.05
    local_steps: Annotated[int, Field(ge=1)] = 1
    local: Literal["gradient", "mean", "displacement"] = "gradient"

    def setup(self, context: Context) -> None:
        super().setup(context)
        self.model = context.initial
        if self.local_steps > 1 and self.local != "gradient":
            raise PolytempoError(
                f"local={self.local} trains for the epochs or steps of the run, got "
                f"local_steps={self.local_steps} as well; use --steps {self.local_steps}"
            )
        if self.local_steps > 1:  # whatever the momentum, which is not used
            name = STRATEGIES.describe(self)["name"]
            replace(context.task, keep_optimizer=False).plain_sgd(name)

    def task(self, client: int) -> Task:
        if self.local != "gradient":
            return replace(self.context.task, upload="path" if self.local == "mean" else "delta")
        if self.local_steps == 1:
            return replace(self.context.task, upload="gradient")
        plain = Sgd(momentum=0.0, weight_decay=self.context.task.optimizer.weight_decay)
        return replace(self.context.task, steps=self.local_steps, optimizer=plain, upload="delta")

    def model_for(self, client: int) -> Tensor:
        return self.model

    def gradient(self, update: Update) -> Tensor:
        """The gradient that was uploaded, the sum of those that the client has followed, or the
        opposite of its way."""
        if self.local == "displacement":
            return -update.vector
        return update.vector if self.local_steps == 1 else update.vector / -update.task.lr

    def descend(self, gradient: Tensor, rate: float | None = None) -> None:
        """w <- w - eta gradient"""
        rate = self.server_lr if rate is None else rate
        self.model = self.model - (rate * gradient).to(self.model.dtype)
