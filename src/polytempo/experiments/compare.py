"""Several strategies on the same federation, devices and seeds, side by side."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from polytempo.core.errors import Diverged, PolytempoError, nearest
from polytempo.core.metric import MetricInfo
from polytempo.core.strategy import Strategy
from polytempo.data import Federation
from polytempo.experiments.about import origin, read_about
from polytempo.experiments.config import EXECUTION, RunConfig, difference, make_config, read_config
from polytempo.experiments.peer_settings import of_comparison
from polytempo.experiments.result import (
    CLUSTERS,
    FINE_TUNED,
    RunResult,
    can_plot,
    read_result,
    write_table,
)
from polytempo.experiments.run import Attach, LastFederation, holds_run, resolve, resume, run
from polytempo.files import replace_text
from polytempo.report import plot_curves, write_html
from polytempo.simulation.metrics import models_sent
from polytempo.strategies import STRATEGIES

COLUMNS = {
    "clusters": "clusters",
    "unclustered": "in none",
    "cluster_purity": "purity",
    "cluster_ari": "rand index",
}
PLOTS = {  # of single runs that a comparison shows, too
    "graph.png": "collaboration graph",
    "clusters.png": "clusters",
    "similarity.png": "how alike clients are",
    "staleness.png": "staleness",
}
REFERENCES = ("standalone", "majority")
Watch = Callable[[str, int], Attach]  # given the strategy and the seed


@dataclass(frozen=True)
class Comparison:
    """Results by strategy, one for each seed, and the value of the metric that times are compared
    at."""

    results: dict[str, list[RunResult]]
    metric: MetricInfo
    target: float | str  # of the metric, or the strategy whose best value is the target
    complete: bool
    failed: dict[str, str]  # strategies whose training diverged, and what was said of it
    fine_tuned: bool = False  # whether methods with one model are shown fine-tuned, too

    def __post_init__(self) -> None:
        for label, found in self.results.items():
            for result in found:
                if result.metric != self.metric:
                    raise PolytempoError(
                        f"{label}, seed {result.seed}, was judged by {result.metric.name}, but "
                        f"this comparison is about {self.metric.name}; choose another --out, or "
                        "delete the older runs"
                    )

    def target_of(self, index: int) -> float:
        """The value to reach for the seed of that index."""
        if isinstance(self.target, float):
            return self.target
        return self._best(self.results[self.target][index])

    def _best(self, result: RunResult) -> float:
        """Infinite, or NaN, where no evaluation had a finite value."""
        found = result.summary[f"{self.metric.name}_best"]
        return math.nan if found is None else float(found)

    def rows(self) -> dict[str, list[RunResult]]:
        """The results, and those of methods with one model, after fine-tuning, as further ones."""
        found = dict(self.results)
        for label, results in self.results.items() if self.fine_tuned else ():
            tuned = [result.fine_tuned() for result in results if worth_tuning(result)]
            known = [result for result in tuned if result is not None]
            if known and len(known) == len(results):
                found[label + FINE_TUNED] = known
        return found

    def table(self) -> list[dict[str, str]]:
        """One row per strategy: mean and, over several seeds, spread."""
        metric, clustered = self.metric, known_of_clusters(self.results)
        if isinstance(self.target, float):
            share, value = metric.text(self.target), f"{metric.name} {self.target:g}"
            goal = f"s to {share if metric.share else value}"
        else:
            goal = f"s to best of {self.target}"
        worst = f"{metric.name}_worst10"
        return [
            {
                "strategy": label,
                "handed": spread([r.value for r in found], metric),
                "best": spread([self._best(r) for r in found], metric),
                "adapted": spread([r.adapted for r in found], metric, none="-"),
                "worst 10%": spread([r.history[-1][worst] for r in found], metric, none="-"),
                "seconds": spread([r.seconds_taken for r in found]),
                goal: spread([r.time_to(self.target_of(i)) for i, r in enumerate(found)]),
                **of_clusters(found, clustered),
                "messages": spread([messages(r) for r in found], digits=0),
            }
            for label, found in self.rows().items()
        ]

    def summaries(self) -> list[dict[str, Any]]:
        """Every run's result.json, and what it would be after fine-tuning."""
        return [result.summary for found in self.rows().values() for result in found]


