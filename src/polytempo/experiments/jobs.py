"""Many runs, one after the other in this process or several at once, each in a process of its own.

A run of small models gains more from having a core to itself than from sharing two with another, so
several at once is how a table gets done soonest.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from time import monotonic

from polytempo.core.errors import Diverged, PolytempoError
from polytempo.core.events import Evaluate, Event
from polytempo.experiments.callbacks import Callback, Row, Run
from polytempo.experiments.compare import settle
from polytempo.experiments.config import RunConfig
from polytempo.experiments.interrupt import interruptible
from polytempo.experiments.world import LastFederation

Report = Callable[[int, int, str], None]  # updates so far, of how many, and how it goes
Watch = Callable[[str], Report]  # given the label of a run that begins
_INTERVAL = 0.1  # seconds between two looks at a run: events come faster than a screen changes


@dataclass(frozen=True)
class Order:
    """A run that is wanted."""

    label: str
    config: RunConfig
    folder: Path


@dataclass(frozen=True)
class Ended:
    """How it went. `diverged`: what was said of it."""

    order: Order
    complete: bool
    diverged: str | None = None


class Reporting(Callback):
    """Reports on a run now and then: updates, simulated time and the latest value of the metric."""

    def __init__(self, report: Report) -> None:
        self._report = report

    def start(self, run: Run) -> None:
        self._metric, self._updates = run.metric, run.settings["updates"]
        self._value: float | None = None
        self._show(0, 0.0)

    def event(self, event: Event) -> None:
        if isinstance(event, Evaluate):
            self._value = event.value
        elif monotonic() < self._shown + _INTERVAL:
            return
        self._show(event.updates, event.time)

    def evaluated(self, row: Row) -> None:
        """A run that is resumed is that far already."""
        self._value = row[self._metric.name]
        self._show(row["updates"], row["time"])

    def _show(self, done: int, time: float) -> None:
        self._shown = monotonic()
        state = f"t={time:,.1f}s  {self._metric.name} {self._metric.text(self._value)}"
        self._report(done, self._updates, state)


def carry_out_all(orders: Sequence[Order], at_once: int, watch: Watch) -> Iterator[Ended]:
    """Each run as it ends; what their folders already hold is not run again. After an interrupt no
    further run begins, and those that had begun can be resumed."""
    return _in_turn(orders, watch) if at_once == 1 else _side_by_side(orders, at_once, watch)


def _in_turn(orders: Sequence[Order], watch: Watch) -> Iterator[Ended]:
    load = LastFederation()
    for order in orders:
        ended, interrupted = _settled(order, load, Reporting(watch(order.label)))
        yield ended
        if interrupted:
            return


def _settled(order: Order, load: LastFederation, progress: Callback) -> tuple[Ended, bool]:
    try:
        result = settle(order.config, order.folder, load, [progress])
    except Diverged as error:
        return Ended(order, False, str(error)), False
    complete = bool(result.summary["complete"])
    return Ended(order, complete), result.interrupted or not complete


# -- processes -------------------------------------------------------------------------------------


@dataclass
class _Running:
    order: Order
    process: BaseProcess
    report: Report
    asked: bool = False  # to end


def _side_by_side(orders: Sequence[Order], at_once: int, watch: Watch) -> Iterator[Ended]:
    """A process takes one run after the other: importing torch and reading the data takes longer
    than many a run."""
    left, running = deque(orders), dict[Connection, _Running]()
    idle: list[tuple[Connection, BaseProcess]] = []
    with interruptible() as interrupted:
        try:
            while running or (left and not interrupted.is_set()):
                while left and len(running) < at_once and not interrupted.is_set():
                    connection, process = idle.pop() if idle else _started()
                    order = left.popleft()
                    running[connection] = _Running(order, process, watch(order.label))
                    with suppress(BrokenPipeError):  # it was killed: that is heard of below
                        connection.send(order)
                for ready in wait(list(running), timeout=0.2):
                    assert isinstance(ready, Connection)
                    ended = _heard(ready, running[ready])
                    if ended is not None:
                        idle.append((ready, running.pop(ready).process))
                        if not left:
                            _dismiss(ready)
                        yield ended
                if interrupted.is_set():
                    _stop(running.values())
        finally:
            _stop(running.values())
            for connection in [*running, *(connection for connection, _ in idle)]:
                _dismiss(connection)
            for process in [*(each.process for each in running.values()), *dict(idle).values()]:
                process.join()


def _started() -> tuple[Connection, BaseProcess]:
    """A process that waits for orders. It is spawned, not forked: this one may have threads, such
    as that of a progress bar."""
    spawn = multiprocessing.get_context("spawn")
    ours, theirs = spawn.Pipe()
    process = spawn.Process(target=_child, args=(theirs,))
    process.start()
    theirs.close()
    return ours, process


def _heard(from_: Connection, running: _Running) -> Ended | None:
    """What a process has sent: a report, or the end."""
    try:
        kind, *said = from_.recv()
    except (EOFError, ConnectionResetError):
        running.process.join()
        code, where = running.process.exitcode, running.order.folder
        if running.asked and code == -signal.SIGTERM:  # it had not begun to listen
            return Ended(running.order, complete=False)
        raise PolytempoError(
            f"{running.order.label}: its process ended with code {code}; run the same command "
            f"again to continue from the last checkpoint in {where}"
        ) from None
    if kind == "report":
        running.report(*said)
        return None
    if kind == "failed":
        raise PolytempoError(f"{running.order.label}: {said[0]}")
    complete, diverged = said
    return Ended(running.order, complete, diverged)


def _stop(running: Iterable[_Running]) -> None:
    """Ask processes to end after a checkpoint, once: a second signal would break them off."""
    for each in running:
        if not each.asked:
            each.process.terminate()
            each.asked = True


def _dismiss(connection: Connection) -> None:
    """There is nothing more to do for that process, once its run has ended."""
    with suppress(OSError):  # it has ended already
        connection.send(None)


def _child(parent: Connection) -> None:
    """In a process of its own, and out of reach of Ctrl-C, which the parent passes on."""
    os.setpgrp()
    load = LastFederation()

    def send(*said: object) -> None:
        try:
            parent.send(said)
        except ConnectionError:  # the parent was killed: the last checkpoint is what remains
            sys.exit(1)

    try:
        while (order := parent.recv()) is not None:
            progress = Reporting(lambda *said: send("report", *said))
            ended, _ = _settled(order, load, progress)
            send("ended", ended.complete, ended.diverged)
    except (EOFError, ConnectionResetError):  # the parent was killed
        sys.exit(1)
    except PolytempoError as error:
        send("failed", str(error))
