"""What a run leaves behind: figures, history, models, and the folder with all of it."""

from __future__ import annotations

import csv
import importlib.util
import io
import json
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from polytempo.core.errors import PolytempoError
from polytempo.files import replace_text, replacing
from polytempo.report import (
    Curve,
    plot_accuracy,
    plot_clusters,
    plot_diagnosis,
    plot_graph,
    plot_peers,
    plot_similarity,
    plot_staleness,
    write_html,
)
from polytempo.simulation import Engine, Extension, clusters
from polytempo.simulation.metrics import convergence_time, final_accuracy, models_sent, time_to
from polytempo.training.footprint import peak_memory

CLUSTERS = clusters.FIGURES
SOMETIMES = ("accuracy_newcomers", *CLUSTERS, "diagnosis", "peers")  # null where there is none
TARGETS = (0.5, 0.6, 0.7, 0.8, 0.9, 0.95)
PLOTS: dict[str, tuple[str, Callable[..., Path]]] = {  # of what extensions have to show
    "peers": ("Each peer's accuracy", plot_peers),
    "diagnosis": ("Why the steps are wrong, and who moves the model", plot_diagnosis),
    "clusters": ("Clusters: who belongs where, when", plot_clusters),
    "similarity": ("How alike the server finds clients, over the run", plot_similarity),
    "graph": ("Collaboration graph: who learns from whom", plot_graph),
}


@dataclass
class RunResult:
    """The figures of one run. `summary` is what result.json holds."""

    summary: dict[str, Any]
    history: list[dict[str, Any]]
    simulator: Engine | None = field(default=None, repr=False)  # None when read from a folder
    interrupted: bool = False  # the user asked to stop, perhaps just after the end

    @property
    def accuracy(self) -> float:
        """Mean accuracy of the models that clients are handed (last evaluations), 0 to 1; NaN if
        nothing was trained."""
        found: float | None = self.summary["accuracy"]
        return float("nan") if found is None else found

    @property
    def accuracy_adapted(self) -> float | None:
        """The same after each client has adapted its model locally."""
        found: float | None = self.summary["accuracy_adapted"]
        return found

    def time_to(self, target: float) -> float | None:
        """Simulated seconds until the handed accuracy first reaches `target`; None if never."""
        return time_to(self.history, target)

    def final(self, figure: str = "accuracy") -> float:
        """Mean of that figure over the last evaluations ("accuracy_weighted": over all test
        samples, which for one model is the accuracy on the pooled test set); NaN if there is
        none."""
        found = final_accuracy(self.history, figure)
        return float("nan") if found is None else found

    def curve(self, figure: str = "accuracy") -> Curve:
        return Curve(
            time=[row["time"] for row in self.history],
            rounds=[row["round"] for row in self.history],
            messages=[models_sent(row) for row in self.history],
            accuracy=[row[figure] for row in self.history],
            adapted=self.accuracy_adapted if figure == "accuracy" else None,
            final=final_accuracy(self.history, figure),
            versions=[row["version"] for row in self.history],
        )

    def plot(self, path: str | Path) -> Path:
        """Draw accuracy against simulated time."""
        return plot_accuracy({self.summary["strategy"]: [self.curve()]}, Path(path))

    def model(self, client: int) -> dict[str, Tensor]:
        """The client's model as a state dict, to load into an `nn.Module` of the same kind."""
        if self.simulator is None:
            raise PolytempoError("a result read from a folder holds no models; run it anew")
        space = self.simulator.space
        own = self.simulator.personal(client) if space.personal else None
        space.load(self.simulator.strategy.serve(client), own)
        return {name: value.clone() for name, value in space.module.state_dict().items()}


def summarise(
    simulator: Engine, strategy: Mapping[str, Any], complete: bool, interrupted: bool = False
) -> RunResult:
    """The figures of a run as it stands."""
    history = simulator.history
    last = history[-1]
    sent = simulator.messages
    arrivals = max(1, simulator.round)
    return RunResult(
        {
            "strategy": strategy["name"],
            "options": {key: value for key, value in strategy.items() if key != "name"},
            "seed": simulator.seed,
            "complete": complete,
            "federation": simulator.federation.description,
            "accuracy": final_accuracy(history),
            "accuracy_best": max(row["accuracy"] for row in history[1:] or history),
            "accuracy_weighted": last["accuracy_weighted"],
            "accuracy_std": last["accuracy_std"],
            "accuracy_worst10": last["accuracy_worst10"],
            "accuracy_adapted": last["accuracy_adapted"],
            **dict.fromkeys(SOMETIMES),
            **{k: v for each in simulator.extensions.values() for k, v in each.figures().items()},
            "simulated_time": simulator.time,
            "time_to": {str(target): time_to(history, target) for target in TARGETS},
            "convergence_time": convergence_time(history),
            "arrivals": simulator.round,
            "messages": {
                **sent,
                **{f"{kind}_bytes": size for kind, size in simulator.bytes.items()},
            },
            "staleness_mean": sum(k * v for k, v in simulator.staleness.items()) / arrivals,
            "staleness": {str(k): v for k, v in sorted(simulator.staleness.items())},
            "parameters": simulator.space.size,
            "wall_seconds": dict(simulator.wall),
            "backend": simulator.backend.name,
            "trained_in_vain": simulator.backend.wasted,
            "peak_rss_mb": (peak_memory() + simulator.backend.worker_memory) / 2**20 or None,
            "fingerprint": simulator.fingerprint,
            "version": version("polytempo"),
        },
        history,
        simulator,
        interrupted,
    )


