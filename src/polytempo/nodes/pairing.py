"""One peer of an asynchronous federation without a server: events in, actions out, no I/O
(Sad et al.: Towards Asynchronous Peer-to-Peer Federated Learning, EuroMLSys 2025, Sec. 3).

After a local round a peer may decide to communicate. If it knows somebody who is waiting for a
partner it pairs with them; if not it becomes the one who waits ("pending"), tells all, and goes on
training. The paper keeps the waiting peer's id in a slot that is replicated on all peers. Messages
cross, so two peers can read the same id. Here the replicas are only *hints*, and the owner of a
ticket alone decides who gets it:

1. A peer that becomes pending announces a presence token: its name, its incarnation, and a ticket
   that it never uses again. Whoever sees the token notes it as a hint.
2. A peer that wants a partner claims the smallest hint from its owner. The owner says yes to one
   claimer and withdraws the token; everybody else hears no at once. So a ticket has one claimer.
3. The claimer sends its snapshot. The owner, if it still waits for this very claimer, queues the
   fusion and answers with its own snapshot; then the claimer queues its fusion. So whoever claimed
   and fused has a partner who fused before. The reverse cannot be promised: if the last answer is
   lost, only the owner has fused (two parties cannot agree over a line that may fail).
4. On a no, on silence and on death a claimer drops the hint, tries the next one, and becomes
   pending when none is left. An owner that granted stops waiting on the claimer's death or on a
   deadline. So nobody waits for ever, whoever dies and whatever is lost.
5. Of two pending peers the larger name withdraws and claims the smaller. Only the larger one moves,
   so that they do not run past each other.
6. Rule 5 fails if the announcement that should have told the larger one was lost, or if its claim
   met silence and the hint was dropped: both would be pending for ever. So a peer that has been
   pending for `patience` local rounds withdraws its token and seeks anew: it claims the smallest
   hint, if it has any, and else announces a new ticket, which is news to all.

    IDLE -> PENDING -> GRANTED -> IDLE                   the owner of a ticket
    IDLE or PENDING -> CLAIMING -> EXCHANGING -> IDLE    its claimer
                       CLAIMING -> CLAIMING or PENDING   its claim was in vain

Training never waits. The machine hands out the snapshot of the last round boundary and puts what it
receives into an inbox; the training loop empties it at a boundary and fuses into its *current*
weights, so no local step is overwritten. Only the model, the progress and an incarnation that grows
at each start need to be saved.

An engine carries out the actions and reports each event once. Events may come late, never, or in
any order: those that no longer matter are ignored. Tokens of one owner are ordered by incarnation
and ticket, so an announcement that arrives after its own withdrawal is known to be stale.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

from torch import Tensor

from polytempo.core.errors import PolytempoError
from polytempo.core.rng import rng
from polytempo.nodes.decision import Decision, Occasion

PeerId: TypeAlias = str


class Identity(NamedTuple):
    """Who speaks: a peer that has restarted is somebody else."""

    peer: PeerId
    incarnation: int


class Token(NamedTuple):
    """That its owner is pending. Never used again; later tokens of one owner are larger."""

    peer: PeerId
    incarnation: int
    ticket: int

    @property
    def owner(self) -> Identity:
        return Identity(self.peer, self.incarnation)


@dataclass(frozen=True, eq=False)
class Snapshot:
    """A peer's model at the end of a local round. Nobody changes `params` afterwards."""

    params: Tensor
    progress: float  # iterations done / target iterations
    iteration: int


@dataclass(frozen=True, eq=False)
class Fusion:
    """Somebody's snapshot, to be fused into the current weights at the next round boundary."""

    partner: Identity
    token: Token  # the pairing; the same on both sides
    snapshot: Snapshot
    own_progress: float  # ours, as we told the partner: both sides weigh by the same two


# -- phases -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Idle:
    """Trains, and wants nothing."""


@dataclass(frozen=True)
class Pending:
    """Waits to be claimed, for so many local rounds by now."""

    token: Token
    rounds: int = 0


@dataclass(frozen=True)
class Claiming:
    """Has asked the token's owner, who has not answered yet."""

    token: Token


@dataclass(frozen=True)
class Granted:
    """Has said yes to `to` and waits for its snapshot until the deadline."""

    to: Identity
    token: Token


@dataclass(frozen=True)
class Exchanging:
    """Was granted the token, has sent its snapshot of that progress, waits for the owner's."""

    token: Token
    progress: float


Phase: TypeAlias = Idle | Pending | Claiming | Granted | Exchanging


# -- actions ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Announce:
    """Let the token stand: all peers, latecomers too, see it until it is withdrawn or we die."""

    token: Token


@dataclass(frozen=True)
class Withdraw:
    """Take the token away."""

    token: Token


