"""Training code of your own between real machines: `polytempo.serve` and `polytempo.join`.

The server has a strategy and named arrays; it never sees a model. A client is an object with

    train(parameters, task) -> parameters     its own training, from these parameters
    evaluate(parameters) -> float             how good they are on its own test data

where parameters are a dictionary of numpy arrays, and the task says what the strategy asks for:
`task.epochs`, `task.lr`, `task.batch_size`, ... (`polytempo.Task`; follow what applies to you).

`train` may be a generator instead: it yields its parameters after every step (or epoch), and what
`yield` returns is None, or fresh parameters that the server has pushed meanwhile, to go on from. A
client whose training was asked to end early uploads what it yielded last.
"""

from __future__ import annotations

import copy
import secrets
import threading
from collections.abc import Callable, Generator, Mapping
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.numpy import save_file
from torch import Tensor, nn

from polytempo.core.errors import PolytempoError
from polytempo.core.layout import Layout
from polytempo.core.messages import Dispatch
from polytempo.core.metric import Direction
from polytempo.core.rng import rng
from polytempo.core.strategy import Strategy
from polytempo.core.task import Task
from polytempo.experiments.config import FEDERATION, make_config
from polytempo.experiments.fleet import Site, conduct, nobody, take_part
from polytempo.experiments.fleet_plan import Model, Undertaking, undertaking
from polytempo.experiments.fleet_settings import (
    AUTO,
    for_fleet,
    read_patience,
    resolved,
    samples_like,
)
from polytempo.experiments.fleet_trainer import MODEL
from polytempo.experiments.interrupt import interruptible
from polytempo.experiments.result import RunResult
from polytempo.experiments.run_settings import GIVEN
from polytempo.files import replacing
from polytempo.network.fleet.client import GIVE_UP
from polytempo.network.fleet.limits import limits_of
from polytempo.network.session import Certificates
from polytempo.nodes.client import ClientNode, Memory
from polytempo.nodes.plan import Patience
from polytempo.nodes.star import Examine, Sums
from polytempo.strategies import STRATEGIES
from polytempo.training import Problem
from polytempo.training.problem import Mean, Metric, Reduction

OWN = "own code"  # what such clients learn, as far as the server is concerned
Arrays = dict[str, NDArray[Any]]
Steps = Generator[Mapping[str, Any], Arrays | None, Mapping[str, Any] | None]
Files = tuple[str | Path, str | Path, str | Path]  # ca, certificate, key


class OwnTrainer(Protocol):
    """What `join` is given."""

    def train(self, parameters: Arrays, task: Task) -> Any:
        """The trained parameters; with what the task asks for besides (`task.extras`), a pair."""
        ...

    def evaluate(self, parameters: Arrays) -> float | Mapping[str, float]:
        """The metric on the client's test data: its mean. (Or the sums of one of Polytempo's
        problems, if the server has one.)"""
        ...


class Reported(Problem):
    """What clients report of themselves: one figure, a mean over their test samples."""

    figure: str = "accuracy"
    better: Direction = "higher"
    share: bool = True

    def __post_init__(self) -> None:
        _ = self.metrics  # better now than when the first scores are in: is the name a good one?

    @property
    def metrics(self) -> tuple[Metric, ...]:
        label = self.figure.replace("_", " ")
        return (Metric(self.figure, label, self.better, self.share, Mean("value")),)

    def loss(self, outputs: Tensor, targets: Tensor, reduction: Reduction = "mean") -> Tensor:
        raise PolytempoError("clients with training code of their own have losses of their own")


# -- the server ------------------------------------------------------------------------------------


