"""Serving the page: on this machine, or with a token elsewhere; by itself, or beside a run."""

from __future__ import annotations

import ipaddress
import secrets
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from polytempo.core.errors import PolytempoError

PORT = 7600  # unless it is taken, or another is asked for
WATCHED = 15.0  # seconds: a page that has not asked since then is not looked at
LAST_LOOKS = 3  # that a page takes before the view ends after its run: it has drawn the last state
PATIENCE = 60.0  # seconds that they may take
Say = Callable[[str], None]


def require_view() -> None:
    """The libraries of the extra, or an error that says how to get them."""
    missing = [name for name in ("starlette", "uvicorn", "plotly") if find_spec(name) is None]
    if missing:
        raise PolytempoError(
            f"the view needs {', '.join(missing)}, which is not installed; run: "
            'pip install "polytempo[view]"'
        )


def bind(listen: str | None) -> socket.socket:
    """A socket that listens on HOST:PORT, by default on this machine."""
    host, _, port = (listen or f"127.0.0.1:{PORT}").rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not host or not port.isdigit() or int(port) > 65_535:
        raise PolytempoError(f"--listen {listen}: expected HOST:PORT, such as 127.0.0.1:{PORT}")
    for each in (port, *(["0"] if listen is None else [])):  # the usual port may be taken
        try:
            family, *_, address = socket.getaddrinfo(host, int(each), type=socket.SOCK_STREAM)[0]
            return socket.create_server(address, family=family)
        except OSError as error:
            problem = error
    raise PolytempoError(
        f"--listen {listen or f'127.0.0.1:{PORT}'}: {problem.strerror}; choose another port"
    )


def is_local(host: str) -> bool:
    """Whether only this machine can reach it."""
    return ipaddress.ip_address(host) in ipaddress.ip_network("127.0.0.0/8")


def serve(
    folders: list[Path],
    *,
    listen: str | None = None,
    token: str | None = None,
    say: Say,
    until_eof: bool = False,
) -> None:
    """Serve until interrupted. `say` is told the address. Beyond this machine a token is needed,
    and made if none is given. `until_eof`: end when standard input does, a little later."""
    require_view()
    import uvicorn

    from polytempo.view.app import make_app

    with bind(listen) as place:
        host, port = place.getsockname()[:2]
        if token is None and not is_local(host):
            token = secrets.token_urlsafe(16)
        app = make_app(folders, token)
        settings = uvicorn.Config(
            app, log_level="error", lifespan="off", timeout_graceful_shutdown=2, ws="none"
        )
        if ipaddress.ip_address(host).is_unspecified:  # all interfaces: by what others know it
            host = socket.gethostname()
        where = f"[{host}]" if ":" in host else host
        address = f"http://{where}:{port}/" + (f"?token={token}" if token else "")

        class Server(uvicorn.Server):
            async def startup(self, sockets: list[socket.socket] | None = None) -> None:
                await super().startup(sockets)
                say(address)  # from now on it answers, also to Ctrl-C

        server = Server(settings)
        if until_eof:
            threading.Thread(target=_end_with_input, args=(server, app), daemon=True).start()
        with suppress(KeyboardInterrupt):  # the usual way to end it
            server.run(sockets=[place])


def _end_with_input(server: Any, app: Any) -> None:
    """When the run beside which this view was started has ended, or was killed: once a page that is
    open has seen it."""
    sys.stdin.buffer.read()
    ended, looks = time.monotonic(), app.state.looks
    if ended < app.state.looked + WATCHED:
        while app.state.looks < looks + LAST_LOOKS and time.monotonic() < ended + PATIENCE:
            time.sleep(0.1)
    server.should_exit = True


class Beside:
    """The view of a folder in a process of its own, so that it takes no time from the run. It ends
    soon after this process, however that ends."""

    def __init__(self, folder: Path, say: Say) -> None:
        require_view()
        command = [sys.executable, "-m", "polytempo", "view", str(folder)]
        self.process = subprocess.Popen(
            [*command, "--listen", "127.0.0.1:0", "--until-eof"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,  # Ctrl-C is meant for the run
        )
        threading.Thread(target=self._hear, args=(say,), daemon=True).start()

    def _hear(self, say: Say) -> None:
        assert self.process.stdout is not None
        with self.process.stdout as heard:
            address = heard.readline().strip()
        if address:
            say(address)

    def close(self) -> None:
        """Let it end once the page has seen the end of the run."""
        assert self.process.stdin is not None
        self.process.stdin.close()

    def __enter__(self) -> Beside:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
