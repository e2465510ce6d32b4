"""`polytempo strategies`: list the strategies."""

from __future__ import annotations

import inspect
from dataclasses import fields
from typing import Any, cast

from rich.markup import escape

from polytempo.cli.console import listing, output
from polytempo.cli.options import Json
from polytempo.core.registry import Options
from polytempo.strategies import STRATEGIES


def strategies_command(as_json: Json = False) -> None:
    """List the strategies with their papers and options."""
    found = []
    for name in STRATEGIES:
        cls = cast(Any, STRATEGIES[name])
        about = inspect.getdoc(cls) or ""
        found.append(
            {
                "name": name,
                "family": cls.family,
                "paper": cls.paper,
                "summary": about.partition("\n")[0],
                "parameters": _parameters(cls()),
                "description": about,
            }
        )
    if as_json:
        output.print_json(data=found)
        return
    title = "Strategies: written as NAME or NAME:option=value,option=value"
    table = listing(title, "name", "what it is", "options and defaults", show_lines=True)
    for row in found:
        options = "\n".join(f"{k}={v}" for k, v in row["parameters"].items())
        about = f"{row['summary']}\n[dim]{row['family']}; {escape(row['paper'])}[/]"
        table.add_row(row["name"], about, options or "-")
    output.print(table)


def _parameters(thing: Any) -> dict[str, Any]:
    """The options and their values, including nested ones (`graph.gamma`)."""
    found: dict[str, Any] = {}
    for name in (field.name for field in fields(thing) if field.init):
        value = getattr(thing, name)
        if isinstance(value, Options):
            found[name] = cast(Any, value).name
            found |= {f"{name}.{key}": inner for key, inner in _parameters(value).items()}
        else:
            found[name] = value
    return found
