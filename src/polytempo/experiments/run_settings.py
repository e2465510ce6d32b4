"""The settings that a run is carried out with: checked, and with the names of the objects it is
given; filled in where they were left open; and on resume, compared with those of before."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from polytempo.core.errors import PolytempoError
from polytempo.core.strategy import Strategy
from polytempo.data import Federation
from polytempo.experiments.config import FILLED, RESUMABLE, RunConfig, difference, make_config
from polytempo.models import MODELS, Model
from polytempo.simulation.simulator import concurrency_of
from polytempo.strategies import STRATEGIES

GIVEN = "given in Python: "  # what the folder of a run from Python says of its data


def described(
    settings: Mapping[str, Any],
    source: str,
    federation: Federation | None,
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


def model_name(model: Model) -> Any:
    if isinstance(model, str | Mapping):
        return model
    if callable(model):
        return f"{model.__module__}:{getattr(model, '__qualname__', type(model).__qualname__)}"
    return MODELS.describe(model)


def resolve(config: RunConfig, federation: Federation, strategy: Strategy | None) -> RunConfig:
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


def as_before(
    config: RunConfig, before: Mapping[str, Any], what: str, strategy: Strategy | None
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
