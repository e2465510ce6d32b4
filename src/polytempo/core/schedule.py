"""How a learning rate changes over a run, as a factor of the rate that was set.

A schedule is a pure function of a count. For a server's clients that is the number of updates
folded when a model is sent, so that one setting means the same for synchronous and asynchronous
strategies: with ten clients per cohort, `every=10` is every cohort.
"""

from __future__ import annotations

import math
from typing import Annotated

from pydantic import Field

from polytempo.core.registry import Options, Registry

LEAST = 1e-6  # no factor is below: a rate of zero trains nothing, and strategies divide by it
Positive = Annotated[int, Field(ge=1)]


class Schedule(Options):
    """Base of the schedules."""

    def factor(self, t: int) -> float:
        """What the learning rate is multiplied by when the count is `t`, from 0 on."""
        raise NotImplementedError


SCHEDULES: Registry[Schedule] = Registry("learning-rate schedule", Schedule)


@SCHEDULES.register("constant")
class Constant(Schedule):
    """The rate stays as it is."""

    def factor(self, t: int) -> float:
        return 1.0


@SCHEDULES.register("exponential")
class Exponential(Schedule):
    """Multiplied by `gamma` each time that `every` more have been counted."""

    gamma: Annotated[float, Field(gt=0, le=1)] = 0.99
    every: Positive = 10

    def factor(self, t: int) -> float:
        return max(float(self.gamma ** (t // self.every)), LEAST)


@SCHEDULES.register("steps")
class Steps(Schedule):
    """Multiplied by `gamma` at each of the counts `at`."""

    at: tuple[Positive, ...]
    gamma: Annotated[float, Field(gt=0, le=1)] = 0.1

    def factor(self, t: int) -> float:
        return max(float(self.gamma ** sum(t >= milestone for milestone in self.at)), LEAST)


@SCHEDULES.register("cosine")
class Cosine(Schedule):
    """Down to the share `floor` over `updates`, by half a cosine: slowly, fast, slowly; then it
    stays there."""

    updates: Positive
    floor: Annotated[float, Field(ge=LEAST, le=1)] = 0.01

    def factor(self, t: int) -> float:
        passed = min(t / self.updates, 1.0)
        return self.floor + (1 - self.floor) * (1 + math.cos(math.pi * passed)) / 2
