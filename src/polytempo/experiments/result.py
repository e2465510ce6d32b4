"""What a run leaves behind: figures, history, models, and the folder with all of it."""

from __future__ import annotations

import csv
import importlib.util
import io
import json
import warnings
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from html import escape
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor

from polytempo.core.errors import PolytempoError, nearest
from polytempo.core.metric import MetricInfo, finite
from polytempo.experiments.about import origin, read_about
from polytempo.files import replace_text, replacing
from polytempo.report import (
    Curve,
    html_table,
    in_formats,
    plot_clusters,
    plot_curves,
    plot_diagnosis,
    plot_distribution,
    plot_graph,
    plot_peers,
    plot_similarity,
    plot_staleness,
    write_html,
)
from polytempo.simulation import Engine, Extension, clusters, guards
from polytempo.simulation.each_client import known
from polytempo.simulation.metrics import LAST, convergence_time, final_value, models_sent, time_to
from polytempo.training import PERSONAL, Problem
from polytempo.training.footprint import peak_memory

CLUSTERS = clusters.FIGURES
SOMETIMES = (*CLUSTERS, "diagnosis", "peers", *guards.FIGURES)  # null where there is none
FINE_TUNED = " + fine-tuning"  # what the names of such rows end with
TARGETS = (0.5, 0.6, 0.7, 0.8, 0.9, 0.95)  # of shares that should be high
PLOTS: dict[str, tuple[str, Callable[..., Path]]] = {  # of what extensions have to show
    "peers": ("Each peer by itself", plot_peers),
    "clients": ("Each client by itself", plot_peers),
    "diagnosis": ("Why the steps are wrong, and who moves the model", plot_diagnosis),
    "clusters": ("Clusters: who belongs where, when", plot_clusters),
    "similarity": ("How alike the server finds clients, over the run", plot_similarity),
    "graph": ("Collaboration graph: who learns from whom", plot_graph),
}


