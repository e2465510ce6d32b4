"""Driving a simulator to its end, with callbacks told and its folder kept up to date, so that the
run can be watched meanwhile and resumed from its last checkpoint."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

from polytempo.experiments.about import write_about
from polytempo.experiments.callbacks import Callback, Callbacks, Run
from polytempo.experiments.checkpoint import CHECKPOINT, PREVIOUS
from polytempo.experiments.config import RunConfig, write_config
from polytempo.experiments.interrupt import interruptible
from polytempo.experiments.result import RunResult
from polytempo.experiments.result_folder import write_result, write_so_far
from polytempo.experiments.summary import summarise
from polytempo.files import Appended
from polytempo.simulation import Engine
from polytempo.storage import save_state
from polytempo.training.footprint import peak_memory

CHECKPOINT_SECONDS = 30.0  # at least so long between two checkpoints,
CHECKPOINT_SHARE = 0.05  # which may take this share of the time (they cost a write of n x d),
CHECKPOINT_LONGEST = 900.0  # unless somebody would lose more than that
SHOW_SECONDS = 1.0  # at least so long between two writes of what can be looked at meanwhile,
SHOW_SHARE = 0.05  # which may take this share of the time


class Flush(Protocol):
    def __call__(self, durable: bool = True) -> None: ...


def drive(
    simulator: Engine,
    config: RunConfig,
    folder: Path,
    callbacks: Sequence[Callback],
) -> RunResult:
    """Run to the end, or to an interrupt, keeping the folder's files up to date. If the training
    diverges, or the disk is full, it can be resumed from the last checkpoint; the history and
    the tables may be a little ahead of that until then."""
    with watched(simulator, config, folder, callbacks) as end:
        result = _drive(simulator, config, folder)
        end(result)
    return result


def _drive(simulator: Engine, config: RunConfig, folder: Path) -> RunResult:
    write_config(folder / "config.toml", config)
    write_about(folder, simulator.metric, simulator.federation.description)
    peak_memory(reset=True)
    with _event_log(simulator, config, folder) as flush, interruptible() as interrupted:
        over, began = False, time.monotonic()
        next_checkpoint, next_show = began + CHECKPOINT_SECONDS, began + SHOW_SECONDS

        def checkpoint() -> None:
            nonlocal next_checkpoint
            began = time.monotonic()
            flush(durable=True)  # no checkpoint may count events that the log does not hold
            state = {**simulator.state_dict(), "settings": config.settings()}
            save_state(folder / CHECKPOINT, state, keep=folder / PREVIOUS)
            now = time.monotonic()
            wait = CHECKPOINT_SECONDS + (now - began) / CHECKPOINT_SHARE
            next_checkpoint = now + min(wait, CHECKPOINT_LONGEST)

        def show() -> None:
            """For those who watch: the events, the history and the tables so far."""
            nonlocal next_show
            began = time.monotonic()
            flush(durable=False)
            write_so_far(folder, simulator)
            now = time.monotonic()
            next_show = now + max(SHOW_SECONDS, (now - began) / SHOW_SHARE)

        def pause() -> bool:
            if time.monotonic() > next_show:
                show()
            if not over and time.monotonic() > next_checkpoint:
                checkpoint()
            return interrupted.is_set()

        def closing() -> None:
            """The last checkpoint is without the closing evaluation, so that it can be extended."""
            nonlocal over
            checkpoint()
            over = True

        ends = config.ends()
        complete = simulator.run(config.updates, **ends, stop=pause, closing=closing)
        if not over:
            checkpoint()
        result = summarise(simulator, config.strategy_table, complete, interrupted.is_set())
    write_result(folder, result, config.settings())
    return result


@contextmanager
def watched(
    simulator: Engine, config: RunConfig, folder: Path | None, callbacks: Sequence[Callback]
) -> Iterator[Callable[[RunResult], None]]:
    """These callbacks, and those of the settings, are told of the run. Yields what is to be called
    at the end."""
    everybody = Callbacks((*callbacks, *config.callbacks()))
    beginning = Run(config.settings(), simulator.metric, folder)
    with simulator.backend, everybody.during(beginning):  # fork workers before anybody has threads
        simulator.observers.append(everybody.event)
        simulator.judges.append(everybody.evaluated)
        yield everybody.end


@contextmanager
def _event_log(simulator: Engine, config: RunConfig, folder: Path) -> Iterator[Flush]:
    """events.jsonl, one event per line; what a lost session wrote after its checkpoint is cut off.
    Yields the function that brings it up to date on disk."""
    if not config.events:
        yield lambda durable=True: None
        return
    with Appended(folder / "events.jsonl", keep=simulator.events) as log:
        simulator.loggers.append(log.add)
        yield log.flush