def serve(
    parameters: Mapping[str, Any] | nn.Module | str,
    *,
    clients: int,
    out: str | Path,
    strategy: str | Strategy = "pace",
    updates: int = 400,
    listen: str = "127.0.0.1:7500",
    metric: str = "accuracy",
    better: Direction = "higher",
    share: bool | None = None,
    shape: tuple[int, ...] | None = None,
    outputs: int | None = None,
    certificates: Files | None = None,
    deadline: str | float = "auto",
    wait_for: int = 1,
    limits: Mapping[str, float] = MappingProxyType({}),
    listening: Callable[[str], None] = lambda address: None,
    interrupted: threading.Event | None = None,
    **settings: Any,
) -> RunResult:
    """Conduct a run with whoever joins, until `updates` updates are folded; the same call with the
    same folder `out` resumes it. Ctrl-C ends it cleanly.

    parameters: how the model begins: arrays by name, a torch module, or the name of a model of
        Polytempo's (then with `shape` of a sample and `outputs`, for `polytempo client`).
    metric, better, share: what clients report, whether "higher" or "lower" is better, and whether
        it lies in 0..1.
    certificates: files of the authority, of the server's certificate and of its key.
    wait_for: nobody trains before so many clients are connected.
    limits: what clients may take, by name, where it differs from the usual (see docs/deploy.md).
    listening: is told the address, once clients can join.
    settings: those of `RunConfig` that a server has: `lr`, `epochs`, `concurrency`, `seed`, ...
    """
    for name in settings.keys() & {*FEDERATION}:
        raise PolytempoError(f"serve: {name} is not a setting here: the data are with the clients")
    own = not isinstance(parameters, str)
    usual = {"adapt_epochs": 0} if own else {"model": parameters}
    chosen = copy.copy(STRATEGIES.create(strategy))  # the caller may use it again
    given = {"clients": clients, "updates": updates, **usual, **settings}
    config = make_config(given, "serve")
    config = config.model_copy(update={"strategy": STRATEGIES.describe(chosen)})
    for_fleet(config, chosen)
    if isinstance(parameters, str):
        if shape is None or outputs is None:
            raise PolytempoError(f"serve: the model {parameters!r} needs shape=... and outputs=...")
        kind = config.make("problem").targets if config.problem is not None else None
        kind = kind or "classification"
        samples = samples_like(shape, outputs, None, kind, clients, parameters)
        config = resolved(config, chosen, clients, samples.about)
        what = undertaking(config, samples, chosen)
    else:
        model = _module(parameters) if isinstance(parameters, nn.Module) else _arrays(parameters)
        about = f"{GIVEN}{len(model.initial):,} parameters, {clients} clients"
        lies = (better == "higher" and metric == "accuracy") if share is None else share
        problem = Reported(metric, better, lies)
        config = resolved(config, chosen, clients, about)
        figures = frozenset({"total", "value"})
        what = Undertaking(config, chosen, model, problem, OWN, figures, about)
    site = Site(
        listen,
        _files(certificates),
        patience=_patience(deadline),
        wait_for=wait_for,
        limits=limits_of(limits),
    )

    def say(event: dict[str, Any]) -> None:
        if event["event"] == "listening":
            listening(event["address"])

    with nullcontext(interrupted) if interrupted else interruptible() as stop:
        return conduct(what, Path(out).expanduser(), site, say=say, interrupted=stop)


def _arrays(parameters: Mapping[str, Any]) -> Model:
    arrays = {name: np.asarray(value) for name, value in parameters.items()}
    if not arrays:
        raise PolytempoError("serve: there are no parameters; give at least one array, by name")
    for name, array in arrays.items():
        if array.dtype.kind != "f" or not array.size:
            raise PolytempoError(
                f"serve: parameter {name!r} is {array.dtype} of shape {array.shape}; expected "
                "floating-point numbers, at least one"
            )
    layout = [[name, list(array.shape), str(array.dtype)] for name, array in arrays.items()]
    sizes = [array.size for array in arrays.values()]
    return Model(layout, to_vector(arrays, layout), sizes, NOTHING)


def _module(module: nn.Module) -> Model:
    layout = Layout(module)
    kind = str(layout.vector.dtype).removeprefix("torch.")
    shapes = zip(layout.shared_names, layout.shared_shapes, strict=True)
    entries = [[name, shape, kind] for name, shape in shapes]
    return Model(entries, layout.read(), layout.tensors, NOTHING)


