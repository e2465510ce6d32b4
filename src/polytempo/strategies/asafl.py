"""ASAFL (Zhang et al.: An Adaptive Asynchronous Federated Learning Framework for Heterogeneous
Internet of Things, Information Sciences 689, 2025), as far as it is known: our reading."""

from __future__ import annotations

from typing import Annotated, ClassVar

import torch
from pydantic import Field
from torch import Tensor

from polytempo.core.messages import Dispatch, Staleness, Update
from polytempo.core.strategy import STRATEGIES, Context, Strategy
from polytempo.strategies.history import History

_EPSILON = 1e-12  # for a model of length zero


@STRATEGIES.register("asafl")
class ASAFL(Strategy):
    """Our reading of ASAFL: updates act through a momentum, less so the more they diverge.

    Neither the text nor the code of ASAFL is public, only its highlights (a momentum-based
    framework, adaptive weights for asynchronous updates) and what PACE says of it (weights by
    divergence of models, eta_s = eta_c = 0.01). Results of this class are not results of the
    published method.
    On the arrival of theta from a client that was sent w^(s):
        g   = (w^(s) - theta) / eta_c                  pseudo-gradient
        div = ||theta - w|| / ||w||                    divergence
        d  <- 0.9 d + 0.1 div                          its usual size
        a   = alpha min(1, d / div)
        m  <- beta m + (1 - beta) g
        w  <- w - eta_s a m

    `alpha`: the weight of an update of usual divergence. `beta`: the momentum. `server_lr`: eta_s;
    none (the default) is the client's learning rate eta_c, as in PACE, and the two cancel.
    `memory`: how much of d is kept. d begins as the first divergence. With `beta=0` and all
    divergences alike this is FedAsync on differences, `w <- w + alpha (theta - w^(s))`.
    """

    family: ClassVar[str] = "asynchronous, one model"
    paper: ClassVar[str] = "our reading of Zhang et al. 2025"
    single_model: ClassVar[bool] = True
    state: ClassVar[tuple[str, ...]] = ("models", "momentum", "usual")

    alpha: Annotated[float, Field(gt=0, le=1)] = 0.3
    beta: Annotated[float, Field(ge=0, lt=1)] = 0.9
    server_lr: Annotated[float, Field(gt=0)] | None = None
    memory: Annotated[float, Field(ge=0, lt=1)] = 0.9

    def setup(self, context: Context) -> None:
        super().setup(context)
        self.models = History(context.initial)
        self.momentum = torch.zeros_like(context.initial)  # m
        self.usual: float | None = None  # d

    def model_for(self, client: int) -> Tensor:
        return self.models.current

    def adapted_weight(self, divergence: float) -> float:
        """a, with this divergence counted in d"""
        before = divergence if self.usual is None else self.usual
        self.usual = self.memory * before + (1 - self.memory) * divergence
        return self.alpha * (self.usual / divergence if divergence > self.usual else 1.0)

    def fold(self, update: Update, staleness: Staleness) -> bool:
        model, theta, client_lr = self.models.current, update.vector, update.task.lr
        server_lr = client_lr if self.server_lr is None else self.server_lr
        gradient = (self.models.ago(staleness.versions) - theta) / client_lr
        distance = torch.linalg.vector_norm(theta - model)
        divergence = float(distance / (torch.linalg.vector_norm(model) + _EPSILON))
        weight = self.adapted_weight(divergence)
        self.momentum.lerp_(gradient, 1 - self.beta)
        self.models.release(update.client)
        self.models.add(model - server_lr * weight * self.momentum)
        return True

    def dispatched(self, dispatch: Dispatch) -> None:
        self.models.hold(dispatch.client)

    def lost(self, client: int) -> None:
        self.models.release(client)
