"""Several strategies on the same federation, devices and seeds, side by side."""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TypedDict

from polytempo.core.errors import Diverged, PolytempoError, nearest
from polytempo.core.metric import LOSS, MetricInfo
from polytempo.core.strategy import Strategy
from polytempo.data import Federation
from polytempo.experiments.about import origin, read_about
from polytempo.experiments.callbacks import Callback
from polytempo.experiments.checkpoint import holds_run
from polytempo.experiments.config import EXECUTION, RunConfig, difference, read_config
from polytempo.experiments.folders import slug, spelled
from polytempo.experiments.peer_settings import of_comparison
from polytempo.experiments.result import FINE_TUNED, RunResult
from polytempo.experiments.result_folder import can_plot, read_result
from polytempo.experiments.rows import as_frame, write_table
from polytempo.experiments.run import in_memory, restored, resume, run
from polytempo.experiments.run_settings import described, resolve
from polytempo.experiments.tables import by_column, figures, gains, numbers, spread
from polytempo.experiments.world import LastFederation
from polytempo.files import replace_text
from polytempo.models import Model
from polytempo.report import html_table, in_formats, plot_curves, plot_distribution, write_html
from polytempo.simulation import clusters
from polytempo.simulation.each_client import known
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
Watch = Callable[[str, int], Callback]  # given the strategy and the seed
Load = Callable[[RunConfig], Federation]


class Given(TypedDict):
    """What a run is given as objects."""

    federation: Federation
    model: Model | None
    strategy: Strategy | None


@dataclass(frozen=True, repr=False)
class Comparison:
    """Results by strategy, one for each seed, and the value of the metric that times are compared
    at."""

    results: dict[str, list[RunResult]]
    metric: MetricInfo
    target: float | str  # of the metric, or the strategy whose best value is the target
    complete: bool
    failed: dict[str, str]  # strategies whose training diverged, and what was said of it
    fine_tuned: bool = False  # whether methods with one model are shown fine-tuned, too
    fairness: bool = False  # whether the table says how unequal clients are

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
        private = any(r.summary.get("privacy") for found in self.results.values() for r in found)
        if isinstance(self.target, float):
            share, value = metric.text(self.target), f"{metric.name} {self.target:g}"
            goal = f"s to {share if metric.share else value}"
        else:
            goal = f"s to best of {self.target}"
        table = []
        for label, found in self.rows().items():
            each = figures(found)
            table.append(
                {
                    "strategy": label,
                    "handed": spread(each["handed"], metric),
                    "best": spread([self._best(r) for r in found], metric),
                    "adapted": spread(each["adapted"], metric, none="-"),
                    "worst 10%": spread(each["worst10"], metric, none="-"),
                    **(self._fairness_of(label) if self.fairness else {}),
                    "seconds": spread(each["seconds"]),
                    goal: spread(self._times(found)),
                    **of_clusters(found, clustered),
                    **({"epsilon": spread(each["epsilon"], none="-")} if private else {}),
                    "messages": spread(each["messages"], digits=0),
                    "MB uploaded": spread(each["uploaded_mb"], none="-"),
                }
            )
        return table

    def _times(self, found: Sequence[RunResult]) -> list[float | None]:
        """Until each run reaches the target."""
        return [result.time_to(self.target_of(index)) for index, result in enumerate(found)]

    def numbers(self) -> list[dict[str, Any]]:
        """The table, and more, in numbers alone: means over seeds, and standard deviations."""
        rows = []
        for label, found in self.rows().items():
            times = self._times(found)
            columns: dict[str, Sequence[float | None]] = {
                **figures(found),
                **self.gains_of(label),
                "target": [self.target_of(index) for index in range(len(found))],
                "seconds_to_target": times,
            }
            about = {"strategy": label, "metric": self.metric.name, "seeds": len(found)}
            reached = sum(time is not None for time in times)
            rows.append(about | numbers(columns) | {"reached": reached})
        return rows

    def gains_of(self, label: str) -> dict[str, list[float | None]]:
        """What clients gain over local training alone, one value for each seed; nothing, if there
        is no row of that."""
        alone = next((r for name, r in self.results.items() if is_alone(name)), None)
        if alone is None or is_alone(label):
            return {}
        return by_column([gains(*pair) for pair in zip(self.rows()[label], alone, strict=True)])

    def _fairness_of(self, label: str) -> dict[str, str]:
        metric, found, each = self.metric, self.rows()[label], figures(self.rows()[label])
        gained = self.gains_of(label)
        tested = len(known(found[0].clients, metric.name))
        better, worse = (
            f"{spread(gained[name], digits=0)} of {tested}" if gained else "-"
            for name in ("better_off", "worse_off")
        )
        return {
            "std over clients": spread(each["client_std"], metric, none="-"),
            "best 10%": spread(each["best10"], metric, none="-"),
            "better off than alone": better,
            "worse off": worse,
        }

    def frame(self) -> Any:
        """`numbers` as a pandas DataFrame; where pandas is not installed, as they are."""
        return as_frame(self.numbers())

    def __repr__(self) -> str:
        runs = [result for found in self.results.values() for result in found]
        about = runs[0].summary["federation"] if runs else "nothing"
        end = "" if self.complete else ", interrupted"
        return f"<Comparison of {', '.join(self.results)} on {about}: {len(runs)} runs{end}>"

    def _repr_html_(self) -> str:
        return html_table(self.table())

    def summaries(self) -> list[dict[str, Any]]:
        """Every run's result.json, and what it would be after fine-tuning."""
        return [result.summary for found in self.rows().values() for result in found]


