"""How peers without a server find a partner, one at a time: events in, actions out, no I/O
(Sad et al.: Towards Asynchronous Peer-to-Peer Federated Learning, EuroMLSys 2025, Sec. 3).

After a local round a peer may decide to communicate. If it knows somebody who is waiting for a
partner it pairs with them; if not it becomes the one who waits ("pending"), tells all, and keeps
training. The paper keeps the waiting peer's id in a slot that is replicated on all peers. Messages
cross, so two peers can read the same id. Here the replicas are only *hints*, and the owner of a
ticket alone decides who gets it:

1. A peer that becomes pending announces a presence token: its name, its incarnation, and a ticket
   that it never uses again. Every peer that sees the token notes it as a hint.
2. A peer that wants a partner claims the smallest hint from its owner. The owner says yes to one
   claimer and withdraws the token; everybody else hears no at once. So a ticket has one claimer.
3. The claimer sends its snapshot. The owner, if it still waits for this very claimer, queues the
   fusion and answers with its own snapshot; then the claimer queues its fusion. So a claimer that
   has fused has a partner that fused before. The reverse cannot be promised: if the last answer is
   lost, only the owner has fused (two parties cannot agree over a line that may fail).
4. On a no, on silence and on death a claimer drops the hint, tries the next one, and becomes
   pending when none is left. An owner that granted stops waiting on the claimer's death or on a
   deadline. So nobody waits forever, whoever dies and whatever is lost.
5. Of two pending peers the larger name withdraws and claims the smaller. Only the larger one moves,
   so that they do not run past each other.
6. Rule 5 fails if the announcement that should have told the larger one was lost, or if its claim
   met silence and the hint was dropped: both would be pending forever. So a peer that has been
   pending for `patience` local rounds withdraws its token and seeks again: it claims the smallest
   hint, if it has any, and else announces a new ticket, which is news to all.

    IDLE -> PENDING -> GRANTED -> IDLE                   the owner of a ticket
    IDLE or PENDING -> CLAIMING -> EXCHANGING -> IDLE    its claimer
                       CLAIMING -> CLAIMING or PENDING   its claim was in vain

An exchange ends with its answer, or with the news that none can come, and not with the owner's
death: an owner that leaves cleanly has sent its model before, and the news that it left may
overtake the model. The transport of the exchange knows what is still under way; presence does not.

Training never waits. The machine hands out the snapshot of the last round boundary and reports what
it receives (`Paired`); when that is fused, and whether, is up to its `PeerNode`.

A driver carries out the actions and reports each event once. Events may come late, never, or in any
order: those that no longer matter are ignored. Tokens of one owner are ordered by incarnation and
ticket, so an announcement that arrives after its own withdrawal is known to be stale.
"""

from __future__ import annotations

import math

from polytempo.core.errors import PolytempoError
from polytempo.core.rng import rng
from polytempo.core.strategy import State
from polytempo.nodes.decision import Decision, Occasion
from polytempo.nodes.protocol import (
    Action,
    Announce,
    AnswerClaim,
    AnswerExchange,
    Appeared,
    Boundary,
    Claim,
    ClaimAnswered,
    Claimed,
    Claiming,
    DeadlinePassed,
    Exchange,
    ExchangeAnswered,
    Exchanged,
    Exchanging,
    Fusion,
    Gone,
    Granted,
    Identity,
    Idle,
    Paired,
    PairingEvent,
    PeerId,
    Pending,
    Phase,
    SetDeadline,
    Snapshot,
    Stop,
    Token,
    Vanished,
    Withdraw,
)
from polytempo.nodes.state import read, spell


