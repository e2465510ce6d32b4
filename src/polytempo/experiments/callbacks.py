"""What watches a run and may end it: callbacks, and all of them as one.

A callback is told of everything between the beginning and the end of a run. It may read what it is
given and must not change it, so a run with callbacks is, bit for bit, the run without.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

from pydantic import Field

from polytempo.core.errors import PolytempoError, nearest
from polytempo.core.events import Event
from polytempo.core.metric import Direction, MetricInfo
from polytempo.core.registry import Options, Registry

if TYPE_CHECKING:
    from polytempo.experiments.result import RunResult

Row = Mapping[str, Any]
Told = TypeVar("Told")
Answer = TypeVar("Answer")


@dataclass(frozen=True)
class Run:
    """What is known of a run when it begins or is resumed."""

    settings: Mapping[str, Any]  # as in config.toml
    metric: MetricInfo
    folder: Path | None


class Callback:
    """Base of all callbacks: override what you need."""

    def start(self, run: Run) -> None:
        """A run begins, or is resumed."""

    def event(self, event: Event) -> None:
        """Something has happened in the run; see docs/events.md."""

    def evaluated(self, row: Row) -> str | None:
        """Every row of the history, in order, as in history.csv; those that a resumed run already
        has come first. A text as the answer ends the run, and says why. What the answer depends on
        should be in the rows: then a resumed run ends where it would have ended anyway."""
        return None

    def end(self, result: RunResult) -> None:
        """The run is over (`result.complete`) or interrupted."""

    def failed(self, error: BaseException) -> None:
        """The run was broken off by an error: let go of files."""


class Callbacks:
    """All callbacks of a run as one. What one of them raises becomes an error that names it."""

    def __init__(self, callbacks: Sequence[Callback]) -> None:
        self._all = callbacks

    @contextmanager
    def during(self, run: Run) -> Iterator[None]:
        """Everybody is told of the beginning, and if it comes to that, of an error."""
        begun: list[Callback] = []
        try:
            for each in self._all:
                begun.append(each)
                _ask(each, each.start, run)
            yield
        except BaseException as error:
            for each in begun:
                try:
                    _ask(each, each.failed, error)
                except PolytempoError as another:
                    error.add_note(str(another))  # the first one is what matters
            raise

    def event(self, event: Event) -> None:
        for each in self._all:
            _ask(each, each.event, event)

    def evaluated(self, row: Row) -> str | None:
        """The first reason to end the run, if anybody has one."""
        answers = [_ask(each, each.evaluated, row) for each in self._all]
        return next((answer for answer in answers if answer), None)

    def end(self, result: RunResult) -> None:
        for each in self._all:
            _ask(each, each.end, result)


def _ask(callback: Callback, method: Callable[[Told], Answer], about: Told) -> Answer:
    try:
        return method(about)
    except PolytempoError:
        raise  # it says what is wrong
    except Exception as error:
        raise PolytempoError(
            f"callback {type(callback).__qualname__}, {method.__name__}: {type(error).__name__}: "
            f"{error}"
        ) from error


# -- early stopping --------------------------------------------------------------------------------

STOPS: Registry[Callback] = Registry("stop", Callback)


@STOPS.register("early")
class EarlyStopping(Callback, Options):
    """Ends a run that no longer gets better.

    `patience`: evaluations in a row without a better value. `min_delta`: a value must be better by
    more than this. `figure`: the column of the history that is watched (default: the metric).
    `better`: higher or lower (default: as for the metric, and lower for a loss). Evaluations
    without a value do not count.
    """

    patience: Annotated[int, Field(ge=1)] = 10
    min_delta: Annotated[float, Field(ge=0)] = 0.0
    figure: str | None = None
    better: Direction | None = None

    def start(self, run: Run) -> None:
        self._figure, self._best = self.figure or run.metric.name, -math.inf
        self._at = self._waited = 0
        self._sign = 1 if self._direction(run.metric) == "higher" else -1

    def _direction(self, metric: MetricInfo) -> Direction:
        if self.better is not None:
            return self.better
        if self._figure == "loss":
            return "lower"
        if self._figure.startswith(metric.name):
            return metric.better
        raise PolytempoError(f"is {self._figure} better if higher or if lower? write better=...")

    def evaluated(self, row: Row) -> str | None:
        if self._figure not in row:
            near = nearest(self._figure, row)
            raise PolytempoError(f"the history has no column {self._figure!r}{near}")
        if row[self._figure] is None:
            return None
        value = self._sign * row[self._figure]
        if value - self._best > self.min_delta:
            self._best, self._at, self._waited = value, row["updates"], 0
            return None
        self._waited += 1
        if self._waited < self.patience:
            return None
        return (
            f"no better {self._figure} in {self.patience} evaluations than "
            f"{self._sign * self._best:.6g} at update {self._at}"
        )
