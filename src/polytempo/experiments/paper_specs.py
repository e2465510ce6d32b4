"""Experiments of papers, as TOML files: `papers/<paper>/<table or figure>.toml`.

A setting "none" leaves open what is set for the paper's other experiments.

A file names columns (`data set/split`) and rows (methods), both described in the paper's
`common.toml`, and holds the published figures. A method may have a grid of its own options, or of
settings that the experiment names, such as lr: it is run with every value, and the best counts.
"""

from __future__ import annotations

import itertools
import tomllib
from collections.abc import Mapping, Sequence
from importlib.resources import files
from importlib.resources.abc import Traversable
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

from polytempo.core.errors import PolytempoError, nearest
from polytempo.core.strategy import Strategy
from polytempo.experiments.config import RunConfig, make_config
from polytempo.simulation.metrics import LAST
from polytempo.strategies import STRATEGIES

PAPERS = files("polytempo.experiments") / "papers"
COMMON = "common"
QUICK = (
    "QUICK: scaled down to few clients, samples and updates, to see that everything works. These "
    "figures say nothing about the methods and cannot be compared with the paper's."
)

TUNED = (
    "'Best' is the value of the grid with which the runs shown were made: the one with the best "
    "final accuracy on validation samples, a fifth of each client's training samples, in runs of "
    "their own with the first seed; 'edge': it was the first or last of those that were tried."
)
FURTHER = (
    "As long as the best value is at an end of the grid, one beyond it is tried, up to {} in all."
)


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Column(_Part):
    """One split of a data set."""

    title: str
    settings: dict[str, Any]
    at: tuple[str, str] | None = None  # where it stands in a heat map: x and y
    target: float | None = None  # the accuracy that times are taken to; None: to convergence
    methods: dict[str, dict[str, Any]] = {}  # what rows are told in this column, `strategy` too


class Dataset(_Part):
    title: str
    settings: dict[str, Any]
    columns: dict[str, Column]
    remarks: tuple[str, ...] = ()
    comparable: bool = True  # False: another data set stands in for the paper's
    paper_model: str | None = None  # only with this model can figures be compared; None: with any


class Method(_Part):
    """One row: a strategy with its options, and settings of its own if it needs any."""

    label: str
    strategy: str  # {updates}, {cohorts}: the length of the run, in updates or in cohorts
    settings: dict[str, Any] = {}
    grid: dict[str, tuple[float, ...]] = {}  # options or settings, with the values that are tried
    fine_tuned: bool = False  # what counts is the adapted figure: clients fine-tune the one model
    published_as: str | None = None  # the row whose published figures this one is compared with too
    remark: str | None = None


class Variant(_Part):
    """Another reading of the paper: settings in place of its own, for all or for single data sets,
    methods in place of those of the same name, and how many of the last evaluations count."""

    title: str
    settings: dict[str, Any] = {}
    datasets: dict[str, dict[str, Any]] = {}
    methods: dict[str, Method] = {}
    last: int = LAST
    remarks: tuple[str, ...] = ()


class Published(_Part):
    """The paper's figures, by row and column."""

    accuracy: dict[str, dict[str, tuple[float, ...]]] = {}  # per cent: mean and, if known, spread
    time: dict[str, dict[str, float]] = {}  # convergence time, as a share of FedAvg's
    seconds: dict[str, dict[str, float]] = {}  # to target or convergence, in the paper's unit
    sent: dict[str, dict[str, float]] = {}  # models sent to clients, as multiples of FedAsync's
    # what a fusion does to the accuracy of a fast and of a slow peer, in points
    effects: dict[str, dict[str, tuple[float, float]]] = {}


FIGURES = {  # how a table calls them, and what they are
    "accuracy": ("handed", "mean over clients"),
    "accuracy_weighted": ("pooled", "pooled test set"),
}
Choice = Mapping[str, float]


def spelled(choice: Choice) -> str:
    return ",".join(f"{key}={value:g}" for key, value in choice.items())