@dataclass(repr=False)
class RunResult:
    """The figures of one run. `summary` is what result.json holds; each of its figures is also an
    attribute: `result.mse_best`, `result.simulated_time`.

    What the metric is depends on the problem: `value` and `adapted` are its figures under any
    name.
    """

    summary: dict[str, Any]
    history: list[dict[str, Any]]
    simulator: Engine | None = None  # None when read from a folder
    extensions: Sequence[Extension] = ()
    interrupted: bool = False  # the user asked to stop, perhaps just after the end
    rows: list[dict[str, Any]] | None = None  # of clients, if read
    restore: Callable[[], Engine] | None = None  # makes the simulator from the run's folder

    def __getattr__(self, name: str) -> Any:
        summary = self.__dict__.get("summary", {})  # copying asks before there is one
        if name in summary:
            return summary[name]
        metric = f"; the metric of this run is {summary['metric']['name']}" if summary else ""
        raise AttributeError(f"a run has no figure {name!r}{metric}{nearest(name, summary)}")

    @property
    def metric(self) -> MetricInfo:
        """What the run is judged by."""
        return MetricInfo(**self.summary["metric"])

    @property
    def value(self) -> float:
        """The metric of the models that clients are handed, mean over clients (last evaluations);
        NaN if nothing was trained."""
        return self.final()

    @property
    def adapted(self) -> float | None:
        """The same after each client has adapted its model locally."""
        found: float | None = self.summary[f"{self.metric.name}_adapted"]
        return found

    @property
    def accuracy(self) -> float:
        """`value` where the metric is the accuracy, from 0 to 1."""
        found: float | None = self.__getattr__("accuracy")
        return float("nan") if found is None else found

    def fine_tuned(self) -> RunResult | None:
        """The run as one of a method whose clients fine-tune what they are handed: the adapted
        figures take the place of the handed ones, and every evaluation comes later by the time that
        this takes. None if the run has no adapted figures."""
        name, later = self.metric.name, self.summary.get("adaptation_time")
        if later is None or self.adapted is None:
            return None
        worst = f"{name}_adapted_worst10"
        history = [
            {
                **row,
                "time": row["time"] + later,
                name: row[f"{name}_adapted"],
                f"{name}_worst10": row.get(worst),
            }
            for row in self.history
            if row[f"{name}_adapted"] is not None
        ]
        summary = {
            **self.summary,
            "strategy": self.summary["strategy"] + FINE_TUNED,
            name: final_value(history, name),
            f"{name}_best": self.metric.best(row[name] for row in history),
            f"{name}_worst10": history[-1][f"{name}_worst10"],
            f"{name}_weighted": None,
            f"{name}_std": self.summary.get(f"{name}_adapted_std"),
            f"{name}_best10": None,
            "simulated_time": self.summary["simulated_time"] + later,
            "time_to": {
                target: time_to(history, self.metric, float(target))
                for target in self.summary["time_to"]
            },
            "convergence_time": None,
        }
        clients = [{**row, name: row[f"{name}_adapted"]} for row in self.clients]
        return replace(self, summary=summary, history=history, rows=clients)

    @property
    def clients(self) -> list[dict[str, Any]]:
        """Each client by itself, as in clients.csv: what it has, how it trained, how good its model
        was at the last evaluation."""
        if self.rows is not None:
            return self.rows
        tables = (extension.tables() for extension in self.all_extensions())
        found = next((each["clients"] for each in tables if "clients" in each), ())
        return [dict(row) for row in found]

    def time_to(self, target: float) -> float | None:
        """Simulated seconds until the handed models' metric is first as good as `target`; None if
        never."""
        return time_to(self.history, self.metric, target)

    def final(self, figure: str | None = None, last: int = LAST) -> float:
        """Mean of that figure over the last evaluations, by default of the metric
        ("accuracy_weighted": over all test samples, which for one model is the accuracy on the
        pooled test set); NaN if there is none."""
        found = final_value(self.history, figure or self.metric.name, last)
        return float("nan") if found is None else found

    def curve(self, figure: str | None = None) -> Curve:
        main = self.metric.name
        figure = figure or main
        return Curve(
            time=[row["time"] for row in self.history],
            updates=[row["updates"] for row in self.history],
            messages=[models_sent(row) for row in self.history],
            values=[row[figure] for row in self.history],
            adapted=self.adapted if figure == main else None,
            final=final_value(self.history, figure),
            versions=[row["version"] for row in self.history],
        )

    @property
    def clock(self) -> str:
        """What the run's times are: those of a fleet are real."""
        return "time" if "seconds" in self.summary else "simulated time"

    @property
    def seconds_taken(self) -> float:
        """On that clock."""
        found: float = self.summary.get("seconds", self.summary["simulated_time"])
        return found

    def all_extensions(self) -> Sequence[Extension]:
        """What watched the run, if it is at hand."""
        simulator = self.simulator
        return self.extensions if simulator is None else list(simulator.extensions.values())

    def plot(self, path: str | Path) -> Path:
        """Draw the metric against time, into a .png or .svg file, or a .pdf sized for a paper."""
        curves = {self.summary["strategy"]: [self.curve()]}
        return plot_curves(curves, self.metric, Path(path), clock=f"{self.clock} (s)")

    def model(self, client: int, adapted: bool = False) -> dict[str, Tensor]:
        """The client's model as a state dict, to load into an `nn.Module` of the same kind: as it
        is handed it, or after it has fine-tuned it (`adapted`). The part of the model that stays
        with the client is in it. What the client adds to its outputs (a label prior) is in the
        biases of the last layer."""
        engine = self._engine()
        clients = engine.federation.clients
        if not 0 <= client < clients:
            raise PolytempoError(f"there is no client {client}: they are 0 to {clients - 1}")
        layout = engine.layout
        if adapted:
            vector, memory = engine.adapted_model(client)
            own = memory[PERSONAL] if layout.personal else None
        else:
            vector = engine.in_use(client)
            own = engine.personal(client) if layout.personal else None
        return layout.state(vector, own, engine.offset(client))

    def _engine(self) -> Engine:
        """The run itself: at hand, or from the checkpoint in its folder."""
        if self.simulator is None:
            if self.restore is None:
                raise PolytempoError(
                    "this result holds no models; read them from the folder of the run: "
                    "polytempo.load(FOLDER)"
                )
            self.simulator = self.restore()
        return self.simulator

    def save_model(self, path: str | Path, client: int, adapted: bool = False) -> Path:
        """Write the client's model to a file: .safetensors, or .pt, a state dict that
        `torch.load` reads."""
        target = Path(path).expanduser()
        if target.suffix not in (".safetensors", ".pt", ".pth"):
            raise PolytempoError(
                f"cannot write a model to {str(path)!r}; end the name in .safetensors or .pt"
            )
        state = self.model(client, adapted)
        target.parent.mkdir(parents=True, exist_ok=True)
        with replacing(target) as partial:
            if target.suffix == ".safetensors":
                about = {
                    "strategy": str(self.summary["strategy"]),
                    "federation": str(self.summary["federation"]),
                    "client": str(client),
                    "adapted": str(adapted).lower(),
                }
                save_file({k: v.contiguous() for k, v in state.items()}, str(partial), about)
            else:
                torch.save(state, partial)
        return target

    def frame(self, table: str = "history") -> Any:
        """The `history`, or the `clients`, as a pandas DataFrame; where pandas is not installed, as
        a list of dictionaries."""
        if table not in ("history", "clients"):
            near = nearest(table, ("history", "clients"))
            raise PolytempoError(f"a result has no table {table!r}{near}")
        return as_frame(self.history if table == "history" else self.clients)

    def __dir__(self) -> list[str]:
        return [*super().__dir__(), *self.summary]

    def __repr__(self) -> str:
        if not self.summary.keys() >= {"strategy", "arrivals"}:
            return "<RunResult>"
        figures = _figures(self)
        words = [f"{key} {figures[key]}" for key in ("handed", "adapted", self.clock)]
        end = "" if self.summary["complete"] else ", interrupted"
        return (
            f"<RunResult {self.summary['strategy']} on {self.summary['federation']}: "
            f"{self.metric.name} {', '.join(words)}, {self.summary['arrivals']} updates{end}>"
        )

    def _repr_html_(self) -> str:
        about = f"{self.summary['federation']}; seed {self.summary['seed']}; {self.metric.label}"
        return f"<p>{escape(about)}</p>{html_table([_figures(self)])}"