# -- the folder ---------------------------------------------------------------------------------


def write_result(folder: Path, result: RunResult, settings: Mapping[str, Any]) -> None:
    """history.csv, result.json, the plots and the report. Needs matplotlib for the last two."""
    replace_text(folder / "result.json", json.dumps(result.summary, indent=2) + "\n")
    write_table(folder / "history.csv", result.history)
    extensions = list(result.simulator.extensions.values()) if result.simulator else []
    for extension in extensions:
        _write_files(folder, extension)
    if not can_plot():
        return
    images = _plots(folder, result, extensions)
    write_html(
        folder / "report.html",
        title=f"{result.summary['strategy']} on {result.summary['federation']}",
        intro=f"Seed {result.summary['seed']}, {result.summary['arrivals']} updates folded"
        + ("." if result.summary["complete"] else ", interrupted."),
        table=[_figures(result.summary)],
        images=images,
        settings=settings,
    )


def _write_files(folder: Path, extension: Extension) -> None:
    """The tables and arrays that it has to show."""
    for name, rows in extension.tables().items():
        if rows:
            write_table(folder / f"{name}.csv", rows)
    for name, arrays in extension.arrays().items():
        with replacing(folder / f"{name}.npz") as partial, partial.open("wb") as file:
            np.savez_compressed(file, **arrays)


def can_plot() -> bool:
    """Whether matplotlib is there; if not, says how to get it."""
    if importlib.util.find_spec("matplotlib") is not None:
        return True
    warnings.warn('no plots without matplotlib: pip install "polytempo[plots]"', stacklevel=2)
    return False


def _plots(
    folder: Path, result: RunResult, extensions: Sequence[Extension]
) -> list[tuple[str, Path]]:
    images = [("Accuracy against simulated time", result.plot(folder / "accuracy.png"))]
    counts = {int(k): v for k, v in result.summary["staleness"].items()}
    if counts:
        path = plot_staleness(counts, folder / "staleness.png")
        images.append(("Staleness of the updates", path))
    for name, given in ((n, g) for each in extensions for n, g in each.plots().items()):
        caption, draw = PLOTS[name]
        images.append((caption, draw(path=folder / f"{name}.png", **given)))
    return images


def _figures(summary: Mapping[str, Any]) -> dict[str, str]:
    more = {} if summary["clusters"] is None else {"clusters": about_clusters(summary)}
    if summary["staleness"]:
        more["mean staleness"] = f"{summary['staleness_mean']:.1f}"
    return {
        "strategy": summary["strategy"],
        "handed": percent(summary["accuracy"]),
        "best": percent(summary["accuracy_best"]),
        "adapted": percent(summary["accuracy_adapted"]),
        "worst 10%": percent(summary["accuracy_worst10"]),
        **more,
        "simulated time": f"{summary['simulated_time']:.1f} s",
        "messages": str(models_sent(summary["messages"])),
    }


def about_clusters(summary: Mapping[str, Any]) -> str:
    """How many clusters there are and, where true groups are known, how well they fit."""
    number, pure, ari = (summary[key] for key in CLUSTERS)
    fit = "" if ari is None else f" (purity {pure:.2f}, adjusted Rand index {ari:.2f})"
    return f"{number}{fit}"


def percent(share: float | None) -> str:
    return "-" if share is None else f"{100 * share:.1f}%"


def read_result(folder: Path) -> RunResult:
    """A result as `write_result` left it."""
    try:
        summary = json.loads((folder / "result.json").read_text(encoding="utf8"))
        with (folder / "history.csv").open(newline="", encoding="utf8") as file:
            history = [{k: _number(v) for k, v in row.items()} for row in csv.DictReader(file)]
    except (OSError, ValueError) as error:
        raise PolytempoError(f"{folder} holds no readable result: {error}") from error
    return RunResult(summary, history)


def _number(text: str) -> float | int | None:
    if text == "":
        return None
    return int(text) if text.lstrip("-").isdigit() else float(text)


def write_table(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Rows as CSV."""
    text = io.StringIO()
    writer = csv.DictWriter(text, rows[0], lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    replace_text(path, text.getvalue())
