"""Where the command writes: results to standard output, everything else to standard error."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NoReturn

import typer
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

output = Console()
notes = Console(stderr=True)
_WIDE = 1000  # characters per line where the output is not a terminal


def complain(what: str) -> None:
    notes.print(f"[bold red]error:[/] {escape(what)}", soft_wrap=True, highlight=False)


def warn(what: str) -> None:
    notes.print(f"[yellow]warning:[/] {escape(what)}", soft_wrap=True, highlight=False)


def interrupted(how: str) -> NoReturn:
    """End the command after Ctrl-C, and say how to continue."""
    notes.print(f"[yellow]interrupted[/]; to continue: [bold]{escape(how)}[/]")
    raise typer.Exit(130)


def print_table(rows: Sequence[Mapping[str, str]]) -> None:
    """Empty columns are omitted; in a file, lines are as long as they need to be."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    first, *others = rows[0]
    others = [column for column in others if any(row[column] not in ("-", "") for row in rows)]
    table.add_column(first, min_width=10, overflow="fold")
    for column in others:
        table.add_column(column, justify="right", overflow="fold")
    for row in rows:
        table.add_row(*(escape(row[column]) for column in (first, *others)))
    (output if output.is_terminal else Console(file=output.file, width=_WIDE)).print(table)


def listing(title: str, *columns: str, show_lines: bool = False) -> Table:
    """An empty table whose first column is a name."""
    table = Table(title=title, box=box.SIMPLE_HEAD, show_lines=show_lines)
    for column in columns:
        table.add_column(column, style="bold" if column == "name" else None, overflow="fold")
    return table