def as_frame(rows: Sequence[Mapping[str, Any]]) -> Any:
    """Rows as a pandas DataFrame; as they are, where pandas is not installed."""
    try:
        import pandas
    except ImportError:
        return [dict(row) for row in rows]
    return pandas.DataFrame.from_records([dict(row) for row in rows])


@dataclass(frozen=True)
class Account:
    """What the figures of a run are made of, whether it was simulated or is a real fleet's."""

    about: str  # its federation
    seed: int
    problem: Problem
    history: list[dict[str, Any]]
    time: float
    real: bool  # seconds, not simulated ones
    updates: int
    messages: Mapping[str, int]
    bytes: Mapping[str, int]
    staleness: Counter[int]
    parameters: int
    wall: Mapping[str, float]
    backend: str
    wasted: int = 0
    memory: float = 0.0  # bytes of workers
    fingerprint: str = ""
    adaptation_time: float | None = None
    stopped: str | None = None  # why it ended early
    extensions: Sequence[Extension] = ()


def summarise(
    simulator: Engine, strategy: Mapping[str, Any], complete: bool, interrupted: bool = False
) -> RunResult:
    """The figures of a simulation as it stands."""
    account = Account(
        about=simulator.federation.description,
        seed=simulator.seed,
        problem=simulator.problem,
        history=simulator.history,
        time=simulator.time,
        real=False,
        updates=simulator.updates,
        messages=simulator.messages,
        bytes=simulator.bytes,
        staleness=simulator.staleness,
        parameters=simulator.layout.size,
        wall=simulator.wall,
        backend=simulator.backend.name,
        wasted=simulator.backend.wasted,
        memory=simulator.backend.worker_memory,
        fingerprint=simulator.fingerprint,
        adaptation_time=simulator.adaptation_time(),
        stopped=simulator.stopped,
        extensions=list(simulator.extensions.values()),
    )
    result = result_of(account, strategy, complete, interrupted)
    result.simulator, result.extensions = simulator, ()  # they are the simulator's
    return result


def result_of(
    run: Account, strategy: Mapping[str, Any], complete: bool, interrupted: bool = False
) -> RunResult:
    """The figures of a run as it stands."""
    history, metric, stale = run.history, run.problem.metrics[0], run.staleness
    targets = TARGETS if metric.share and metric.better == "higher" else ()
    summary = finite(
        {
            "strategy": strategy["name"],
            "options": {key: value for key, value in strategy.items() if key != "name"},
            "seed": run.seed,
            "complete": complete,
            "stopped": run.stopped,
            "federation": run.about,
            "metric": metric.about,
            **_of_metrics(history, run.problem),
            **dict.fromkeys(SOMETIMES),
            **{k: v for each in run.extensions for k, v in each.figures().items()},
            "simulated_time": None if run.real else run.time,
            **({"seconds": run.time} if run.real else {}),
            "adaptation_time": run.adaptation_time,
            "time_to": {str(target): time_to(history, metric, target) for target in targets},
            "convergence_time": convergence_time(history, metric),
            "arrivals": run.updates,
            "messages": {
                **run.messages,
                **{f"{kind}_bytes": size for kind, size in run.bytes.items()},
            },
            "staleness_mean": sum(k * v for k, v in stale.items()) / stale.total()
            if stale
            else None,  # peers, cohorts and clients alone have none
            "staleness": {str(k): v for k, v in sorted(stale.items())},
            "parameters": run.parameters,
            "wall_seconds": dict(run.wall),
            "backend": run.backend,
            "trained_in_vain": run.wasted,
            "peak_rss_mb": (peak_memory() + run.memory) / 2**20 or None,
            "fingerprint": run.fingerprint,
            "version": version("polytempo"),
        }
    )
    return RunResult(summary, history, None, run.extensions, interrupted)


