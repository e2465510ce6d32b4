"""FedROD (Chen and Chao: On Bridging Generic and Personalized Federated Learning for Image
Classification, ICLR 2022)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Annotated, ClassVar

import torch
from pydantic import Field
from torch import Tensor

from polytempo.core.client_steps import CLIENT_STEPS, Prior, Session
from polytempo.core.objective import Plain
from polytempo.core.strategy import STRATEGIES, Strategy
from polytempo.core.task import Task
from polytempo.strategies.fedavg import FedAvg
from polytempo.strategies.fedbuff import FedBuff

HEAD = "personal head"


@CLIENT_STEPS.register("second-head")
class SecondHead(Prior):
    """The model is trained on a balanced loss: the client's label prior is added to its outputs in
    training, not in use. Then a head of the client's own, whose outputs are added to those of the
    model, is trained on the plain loss, with all else fixed; the client keeps and uses it."""

    offset_in_use: ClassVar[bool] = False

    @property
    def keeps(self) -> tuple[str, ...]:
        return (HEAD,)

    def work(self, task: Task, samples: int) -> float:
        return samples / 3  # one forward pass: the features do not change meanwhile

    def after(self, session: Session) -> None:
        head = session.places("head")
        model = session.trained()
        own = session.memory.get(HEAD, torch.zeros_like(model))
        if bool(head.any()):
            task = replace(session.task, objective=Plain(), upload="model", own_epochs=None)
            frozen = ~head[: session.parameters]
            # outputs of two linear layers add up to those of one: of the sum of their weights
            both = session.train(model + own, task, HEAD, frozen=frozen)
            own = torch.where(head, both - model, 0.0)
        session.memory[HEAD] = own

    def use(self, served: Tensor, memory: Mapping[str, Tensor]) -> Tensor:
        return served + memory[HEAD] if HEAD in memory else served


class TwoHeads(Strategy):
    """A generic head for all, and a personal one on top of it."""

    smoothing: Annotated[float, Field(gt=0)] = 0.1

    def task(self, client: int) -> Task:
        return replace(super().task(client), client_steps=(SecondHead(self.smoothing),))


@STRATEGIES.register("fedrod")
class FedROD(TwoHeads, FedAvg):
    """Body and generic head learn a balanced task together; a personal head learns what is left.

        theta_i <- argmin mean CE(g(x) + log p_i, y)     uploaded; p_i: the client's label shares
        h_i <- argmin mean CE(g(x) + h(z), y)            kept; z the features, g and z fixed
    A client uses `g + h_i`; g alone is the generic model. The prior p_i makes the first loss that
    of balanced softmax; for problems other than classification it is the plain loss.

    `smoothing` is added to the count of each label before p_i is taken, for labels that a client
    does not have.

    Our reading, where we depart: the personal head is trained after the body, not along with it,
    for the task's epochs (that takes a forward pass in simulated time); it begins where its last
    training ended; weight decay draws the sum of the two heads to zero, not the personal one; it is
    a plain layer, not made by a hypernetwork. The last linear layer is the head.
    """

    family: ClassVar[str] = "synchronous, personalised"
    paper: ClassVar[str] = "Chen and Chao 2022; our reading"


@STRATEGIES.register("fedrod-async")
class FedRODAsync(TwoHeads, FedBuff):
    """FedROD on arrival: body and generic head are folded as in FedBuff."""

    family: ClassVar[str] = "asynchronous, personalised"
    paper: ClassVar[str] = "Chen and Chao 2022, asynchronous; our reading"
