"""Options shared by several commands."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

Json = Annotated[bool, typer.Option("--json", help="Print JSON and nothing else.", metavar="")]
Config = Annotated[
    Path | None, typer.Option("--config", "-c", help="TOML file of settings; options override it.")
]