def _of_metrics(history: Sequence[Mapping[str, Any]], problem: Problem) -> dict[str, float | None]:
    """The metric in all its forms, and the final value of every other."""
    metric, *others = problem.metrics
    name = metric.name
    last: Mapping[str, Any] = history[-1] if history else defaultdict(lambda: None)
    tried = [row[name] for row in history if row["updates"] > 0] or [row[name] for row in history]
    found = {
        name: final_value(history, name),
        f"{name}_best": metric.best(tried) if tried else None,
        **{f"{name}_{form}": last[f"{name}_{form}"] for form in ("weighted", "std", "worst10")},
        f"{name}_adapted": last[f"{name}_adapted"],
        f"{name}_adapted_worst10": last.get(f"{name}_adapted_worst10"),
        **dict.fromkeys(f"{name}_{form}" for form in ("best10", "adapted_std", "newcomers")),
    }
    for other in others:
        pooled = f"{other.name}_weighted"
        found |= {other.name: final_value(history, other.name), pooled: last[pooled]}
    return found


# -- the folder ---------------------------------------------------------------------------------


def write_result(folder: Path, result: RunResult, settings: Mapping[str, Any]) -> None:
    """history.csv, result.json, the plots and the report. Needs matplotlib for the last two."""
    replace_text(folder / "result.json", json.dumps(result.summary, indent=2) + "\n")
    if not result.history:  # nobody has tested anything yet
        return
    write_table(folder / "history.csv", result.history)
    extensions = result.all_extensions()
    for extension in extensions:
        _write_files(folder, extension)
    if not can_plot():
        return
    images = _plots(folder, result, extensions, settings.get("plots", "png"))
    about = read_about(folder)
    write_html(
        folder / "report.html",
        title=f"{result.summary['strategy']} on {result.summary['federation']}",
        intro=f"Seed {result.summary['seed']}, {result.summary['arrivals']} updates folded"
        + ("." if result.summary["complete"] else ", interrupted.")
        + f" Metric: {result.metric.label}, {result.metric.direction}.",
        table=[_figures(result)],
        images=images,
        settings={**settings, **origin(about)},
        command=about.get("command"),
    )


def write_so_far(folder: Path, simulator: Engine) -> None:
    """What a run that goes on has to show: its history, and the tables and arrays of extensions."""
    if simulator.history:
        write_table(folder / "history.csv", simulator.history, durable=False)
    for extension in simulator.extensions.values():
        _write_files(folder, extension, durable=False)


def _write_files(folder: Path, extension: Extension, durable: bool = True) -> None:
    """The tables and arrays that it has to show."""
    for name, rows in extension.tables().items():
        if rows:
            write_table(folder / f"{name}.csv", rows, durable)
    write_arrays(folder, extension, durable)


def write_arrays(folder: Path, extension: Extension, durable: bool = True) -> None:
    for name, arrays in extension.arrays().items():
        with (
            replacing(folder / f"{name}.npz", durable=durable) as partial,
            partial.open("wb") as file,
        ):
            np.savez_compressed(file, **arrays)


def can_plot() -> bool:
    """Whether matplotlib is there; if not, says how to get it."""
    if importlib.util.find_spec("matplotlib") is not None:
        return True
    warnings.warn('no plots without matplotlib: pip install "polytempo[plots]"', stacklevel=2)
    return False


def _plots(
    folder: Path, result: RunResult, extensions: Sequence[Extension], plots: str
) -> list[tuple[str, Path]]:
    metric = result.metric
    path = in_formats(result.plot, folder / f"{metric.name}.png", plots)
    images = [(f"{metric.heading} against {result.clock}", path)]
    counts = {int(k): v for k, v in result.summary["staleness"].items()}
    if any(counts):  # else all updates were fresh
        path = in_formats(partial(plot_staleness, counts), folder / "staleness.png", plots)
        images.append(("Staleness of the updates", path))
    clients = result.clients
    columns = {"handed": metric.name, "adapted": f"{metric.name}_adapted"}
    spread = {
        label: [values]
        for label, column in columns.items()
        if len(values := known(clients, column).tolist()) > 1
    }
    if spread:
        draw = partial(plot_distribution, spread, metric)
        path = in_formats(draw, folder / "distribution.png", plots)
        images.append(("How clients differ: sorted, and as boxes", path))
    for name, given in ((n, g) for each in extensions for n, g in each.plots().items()):
        caption, shown = PLOTS[name]
        path = in_formats(partial(shown, **given), folder / f"{name}.png", plots)
        images.append((caption, path))
    return images


