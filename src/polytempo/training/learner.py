"""A learner that keeps its own model: what a peer trains between two fusions.

A client of a server forgets nearly everything between two dispatches. A peer does not: its weights,
what it remembers (the moments of its optimiser, its own part of the model) and its place in the
schedule last through the whole run, and a fusion replaces the weights only. What a learner does
next depends on these, its data and its seed alone, so that one that was saved resumes as if nothing
had happened, bit for bit.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from polytempo.core.errors import Diverged, PolytempoError
from polytempo.core.strategy import State
from polytempo.core.task import Task
from polytempo.training.jobs import PERSONAL, Exam, Job, Outcome
from polytempo.training.problem import Score
from polytempo.training.solvers.autograd import Solver


class Learner:
    """The model of one peer, and what it remembers. A local round is a job like any other, which
    may be carried out anywhere.

    `params` is the model: replaced by every round and fusion, never changed in place, so that
    a reference to it is a snapshot. `solver` may be shared by any number of learners.
    """

    def __init__(self, solver: Solver, client: int, task: Task) -> None:
        if not solver.federation.samples[client]:
            raise PolytempoError(
                f"peer {client} has no sample to train on; give it data of its own"
            )
        self.solver, self.client = solver, client
        self.task = replace(task, keep_optimizer=True)
        self.params = solver.layout.read()
        self.memory: dict[str, Tensor] = {}
        if solver.layout.personal:
            self.memory[PERSONAL] = solver.layout.initial_personal
        self.iteration = 0

    def job(self, steps: int) -> Job:
        """The next steps, this many of them."""
        return Job(
            self.client,
            self.params,
            self.task,
            ("peer", self.client),
            first_step=self.iteration,
            last_step=self.iteration + steps,
            memory=self.memory,
        )

    def take(self, outcome: Outcome, steps: int) -> None:
        """The job of this many steps is done."""
        last = self.iteration + steps
        if not bool(torch.isfinite(outcome.upload).all()):
            raise Diverged(
                f"peer {self.client}: its model has NaN or infinite values after iteration {last}; "
                "lower the learning rate"
            )
        self.params, self.memory, self.iteration = outcome.upload, outcome.memory, last

    def steps(self, count: int) -> None:
        """Train for this many steps, here and now."""
        self.take(self.solver.carry_out(self.job(count)), count)

    def fuse(self, params: Tensor) -> None:
        """Continue from other weights; memory and schedule stay."""
        if params.shape != self.params.shape:
            raise PolytempoError(
                f"peer {self.client} has a model of {len(self.params)} numbers and was given one "
                f"of {params.numel()}; all peers must use the same model"
            )
        self.params = params

    def evaluate(self, clients: list[int]) -> list[Score]:
        """The model on the test samples of these clients."""
        return self.solver.evaluate(Exam(self.params, clients, [self.memory] * len(clients)))

    def state_dict(self) -> State:
        """What the rest of the training depends on."""
        return {"params": self.params, "memory": self.memory, "iteration": self.iteration}

    def load_state_dict(self, state: State) -> None:
        """Resume from there."""
        self.fuse(state["params"])
        self.memory, self.iteration = dict(state["memory"]), state["iteration"]
