"""Progress bars of runs: on standard error in a terminal, as a widget in a notebook."""

from __future__ import annotations

from typing import Self

from rich.console import Console
from rich.errors import LiveError
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
)

from polytempo.experiments.jobs import Report, Reporting


class RunProgress:
    """One bar per run; they appear with the first of them. `updates`: of all runs together, which
    then have a bar of their own, with the time left. `quiet`: whether there are none (None: unless
    this is a terminal or a notebook)."""

    def __init__(self, *, quiet: bool | None, updates: int | None = None) -> None:
        console = Console(stderr=True)
        if quiet is None:
            quiet = not (console.is_terminal or console.is_jupyter)
        self._bars = Progress(
            TextColumn("[bold]{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[state]}"),
            TimeRemainingColumn(),
            console=console,
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

    def watch(self, label: str) -> Reporting:
        """A bar for a run in this process."""
        return Reporting(self.bar(label))

    def bar(self, label: str) -> Report:
        """A bar with updates, simulated time and the latest value of the metric."""
        bar: TaskID | None = None
        before = 0

        def report(done: int, updates: int, state: str) -> None:
            nonlocal bar, before
            if bar is None:
                bar = self._bars.add_task(label, total=updates, state="")
                try:
                    self._bars.start()
                except LiveError:  # the caller shows something already
                    self._bars.disable = True
            self._bars.update(bar, completed=done, state=state)
            if self._whole is not None:
                self._bars.advance(self._whole, done - before)
            before = done

        return report
