"""The simulators: strategies on a virtual clock."""

from polytempo.simulation.devices import DEVICES, NETWORKS
from polytempo.simulation.dropout import DROPOUTS
from polytempo.simulation.engine import Engine
from polytempo.simulation.extension import Extension
from polytempo.simulation.peers import PeerSimulator
from polytempo.simulation.simulator import Simulator

__all__ = [
    "DEVICES",
    "DROPOUTS",
    "NETWORKS",
    "Engine",
    "Extension",
    "PeerSimulator",
    "Simulator",
]
