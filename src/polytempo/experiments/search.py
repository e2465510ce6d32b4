"""A search for the best values of settings, by Optuna, and what they are worth.

Trials are proposed from the values of those before them, a few at a time, which then run side by
side and are answered in order. So the same command makes the same trials, however many run at once;
and what is already in the folder is not run again, but answered at once: an interrupted search goes
on, a longer one continues a shorter one, and there is no database.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from polytempo.core.errors import PolytempoError
from polytempo.experiments.callbacks import Callback
from polytempo.experiments.grid import Grid, Range, Values, label_of, listed, word
from polytempo.experiments.result import RunResult
from polytempo.experiments.sweep import Progress, Sweep, carry_out, check, is_done, runs_of, write
from polytempo.experiments.tables import figures
from polytempo.models import Model
from polytempo.report.intervals import Interval

VALIDATION = 0.2  # of the training samples, unless it is said otherwise
AT_ONCE = 4  # trials that are proposed together, whatever the number of jobs
_DIGITS = 4  # of a value from a range


def search(
    grid: Grid,
    trials: int,
    settings: Mapping[str, Any],
    folder: Path | None,
    *,
    seeds: Sequence[int] = (0,),
    figure: str = "handed",
    interval: Interval = "std",
    jobs: int = 1,
    progress: Progress,
    callbacks: Sequence[Callback] = (),
    model: Model | None = None,
) -> Sweep:
    """Try so many points of the grid, whose settings may have ranges, with the first seed, judged
    by `figure` on validation samples; run the best one with every seed, judged by test samples.
    A trial whose training diverges counts as the worst. An interrupt ends the search; calling this
    again continues."""
    space = listed(grid)
    _check_space(space)
    check(space, figure, folder, jobs, None, model, callbacks)
    trying = {"validation": VALIDATION, **settings}
    if not trying["validation"]:
        raise PolytempoError(
            "search: validation = 0 would choose by the test samples; give a share of the training "
            f"samples, such as {VALIDATION}"
        )
    testing = {**settings, "validation": 0.0}
    place = None if folder is None else folder / "trials"
    first = seeds[:1]
    ends = _ends(space)  # a mistake is found before anything is run
    updates = [run.config.updates for run in runs_of(ends, trying, place, first, None, model)]
    optuna = _optuna()
    study = optuna.create_study(
        direction="maximize", sampler=optuna.samplers.TPESampler(seed=seeds[0])
    )
    known: dict[str, tuple[Values, list[RunResult] | None]] = {}  # None: diverged
    failed: dict[str, str] = {}
    with progress(updates[0] * (trials + len(seeds))) as watch:
        for done in range(0, trials, AT_ONCE):
            asked = [study.ask() for _ in range(min(AT_ONCE, trials - done))]
            points = [_point(space, trial) for trial in asked]
            new = {label_of(point): point for point in points if label_of(point) not in known}
            runs = list(runs_of(list(new.values()), trying, place, first, None, model))
            for run in runs:
                if is_done(run.place):
                    watch(run.label)(run.config.updates, run.config.updates, "was there")
            found = carry_out(runs, list(new.values()), first, jobs, watch, None, model, callbacks)
            failed |= found.failed or {}
            if not found.complete:
                return replace(_tried(known, failed, figure), complete=False)
            known |= {label: (point, None) for label, point in new.items()}
            known |= {
                label_of(point): (point, results)
                for point, results in zip(found.points, found.results, strict=True)
            }
            for trial, point in zip(asked, points, strict=True):
                value = _worth(known[label_of(point)][1], figure)
                if value is None:
                    study.tell(trial, state=optuna.trial.TrialState.PRUNED)
                else:
                    study.tell(trial, value)
        tried = _tried(known, failed, figure)
        if not tried.points:
            return tried
        best = [tried.best(figure)]
        if place is not None:
            write(place, tried, trying)
        runs = list(runs_of(best, testing, folder, seeds, None, model))
        found = carry_out(runs, best, seeds, jobs, watch, None, model, callbacks)
    found = replace(found, figure=figure, interval=interval, trials=tried)
    if found.complete and found.points and folder is not None:
        write(folder, found, testing)
    return found


def _check_space(space: Mapping[str, Sequence[Any]]) -> None:
    if "validation" in space:
        raise PolytempoError(
            "grid: validation is what a search is judged by; give --validation 0.2"
        )
    for name, values in space.items():
        if len(values) > 1 and any(isinstance(value, Range) for value in values):
            raise PolytempoError(
                f"grid: {name}: give one range or some values, not "
                f"{', '.join(str(v) if isinstance(v, Range) else word(v) for v in values)}"
            )


def _ends(space: Mapping[str, Sequence[Any]]) -> list[Values]:
    """Points that have each value, and both ends of each range, at least once."""
    known = {
        name: [values[0].low, values[0].high] if isinstance(values[0], Range) else values
        for name, values in space.items()
    }
    first = {name: values[0] for name, values in known.items()}
    return [first] + [{**first, name: x} for name, values in known.items() for x in values[1:]]


def _point(space: Mapping[str, Sequence[Any]], trial: Any) -> Values:
    """The values that the trial proposes, those of ranges in few digits."""
    point: Values = {}
    for name, values in space.items():
        only = values[0]
        if not isinstance(only, Range):
            point[name] = values[trial.suggest_categorical(name, list(range(len(values))))]
        elif isinstance(only.low, int) and isinstance(only.high, int):
            point[name] = trial.suggest_int(name, only.low, only.high, log=only.log)
        else:
            found = trial.suggest_float(name, only.low, only.high, log=only.log)
            point[name] = min(max(float(f"{found:.{_DIGITS}g}"), only.low), only.high)
    return point


def _worth(results: Sequence[RunResult] | None, figure: str) -> float | None:
    """The figure, larger being better; None if there is none, as where training diverged."""
    value = None if results is None else figures(results)[figure][0]
    if results is None or value is None or not math.isfinite(value):
        return None
    return value if results[0].metric.better == "higher" else -value


def _tried(
    known: Mapping[str, tuple[Values, list[RunResult] | None]],
    failed: Mapping[str, str],
    figure: str,
) -> Sweep:
    """The trials, as a sweep over their points."""
    ended = [(point, results) for point, results in known.values() if results is not None]
    points, results = [point for point, _ in ended], [results for _, results in ended]
    return Sweep(points, results, failed=failed, figure=figure)


def _optuna() -> Any:
    try:
        import optuna
    except ImportError as error:
        raise PolytempoError(
            'a search needs optuna, which is not installed; run: pip install "polytempo[search]"'
        ) from error
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    return optuna
