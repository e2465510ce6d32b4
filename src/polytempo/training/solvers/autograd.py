"""The solver for any module: local training by autograd.

One resident model per process, bound to flat parameter and gradient vectors; the client's samples
are rows of one tensor and a batch is one index operation. There is no DataLoader and no copy of the
model per client.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Protocol

import torch
from torch import Tensor, nn

from polytempo.core.client_steps import ClientStep, Rows, with_offset
from polytempo.core.layout import ALL_SHARED, Layout, Parts
from polytempo.core.rng import stream_seed
from polytempo.data import Federation
from polytempo.models.randomness import own_torch_randomness
from polytempo.training.features import last_features
from polytempo.training.jobs import PERSONAL, Exam, Job, Outcome
from polytempo.training.problem import Problem, Score, problem_for
from polytempo.training.session import Session
from polytempo.training.solvers.vocabulary import Vocabulary

EVALUATION_BATCH = 512  # samples at once through a model that is not being trained
Answer = Callable[[Tensor, slice], Tensor]


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

    def offset(self, client: int, steps: Sequence[ClientStep]) -> Tensor | None:
        """What these steps add to the outputs of the client's model."""
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
        self.at_once: int = getattr(module, "evaluation_batch", EVALUATION_BATCH)
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
        scores: list[Score] = []
        memories = exam.memories or [{}] * len(exam.clients)
        for client, memory in zip(exam.clients, memories, strict=True):
            if not scores or exam.memories is not None:  # else it is loaded already
                model = exam.params
                for step in exam.steps:
                    model = step.use(model, memory)
                self.load(model, memory.get(PERSONAL))
            offset = self.offset(client, with_offset(exam.steps))
            answer = self._answer(client, exam.steps)
            scores.append(self.score(self.federation.test[client], offset, answer))
        return scores

    def _answer(self, client: int, steps: Sequence[ClientStep]) -> Answer | None:
        """What the client makes of the outputs of the model that is loaded, and of the samples for
        which they are; None if it takes them as they are."""
        asked = [step for step in steps if type(step).answer is not ClientStep.answer]
        if not asked:
            return None
        shard = self.federation.train[client]
        known = self.features(shard), self.y[shard]

        def answer(outputs: Tensor, part: slice) -> Tensor:
            features = self.features(part)
            for step in asked:
                outputs = step.answer(outputs, features, known)
            return outputs

        return answer

    def features(self, shard: slice) -> Tensor:
        """What enters the last linear layer of the model that is loaded, for these samples."""
        module = self.layout.module.eval()
        begins = range(shard.start, shard.stop, self.at_once)
        parts = [self.x[k : min(k + self.at_once, shard.stop)] for k in begins]
        return torch.cat([last_features(module, self.inputs(part)) for part in parts])

    def offset(self, client: int, steps: Sequence[ClientStep]) -> Tensor | None:
        """What these steps add to the outputs of the client's model."""
        targets, found = self.y[self.federation.train[client]], None
        for step in steps:
            more = step.offset(targets, self.federation.outputs)
            if more is not None:
                found = more if found is None else found + more
        return None if found is None else found.to(self.device)

    def load(self, shared: Tensor, personal: Tensor | None = None) -> None:
        """Make this the model that `score` judges."""
        self.layout.load(shared, personal)

    def score(
        self,
        shard: slice,
        offset: Tensor | None = None,
        answer: Answer | None = None,
        rows: Rows | None = None,
    ) -> Score:
        """The model that is loaded, with this added to its outputs and this made of them, on these
        samples, or on a few of them (under inference_mode)."""
        found = Score({})
        if rows is not None:
            for begin in range(0, max(1, len(rows)), self.at_once):
                some = rows[begin : begin + self.at_once]
                outputs = self.outputs(shard, some)
                outputs = outputs if offset is None else outputs + offset
                targets = self.y[shard][torch.from_numpy(some)]
                found += Score(self.problem.sums(outputs, targets))
            return found
        for begin in range(shard.start, shard.stop, self.at_once):
            part = slice(begin, min(begin + self.at_once, shard.stop))
            outputs = self.outputs(part)
            outputs = outputs if offset is None else outputs + offset
            outputs = outputs if answer is None else answer(outputs, part)
            found += Score(self.problem.sums(outputs, self.y[part]))
        return found

    def outputs(self, shard: slice, rows: Rows | None = None) -> Tensor:
        """What the model that is loaded makes of these samples, or of some of them."""
        self.layout.module.eval()
        x = self.x[shard] if rows is None else self.x[shard][torch.from_numpy(rows)]
        outputs: Tensor = self.layout.module(self.inputs(x))
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
        return own_torch_randomness(self.device)

    def set_randomness(self, *name: str | int) -> None:
        """What layers draw next comes from the stream of that name."""
        seed = stream_seed(self.seed, *name) % 2**63
        if self.device.type == "cpu":
            torch.default_generator.manual_seed(seed)
        else:
            torch.manual_seed(seed)