class Experiment(_Part):
    """A table or figure of a paper. Rows and columns are named, and described below."""

    name: str
    title: str
    about: str
    columns: tuple[str, ...]
    rows: tuple[str, ...]
    labels: dict[str, str] = {}  # of rows (in a map: of columns) that are called otherwise here
    plot: Literal["curves", "bars", "tradeoff", "heatmap", "clusters"] = "curves"
    axes: tuple[str, str] = ("", "")  # of a heat map
    figure: Literal["accuracy", "accuracy_weighted"] = "accuracy"  # what counts: see FIGURES
    against: tuple[Literal["time", "updates", "versions", "messages"], ...] = ("time",)  # x axes
    grid: dict[str, tuple[float, ...]] = {}  # in place of the methods' own grids
    beyond: int = 4  # values, at most, that are tried beyond the ends of a grid
    in_time_of: str | None = None  # a row: how good are the others when that one's run ends?
    model: str | None = None  # in place of the data sets' own
    updates: int | None = None  # in place of the settings' own; evaluations are as many as before
    remarks: tuple[str, ...] = ()
    paper: Published = Published()
    settings: dict[str, Any]
    quick: dict[str, Any]
    datasets: dict[str, Dataset]
    strategies: dict[str, Method]
    variants: dict[str, Variant] = {}
    variant: str | None = None  # which of them this is; None: as the text says

    @property
    def last(self) -> int:
        """How many evaluations the final figure is the mean of."""
        return self.variants[self.variant].last if self.variant else LAST

    def label(self, row: str) -> str:
        return self.labels.get(row, self.strategies[row].label)

    def published(self, row: str, column: str) -> tuple[float, ...] | None:
        """The paper's accuracy: mean and, if known, spread."""
        return self.paper.accuracy.get(self.strategies[row].published_as or row, {}).get(column)

    def clustered(self, row: str) -> bool:
        """Whether the method has clusters."""
        strategy = STRATEGIES.create(self.strategies[row].strategy.partition(":")[0])
        return type(strategy).clusters is not Strategy.clusters

    def seconds(self, row: str, column: str) -> float | None:
        """The paper's time."""
        return self.paper.seconds.get(self.strategies[row].published_as or row, {}).get(column)

    def column(self, name: str) -> tuple[Dataset, Column]:
        dataset, _, split = name.partition("/")
        return self.datasets[dataset], self.datasets[dataset].columns[split]

    def heading(self, column: str) -> str:
        return f"{self.dataset_title(column.partition('/')[0])}, {self.column(column)[1].title}"

    def dataset_title(self, name: str) -> str:
        title = self.datasets[name].title + (f", {self.model}" if self.model else "")
        title += f", {self.variants[self.variant].title}" if self.variant else ""
        return title + (f", {self.updates:,} updates" if self.updates is not None else "")

    def comparable(self, column: str) -> bool:
        """Whether the paper's figures are of the same data, model and length."""
        dataset, _ = self.column(column)
        model = (self.model or str(dataset.settings.get("model"))).partition(":")[0]
        same = dataset.comparable and dataset.paper_model in (None, model)
        return same and self.updates is None

    def choices(self, row: str, quick: bool) -> Sequence[Choice]:
        """What a row is run with: every combination of its grid (quick: two). One that says
        nothing, if it has no grid."""
        grid = self.strategies[row].grid and (self.grid or self.strategies[row].grid)
        found = [
            dict(zip(grid, values, strict=True)) for values in itertools.product(*grid.values())
        ]
        return found[:2] if quick else found

    def config(
        self,
        row: str,
        column: str,
        seed: int,
        quick: bool,
        choice: Choice | None = None,
        **more: Any,
    ) -> RunConfig:
        """The settings of one run, with a choice of the row's grid (else its strategy's own)."""
        (dataset, split), method = self.column(column), self.strategies[row]
        settings = {**self.settings, **dataset.settings, **split.settings}
        if self.variant:
            variant = self.variants[self.variant]
            settings |= {**variant.settings, **variant.datasets.get(column.partition("/")[0], {})}
        settings |= method.settings
        settings |= {"strategy": method.strategy, **split.methods.get(row, {})}
        settings = {key: value for key, value in settings.items() if value != "none"}
        settings = self.adjusted(settings, quick)
        strategy = filled(str(settings["strategy"]), settings)
        chosen = {key: value for key, value in (choice or {}).items() if key in settings}
        options = {key: value for key, value in (choice or {}).items() if key not in settings}
        if options:
            strategy += ("," if ":" in strategy else ":") + spelled(options)
        settings |= {**chosen, **more, "strategy": strategy, "seed": seed}
        return make_config(settings, f"{self.name}, {row}")

    def adjusted(self, settings: Mapping[str, Any], quick: bool) -> dict[str, Any]:
        """The settings with what was asked for: a quick look, another model, another length (with
        as many evaluations as before)."""
        found = {**settings, **(self.quick if quick else {})}
        if self.model:
            found["model"] = self.model
        if self.updates is not None:
            for end in ("versions", "messages"):
                if found.get(end) is not None:
                    raise PolytempoError(
                        f"{self.name}: its runs also end after {found[end]} {end}, so --updates "
                        "would not say how long they are; omit it"
                    )
            if "eval_every" in found and "updates" in found:
                interval = found["eval_every"] * self.updates / found["updates"]
                found["eval_every"] = max(1, round(interval))
            found["updates"] = self.updates
        return found

    def notes(self, columns: Sequence[str]) -> list[str]:
        """What a reader must know before comparing with the paper."""
        names = dict.fromkeys(column.partition("/")[0] for column in columns)
        methods = [self.strategies[row].remark for row in self.rows]
        tuned = any(self.strategies[row].grid for row in self.rows)
        variant = self.variants[self.variant].remarks if self.variant else ()
        return [
            *variant,
            *(remark for name in names for remark in self.datasets[name].remarks),
            *self.remarks,
            *(remark for remark in methods if remark),
            *([TUNED] if tuned else []),
            *([FURTHER.format(self.beyond)] if tuned and self.beyond else []),
        ]


