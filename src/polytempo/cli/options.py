"""Options shared by several commands."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from polytempo.core.errors import PolytempoError, nearest

if TYPE_CHECKING:
    from polytempo.network.session import Certificates

FORMATS = ("text", "markdown", "latex", "csv", "json")
Json = Annotated[bool, typer.Option("--json", help="Print JSON and nothing else.", metavar="")]
Config = Annotated[
    Path | None, typer.Option("--config", "-c", help="TOML file of settings; options override it.")
]
Live = Annotated[
    bool,
    typer.Option(
        "--live",
        help="Show it in a web page as it goes (needs the extra `view`); records events.",
        metavar="",
    ),
]


def _known_format(form: str) -> str:
    if form not in FORMATS:
        raise PolytempoError(f"--format {form}: unknown{nearest(form, FORMATS)}")
    return form


TableFormat = Annotated[
    str,
    typer.Option(
        "--format",
        help="Of the table: text, markdown, latex; or its numbers: csv, json.",
        callback=_known_format,
    ),
]
Ca = Annotated[Path | None, typer.Option(help="PEM: the CA that all trust.")]
Cert = Annotated[Path | None, typer.Option(help="PEM: our own certificate.")]
Key = Annotated[Path | None, typer.Option(help="PEM: its private key.")]


def print_as(
    form: str, table: Sequence[Mapping[str, str]], numbers: Sequence[Mapping[str, Any]]
) -> None:
    """A table on standard output, in a form for documents or programs."""
    from polytempo.experiments.tables import formatted

    if table:
        sys.stdout.write(formatted(form, table, numbers) + "\n")


def certificates(ca: Path | None, cert: Path | None, key: Path | None) -> Certificates | None:
    """All three files, or none of them."""
    from polytempo.network.session import Certificates

    files = [file for file in (ca, cert, key) if file is not None]
    if len(files) not in (0, 3):
        raise PolytempoError("mutual TLS needs all of --ca, --cert and --key")
    return Certificates(*files) if files else None
