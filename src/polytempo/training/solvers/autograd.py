"""The solver for any module: local training by autograd.

One resident model per process, bound to flat parameter and gradient vectors; the client's samples
are rows of one tensor and a batch is one index operation. There is no DataLoader and no copy of the
model per client.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Protocol

import torch
from torch import Tensor, nn

from polytempo.core.layout import ALL_SHARED, Layout, Parts
from polytempo.core.rng import stream_seed
from polytempo.data import Federation
from polytempo.training.jobs import Exam, Job, Outcome
from polytempo.training.problem import Problem, Score, problem_for
from polytempo.training.session import EVALUATION_BATCH, Session
from polytempo.training.solvers.vocabulary import Vocabulary


class Solver(Protocol):
    """Carries jobs out in this process. What comes of a job depends on that job alone, not on what
    was done before."""

    layout: Layout
    federation: Federation
    problem: Problem

    def carry_out(self, job: Job) -> Outcome:
        """What comes of this job."""
        ...

    def evaluate(self, exam: Exam) -> list[Score]:
        """The model on the test split of each of the clients that the exam names."""
        ...


class AutogradSolver:
    """Trains and evaluates any module, by autograd."""

    def __init__(
        self,
        module: nn.Module,
        federation: Federation,
        seed: int,
        parts: Parts = ALL_SHARED,
        device: str = "cpu",
        problem: Problem | None = None,
    ) -> None:
        self.problem = problem_for(federation, problem)
        self.layout = Layout(module, parts, device)
        self.federation, self.seed, self.parts = federation, seed, parts
        self.device = self.layout.vector.device
        self.x, self.y = federation.x.to(self.device), federation.y.to(self.device)
        self.vocabulary = Vocabulary.of(self.layout) if federation.vocabulary else None

    def begin(self, job: Job) -> Session:
        """The training that the job describes, before its first step."""
        return Session(self, job)

    def carry_out(self, job: Job) -> Outcome:
        session = self.begin(job)
        session.advance()
        return session.finish()

    @torch.inference_mode()
    def evaluate(self, exam: Exam) -> list[Score]:
        if exam.personal is None:
            self.load(exam.params)
            return [self.score(self.federation.test[client]) for client in exam.clients]
        scores = []
        for client, personal in zip(exam.clients, exam.personal, strict=True):
            self.load(exam.params, personal)
            scores.append(self.score(self.federation.test[client]))
        return scores

    def load(self, shared: Tensor, personal: Tensor | None = None) -> None:
        """Make this the model that `score` judges."""
        self.layout.load(shared, personal)

    def score(self, shard: slice) -> Score:
        """The model that is loaded, on these samples (under inference_mode)."""
        found = Score({})
        for begin in range(shard.start, shard.stop, EVALUATION_BATCH):
            part = slice(begin, min(begin + EVALUATION_BATCH, shard.stop))
            found += Score(self.problem.sums(self.outputs(part), self.y[part]))
        return found

    def outputs(self, shard: slice) -> Tensor:
        """What the model that is loaded makes of these samples."""
        self.layout.module.eval()
        outputs: Tensor = self.layout.module(self.inputs(self.x[shard]))
        return outputs

    def samples(self, shard: slice) -> tuple[Tensor, Tensor]:
        """Samples and targets, as they are stored."""
        return self.x[shard], self.y[shard]

    def inputs(self, x: Tensor) -> Tensor:
        """Samples as the model takes them."""
        inputs = self.federation.prepare(x)
        return inputs.to(self.layout.vector.dtype) if inputs.is_floating_point() else inputs

    def own_randomness(self) -> AbstractContextManager[None]:
        """A context that leaves torch's global random state as it was."""
        if self.device.type == "cpu":
            return torch.random.fork_rng(devices=[])
        return torch.random.fork_rng(devices=[self.device], device_type=self.device.type)

    def set_randomness(self, *name: str | int) -> None:
        """What layers draw next comes from the stream of that name."""
        seed = stream_seed(self.seed, *name) % 2**63
        if self.device.type == "cpu":
            torch.default_generator.manual_seed(seed)
        else:
            torch.manual_seed(seed)
