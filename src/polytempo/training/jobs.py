"""What is to be trained, and what comes of it: plain data that crosses process boundaries."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from torch import Tensor

from polytempo.core.client_steps import ClientStep
from polytempo.core.messages import Dispatch
from polytempo.core.task import Task

Vectors = Mapping[str, Tensor]
PERSONAL = "personal"  # the name of a client's own part of the model in its memory
OPTIMIZER = "optimizer."  # what the names of its optimiser's moments begin with there


class Swap(NamedTuple):
    """A model that reaches a client in training (a multicast): after `step` steps it continues with
    this one, at the learning rate that came with it (None: as before)."""

    step: int
    params: Tensor
    vectors: Vectors
    lr: float | None = None


@dataclass(frozen=True)
class Job:
    """One local training: everything that its result depends on, besides the client's data."""

    client: int
    params: Tensor
    task: Task
    stream: tuple[str | int, ...]  # names the random stream
    first_step: int = 0  # steps of the schedule that are skipped
    last_step: int | None = None  # where an urgent request ends it
    vectors: Vectors = field(default_factory=dict)  # what came with the model
    memory: Vectors = field(default_factory=dict)  # what the client remembers
    swaps: tuple[Swap, ...] = ()
    secret: int | None = None  # seeds what nobody else may know: the noise of a real upload

    @property
    def since(self) -> int:
        """The step from which the final model was trained."""
        return self.swaps[-1].step if self.swaps else self.first_step

    @property
    def latest(self) -> Tensor:
        """The model that was received last."""
        return self.swaps[-1].params if self.swaps else self.params

    def swapped(self, step: int, dispatch: Dispatch) -> Job:
        """The same training with the model of that dispatch from that step on. What was trained
        before is lost, and need not be trained, unless the client keeps some of it: its own part of
        the model, the moments of its optimiser, or what its client steps keep."""
        params, vectors, lr = dispatch.params, dispatch.vectors, dispatch.task.lr
        steps_keep = any(step.keeps for step in self.task.client_steps)
        if self.memory or self.task.keep_optimizer or steps_keep:
            return replace(self, swaps=(*self.swaps, Swap(step, params, vectors, lr)))
        task = replace(self.task, lr=lr)
        return replace(self, params=params, vectors=vectors, task=task, first_step=step)


class Outcome(NamedTuple):
    """What comes of a job: the upload, what else its task asks for, by name, and what the client
    remembers from now on."""

    upload: Tensor
    extras: dict[str, Tensor]
    memory: dict[str, Tensor]


class Exam(NamedTuple):
    """A model, to be tested on the test split of each of these clients; what each of them
    remembers, if that matters (its own part of the model, what `steps` keep); and the client steps
    that have a say in how a client uses its model."""

    params: Tensor
    clients: list[int]
    memories: Sequence[Vectors] | None = None
    steps: tuple[ClientStep, ...] = ()
