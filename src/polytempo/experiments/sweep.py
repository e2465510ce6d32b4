"""Every combination of some values of settings, with several seeds: which is best, and is it more
than chance?"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NotRequired, TypedDict

from polytempo.core.errors import Diverged, PolytempoError, nearest
from polytempo.data import Federation
from polytempo.experiments.about import origin, read_about
from polytempo.experiments.callbacks import Callback
from polytempo.experiments.compare import settle, shared_settings
from polytempo.experiments.config import FEDERATION, RunConfig
from polytempo.experiments.folders import slug
from polytempo.experiments.grid import Grid, Values, label_of, points_of, with_values, word
from polytempo.experiments.jobs import Order, Reporting, Watch, carry_out_all
from polytempo.experiments.result import RunResult
from polytempo.experiments.result_folder import can_plot, read_result
from polytempo.experiments.rows import as_frame, write_table
from polytempo.experiments.run import restored
from polytempo.experiments.run_settings import described
from polytempo.experiments.significance import holm, paired
from polytempo.experiments.tables import figures, numbers, spread
from polytempo.experiments.world import LastFederation
from polytempo.files import replace_text
from polytempo.models import Model
from polytempo.report import html_table, in_formats, plot_curves, write_html
from polytempo.report.intervals import IN_WORDS, Interval

Progress = Callable[[int], AbstractContextManager[Watch]]  # given the updates of all runs
FIGURES = ("handed", "best", "adapted", "worst10")  # that can be tested
_DRAWN = 12  # points whose curves can be told apart


# -- the outcome -----------------------------------------------------------------------------------


@dataclass(frozen=True, repr=False)
class Sweep:
    """Results at each point of a grid, one for each seed.

    baseline: values that each point is tested against: that with these values, and otherwise its
        own. figure: what is tested. interval: how tables show the spread over seeds.
    """

    points: list[Values]
    results: list[list[RunResult]]
    complete: bool = True
    failed: Mapping[str, str] | None = None  # points whose training diverged, and what was said
    baseline: Mapping[str, Any] | None = None
    figure: str = "handed"
    interval: Interval = "std"
    trials: Sweep | None = None  # of the search that has found the point, on validation samples

    def tests(self) -> list[dict[str, float | None]]:
        """Difference from the baseline, p value of the paired t-test over seeds, and the same
        corrected for the number of tests, for each point; nothing for the baseline itself."""
        if self.baseline is None:
            return [{} for _ in self.points]
        index = {label_of(point): number for number, point in enumerate(self.points)}
        found: list[dict[str, float | None]] = []
        for point, mine in zip(self.points, self.results, strict=True):
            other = index.get(label_of({**point, **self.baseline}))
            blank: dict[str, float | None] = {"difference": None, "p": None}
            if other is not None and self.points[other] is not point:
                theirs = self.results[other]
                values, base = (figures(runs)[self.figure] for runs in (mine, theirs))
                same = mine[0].metric == theirs[0].metric
                if same and None not in values and None not in base:
                    blank["difference"], blank["p"] = paired(values, base)  # type: ignore[arg-type]
            found.append(blank)
        for row, p in zip(found, holm([row["p"] for row in found]), strict=True):
            row["p_holm"] = p
        return found

    def numbers(self) -> list[dict[str, Any]]:
        """One row per point: its values, and every figure's mean, standard deviation and half the
        width of its 95% confidence interval over seeds."""
        rows = []
        for point, found, test in zip(self.points, self.results, self.tests(), strict=True):
            about = {name: _plain(value) for name, value in point.items()}
            about |= {"metric": found[0].metric.name, "seeds": len(found)}
            rows.append(about | numbers(figures(found), intervals=True) | test)
        return rows

    def runs(self) -> list[dict[str, Any]]:
        """One row per run: its values, seed and figures."""
        rows = []
        for point, found in zip(self.points, self.results, strict=True):
            about = {name: _plain(value) for name, value in point.items()}
            columns = figures(found)
            for number, result in enumerate(found):
                each = {name: values[number] for name, values in columns.items()}
                rows.append({**about, "seed": result.seed, "metric": result.metric.name, **each})
        return rows

    def table(self) -> list[dict[str, str]]:
        """One row per point, for people."""
        rows = []
        for point, found, test in zip(self.points, self.results, self.tests(), strict=True):
            metric, each = found[0].metric, figures(found)
            row = {name: word(value) for name, value in point.items()}
            for name, column in zip(
                FIGURES, ("handed", "best", "adapted", "worst 10%"), strict=True
            ):
                row[column] = spread(each[name], metric, none="-", interval=self.interval)
            row["seconds"] = spread(each["seconds"], none="-", interval=self.interval)
            if self.baseline is not None:
                apart, p = test["difference"], test["p_holm"]
                row["difference"] = "-" if apart is None else _signed(metric.share, apart)
                row["p"] = "-" if p is None else f"{p:.2g}"
            rows.append(row)
        return rows

    def legend(self) -> str:
        """What the table says."""
        seeds = len(self.results[0]) if self.results else 0
        apart = IN_WORDS[self.interval]
        text = f"mean ± {apart} over {seeds} seeds" if seeds > 1 else "one seed"
        if self.trials is not None:
            tried = len(self.trials.points) + len(self.trials.failed or {})
            text = (
                f"the best of {tried} points by {self.figure} on validation samples, taken from "
                f"the training samples; its figures are on the test samples, {text}"
            )
        if self.baseline is not None:
            text += (
                f"; difference of {self.figure} from {label_of(self.baseline)}, and p of the "
                "paired t-test over seeds, corrected for the number of tests (Holm)"
            )
        return text

    def best(self, figure: str = "handed") -> Values:
        """The values of the point with the best mean of that figure."""
        if figure not in FIGURES:
            raise PolytempoError(f"sweep: no figure {figure!r}{nearest(figure, FIGURES)}")
        means = [numbers(figures(found)).get(figure) for found in self.results]
        known = [(mean, index) for index, mean in enumerate(means) if mean is not None]
        if not known:
            raise PolytempoError(f"sweep: no run has a figure {figure!r}")
        wanted = self.results[0][0].metric.best(mean for mean, _ in known)
        return self.points[next(index for mean, index in known if mean == wanted)]

    def frame(self) -> Any:
        """`numbers` as a pandas DataFrame; where pandas is not installed, as they are."""
        return as_frame(self.numbers())

    def __repr__(self) -> str:
        count, end = sum(map(len, self.results)), "" if self.complete else ", interrupted"
        over = ", ".join(self.points[0]) if self.points else "nothing"
        return f"<Sweep over {over}: {len(self.points)} points, {count} runs{end}>"

    def _repr_html_(self) -> str:
        return html_table(self.table()) + f"<p>{self.legend()}</p>"


def _plain(value: Any) -> Any:
    return value if isinstance(value, int | float) and not isinstance(value, bool) else word(value)


def _signed(share: bool, value: float) -> str:
    return f"{100 * value:+.1f}%" if share else f"{value:+.4g}"


# -- carrying it out -------------------------------------------------------------------------------


class How(TypedDict):
    """What a sweep and a search are told alike."""

    figure: str
    interval: Interval
    jobs: int
    progress: Progress
    callbacks: NotRequired[Sequence[Callback]]


@dataclass(frozen=True)
class Run:
    """A run that is wanted: the number of its point, its seed, and where it is kept."""

    point: int
    seed: int
    label: str
    config: RunConfig
    place: Path | None


def sweep(
    grid: Grid,
    settings: Mapping[str, Any],
    folder: Path | None,
    *,
    seeds: Sequence[int] = (0,),
    baseline: Mapping[str, Any] | None = None,
    figure: str = "handed",
    interval: Interval = "std",
    jobs: int = 1,
    progress: Progress,
    callbacks: Sequence[Callback] = (),
    federation: Federation | None = None,
    model: Model | None = None,
) -> Sweep:
    """Run every combination of the grid's values with every seed; what the folder already holds is
    not run again. Without a folder, nothing is written. A point whose training diverges is left
    out. An interrupt ends the sweep; calling this again continues."""
    points = points_of(grid)
    _check_baseline(baseline, points)
    check(grid, figure, folder, jobs, federation, model, callbacks)
    runs = list(runs_of(points, settings, folder, seeds, federation, model))
    updates = sum(run.config.updates for run in runs if not is_done(run.place))
    with progress(updates) as watch:
        found = carry_out(runs, points, seeds, jobs, watch, federation, model, callbacks)
    found = replace(found, baseline=baseline, figure=figure, interval=interval)
    if found.complete and found.points and folder is not None:
        write(folder, found, settings)
    return found


def check(
    names: Collection[str],
    figure: str,
    folder: Path | None,
    jobs: int,
    federation: Federation | None,
    model: Model | None,
    callbacks: Sequence[Callback],
) -> None:
    """What can be wrong whatever the values are."""
    if figure not in FIGURES:
        raise PolytempoError(f"sweep: no figure {figure!r}{nearest(figure, FIGURES)}")
    objects = federation is not None or model is not None or bool(callbacks)
    if jobs > 1 and (folder is None or objects):
        raise PolytempoError(
            "sweep: several runs at once need a folder, data and model by name, and no callbacks, "
            "because each is a process of its own; omit jobs, or give names and out=FOLDER"
        )
    for name in {name.partition(".")[0] for name in names}:
        if (name == "model" and model is not None) or (name in FEDERATION and federation):
            raise PolytempoError(f"grid: {name} is given as an object; name it, or omit it here")


def carry_out(
    runs: Sequence[Run],
    points: Sequence[Values],
    seeds: Sequence[int],
    jobs: int,
    watch: Watch,
    federation: Federation | None,
    model: Model | None,
    callbacks: Sequence[Callback],
) -> Sweep:
    """The points all of whose runs have come to an end, and those that diverged."""
    objects = federation is not None or model is not None or bool(callbacks)
    if objects or any(run.place is None for run in runs):
        results, failed = _here(runs, federation, model, watch, callbacks)
    else:
        results, failed = _in_folders(runs, jobs, watch)
    wanted = range(len(points))
    bad = {number for number in wanted if any(key[0] == number for key in failed)}
    done = [n for n in wanted if n not in bad and all((n, seed) in results for seed in seeds)]
    return Sweep(
        [points[number] for number in done],
        [[results[number, seed] for seed in seeds] for number in done],
        complete=len(done) + len(bad) == len(points),
        failed={label_of(points[key[0]]): why for key, why in failed.items()},
    )


def _check_baseline(baseline: Mapping[str, Any] | None, points: Sequence[Values]) -> None:
    for name, value in (baseline or {}).items():
        known = list(dict.fromkeys(word(point[name]) for point in points if name in point))
        if not known:
            raise PolytempoError(f"baseline: {name} is not in the grid{nearest(name, points[0])}")
        if word(value) not in known:
            near = nearest(word(value), known)
            raise PolytempoError(f"baseline: {name}={word(value)} is not in the grid{near}")


def runs_of(
    points: Sequence[Values],
    settings: Mapping[str, Any],
    folder: Path | None,
    seeds: Sequence[int],
    federation: Federation | None,
    model: Model | None,
) -> Iterator[Run]:
    """Seed by seed: neighbours have the same data."""
    places: dict[Path, str] = {}
    for seed in seeds:
        for number, point in enumerate(points):
            label = label_of(point)
            given = {**with_values(settings, point), "seed": seed}
            config = described(given, f"sweep, {label}", federation, model)
            place = None if folder is None else _place(folder, label)
            if place is not None and places.setdefault(place, label) != label:
                raise PolytempoError(
                    f"sweep: {label} and {places[place]} would have the same folder {place}; "
                    "sweep over them separately"
                )
            where = None if place is None else place / f"seed{seed}"
            yield Run(number, seed, f"{label} seed {seed}", config, where)


def _place(folder: Path, label: str) -> Path:
    return folder / slug(label.replace(" ", "-"))


def is_done(place: Path | None) -> bool:
    if place is None or not (place / "result.json").exists():
        return False
    return bool(read_result(place).summary["complete"])


Outcome = tuple[dict[tuple[int, int], RunResult], dict[tuple[int, int], str]]  # by point and seed


def _here(
    runs: Sequence[Run],
    federation: Federation | None,
    model: Model | None,
    watch: Watch,
    callbacks: Sequence[Callback],
) -> Outcome:
    """One after the other, in this process, with objects that settings cannot name."""
    load = LastFederation() if federation is None else lambda config: federation
    results: dict[tuple[int, int], RunResult] = {}
    failed: dict[tuple[int, int], str] = {}
    for run in runs:
        key = run.point, run.seed
        told = [Reporting(watch(run.label)), *callbacks]
        try:
            result = settle(run.config, run.place, load, told, model)
        except Diverged as error:
            failed[key] = f"{run.label}: {error}"
            continue
        if not result.summary["complete"]:
            break
        results[key] = result
        if result.interrupted:
            break
    return results, failed


def _in_folders(runs: Sequence[Run], jobs: int, watch: Watch) -> Outcome:
    """Several at once, each in a process of its own; the results are in the folders."""
    results: dict[tuple[int, int], RunResult] = {}
    failed: dict[tuple[int, int], str] = {}
    by_place = {run.place: run for run in runs if run.place is not None}
    orders = [Order(run.label, run.config, place) for place, run in by_place.items()]
    for ended in carry_out_all(orders, jobs, watch):
        run = by_place[ended.order.folder]
        if ended.diverged is not None:
            failed[run.point, run.seed] = f"{run.label}: {ended.diverged}"
        elif ended.complete:
            restore = partial(restored, ended.order.folder)
            result = read_result(ended.order.folder)
            results[run.point, run.seed] = replace(result, restore=restore)
    return results, failed


def write(folder: Path, found: Sweep, settings: Mapping[str, Any]) -> None:
    """summary.csv, runs.csv, results.json, and a report with the curves of not too many points."""
    write_table(folder / "summary.csv", found.numbers())
    write_table(folder / "runs.csv", found.runs())
    summaries = [result.summary for each in found.results for result in each]
    replace_text(folder / "results.json", json.dumps(summaries, indent=2) + "\n")
    if not can_plot():
        return
    metric, images = found.results[0][0].metric, []
    same = all(result.metric == metric for each in found.results for result in each)
    if len(found.points) <= _DRAWN and same:
        pairs = zip(found.points, found.results, strict=True)
        curves = {label_of(point): [run.curve() for run in each] for point, each in pairs}
        draw = partial(plot_curves, curves, metric, interval=found.interval)
        plots = str(settings.get("plots", "png"))
        path = in_formats(draw, folder / f"{metric.name}_time.png", plots)
        images.append((f"{metric.heading} against simulated time", path))
    places = [
        _place(folder, label_of(point)) / f"seed{each[0].seed}"
        for point, each in zip(found.points, found.results, strict=True)
    ]
    about = read_about(places[0])
    write_html(
        folder / "report.html",
        title=f"Sweep over {', '.join(found.points[0])}",
        intro=found.legend()[:1].upper() + found.legend()[1:] + ".",
        table=found.table(),
        images=images,
        settings={**settings, **shared_settings(places), **origin(about)},
        command=about.get("command"),
    )
