"""Polytempo: asynchronous, personalised federated learning.

import polytempo as pt
fed = pt.Federation.load("digits", clients=20, partition=pt.partition.Dirichlet(0.1), seed=0)
result = pt.simulate(fed, model="mlp", strategy=pt.strategies.PACE(), rounds=400)
"""

from polytempo import strategies
from polytempo.core.errors import PolytempoError, Refused
from polytempo.core.messages import Dispatch, InFlight, Staleness, Stop, Update
from polytempo.core.objective import Plain, Proximal, Pull
from polytempo.core.server import Server
from polytempo.core.strategy import STRATEGIES, Context, Strategy
from polytempo.core.task import Task
from polytempo.data import Federation, partition
from polytempo.experiments.result import RunResult
from polytempo.experiments.run import simulate

__all__ = [
    "STRATEGIES",
    "Context",
    "Dispatch",
    "Federation",
    "InFlight",
    "Plain",
    "PolytempoError",
    "Proximal",
    "Pull",
    "Refused",
    "RunResult",
    "Server",
    "Staleness",
    "Stop",
    "Strategy",
    "Task",
    "Update",
    "partition",
    "simulate",
    "strategies",
]