class Pairing:
    """The state machine of one peer: `handle` takes an event and returns the actions to carry out,
    in order.

    `peers` is K, the number of members. `incarnation` must be larger at each start of this peer.
    `patience`: local rounds after which a pending peer seeks again.
    """

    def __init__(
        self,
        id: PeerId,
        incarnation: int,
        decision: Decision,
        *,
        peers: int,
        claim_timeout: float = 3.0,
        exchange_timeout: float = 20.0,
        patience: int = 10,
        seed: int = 0,
    ) -> None:
        for name, value in (
            ("claim_timeout", claim_timeout),
            ("exchange_timeout", exchange_timeout),
        ):
            if not 0 < value < math.inf:
                raise PolytempoError(f"{name} must be a number of seconds above 0, got {value}")
        if peers < 1 or patience < 1:
            raise PolytempoError(
                f"peers and patience must be at least 1, got peers={peers}, patience={patience}"
            )
        self.identity = Identity(id, incarnation)
        self.decision = decision
        self.peers = peers
        self.claim_timeout = claim_timeout
        self.exchange_timeout = exchange_timeout
        self.patience = patience
        self.seed = seed
        self.phase: Phase = Idle()
        self.hints: dict[PeerId, Token] = {}  # whom we believe to be pending
        self.stopped = False
        self.rounds = 0  # local rounds since the last pairing
        self._snapshot: Snapshot | None = None
        self._ticket = 0
        self._oldest: dict[PeerId, Token] = {}  # of each peer, no token before this one stands

    def handle(self, event: PairingEvent) -> list[Action]:
        """Take an event; what to do now."""
        match event:
            case Boundary(snapshot):
                return self.boundary(snapshot)
            case Stop():
                return self.stop()
            case Appeared(token):
                return self.appeared(token)
            case Vanished(token):
                return self.vanished(token)
            case Gone(who):
                return self.gone(who)
            case Claimed(by, token):
                return self.claimed(by, token)
            case Exchanged(by, token, snapshot):
                return self.exchanged(by, token, snapshot)
            case DeadlinePassed(token):
                return self.deadline(token)
            case ClaimAnswered(token, granted):
                return self.claim_answered(token, granted)
            case ExchangeAnswered(token, answer):
                return self.exchange_answered(token, answer)

    # -- training -------------------------------------------------------------------------------

    def boundary(self, snapshot: Snapshot) -> list[Action]:
        """A local round has ended with this model."""
        self._snapshot = snapshot
        self.rounds += 1
        match self.phase:
            case Idle() if not self.stopped and self._wants_to_communicate(snapshot):
                return self._seek()
            case Pending(token, rounds) if rounds + 1 >= self.patience:
                return [Withdraw(token), *self._seek()]
            case Pending(token, rounds):
                self.phase = Pending(token, rounds + 1)
        return []

    def stop(self) -> list[Action]:
        """Stop taking part. A pairing under way is finished: leave when the phase is Idle."""
        self.stopped = True
        match self.phase:
            case Pending(token):
                self.phase = Idle()
                return [Withdraw(token)]
        return []

    # -- presence -------------------------------------------------------------------------------

    def appeared(self, token: Token) -> list[Action]:
        """A token stands. (Saying so again does no harm.)"""
        if token.peer == self.identity.peer or token < self._oldest.get(token.peer, token):
            return []
        self._oldest[token.peer] = self.hints[token.peer] = token
        match self.phase:
            case Pending(own) if token.peer < own.peer:
                return [Withdraw(own), *self._seek()]
        return []

    def vanished(self, token: Token) -> list[Action]:
        """A token no longer stands. (If we are claiming it, the answer is still to come.)"""
        after = token._replace(ticket=token.ticket + 1)
        self._oldest[token.peer] = max(after, self._oldest.get(token.peer, after))
        self._drop(token)
        return []

    def gone(self, who: Identity) -> list[Action]:
        """That peer is dead, or has left."""
        hint = self.hints.get(who.peer)
        if hint is not None and hint.owner == who:
            self._drop(hint)
        match self.phase:
            case Claiming(token) if token.owner == who:
                return self._seek()
            case Granted(to) if to == who:
                self.phase = Idle()
        return []

    # -- as the owner of a ticket ---------------------------------------------------------------

    def claimed(self, by: Identity, token: Token) -> list[Action]:
        """`by` claims our token."""
        match self.phase:
            case Pending(own) if own == token:
                self.phase = Granted(by, token)
                wait = SetDeadline(token, self.claim_timeout + self.exchange_timeout)
                return [AnswerClaim(by, token, True), Withdraw(token), wait]
        return [AnswerClaim(by, token, False)]

    def exchanged(self, by: Identity, token: Token, snapshot: Snapshot) -> list[Action]:
        """`by` sends its snapshot for our token. We take it in before we answer."""
        own = self._snapshot
        if self.phase != Granted(by, token):
            return [AnswerExchange(by, token, None)]
        assert own is not None, "only a boundary makes a peer pending"
        return [
            self._pair(Fusion(by, token, snapshot, own.progress)),
            AnswerExchange(by, token, own),
        ]

    def deadline(self, token: Token) -> list[Action]:
        """The time that was asked for with this token has passed."""
        match self.phase:
            case Granted(_, own) if own == token:
                self.phase = Idle()
        return []

    # -- as a claimer ---------------------------------------------------------------------------

    def claim_answered(self, token: Token, granted: bool | None) -> list[Action]:
        """The owner's answer to our claim, or None: there is none."""
        if self.phase != Claiming(token):
            return []
        if granted:
            own = self._snapshot
            assert own is not None, "only a boundary makes a peer claim"
            self.phase = Exchanging(token, own.progress)
            return [Exchange(token, own, self.exchange_timeout)]
        if granted is None:
            self._drop(token)
        else:  # it will never be granted
            self.vanished(token)
        return self._seek()

    def exchange_answered(self, token: Token, snapshot: Snapshot | None) -> list[Action]:
        """The owner's snapshot, or None: an error, or no answer."""
        match self.phase:
            case Exchanging(asked, _) if asked == token and snapshot is None:
                return self._seek()
            case Exchanging(asked, progress) if asked == token and snapshot is not None:
                return [self._pair(Fusion(token.owner, token, snapshot, progress))]
        return []

    # -- saving ---------------------------------------------------------------------------------

    def state_dict(self) -> State:
        """What the machine remembers: all but its settings."""
        return {
            "identity": spell(self.identity),
            "phase": spell(self.phase),
            "hints": [spell(token) for token in self.hints.values()],
            "oldest": [spell(token) for token in self._oldest.values()],
            "stopped": self.stopped,
            "rounds": self.rounds,
            "snapshot": spell(self._snapshot),
            "ticket": self._ticket,
        }

    def load_state_dict(self, state: State) -> None:
        """Resume from there, as the same incarnation."""
        saved = read(state["identity"])
        if saved != self.identity:
            raise PolytempoError(
                f"the pairing of {tuple(saved)} cannot continue as {tuple(self.identity)}; a later "
                "incarnation starts afresh"
            )
        self.phase = read(state["phase"])
        self.hints = {token.peer: token for token in map(read, state["hints"])}
        self._oldest = {token.peer: token for token in map(read, state["oldest"])}
        self.stopped, self.rounds = state["stopped"], state["rounds"]
        self._snapshot, self._ticket = read(state["snapshot"]), state["ticket"]

    # -- within ---------------------------------------------------------------------------------

    def _wants_to_communicate(self, snapshot: Snapshot) -> bool:
        stream = rng(self.seed, "peer", self.identity.peer, "decision", snapshot.iteration)
        return self.decision.communicate(
            Occasion(self.peers, self.rounds, snapshot.progress, bool(self.hints), stream)
        )

    def _seek(self) -> list[Action]:
        """Claim the smallest hint; without any become pending; after `stop` do neither."""
        if self.stopped:
            self.phase = Idle()
            return []
        if self.hints:
            token = min(self.hints.values())
            self.phase = Claiming(token)
            return [Claim(token, self.claim_timeout)]
        self._ticket += 1
        token = Token(*self.identity, self._ticket)
        self.phase = Pending(token)
        return [Announce(token)]

    def _drop(self, token: Token) -> None:
        """Forget the hint, unless its owner has announced a later token since."""
        if self.hints.get(token.peer, token) <= token:
            self.hints.pop(token.peer, None)

    def _pair(self, fusion: Fusion) -> Action:
        self.rounds = 0
        self.phase = Idle()
        return Paired(fusion)
