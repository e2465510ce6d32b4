"""The algorithms, one file each, to be read alongside their papers."""

from polytempo.core.strategy import STRATEGIES, Strategy
from polytempo.strategies.ace import ACE, ACED, ACE8bit, ACED8bit, ACEIncremental
from polytempo.strategies.apfl import APFL, APFLAsync
from polytempo.strategies.asafl import ASAFL
from polytempo.strategies.asgd import DelayAdaptiveASGD, VanillaASGD
from polytempo.strategies.ca2fl import CA2FL
from polytempo.strategies.casa import CASA, CASAC, CASAD, CASAPlus
from polytempo.strategies.cfl import CFL, CFLAsync
from polytempo.strategies.descant import Descant
from polytempo.strategies.ditto import Ditto, DittoAsync
from polytempo.strategies.echopfl import EchoPFL
from polytempo.strategies.estimators import GRAPHS, Attention, Complement, Likeness
from polytempo.strategies.fadas import FADAS
from polytempo.strategies.fedac import FedAC
from polytempo.strategies.fedala import FedALA, FedALAAsync
from polytempo.strategies.fedamp import FedAMP, FedAMPAsync, FedAMPPACE
from polytempo.strategies.fedasync import FedAsync
from polytempo.strategies.fedavg import FedAvg, FedProx
from polytempo.strategies.fedbabu import FedBABU, FedBABUAsync
from polytempo.strategies.fedbn import FedBN, FedBNAsync
from polytempo.strategies.fedbuff import FedBuff
from polytempo.strategies.fedopt import FedAdagrad, FedAdam, FedYogi
from polytempo.strategies.fedper import FedPer, FedPerAsync
from polytempo.strategies.fedrep import FedRep, FedRepAsync
from polytempo.strategies.fedrod import FedROD, FedRODAsync
from polytempo.strategies.fedsac import FedSaC, FedSaCAsync, FedSaCPACE
from polytempo.strategies.fedsgd import FedSGD
from polytempo.strategies.icfl import ICFL, ICFLAsync
from polytempo.strategies.ifca import IFCA, IFCAAsync
from polytempo.strategies.knn_per import KNNPer, KNNPerAsync
from polytempo.strategies.lg_fedavg import LGFedAvg, LGFedAvgAsync
from polytempo.strategies.p2p import P2P
from polytempo.strategies.pace import PACE
from polytempo.strategies.per_fedavg import PerFedAvg, PerFedAvgAsync
from polytempo.strategies.pfedgraph import PFedGraph, PFedGraphAsync
from polytempo.strategies.pfedme import PFedMe, PFedMeAsync
from polytempo.strategies.port import PORT
from polytempo.strategies.reference import Majority, Pooled, PooledGroups
from polytempo.strategies.scaffold import SCAFFOLD, SCAFFOLDAsync
from polytempo.strategies.standalone import Standalone

__all__ = [
    "ACE",
    "ACED",
    "APFL",
    "ASAFL",
    "CA2FL",
    "CASA",
    "CASAC",
    "CASAD",
    "CFL",
    "FADAS",
    "GRAPHS",
    "ICFL",
    "IFCA",
    "P2P",
    "PACE",
    "PORT",
    "SCAFFOLD",
    "STRATEGIES",
    "ACE8bit",
    "ACED8bit",
    "ACEIncremental",
    "APFLAsync",
    "Attention",
    "CASAPlus",
    "CFLAsync",
    "Complement",
    "DelayAdaptiveASGD",
    "Descant",
    "Ditto",
    "DittoAsync",
    "EchoPFL",
    "FedAC",
    "FedALA",
    "FedALAAsync",
    "FedAMP",
    "FedAMPAsync",
    "FedAMPPACE",
    "FedAdagrad",
    "FedAdam",
    "FedAsync",
    "FedAvg",
    "FedBABU",
    "FedBABUAsync",
    "FedBN",
    "FedBNAsync",
    "FedBuff",
    "FedPer",
    "FedPerAsync",
    "FedProx",
    "FedROD",
    "FedRODAsync",
    "FedRep",
    "FedRepAsync",
    "FedSGD",
    "FedSaC",
    "FedSaCAsync",
    "FedSaCPACE",
    "FedYogi",
    "ICFLAsync",
    "IFCAAsync",
    "KNNPer",
    "KNNPerAsync",
    "LGFedAvg",
    "LGFedAvgAsync",
    "Likeness",
    "Majority",
    "PFedGraph",
    "PFedGraphAsync",
    "PFedMe",
    "PFedMeAsync",
    "PerFedAvg",
    "PerFedAvgAsync",
    "Pooled",
    "PooledGroups",
    "SCAFFOLDAsync",
    "Standalone",
    "Strategy",
    "VanillaASGD",
]
