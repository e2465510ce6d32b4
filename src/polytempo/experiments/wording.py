"""The figures of one run as text, for people: in a notebook, in its report, in the terminal."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from polytempo.simulation import clusters
from polytempo.simulation.metrics import models_sent

if TYPE_CHECKING:
    from polytempo.experiments.result import RunResult


def figures_in_words(result: RunResult) -> dict[str, str]:
    """What a table of one run shows, by its columns."""
    summary, metric = result.summary, result.metric
    more = {} if summary["clusters"] is None else {"clusters": about_clusters(summary)}
    size = sum(v for k, v in summary["messages"].items() if k.endswith("_bytes"))
    if summary["staleness_mean"]:
        more["mean staleness"] = f"{summary['staleness_mean']:.1f}"
    return {
        "strategy": summary["strategy"],
        "handed": metric.text(result.value),
        "best": metric.text(summary[f"{metric.name}_best"]),
        "adapted": metric.text(result.adapted),
        "worst 10%": metric.text(summary[f"{metric.name}_worst10"]),
        **more,
        **about_guards(summary),
        result.clock: f"{result.seconds_taken:.1f} s",
        "messages": str(models_sent(summary["messages"])),
        "MB sent": f"{size / 1e6:,.1f}",
    }


def about_clusters(summary: Mapping[str, Any]) -> str:
    """How many clusters there are, and clients in none; where true groups are known, how well the
    others fit."""
    number, outside, pure, ari = (summary[key] for key in clusters.FIGURES)
    more = [f"{outside} clients in none"] if outside else []
    more += [] if ari is None else [f"purity {pure:.2f}, adjusted Rand index {ari:.2f}"]
    return f"{number}" + (f" ({'; '.join(more)})" if more else "")


def about_guards(summary: Mapping[str, Any]) -> dict[str, str]:
    """What there is to say of privacy, attacks and defences."""
    found = {}
    if private := summary.get("privacy"):
        worst, mid = (private[f"epsilon_{x}"] for x in ("max", "median"))
        found["privacy"] = (
            "no noise, so no bound"
            if worst is None
            else f"epsilon {worst:,.1f} for the client with most uploads ({mid:,.1f} median), "
            f"delta {private['delta']:g}"
        )
    if attack := summary.get("attack"):
        found["attack"] = (
            f"{attack['name']} by {len(attack['clients'])} clients ({attack['share']:.0%}); "
            "figures are over the others"
        )
    if defence := summary.get("defence"):
        found["defence"] = (
            f"{defence['name']}: {defence['changed']} of {defence['uploads']} updates cut down"
        )
    return found
