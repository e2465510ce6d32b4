"""The pairing of the paper taken literally, as a negative control: a single slot with the latest
pending peer, replicated by messages. Nobody arbitrates, nobody refuses, nobody gives up."""

from polytempo.nodes import DECISIONS, Fusion, Identity, Pairing, Snapshot, Token
from polytempo.nodes.protocol import (
    Action,
    Announce,
    AnswerExchange,
    Exchange,
    Exchanging,
    Idle,
    Paired,
    Pending,
    Withdraw,
)


def naive(name: str, incarnation: int) -> Pairing:
    return NaivePairing(name, incarnation, DECISIONS.create("always"), peers=3)


class NaivePairing(Pairing):
    """Whoever finds an id in its slot tells all that it is taken (-id), sends its weights to that
    peer and waits for the answer. A pending peer answers whoever comes first."""

    def boundary(self, snapshot: Snapshot) -> list[Action]:
        self._snapshot = snapshot
        if not isinstance(self.phase, Idle):
            return []
        for token in self.hints.values():
            self.hints = {}
            self.phase = Exchanging(token, snapshot.progress)
            return [Withdraw(token), Exchange(token, snapshot, 1.0)]
        self._ticket += 1
        self.phase = Pending(Token(*self.identity, self._ticket))
        return [Announce(self.phase.token)]

    def appeared(self, token: Token) -> list[Action]:
        self.hints = {token.peer: token}
        return []

    def vanished(self, token: Token) -> list[Action]:
        if token in self.hints.values():
            self.hints = {}
        return []

    def exchanged(self, by: Identity, token: Token, snapshot: Snapshot) -> list[Action]:
        if self.phase != Pending(token):
            return [AnswerExchange(by, token, None)]
        self.phase = Idle()
        assert self._snapshot is not None
        taken = Paired(Fusion(by, token, snapshot, self._snapshot.progress))
        return [taken, AnswerExchange(by, token, self._snapshot)]

    def exchange_answered(self, token: Token, snapshot: Snapshot | None) -> list[Action]:
        match self.phase:
            case Exchanging(asked, progress) if asked == token and snapshot is not None:
                self.phase = Idle()
                return [Paired(Fusion(token.owner, token, snapshot, progress))]
        return []
