"""The algorithms, one file each, readable beside their papers."""

from polytempo.core.strategy import STRATEGIES, Strategy
from polytempo.strategies.asafl import ASAFL
from polytempo.strategies.fedac import FedAC
from polytempo.strategies.fedasync import FedAsync
from polytempo.strategies.fedavg import FedAvg, FedProx
from polytempo.strategies.fedbuff import FedBuff
from polytempo.strategies.pace import PACE
from polytempo.strategies.pfedgraph import PFedGraph, PFedGraphAsync
from polytempo.strategies.port import PORT
from polytempo.strategies.standalone import Standalone

__all__ = [
    "ASAFL",
    "PACE",
    "PORT",
    "STRATEGIES",
    "FedAC",
    "FedAsync",
    "FedAvg",
    "FedBuff",
    "FedProx",
    "PFedGraph",
    "PFedGraphAsync",
    "Standalone",
    "Strategy",
]
