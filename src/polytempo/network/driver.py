"""One peer on the network: trains, and at each round's end fuses what has come in.

The thread that calls `run` trains. It meets the rest only at the end of a round: it takes the
fusions, applies them to its weights of that moment, and hands out the snapshot that others get
until the next round ends. So training never waits for the network, and no local step is
overwritten.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from polytempo.core.errors import PolytempoError
from polytempo.network.folder import Folder
from polytempo.network.link import Link
from polytempo.network.session import Address
from polytempo.network.wire import Wire, check_name
from polytempo.nodes import Decision, FusionRule, Peer, Snapshot
from polytempo.training import Learner


@dataclass(frozen=True)
class PeerPlan:
    """How a peer takes part in a run."""

    run: str
    peers: int  # K, this one included
    decision: Decision
    fusion: FusionRule
    steps: int = 5  # iterations of a local round
    messages: int | None = None  # stop when this peer has sent so many models
    eval_every: int = 100  # local rounds
    save_every: int = 100  # local rounds
    wait_for: int = 0  # begin when so many others are there ...
    wait_seconds: float = 30.0  # ... or after so long
    exchange_timeout: float = 20.0  # seconds for a model each way
    pause: float = 0.0  # seconds after each local round: a slower machine
    seed: int = 0


class Driver:
    """Drives the peer of a folder. One that holds a state is gone on with, as a new incarnation.

    Figures (`messages` that carried a model, `announcements`, `fusions`, `seconds`) are those of
    all incarnations, as far as they were saved. `fixed`: settings without which a saved state
    makes no sense; it is gone on with only if they are the same.
    """

    def __init__(
        self,
        learner: Learner,
        plan: PeerPlan,
        address: Address,
        folder: Folder,
        evaluate: Callable[[Learner], float],
        fixed: Mapping[str, Any],
    ) -> None:
        self.learner, self.plan, self.address, self.folder = learner, plan, address, folder
        self.evaluate, self.fixed = evaluate, dict(fixed)
        self.wire = Wire(plan.run, learner.solver.space)
        self.peer = Peer(
            check_name("peer", folder.peer),
            folder.incarnation,
            plan.decision,
            peers=plan.peers,
            exchange_timeout=plan.exchange_timeout,
            seed=plan.seed,
        )
        self.history: list[dict[str, Any]] = []
        self.fusions = 0
        self._earlier = {"messages": 0, "announcements": 0, "fusions": 0, "seconds": 0.0}
        self._begin = time.monotonic()
        state = folder.load()
        if state is not None:
            self._check(state.get("fixed", {}))
            learner.load_state_dict(state["learner"])
            self.history, self._earlier = state["history"], state["figures"]
        folder.iteration = learner.iteration

    @property
    def figures(self) -> dict[str, Any]:
        now = {
            "messages": self.peer.model_messages,
            "announcements": self.peer.announcements,
            "fusions": self.fusions,
            "seconds": time.monotonic() - self._begin,
        }
        return {name: value + self._earlier[name] for name, value in now.items()}

    def run(self, interrupted: Callable[[], bool] = lambda: False) -> dict[str, Any]:
        """Take part until the target, the budget of messages or an interrupt."""
        learner, plan, folder = self.learner, self.plan, self.folder
        folder.record("started", target=learner.schedule.target)
        with Link(self.peer, self.wire, self.address, folder.record) as link:
            try:
                self._take_part(link, interrupted)
            except Exception as error:
                if error is link.failure:  # not the model's fault: it can be gone on with
                    self._save()
                raise
        last = self.history[-1]
        if (last["iteration"], last["fusions"]) != (learner.iteration, self.figures["fusions"]):
            self._evaluate()
        self._save()
        complete = learner.finished or self._spent()
        folder.record("stopped", complete=complete)
        return {
            "id": folder.peer,
            "run": plan.run,
            "complete": complete,
            "iterations": learner.iteration,
            "target": learner.schedule.target,
            "accuracy": self.history[-1]["accuracy"],
            "accuracy_best": max(row["accuracy"] for row in self.history),
            **self.figures,
        }

    def _take_part(self, link: Link, interrupted: Callable[[], bool]) -> None:
        learner, plan, folder = self.learner, self.plan, self.folder
        if plan.messages is not None:
            link.budget = plan.messages - self._earlier["messages"]
        if not link.wait_for(plan.wait_for, plan.wait_seconds, interrupted):
            folder.record("alone", others=len(link.present), expected=plan.wait_for)
        if not self.history:
            self._evaluate()
        rounds = 0
        while not (learner.finished or interrupted() or self._spent()):
            learner.steps(plan.steps)
            rounds += 1
            folder.iteration = learner.iteration
            self._fuse(link)
            link.boundary(Snapshot(learner.params, learner.progress, learner.iteration))
            if rounds % plan.eval_every == 0:
                self._evaluate()
            if rounds % plan.save_every == 0:
                self._save()
            time.sleep(plan.pause)
        link.leave()
        self._fuse(link)

    def _spent(self) -> bool:
        budget = self.plan.messages
        return budget is not None and self.figures["messages"] >= budget

    def _fuse(self, link: Link) -> None:
        """Mix what has come in into the weights of this moment."""
        learner, rule = self.learner, self.plan.fusion
        for fusion in link.take_fusions():
            fused = rule.fuse(learner.params, [fusion.snapshot], fusion.own_progress)
            learner.fuse(fused)
            self.fusions += 1
            side = "owner" if fusion.token.peer == self.folder.peer else "claimer"
            partner = list(fusion.partner)
            self.folder.record("fused", token=list(fusion.token), side=side, partner=partner)

    def _evaluate(self) -> None:
        figures = {"accuracy": self.evaluate(self.learner), **self.figures}
        self.history.append({"iteration": self.learner.iteration, **figures})
        self.folder.record("evaluated", **figures)

    def _save(self) -> None:
        state = {"learner": self.learner.state_dict(), "history": self.history}
        self.folder.save({**state, "figures": self.figures, "fixed": self.fixed})

    def _check(self, saved: dict[str, Any]) -> None:
        other = [name for name, value in self.fixed.items() if saved.get(name) != value]
        if other:
            was, now = (
                ", ".join(f"{name}={found.get(name)}" for name in other)
                for found in (saved, self.fixed)
            )
            raise PolytempoError(
                f"{self.folder.path} holds a peer that learnt with {was}, not with {now}; give the "
                "same settings, or another --out"
            )
