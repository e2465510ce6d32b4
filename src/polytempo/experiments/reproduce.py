"""A paper's tables and figures, rerun and compared with the published numbers.

All experiments of a paper share their runs: what one of them has run, another only reads. A run is
in `<out>/<paper>/runs/<data set>-<split>/<row>/seed<n>`, with the value of a grid in a folder
between row and seed; runs that tune a grid are in `tuning` instead of `runs`. Nothing is run twice,
and what was interrupted is resumed (`jobs.carry_out_all`). Where two columns ask for the same run,
it is copied. The tables are made from the runs that are there (`paper_tables`).
"""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from polytempo.core.errors import PolytempoError
from polytempo.data import available
from polytempo.experiments.checkpoint import holds_run
from polytempo.experiments.config import RunConfig, difference, read_config
from polytempo.experiments.folders import slug
from polytempo.experiments.jobs import Order, Watch, carry_out_all
from polytempo.experiments.paper_specs import Choice, Experiment, spelled
from polytempo.experiments.peer_settings import of_comparison
from polytempo.experiments.result import RunResult
from polytempo.experiments.result_folder import read_result

DIVERGED = "diverged.txt"  # in the folder of a run: this value of the grid is not tried again
VALIDATION = 0.2  # of the training samples: grids are tuned on these, never on test samples


@dataclass(frozen=True)
class Place:
    """Where an experiment's runs and reports are. Quick ones are kept apart from all others, as are
    those of another reading, with another model or of another length."""

    out: Path
    experiment: Experiment
    quick: bool = False

    @property
    def root(self) -> Path:
        paper = self.experiment.name.partition("/")[0]
        if self.experiment.variant:
            paper += f"-{self.experiment.variant}"
        if self.experiment.model:
            paper += f"-{slug(self.experiment.model)}"
        if self.experiment.updates is not None:
            paper += f"-updates{self.experiment.updates}"
        return self.out / ("quick" if self.quick else "") / paper

    def comparable(self, column: str) -> bool:
        """Whether the paper's figures are of the same data in the same size."""
        return self.experiment.comparable(column) and not self.quick

    def choices(self, row: str) -> Sequence[Choice]:
        return self.experiment.choices(row, self.quick)

    def run(self, row: str, column: str, seed: int, choice: Choice) -> Path:
        folder = self.root / "runs" / column.replace("/", "-") / row / spelled(choice)
        return folder / f"seed{seed}"

    def tuning(self, row: str, column: str, choice: Choice) -> Path:
        return self.root / "tuning" / column.replace("/", "-") / row / spelled(choice)

    def report(self, dataset: str) -> Path:
        return self.root / self.experiment.name.partition("/")[2] / dataset


@dataclass(frozen=True)
class Wanted:
    """A run of an experiment: a row, with a value of its grid if it has one."""

    row: str
    column: str
    seed: int
    choice: Choice
    config: RunConfig
    folder: Path

    @property
    def order(self) -> Order:
        label = f"{self.column} {self.row} {spelled(self.choice)}".strip()
        label = f"tuning {label}" if self.config.validation else label
        return Order(f"{label} seed {self.seed}", self.config, self.folder)

    @property
    def finished(self) -> bool:
        file = self.folder / "result.json"
        return file.exists() and bool(json.loads(file.read_text(encoding="utf8"))["complete"])

    @property
    def diverged(self) -> str | None:
        """What was said of it, if it was tried before in vain."""
        file = self.folder / DIVERGED
        return file.read_text(encoding="utf8") if self.choice and file.exists() else None


Progress = Callable[[int], AbstractContextManager[Watch]]  # given the updates of all runs


@contextmanager
def silent(updates: int) -> Iterator[Watch]:
    """Nothing is shown."""
    yield lambda label: lambda *said: None


