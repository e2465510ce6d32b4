"""Every peer by itself: its speed, how far it has come, how good it was when."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from polytempo.simulation.extension import Extension, Row

if TYPE_CHECKING:
    from polytempo.simulation.peers import PeerSimulator


class EachPeer(Extension):
    """What the simulator of peers has to show, on top of what all runs have."""

    name = "peers"

    def __init__(self, simulator: PeerSimulator) -> None:
        self.simulator = simulator

    def figures(self) -> dict[str, Any]:
        return {"peers": self.simulator.peers()}

    def tables(self) -> dict[str, Sequence[Row]]:
        return {"peers": self.simulator.each}

    def plots(self) -> dict[str, dict[str, Any]]:
        """When which peer was how good; those on slow devices are called so."""
        factors, each = self.simulator.factors, self.simulator.each
        metric = self.simulator.metric
        lines: dict[str, tuple[list[float], list[float]]] = {}
        for peer, factor in enumerate(factors):
            rows = each[peer :: len(factors)]
            speed = f", {factor:g} times slower" if factor > 1 else ""
            times, values = [row["time"] for row in rows], [row[metric.name] for row in rows]
            lines[f"peer {peer}{speed}"] = times, values
        return {"peers": {"peers": lines, "metric": metric}}
