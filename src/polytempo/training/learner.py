"""A learner that keeps its own model: what a peer trains between two fusions.

A client of a server forgets everything between two dispatches. A peer does not: its weights, its
momentum and its place in the schedule of batches go on through the whole run, and a fusion replaces
the weights only. What a learner does next depends on these three, its data and its seed alone, so
that one that was saved goes on as if nothing had happened, bit for bit.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor

from polytempo.core.errors import Diverged, PolytempoError
from polytempo.core.registry import Options
from polytempo.core.strategy import State
from polytempo.core.task import Task
from polytempo.training.jobs import PERSONAL, Exam, Job, Score
from polytempo.training.solvers.autograd import Solver


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
    """One peer's model and what it remembers: sessions of `task`, one after the other, with the
    moments of the optimiser kept over rounds and fusions.

    `params` is the model: replaced by every round and fusion, never changed in place, so that
    whoever holds it holds a snapshot. `solver` may be shared by any number of learners.
    """

    def __init__(self, solver: Solver, *, peer: int, task: Task, schedule: Schedule) -> None:
        if not solver.federation.samples[peer]:
            raise PolytempoError(f"peer {peer} has no sample to train on; give it data of its own")
        self.solver, self.peer, self.schedule = solver, peer, schedule
        self.task = replace(task, keep_optimizer=True)
        self.params = solver.space.read()
        self.memory: dict[str, Tensor] = {}
        if solver.space.personal:
            self.memory[PERSONAL] = solver.space.initial_personal
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
        last = max(self.iteration, min(self.iteration + count, self.schedule.target))
        step, params, memory = self.iteration, self.params, self.memory
        while step < last:  # a session for each learning rate
            factor = self.schedule.factor(step)
            end = next((k for k in range(step, last) if self.schedule.factor(k) != factor), last)
            task, stream = replace(self.task, lr=self.task.lr * factor), ("peer", self.peer)
            job = Job(self.peer, params, task, stream, step, end, memory=memory)
            [(params, _, memory)] = self.solver.carry_out([job])
            step = end
        if not bool(torch.isfinite(params).all()):
            raise Diverged(
                f"peer {self.peer}: its model is NaN or infinite after iteration {last}; "
                "lower the learning rate"
            )
        count = last - self.iteration
        self.params, self.memory, self.iteration = params, memory, last
        return count

    def fuse(self, params: Tensor) -> None:
        """Go on from other weights; memory and schedule stay."""
        if params.shape != self.params.shape:
            raise PolytempoError(
                f"peer {self.peer} has a model of {len(self.params)} numbers and was given one of "
                f"{params.numel()}; all peers must use the same model"
            )
        self.params = params

    def evaluate(self, clients: list[int]) -> list[Score]:
        """The model on the test samples of these clients."""
        own = self.memory.get(PERSONAL)
        personal = None if own is None else [own] * len(clients)
        return self.solver.evaluate(Exam(self.params, clients, personal))

    def state_dict(self) -> State:
        """What the rest of the training depends on."""
        return {"params": self.params, "memory": self.memory, "iteration": self.iteration}

    def load_state_dict(self, state: State) -> None:
        """Go on from there."""
        self.fuse(state["params"])
        self.memory, self.iteration = dict(state["memory"]), state["iteration"]
