"""Progress bars of runs, on standard error."""

from __future__ import annotations

from time import monotonic
from typing import Self

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from polytempo.cli.console import notes
from polytempo.core.events import Evaluate, Event
from polytempo.experiments.run import Attach
from polytempo.simulation import Engine
from polytempo.simulation.engine import Observer

_INTERVAL = 0.1  # seconds between two looks at a run: events come faster than the screen changes


class RunProgress:
    """One bar per run; they appear with the first of them."""

    def __init__(self, *, quiet: bool) -> None:
        self._bars = Progress(
            TextColumn("[bold]{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[state]}"),
            TimeRemainingColumn(),
            console=notes,
            disable=quiet,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        if self._bars.live.is_started:
            self._bars.stop()

    def watch(self, label: str) -> Attach:
        """A bar with rounds, simulated time and the latest value of the metric."""

        def attach(simulator: Engine, rounds: int) -> Observer:
            bar = self._bars.add_task(label, total=rounds, state="")
            self._bars.start()

            shown = 0.0

            def observe(event: Event | None = None) -> None:
                nonlocal shown
                due = event is None or isinstance(event, Evaluate)
                if not due and monotonic() < shown + _INTERVAL:
                    return
                shown = monotonic()
                metric, history = simulator.metric, simulator.history
                value = metric.text(history[-1][metric.name] if history else None)
                state = f"t={simulator.time:,.1f}s  {metric.name} {value}"
                self._bars.update(bar, completed=simulator.round, state=state)

            observe()
            return observe

        return attach
