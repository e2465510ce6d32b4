"""Progress bars of runs, on standard error."""

from __future__ import annotations

from typing import Self

from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
)

from polytempo.cli.console import notes
from polytempo.experiments.jobs import Report, reporting
from polytempo.experiments.run import Attach


class RunProgress:
    """One bar per run; they appear with the first of them. `updates`: of all runs together, which
    then have a bar of their own, with the time left."""

    def __init__(self, *, quiet: bool, updates: int | None = None) -> None:
        self._bars = Progress(
            TextColumn("[bold]{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[state]}"),
            TimeRemainingColumn(),
            console=notes,
            disable=quiet,
        )
        self._whole: TaskID | None = None
        if updates:
            self._whole = self._bars.add_task("all runs", total=updates, state="")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        if self._bars.live.is_started:
            self._bars.stop()

    def watch(self, label: str) -> Attach:
        """A bar for a run in this process."""
        return reporting(self.bar(label))

    def bar(self, label: str) -> Report:
        """A bar with updates, simulated time and the latest value of the metric."""
        bar: TaskID | None = None
        before = 0

        def report(done: int, rounds: int, state: str) -> None:
            nonlocal bar, before
            if bar is None:
                bar = self._bars.add_task(label, total=rounds, state="")
                self._bars.start()
            self._bars.update(bar, completed=done, state=state)
            if self._whole is not None:
                self._bars.advance(self._whole, done - before)
            before = done

        return report
