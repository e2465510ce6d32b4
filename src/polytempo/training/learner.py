"""A learner that keeps its own model: what a peer trains between two fusions.

A client of a server forgets everything between two dispatches. A peer does not: its weights, its
momentum and its place in the schedule of batches go on through the whole run, and a fusion replaces
the weights only. What a learner does next depends on these three, its data and its seed alone, so
that one that was saved goes on as if nothing had happened, bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor
from torch.nn import functional

from polytempo.core.errors import Diverged, PolytempoError
from polytempo.core.parameters import ParameterSpace
from polytempo.core.registry import Options
from polytempo.core.rng import stream_seed
from polytempo.core.strategy import State
from polytempo.core.task import Task
from polytempo.training.solvers.autograd import Job, Score, batches, score, train_mode


class Schedule(Options):
    """How long a learner trains, and when its learning rate falls.

    `target` iterations in all; at each of the `milestones`, shares of the target, the learning rate
    is multiplied by `gamma`.
    """

    target: Annotated[int, Field(ge=1)]
    milestones: tuple[Annotated[float, Field(gt=0, lt=1)], ...] = (0.5, 0.75)
    gamma: Annotated[float, Field(gt=0)] = 0.1

    def factor(self, iteration: int) -> float:
        """What the learning rate is multiplied by in that iteration, counted from 0."""
        passed = sum(iteration >= round(part * self.target) for part in self.milestones)
        return float(self.gamma**passed)


class Learner:
    """One peer's model and optimiser: SGD by `task` (its `batch_size`, `lr`, `momentum` and
    `weight_decay`), with the momentum kept over rounds and fusions.

    `params` is the model: replaced by every round and fusion, never changed in place, so that
    whoever holds it holds a snapshot. `space` may be shared by any number of learners, `prepare`
    turns rows of `x` into what the module takes (`Federation.prepare`).
    """

    def __init__(
        self,
        space: ParameterSpace,
        x: Tensor,
        y: Tensor,
        *,
        peer: int,
        task: Task,
        schedule: Schedule,
        seed: int,
        prepare: Callable[[Tensor], Tensor] = lambda x: x,
    ) -> None:
        if not len(y):
            raise PolytempoError(f"peer {peer} has no sample to train on; give it data of its own")
        self.space, self.x, self.y, self.prepare = space, x, y, prepare
        self.peer, self.task, self.schedule, self.seed = peer, task, schedule, seed
        self.params = space.read()
        self.momentum = torch.zeros(space.parameters, dtype=space.vector.dtype)
        self.iteration = 0

    @property
    def progress(self) -> float:
        """The share of the target that is done."""
        return self.iteration / self.schedule.target

    @property
    def finished(self) -> bool:
        return self.iteration >= self.schedule.target

    def steps(self, count: int) -> int:
        """Train for so many iterations, or for those that are left; returns how many."""
        count = max(0, min(count, self.schedule.target - self.iteration))
        space, task, stream = self.space, self.task, ("peer", self.peer)
        last = self.iteration + count
        job = Job(self.peer, self.params, task, stream, first_step=self.iteration, last_step=last)
        space.load(self.params)
        train_mode(space.module, task, len(self.y))
        theta, grad, momentum = space.vector[: space.parameters], space.grad, self.momentum.clone()
        with torch.random.fork_rng(devices=[]):
            for step, rows in batches(job, len(self.y), self.seed):
                # Dropout layers draw from torch's global stream: name that one too.
                noise = stream_seed(self.seed, *stream, "step", step)
                torch.default_generator.manual_seed(noise % 2**63)
                grad.zero_()
                logits = space.module(self._inputs(self.x[rows]))
                torch.autograd.backward(functional.cross_entropy(logits, self.y[rows]))
                with torch.no_grad():
                    grad.add_(theta, alpha=task.weight_decay)
                    momentum.mul_(task.momentum).add_(grad)
                    theta.sub_(momentum, alpha=task.lr * self.schedule.factor(step))
        if not bool(torch.isfinite(theta).all()):
            raise Diverged(
                f"peer {self.peer}: its model is NaN or infinite after iteration {last}; "
                "lower the learning rate"
            )
        self.params, self.momentum, self.iteration = space.read(), momentum, last
        return count

    def fuse(self, params: Tensor) -> None:
        """Go on from other weights; momentum and schedule stay."""
        if params.shape != self.params.shape:
            raise PolytempoError(
                f"peer {self.peer} has a model of {len(self.params)} numbers and was given one of "
                f"{params.numel()}; all peers must use the same model"
            )
        self.params = params

    def evaluate(self, x: Tensor, y: Tensor) -> Score:
        """The model on these samples."""
        self.space.load(self.params)
        return score(self.space.module, x, y, self._inputs)

    def state_dict(self) -> State:
        """What the rest of the training depends on."""
        return {"params": self.params, "momentum": self.momentum, "iteration": self.iteration}

    def load_state_dict(self, state: State) -> None:
        """Go on from there."""
        self.fuse(state["params"])
        self.momentum, self.iteration = state["momentum"], state["iteration"]

    def _inputs(self, x: Tensor) -> Tensor:
        inputs = self.prepare(x)
        return inputs.to(self.space.vector.dtype) if inputs.is_floating_point() else inputs
