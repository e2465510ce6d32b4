"""Federated learning without a server: the state machine of a peer, when it communicates, and how
it fuses what it receives."""

from polytempo.nodes.decision import DECISIONS, Decision, Occasion
from polytempo.nodes.fusion import FUSIONS, FusionRule
from polytempo.nodes.pairing import (
    Action,
    Announce,
    Claim,
    Claiming,
    Exchange,
    Exchanging,
    Fusion,
    Granted,
    Identity,
    Idle,
    Peer,
    PeerId,
    Pending,
    Phase,
    SetDeadline,
    Snapshot,
    Token,
    Withdraw,
)

__all__ = [
    "DECISIONS",
    "FUSIONS",
    "Action",
    "Announce",
    "Claim",
    "Claiming",
    "Decision",
    "Exchange",
    "Exchanging",
    "Fusion",
    "FusionRule",
    "Granted",
    "Identity",
    "Idle",
    "Occasion",
    "Peer",
    "PeerId",
    "Pending",
    "Phase",
    "SetDeadline",
    "Snapshot",
    "Token",
    "Withdraw",
]