NOTHING: dict[str, Any] = {  # what such a server says of the model
    **dict.fromkeys(("model", "shape", "outputs", "vocabulary", "scale", "tokenizer", "frozen")),
    "trainable": None,
    "personal": [],
    "freeze": [],
    "buffers": "share",
}


def _patience(deadline: str | float) -> Patience:
    return AUTO if deadline == "auto" else read_patience(str(deadline))


def _files(given: Files | None) -> Certificates | None:
    return None if given is None else Certificates(*(Path(file).expanduser() for file in given))


# -- a client --------------------------------------------------------------------------------------


def join(
    address: str,
    trainer: OwnTrainer,
    *,
    samples: int,
    tested: int = 0,
    out: str | Path,
    name: str | None = None,
    certificates: Files | None = None,
    problem: str = OWN,
    give_up_after: float = GIVE_UP,
    interrupted: threading.Event | None = None,
    watch: Callable[[dict[str, Any]], None] = nobody,
) -> dict[str, Any]:
    """Take part in a run with training code of your own, until it is over; returns what the file
    result.json of its folder `out` says. Ctrl-C leaves cleanly; the same call comes back.

    samples, tested: how many samples it trains on and is tested on (0: it is not asked to test).
    name: by default that of the folder; with certificates, the certificate's.
    give_up_after: seconds without a server after which it is an error.
    problem: that of the server, if it has one of Polytempo's own ("classification").
    """
    folder = Path(out).expanduser()
    node = ClientNode("", problem, samples, tested)
    adapter = OwnAdapter(trainer, tested, folder)
    with nullcontext(interrupted) if interrupted else interruptible() as stop:
        return take_part(
            node,
            adapter,
            folder,
            address,
            about=type(trainer).__name__,
            name=name or folder.name,
            certificates=_files(certificates),
            give_up_after=give_up_after,
            say=watch,
            interrupted=stop,
        )


class OwnAdapter:
    """Between the arrays of a user's code and the vectors of a fleet."""

    how = "own code"

    def __init__(self, trainer: OwnTrainer, tested: int, folder: Path) -> None:
        self.trainer, self.tested, self.folder = trainer, tested, folder
        self.layout: list[list[Any]] = []
        self.figures: list[str] = []

    def welcome(self, run: Mapping[str, Any]) -> None:
        self.layout, self.figures = run["layout"], run["figures"]

    def begin(self, dispatch: Dispatch, client: int, memory: Memory) -> OwnTraining:
        return OwnTraining(self, dispatch, memory)

    def arrays(self, vector: Tensor) -> Arrays:
        """Fresh ones: they are the user's to change."""
        return to_arrays(vector, self.layout)

    def examine(self, examine: Examine, client: int, memory: Memory) -> tuple[Sums, Sums | None]:
        before = self._score(examine.params)
        if not examine.adapt_epochs:
            return before, None
        task = Task(epochs=examine.adapt_epochs)
        training = OwnTraining(self, Dispatch(client, 0, examine.params, task), memory)
        while not training.advance(1):
            pass
        return before, self._score(training.finish()[0])

    def _score(self, vector: Tensor) -> Sums:
        found = self.trainer.evaluate(self.arrays(vector))
        if isinstance(found, Mapping):
            sums = {name: float(value) for name, value in found.items()}
        else:
            sums = {"total": float(self.tested), "value": float(found) * self.tested}
        if sorted(sums) != self.figures:
            raise PolytempoError(
                f"evaluate returned the sums {', '.join(sorted(sums))}; this server wants "
                f"{', '.join(self.figures)}"
            )
        return sums

    def keep(self, params: Tensor, memory: Memory) -> None:
        with replacing(self.folder / MODEL) as partial:
            save_file(self.arrays(params), str(partial))