def filled(strategy: str, settings: Mapping[str, Any]) -> str:
    """The strategy with the length of the run in the places that are left for it."""
    if "{" not in strategy:
        return strategy
    updates, concurrency = settings["updates"], settings["concurrency"]
    return strategy.format(updates=updates, cohorts=max(updates // concurrency, 1))


def experiments() -> list[str]:
    """Names of all experiments: `paper/table`."""
    return sorted(
        f"{paper.name}/{file.name.removesuffix('.toml')}"
        for paper in PAPERS.iterdir()
        if paper.is_dir()
        for file in paper.iterdir()
        if file.name.endswith(".toml") and file.name != f"{COMMON}.toml"
    )


def load_experiment(
    name: str, model: str | None = None, updates: int | None = None, variant: str | None = None
) -> Experiment:
    """The experiment of that name, together with what its paper's `common.toml` says; perhaps in
    another reading, with another model, or of another length."""
    if name not in experiments():
        raise PolytempoError(f"no experiment is called {name!r}{nearest(name, experiments())}")
    folder = PAPERS / name.partition("/")[0]
    common, own = _read(folder / f"{COMMON}.toml"), _read(PAPERS / f"{name}.toml")
    own["title"] = f"{common.pop('title')}, {own['title']}"
    own["remarks"] = [*own.get("remarks", ()), *common.pop("remarks")]
    if "figures_of" in own:  # the paper's figures are those of another file
        own["paper"] = _read(folder / f"{own.pop('figures_of')}.toml")["paper"]
    known = common.get("variants", {})
    if variant is not None and variant not in known:
        raise PolytempoError(f"{name} has no variant {variant!r}{nearest(variant, known)}")
    if variant is not None:
        common["strategies"] |= known[variant].get("methods", {})
    return Experiment(name=name, model=model, updates=updates, variant=variant, **common, **own)


def _read(file: Traversable) -> dict[str, Any]:
    return tomllib.loads(file.read_text(encoding="utf8"))


def choose_columns(experiment: Experiment, dataset: str | None, split: str | None) -> list[str]:
    """The columns of a data set, or of all, perhaps only those of one split."""
    found = list(experiment.columns)
    for wanted, part, what in ((dataset, 0, "data set"), (split, 2, "split")):
        if wanted is not None:
            known = {column.partition("/")[part] for column in found}
            if wanted not in known:
                raise PolytempoError(
                    f"{experiment.name} has no {what} {wanted!r}{nearest(wanted, known)}"
                )
            found = [column for column in found if column.partition("/")[part] == wanted]
    return found


def choose_rows(experiment: Experiment, only: str | None) -> list[str]:
    """All rows, or those of a list with commas."""
    if only is None:
        return list(experiment.rows)
    wanted = [word.strip() for word in only.split(",")]
    for word in wanted:
        if word not in experiment.rows:
            raise PolytempoError(
                f"{experiment.name} has no row {word!r}{nearest(word, experiment.rows)}"
            )
    return [row for row in experiment.rows if row in wanted]
