"""Logs of runs in the formats of other tools. Most need an extra, which is imported when a run
begins; none sends anything anywhere unless it is told to.

The step of every figure is the number of updates. Where a tool has a clock as well, it shows the
time of the run, which is simulated. A run that is resumed tells all of its rows again, so a log is
written anew each time, and holds everything once.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from polytempo.core.errors import PolytempoError
from polytempo.core.metric import finite
from polytempo.core.registry import Options, Registry
from polytempo.experiments.callbacks import Callback, Row, Run

if TYPE_CHECKING:
    from polytempo.experiments.result import RunResult

LOGS: Registry[Callback] = Registry("log", Callback)
Settings = dict[str, bool | int | float | str]
Figures = dict[str, float]
Ending = Literal["complete", "interrupted", "failed"]
_AT_ONCE = 100  # parameters that MLflow takes in one call


class Logger(Callback):
    """Base: is opened in the folder of a run, told settings and figures, and closed."""

    name: ClassVar[str]
    packages: ClassVar[tuple[str, ...]] = ()  # that the extra of this name brings

    def start(self, run: Run) -> None:
        self._is_open = False
        if run.folder is None:
            raise PolytempoError(f"log {self.name} writes to the folder of a run; give out=FOLDER")
        for package in self.packages:
            if find_spec(package) is None:
                raise PolytempoError(
                    f"log {self.name} needs the package {package}: "
                    f'pip install "polytempo[{self.name}]"'
                )
        self.open(run.folder, flat(run.settings))
        self._is_open = True

    def evaluated(self, row: Row) -> None:
        self.add(row["updates"], row["time"], numbers(row))

    def end(self, result: RunResult) -> None:
        final = {f"final/{name}": value for name, value in numbers(result.summary).items()}
        self._is_open = False
        self.close("complete" if result.summary["complete"] else "interrupted", final)

    def failed(self, error: BaseException) -> None:
        if self._is_open:
            self.close("failed", {})

    def open(self, folder: Path, settings: Settings) -> None:
        """Begin anew, whatever is there from an earlier session."""
        raise NotImplementedError

    def add(self, updates: int, time: float, figures: Figures) -> None:
        """The figures of an evaluation."""
        raise NotImplementedError

    def close(self, ending: Ending, final: Figures) -> None:
        raise NotImplementedError


def flat(settings: Mapping[str, Any], within: str = "") -> Settings:
    """Without tables in tables: `strategy` is its name, and `strategy.alpha` an option of it."""
    found: Settings = {}
    for key, value in settings.items():
        name = within if key == "name" and within else f"{within}.{key}".lstrip(".")
        if isinstance(value, Mapping):
            found |= flat(value, name)
        else:
            found[name] = value if isinstance(value, bool | int | float) else str(value)
    return found


def numbers(row: Mapping[str, Any]) -> Figures:
    """What of it can be drawn."""
    return {
        name: value
        for name, value in row.items()
        if isinstance(value, int | float) and not isinstance(value, bool)
    }


@LOGS.register("jsonl")
class JsonLines(Logger, Options):
    """log.jsonl: a line with the settings, one for each evaluation, and one with the final figures.
    (For a line per event, see --events.)"""

    def open(self, folder: Path, settings: Settings) -> None:
        self._file = (folder / "log.jsonl").open("w", encoding="utf8")
        self._write({"settings": settings})

    def add(self, updates: int, time: float, figures: Figures) -> None:
        self._write(figures)

    def close(self, ending: Ending, final: Figures) -> None:
        self._write({"ended": ending, **final})
        self._file.close()

    def _write(self, line: Mapping[str, Any]) -> None:
        self._file.write(json.dumps(finite(dict(line))) + "\n")
        self._file.flush()


@LOGS.register("tensorboard")
class TensorBoard(Logger, Options):
    """Event files in the folder `tensorboard` of the run: a curve for each column of the history,
    and the settings with the final figures as hyperparameters."""

    packages = ("tensorboard",)

    def open(self, folder: Path, settings: Settings) -> None:
        from torch.utils.tensorboard import SummaryWriter

        place = folder / "tensorboard"
        if place.exists():
            shutil.rmtree(place)
        self._writer, self._settings = SummaryWriter(str(place)), settings

    def add(self, updates: int, time: float, figures: Figures) -> None:
        for name, value in figures.items():
            self._writer.add_scalar(name, value, updates, walltime=time)
        self._writer.flush()

    def close(self, ending: Ending, final: Figures) -> None:
        if final:
            self._writer.add_hparams(self._settings, final, run_name=".")
        self._writer.close()


@LOGS.register("mlflow")
class MLflow(Logger, Options):
    """A run of MLflow: its metrics are the columns of the history, its parameters the settings.

    `uri`: where MLflow keeps runs (default: `mlflow.db`, SQLite, in the folder of the run).
    `experiment`: the name that the run is filed under. A session that is resumed has a new run of
    MLflow; the one before is deleted (MLflow can restore it)."""

    packages = ("mlflow", "sqlalchemy", "alembic")

    uri: str | None = None
    experiment: str = "polytempo"

    def open(self, folder: Path, settings: Settings) -> None:
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
        logging.getLogger("mlflow.store.db.utils").setLevel(logging.WARNING)  # tables are made
        from mlflow.entities import Param
        from mlflow.tracking import MlflowClient

        place = folder.resolve()
        self._client = MlflowClient(self.uri or f"sqlite:///{place / 'mlflow.db'}")
        kept = folder / "mlflow.run"
        if kept.exists():
            self._client.delete_run(kept.read_text(encoding="utf8"))
        found = self._client.get_experiment_by_name(self.experiment)
        artifacts = None if self.uri else (place / "mlflow").as_uri()
        number = (
            self._client.create_experiment(self.experiment, artifacts)
            if found is None
            else found.experiment_id
        )
        self._run = self._client.create_run(number, run_name=place.name).info.run_id
        kept.write_text(self._run, encoding="utf8")
        params = [Param(name, str(value)) for name, value in settings.items()]
        for begin in range(0, len(params), _AT_ONCE):
            self._client.log_batch(self._run, params=params[begin : begin + _AT_ONCE])

    def add(self, updates: int, time: float, figures: Figures) -> None:
        from mlflow.entities import Metric

        milliseconds = round(1000 * time)
        found = [Metric(name, value, milliseconds, updates) for name, value in figures.items()]
        self._client.log_batch(self._run, metrics=found)

    def close(self, ending: Ending, final: Figures) -> None:
        if final:
            self.add(0, 0.0, final)
        status = {"complete": "FINISHED", "interrupted": "KILLED", "failed": "FAILED"}[ending]
        self._client.set_terminated(self._run, status)


@LOGS.register("wandb")
class WandB(Logger, Options):
    """A run of Weights & Biases: its history is that of the run, its config the settings.

    `mode`: offline (default: in the folder `wandb` of the run; `wandb sync` sends it) or online.
    `project`, `entity`: where it belongs."""

    packages = ("wandb",)

    mode: Literal["offline", "online"] = "offline"
    project: str = "polytempo"
    entity: str | None = None

    def open(self, folder: Path, settings: Settings) -> None:
        os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
        import wandb

        for earlier in (folder / "wandb").glob("offline-run-*"):
            shutil.rmtree(earlier)
        self._run = wandb.init(
            project=self.project,
            entity=self.entity,
            name=folder.resolve().name,
            dir=str(folder),
            config=settings,
            mode=self.mode,
            reinit="create_new",  # the program may have a run of its own
            settings=wandb.Settings(console="off", silent=True),
        )

    def add(self, updates: int, time: float, figures: Figures) -> None:
        self._run.log(figures, step=updates)

    def close(self, ending: Ending, final: Figures) -> None:
        self._run.summary.update(final)
        self._run.finish(exit_code=1 if ending == "failed" else 0)
