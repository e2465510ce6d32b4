"""Engines for what methods are compared with: constants, and models of pooled data. Time stands
still: only the work is done."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Unpack

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from polytempo.core.errors import PolytempoError
from polytempo.core.strategy import State
from polytempo.data import Federation
from polytempo.data.text import PADDING
from polytempo.simulation.engine import Engine, World
from polytempo.strategies.reference import Majority, Pooled, PooledGroups, Reference
from polytempo.training import Learner, Score, Solver
from polytempo.training.problem import Classification, Multilabel, NextToken, Problem, Regression

RARE = 0.1  # how often a label is counted that does not occur


class ReferenceEngine(Engine):
    """A run outside the clock, in epochs, with an evaluation after each."""

    strategy: Reference

    def __init__(
        self,
        federation: Federation,
        module: nn.Module,
        strategy: Reference,
        *,
        updates: int,
        **world: Unpack[World],
    ) -> None:
        super().__init__(federation, module, strategy, **world)
        strategy.setup(self.context)
        self.concurrency, self.refill = federation.clients, strategy.refill
        self.planned, self.done = updates, 0

    @property
    def updates(self) -> int:
        return self.done

    @property
    def version(self) -> int:
        return self.done

    def _start(self) -> None:
        self._record()
        for number in range(self.planned):
            self._push(0.0, 0, 0, 0, number)

    def _step(self) -> None:
        self._pop()
        with self._timed("training"):
            self._advance()
        self.done += 1
        if self.done % self.eval_every == 0:
            self._record()

    def _advance(self) -> None:
        """One epoch, or none."""

    def state_dict(self) -> State:
        return super().state_dict() | {"done": self.done}

    def load_state_dict(self, state: State) -> None:
        super().load_state_dict(state)
        self.done = state["done"]


class Constants(ReferenceEngine):
    """Every client always predicts the same."""

    strategy: Majority

    def __init__(
        self,
        federation: Federation,
        module: nn.Module,
        strategy: Majority,
        *,
        updates: int,
        **world: Unpack[World],
    ) -> None:
        super().__init__(federation, module, strategy, updates=updates, **world)
        self.adapt_epochs = 0  # there is no model

    def _evaluate(self, clients: Sequence[int]) -> list[Score]:
        y, train, test = self.federation.y, self.federation.train, self.federation.test
        outputs = self.federation.outputs
        scores = []
        for client in clients:
            constant = best_constant(self.problem, y[train[client]], outputs)
            tested = y[test[client]]
            scores.append(Score({}))
            if len(tested):
                answers = constant.expand(
                    *tested.shape[: 1 + isinstance(self.problem, NextToken)], -1
                )
                if isinstance(self.problem, Regression):
                    answers = answers.reshape(tested.shape)
                scores[-1] = Score(self.problem.sums(answers, tested))
        return scores


def best_constant(problem: Problem, targets: Tensor, outputs: int) -> Tensor:
    """The outputs that fit all of these targets best."""
    if isinstance(problem, Regression):
        return targets.reshape(len(targets), -1).float().mean(0)
    if isinstance(problem, Multilabel):
        return torch.logit((targets.float().sum(0) + RARE) / (len(targets) + 2 * RARE))
    if not isinstance(problem, Classification | NextToken):
        raise PolytempoError(
            f"majority does not know which constant is best for the problem {problem.name}; omit it"
        )
    counted = targets[targets != PADDING] if isinstance(problem, NextToken) else targets
    counts = functional.one_hot(counted.long(), outputs).sum(0) + RARE
    return torch.log(counts / counts.sum())


def _for_all(constant: Tensor, problem: Problem, targets: Tensor) -> Tensor:
    """These outputs, for samples with these targets."""
    if isinstance(problem, Regression):
        return constant.expand(len(targets), -1).reshape(targets.shape)
    places = targets.shape if isinstance(problem, NextToken) else targets.shape[:1]
    return constant.expand(*places, -1)


class PooledData(ReferenceEngine):
    """A model for all clients, or for those of each group, trained on all of their data.

    `trainer_on`: makes a solver for other data than the run's."""

    strategy: Pooled

    def __init__(
        self,
        federation: Federation,
        module: nn.Module,
        strategy: Pooled,
        *,
        updates: int,
        trainer_on: Callable[[Federation], Solver],
        **world: Unpack[World],
    ) -> None:
        super().__init__(federation, module, strategy, updates=updates, **world)
        if self.layout.personal:
            raise PolytempoError(
                f"{strategy.name} trains whole models, so nothing can be personal; omit --personal"
            )
        group = np.zeros(federation.clients, dtype=np.int64)
        if isinstance(strategy, PooledGroups):
            if federation.groups is None:
                raise PolytempoError(
                    f"pooled-groups needs the true groups of the clients, and {federation.name} "
                    "has none; use pooled, or a partition with groups (label-groups)"
                )
            group = np.unique(federation.groups, return_inverse=True)[1]
        pooled = pool(federation, group)
        trainer = trainer_on(pooled)
        batch = self.context.task.batch_size
        self.learners = []
        for number, samples in enumerate(pooled.samples):
            steps = -(-samples // batch)  # of an epoch
            task = replace(
                self.context.task, schedule=strategy.schedule(updates * steps), keep_optimizer=True
            )
            self.learners.append((Learner(trainer, number, task), steps))
        strategy.group = group.tolist()
        self._serve()

    def _advance(self) -> None:
        for learner, steps in self.learners:
            learner.steps(steps)
        self._serve()

    def _serve(self) -> None:
        self.strategy.models = [learner.params for learner, _ in self.learners]
        self.strategy.epoch += 1

    def state_dict(self) -> State:
        saved = {str(k): learner.state_dict() for k, (learner, _) in enumerate(self.learners)}
        return super().state_dict() | {"learners": saved}

    def load_state_dict(self, state: State) -> None:
        super().load_state_dict(state)
        for number, (learner, _) in enumerate(self.learners):
            learner.load_state_dict(state["learners"][str(number)])
        self._serve()


def pool(federation: Federation, group: np.ndarray) -> Federation:
    """Each group's training samples, as those of one client. Nobody is tested."""
    order, train, at = [], [], 0
    for number in range(int(group.max()) + 1):
        mine = [federation.train[client] for client in np.flatnonzero(group == number)]
        rows = np.concatenate([np.arange(part.start, part.stop) for part in mine])
        order.append(rows)
        train.append(slice(at, at + len(rows)))
        at += len(rows)
    kept = torch.from_numpy(np.concatenate(order))
    return replace(
        federation,
        name=f"{federation.name}, pooled",
        x=federation.x[kept],
        y=federation.y[kept],
        train=tuple(train),
        test=tuple(slice(at, at) for _ in train),
        groups=None,
        names=None,
        description=f"{federation.description}, pooled",
    )
