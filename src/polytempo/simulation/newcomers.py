"""Clients that join late, reported separately."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from polytempo.simulation.extension import Extension
from polytempo.simulation.metrics import final_value, over_clients
from polytempo.training import Score

if TYPE_CHECKING:
    from polytempo.simulation.simulator import Simulator


class Newcomers(Extension):
    """The metric over the clients that were not there at the beginning; None before they come."""

    name = "newcomers"

    def __init__(self, simulator: Simulator) -> None:
        self.simulator = simulator
        self.column = f"{simulator.metric.name}_newcomers"

    def evaluated(self, scores: Mapping[int, Score]) -> dict[str, Any]:
        new = [score for client, score in scores.items() if client in self.simulator.late]
        if not new:
            return {self.column: None}
        means = over_clients(new, self.simulator.problem)
        return {self.column: means[self.simulator.metric.name]}

    def figures(self) -> dict[str, Any]:
        return {self.column: final_value(self.simulator.history, self.column)}
