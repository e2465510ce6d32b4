"""A paper's tables and figures, rerun and compared with the published numbers.

All experiments of a paper share their runs: what one of them has run, another only reads. A run is
in `<out>/<paper>/runs/<data set>-<split>/<row>/seed<n>`, and for every value of a grid in a folder
between row and seed; nothing is run twice, and what was interrupted is resumed
(`compare.settle`). Where two columns ask for the same run, it is copied. The tables are made
from the runs that are there.
"""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from polytempo.core.errors import Diverged, PolytempoError
from polytempo.core.metric import ACCURACY
from polytempo.data import available
from polytempo.experiments.compare import (
    known_of_clusters,
    messages,
    of_clusters,
    settle,
    slug,
    spread,
)
from polytempo.experiments.config import RunConfig, difference, read_config
from polytempo.experiments.paper_specs import FIGURES, Choice, Experiment, spelled
from polytempo.experiments.result import RunResult, read_result
from polytempo.experiments.run import Attach, LastFederation, holds_run

Results = Mapping[str, Sequence[RunResult]]  # by row, one for each seed
DIVERGED = "diverged.txt"  # in the folder of a run: this value of the grid is not tried again


@dataclass(frozen=True)
class Place:
    """Where an experiment's runs and reports are. Quick ones are kept apart from all others, as are
    those with another model or of another length."""

    out: Path
    experiment: Experiment
    quick: bool = False

    @property
    def root(self) -> Path:
        paper = self.experiment.name.partition("/")[0]
        if self.experiment.model:
            paper += f"-{slug(self.experiment.model)}"
        if self.experiment.rounds is not None:
            paper += f"-rounds{self.experiment.rounds}"
        return self.out / ("quick" if self.quick else "") / paper

    def comparable(self, column: str) -> bool:
        """Whether the paper's figures are of the same data in the same size."""
        return self.experiment.comparable(column) and not self.quick

    def choices(self, row: str) -> Sequence[Choice]:
        return self.experiment.choices(row, self.quick)

    def run(self, row: str, column: str, seed: int, choice: Choice) -> Path:
        folder = self.root / "runs" / column.replace("/", "-") / row / spelled(choice)
        return folder / f"seed{seed}"

    def report(self, dataset: str) -> Path:
        return self.root / self.experiment.name.partition("/")[2] / dataset


def carry_out(
    place: Place,
    columns: Sequence[str],
    rows: Sequence[str],
    seeds: Sequence[int],
    watch: Callable[[str, int], Attach] | None = None,
    **execution: Any,
) -> tuple[bool, list[str]]:
    """Run what is not there yet, seed by seed. Returns whether it came to the end, and what was
    said of runs whose training diverged (of a grid, if it did with every value)."""
    experiment, load = place.experiment, LastFederation()
    failed: list[str] = []
    done: list[tuple[RunConfig, Path]] = []  # finished runs
    _all_here(experiment, columns, execution.get("data_dir"))
    configs = {  # all of them first: a mistake is found before anything is run
        (row, column, seed): [
            (choice, experiment.config(row, column, seed, place.quick, choice, **execution))
            for choice in place.choices(row)
        ]
        for seed in seeds
        for column in columns
        for row in rows
    }
    for (row, column, seed), tried in configs.items():
        errors = []
        for choice, config in tried:
            folder = place.run(row, column, seed, choice)
            if choice and (folder / DIVERGED).exists():
                errors.append((folder / DIVERGED).read_text(encoding="utf8"))
                continue
            if not holds_run(folder):
                same = (at for ran, at in done if difference(config, ran.settings()) is None)
                if (twin := next(same, None)) is not None:
                    _copy(twin, folder)
            observer = watch(f"{column} {row} {spelled(choice)}".strip(), seed) if watch else None
            try:
                result = settle(config, folder, load, observer)
            except Diverged as error:
                errors.append(str(error))
                if choice:
                    (folder / DIVERGED).write_text(str(error), encoding="utf8")
                continue
            if not result.summary["complete"] or result.interrupted:
                return False, failed
            done.append((config, folder))
        if len(errors) == len(tried):
            failed.append(f"{row} on {column}, seed {seed}: {errors[-1]}")
    return True, failed


def _copy(source: Path, target: Path) -> None:
    """A folder is there with all its files, or not at all."""
    part = target.with_name(f"copying-{target.name}")
    shutil.copytree(source, part, dirs_exist_ok=True)
    part.rename(target)


