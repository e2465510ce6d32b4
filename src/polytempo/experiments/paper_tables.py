"""The lines of a reproduced table, and what is said below it: our figures next to the paper's."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from polytempo.core.metric import ACCURACY
from polytempo.experiments.compare import known_of_clusters, of_clusters
from polytempo.experiments.paper_specs import FIGURES, Experiment, spelled
from polytempo.experiments.reproduce import Place, beyond, chosen, final, tried
from polytempo.experiments.result import RunResult
from polytempo.experiments.tables import messages, spread
from polytempo.simulation.metrics import final_value

Results = Mapping[str, Sequence[RunResult]]  # by row, one for each seed


def legend(experiment: Experiment) -> str:
    """What the columns of the tables mean."""
    if experiment.figure == "accuracy_weighted":
        return (
            "Pooled: accuracy of the server's model on the test samples of all clients together "
            f"(last {experiment.last} evaluations). Paper: its accuracy. Diff.: pooled minus "
            "paper, in points. Steps: how often the server has changed its model. Uploads: that it "
            "got for it."
        )
    more = ""
    if experiment.paper.accuracy:
        more += " Paper: its accuracy. Diff.: handed minus paper, in points."
    if experiment.in_time_of:
        other = experiment.label(experiment.in_time_of)
        more += f" In time: handed, when the run of {other} has ended."
    if any(experiment.column(column)[1].target for column in experiment.columns):
        more += " To ...%: simulated seconds until the handed accuracy first reaches that."
    if experiment.paper.seconds:
        more += " Paper's time: the same, or to convergence, in the paper's own unit."
    if any(experiment.clustered(row) for row in experiment.rows):
        more += (
            " Clusters: how many there are at the end; in none: clients that are in none; purity "
            "and (adjusted) rand index: how well the others' fit the true groups."
        )
    return (
        "Handed: accuracy of the models that clients are handed, mean over clients (last "
        f"{experiment.last} evaluations). By sample: the same with every test sample counting "
        "once. Adapted: handed, after local training of that model. Time: simulated seconds to "
        "convergence. Messages: models sent either way." + more
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
        last = experiment.last
        ours = spread([r.final(experiment.figure, last) for r in found], ACCURACY) if found else "-"
        line = {"method": experiment.label(row), FIGURES[experiment.figure][0]: ours}
        if not pooled:
            weighted = [final_value(r.history, "accuracy_weighted", last) for r in found]
            line["by sample"] = spread(weighted, ACCURACY, none="-") if found else "-"
            line["adapted"] = _share(found, "accuracy_adapted")
        if experiment.in_time_of:
            line["in time"] = _in_time(found, results.get(experiment.in_time_of, ()), last)
        if experiment.paper.accuracy:
            line["paper"] = " ± ".join(f"{each:.2f}" for each in published) if published else "-"
            line["diff."] = "-"
        if found and published and place.comparable(column):
            line["diff."] = f"{100 * final(place, found) - published[0]:+.1f}"
        if any(experiment.strategies[each].grid for each in experiment.rows):
            line["best"] = _best(place, row, column)
        if pooled:
            line["steps"] = _last(found, "version")
            line["uploads"] = _last(found, "updates")
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


def _in_time(found: Sequence[RunResult], base: Sequence[RunResult], last: int) -> str:
    """The handed accuracy when the other row's run has ended (last evaluations until then), over
    the seeds that both have."""
    ends = {r.summary["seed"]: r.history[-1]["time"] for r in base}
    values = [
        final_value([row for row in r.history if row["time"] <= end], "accuracy", last)
        for r in found
        if (end := ends.get(r.summary["seed"])) is not None
    ]
    return spread(values, ACCURACY, none="-") if values else "-"


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


def _best(place: Place, row: str, column: str) -> str:
    """The value of the grid that was chosen."""
    best = chosen(place, row, column)
    if not best:
        return "-"
    values = [choice for _, choice in tried(place, row, column)]
    edge = len(values) > 1 and beyond(place, row, column, values) is not None
    return spelled(best).replace(",", ", ") + " (edge)" * edge


def _last(found: Sequence[RunResult], key: str) -> str:
    return spread([r.history[-1][key] for r in found], digits=0) if found else "-"


def _share(found: Sequence[RunResult], key: str) -> str:
    return spread([r.summary[key] for r in found], ACCURACY, none="-") if found else "-"


def _times(found: Sequence[RunResult]) -> str:
    times = [r.summary["convergence_time"] for r in found]
    return spread(times, none="-") if found else "-"


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
