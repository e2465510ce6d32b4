"""The event loop of this process for gRPC, in a thread of its own.

There is one for all servers and clients of a process: gRPC has one queue for all loops, and a loop
that is closed takes events of the others with it.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")
_lock = threading.Lock()
_loop: asyncio.AbstractEventLoop | None = None


def network_loop() -> asyncio.AbstractEventLoop:
    global _loop
    with _lock:
        if _loop is None:
            _loop = asyncio.new_event_loop()
            threading.Thread(target=_loop.run_forever, name="network", daemon=True).start()
        return _loop


def call(work: Coroutine[Any, Any, T], seconds: float = 60.0) -> T:
    """Have it done there; at most so long."""
    return asyncio.run_coroutine_threadsafe(work, network_loop()).result(seconds)