def _all_here(experiment: Experiment, columns: Sequence[str], data_dir: str | None) -> None:
    """Say at once which data set is missing, not after hours."""
    missing = {info.name for info in available(data_dir) if not info.available}
    for column in columns:
        data = experiment.column(column)[0].settings["data"]
        if data in missing:
            raise PolytempoError(
                f"{column}: the files of {data} are not here; say where with --data-dir or "
                "POLYTEMPO_DATA, or choose another --dataset"
            )


def collect(place: Place, column: str) -> dict[str, list[RunResult]]:
    """All finished runs of a column with these settings, by row, whichever experiment ran them. Of
    a grid, those of the best value (among those that most seeds have been run with)."""
    found: dict[str, list[RunResult]] = {}
    for row in place.experiment.rows:
        tried = [_finished(place, row, column, choice) for choice in place.choices(row)]
        seeds = max(map(len, tried))
        whole = [runs for runs in tried if runs and len(runs) == seeds]
        found[row] = max(whole, key=lambda runs: final(place, runs), default=[])
    return found


def _finished(place: Place, row: str, column: str, choice: Choice) -> list[RunResult]:
    found = []
    for folder in sorted(place.run(row, column, 0, choice).parent.glob("seed*")):
        if not (folder / "result.json").exists():
            continue
        seed = int(folder.name.removeprefix("seed"))
        config = place.experiment.config(row, column, seed, place.quick, choice)
        same = difference(config, read_config(folder / "config.toml")) is None
        result = read_result(folder)
        if same and result.summary["complete"]:
            found.append(result)
    return found


def legend(experiment: Experiment) -> str:
    """What the columns of the tables mean."""
    if experiment.figure == "accuracy_weighted":
        return (
            "Pooled: accuracy of the server's model on the test samples of all clients together "
            "(last three evaluations). Paper: its accuracy. Diff.: pooled minus paper, in points. "
            "Steps: how often the server has changed its model. Uploads: that it got for it."
        )
    more = ""
    if any(experiment.column(column)[1].target for column in experiment.columns):
        more += " To ...%: simulated seconds until the handed accuracy first reaches that."
    if experiment.paper.seconds:
        more += " Paper's time: the same, or to convergence, in the paper's own unit."
    if any(experiment.clustered(row) for row in experiment.rows):
        more += (
            " Clusters: how many there are at the end; purity and (adjusted) rand index: how well "
            "they fit the true groups."
        )
    return (
        "Handed: accuracy of the models that clients are handed, mean over clients (last three "
        "evaluations). By sample: the same with every test sample counting once. Adapted: handed, "
        "after local training of that model. Paper: its accuracy. Diff.: handed minus paper, in "
        "points. Time: simulated seconds to convergence. Messages: models sent either way." + more
    )


def table(place: Place, column: str, results: Results) -> list[dict[str, str]]:
    """One line per row: our figures, where there are any, next to the paper's."""
    experiment = place.experiment
    target = experiment.column(column)[1].target
    clustered = known_of_clusters(results)
    lines = []
    for row in experiment.rows:
        found = results.get(row, ())
        published = experiment.published(row, column)
        pooled = experiment.figure == "accuracy_weighted"
        ours = spread([r.final(experiment.figure) for r in found], ACCURACY) if found else "-"
        line = {"method": experiment.label(row), FIGURES[experiment.figure][0]: ours}
        if not pooled:
            weighted = [r.final("accuracy_weighted") for r in found]
            line["by sample"] = spread(weighted, ACCURACY) if found else "-"
            line["adapted"] = _share(found, "accuracy_adapted")
        line["paper"] = " ± ".join(f"{each:.2f}" for each in published) if published else "-"
        line["diff."] = "-"
        if found and published and place.comparable(column):
            line["diff."] = f"{100 * final(place, found) - published[0]:+.1f}"
        if any(experiment.strategies[each].grid for each in experiment.rows):
            line["best"] = _chosen(place, row, found)
        if pooled:
            line["steps"] = _last(found, "version")
            line["uploads"] = _last(found, "round")
        else:
            if target is None:
                line["time"] = _times(found)
            else:
                times = [r.time_to(target) for r in found]
                line[f"to {target:.0%}"] = spread(times) if found else "-"
            if experiment.paper.seconds:
                line["paper's time"] = _said(experiment.seconds(row, column))
            line |= of_clusters(found, clustered)
            line["messages"] = spread([messages(r) for r in found], digits=0) if found else "-"
        if experiment.plot == "tradeoff":
            share = ratio(found, results["fedavg"], converged)
            line["of FedAvg's"] = "-" if share is None else f"{share:.0%}"
        lines.append({**line, "seeds": str(len(found)) if found else "-"})
    return lines


