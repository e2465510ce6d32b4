"""The settings of a run: declared once, here, for TOML files, the command line and Python.

Unknown settings are errors that name the nearest one; every value is checked before a run starts.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Self, TypedDict, cast

import pydantic
import tomli_w
from pydantic import BaseModel, ConfigDict, Field

from polytempo.core.attacks import ATTACKS
from polytempo.core.bank import Storage, in_memory
from polytempo.core.client_steps import ClientStep
from polytempo.core.compression import COMPRESSIONS
from polytempo.core.defences import DEFENCES
from polytempo.core.errors import PolytempoError, nearest
from polytempo.core.layout import BufferPolicy, Parts
from polytempo.core.optimizer import OPTIMIZERS
from polytempo.core.privacy import MECHANISMS
from polytempo.core.registry import Registry
from polytempo.core.schedule import SCHEDULES
from polytempo.core.strategy import Refill, Strategy
from polytempo.core.task import Task
from polytempo.data import PARTITIONS, SHIFTS, Federation
from polytempo.experiments.callbacks import STOPS, Callback
from polytempo.experiments.loggers import LOGS
from polytempo.files import replace_text
from polytempo.models import trained_parts
from polytempo.native.sweep import compiled_sweep, on_threads
from polytempo.simulation import DEVICES, DROPOUTS, NETWORKS
from polytempo.storage import mapped
from polytempo.strategies import STRATEGIES
from polytempo.training import PROBLEMS, BackendName, Problem, SolverName, problem_for
from polytempo.training.executors.processes import cores

Spec = str | dict[str, Any]
REGISTRIES: dict[str, Registry[Any]] = {
    "strategy": STRATEGIES,
    "partition": PARTITIONS,
    "shift": SHIFTS,
    "devices": DEVICES,
    "network": NETWORKS,
    "dropout": DROPOUTS,
    "optimizer": OPTIMIZERS,
    "problem": PROBLEMS,
    "lr_schedule": SCHEDULES,
    "dp": MECHANISMS,
    "compress": COMPRESSIONS,
    "attack": ATTACKS,
    "defend": DEFENCES,
    "stop": STOPS,
}
_TASK = Task()


class Ends(TypedDict, total=False):
    """What may end a run before all its updates are folded."""

    versions: float
    messages: float
    until: float


class RunConfig(BaseModel):
    """All settings of a run. A choice with options is written `name:key=value,key=value`."""

    model_config = ConfigDict(
        extra="forbid",
        validate_default=True,
        protected_namespaces=(),
        ser_json_inf_nan="constants",  # an option may be infinite; TOML can say so
    )

    strategy: Spec = Field("pace", description="the algorithm; see `polytempo strategies`")
    data: str = Field(
        "digits",
        description="data set, path of an .npz file or of a folder of them, or hub:owner/name; "
        "see `polytempo data`",
    )
    data_dir: str | None = Field(
        None, description="folder of data files (default: POLYTEMPO_DATA, else in the user's cache)"
    )
    clients: Annotated[int, Field(ge=1)] | None = Field(
        None, description="number of clients (default: all natural users, or 20 without any)"
    )
    partition: Spec | None = Field(
        None, description=f"who gets which samples: {', '.join(PARTITIONS)}"
    )
    shift: Spec | None = Field(None, description=f"feature shift: {', '.join(SHIFTS)}")
    test_fraction: Annotated[float, Field(gt=0, lt=1)] = Field(
        0.25, description="fraction of each client's samples held out for testing"
    )
    validation: Annotated[float, Field(ge=0, lt=1)] = Field(
        0.0,
        description="for tuning: judge by this fraction of each client's training samples, and "
        "leave its test samples alone",
    )
    limit: Annotated[int, Field(ge=1)] | None = Field(
        None, description="use only this many samples, drawn at random"
    )
    model: Spec = Field(
        "auto",
        description="linear, mlp, lenet, cnn64, textcnn, gru, resnet18, hf:PATH (a pre-trained "
        "transformer for texts, from a folder or the hub), or module:factory",
    )
    problem: Spec | None = Field(
        None,
        description="what is learned: classification, multilabel, regression, next-token, or "
        "own:criterion=... (default: what the data are for)",
    )
    buffers: BufferPolicy = Field(
        "share",
        description="batch-norm statistics: share (travel with the model) or reset (start afresh)",
    )
    personal: str | None = Field(
        None,
        description="part of the model that stays with its client: head (the last linear layer), "
        "norm (normalisation layers), body (all but the head), or comma-separated patterns of "
        "parameter names (default: the strategy's own choice, mostly nothing)",
    )
    freeze: str | None = Field(
        None, description="part of the model that is never trained or sent; as for personal"
    )
    trainable: str | None = Field(
        None,
        description="what is trained, all else being frozen: all, head, comma-separated patterns "
        "of parameter names, or lora:r=8,alpha=16 (adapters and head) (default: all)",
    )
    updates: Annotated[int, Field(ge=1)] = Field(
        400,
        description="length of the run: updates that the server folds in, one per local training "
        "(p2p: local rounds of all peers)",
    )
    versions: Annotated[int, Field(ge=1)] | None = Field(
        None, description="end the run early once the server has changed its model this many times"
    )
    messages: Annotated[int, Field(ge=2)] | None = Field(
        None,
        description="end the run early once this many models have been sent, in either direction",
    )
    until: Annotated[float, Field(gt=0)] | None = Field(
        None, description="end the run early at this simulated time (seconds)"
    )
    stop: Spec | None = Field(
        None,
        description="end the run early once it no longer gets better: early:patience=10 "
        "(evaluations), with min_delta and figure",
    )
    concurrency: Annotated[int, Field(ge=1)] | None = Field(
        None,
        description="clients that train at the same time; of synchronous methods, the size of a "
        "cohort (default: a tenth of the clients, at least 4; standalone: all)",
    )
    refill: Refill | None = Field(
        None,
        description="which client starts when a slot becomes free: idle, same or cohort "
        "(default: the strategy's own choice)",
    )
    devices: Spec = Field("two-speed", description=f"client speeds: {', '.join(DEVICES)}")
    network: Spec = Field("instant", description=f"network links: {', '.join(NETWORKS)}")
    dropout: Spec = Field(
        "none",
        description=f"who is available, and which updates are lost or late: {', '.join(DROPOUTS)}",
    )
    epochs: Annotated[int, Field(ge=1)] = Field(
        _TASK.epochs, description="local epochs per training"
    )
    steps: Annotated[int, Field(ge=1)] | None = Field(
        None, description="local mini-batch steps per training, instead of epochs"
    )
    batch_size: Annotated[int, Field(ge=1)] = Field(
        _TASK.batch_size, description="samples per mini-batch"
    )
    lr: Annotated[float, Field(gt=0)] = Field(_TASK.lr, description="local learning rate")
    lr_schedule: Spec = Field(
        "constant",
        description="how the local learning rate changes with the number of updates folded in: "
        f"{', '.join(SCHEDULES)}",
    )
    optimizer: Spec = Field(
        "sgd", description=f"local optimizer: {', '.join(OPTIMIZERS)}, each with its options"
    )
    momentum: Annotated[float, Field(ge=0, lt=1)] | None = Field(
        None, description="local momentum (short for sgd:momentum=...; default: 0.9)"
    )
    weight_decay: Annotated[float, Field(ge=0)] | None = Field(
        None, description="local weight decay (short for the optimizer's option; default: 0.0001)"
    )
    keep_optimizer: bool = Field(
        False,
        description="clients keep the moments of their optimizer from one training to the next",
    )
    eval_every: Annotated[int, Field(ge=1)] | None = Field(
        None, description="evaluate every N updates (default: a fortieth of the run)"
    )
    adapt_epochs: Annotated[int, Field(ge=0)] = Field(
        5, description="epochs of local fine-tuning for the adapted metric; 0: omit it"
    )
    adapt_always: bool = Field(
        False, description="measure the adapted metric at every evaluation, not only at the end"
    )
    solver: SolverName = Field(
        "auto",
        description="how a training is computed: torch (anything), native (chains of common "
        "layers, by compiled code), or auto (native if possible)",
    )
    backend: BackendName = Field(
        "auto",
        description="where trainings run: serial (this process), processes, ray, or auto "
        "(processes unless the run is small)",
    )
    device: str = Field(
        "cpu", description="device that trainings are computed on: cpu, cuda, cuda:N, mps, or auto"
    )
    workers: Annotated[int, Field(ge=1)] | None = Field(
        None,
        description="worker processes (default: one per processor); results do not depend on it",
    )
    bank: Literal["memory", "half", "int8", "disk"] = Field(
        "memory",
        description="where the server keeps its vectors per client: memory, memory in half "
        "precision (half) or 8 bits (int8), or disk (in the folder named by TMPDIR)",
    )
    dp: Spec | None = Field(
        None,
        description="differential privacy: clip=1,noise=0.8 cuts each upload to length 1 and adds "
        "normal noise of deviation 0.8 to each number; epsilon is reported",
    )
    compress: Spec | None = Field(
        None,
        description="compress uploads, with error feedback: int8, or topk:0.01 (the share of the "
        "numbers that is sent)",
    )
    attack: Spec | None = Field(
        None,
        description="some clients do harm, and figures are over the others: "
        f"{', '.join(ATTACKS)}, each with share=0.1",
    )
    defend: Spec | None = Field(
        None,
        description="cut down updates that are out of line with recent ones: "
        f"{', '.join(DEFENCES)}, each with its options",
    )
    diagnose: Annotated[int, Field(ge=1)] | None = Field(
        None,
        description="measure, every N updates, how much sampling noise, participation bias and "
        "delay there is in the server's steps (strategies with one model; slow)",
    )
    seed: int = Field(0, description="seed of everything that is random")
    check: bool = Field(False, description="verify the simulator's invariants while running")
    events: bool = Field(False, description="write every event to events.jsonl")
    log: list[Spec] | None = Field(
        None,
        description=f"also log the history, settings and figures to: {', '.join(LOGS)}, each with "
        "its options; may be repeated",
    )
    plots: Literal["png", "pdf", "svg"] = Field(
        "png",
        description="format of plots: png, or beside it pdf (sized for a column of a paper) or svg",
    )

    @pydantic.field_validator(*REGISTRIES)
    @classmethod
    def _known(cls, value: Spec | None, info: pydantic.ValidationInfo) -> Spec | None:
        if value is None:
            return None
        registry = REGISTRIES[str(info.field_name)]
        return registry.describe(registry.create(value))

    @pydantic.field_validator("log", mode="before")
    @classmethod
    def _known_logs(cls, value: Any) -> list[Spec] | None:
        """One need not be written as a list."""
        given = value if isinstance(value, list | tuple) else [] if value is None else [value]
        found: list[Spec] = [LOGS.describe(LOGS.create(each)) for each in given]
        names = [each["name"] for each in found if isinstance(each, dict)]
        for name in names:
            if names.count(name) > 1:
                raise PolytempoError(f"log {name} is there twice; name it once")
        return found or None

    @pydantic.field_validator("trainable")
    @classmethod
    def _can_be_trained(cls, value: str | None) -> str | None:
        trained_parts(value)
        return value

    @pydantic.field_validator("dp", mode="before")
    @classmethod
    def _gaussian(cls, value: Any) -> Any:
        """The one mechanism need not be named."""
        if isinstance(value, str) and "=" in value.partition(":")[0]:
            return f"gaussian:{value}"
        if isinstance(value, dict) and "name" not in value:
            return {"name": "gaussian", **value}
        return value

    @pydantic.field_validator("solver", "backend", mode="before")
    @classmethod
    def _renamed(cls, value: Any, info: pydantic.ValidationInfo) -> Any:
        old = (str(info.field_name), value)
        if old == ("backend", "batched"):
            raise PolytempoError(
                "backend batched is now a solver: use --solver native, or auto, and --backend "
                "serial or processes to say where it runs"
            )
        if old == ("solver", "dense"):
            raise PolytempoError(
                "solver dense is now a part of native: use --solver native, or auto"
            )
        return value

    @pydantic.model_validator(mode="after")
    def _complete_optimizer(self) -> Self:
        """The short forms become options of the optimizer."""
        assert isinstance(self.optimizer, dict)
        short = {name: getattr(self, name) for name in ("momentum", "weight_decay")}
        given = {name: value for name, value in short.items() if value is not None}
        if given:
            self.optimizer = OPTIMIZERS.describe(OPTIMIZERS.create({**self.optimizer, **given}))
            self.momentum = self.weight_decay = None
        return self

    @property
    def strategy_table(self) -> dict[str, Any]:
        assert isinstance(self.strategy, dict)  # resolved when the settings were checked
        return self.strategy

    @property
    def evaluation_interval(self) -> int:
        return self.eval_every or max(1, self.updates // 40)

    def settings(self) -> dict[str, Any]:
        """As saved in a run's folder: plain values, without settings that were left open."""
        return self.model_dump(mode="json", exclude_none=True)

    def make(self, field: str) -> Any:
        """The strategy, device model, ... that the setting of that name describes; None if there
        is none."""
        value = getattr(self, field)
        return None if value is None else REGISTRIES[field].create(value)

    def last_steps(self) -> tuple[ClientStep, ...]:
        """What every client does to its upload, whatever the strategy."""
        return tuple(step for step in map(self.make, ("dp", "compress")) if step is not None)

    def callbacks(self) -> list[Callback]:
        """What ends the run early, and its logs."""
        stop = self.make("stop")
        return [*([] if stop is None else [stop]), *map(LOGS.create, self.log or ())]

    def ends(self) -> Ends:
        """What ends the run, other than the number of updates."""
        given = {name: getattr(self, name) for name in Ends.__annotations__}
        return cast(Ends, {name: value for name, value in given.items() if value is not None})

    def storage(self) -> Storage:
        """How the server keeps its models."""
        bits: dict[str, Literal[8, 16, 32]] = {"half": 16, "int8": 8}
        return Storage(
            bits.get(self.bank, 32),
            mapped() if self.bank == "disk" else in_memory,
            self.seed,
            compiled_sweep,
            on_threads(cores()),
        )

    def task(self) -> Task:
        return Task(**{name: getattr(self, name) for name in TASK})

    def problem_on(self, federation: Federation) -> Problem:
        """What is learned on these data."""
        return problem_for(federation, self.problem)

    def parts(self, strategy: Strategy | None = None) -> Parts:
        """What of the model is not simply shared: as the run says, or else its strategy (the
        object, if there is one)."""
        strategy = strategy or self.make("strategy")
        frozen, trained = _words(self.freeze), trained_parts(self.trainable)
        if self.personal is None:
            return Parts(list(strategy.personal), frozen, self.buffers, trained)
        personal = _words(self.personal)
        if strategy.personal and not personal:
            raise PolytempoError(
                f"{strategy.name} keeps a part of the model with its clients; name another than "
                f"{','.join(strategy.personal)} with --personal, or use a strategy without"
            )
        return Parts(personal, frozen, self.buffers, trained)


