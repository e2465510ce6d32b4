"""Polytempo: asynchronous, personalised federated learning.

import polytempo as pt
fed = pt.Federation.load("digits", clients=20, partition=pt.partition.Dirichlet(0.1), seed=0)
result = pt.simulate(fed, model="mlp", strategy=pt.strategies.PACE(), updates=400)

Names are loaded when they are first used, so that importing the package takes no time and a part
of it (`polytempo.core`) does not load the rest.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # what type checkers and editors see
    from polytempo import strategies
    from polytempo.core.attacks import ATTACKS, Attack
    from polytempo.core.client_steps import CLIENT_STEPS, ClientStep
    from polytempo.core.defences import DEFENCES, Defence
    from polytempo.core.errors import PolytempoError, Refused
    from polytempo.core.messages import Dispatch, InFlight, Staleness, Stop, Update
    from polytempo.core.objective import OBJECTIVES, Drift, Objective, Plain, Proximal, Pull
    from polytempo.core.optimizer import Adam, AdamW, Sgd
    from polytempo.core.server import Server
    from polytempo.core.strategy import Context, Strategy
    from polytempo.core.task import Task
    from polytempo.data import Federation, partition
    from polytempo.experiments.api import compare, load, resume, simulate, sweep
    from polytempo.experiments.callbacks import Callback, EarlyStopping
    from polytempo.experiments.fleet_own import join, serve
    from polytempo.experiments.result import RunResult
    from polytempo.models.pretrained import tokenizer
    from polytempo.strategies import STRATEGIES
    from polytempo.training.problem import Problem

# To offer another name, add it to the imports above, to this table and to __all__.
_HOME = {  # where each name lives; a module that is offered itself is its own home
    "Adam": "polytempo.core.optimizer",
    "AdamW": "polytempo.core.optimizer",
    "ATTACKS": "polytempo.core.attacks",
    "Attack": "polytempo.core.attacks",
    "CLIENT_STEPS": "polytempo.core.client_steps",
    "ClientStep": "polytempo.core.client_steps",
    "Callback": "polytempo.experiments.callbacks",
    "Context": "polytempo.core.strategy",
    "DEFENCES": "polytempo.core.defences",
    "Defence": "polytempo.core.defences",
    "Dispatch": "polytempo.core.messages",
    "Drift": "polytempo.core.objective",
    "EarlyStopping": "polytempo.experiments.callbacks",
    "Federation": "polytempo.data.federation",
    "InFlight": "polytempo.core.messages",
    "OBJECTIVES": "polytempo.core.objective",
    "Objective": "polytempo.core.objective",
    "Plain": "polytempo.core.objective",
    "PolytempoError": "polytempo.core.errors",
    "Problem": "polytempo.training.problem",
    "Proximal": "polytempo.core.objective",
    "Pull": "polytempo.core.objective",
    "Refused": "polytempo.core.errors",
    "RunResult": "polytempo.experiments.result",
    "STRATEGIES": "polytempo.strategies",
    "Server": "polytempo.core.server",
    "Sgd": "polytempo.core.optimizer",
    "Staleness": "polytempo.core.messages",
    "Stop": "polytempo.core.messages",
    "Strategy": "polytempo.core.strategy",
    "Task": "polytempo.core.task",
    "Update": "polytempo.core.messages",
    "compare": "polytempo.experiments.api",
    "join": "polytempo.experiments.fleet_own",
    "load": "polytempo.experiments.api",
    "partition": "polytempo.data.partition",
    "resume": "polytempo.experiments.api",
    "serve": "polytempo.experiments.fleet_own",
    "simulate": "polytempo.experiments.api",
    "strategies": "polytempo.strategies",
    "sweep": "polytempo.experiments.api",
    "tokenizer": "polytempo.models.pretrained",
}
__all__ = [
    "ATTACKS",
    "CLIENT_STEPS",
    "DEFENCES",
    "OBJECTIVES",
    "STRATEGIES",
    "Adam",
    "AdamW",
    "Attack",
    "Callback",
    "ClientStep",
    "Context",
    "Defence",
    "Dispatch",
    "Drift",
    "EarlyStopping",
    "Federation",
    "InFlight",
    "Objective",
    "Plain",
    "PolytempoError",
    "Problem",
    "Proximal",
    "Pull",
    "Refused",
    "RunResult",
    "Server",
    "Sgd",
    "Staleness",
    "Stop",
    "Strategy",
    "Task",
    "Update",
    "compare",
    "join",
    "load",
    "partition",
    "resume",
    "serve",
    "simulate",
    "strategies",
    "sweep",
    "tokenizer",
]

if not TYPE_CHECKING:  # to a type checker this would be every name there is

    def __getattr__(name: str) -> Any:
        home = _HOME.get(name)
        if home is None:
            raise AttributeError(f"module 'polytempo' has no attribute {name!r}")
        module = import_module(home)
        found = module if home.endswith(f".{name}") else getattr(module, name)
        globals()[name] = found  # from now on it is an attribute like any other
        return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
