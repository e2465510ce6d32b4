"""Federated learning without a server: one peer's protocol, when it communicates, and how it fuses
what it receives. No I/O: the simulator and the network drive the same nodes. Phases, events and
actions are in `protocol`, to be imported as a module."""

from polytempo.nodes.decision import DECISIONS, Decision, Occasion
from polytempo.nodes.fusion import FUSIONS, FusionRule
from polytempo.nodes.pairing import Pairing
from polytempo.nodes.peer import Counts, Learner, PeerNode
from polytempo.nodes.protocol import Fusion, Identity, Snapshot, Token
from polytempo.nodes.state import read, spell

__all__ = [
    "DECISIONS",
    "FUSIONS",
    "Counts",
    "Decision",
    "Fusion",
    "FusionRule",
    "Identity",
    "Learner",
    "Occasion",
    "Pairing",
    "PeerNode",
    "Snapshot",
    "Token",
    "read",
    "spell",
]