def _words(listed: str | None) -> list[str]:
    """Of a comma-separated list."""
    return [word.strip() for word in (listed or "").split(",") if word.strip()]


RENAMED = {  # what a setting was called before, or is elsewhere
    "rounds": "updates (one per local training; a communication round of a synchronous method has "
    "as many as its cohort)",
    "slots": "concurrency",
    "cohort": "concurrency (of synchronous methods, the size of the cohort)",
}
ELSEWHERE = {  # what other frameworks call a setting, where it does not look alike
    "learning_rate": "lr",
    "num_clients": "clients",
    "n_clients": "clients",
    "num_rounds": "updates",
    "n_rounds": "updates",
    "local_epochs": "epochs",
    "local_steps": "steps",
    "dataset": "data",
    "algorithm": "strategy",
}
EXECUTION = ("workers", "backend", "log", "plots")  # has no influence on any result
# What may change when a run is resumed: how long it is, whether it is verified along the way, and
# where its data are (they are identified by their digest).
RESUMABLE = (*EXECUTION, *("updates", "versions", "until", "stop", "check", "data_dir"))
# What is filled in when a run begins, if it was left open.
FILLED = ("data_dir", "clients", "partition", "concurrency", "refill", "eval_every")
FEDERATION = (
    *("data", "data_dir", "clients", "partition", "shift"),
    *("test_fraction", "validation", "limit"),
)
TASK = ("epochs", "steps", "batch_size", "lr", "optimizer", "keep_optimizer")


