"""References: not methods of federated learning, but what every one of them stands between."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, ClassVar

from pydantic import Field
from torch import Tensor

from polytempo.core.schedule import Cosine
from polytempo.core.strategy import STRATEGIES, Context, Kind, Strategy


class Reference(Strategy):
    """Base of these: no clock, no messages."""

    family: ClassVar[str] = "reference"
    paper: ClassVar[str] = "none"
    engine: ClassVar[Kind] = "reference"
    communicates: ClassVar[bool] = False


@STRATEGIES.register("majority")
class Majority(Reference):
    """Nobody learns anything: each client always predicts its commonest label.

    The floor of every table. With skewed labels it is high: with Dirichlet's alpha = 0.1 on
    CIFAR-10 it has about 70%. For other problems the best constant: the mean of numbers, how often
    each label or token occurs.
    """

    def updates_of_run(self, given: int, clients: int) -> int:
        return 1


@STRATEGIES.register("pooled")
class Pooled(Reference):
    """One model, trained on the data of all clients in one place: what federated learning gives up.

    The ceiling for methods with one model. Minibatches of all clients' training samples, for
    `epochs`, with the run's batch size, optimizer and learning rate, which goes down to zero by
    half a cosine. An update is an epoch.
    """

    epochs: Annotated[int, Field(ge=1)] = 20

    def setup(self, context: Context) -> None:
        super().setup(context)
        self.models: Sequence[Tensor] = [context.initial]
        self.group = [0] * context.clients
        self.epoch = 0

    def updates_of_run(self, given: int, clients: int) -> int:
        return self.epochs

    def schedule(self, steps: int) -> Cosine:
        """Of a training of so many steps."""
        return Cosine(updates=steps, floor=1e-6)

    def model_for(self, client: int) -> Tensor:
        return self.models[self.group[client]]

    def revision(self, client: int) -> int:
        return self.epoch


@STRATEGIES.register("pooled-groups")
class PooledGroups(Pooled):
    """As `pooled`, with one model for each true group of clients: the ceiling for methods with
    clusters, on data whose groups are known."""
