"""Every peer by itself: its speed, how far it has come, how good it was when."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor

from polytempo.core.strategy import State
from polytempo.simulation.extension import Extension, Row
from polytempo.training import Score

if TYPE_CHECKING:
    from polytempo.simulation.peers import PeerSimulator


class EachPeer(Extension):
    """What the simulator of peers has to show, on top of what all runs have."""

    name = "peers"

    def __init__(self, simulator: PeerSimulator) -> None:
        self.simulator = simulator
        self.rows: list[dict[str, float]] = []  # one for each peer and evaluation
        self.effects: list[list[float]] = [[] for _ in simulator.learners]  # of its fusions

    def evaluated(self, scores: Mapping[int, Score]) -> dict[str, Any]:
        metric = self.simulator.metric
        for client, score in scores.items():
            iteration = self.simulator.learners[client].iteration
            row = {"time": self.simulator.time, "peer": client, "iteration": iteration}
            self.rows.append(row | {metric.name: metric.value(score.sums)})
        return {}

    def score_fusion(self, client: int, before: Tensor, after: Tensor) -> None:
        """Note the effect of a fusion on the metric: after minus before."""
        metric = self.simulator.metric
        old, new = self.simulator.score([client, client], [before, after])
        self.effects[client].append(metric.value(new.sums) - metric.value(old.sums))

    def figures(self) -> dict[str, Any]:
        """Each peer as it stands: its speed, how far it has come, how good it is, and the mean
        effect that a fusion has had on its metric."""
        learners, metric = self.simulator.learners, self.simulator.metric.name
        last = self.rows[-len(learners) :]
        peers = [
            {
                "peer": client,
                "factor": self.simulator.factors[client],
                "iterations": learner.iteration,
                metric: last[client][metric],
                "fusion_effect": sum(effects) / len(effects) if effects else None,
            }
            for client, (learner, effects) in enumerate(zip(learners, self.effects, strict=True))
        ]
        return {"peers": peers}

    def tables(self) -> dict[str, Sequence[Row]]:
        return {"peers": self.rows}

    def plots(self) -> dict[str, dict[str, Any]]:
        """When which peer was how good; those on slow devices are called so."""
        factors, metric = self.simulator.factors, self.simulator.metric
        lines: dict[str, tuple[list[float], list[float]]] = {}
        for peer, factor in enumerate(factors):
            rows = self.rows[peer :: len(factors)]
            speed = f", {factor:g} times slower" if factor > 1 else ""
            times, values = [row["time"] for row in rows], [row[metric.name] for row in rows]
            lines[f"peer {peer}{speed}"] = times, values
        return {"peers": {"peers": lines, "metric": metric}}

    def state_dict(self) -> State:
        return {"rows": self.rows, "effects": self.effects}

    def load_state_dict(self, state: State) -> None:
        self.rows, self.effects = state["rows"], state["effects"]
