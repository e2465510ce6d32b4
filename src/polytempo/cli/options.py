"""Options shared by several commands."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from polytempo.core.errors import PolytempoError

if TYPE_CHECKING:
    from polytempo.network.session import Certificates

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
Ca = Annotated[Path | None, typer.Option(help="PEM: the CA that all trust.")]
Cert = Annotated[Path | None, typer.Option(help="PEM: our own certificate.")]
Key = Annotated[Path | None, typer.Option(help="PEM: its private key.")]


def certificates(ca: Path | None, cert: Path | None, key: Path | None) -> Certificates | None:
    """All three files, or none of them."""
    from polytempo.network.session import Certificates

    files = [file for file in (ca, cert, key) if file is not None]
    if len(files) not in (0, 3):
        raise PolytempoError("mutual TLS needs all of --ca, --cert and --key")
    return Certificates(*files) if files else None
