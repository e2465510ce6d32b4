"""`polytempo certs`: test certificates for mutual TLS."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape

from polytempo.cli.console import output
from polytempo.core.errors import PolytempoError
from polytempo.network.session import require_network


def certs_command(
    *,
    out: Annotated[Path, typer.Option("--out", "-o", help="Output folder: keep it secret.")],
    names: Annotated[
        str, typer.Option(help="Peers: ann,bob, or with an address: ann=10.0.0.1,bob=10.0.0.2")
    ],
) -> None:
    """Create a test CA and a certificate per peer, for mutual TLS.

    Example: polytempo certs --out certificates --names ann,bob=192.168.1.7

    Without an address, a certificate is valid for this machine (127.0.0.1, ::1, localhost).
    """
    require_network()
    from polytempo.network.certificates import LOCAL, make_certificates
    from polytempo.network.wire import check_name

    peers: dict[str, list[str]] = {}
    for part in filter(None, map(str.strip, names.split(","))):
        name, _, where = part.partition("=")
        peers.setdefault(check_name("peer", name), []).extend([where] if where else LOCAL)
    if not peers or "ca" in peers:
        raise PolytempoError(f"--names {names!r}: give at least one peer, and call none 'ca'")
    for file in make_certificates(out.expanduser(), peers):
        output.print(escape(str(file)), highlight=False, soft_wrap=True)
