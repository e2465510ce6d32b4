"""A web site on this machine, with the faults of real ones."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote


@dataclass
class Site:
    """Files by name, and how they are served.

    ranges: whether a part of a file can be asked for.
    versions: whether the server tells versions of a file apart (ETag).
    cut: for so many requests, the connection breaks after `cut_after` bytes.
    stuck: every connection breaks at this byte of a file, and none gets further.
    asked: for each request, the name and what was asked for (the header Range).
    """

    url: str = ""
    files: dict[str, bytes] = field(default_factory=dict)
    ranges: bool = True
    versions: bool = True
    cut: int = 0
    cut_after: int = 0
    stuck: int | None = None
    asked: list[tuple[str, str | None]] = field(default_factory=list)
    sent: int = 0


@contextmanager
def website() -> Iterator[Site]:
    site = Site()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            name = unquote(self.path).removeprefix("/")
            wanted = self.headers.get("Range")
            site.asked.append((name, wanted))
            if name not in site.files:
                self.send_error(404)
                return
            content = site.files[name]
            version = f'"{hash(content)}"' if site.versions else None
            start = 0
            if wanted and site.ranges and self.headers.get("If-Range") in (None, version):
                start = int(wanted.removeprefix("bytes=").rstrip("-"))
            if start and start >= len(content):
                self.send_response(416)
                self.send_header("Content-Range", f"bytes */{len(content)}")
                self.send_header("Content-Length", "0")
                self.end_headers()
                return
            self.send_response(206 if start else 200)
            if start:
                self.send_header(
                    "Content-Range", f"bytes {start}-{len(content) - 1}/{len(content)}"
                )
            if version:
                self.send_header("ETag", version)
            self.send_header("Content-Length", str(len(content) - start))
            self.end_headers()
            rest = content[start : site.stuck]
            if site.cut > 0:
                site.cut -= 1
                rest = rest[: site.cut_after]
            site.sent += len(rest)
            self.wfile.write(rest)

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    site.url = f"http://127.0.0.1:{server.server_port}/"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield site
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