def is_alone(label: str) -> bool:
    """Whether that row is local training without any communication."""
    return label.partition(":")[0] == "standalone"


def worth_tuning(result: RunResult) -> bool:
    """Whether clients are handed one and the same model, or one that is made for fine-tuning."""
    strategy = STRATEGIES[result.summary["strategy"]]
    assert isinstance(strategy, type) and issubclass(strategy, Strategy)
    return strategy.to_fine_tune or (
        strategy.single_model and not strategy.family.endswith("personalised")
    )


def compare(
    strategies: Sequence[str | Strategy],
    settings: Mapping[str, Any],
    folder: Path | None,
    *,
    seeds: Sequence[int] = (0,),
    target: str | None = None,
    fine_tuned: bool = False,
    references: bool = False,
    fairness: bool = False,
    watch: Watch | None = None,
    callbacks: Sequence[Callback] = (),
    federation: Federation | None = None,
    model: Model | None = None,
) -> Comparison:
    """Run every strategy with every seed; what the folder already holds is not run again. Without a
    folder, nothing is written. `federation`, `model`: objects, if the settings do not name them.

    `fine_tuned`: methods with one model have a second row, for what clients have after fine-tuning
    it, with the time that this takes. `references`: standalone and majority are rows, too.
    `fairness`: the table says how unequal clients are, and who is better off than alone.
    An interrupt ends the comparison after the run that it stopped; calling this again continues. A
    strategy whose training diverges is left out.
    """
    chosen: dict[str, Strategy | None] = {}
    for each in (*strategies, *(REFERENCES if references else ())):
        given = isinstance(each, Strategy)
        label = spelled(STRATEGIES, STRATEGIES.describe(each)) if given else str(each)
        chosen[label] = each if isinstance(each, Strategy) else None
    labels = list(chosen)
    if not labels:
        raise PolytempoError("name at least one strategy; see `polytempo strategies`")
    configs = {
        (label, seed): described(
            {**settings, "strategy": label, "seed": seed}, "compare", federation, model, strategy
        )
        for seed in seeds
        for label, strategy in chosen.items()
    }
    if fine_tuned and not next(iter(configs.values())).adapt_epochs:
        raise PolytempoError("--fine-tuned needs epochs of fine-tuning: --adapt-epochs 5")
    results: dict[str, list[RunResult]] = {label: [] for label in labels}
    failed: dict[str, str] = {}
    complete = True
    load: Load = LastFederation() if federation is None else lambda config: federation
    first = next(iter(configs.values()))
    metric = first.problem_on(load(first)).metrics[0]
    goal = _goal(target, labels, metric)
    for (label, seed), config in configs.items():
        if label in failed:
            continue
        place = None if folder is None else folder / slug(label) / f"seed{seed}"
        told = [*([watch(label, seed)] if watch else []), *callbacks]
        try:
            result = settle(config, place, load, told, model, chosen[label])
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
    comparison = Comparison(finished, about, goal, complete, failed, fine_tuned, fairness)
    if complete and finished and folder is not None:
        _write(folder, comparison, settings, first.plots)
    return comparison


