"""The web application: one page, and what it asks for, as JSON. It only ever reads."""

from __future__ import annotations

import hashlib
import hmac
import math
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal, cast, get_args

from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import HTTPConnection, Request
from starlette.responses import FileResponse, JSONResponse, PlainTextResponse, Response
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from polytempo.view import panels
from polytempo.view.shelf import Shelf

PAGE = Path(__file__).parent / "page"
HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; connect-src 'self'; "
    "style-src 'self' 'unsafe-inline'; img-src 'self' data: blob:; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}
# By which a browser on this machine may call: another name means that a foreign page asks.
LOCAL = ["127.0.0.1", "localhost"]


class Guard:
    """Asks for the token, if there is one: once in the address, then in a cookie. Sets headers."""

    def __init__(self, app: ASGIApp, token: str | None) -> None:
        self.app, self.token = app, token
        # Cookies know no ports: views with other tokens have others.
        self._cookie = "polytempo-" + hashlib.sha256((token or "").encode()).hexdigest()[:8]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return

        async def sending(message: Message) -> None:
            if message["type"] == "http.response.start":
                extra = [(k.lower().encode(), v.encode()) for k, v in HEADERS.items()]
                message["headers"] = [*message["headers"], *extra]
            await send(message)

        answer = self._refusal(HTTPConnection(scope))
        await (answer or self.app)(scope, receive, sending)

    def _refusal(self, request: HTTPConnection) -> Response | None:
        """What is answered in place of what was asked for; None if it may be had."""
        if self.token is None:
            return None
        given = request.query_params.get("token")
        if given is not None and request.url.path == "/" and self._is(given):
            answer = Response(status_code=303, headers={"Location": "/"})
            answer.set_cookie(self._cookie, given, httponly=True, samesite="strict")
            return answer
        bearer = request.headers.get("authorization", "").removeprefix("Bearer ")
        if self._is(request.cookies.get(self._cookie, "")) or self._is(bearer):
            return None
        return PlainTextResponse(
            "This view needs its token: open the address that `polytempo view` has printed.\n", 401
        )

    def _is(self, given: str) -> bool:
        return hmac.compare_digest(given.encode(), (self.token or "").encode())


def make_app(folders: list[Path], token: str | None = None) -> Starlette:
    """The view of the runs in these folders. Without a token it answers only to the names of this
    machine."""
    shelf = Shelf(folders)

    def page(request: Request) -> Response:
        return FileResponse(PAGE / "index.html")

    def plotly(request: Request) -> Response:
        return FileResponse(plotly_file(), media_type="text/javascript")

    def runs(request: Request) -> Response:
        app.state.looks, app.state.looked = app.state.looks + 1, time.monotonic()
        found = []
        for key, run in shelf.runs().items():
            with run.lock:
                run.look(closely=False)
                found.append({"key": key, **panels.about(run)})
        return JSONResponse(
            {
                "runs": found,
                "left_out": shelf.left_out,
                "folders": [str(root) for root in shelf.roots],
            }
        )

    def run(request: Request) -> Response:
        found = shelf.runs().get(request.path_params["key"])
        if found is None:
            return JSONResponse({"error": "there is no such run"}, 404)
        asked = request.query_params
        order = asked.get("order", "slowest")
        if order not in get_args(panels.Order):
            return JSONResponse({"error": f"unknown order {order!r}"}, 400)
        with found.lock:
            version = found.look()
            if asked.get("have") == f"{version}-{order}":
                return Response(status_code=204)
            shown = panels.everything(found, cast(panels.Order, order))
        return JSONResponse({"have": f"{version}-{order}", **shown})

    def matrix(request: Request) -> Response:
        found = shelf.runs().get(request.path_params["key"])
        which = request.path_params["which"]
        if found is None or which not in ("graph", "similarity"):
            return JSONResponse({"error": "there is no such matrix"}, 404)
        with found.lock:
            found.look()
            kind = cast(Literal["graph", "similarity"], which)
            shown = panels.matrix(found, kind, _integer(request.query_params.get("number"), -1))
        return JSONResponse(shown, 200 if shown else 404)

    middleware = [Middleware(Guard, token=token)]
    if token is None:
        middleware.append(Middleware(TrustedHostMiddleware, allowed_hosts=LOCAL))
    app = Starlette(
        routes=[
            Route("/", page),
            Route("/plotly.js", plotly),
            Route("/api/runs", runs),
            Route("/api/runs/{key}", run),
            Route("/api/runs/{key}/{which}", matrix),
            Mount("/page", StaticFiles(directory=PAGE)),
        ],
        middleware=middleware,
    )
    app.state.looks, app.state.looked = 0, -math.inf  # of pages, and the last one
    return app


def plotly_file() -> Path:
    """plotly.js, as the Python package brings it along (which itself is not loaded)."""
    found: Any = find_spec("plotly")
    return Path(found.submodule_search_locations[0]) / "package_data" / "plotly.min.js"


def _integer(text: str | None, otherwise: int) -> int:
    try:
        return max(-1, min(int(text or ""), 2**53))
    except ValueError:
        return otherwise
