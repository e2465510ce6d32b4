"""One peer, whole: its pairing, its model, what it fuses, when it stops. No clock, no socket, no
thread; events in, actions out.

1. `Train` asks the driver for a local round. The node does not train: the driver lets the learner
   take the steps, here, on a worker, now or later, and reports `RoundEnded`. In between nobody
   touches the learner.
2. What comes in meanwhile waits in the inbox. At the end of a round it is fused into the weights of
   that moment, so that no local step is overwritten; then others get to see the model.
3. *A fusion is applied only if a local round follows it.* Where peers hold different data, a model
   that was mixed and not trained on can be far worse than either of the two. So a peer that has
   reached its target, has spent its budget or was told to stop no longer fuses: what comes in, or
   waits in the inbox, is discarded. A pairing under way is still finished, with the model as it
   stands, so that the partner, which keeps training, gets what it was promised.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Protocol

from torch import Tensor

from polytempo.core.strategy import State
from polytempo.nodes.fusion import FusionRule
from polytempo.nodes.pairing import Pairing
from polytempo.nodes.protocol import (
    Action,
    Announce,
    AnswerExchange,
    Boundary,
    Discarded,
    Event,
    Exchange,
    Fused,
    Fusion,
    Identity,
    Paired,
    PairingEvent,
    Phase,
    RoundEnded,
    Snapshot,
    Started,
    Stop,
    Train,
    Withdraw,
)
from polytempo.nodes.state import read, spell


class Learner(Protocol):
    """What a node needs to know of the model that its driver trains."""

    @property
    def params(self) -> Tensor:
        """The model; replaced by a round or a fusion, never changed in place."""

    @property
    def iteration(self) -> int:
        """Steps taken so far."""

    def fuse(self, params: Tensor) -> None:
        """Continue from other weights."""

    def state_dict(self) -> State: ...

    def load_state_dict(self, state: State) -> None: ...


@dataclass
class Counts:
    """What a peer has sent and mixed in."""

    models: int = 0  # a pairing costs one on each side
    announcements: int = 0  # tokens announced, and tokens withdrawn
    fusions: int = 0


class PeerNode:
    """A peer that takes part until it has taken `target` steps in rounds of `local_steps`, or has
    sent `budget` models."""

    def __init__(
        self,
        pairing: Pairing,
        learner: Learner,
        fusion: FusionRule,
        *,
        target: int,
        local_steps: int,
        budget: float = math.inf,
    ) -> None:
        self.pairing, self.learner, self.fusion = pairing, learner, fusion
        self.target, self.local_steps, self.budget = target, local_steps, budget
        self.inbox: list[Fusion] = []
        self.counts = Counts()

    @property
    def identity(self) -> Identity:
        return self.pairing.identity

    @property
    def phase(self) -> Phase:
        return self.pairing.phase

    @property
    def complete(self) -> bool:
        """Whether there is nothing left to do: the target is reached or the budget spent."""
        return self.learner.iteration >= self.target or self.counts.models >= self.budget

    @property
    def stopped(self) -> bool:
        """Whether it has stopped training and pairing."""
        return self.pairing.stopped

    def handle(self, event: Event) -> list[Action]:
        """Take an event; what to do now, in order."""
        match event:
            case Started():
                return [*self._stop_if_complete(), *self._train()]
            case RoundEnded():
                actions = self._stop_if_complete()  # first: who has stopped has nothing to fuse
                actions += self._fuse()
                iteration = self.learner.iteration
                snapshot = Snapshot(self.learner.params, iteration / self.target, iteration)
                return [*actions, *self._pair(Boundary(snapshot)), *self._train()]
            case _:
                return self._pair(event)

    def _pair(self, event: PairingEvent) -> list[Action]:
        """Let the pairing take the event, and keep account of what it wants."""
        actions = self.pairing.handle(event)
        for action in actions:
            match action:
                case Announce() | Withdraw():
                    self.counts.announcements += 1
                case Exchange() | AnswerExchange(snapshot=Snapshot()):
                    self.counts.models += 1
                case Paired(fusion):
                    self.inbox.append(fusion)
        return [*actions, *self._stop_if_complete(), *self._discard()]

    def _stop_if_complete(self) -> list[Action]:
        return self._pair(Stop()) if self.complete and not self.stopped else []

    def _train(self) -> list[Action]:
        if self.stopped:
            return []
        return [Train(min(self.local_steps, self.target - self.learner.iteration))]

    def _fuse(self) -> list[Action]:
        """Mix what has come in into the weights of this moment."""
        actions: list[Action] = []
        for fusion in self.inbox:
            own, before = fusion.own_progress, self.learner.params
            [weight] = self.fusion.weights(own, [fusion.snapshot.progress])
            after = self.fusion.fuse(before, [fusion.snapshot], own)
            self.learner.fuse(after)
            actions.append(Fused(fusion, weight, before, after))
        self.counts.fusions += len(self.inbox)
        self.inbox = []
        return actions

    def _discard(self) -> list[Action]:
        if not self.stopped:
            return []
        inbox, self.inbox = self.inbox, []
        return [Discarded(fusion) for fusion in inbox]

    # -- saving ---------------------------------------------------------------------------------

    def lasting_state(self) -> State:
        """What a later incarnation resumes from: nothing of what is said to this one."""
        return {"learner": self.learner.state_dict(), "counts": asdict(self.counts)}

    def state_dict(self) -> State:
        """All that this incarnation resumes from, pairings under way included."""
        return {
            **self.lasting_state(),
            "pairing": self.pairing.state_dict(),
            "inbox": [spell(fusion) for fusion in self.inbox],
        }

    def load_lasting_state(self, state: State) -> None:
        """Resume where an earlier incarnation was."""
        self.learner.load_state_dict(state["learner"])
        self.counts = Counts(**state["counts"])

    def load_state_dict(self, state: State) -> None:
        """Resume as if nothing had happened."""
        self.load_lasting_state(state)
        self.pairing.load_state_dict(state["pairing"])
        self.inbox = [read(fusion) for fusion in state["inbox"]]
