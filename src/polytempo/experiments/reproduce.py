"""A paper's tables and figures, run again and set beside the published numbers.

All experiments of a paper share their runs: what one of them has run, another only reads. A run is
in `<out>/<paper>/runs/<data set>-<split>/<row>/seed<n>`; nothing is run twice, and what was
interrupted is gone on with (`compare.settle`). The tables are made from whatever runs are there.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from polytempo.core.errors import Diverged, PolytempoError
from polytempo.data import available
from polytempo.experiments.compare import messages, settle, spread
from polytempo.experiments.config import EXECUTION, read_config
from polytempo.experiments.published import Experiment
from polytempo.experiments.result import RunResult, read_result
from polytempo.experiments.run import Attach, LastFederation

Results = Mapping[str, Sequence[RunResult]]  # by row, one for each seed


@dataclass(frozen=True)
class Place:
    """Where an experiment's runs and reports are. Quick ones are apart from all others."""

    out: Path
    experiment: Experiment
    quick: bool = False

    @property
    def root(self) -> Path:
        paper = self.experiment.name.partition("/")[0]
        return self.out / ("quick" if self.quick else "") / paper

    def comparable(self, column: str) -> bool:
        """Whether the paper's figures are of the same data in the same size."""
        return self.experiment.column(column)[0].comparable and not self.quick

    def run(self, row: str, column: str, seed: int) -> Path:
        return self.root / "runs" / column.replace("/", "-") / row / f"seed{seed}"

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
    said of runs whose training diverged."""
    experiment, load, failed = place.experiment, LastFederation(), []
    _all_here(experiment, columns, execution.get("data_dir"))
    configs = {  # all of them first: a mistake is found before anything is run
        (row, column, seed): experiment.config(row, column, seed, place.quick, **execution)
        for seed in seeds
        for column in columns
        for row in rows
    }
    for (row, column, seed), config in configs.items():
        observer = watch(f"{column} {row}", seed) if watch else None
        try:
            result = settle(config, place.run(row, column, seed), load, observer)
        except Diverged as error:
            failed.append(f"{row} on {column}, seed {seed}: {error}")
            continue
        if not result.summary["complete"] or result.interrupted:
            return False, failed
    return True, failed


def _all_here(experiment: Experiment, columns: Sequence[str], data_dir: str | None) -> None:
    """Not after hours: say at once which data set is missing."""
    missing = {info.name for info in available(data_dir) if not info.available}
    for column in columns:
        data = experiment.column(column)[0].settings["data"]
        if data in missing:
            raise PolytempoError(
                f"{column}: the files of {data} are not here; say where with --data-dir or "
                "POLYTEMPO_DATA, or choose another --dataset"
            )


def collect(place: Place, column: str) -> dict[str, list[RunResult]]:
    """All finished runs of a column, by row: whoever has run them, but only with these settings."""
    found: dict[str, list[RunResult]] = {}
    for row in place.experiment.rows:
        found[row] = []
        for folder in sorted(place.run(row, column, 0).parent.glob("seed*")):
            if not (folder / "result.json").exists():
                continue
            seed = int(folder.name.removeprefix("seed"))
            wanted = place.experiment.config(row, column, seed, place.quick).model_dump()
            kept = read_config(folder / "config.toml")
            same = all(
                kept.get(key) == value
                for key, value in wanted.items()
                if value is not None and key not in EXECUTION
            )
            result = read_result(folder)
            if same and result.summary["complete"]:
                found[row].append(result)
    return found


LEGEND = (
    "Handed: accuracy of the models that clients are handed, mean over clients (last three "
    "evaluations). Adapted: after local training of that model. Paper: its accuracy. Diff.: handed "
    "minus paper, in points. Time: simulated seconds to convergence. Messages: models sent either "
    "way."
)


def table(place: Place, column: str, results: Results) -> list[dict[str, str]]:
    """One line a row: our figures as far as there are any, and the paper's beside them."""
    experiment = place.experiment
    lines = []
    for row in experiment.rows:
        found = results.get(row, ())
        published = experiment.published(row, column)
        line = {
            "method": experiment.label(row),
            "handed": _share(found, "accuracy"),
            "adapted": _share(found, "accuracy_adapted"),
            "paper": " ± ".join(f"{figure:.2f}" for figure in published) if published else "-",
            "diff.": "-",
            "time": _times(found),
            "messages": spread([messages(r) for r in found], digits=0) if found else "-",
        }
        if found and published and place.comparable(column):
            line["diff."] = f"{100 * handed(found) - published[0]:+.1f}"
        if experiment.plot == "tradeoff":
            share = ratio(found, results["fedavg"], converged)
            line["of FedAvg's"] = "-" if share is None else f"{share:.0%}"
        lines.append({**line, "seeds": str(len(found)) if found else "-"})
    return lines


def asides(place: Place, column: str, results: Results) -> list[str]:
    """Figures that the paper gives for few methods only, too few for a column of the table."""
    if not place.comparable(column):
        return []
    paper, lines = place.experiment.paper, []
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


def handed(found: Sequence[RunResult]) -> float:
    return float(np.mean([result.accuracy for result in found]))


def _share(found: Sequence[RunResult], key: str) -> str:
    return spread([r.summary[key] for r in found], percent=True) if found else "-"


def _times(found: Sequence[RunResult]) -> str:
    return spread([r.summary["convergence_time"] for r in found]) if found else "-"


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
