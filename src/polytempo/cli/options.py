"""Options that several commands have."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

Json = Annotated[
    bool, typer.Option("--json", help="Print JSON for machines, nothing else.", metavar="")
]
Config = Annotated[
    Path | None, typer.Option("--config", "-c", help="TOML file with settings; options win.")
]
