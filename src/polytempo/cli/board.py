"""What the user sees of peers: events in words, and tables of their progress."""

from __future__ import annotations

import threading
from typing import Any

from rich import box
from rich.table import Table

from polytempo.cli.console import output
from polytempo.core.metric import MetricInfo


def in_words(event: dict[str, Any]) -> str | None:
    """The event as a line of text, if it is of interest to the user."""
    match event["event"]:
        case "evaluated":
            metric = MetricInfo(**event["metric"])
            return (
                f"iteration {event['iteration']}: {metric.name} {metric.text(event['value'])}, "
                f"{event['fusions']} fusions, {event['messages']} models sent"
            )
        case "fused":
            return f"iteration {event['iteration']}: fused with {event['partner'][0]}"
        case "discarded":
            partner = event["partner"][0]
            return f"iteration {event['iteration']}: a model from {partner} came too late to use"
        case "joined" | "left" as what:
            return f"{event['who'][0]} {what}"
        case "alone":
            return f"starts with {event['others']} of {event['expected']} other peers"
        case "refused":
            return f"refused: {event['why']}"
        case "stuck":
            return (
                f"leaves without waiting any longer for its threads: {', '.join(event['threads'])}"
            )
    return None


class Board:
    """The progress of all peers of a group, as a table that is redrawn continually."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._rows: dict[str, dict[str, Any]] = {}
        self._metric: MetricInfo | None = None  # known with the first evaluation

    def note(self, event: dict[str, Any]) -> None:
        with self._lock:
            row = self._rows.setdefault(event["peer"], {"fused": 0, "partner": "-"})
            row["iteration"] = event["iteration"]
            row |= {key: event[key] for key in ("target", "value", "phase") if key in event}
            if event["event"] == "evaluated":
                self._metric = MetricInfo(**event["metric"])
            if event["event"] == "fused":
                row["fused"] += 1
                row["partner"] = event["partner"][0]
            if event["event"] == "stopped":
                row["phase"] = "done"

    def table(self) -> Table:
        table = Table(box=box.SIMPLE_HEAD)
        with self._lock:
            metric = self._metric
            title = metric.name if metric else "metric"
            for column in ("peer", "iteration", title, "fusions", "last partner", "phase"):
                table.add_column(column, justify="left" if column == "peer" else "right")
            for name, row in sorted(self._rows.items()):
                table.add_row(
                    name,
                    f"{row['iteration']}/{row.get('target', '?')}",
                    metric.text(row.get("value")) if metric else "-",
                    str(row["fused"]),
                    row["partner"],
                    str(row.get("phase", "-")).lower(),
                )
        return table


def show_peers(peers: list[dict[str, Any]]) -> None:
    """The outcome of each; all are judged by the same metric."""
    if not peers:
        return
    metric = MetricInfo(**peers[0]["metric"])
    table = Table(box=box.SIMPLE_HEAD)
    for column in ("peer", "iterations", metric.name, "fusions", "models sent", "announcements"):
        table.add_column(column, justify="left" if column == "peer" else "right")
    for row in peers:
        figures = (str(row[key]) for key in ("fusions", "messages", "announcements"))
        value = metric.text(row[metric.name])
        table.add_row(row["id"], str(row["iterations"]), value, *figures)
    output.print(table)
