"""Asynchronous learning among peers, without a server (Sad et al.: Towards Asynchronous
Peer-to-Peer Federated Learning for Heterogeneous Systems, EuroMLSys 2025)."""

from __future__ import annotations

from dataclasses import field
from math import ceil
from typing import Annotated, ClassVar

from pydantic import BeforeValidator, Field
from torch import Tensor

from polytempo.core.schedule import Steps
from polytempo.core.strategy import STRATEGIES, Context, Kind, Refill, Strategy
from polytempo.nodes.decision import DECISIONS, AtRandom, Decision
from polytempo.nodes.fusion import FUSIONS, FusionRule, ProgressWeighted


@STRATEGIES.register("p2p")
class P2P(Strategy):
    """Peers train on their own, and from time to time two of them mix their models. No server.

    Use it where there is nobody to run a server, or nobody to trust with one. After a local round
    a peer decides whether to look for a partner; one that finds nobody waits for a partner and
    keeps training meanwhile. Momentum and schedule continue across a fusion.

    `decision`: when to look for a partner: uniform (with probability `decision.rate` / K; the
    paper's rate is 2), every (`decision.rounds` local rounds), always, or never (local training
    alone). `fusion`: how much a partner counts: progress (by its share of the progress,
    `fusion.wf0` in all) or naive (`fusion.weight`, fixed).
    `local_steps`: iterations of a local round. `target`: iterations of each peer in the whole run,
    which has as many updates as that takes; None: the run's updates, shared equally. At each of the
    `milestones`, fractions of the target, the learning rate is multiplied by `gamma`. A peer that
    has reached its target no longer takes part, and discards what it received in its last local
    round: nobody would train on the mixture. `common_test`: every peer is tested on the test
    samples of all (the paper), not only on its own; slower, and useful where all hold data of one
    kind. `score_fusions`: also test each model just before and just after a fusion (slow), to see
    what fusions do to whom.

    An update is a local round of one peer, and a version is a pairing. Concurrency has no meaning:
    all peers train all the time.

    Where we depart from the paper: the peer that waits decides who is paired with it, whereas the
    paper's replicated buffer would let two claim it at once; what a peer receives while it trains
    is mixed into its weights at the end of the local round.
    """

    family: ClassVar[str] = "peer to peer, personalised"
    paper: ClassVar[str] = "Sad et al. 2025"
    engine: ClassVar[Kind] = "peers"
    refill: ClassVar[Refill] = "same"
    all_train: ClassVar[bool] = True

    decision: Annotated[Decision, BeforeValidator(DECISIONS.create)] = field(
        default_factory=AtRandom
    )
    fusion: Annotated[FusionRule, BeforeValidator(FUSIONS.create)] = field(
        default_factory=ProgressWeighted
    )
    local_steps: Annotated[int, Field(ge=1)] = 5
    target: Annotated[int, Field(ge=1)] | None = None
    milestones: tuple[Annotated[float, Field(gt=0, lt=1)], ...] = (0.5, 0.75)
    gamma: Annotated[float, Field(gt=0, le=1)] = 0.1
    common_test: bool = False
    score_fusions: bool = False

    def setup(self, context: Context) -> None:
        super().setup(context)
        self.models = [context.initial] * context.clients  # as the engine keeps them up to date

    def model_for(self, client: int) -> Tensor:
        return self.models[client]

    def updates_of_run(self, given: int, clients: int) -> int:
        """Local updates of all together: those given, or more if the target takes more."""
        return max(given, clients * ceil((self.target or 0) / self.local_steps))

    def schedule(self, target: int) -> Steps:
        """Of the learning rate, over the iterations of a peer."""
        at = (max(1, round(part * target)) for part in self.milestones)
        return Steps(at=tuple(at), gamma=self.gamma)

    def iterations(self, updates: int) -> int:
        """The target of each peer in a run of this many local rounds in total."""
        return self.target or max(1, updates // self.context.clients) * self.local_steps
