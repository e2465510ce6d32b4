"""One peer on the network: trains when its node says so, evaluates, and saves.

The thread that calls `run` trains. It meets the rest only at the end of a round, when the node
fuses what has come in and says whether to continue. So training never waits for the network.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from polytempo.core.errors import PolytempoError
from polytempo.core.strategy import State
from polytempo.network.folder import Folder
from polytempo.network.link import Record
from polytempo.network.wire import Wire, check_name
from polytempo.nodes import Decision, FusionRule, Pairing, PeerNode, protocol
from polytempo.training import Learner


@dataclass(frozen=True)
class PeerPlan:
    """How a peer takes part in a run."""

    run: str
    peers: int  # K, this one included
    decision: Decision
    fusion: FusionRule
    target: int  # iterations of this peer
    steps: int = 5  # of a local round
    messages: int | None = None  # stop when this peer has sent this many models
    eval_every: int = 100  # local rounds
    save_every: int = 100  # local rounds
    wait_for: int = 0  # start once this many others are there ...
    wait_seconds: float = 30.0  # ... or after so long
    exchange_timeout: float = 20.0  # seconds for a model each way
    pause: float = 0.0  # seconds after each local round: a slower machine
    seed: int = 0


class Place(Protocol):
    """A peer's place in a network while it takes part: what a driver needs of a `Link`."""

    present: dict[str, int]
    failure: Exception | None

    def __enter__(self) -> Place: ...

    def __exit__(self, *_: object) -> None: ...

    def wait_for(self, others: int, seconds: float, stop: Callable[[], bool]) -> bool: ...

    def tell(self, event: protocol.Event) -> int: ...

    def leave(self) -> None: ...


class Driver:
    """Drives the peer of a folder. A folder with saved state is resumed under a new incarnation.

    Figures (`messages` that carried a model, `announcements`, `fusions`, `seconds`) are those of
    all incarnations, as far as they were saved. `fixed`: settings that make it the same peer of the
    same run; a saved state is resumed only if they are the same, for the same target or a higher
    one. `join(node, wire, record)` gives the peer its place in a network (`partial(Link,
    address=...)`).
    """

    def __init__(
        self,
        learner: Learner,
        plan: PeerPlan,
        join: Callable[[PeerNode, Wire, Record], Place],
        folder: Folder,
        evaluate: Callable[[Learner], float],
        fixed: Mapping[str, Any],
    ) -> None:
        self.learner, self.plan, self.join, self.folder = learner, plan, join, folder
        self.evaluate, self.fixed = evaluate, dict(fixed)
        self.metric = learner.solver.problem.metrics[0]
        self.wire = Wire(plan.run, learner.solver.layout)
        pairing = Pairing(
            check_name("peer", folder.peer),
            folder.incarnation,
            plan.decision,
            peers=plan.peers,
            exchange_timeout=plan.exchange_timeout,
            seed=plan.seed,
        )
        self.node = PeerNode(
            pairing,
            learner,
            plan.fusion,
            target=plan.target,
            local_steps=plan.steps,
            budget=math.inf if plan.messages is None else plan.messages,
        )
        self.history: list[dict[str, Any]] = []
        self._earlier = 0.0  # seconds of earlier incarnations
        self._begin = time.monotonic()
        state = folder.load()
        if state is not None:
            self._check(state)
            self.node.load_lasting_state(state["node"])
            self.history, self._earlier = state["history"], state["seconds"]
        folder.iteration = learner.iteration

    @property
    def figures(self) -> dict[str, Any]:
        counts = self.node.counts
        return {
            "messages": counts.models,
            "announcements": counts.announcements,
            "fusions": counts.fusions,
            "seconds": self._earlier + time.monotonic() - self._begin,
        }

    def run(self, interrupted: Callable[[], bool] = lambda: False) -> dict[str, Any]:
        """Take part until the target, the budget of messages or an interrupt."""
        learner, plan, folder = self.learner, self.plan, self.folder
        folder.record("started", target=self.node.target)
        with self.join(self.node, self.wire, folder.record) as place:
            try:
                self._take_part(place, interrupted)
            except Exception as error:
                if error is place.failure:  # not the model's fault: it can be resumed
                    self._save()
                raise
        last = self.history[-1]
        if (last["iteration"], last["fusions"]) != (learner.iteration, self.figures["fusions"]):
            self._evaluate()
        self._save()
        complete, name = self.node.complete, self.metric.name
        folder.record("stopped", complete=complete)
        return {
            "id": folder.peer,
            "run": plan.run,
            "complete": complete,
            "iterations": learner.iteration,
            "target": self.node.target,
            "metric": self.metric.about,
            name: self.history[-1][name],
            f"{name}_best": self.metric.best(row[name] for row in self.history),
            **self.figures,
        }

    def _take_part(self, place: Place, interrupted: Callable[[], bool]) -> None:
        learner, plan, folder = self.learner, self.plan, self.folder
        if not place.wait_for(plan.wait_for, plan.wait_seconds, interrupted):
            folder.record("alone", others=len(place.present), expected=plan.wait_for)
        if not self.history:
            self._evaluate()

        def tell(event: protocol.Event) -> int:
            if interrupted():
                # First: nobody would train on what is fused at a round's end.
                place.tell(protocol.Stop())
            return place.tell(event)

        rounds, steps = 0, tell(protocol.Started())
        while steps:
            learner.steps(steps)
            rounds += 1
            folder.iteration = learner.iteration
            steps = tell(protocol.RoundEnded())
            if rounds % plan.eval_every == 0:
                self._evaluate()
            if rounds % plan.save_every == 0:
                self._save()
            time.sleep(plan.pause)
        place.leave()

    def _evaluate(self) -> None:
        value, figures = self.evaluate(self.learner), self.figures
        row = {"iteration": self.learner.iteration, self.metric.name: value, **figures}
        self.history.append(row)
        self.folder.record("evaluated", metric=self.metric.about, value=value, **figures)

    def _save(self) -> None:
        self.folder.save(
            {
                "node": self.node.lasting_state(),
                "history": self.history,
                "seconds": self.figures["seconds"],
                "fixed": self.fixed,
                "target": self.plan.target,
            }
        )

    def _check(self, state: State) -> None:
        saved: dict[str, Any] = state["fixed"]
        other = [name for name, value in self.fixed.items() if saved.get(name) != value]
        if other:
            was, now = (
                ", ".join(f"{name}={found.get(name)}" for name in other)
                for found in (saved, self.fixed)
            )
            raise PolytempoError(
                f"{self.folder.path} holds a peer that was trained with {was}, not with {now}; "
                "give the same settings, or another --out"
            )
        if self.plan.target < state["target"]:
            raise PolytempoError(
                f"{self.folder.path} holds a peer on its way to {state['target']} iterations, more "
                f"than {self.plan.target}; give at least that target (with --updates or "
                "p2p:target=...), or another --out"
            )
