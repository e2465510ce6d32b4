"""The evaluations of a fleet: done by the clients, on their own data; what comes back is sums.

An exam is a row of the history, to which scores are added as they come in.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import overload

from polytempo.core.strategy import State
from polytempo.nodes.plan import FleetPlan
from polytempo.nodes.star import Scores, Sums


@dataclass
class Exam:
    """One evaluation of the fleet: when it was set, whom it was set, and what has come back."""

    number: int
    time: float
    updates: int
    version: int
    sent: Mapping[str, int]  # messages so far, by kind
    asked: int
    adapt: bool
    handed: dict[int, Sums] = field(default_factory=dict)  # by client
    adapted: dict[int, Sums] = field(default_factory=dict)


class Exams(Sequence[Exam]):
    """All exams so far. `tested`: test samples, by client; who has none is not asked."""

    def __init__(self, plan: FleetPlan) -> None:
        self._plan, self._all = plan, list[Exam]()
        self.tested: list[int] = []

    def __len__(self) -> int:
        return len(self._all)

    @overload
    def __getitem__(self, place: int) -> Exam: ...
    @overload
    def __getitem__(self, place: slice) -> list[Exam]: ...
    def __getitem__(self, place: int | slice) -> Exam | list[Exam]:
        return self._all[place]

    def __iter__(self) -> Iterator[Exam]:
        return iter([*self._all])  # whoever reads may be another thread

    def due(self, updates: int, over: bool) -> bool:
        """Whether it is time for one: every so many updates, and in the end."""
        every, last = self._plan.eval_every, self._all[-1].updates if self._all else 0
        return updates // every > last // every or (over and last < updates)

    def begin(
        self,
        time: float,
        updates: int,
        version: int,
        sent: Mapping[str, int],
        asked: int,
        over: bool,
    ) -> Exam:
        """Set one to so many clients."""
        adapt = bool(self._plan.adapt_epochs) and (over or self._plan.adapt_always)
        exam = Exam(len(self._all), time, updates, version, dict(sent), asked, adapt)
        self._all.append(exam)
        return exam

    def fits(self, client: int, scores: Scores) -> bool:
        """Whether these are the client's first scores of an exam, and say what scores should."""
        if not 0 <= scores.exam < len(self._all) or client in self._all[scores.exam].handed:
            return False
        found = [scores.handed, *([] if scores.adapted is None else [scores.adapted])]
        return all(
            sums.keys() == self._plan.figures and all(map(math.isfinite, sums.values()))
            for sums in found
        )

    def add(self, client: int, scores: Scores) -> None:
        """What the client found, once."""
        exam = self._all[scores.exam]
        if client in exam.handed:
            return
        exam.handed[client] = scores.handed
        if scores.adapted is not None:
            exam.adapted[client] = scores.adapted

    def awaited(self, client: int) -> bool:
        """Whether this client could still answer the last exam."""
        return self.tested[client] > 0 and client not in self._all[-1].handed

    def complete(self, now: float, up: float, members: Iterable[int]) -> bool:
        """Whether the last exam is in, or was waited for long enough since the server is up."""
        if not self._all:
            return True
        exam = self._all[-1]
        if now > max(exam.time, up) + self._plan.closing:
            return True
        return len(exam.handed) >= exam.asked and not any(map(self.awaited, members))

    # -- checkpoints ------------------------------------------------------------------------------

    def state(self) -> list[State]:
        return [_spelled(exam) for exam in self._all]

    def load(self, found: Sequence[State], tested: Sequence[int]) -> None:
        self._all = [_read(exam) for exam in found]
        self.tested = list(tested)


def _spelled(exam: Exam) -> State:
    found = {name: getattr(exam, name) for name in Exam.__dataclass_fields__}
    for name in ("handed", "adapted"):
        found[name] = [[client, dict(sums)] for client, sums in found[name].items()]
    return found


def _read(found: State) -> Exam:
    return Exam(**{**found, "handed": dict(found["handed"]), "adapted": dict(found["adapted"])})
