"""A Zenoh session for one peer: named addresses, no multicast, mutual TLS with certificates.

Zenoh's defaults listen on every interface and look for others by multicast. Here a peer listens
where it was told to, knows a few seeds, and hears of the rest from them (gossip).
"""

from __future__ import annotations

import importlib.util
import json
import random
import socket
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from polytempo.core.errors import PolytempoError

if TYPE_CHECKING:
    import zenoh

LEASE_MS = 4_000  # a peer whose machine vanishes is forgotten after so long; a killed one at once


@dataclass(frozen=True)
class Certificates:
    """The authority that admits peers, and this peer's own certificate with its key (PEM files)."""

    ca: Path
    cert: Path
    key: Path


@dataclass(frozen=True)
class Address:
    """Where a peer listens, and whom it contacts first (any peers of the run, ideally several)."""

    listen: Sequence[str]
    connect: Sequence[str] = ()
    certificates: Certificates | None = None


def require_network(*modules: str) -> None:
    """Say what is missing before anything starts (without names: of what peers need)."""
    for module in modules or ("zenoh", "cryptography"):
        try:
            there = importlib.util.find_spec(module) is not None
        except ModuleNotFoundError:  # the package that it is in is missing
            there = False
        if not there:
            raise PolytempoError(f'a network needs {module}: pip install "polytempo[network]"')


def open_session(address: Address, most_bytes: int = 2**30) -> zenoh.Session:
    """Listen, and call the seeds; those that do not answer yet are called again, forever.

    Messages that would have more than this many bytes are not assembled.
    """
    require_network()
    import zenoh

    config = zenoh.Config()
    limit = {"transport/link/rx/max_message_size": most_bytes}
    for key, value in (settings(address) | limit).items():
        config.insert_json5(key, json.dumps(value))
    try:
        return zenoh.open(config)
    except zenoh.ZError as error:
        reason = str(error).partition(" at /")[0]
        raise PolytempoError(
            f"cannot listen on {', '.join(address.listen)} ({reason}); choose a free port on an "
            "address of this machine with --listen, and certificates that belong together"
        ) from error


def free_ports(count: int) -> list[int]:
    """Ports of the loopback interface that nobody listens on now, drawn at random from below those
    that systems give to outgoing connections: nobody takes them before they are used."""
    found: list[int] = []
    with ExitStack() as stack:
        for port in random.SystemRandom().sample(range(20_000, 32_000), 1_000):
            try:
                stack.enter_context(socket.socket()).bind(("127.0.0.1", port))
            except OSError:
                continue  # somebody listens there
            found.append(port)
            if len(found) == count:
                return found
    raise PolytempoError(f"this machine lacks {count} free ports between 20000 and 32000")


def settings(address: Address) -> dict[str, Any]:
    """Zenoh's configuration for a peer at this address."""
    secure = address.certificates is not None
    if not address.listen:
        raise PolytempoError("a peer needs an address to listen on, such as tcp/127.0.0.1:7447")
    for endpoint in (*address.listen, *address.connect):
        protocol, _, where = endpoint.partition("/")
        if protocol != ("tls" if secure else "tcp") or ":" not in where:
            raise PolytempoError(
                f"{endpoint!r} is not an address for a peer "
                + ("with" if secure else "without")
                + f" certificates; write it as {'tls' if secure else 'tcp'}/HOST:PORT"
            )
    found: dict[str, Any] = {
        "mode": "peer",
        "listen/endpoints": list(address.listen),
        "listen/exit_on_failure": True,
        "connect/endpoints": list(address.connect),
        "connect/exit_on_failure": False,
        "connect/timeout_ms": -1,  # keep calling, in the background (0 would be: once)
        "connect/retry": {
            "period_init_ms": 200,
            "period_max_ms": 2_000,
            "period_increase_factor": 2,
        },
        "scouting/multicast/enabled": False,
        "scouting/gossip/enabled": True,
        "transport/link/tx/lease": LEASE_MS,
    }
    if address.certificates is not None:
        files = address.certificates
        for file in (files.ca, files.cert, files.key):
            if not file.is_file():
                raise PolytempoError(
                    f"there is no file {file}; make test certificates with `polytempo certs`"
                )
        found |= {
            "transport/link/tls/root_ca_certificate": str(files.ca),
            "transport/link/tls/listen_certificate": str(files.cert),
            "transport/link/tls/listen_private_key": str(files.key),
            "transport/link/tls/connect_certificate": str(files.cert),
            "transport/link/tls/connect_private_key": str(files.key),
            "transport/link/tls/enable_mtls": True,
            "transport/link/tls/verify_name_on_connect": True,
            "transport/link/tls/close_link_on_expiration": True,
        }
    return found