def settle(
    config: RunConfig,
    place: Path | None,
    load: Load,
    callbacks: Sequence[Callback] = (),
    model: Model | None = None,
    strategy: Strategy | None = None,
) -> RunResult:
    """The result of a run: read from the folder, resumed there, or run from the start; its models
    are in the folder. A folder with other settings is refused. Without a folder, run in memory.
    `model`, `strategy`: objects, if the settings do not say how to make them."""
    config = of_comparison(config, strategy)
    federation, strategy = load(config), copy.copy(strategy)
    if place is None:
        made = strategy or config.make("strategy")
        return in_memory(config, federation, model or config.model, made, callbacks)
    given: Given = {"federation": federation, "model": model, "strategy": strategy}
    if holds_run(place):
        result = _continue(place, config, callbacks, given)
    else:
        result = run(config, place, callbacks=callbacks, **given)
    rows, made_again = result.clients, lambda: restored(place, **given)
    return replace(result, simulator=None, extensions=(), rows=rows, restore=made_again)


def _continue(
    place: Path, config: RunConfig, callbacks: Sequence[Callback], given: Given
) -> RunResult:
    found = read_config(place / "config.toml")
    strategy, federation = given["strategy"], given["federation"]
    wanted = resolve(config, federation, strategy)
    name = difference(wanted, found, (*EXECUTION, "events"), strategy=strategy)
    if name is not None:
        raise PolytempoError(
            f"{place} was run with {name} = {found.get(name)!r}, but now it is "
            f"{wanted.settings().get(name)!r}; choose another --out or delete the folder"
        )
    if (place / "result.json").exists():
        result = read_result(place)
        if result.summary["complete"]:
            return result
    return resume(
        place,
        workers=config.workers,
        log=config.log,
        plots=config.plots,
        callbacks=callbacks,
        **given,
    )


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
    return [key for key in clusters.FIGURES if any(s.get(key) is not None for s in summaries)]


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


def _write(folder: Path, comparison: Comparison, settings: Mapping[str, Any], plots: str) -> None:
    """summary.csv, results.json, the plots and the report."""
    table, metric = comparison.table(), comparison.metric
    write_table(folder / "summary.csv", comparison.numbers())
    text = json.dumps(comparison.summaries(), indent=2) + "\n"
    replace_text(folder / "results.json", text)
    if not can_plot():
        return
    curves = {label: [r.curve() for r in found] for label, found in comparison.results.items()}
    against = {
        "time": "simulated time",
        "updates": "updates folded: the same amount of training",
        "messages": "models sent, in whichever direction",
    }
    images = []
    for x, what in against.items():
        draw = partial(plot_curves, curves, metric, x=x)
        path = in_formats(draw, folder / f"{metric.name}_{x}.png", plots)
        images.append((f"{metric.heading} against {what}", path))
    rows = [row for found in comparison.results.values() for r in found for row in r.history]
    if metric.name != LOSS.name and all(row.get("loss") is not None for row in rows):
        losses = {label: [r.curve("loss") for r in x] for label, x in comparison.results.items()}
        draw = partial(plot_curves, losses, LOSS)
        path = in_formats(draw, folder / "loss_time.png", plots)
        images.append(("Loss on the test samples against simulated time", path))
    spread = {
        label: [known(result.clients, metric.name).tolist() for result in found]
        for label, found in comparison.rows().items()
    }
    if all(values for lists in spread.values() for values in lists):
        draw = partial(plot_distribution, spread, metric)
        path = in_formats(draw, folder / "distribution.png", plots)
        images.append(("How clients differ: sorted, and as boxes; all seeds together", path))
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