def carry_out(
    place: Place,
    columns: Sequence[str],
    rows: Sequence[str],
    seeds: Sequence[int],
    progress: Progress = silent,
    at_once: int = 1,
    **execution: Any,
) -> tuple[bool, list[str]]:
    """Run what is not there yet, seed by seed. Returns whether it came to the end, and what was
    said of runs whose training diverged."""
    _all_here(place.experiment, columns, execution.get("data_dir"))
    asked = [(row, column) for column in columns for row in rows]
    for row, column in asked:  # a mistake is found before anything is run
        first = place.choices(row)[0]
        place.experiment.config(row, column, seeds[0], place.quick, first, **execution)
    complete, failed = tune(place, asked, seeds[0], progress, at_once, **execution)
    if not complete:
        return False, failed
    wanted = []
    for seed in seeds:
        for row, column in asked:
            choice = chosen(place, row, column)
            if choice is not None:
                config = place.experiment.config(
                    row, column, seed, place.quick, choice, **execution
                )
                folder = place.run(row, column, seed, choice)
                wanted.append(Wanted(row, column, seed, choice, config, folder))
    complete, errors = _settle(wanted, progress, at_once)
    failed += [
        f"{each.row} on {each.column}, seed {each.seed}: {errors[each.folder]}"
        for each in wanted
        if each.folder in errors
    ]
    return complete, failed


def _settle(
    wanted: Sequence[Wanted], progress: Progress, at_once: int
) -> tuple[bool, dict[Path, str]]:
    """Run these; whether all have come to an end, and what was said of those that diverged."""
    begun: list[Wanted] = []
    twins: list[tuple[Wanted, Wanted]] = []  # the same run in another column: it is copied
    errors = {each.folder: text for each in wanted if (text := each.diverged) is not None}
    for each in wanted:
        if each.folder in errors:
            continue
        settings = each.config.settings()
        same = (other for other in begun if difference(other.config, settings) is None)
        twin = None if holds_run(each.folder) else next(same, None)
        if twin is None:
            begun.append(each)
        else:
            twins.append((each, twin))
    by_folder = {each.folder: each for each in begun}
    complete = set()
    updates = sum(each.config.updates for each in begun if not each.finished)
    with progress(updates) as watch:
        for ended in carry_out_all([each.order for each in begun], at_once, watch):
            each = by_folder[ended.order.folder]
            if ended.diverged is not None:
                errors[each.folder] = ended.diverged
                if each.choice:
                    (each.folder / DIVERGED).write_text(ended.diverged, encoding="utf8")
            elif ended.complete:
                complete.add(each.folder)
    for each, twin in twins:
        if twin.folder in complete:
            _copy(twin.folder, each.folder)
            complete.add(each.folder)
        elif twin.folder in errors:
            errors[each.folder] = errors[twin.folder]
    return all(each.folder in complete or each.folder in errors for each in wanted), errors


# -- tuning ----------------------------------------------------------------------------------------


def tune(
    place: Place,
    asked: Sequence[tuple[str, str]],
    seed: int,
    progress: Progress,
    at_once: int,
    **execution: Any,
) -> tuple[bool, list[str]]:
    """Try the values of the grids on validation samples, and values beyond them as long as the best
    is at the end of its grid."""
    grids: dict[tuple[str, str], list[Choice]] = {}
    for row, column in asked:
        if len(given := place.choices(row)) > 1:
            before = (choice for _, choice in tried(place, row, column))
            grids[row, column] = [*given, *(choice for choice in before if choice not in given)]
    errors: dict[Path, str] = {}
    while True:
        wanted = [
            Wanted(
                row,
                column,
                seed,
                choice,
                place.experiment.config(
                    row, column, seed, place.quick, choice, validation=VALIDATION, **execution
                ),
                place.tuning(row, column, choice),
            )
            for (row, column), choices in grids.items()
            for choice in choices
        ]
        complete, errors = _settle(wanted, progress, at_once)
        if not complete:
            return False, []
        further = {key: beyond(place, *key, grid) for key, grid in grids.items()}
        grown = False
        for (row, column), choice in further.items():
            grid = grids[row, column]
            if (
                choice is not None
                and len(grid) < len(place.choices(row)) + place.experiment.beyond
                and _can_be(place, row, column, choice)
            ):
                grid.append(choice)
                grown = True
        if not grown or place.quick:
            break
    failed = []
    for (row, column), choices in grids.items():
        said = [errors.get(place.tuning(row, column, choice)) for choice in choices]
        if all(said):
            failed.append(f"{row} on {column}, with every value of its grid: {said[-1]}")
    return True, failed


def _can_be(place: Place, row: str, column: str, choice: Choice) -> bool:
    """Half a local epoch, say, cannot."""
    try:
        place.experiment.config(row, column, 0, place.quick, choice)
    except PolytempoError:
        return False
    return True


