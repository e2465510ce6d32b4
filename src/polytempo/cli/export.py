"""`polytempo export`: a client's model as a file."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape

from polytempo.cli.console import output
from polytempo.experiments.api import load


def export_command(
    run: Annotated[Path, typer.Argument(help="Folder of a run.")],
    *,
    client: Annotated[int, typer.Option(min=0, help="Whose model: the number of a client.")],
    to: Annotated[Path, typer.Option("--to", help="File to write: .safetensors, or .pt.")],
    adapted: Annotated[
        bool,
        typer.Option(
            "--adapted", help="After the client has fine-tuned it, not as handed.", metavar=""
        ),
    ] = False,
) -> None:
    """Write the model of a client to a file that plain torch or safetensors loads.

    Example: polytempo export runs/mine --client 3 --to model.safetensors

    The part of the model that stays with its client is included.
    """
    written = load(run).save_model(to, client, adapted)
    output.print(f"wrote [bold]{escape(str(written))}[/]", highlight=False, soft_wrap=True)