def _figures(result: RunResult) -> dict[str, str]:
    summary, metric = result.summary, result.metric
    more = {} if summary["clusters"] is None else {"clusters": about_clusters(summary)}
    size = sum(v for k, v in summary["messages"].items() if k.endswith("_bytes"))
    if summary["staleness_mean"]:
        more["mean staleness"] = f"{summary['staleness_mean']:.1f}"
    return {
        "strategy": summary["strategy"],
        "handed": metric.text(result.value),
        "best": metric.text(summary[f"{metric.name}_best"]),
        "adapted": metric.text(result.adapted),
        "worst 10%": metric.text(summary[f"{metric.name}_worst10"]),
        **more,
        **about_guards(summary),
        result.clock: f"{result.seconds_taken:.1f} s",
        "messages": str(models_sent(summary["messages"])),
        "MB sent": f"{size / 1e6:,.1f}",
    }


def about_clusters(summary: Mapping[str, Any]) -> str:
    """How many clusters there are, and clients in none; where true groups are known, how well the
    others fit."""
    number, outside, pure, ari = (summary[key] for key in CLUSTERS)
    more = [f"{outside} clients in none"] if outside else []
    more += [] if ari is None else [f"purity {pure:.2f}, adjusted Rand index {ari:.2f}"]
    return f"{number}" + (f" ({'; '.join(more)})" if more else "")


def about_guards(summary: Mapping[str, Any]) -> dict[str, str]:
    """What there is to say of privacy, attacks and defences."""
    found = {}
    if private := summary.get("privacy"):
        worst, mid = (private[f"epsilon_{x}"] for x in ("max", "median"))
        found["privacy"] = (
            "no noise, so no bound"
            if worst is None
            else f"epsilon {worst:,.1f} for the client with most uploads ({mid:,.1f} median), "
            f"delta {private['delta']:g}"
        )
    if attack := summary.get("attack"):
        found["attack"] = (
            f"{attack['name']} by {len(attack['clients'])} clients ({attack['share']:.0%}); "
            "figures are over the others"
        )
    if defence := summary.get("defence"):
        found["defence"] = (
            f"{defence['name']}: {defence['changed']} of {defence['uploads']} updates cut down"
        )
    return found


def run_inside(folder: Path, file: str) -> str:
    """For a folder that is not a run's but perhaps holds some: one of them."""
    inner = sorted(path.parent for path in folder.glob(f"**/{file}"))[:1]
    return f"; name one of the runs in it, such as {inner[0]}" if inner else ""


def read_result(folder: Path) -> RunResult:
    """A result as `write_result` left it."""
    if not (folder / "result.json").exists():
        raise PolytempoError(
            f"{folder} holds no result: it has no result.json" + run_inside(folder, "result.json")
        )
    try:
        summary = json.loads((folder / "result.json").read_text(encoding="utf8"))
        history = read_table(folder / "history.csv")
        each = folder / "clients.csv"  # not there for a very great number of clients
        clients = read_table(each) if each.exists() else []
    except (OSError, ValueError) as error:
        raise PolytempoError(f"{folder} holds no readable result: {error}") from error
    return RunResult(summary, history, rows=clients)


def read_table(path: Path) -> list[dict[str, Any]]:
    """The rows of a CSV file; what is not a name is a number, or None if it is not there."""
    with path.open(newline="", encoding="utf8") as file:
        rows = csv.DictReader(file)
        return [{k: v if k == "name" else _number(v) for k, v in row.items()} for row in rows]


def _number(text: str) -> float | int | None:
    if text == "":
        return None
    return int(text) if text.lstrip("-").isdigit() else float(text)


def write_table(path: Path, rows: Sequence[Mapping[str, Any]], durable: bool = True) -> None:
    """Rows as a CSV file."""
    replace_text(path, csv_text(rows), durable)


def csv_text(rows: Sequence[Mapping[str, Any]]) -> str:
    """Rows as CSV; what a row does not have is empty."""
    text = io.StringIO()
    columns = dict.fromkeys(key for row in rows for key in row)
    writer = csv.DictWriter(text, columns, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()