def difference(
    wanted: RunConfig,
    kept: Mapping[str, Any],
    free: Iterable[str] = EXECUTION,
    strategy: Strategy | None = None,
) -> str | None:
    """Is this the same run? The first setting, other than the `free` ones, in which the wanted run
    differs from one with the `kept` settings; None if there is none. A setting that was left open,
    to be filled in when a run begins, matches any value. `strategy`: the object, if there is one
    (its class may not be importable)."""
    ours = wanted.settings()
    left = {name for name in FILLED if name not in ours}
    own = wanted.concurrency is not None and wanted.refill is None
    if own and (strategy or wanted.make("strategy")).all_train:
        left.add("concurrency")  # the strategy takes all, whatever was asked for
    names = (ours.keys() | kept.keys()) - left - set(free)
    # The strategy comes first: others are filled in by it.
    order = sorted(names, key=lambda name: (name != "strategy", name))
    return next((name for name in order if ours.get(name) != kept.get(name)), None)


def make_config(settings: Mapping[str, Any], source: str = "settings") -> RunConfig:
    """Check the settings; a mistake becomes a one-line error."""
    for key in settings:
        if key in RENAMED:
            raise PolytempoError(f"{source}: {key} is now called {RENAMED[key]}")
        if key not in RunConfig.model_fields:
            raise PolytempoError(f"{source}: unknown setting {key!r}{_near(key)}")
    try:
        return RunConfig(**settings)
    except pydantic.ValidationError as error:
        first = error.errors()[0]
        name = str(first["loc"][0])
        raise PolytempoError(
            f"{source}: {name} = {first['input']!r}: {first['msg']} "
            f"({name}: {RunConfig.model_fields[name].description})"
        ) from error


def _near(key: str) -> str:
    return nearest(ELSEWHERE.get(key, key), RunConfig.model_fields)


def read_config(path: str | Path) -> dict[str, Any]:
    """The settings of a TOML file (keys may be written with hyphens)."""
    try:
        found = tomllib.loads(Path(path).read_text(encoding="utf8"))
    except OSError as error:
        raise PolytempoError(f"{path} cannot be read: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise PolytempoError(f"{path} is not valid TOML: {error}") from error
    return {key.replace("-", "_"): value for key, value in found.items()}


def write_config(path: str | Path, config: RunConfig) -> None:
    """The resolved settings, as a TOML file that `polytempo run --config` takes."""
    replace_text(path, tomli_w.dumps(config.settings()))