def worth_tuning(result: RunResult) -> bool:
    """Whether clients are handed one and the same model, or one that is made for fine-tuning."""
    strategy = STRATEGIES[result.summary["strategy"]]
    assert isinstance(strategy, type) and issubclass(strategy, Strategy)
    return strategy.to_fine_tune or (
        strategy.single_model and not strategy.family.endswith("personalised")
    )


def compare(
    strategies: Sequence[str],
    settings: dict[str, Any],
    folder: Path,
    *,
    seeds: Sequence[int] = (0,),
    target: str | None = None,
    fine_tuned: bool = False,
    references: bool = False,
    watch: Watch | None = None,
) -> Comparison:
    """Run every strategy with every seed; what the folder already holds is not run again.

    `fine_tuned`: methods with one model have a second row, for what clients have after fine-tuning
    it, with the time that this takes. `references`: standalone and majority are rows, too.
    An interrupt ends the comparison after the run that it stopped; calling this again continues. A
    strategy whose training diverges is left out.
    """
    labels = list(dict.fromkeys((*strategies, *(REFERENCES if references else ()))))
    if not labels:
        raise PolytempoError("name at least one strategy; see `polytempo strategies`")
    configs = {
        (label, seed): make_config({**settings, "strategy": label, "seed": seed}, "compare")
        for seed in seeds
        for label in labels
    }
    if fine_tuned and not next(iter(configs.values())).adapt_epochs:
        raise PolytempoError("--fine-tuned needs epochs of fine-tuning: --adapt-epochs 5")
    results: dict[str, list[RunResult]] = {label: [] for label in labels}
    failed: dict[str, str] = {}
    complete, load = True, LastFederation()
    first = next(iter(configs.values()))
    metric = first.problem_on(load(first)).metrics[0]
    goal = _goal(target, labels, metric)
    for (label, seed), config in configs.items():
        if label in failed:
            continue
        place = folder / slug(label) / f"seed{seed}"
        observer = watch(label, seed) if watch else None
        try:
            result = settle(config, place, load, observer)
        except Diverged as error:
            failed[label] = f"{label}, seed {seed}: {error}"
            continue
        results[label].append(result)
        if not result.summary["complete"] or result.interrupted:
            complete = False
            break
    finished = {label: found for label, found in results.items() if len(found) == len(seeds)}
    if isinstance(goal, str) and goal not in finished:
        goal = next(iter(finished), goal)
    about = MetricInfo(**metric.about)
    comparison = Comparison(finished, about, goal, complete, failed, fine_tuned)
    if complete and finished:
        _write(folder, comparison, settings)
    return comparison


def settle(
    config: RunConfig, place: Path, load: LastFederation, observer: Attach | None = None
) -> RunResult:
    """The result of a run, without its models: read from the folder, resumed there, or run from
    the start. A folder with other settings is refused."""
    config = of_comparison(config)
    federation = load(config)
    if holds_run(place):
        result = _continue(place, config, federation, observer)
    else:
        result = run(config, place, observer=observer, federation=federation)
    return replace(result, simulator=None, extensions=())


def _continue(
    place: Path, config: RunConfig, federation: Federation, observer: Attach | None
) -> RunResult:
    found = read_config(place / "config.toml")
    wanted = resolve(config, federation)
    name = difference(wanted, found, (*EXECUTION, "events"))  # it goes on as it began
    if name is not None:
        raise PolytempoError(
            f"{place} was run with {name} = {found.get(name)!r}, but now it is "
            f"{wanted.settings().get(name)!r}; choose another --out or delete the folder"
        )
    if (place / "result.json").exists():
        result = read_result(place)
        if result.summary["complete"]:
            return result
    return resume(place, workers=config.workers, observer=observer, federation=federation)


def _goal(target: str | None, labels: Sequence[str], metric: MetricInfo) -> float | str:
    if target is None:
        return "fedavg" if "fedavg" in labels else labels[0]
    if target in labels:
        return target
    try:
        value = float(target)
    except ValueError:
        raise PolytempoError(
            f"target {target!r} is neither a number nor one of the strategies"
            f"{nearest(target, labels)}"
        ) from None
    if metric.share and not 0 < value <= 1:
        raise PolytempoError(
            f"target {target}: {metric.label} is a share above 0 and up to 1; write 0.8 for 80%"
        )
    if not math.isfinite(value):
        raise PolytempoError(f"target {target} is not a value of {metric.label}")
    return value


