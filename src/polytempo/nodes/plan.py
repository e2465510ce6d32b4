"""What the server of a fleet is asked to do, beside the strategy."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

MOST_DOUBLINGS = 3  # of a deadline,
MOST_AT_FIRST = 16  # and as long as nobody has finished anything: all may be that slow


@dataclass(frozen=True)
class Patience:
    """How long a client in training is waited for: `factor` times the longest of its last trainings
    (before it has finished one, of anybody's; before anybody has, `first` seconds), at least
    `least` seconds; twice as long for each deadline that it has missed in a row while it was
    connected, up to eight times. `factor` infinite: forever.

    One that is not connected is waited for at most `away` seconds if others are idle: they could
    have its slot.
    """

    factor: float = 4.0
    least: float = 30.0
    first: float = 600.0
    away: float = 60.0

    def seconds(self, own: Sequence[float], longest: float, missed: int = 0) -> float:
        """For a client whose last trainings took `own`, where the longest of all took `longest`
        (0: there is none)."""
        if math.isinf(self.factor):
            return math.inf
        past = max(own, default=longest)
        waited = max(self.least, self.factor * past if past > 0 else self.first)
        return waited * 2.0 ** min(missed, MOST_DOUBLINGS if longest > 0 else MOST_AT_FIRST)


@dataclass(frozen=True)
class FleetPlan:
    """`model`, `problem`: what a client must train and learn; `run`: what else it is told.
    `updates`: updates after which the run is over. `eval_every`: updates between two exams.
    `figures`: names of the sums that a score consists of. `closing`: seconds that the last exam may
    take. `wait_for`: nobody is sent anything to train before so many clients are connected.
    """

    model: str
    problem: str
    run: Mapping[str, Any]
    updates: int
    eval_every: int
    figures: frozenset[str]
    adapt_epochs: int = 0
    adapt_always: bool = False
    patience: Patience = Patience()
    closing: float = 60.0
    wait_for: int = 1
