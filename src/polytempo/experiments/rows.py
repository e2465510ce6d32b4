"""Tables as rows, each a dictionary: to CSV files and from them, and to pandas."""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from polytempo.files import replace_text


def read_table(path: Path) -> list[dict[str, Any]]:
    """The rows of a CSV file; what is not a name is a number, or None if it is not there."""
    with path.open(newline="", encoding="utf8") as file:
        rows = csv.DictReader(file)
        return [{k: v if k == "name" else _number(v) for k, v in row.items()} for row in rows]


def _number(text: str) -> float | int | None:
    if text == "":
        return None
    return int(text) if text.lstrip("-").isdigit() else float(text)


def write_table(path: Path, rows: Sequence[Mapping[str, Any]], durable: bool = True) -> None:
    """Rows as a CSV file."""
    replace_text(path, csv_text(rows), durable)


def csv_text(rows: Sequence[Mapping[str, Any]]) -> str:
    """Rows as CSV; what a row does not have is empty."""
    text = io.StringIO()
    columns = dict.fromkeys(key for row in rows for key in row)
    writer = csv.DictWriter(text, columns, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def as_frame(rows: Sequence[Mapping[str, Any]]) -> Any:
    """Rows as a pandas DataFrame; as they are, where pandas is not installed."""
    try:
        import pandas
    except ImportError:
        return [dict(row) for row in rows]
    return pandas.DataFrame.from_records([dict(row) for row in rows])