def tried(place: Place, row: str, column: str) -> list[tuple[float, Choice]]:
    """The values that have been tried, with what they led to on validation samples."""
    found: list[tuple[float, Choice]] = []
    for folder in sorted(place.tuning(row, column, {}).glob("*=*")):
        pairs = (pair.split("=") for pair in folder.name.split(","))
        choice = {key: float(value) for key, value in pairs}
        if (folder / DIVERGED).exists():
            found.append((-math.inf, choice))
        elif (folder / "result.json").exists():
            result = read_result(folder)
            wanted = place.experiment.config(
                row, column, result.seed, place.quick, choice, validation=VALIDATION
            )
            if _was_run(wanted, folder) and result.summary["complete"]:
                found.append((final(place, [_counted(place, row, result)]), choice))
    return found


def chosen(place: Place, row: str, column: str) -> Choice | None:
    """The value that a row is run with: the best on validation samples. None: there is none yet, or
    training diverged with every one."""
    choices = place.choices(row)
    if len(choices) == 1:
        return choices[0]
    best = max(tried(place, row, column), key=lambda pair: pair[0], default=(-math.inf, {}))
    return best[1] if best[0] > -math.inf else None


def beyond(place: Place, row: str, column: str, grid: Sequence[Choice]) -> Choice | None:
    """A value beyond the end of the grid, if the best one is there."""
    best = chosen(place, row, column)
    for key, value in (best or {}).items():
        values = sorted({choice[key] for choice in grid})
        if len(values) > 1 and value in (values[0], values[-1]):
            near = values[1] if value == values[0] else values[-2]
            return {**(best or {}), key: float(f"{value * value / near:.3g}")}
    return None


def _copy(source: Path, target: Path) -> None:
    """A folder is there with all its files, or not at all."""
    part = target.with_name(f"copying-{target.name}")
    shutil.copytree(source, part, dirs_exist_ok=True)
    part.rename(target)


def _all_here(experiment: Experiment, columns: Sequence[str], data_dir: str | None) -> None:
    """Say at once which data set is missing, not after hours."""
    missing = {info.name for info in available(data_dir) if not info.available}
    for column in columns:
        data = str(experiment.column(column)[0].settings["data"]).partition(":")[0]
        if data in missing:
            raise PolytempoError(
                f"{column}: the files of {data} are not here; get them with `polytempo data get "
                f"{data}`, say where with --data-dir or POLYTEMPO_DATA, or choose another --dataset"
            )


def collect(place: Place, column: str) -> dict[str, list[RunResult]]:
    """All finished runs of a column with these settings, by row, whichever experiment ran them; of
    a grid, those of the value that was chosen."""
    found: dict[str, list[RunResult]] = {}
    for row in place.experiment.rows:
        choice = chosen(place, row, column)
        found[row] = [] if choice is None else _finished(place, row, column, choice)
    return found


def _finished(place: Place, row: str, column: str, choice: Choice) -> list[RunResult]:
    found = []
    for folder in sorted(place.run(row, column, 0, choice).parent.glob("seed*")):
        if not (folder / "result.json").exists():
            continue
        seed = int(folder.name.removeprefix("seed"))
        config = place.experiment.config(row, column, seed, place.quick, choice)
        result = read_result(folder)
        if _was_run(config, folder) and result.summary["complete"]:
            found.append(_counted(place, row, result))
    return found


def _counted(place: Place, row: str, result: RunResult) -> RunResult:
    """The run as the row counts it."""
    if not place.experiment.strategies[row].fine_tuned:
        return result
    found = result.fine_tuned()
    if found is None:
        name = place.experiment.label(row)
        raise PolytempoError(f"{name} counts adapted figures: adapt_epochs must not be 0")
    return found


def _was_run(config: RunConfig, folder: Path) -> bool:
    """Whether the run in a folder is the one with these settings, of which its strategy may ignore
    some."""
    kept = read_config(folder / "config.toml")
    config = of_comparison(config)
    updates = config.make("strategy").updates_of_run(config.updates, kept["clients"])
    return difference(config.model_copy(update={"updates": updates}), kept) is None


def final(place: Place, found: Sequence[RunResult]) -> float:
    """The figure that counts, mean over seeds."""
    figure, last = place.experiment.figure, place.experiment.last
    return float(np.mean([result.final(figure, last) for result in found]))