@dataclass(frozen=True)
class Claim:
    """Ask `token.owner` for the token; report `claim_answered`, with None after `timeout`."""

    token: Token
    timeout: float  # seconds


@dataclass(frozen=True, eq=False)
class Exchange:
    """Send our snapshot to `token.owner`; report `exchange_answered`, with None after `timeout`."""

    token: Token
    snapshot: Snapshot
    timeout: float  # seconds


@dataclass(frozen=True)
class SetDeadline:
    """Report `deadline(token)` after so many seconds. It need not be cancelled."""

    token: Token
    seconds: float


Action: TypeAlias = Announce | Withdraw | Claim | Exchange | SetDeadline


# -- the machine --------------------------------------------------------------------------------


class Peer:
    """The state machine. Each method is an event; it returns the actions to carry out, in order.

    `peers` is K, the number of members. `incarnation` must be larger at each start of this peer.
    `patience`: local rounds after which a pending peer seeks anew.
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
        self.model_messages = 0  # snapshots that we sent: a pairing costs one on each side
        self.announcements = 0  # tokens that we announced, and tokens that we withdrew
        self.rounds = 0  # local rounds since the last pairing
        self._snapshot: Snapshot | None = None
        self._inbox: list[Fusion] = []
        self._ticket = 0
        self._oldest: dict[PeerId, Token] = {}  # of each peer, no token before this one stands

    # -- training -------------------------------------------------------------------------------

    def boundary(self, snapshot: Snapshot) -> list[Action]:
        """A local round has ended with this model."""
        self._snapshot = snapshot
        self.rounds += 1
        match self.phase:
            case Idle() if not self.stopped and self._wants_to_communicate(snapshot):
                return self._seek()
            case Pending(token, rounds) if rounds + 1 >= self.patience:
                return [*self._withdraw(token), *self._seek()]
            case Pending(token, rounds):
                self.phase = Pending(token, rounds + 1)
        return []

    def take_fusions(self) -> list[Fusion]:
        """What has come in since the last call, each once: fuse it into the current weights."""
        taken, self._inbox = self._inbox, []
        return taken

    def stop(self) -> list[Action]:
        """Take part no more. A pairing under way is finished: leave when the phase is Idle."""
        self.stopped = True
        match self.phase:
            case Pending(token):
                self.phase = Idle()
                return self._withdraw(token)
        return []

    # -- presence -------------------------------------------------------------------------------

    def appeared(self, token: Token) -> list[Action]:
        """A token stands. (Saying so again does no harm.)"""
        if token.peer == self.identity.peer or token < self._oldest.get(token.peer, token):
            return []
        self._oldest[token.peer] = self.hints[token.peer] = token
        match self.phase:
            case Pending(own) if token.peer < own.peer:
                return [*self._withdraw(own), *self._seek()]
        return []

    def vanished(self, token: Token) -> list[Action]:
        """A token stands no more. (If we are claiming it, the answer is still to come.)"""
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
            case Claiming(token) | Exchanging(token) if token.owner == who:
                return self._seek()
            case Granted(to) if to == who:
                self.phase = Idle()
        return []

    # -- as the owner of a ticket ---------------------------------------------------------------

    def claimed(self, by: Identity, token: Token) -> tuple[bool, list[Action]]:
        """`by` claims our token: the answer, to be sent at once, and what to do besides."""
        match self.phase:
            case Pending(own) if own == token:
                self.phase = Granted(by, token)
                wait = SetDeadline(token, self.claim_timeout + self.exchange_timeout)
                return True, [*self._withdraw(token), wait]
        return False, []

    def exchanged(
        self, by: Identity, token: Token, snapshot: Snapshot
    ) -> tuple[Snapshot | None, list[Action]]:
        """`by` sends its snapshot for our token: ours to answer with, or None for an error."""
        own = self._snapshot
        if self.phase != Granted(by, token):
            return None, []
        assert own is not None, "only a boundary makes a peer pending"
        self._pair(Fusion(by, token, snapshot, own.progress))
        self.model_messages += 1
        return own, []

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
            self.model_messages += 1
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
                self._pair(Fusion(token.owner, token, snapshot, progress))
        return []

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
        self.announcements += 1
        return [Announce(token)]

    def _withdraw(self, token: Token) -> list[Action]:
        self.announcements += 1
        return [Withdraw(token)]

    def _drop(self, token: Token) -> None:
        """Forget the hint, unless its owner has announced a later token since."""
        if self.hints.get(token.peer, token) <= token:
            self.hints.pop(token.peer, None)

    def _pair(self, fusion: Fusion) -> None:
        self._inbox.append(fusion)
        self.rounds = 0
        self.phase = Idle()
