"""One run from its settings: build the world, drive the simulator, keep a folder up to date."""

from __future__ import annotations

import copy
import signal
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol, cast

from torch import nn

from polytempo.core.attacks import Attack
from polytempo.core.errors import PolytempoError
from polytempo.core.strategy import Kind, State, Strategy
from polytempo.data import Federation
from polytempo.experiments.about import write_about
from polytempo.experiments.callbacks import Callback, Callbacks, Run
from polytempo.experiments.config import (
    FEDERATION,
    FILLED,
    RESUMABLE,
    RunConfig,
    Spec,
    difference,
    make_config,
    read_config,
    write_config,
)
from polytempo.experiments.peer_settings import refuse_server_settings
from polytempo.experiments.result import (
    RunResult,
    run_inside,
    summarise,
    write_result,
    write_so_far,
)
from polytempo.files import Appended, Claim
from polytempo.models import MODELS, Inputs, Model, build, tokenizer
from polytempo.models.pretrained import path_of
from polytempo.simulation import Engine, PeerSimulator, Simulator
from polytempo.simulation.engine import World
from polytempo.simulation.reference import Constants, PooledData
from polytempo.simulation.simulator import concurrency_of
from polytempo.storage import load_state, save_state
from polytempo.strategies import P2P, STRATEGIES, Majority, Pooled
from polytempo.training import Solver, find_device, make_executor, make_solver, try_model
from polytempo.training.footprint import peak_memory


class Flush(Protocol):
    def __call__(self, durable: bool = True) -> None: ...


GIVEN = "given in Python: "  # what the folder of a run from Python says of its data
SMALL = 1e10  # operations: below that, starting worker processes does not pay
CHECKPOINT = "checkpoint.safetensors"
PREVIOUS = "checkpoint.previous.safetensors"  # the one before, if the last is damaged
CHECKPOINT_SECONDS = 30.0  # at least so long between two checkpoints: they cost a write of n x d
SHOW_SECONDS = 1.0  # at least so long between two writes of what can be looked at meanwhile,
SHOW_SHARE = 0.05  # which may take this share of the time


def described(
    settings: Mapping[str, Any],
    source: str,
    federation: Federation | None = None,
    model: Model | None = None,
    strategy: Strategy | None = None,
) -> RunConfig:
    """The settings, checked, of a run that is given these objects: the settings say what they are,
    though perhaps not how to make them again."""
    truth: dict[str, Any] = {}
    if federation is not None:
        truth["data"] = GIVEN + federation.description
    if model is not None:
        truth["model"] = model_name(model)
    if strategy is not None:
        truth["strategy"] = STRATEGIES.describe(strategy)
    plain = {key: value for key, value in settings.items() if key not in truth}
    return make_config(plain, source).model_copy(update=truth)


def in_memory(
    config: RunConfig,
    federation: Federation,
    model: Model,
    strategy: Strategy,
    callbacks: Sequence[Callback] = (),
) -> RunResult:
    """A run that leaves no folder."""
    config = resolve(config, federation, strategy)
    simulator = make_simulator(config, federation, model, strategy)
    peak_memory(reset=True)
    with watched(simulator, config, None, callbacks) as end:
        simulator.run(config.updates, **config.ends())
        result = summarise(simulator, config.strategy_table, complete=True)
        end(result)
    return result


def in_folder(
    config: RunConfig,
    folder: Path,
    federation: Federation,
    model: Model,
    strategy: Strategy,
    callbacks: Sequence[Callback] = (),
    resume: bool = False,
) -> RunResult:
    """A run from Python. With `resume`, the one that the folder holds, if any, goes on."""
    with Claim(folder):
        state = _checkpoint(folder) if resume else None
        if state is None:
            _must_be_new(folder)
        config = resolve(_as_it_was(config, state, strategy), federation, strategy)
        simulator = make_simulator(config, federation, model, strategy)
        return _go_on(simulator, config, folder, state, callbacks)


