"""`polytempo certs`: certificates for mutual TLS."""

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
        str | None,
        typer.Option(help="Peers: ann,bob, or with an address: ann=10.0.0.1,bob=10.0.0.2"),
    ] = None,
    server: Annotated[
        str | None,
        typer.Option(help="Server: a name and its addresses, as in server=10.0.0.1"),
    ] = None,
    clients: Annotated[
        str | None,
        typer.Option(help="Clients: ann,bob, or a number of them (client-0, client-1, ...)"),
    ] = None,
    days: Annotated[int, typer.Option(min=1, help="How long they are valid.")] = 365,
) -> None:
    """Create a CA and certificates for servers, clients and peers.

    Example: polytempo certs --out certificates --server server=192.168.1.7 --clients ann,bob

    Without an address, a certificate is valid for this machine (127.0.0.1, ::1, localhost). A
    client needs none: nobody connects to it, and without one it cannot pass for a server. The CA of
    the folder signs; more can be added later. Each machine needs ca.pem and its own two files, and
    nothing else.
    """
    require_network("cryptography")
    from polytempo.network.certificates import LOCAL, make_certificates
    from polytempo.network.wire import check_name

    wanted: dict[str, list[str]] = {}
    for what, given in (("peer", names), ("server", server), ("client", _numbered(clients))):
        for part in filter(None, map(str.strip, (given or "").split(","))):
            name, _, where = part.partition("=")
            addresses = [where] if where else [] if what == "client" else list(LOCAL)
            wanted.setdefault(check_name(what, name), []).extend(addresses)
    if not wanted or "ca" in wanted:
        raise PolytempoError(
            f"--names {names or ''!r}: give at least one peer (or --server, --clients), and call "
            "none 'ca'"
        )
    for file in make_certificates(out.expanduser(), wanted, days=days):
        output.print(escape(str(file)), highlight=False, soft_wrap=True)


def _numbered(clients: str | None) -> str | None:
    """`3` means client-0,client-1,client-2."""
    if clients is None or not clients.isdigit():
        return clients
    return ",".join(f"client-{number}" for number in range(int(clients)))
