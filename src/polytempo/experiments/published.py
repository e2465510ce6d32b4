"""Experiments of papers, as TOML files: `papers/<paper>/<table or figure>.toml`.

A file names columns (`data set/split`) and rows (methods), both described in the paper's
`common.toml`, and holds the published figures.
"""

from __future__ import annotations

import tomllib
from collections.abc import Sequence
from importlib.resources import files
from importlib.resources.abc import Traversable
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

from polytempo.core.errors import PolytempoError, nearest
from polytempo.experiments.config import RunConfig, make_config

PAPERS = files("polytempo.experiments") / "papers"
COMMON = "common"
QUICK = (
    "QUICK: scaled down to few clients, samples and updates, to see that everything works. These "
    "figures say nothing about the methods and cannot be compared with the paper's."
)


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Column(_Part):
    """One split of a data set."""

    title: str
    settings: dict[str, Any]


class Dataset(_Part):
    title: str
    settings: dict[str, Any]
    columns: dict[str, Column]
    remarks: tuple[str, ...] = ()
    comparable: bool = True  # False: another data set stands in for the paper's


class Method(_Part):
    """One row: a strategy with its options, and settings of its own if it needs any."""

    label: str
    strategy: str
    settings: dict[str, Any] = {}
    published_as: str | None = None  # the row whose published figures stand beside this one, too
    remark: str | None = None


class Published(_Part):
    """The paper's figures, by row and column."""

    accuracy: dict[str, dict[str, tuple[float, ...]]] = {}  # per cent: mean and, if known, spread
    time: dict[str, dict[str, float]] = {}  # convergence time, as a share of FedAvg's
    sent: dict[str, dict[str, float]] = {}  # models sent to clients, as multiples of FedAsync's


class Experiment(_Part):
    """A table or figure of a paper. Rows and columns are named, and described below."""

    name: str
    title: str
    about: str
    columns: tuple[str, ...]
    rows: tuple[str, ...]
    labels: dict[str, str] = {}  # of rows that are called otherwise here
    plot: Literal["curves", "bars", "tradeoff"] = "curves"
    remarks: tuple[str, ...] = ()
    paper: Published = Published()
    settings: dict[str, Any]
    quick: dict[str, Any]
    datasets: dict[str, Dataset]
    strategies: dict[str, Method]

    def label(self, row: str) -> str:
        return self.labels.get(row, self.strategies[row].label)

    def published(self, row: str, column: str) -> tuple[float, ...] | None:
        """The paper's accuracy: mean and, if known, spread."""
        return self.paper.accuracy.get(self.strategies[row].published_as or row, {}).get(column)

    def column(self, name: str) -> tuple[Dataset, Column]:
        dataset, _, split = name.partition("/")
        return self.datasets[dataset], self.datasets[dataset].columns[split]

    def heading(self, column: str) -> str:
        dataset, split = self.column(column)
        return f"{dataset.title}, {split.title}"

    def config(self, row: str, column: str, seed: int, quick: bool, **more: Any) -> RunConfig:
        """The settings of one run."""
        (dataset, split), method = self.column(column), self.strategies[row]
        scaled = self.quick if quick else {}
        settings = {**self.settings, **dataset.settings, **split.settings, **scaled}
        settings |= {**method.settings, **more, "strategy": method.strategy, "seed": seed}
        return make_config(settings, f"{self.name}, {row}")

    def notes(self, columns: Sequence[str]) -> list[str]:
        """What a reader must know before comparing with the paper."""
        names = dict.fromkeys(column.partition("/")[0] for column in columns)
        methods = [self.strategies[row].remark for row in self.rows]
        return [
            *(remark for name in names for remark in self.datasets[name].remarks),
            *self.remarks,
            *(remark for remark in methods if remark),
        ]


def experiments() -> list[str]:
    """Names of all experiments: `paper/table`."""
    return sorted(
        f"{paper.name}/{file.name.removesuffix('.toml')}"
        for paper in PAPERS.iterdir()
        if paper.is_dir()
        for file in paper.iterdir()
        if file.name.endswith(".toml") and file.name != f"{COMMON}.toml"
    )


def load_experiment(name: str) -> Experiment:
    """The experiment of that name, together with what its paper's `common.toml` says."""
    if name not in experiments():
        raise PolytempoError(f"no experiment is called {name!r}{nearest(name, experiments())}")
    folder = PAPERS / name.partition("/")[0]
    common, own = _read(folder / f"{COMMON}.toml"), _read(PAPERS / f"{name}.toml")
    own["title"] = f"{common.pop('title')}, {own['title']}"
    own["remarks"] = [*own.get("remarks", ()), *common.pop("remarks")]
    if "figures_of" in own:  # the paper's figures are those of another file
        own["paper"] = _read(folder / f"{own.pop('figures_of')}.toml")["paper"]
    return Experiment(name=name, **common, **own)


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
