"""`/metrics` (Prometheus' text format) and `/healthz` on a port of their own.

Nothing here is secret, and nothing is protected: listen on this machine only, unless a firewall
says who may look.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from polytempo.core.errors import PolytempoError
from polytempo.network.fleet.security import check_address
from polytempo.network.fleet.server import FleetServer

BOUNDS = (0, 1, 2, 5, 10, 20, 50, 100, 200, 500, 1_000)  # of staleness, in updates
STALLED = 30.0  # seconds without a look at the node: something is wrong
Sample = tuple[Mapping[str, str], float]


def healthy(server: FleetServer) -> bool:
    return time.monotonic() - server.alive < STALLED


def text(server: FleetServer) -> str:
    """All figures, in Prometheus' text format."""
    return "\n".join(_lines(server)) + "\n"


def _lines(server: FleetServer) -> Iterator[str]:
    figures, streams, counts = server.figures, server.streams, server.counts
    for name, kind, what, key in (
        ("updates_total", "counter", "Updates folded in.", "updates"),
        ("updates_planned", "gauge", "Updates after which the run is over.", "updates_planned"),
        ("versions_total", "counter", "Times that the served models have changed.", "versions"),
        ("clients", "gauge", "Clients that have enrolled.", "clients"),
        ("members", "gauge", "Clients that take part now.", "members"),
        ("training", "gauge", "Clients in training.", "training"),
    ):
        yield from _metric(name, kind, what, [({}, float(figures.get(key, 0)))])
    yield from _metric(
        "messages_total",
        "counter",
        "Messages of a run, by kind.",
        [({"kind": kind}, n) for kind, n in figures.get("messages", {}).items()],
    )
    yield from _metric(
        "vector_bytes_total",
        "counter",
        "Bytes of the vectors in these messages.",
        [({"kind": kind}, n) for kind, n in figures.get("bytes", {}).items()],
    )
    yield from _staleness(figures.get("staleness", {}))
    found = dict(streams.counts)
    yield from _metric(
        "wire_bytes_total",
        "counter",
        "Bytes of all frames.",
        [({"direction": way}, found.get(f"bytes {way}", 0)) for way in ("in", "out")],
    )
    yield from _metric(
        "received_total",
        "counter",
        "Messages of clients, by kind.",
        [({"kind": kind}, found.get(kind, 0)) for kind in ("hello", "upload", "swapped", "scores")],
    )
    yield from _metric(
        "refused_total",
        "counter",
        "Streams that the server has ended, by status.",
        [
            ({"status": kind.removeprefix("refused ")}, n)
            for kind, n in sorted(found.items())
            if kind.startswith("refused ")
        ],
    )
    yield from _metric(
        "left_out_total",
        "counter",
        "Records that the strategy failed on.",
        [({}, counts["left out"])],
    )
    seconds = counts["fsync microseconds"] / 1e6
    yield from _metric("fsync_total", "counter", "Group commits.", [({}, counts["fsync"])])
    yield from _metric("fsync_seconds_total", "counter", "Time in these.", [({}, seconds)])
    for name, what, value in (
        ("connected", "Open streams.", streams.connected),
        ("queue_length", "Messages that wait for the server.", streams.inbox.qsize()),
        ("incoming_bytes", "Memory held by updates on their way in.", streams.held),
        ("healthy", "Whether the server looks after its clients.", healthy(server)),
    ):
        yield from _metric(name, "gauge", what, [({}, float(value))])


def _metric(name: str, kind: str, what: str, samples: Iterable[Sample]) -> Iterator[str]:
    name = f"polytempo_{name}"
    yield f"# HELP {name} {what}"
    yield f"# TYPE {name} {kind}"
    for labels, value in samples:
        yield f"{name}{_labels(labels)} {value:.10g}"


def _labels(labels: Mapping[str, str]) -> str:
    found = ",".join(f'{key}="{value}"' for key, value in labels.items())
    return f"{{{found}}}" if found else ""


def _staleness(counts: Mapping[int, int]) -> Iterator[str]:
    name = "polytempo_staleness_updates"
    yield f"# HELP {name} Staleness of the updates folded in: how many came in between."
    yield f"# TYPE {name} histogram"
    for bound in BOUNDS:
        yield f'{name}_bucket{{le="{bound}"}} {sum(n for s, n in counts.items() if s <= bound)}'
    yield f'{name}_bucket{{le="+Inf"}} {sum(counts.values())}'
    yield f"{name}_sum {sum(s * n for s, n in counts.items())}"
    yield f"{name}_count {sum(counts.values())}"


class MetricsServer:
    """Serves the figures of a server on `listen` (HOST:PORT); a daemon thread."""

    def __init__(self, server: FleetServer, listen: str = "127.0.0.1:0") -> None:
        host, port = check_address("--metrics", listen, secure=True)

        class Handler(BaseHTTPRequestHandler):
            timeout = 5.0

            def do_GET(self) -> None:
                status, kind, found = 404, "text/plain; charset=utf-8", "see /metrics, /healthz\n"
                if self.path == "/metrics":
                    status, kind = 200, "text/plain; version=0.0.4; charset=utf-8"
                    found = text(server)
                elif self.path == "/healthz":
                    good = healthy(server)
                    status, found = (200, "ok\n") if good else (503, "the server has stalled\n")
                data = found.encode()
                self.send_response(status)
                self.send_header("Content-Type", kind)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, format: str, *args: object) -> None:
                pass

        try:
            self._http = ThreadingHTTPServer((host, port), Handler)
        except OSError as error:
            raise PolytempoError(
                f"--metrics {listen}: {error.strerror}; choose a free port on this machine"
            ) from error
        self._http.daemon_threads = True
        threading.Thread(target=self._http.serve_forever, name="metrics", daemon=True).start()

    @property
    def address(self) -> str:
        host, port = self._http.server_address[:2]
        return f"{host!s}:{port}"

    def close(self) -> None:
        self._http.shutdown()
        self._http.server_close()
