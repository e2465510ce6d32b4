"""The algorithms, one file each, to be read alongside their papers."""

from polytempo.core.strategy import STRATEGIES, Strategy
from polytempo.strategies.ace import ACE, ACED, ACE8bit, ACED8bit, ACEIncremental
from polytempo.strategies.asafl import ASAFL
from polytempo.strategies.asgd import DelayAdaptiveASGD, VanillaASGD
from polytempo.strategies.ca2fl import CA2FL
from polytempo.strategies.casa import CASA, CASAC, CASAD, CASAPlus
from polytempo.strategies.cfl import CFL, CFLAsync
from polytempo.strategies.estimators import GRAPHS, Attention, Complement, Likeness
from polytempo.strategies.fedac import FedAC
from polytempo.strategies.fedamp import FedAMP, FedAMPAsync, FedAMPPACE
from polytempo.strategies.fedasync import FedAsync
from polytempo.strategies.fedavg import FedAvg, FedProx
from polytempo.strategies.fedbuff import FedBuff
from polytempo.strategies.fedsac import FedSaC, FedSaCAsync, FedSaCPACE
from polytempo.strategies.fedsgd import FedSGD
from polytempo.strategies.icfl import ICFL, ICFLAsync
from polytempo.strategies.ifca import IFCA, IFCAAsync
from polytempo.strategies.p2p import P2P
from polytempo.strategies.pace import PACE
from polytempo.strategies.pfedgraph import PFedGraph, PFedGraphAsync
from polytempo.strategies.port import PORT
from polytempo.strategies.standalone import Standalone

__all__ = [
    "ACE",
    "ACED",
    "ASAFL",
    "CA2FL",
    "CASA",
    "CASAC",
    "CASAD",
    "CFL",
    "GRAPHS",
    "ICFL",
    "IFCA",
    "P2P",
    "PACE",
    "PORT",
    "STRATEGIES",
    "ACE8bit",
    "ACED8bit",
    "ACEIncremental",
    "Attention",
    "CASAPlus",
    "CFLAsync",
    "Complement",
    "DelayAdaptiveASGD",
    "FedAC",
    "FedAMP",
    "FedAMPAsync",
    "FedAMPPACE",
    "FedAsync",
    "FedAvg",
    "FedBuff",
    "FedProx",
    "FedSGD",
    "FedSaC",
    "FedSaCAsync",
    "FedSaCPACE",
    "ICFLAsync",
    "IFCAAsync",
    "Likeness",
    "PFedGraph",
    "PFedGraphAsync",
    "Standalone",
    "Strategy",
    "VanillaASGD",
]
