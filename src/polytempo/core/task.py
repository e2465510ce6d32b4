"""What a client is asked to do: how long it trains, with which optimiser, on which objective.

A task is plain data (it travels to the client and into checkpoints); `polytempo.training` carries
it out.
"""

from __future__ import annotations

import math
from dataclasses import field
from typing import Annotated, Literal

from pydantic import BeforeValidator, Field
from torch import Tensor

from polytempo.core.client_steps import CLIENT_STEPS, ClientStep, Parting, with_leaving
from polytempo.core.compression import Compression
from polytempo.core.errors import PolytempoError
from polytempo.core.objective import OBJECTIVES, Objective, Plain
from polytempo.core.optimizer import OPTIMIZERS, Optimizer, Sgd
from polytempo.core.registry import Options, Registry
from polytempo.core.schedule import SCHEDULES, Constant, Schedule


class Task(Options):
    """Local training. `steps`, where given, replaces `epochs`.

    `schedule`: how the learning rate changes over the steps of this training (that of a run is in
    the `lr` that each client is sent).
    `optimizer` starts afresh with every dispatch, unless `keep_optimizer`: then a client keeps its
    moments from one training to the next, and over a multicast.
    `upload` says what comes back: the trained model, its difference from the received one
    ("delta"), the gradient of the first mini-batch with no step taken ("gradient"), or the mean of
    the gradients of all its steps ("path"). Weight decay and the objective's pull are part of
    gradients.
    `own_epochs`, where given, trains a model in two parts: the client's own part alone for so many
    epochs (0: never), then the shared part alone for `epochs` or `steps`.
    `client_steps` is what the client does before and after its local steps.
    """

    epochs: Annotated[int, Field(ge=1)] = 5
    steps: Annotated[int, Field(ge=1)] | None = None
    batch_size: Annotated[int, Field(ge=1)] = 64
    lr: Annotated[float, Field(gt=0)] = 0.01
    optimizer: Annotated[Optimizer, BeforeValidator(OPTIMIZERS.create)] = field(default_factory=Sgd)
    keep_optimizer: bool = False
    schedule: Annotated[Schedule, BeforeValidator(SCHEDULES.create)] = field(
        default_factory=Constant
    )
    objective: Annotated[Objective, BeforeValidator(OBJECTIVES.create)] = field(
        default_factory=Plain
    )
    upload: Literal["model", "delta", "gradient", "path"] = "model"
    own_epochs: Annotated[int, Field(ge=0)] | None = None
    client_steps: tuple[Annotated[ClientStep, BeforeValidator(CLIENT_STEPS.create)], ...] = ()

    def __post_init__(self) -> None:
        uploads = [name for step in self.client_steps for name in step.uploads]
        keeps = [name for step in self.client_steps for name in step.keeps]
        for verb, names in (("upload", uploads), ("keep", keeps)):
            for name in names:
                if names.count(name) > 1:
                    raise PolytempoError(f"two client steps {verb} {name!r}: give one another name")

    @property
    def extras(self) -> dict[str, int]:
        """What is uploaded along with the vector: names, and the number of rows of each."""
        return {name: rows for step in self.client_steps for name, rows in step.uploads.items()}

    @property
    def compression(self) -> Compression | None:
        """How the vector is compressed: always the last of the client steps."""
        last = self.client_steps[-1] if self.client_steps else None
        return last if isinstance(last, Compression) else None

    def leaving(self, parting: Parting, upload: Tensor) -> Tensor:
        """What leaves the client in place of `upload`, by its client steps. (What is compressed
        is how far the model has moved: the server adds what it has sent.)"""
        steps = with_leaving(self.client_steps)
        if not steps:
            return upload
        model = self.upload == "model"
        moved = upload - parting.received if model else upload
        for step in steps:
            moved = step.leaving(parting, moved)
        return parting.received + moved if model and self.compression is None else moved

    def upload_bytes(self, model: Tensor) -> int:
        """Of the vector that is uploaded, for a model like this."""
        packing = self.compression
        return model.nbytes if packing is None else packing.nbytes(len(model))

    def plain_sgd(self, who: str) -> Sgd:
        """The optimizer, for a method that is after a client's gradients: uploaded as such, with no
        step for an optimizer to take, or concluded from its steps. An error if that cannot be."""
        gradient = self.upload == "gradient"
        if type(self.optimizer) is not Sgd:
            why = "derives gradients from the steps of plain SGD"
            if gradient:
                why = "has its clients upload a gradient, with no step for an optimizer to take"
            name = self.optimizer.name or type(self.optimizer).__name__
            raise PolytempoError(f"{who} {why}; use --optimizer sgd, not {name}")
        if self.keep_optimizer and self.optimizer.momentum and not gradient:
            raise PolytempoError(
                f"{who} cannot tell momentum that a client kept from its last training from the "
                "gradients of this one; omit --keep-optimizer, or use --momentum 0"
            )
        return self.optimizer

    def rate(self, step: int) -> float:
        """The learning rate of that step."""
        return self.lr * self.schedule.factor(step)

    def batches(self, samples: int) -> int:
        """Steps in one epoch. A last batch of one single sample joins the batch before it (batch
        normalisation cannot train on one sample)."""
        full, rest = divmod(samples, self.batch_size)
        return max(1, full + (rest > 1))

    def end_of_epoch(self, step: float, samples: int) -> int:
        """The step at which the epoch ends that is in progress after so many steps, which need not
        be whole: where an urgent request ends a training."""
        epoch = self.batches(samples)
        return (math.floor(step / epoch) + 1) * epoch

    def total_steps(self, samples: int) -> int:
        """Steps of the whole task on a client with that many training samples."""
        if self.upload == "gradient":
            return 1
        shared = self.steps if self.steps is not None else self.epochs * self.batches(samples)
        return self.own_steps(samples) + shared

    def own_steps(self, samples: int) -> int:
        """Of these, the first ones, that train the client's own part alone."""
        return (self.own_epochs or 0) * self.batches(samples)

    def work(self, samples: int) -> float:
        """Samples that the client pushes through the model (for steps, batches of mean size):
        what simulated time is made of."""
        passes = self.total_steps(samples) / self.batches(samples)
        training = passes * samples * math.prod(step.cost for step in self.client_steps)
        return training + sum(step.work(self, samples) for step in self.client_steps)


TASKS: Registry[Task] = Registry("task", Task)
TASKS.register("task")(Task)
