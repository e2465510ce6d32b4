"""What a person is told of peers: events in words, and tables of where everybody is."""

from __future__ import annotations

import threading
from typing import Any

from rich import box
from rich.table import Table

from polytempo.cli.console import output
from polytempo.experiments.result import percent


def in_words(event: dict[str, Any]) -> str | None:
    """What a person wants to know of an event, if anything."""
    match event["event"]:
        case "evaluated":
            return (
                f"iteration {event['iteration']}: accuracy {percent(event['accuracy'])}, "
                f"{event['fusions']} fusions, {event['messages']} models sent"
            )
        case "fused":
            return f"iteration {event['iteration']}: fused with {event['partner'][0]}"
        case "discarded":
            partner = event["partner"][0]
            return f"iteration {event['iteration']}: a model of {partner} came too late to train on"
        case "joined" | "left" as what:
            return f"{event['who'][0]} {what}"
        case "alone":
            return f"begins with {event['others']} of {event['expected']} others"
        case "refused":
            return f"refused: {event['why']}"
    return None


class Board:
    """Where all peers of a group are, for a table that is drawn again and again."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._rows: dict[str, dict[str, Any]] = {}

    def note(self, event: dict[str, Any]) -> None:
        with self._lock:
            row = self._rows.setdefault(event["peer"], {"fused": 0, "partner": "-"})
            row["iteration"] = event["iteration"]
            row |= {key: event[key] for key in ("target", "accuracy", "phase") if key in event}
            if event["event"] == "fused":
                row["fused"] += 1
                row["partner"] = event["partner"][0]
            if event["event"] == "stopped":
                row["phase"] = "done"

    def table(self) -> Table:
        table = Table(box=box.SIMPLE_HEAD)
        for column in ("peer", "iteration", "accuracy", "fusions", "last partner", "phase"):
            table.add_column(column, justify="left" if column == "peer" else "right")
        with self._lock:
            for name, row in sorted(self._rows.items()):
                table.add_row(
                    name,
                    f"{row['iteration']}/{row.get('target', '?')}",
                    percent(row.get("accuracy")),
                    str(row["fused"]),
                    row["partner"],
                    str(row.get("phase", "-")).lower(),
                )
        return table


def show_peers(peers: list[dict[str, Any]]) -> None:
    table = Table(box=box.SIMPLE_HEAD)
    for column in ("peer", "iterations", "accuracy", "fusions", "models sent", "announcements"):
        table.add_column(column, justify="left" if column == "peer" else "right")
    for row in peers:
        figures = (str(row[key]) for key in ("fusions", "messages", "announcements"))
        table.add_row(row["id"], str(row["iterations"]), percent(row["accuracy"]), *figures)
    output.print(table)