def run(
    config: RunConfig,
    folder: Path,
    *,
    callbacks: Sequence[Callback] = (),
    federation: Federation | None = None,
    model: Model | None = None,
    strategy: Strategy | None = None,
) -> RunResult:
    """Carry out a run in a new folder (with the objects that are there already, if given)."""
    federation = federation or load_federation(config)
    config = resolve(config, federation, strategy)
    simulator = make_simulator(config, federation, model or config.model, strategy)
    with Claim(folder):
        _must_be_new(folder)
        return drive(simulator, config, folder, callbacks)


def resolve(
    config: RunConfig, federation: Federation, strategy: Strategy | None = None
) -> RunConfig:
    """The settings with everything filled in that was left open (`FILLED`)."""
    strategy, clients = strategy or config.make("strategy"), federation.clients
    updates = strategy.updates_of_run(config.updates, clients)
    filled: dict[str, Any] = {
        "updates": updates,
        "clients": clients,
        "partition": dict(federation.partition),
        "concurrency": concurrency_of(strategy, clients, config.concurrency, config.refill),
        "refill": config.refill or strategy.refill,
        "eval_every": config.eval_every or max(1, updates // 40),
    }
    path = Path(config.data).expanduser()
    if path.exists():
        filled["data"] = str(path.resolve())
    if config.data_dir is not None:
        filled["data_dir"] = str(Path(config.data_dir).expanduser().resolve())
    return config.model_copy(update=filled)


def resume(
    folder: Path,
    *,
    updates: int | None = None,
    workers: int | None = None,
    log: Sequence[Spec] | None = None,
    plots: str | None = None,
    callbacks: Sequence[Callback] = (),
    federation: Federation | None = None,
    model: Model | None = None,
    strategy: Strategy | None = None,
) -> RunResult:
    """Resume the run in a folder from its checkpoint (optionally for more updates, with another
    number of workers, or with other logs or plots). What the folder does not hold must be given as
    it was: a federation of the user's own, a model or a strategy that cannot be imported,
    callbacks."""
    given = {"updates": updates, "workers": workers, "log": log, "plots": plots}
    changed = {key: value for key, value in given.items() if value is not None}
    config = kept_settings(folder, federation, model, strategy, changed)
    with Claim(folder):
        state = _checkpoint(folder)
        config = _as_it_was(config, state, strategy)
        federation = federation or load_federation(config)
        config = resolve(config, federation, strategy)
        simulator = make_simulator(config, federation, model or config.model, strategy)
        return _go_on(simulator, config, folder, state, callbacks)


def restored(
    folder: Path,
    federation: Federation | None = None,
    model: Model | None = None,
    strategy: Strategy | None = None,
) -> Engine:
    """The run in a folder as its checkpoint has it, to look at; what the folder does not hold must
    be given."""
    config = kept_settings(folder, federation, model, strategy)
    state = _checkpoint(folder)
    if state is None:
        raise PolytempoError(f"{folder} holds no models: it has no {CHECKPOINT}")
    federation = federation or load_federation(config)
    config = resolve(config, federation, strategy).model_copy(update={"backend": "serial"})
    simulator = make_simulator(config, federation, model or config.model, strategy)
    simulator.load_state_dict(state)
    return simulator


def kept_settings(
    folder: Path,
    federation: Federation | None,
    model: Model | None,
    strategy: Strategy | None,
    changed: Mapping[str, Any] | None = None,
) -> RunConfig:
    """The settings that a folder holds, with those of what is given."""
    if not folder.exists():
        raise PolytempoError(f"there is no folder {folder}; name the folder of a run")
    if not (folder / "config.toml").exists():
        raise PolytempoError(
            f"{folder} is not the folder of a run: it has no config.toml"
            + run_inside(folder, "config.toml")
        )
    settings = read_config(folder / "config.toml") | dict(changed or {})
    if federation is None and str(settings.get("data", "")).startswith(GIVEN):
        raise PolytempoError(
            f"{folder} was run from Python on data that the folder does not hold; give them in "
            "Python: polytempo.resume(FOLDER, federation) or polytempo.load(FOLDER, federation)"
        )
    if model is None and "<" in str(settings.get("model")):  # a function inside another
        raise PolytempoError(
            f"the model of {folder}, {settings['model']}, cannot be imported; give model=..."
        )
    return described(settings, str(folder / "config.toml"), None, model, strategy)


def _checkpoint(folder: Path) -> State | None:
    """The checkpoint that a run has left in its folder, if it got that far; if the last one is
    damaged, the one before it."""
    last, previous = folder / CHECKPOINT, folder / PREVIOUS
    if not last.exists():  # perhaps a crash came between the two
        return load_state(previous) if previous.exists() else None
    try:
        return load_state(last)
    except PolytempoError as error:
        if not previous.exists():
            raise
        state = load_state(previous)
        what, _, _ = str(error).partition("; ")  # what to do about it is done here
        warnings.warn(f"{what}. Used instead: {previous}", stacklevel=2)
        return state


def _as_it_was(
    config: RunConfig, state: State | None, strategy: Strategy | None = None
) -> RunConfig:
    """The settings, with what was left open as it was at the checkpoint. Those that the rest of the
    run depends on must be the same as there."""
    if state is None or "settings" not in state:  # of an old format, as `restore` will say
        return config
    return as_before(config, state["settings"], "the checkpoint", strategy)


def as_before(
    config: RunConfig, before: Mapping[str, Any], what: str, strategy: Strategy | None = None
) -> RunConfig:
    """The settings, with what was left open as it was before. Those that the rest of the run
    depends on must be the same."""
    name = difference(config, before, RESUMABLE, strategy)
    if name is not None:
        now = config.settings().get(name)
        raise PolytempoError(
            f"{what} was made with {name} = {before.get(name)!r}, but now it is {now!r}; "
            f"change {name} back to resume, or start a new run in another folder"
        )
    left = [name for name in FILLED if getattr(config, name) is None and name not in RESUMABLE]
    return config.model_copy(update={name: before.get(name) for name in left})


def _go_on(
    simulator: Engine,
    config: RunConfig,
    folder: Path,
    state: State | None,
    callbacks: Sequence[Callback] = (),
) -> RunResult:
    with simulator.backend:  # workers are forked: better before the models are there
        if state is not None:
            simulator.load_state_dict(state)
        if simulator.updates > config.updates:
            raise PolytempoError(
                f"{folder} has already folded {simulator.updates} updates; ask for more "
                f"--updates than {config.updates}"
            )
        return drive(simulator, config, folder, callbacks)


def load_federation(config: RunConfig) -> Federation:
    """The clients and their data."""
    return Federation.load(
        config.data,
        clients=config.clients,
        partition=config.partition,
        shift=config.shift,
        test_fraction=config.test_fraction,
        validation=config.validation,
        seed=config.seed,
        data_dir=config.data_dir,
        limit=config.limit,
        tokenizer=tokenizer(config.model),
    )


class LastFederation:
    """Loads federations, and keeps the last one for the next run on the same data."""

    def __init__(self) -> None:
        self._wanted: tuple[Any, ...] | None = None
        self._federation: Federation | None = None

    def __call__(self, config: RunConfig) -> Federation:
        read_by = path_of(config.model)
        wanted = (config.seed, read_by, *(getattr(config, name) for name in FEDERATION))
        if self._federation is None or wanted != self._wanted:
            self._federation = None  # it may go before the next one comes
            self._federation = load_federation(config)
            self._wanted = wanted
        return self._federation


def make_simulator(
    config: RunConfig, federation: Federation, model: Model, strategy: Strategy | None = None
) -> Engine:
    """The world that the settings describe, at time 0."""
    attack = config.make("attack")
    if attack is not None:
        federation = poisoned(federation, attack, config.seed)
    module = build(model, Inputs.of(federation), config.seed, config.trainable)
    try_model(module, federation, config.problem_on(federation))
    strategy = strategy or config.make("strategy")
    parts = config.parts(strategy)
    try:
        backend = make_executor(
            module,
            federation,
            config.seed,
            parts,
            problem=config.problem_on(federation),
            solver=config.solver,
            device=find_device(config.device),
            name=config.backend,
            workers=config.workers,
            small=_arithmetic(config, federation, module) < SMALL,
        )
    except PolytempoError as error:
        if config.personal is None and strategy.personal:
            raise PolytempoError(
                f"{strategy.name} needs a model of which it can keep a part with each client, by "
                f"default {','.join(strategy.personal)}: {error}"
            ) from error
        raise
    world: World = {
        "task": config.task(),
        "devices": config.make("devices"),
        "network": config.make("network"),
        "dropout": config.make("dropout"),
        "parts": parts,
        "eval_every": config.evaluation_interval,
        "adapt_epochs": config.adapt_epochs,
        "adapt_always": config.adapt_always,
        "seed": config.seed,
        "storage": config.storage(),
        "backend": backend,
        "attack": attack,
    }
    return ENGINES[strategy.engine](config, federation, module, strategy, world)


def poisoned(federation: Federation, attack: Attack, seed: int) -> Federation:
    """The federation as the attackers take it: their training samples may have other targets."""
    if type(attack).targets is Attack.targets:
        return federation
    y = federation.y.clone()
    for client in attack.clients(federation.clients, seed):
        part = federation.train[client]
        y[part] = attack.targets(y[part], federation.outputs)
    return replace(federation, y=y)


def _with_server(
    config: RunConfig, federation: Federation, module: nn.Module, strategy: Strategy, world: World
) -> Engine:
    return Simulator(
        federation,
        module,
        strategy,
        concurrency=config.concurrency,
        refill=config.refill,
        schedule=config.make("lr_schedule"),
        steps=config.last_steps(),
        defence=config.make("defend"),
        check=config.check,
        diagnose=config.diagnose,
        **world,
    )


def _among_peers(
    config: RunConfig, federation: Federation, module: nn.Module, strategy: Strategy, world: World
) -> Engine:
    refuse_server_settings(config, strategy)
    peers = cast(P2P, strategy)  # whose engine this is
    return PeerSimulator(
        federation, module, peers, updates=config.updates, check=config.check, **world
    )


def _as_reference(
    config: RunConfig, federation: Federation, module: nn.Module, strategy: Strategy, world: World
) -> Engine:
    if isinstance(strategy, Majority):
        return Constants(federation, module, strategy, updates=config.updates, **world)

    frozen = {id(p): p for p in module.parameters() if not p.requires_grad}  # exists once

    def trainer_on(data: Federation) -> Solver:
        return make_solver(
            copy.deepcopy(module, dict(frozen)),
            data,
            config.seed,
            config.parts(strategy),
            find_device(config.device),
            config.problem_on(federation),
            name=config.solver,
        )[0]

    pooled = cast(Pooled, strategy)
    return PooledData(
        federation, module, pooled, updates=config.updates, trainer_on=trainer_on, **world
    )


Build = Callable[[RunConfig, Federation, nn.Module, Strategy, World], Engine]
ENGINES: dict[Kind, Build] = {
    "server": _with_server,
    "peers": _among_peers,
    "reference": _as_reference,
}


def _arithmetic(config: RunConfig, federation: Federation, module: nn.Module) -> float:
    """Roughly the floating-point operations of the run's training (convolutions need more)."""
    samples = sum(config.task().work(size) for size in federation.samples) / federation.clients
    return 6 * config.updates * samples * sum(p.numel() for p in module.parameters())


def _must_be_new(folder: Path) -> None:
    """A folder that already holds a run is left alone."""
    if holds_run(folder):
        raise PolytempoError(
            f"{folder} already holds a run; continue it with --resume {folder}, choose another "
            "--out, or delete it"
        )


def holds_run(folder: Path) -> bool:
    """Whether there is a run in this folder that could be read or resumed."""
    try:
        return any((folder / name).exists() for name in (CHECKPOINT, PREVIOUS, "result.json"))
    except NotADirectoryError as error:
        raise PolytempoError(f"{folder}: {error.filename} is a file, not a folder") from error


def model_name(model: Model) -> Any:
    if isinstance(model, str | Mapping):
        return model
    if callable(model):
        return f"{model.__module__}:{getattr(model, '__qualname__', type(model).__qualname__)}"
    return MODELS.describe(model)


def drive(
    simulator: Engine,
    config: RunConfig,
    folder: Path,
    callbacks: Sequence[Callback] = (),
) -> RunResult:
    """Run to the end, or to an interrupt, keeping the folder's files up to date. If the training
    diverges, or the disk is full, it can be resumed from the last checkpoint; the history and
    the tables may be a little ahead of that until then."""
    with watched(simulator, config, folder, callbacks) as end:
        result = _drive(simulator, config, folder)
        end(result)
    return result


def _drive(simulator: Engine, config: RunConfig, folder: Path) -> RunResult:
    write_config(folder / "config.toml", config)
    write_about(folder, simulator.metric, simulator.federation.description)
    peak_memory(reset=True)
    with _event_log(simulator, config, folder) as flush, interruptible() as interrupted:
        last, over = time.monotonic(), False
        next_show = last + SHOW_SECONDS

        def checkpoint() -> None:
            nonlocal last
            flush(durable=True)  # no checkpoint may count events that the log does not hold
            state = {**simulator.state_dict(), "settings": config.settings()}
            save_state(folder / CHECKPOINT, state, keep=folder / PREVIOUS)
            last = time.monotonic()

        def show() -> None:
            """For those who watch: the events, the history and the tables so far."""
            nonlocal next_show
            began = time.monotonic()
            flush(durable=False)
            write_so_far(folder, simulator)
            now = time.monotonic()
            next_show = now + max(SHOW_SECONDS, (now - began) / SHOW_SHARE)

        def pause() -> bool:
            if time.monotonic() > next_show:
                show()
            if not over and time.monotonic() - last > CHECKPOINT_SECONDS:
                checkpoint()
            return interrupted.is_set()

        def closing() -> None:
            """The last checkpoint is without the closing evaluation, so that it can be extended."""
            nonlocal over
            checkpoint()
            over = True

        ends = config.ends()
        complete = simulator.run(config.updates, **ends, stop=pause, closing=closing)
        if not over:
            checkpoint()
        result = summarise(simulator, config.strategy_table, complete, interrupted.is_set())
    write_result(folder, result, config.settings())
    return result


@contextmanager
def watched(
    simulator: Engine, config: RunConfig, folder: Path | None, callbacks: Sequence[Callback]
) -> Iterator[Callable[[RunResult], None]]:
    """These callbacks, and those of the settings, are told of the run. Yields what is to be called
    at the end."""
    everybody = Callbacks((*callbacks, *config.callbacks()))
    beginning = Run(config.settings(), simulator.metric, folder)
    with simulator.backend, everybody.during(beginning):  # fork workers before anybody has threads
        simulator.observers.append(everybody.event)
        simulator.judges.append(everybody.evaluated)
        yield everybody.end


@contextmanager
def _event_log(simulator: Engine, config: RunConfig, folder: Path) -> Iterator[Flush]:
    """events.jsonl, one event per line; what a lost session wrote after its checkpoint is cut off.
    Yields the function that brings it up to date on disk."""
    if not config.events:
        yield lambda durable=True: None
        return
    with Appended(folder / "events.jsonl", keep=simulator.events) as log:
        simulator.loggers.append(log.add)
        yield log.flush


@contextmanager
def interruptible() -> Iterator[threading.Event]:
    """Ctrl-C (or SIGTERM) sets the flag, so that the run stops between two events; a second one
    breaks off at once."""
    flag = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield flag  # signals belong to the main thread
        return

    def handler(number: int, frame: object) -> None:
        if flag.is_set():
            raise KeyboardInterrupt
        flag.set()

    before = {number: signal.signal(number, handler) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield flag
    finally:
        for number, old in before.items():
            signal.signal(number, old)