class OwnTraining:
    """A call of `train`, which may be a generator."""

    def __init__(self, adapter: OwnAdapter, dispatch: Dispatch, memory: Memory) -> None:
        self.adapter, self.received, self.task = adapter, dispatch.params, dispatch.task
        self.memory, self.extras = dict(memory), dict[str, Tensor]()
        self.step, self.done = 0, False
        self._steps: Steps | None = None
        self._fresh: Arrays | None = None
        self._latest: Mapping[str, Any] | None = None
        self._extras: Mapping[str, Any] = {}
        self._last_epoch = False

    def advance(self, steps: int) -> bool:
        if self._steps is None:
            made = self.adapter.trainer.train(self.adapter.arrays(self.received), self.task)
            if not isinstance(made, Generator):
                self._end(made)
                return True
            self._steps = made
        for _ in range(steps):
            try:
                fresh, self._fresh = self._fresh, None
                self._latest = next(self._steps) if not self.step else self._steps.send(fresh)
                self.step += 1
            except StopIteration as ended:
                self._end(self._latest if ended.value is None else ended.value)
                return True
            if self._last_epoch:
                self._end(self._latest)
                return True
        return False

    def _end(self, made: Any) -> None:
        self.done = True
        if isinstance(made, tuple):
            made, self._extras = made
        if not isinstance(made, Mapping):
            raise PolytempoError(
                f"train returned a {type(made).__name__}; expected a dictionary of arrays (or, if "
                "the strategy asks for more, a pair of dictionaries)"
            )
        self._latest = made
        ours = () if self.task.compression is None else self.task.compression.uploads
        if missing := self.task.extras.keys() - self._extras.keys() - {*ours}:
            raise PolytempoError(
                f"the server's strategy asks clients for {', '.join(sorted(missing))} as well: "
                "return a pair of dictionaries from train, or use a strategy that asks for models "
                "alone (descant: hold_out=0)"
            )

    def swap(self, dispatch: Dispatch) -> int | None:
        if self.done or (self._steps is None and self.step):
            return None
        self.received, self.task = dispatch.params, replace(self.task, lr=dispatch.task.lr)
        if self._steps is not None:
            self._fresh = self.adapter.arrays(dispatch.params)
        return self.step

    def shorten(self) -> None:
        self._last_epoch = True

    def finish(self) -> tuple[Tensor, Memory, Memory]:
        assert self._latest is not None
        vector = to_vector(self._latest, self.adapter.layout)
        if self.task.upload == "delta":
            vector = vector - self.received
        elif self.task.upload == "gradient":  # of a step of plain SGD
            vector = (self.received - vector) / self.task.lr
        asked = self.task.extras  # which may be less than the last time
        self.extras = {
            name: torch.as_tensor(self._extras[name]) for name in asked if name in self._extras
        }
        vector = self.task.leaving(self, vector)
        return vector, self.extras, self.memory

    def stream(self, name: str) -> np.random.Generator:
        """What steps draw from when the upload leaves: nobody else can know it."""
        return rng(secrets.randbits(128), name)


def to_vector(arrays: Mapping[str, Any], layout: list[list[Any]]) -> Tensor:
    """The arrays as a model travels: in the order of the layout, in single precision."""
    names = [name for name, *_ in layout]
    if set(arrays) != set(names):
        apart = sorted(set(arrays) ^ set(names))
        raise PolytempoError(
            f"the parameters have other names than the run's: {', '.join(apart)}; expected "
            f"{', '.join(names)}"
        )
    parts = []
    for name, shape, *_ in layout:
        array = np.asarray(arrays[name], dtype=np.float32)
        if list(array.shape) != list(shape):
            raise PolytempoError(
                f"parameter {name!r} has shape {array.shape}, expected {tuple(shape)}"
            )
        parts.append(array.reshape(-1))
    return torch.from_numpy(np.concatenate(parts))


def to_arrays(vector: Tensor, layout: list[list[Any]]) -> Arrays:
    """The opposite; with the types that the server was given."""
    found, begin = {}, 0
    for name, shape, kind in layout:
        size = int(np.prod(shape, dtype=np.int64))
        part = vector[begin : begin + size].numpy().reshape(shape)
        found[name] = part.astype(kind, copy=True)
        begin += size
    return found
