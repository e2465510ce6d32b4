"""Progress bars of runs: on standard error in a terminal, in place below the cell in a notebook.

Rich would need ipywidgets in a notebook. A display that is replaced as it grows works wherever
notebooks do, and is kept with the notebook as text.
"""

from __future__ import annotations

import io
import time
from typing import Any, Self

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

NOTEBOOK_SECONDS = 0.5  # at least so long between two displays in a notebook


class InNotebook:
    """What is shown below a cell: bars as text, replaced by later ones."""

    def __init__(self) -> None:
        self._handle: Any = None
        self._next = 0.0

    def show(self, bars: Progress, *, last: bool = False) -> None:
        if not bars.tasks or (not last and time.monotonic() < self._next):
            return
        from IPython.display import display

        drawn = io.StringIO()
        Console(file=drawn, width=100, color_system=None, force_jupyter=False).print(
            bars.get_renderable()
        )
        content = {"text/plain": drawn.getvalue().rstrip()}
        if self._handle is None:
            self._handle = display(content, raw=True, display_id=True)
        else:
            self._handle.update(content, raw=True)
        self._next = time.monotonic() + NOTEBOOK_SECONDS


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
            disable=quiet or console.is_jupyter,
        )
        self._notebook = InNotebook() if console.is_jupyter and not quiet else None
        self._whole: TaskID | None = None
        if updates:
            self._whole = self._bars.add_task("all runs", total=updates, state="")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        if self._bars.live.is_started:
            self._bars.stop()
        if self._notebook:
            self._notebook.show(self._bars, last=True)

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
            if self._notebook:
                self._notebook.show(self._bars)

        return report
