"""What is on its way between simulated peers, and how the log names what they talk about."""

from __future__ import annotations

from dataclasses import dataclass

from polytempo.core.strategy import State
from polytempo.nodes import Fusion, Identity, Snapshot, Token, protocol, read, spell


@dataclass(frozen=True)
class Post:
    """An event on its way to a node."""

    to: Identity
    event: protocol.Event

    @property
    def brings_model(self) -> bool:
        match self.event:
            case protocol.Exchanged() | protocol.ExchangeAnswered(snapshot=Snapshot()):
                return True
        return False

    @property
    def is_silence(self) -> bool:
        """Whether it says that something has not happened: a time-out, or a refused exchange."""
        match self.event:
            case protocol.ClaimAnswered(granted=None) | protocol.ExchangeAnswered(snapshot=None):
                return True
            case protocol.DeadlinePassed():
                return True
        return False

    def state_dict(self) -> State:
        return {"to": spell(self.to), "event": spell(self.event)}

    @staticmethod
    def from_state(state: State) -> Post:
        return Post(read(state["to"]), read(state["event"]))


def ticket_of(token: Token) -> str:
    return f"{token.peer}.{token.incarnation}.{token.ticket}"


def about(fusion: Fusion) -> tuple[str, int]:
    """Its ticket and its partner."""
    return ticket_of(fusion.token), int(fusion.partner.peer)