def asides(place: Place, column: str, results: Results) -> list[str]:
    """Figures that the paper gives for few methods only, too few for a column of the table."""
    paper, lines = place.experiment.paper, _effects(place, column, results)
    if not place.comparable(column):
        return lines
    for figures, base, figure, what in (
        (paper.time, "fedavg", converged, "{:.1%} of FedAvg's convergence time (paper: {:.1%})"),
        (paper.sent, "fedasync", _sent, "{:.3f} times FedAsync's models sent (paper: {:.2f})"),
    ):
        for row, published in figures.items():
            ours = ratio(results.get(row, ()), results.get(base, ()), figure)
            if ours is not None and column in published:
                label = place.experiment.label(row)
                lines.append(f"{label}: {what.format(ours, published[column])}")
    return lines


def _effects(place: Place, column: str, results: Results) -> list[str]:
    """How good a fast and a slow peer are in the end, and what fusions did to them."""
    if not place.experiment.paper.effects or place.quick:
        return []
    lines = []
    for row, found in results.items():
        if not found:
            continue
        pairs = [sorted(r.summary["peers"], key=lambda peer: peer["factor"]) for r in found]
        published = place.experiment.paper.effects.get(row, {}).get(column)
        words = []
        for index, name in enumerate(("fast", "slow")):
            ends = spread([pair[index]["accuracy"] for pair in pairs], ACCURACY)
            effects = [pair[index]["fusion_effect"] for pair in pairs]
            text = f"{name} peer {ends}"
            if None not in effects:
                text += f", {100 * float(np.mean(effects)):+.1f} points by a fusion"
            words.append(text + (f" (paper: {published[index]:+.1f})" if published else ""))
        lines.append(f"{place.experiment.label(row)}: {'; '.join(words)}")
    return lines


def final(place: Place, found: Sequence[RunResult]) -> float:
    """The figure that counts, mean over seeds."""
    return float(np.mean([result.final(place.experiment.figure) for result in found]))


def _chosen(place: Place, row: str, found: Sequence[RunResult]) -> str:
    """The value of the grid that was the best."""
    choices = place.choices(row)
    if not found or not choices[0]:
        return "-"
    value = {key: float(found[0].summary["options"][key]) for key in choices[0]}
    tried = {key: [choice[key] for choice in choices] for key in value}
    edge = any(
        value[key] in (min(each), max(each)) for key, each in tried.items() if len(set(each)) > 1
    )
    return spelled(value).replace(",", ", ") + " (edge)" * edge


def _last(found: Sequence[RunResult], key: str) -> str:
    return spread([r.history[-1][key] for r in found], digits=0) if found else "-"


def _share(found: Sequence[RunResult], key: str) -> str:
    return spread([r.summary[key] for r in found], ACCURACY, none="-") if found else "-"


def _times(found: Sequence[RunResult]) -> str:
    return spread([r.summary["convergence_time"] for r in found]) if found else "-"


def _said(seconds: float | None) -> str:
    return "-" if seconds is None else "never" if math.isinf(seconds) else f"{seconds:,.1f}"


def converged(result: RunResult) -> float | None:
    time: float | None = result.summary["convergence_time"]
    return time


def _sent(result: RunResult) -> float | None:
    """Models sent to clients."""
    return float(result.summary["messages"]["dispatch"] + result.summary["messages"]["multicast"])


def ratio(
    found: Sequence[RunResult],
    base: Sequence[RunResult],
    figure: Callable[[RunResult], float | None],
) -> float | None:
    """The ratio of the means over the seeds that both have."""
    ours = {r.summary["seed"]: figure(r) for r in found}
    theirs = {r.summary["seed"]: figure(r) for r in base}
    pairs = [(ours[seed], theirs[seed]) for seed in ours.keys() & theirs]
    if not pairs or any(None in pair for pair in pairs):
        return None
    one, other = np.array(pairs, dtype=float).sum(axis=0)
    return float(one / other) if other else None
