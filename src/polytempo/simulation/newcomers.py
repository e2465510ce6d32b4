"""Clients that join late, reported apart."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from polytempo.simulation.extension import Extension
from polytempo.simulation.metrics import final_accuracy, over_clients
from polytempo.training import Score

if TYPE_CHECKING:
    from polytempo.simulation.simulator import Simulator


class Newcomers(Extension):
    """The accuracy over the clients that were not there at the beginning; None before they come."""

    name = "newcomers"

    def __init__(self, simulator: Simulator) -> None:
        self.simulator = simulator

    def evaluated(self, scores: Mapping[int, Score]) -> dict[str, Any]:
        new = [score for client, score in scores.items() if client in self.simulator.late]
        return {"accuracy_newcomers": over_clients(new)["accuracy"] if new else None}

    def figures(self) -> dict[str, Any]:
        name = "accuracy_newcomers"
        return {name: final_accuracy(self.simulator.history, name)}
