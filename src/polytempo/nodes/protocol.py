"""The vocabulary of peers: what they hold, the phases of a pairing, events in, actions out.

All are plain values. A driver (the simulator, the network) delivers events and carries out actions;
it decides nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

from torch import Tensor

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
    """Somebody's snapshot, to be fused into the current weights at the end of a local round."""

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
    """Waits to be claimed, and has done so for this many local rounds."""

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


# -- events: training ---------------------------------------------------------------------------


@dataclass(frozen=True)
class Started:
    """The peer is there and may begin to train."""


@dataclass(frozen=True)
class RoundEnded:
    """The learner has taken the steps that `Train` asked for."""


@dataclass(frozen=True)
class Boundary:
    """A local round has ended with this model (what a node tells its pairing)."""

    snapshot: Snapshot


@dataclass(frozen=True)
class Stop:
    """Stop taking part. A pairing under way is finished: leave when the phase is Idle."""


# -- events: presence ---------------------------------------------------------------------------


@dataclass(frozen=True)
class Appeared:
    """A token stands. (Saying so again does no harm.)"""

    token: Token


@dataclass(frozen=True)
class Vanished:
    """A token no longer stands. (If we are claiming it, the answer is still to come.)"""

    token: Token


@dataclass(frozen=True)
class Gone:
    """That peer is dead, or has left."""

    who: Identity


# -- events: the owner of a ticket --------------------------------------------------------------


@dataclass(frozen=True)
class Claimed:
    """`by` claims our token."""

    by: Identity
    token: Token


@dataclass(frozen=True)
class Exchanged:
    """`by` sends its snapshot for our token."""

    by: Identity
    token: Token
    snapshot: Snapshot


@dataclass(frozen=True)
class DeadlinePassed:
    """The time that `SetDeadline` asked for is over."""

    token: Token


# -- events: a claimer --------------------------------------------------------------------------


@dataclass(frozen=True)
class ClaimAnswered:
    """The owner's answer to our claim; None: there is none."""

    token: Token
    granted: bool | None


@dataclass(frozen=True)
class ExchangeAnswered:
    """The owner's snapshot; None: an error, or no answer."""

    token: Token
    snapshot: Snapshot | None


News: TypeAlias = (
    Stop
    | Appeared
    | Vanished
    | Gone
    | Claimed
    | Exchanged
    | DeadlinePassed
    | ClaimAnswered
    | ExchangeAnswered
)
PairingEvent: TypeAlias = Boundary | News
Event: TypeAlias = Started | RoundEnded | News


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
    """Ask `token.owner` for the token; report `ClaimAnswered`, with None after `timeout`."""

    token: Token
    timeout: float  # seconds


@dataclass(frozen=True)
class Exchange:
    """Send our snapshot to `token.owner`; report `ExchangeAnswered`, with None as soon as no answer
    can come (the owner died before it had sent one), after `timeout` at the latest."""

    token: Token
    snapshot: Snapshot
    timeout: float  # seconds


@dataclass(frozen=True)
class SetDeadline:
    """Report `DeadlinePassed(token)` after this many seconds. It need not be cancelled."""

    token: Token
    seconds: float


@dataclass(frozen=True)
class AnswerClaim:
    """Answer the claim of `to` at once."""

    to: Identity
    token: Token
    granted: bool


@dataclass(frozen=True)
class AnswerExchange:
    """Answer the exchange of `to` with our snapshot; None: with an error, it was not granted."""

    to: Identity
    token: Token
    snapshot: Snapshot | None


@dataclass(frozen=True)
class Train:
    """Begin a local round of this many steps, from the learner's present model; report
    `RoundEnded`. If an answer lacks it, the peer no longer trains."""

    steps: int


# Actions that ask for nothing: they say what has happened, for logs and counters.


@dataclass(frozen=True)
class Paired:
    """A partner's model has come in."""

    fusion: Fusion


@dataclass(frozen=True, eq=False)
class Fused:
    """It has been mixed into ours with that weight."""

    fusion: Fusion
    weight: float
    before: Tensor
    after: Tensor


@dataclass(frozen=True)
class Discarded:
    """It has not been, because the peer no longer trains."""

    fusion: Fusion


Action: TypeAlias = (
    Announce
    | Withdraw
    | Claim
    | Exchange
    | SetDeadline
    | AnswerClaim
    | AnswerExchange
    | Train
    | Paired
    | Fused
    | Discarded
)