def known_of_clusters(results: Mapping[str, Sequence[RunResult]]) -> list[str]:
    """Which figures of clusters there are: none without clusters, the number alone without true
    groups."""
    summaries = [result.summary for found in results.values() for result in found]
    return [key for key in CLUSTERS if any(s.get(key) is not None for s in summaries)]


def of_clusters(found: Sequence[RunResult], known: Sequence[str]) -> dict[str, str]:
    """The columns of a table that speak of clusters."""
    line = {}
    for key in known:
        values = [result.summary.get(key) for result in found]
        counted = key in ("clusters", "unclustered")
        digits = 2 if not counted else 0 if len(values) == 1 else 1
        unknown = not values or None in values
        line[COLUMNS[key]] = "-" if unknown else spread(values, digits=digits)
    return line


def slug(label: str) -> str:
    """A strategy with its options as the name of a folder."""
    return re.sub(r"[^A-Za-z0-9._+=-]+", "_", label)


def messages(result: RunResult) -> float:
    return float(models_sent(result.summary["messages"]))


def spread(
    values: Sequence[float | None],
    metric: MetricInfo | None = None,
    *,
    digits: int = 1,
    none: str = "never",
) -> str:
    """Mean and, of several seeds, standard deviation; `none`, if there is no value."""
    known = [value for value in values if value is not None]
    if len(known) < len(values):
        return none if not known else f"{len(known)} of {len(values)} seeds"
    mean = float(np.mean(known))
    apart = float(np.std(known, ddof=1)) if len(known) > 1 else None
    if metric is not None:
        return metric.text(mean, apart)
    return f"{mean:,.{digits}f}" + ("" if apart is None else f" ± {apart:.{digits}f}")


def _write(folder: Path, comparison: Comparison, settings: dict[str, Any]) -> None:
    """summary.csv, results.json, the plots and the report."""
    table, metric = comparison.table(), comparison.metric
    named = [{"strategy": row["strategy"], "metric": metric.name} | row for row in table]
    write_table(folder / "summary.csv", named)
    text = json.dumps(comparison.summaries(), indent=2) + "\n"
    replace_text(folder / "results.json", text)
    if not can_plot():
        return
    curves = {label: [r.curve() for r in found] for label, found in comparison.results.items()}
    against = {
        "time": "simulated time",
        "rounds": "updates folded: the same amount of training",
        "messages": "models sent, in whichever direction",
    }
    images = [
        (
            f"{metric.heading} against {what}",
            plot_curves(curves, metric, folder / f"{metric.name}_{x}.png", x=x),
        )
        for x, what in against.items()
    ]
    for label in comparison.results:
        place = next((folder / slug(label)).glob("seed*"))
        for name, caption in PLOTS.items():
            if (place / name).exists():
                images.append((f"{label}: {caption} ({place.name})", place / name))
    places = [
        folder / slug(label) / f"seed{results[0].seed}"
        for label, results in comparison.results.items()
    ]
    about = read_about(places[0])
    seeds = ", ".join(str(result.seed) for result in next(iter(comparison.results.values())))
    write_html(
        folder / "report.html",
        title=f"{', '.join(comparison.results)} on {comparison.summaries()[0]['federation']}",
        intro=f"Handed: {metric.label} of the model that each client is handed, mean over clients "
        f"(mean of the last evaluations); {metric.direction}. Adapted: the same model after some "
        "epochs of local training. Times are simulated seconds. Seeds: " + seeds + ".",
        table=table,
        images=images,
        settings={**settings, **shared_settings(places), **origin(about)},
        command=about.get("command"),
    )


def shared_settings(places: Sequence[Path]) -> dict[str, Any]:
    """The settings, in full, that all of these runs have in common, but for the seed."""
    first, *others = (read_config(place / "config.toml") for place in places)
    return {
        key: value
        for key, value in first.items()
        if key != "seed" and all(other.get(key) == value for other in others)
    }
