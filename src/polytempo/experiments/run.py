"""One run from its settings: in memory, in a new folder, or resumed from what a folder holds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from polytempo.core.errors import PolytempoError
from polytempo.core.strategy import State, Strategy
from polytempo.data import Federation
from polytempo.experiments.callbacks import Callback
from polytempo.experiments.checkpoint import CHECKPOINT, must_be_new, read_checkpoint
from polytempo.experiments.config import RunConfig, Spec, read_config
from polytempo.experiments.drive import drive, watched
from polytempo.experiments.result import RunResult
from polytempo.experiments.result_folder import run_inside
from polytempo.experiments.run_settings import GIVEN, as_before, described, resolve
from polytempo.experiments.summary import summarise
from polytempo.experiments.world import load_federation, make_simulator
from polytempo.files import Claim
from polytempo.models import Model
from polytempo.simulation import Engine
from polytempo.training.footprint import peak_memory


def in_memory(
    config: RunConfig,
    federation: Federation,
    model: Model,
    strategy: Strategy,
    callbacks: Sequence[Callback],
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
    callbacks: Sequence[Callback],
    resume: bool,
) -> RunResult:
    """A run from Python. With `resume`, the one that the folder holds, if any, goes on."""
    with Claim(folder):
        state = read_checkpoint(folder) if resume else None
        if state is None:
            must_be_new(folder)
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
        must_be_new(folder)
        return drive(simulator, config, folder, callbacks)


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
        state = read_checkpoint(folder)
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
    state = read_checkpoint(folder)
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


def _as_it_was(config: RunConfig, state: State | None, strategy: Strategy | None) -> RunConfig:
    """The settings, with what was left open as it was at the checkpoint. Those that the rest of the
    run depends on must be the same as there."""
    if state is None or "settings" not in state:  # of an old format, as `restore` will say
        return config
    return as_before(config, state["settings"], "the checkpoint", strategy)


def _go_on(
    simulator: Engine,
    config: RunConfig,
    folder: Path,
    state: State | None,
    callbacks: Sequence[Callback],
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
