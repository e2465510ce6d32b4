"""What a run gives its user: the figures, the history, each client's row and model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from html import escape
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from polytempo.core.errors import PolytempoError, nearest
from polytempo.core.metric import MetricInfo
from polytempo.experiments.rows import as_frame
from polytempo.experiments.wording import figures_in_words
from polytempo.files import replacing
from polytempo.report import Curve, html_table, plot_curves
from polytempo.simulation import Engine, Extension
from polytempo.simulation.metrics import LAST, final_value, models_sent, time_to
from polytempo.training import PERSONAL

FINE_TUNED = " + fine-tuning"  # what the names of such rows end with


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
                f"{name}_weighted": None,
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
        figures = figures_in_words(self)
        words = [f"{key} {figures[key]}" for key in ("handed", "adapted", self.clock)]
        end = "" if self.summary["complete"] else ", interrupted"
        return (
            f"<RunResult {self.summary['strategy']} on {self.summary['federation']}: "
            f"{self.metric.name} {', '.join(words)}, {self.summary['arrivals']} updates{end}>"
        )

    def _repr_html_(self) -> str:
        about = f"{self.summary['federation']}; seed {self.summary['seed']}; {self.metric.label}"
        return f"<p>{escape(about)}</p>{html_table([figures_in_words(self)])}"
