"""Ctrl-C as a request to stop: what runs looks at it when it can."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def interruptible() -> Iterator[threading.Event]:
    """Ctrl-C (or SIGTERM) sets the flag, so that the run stops between two events; a second one
    breaks off at once."""
    flag = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield flag  # signals belong to the main thread
        return

    def handler(number: int, frame: object) -> None:
        if flag.is_set():
            raise KeyboardInterrupt
        flag.set()

    before = {number: signal.signal(number, handler) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield flag
    finally:
        for number, old in before.items():
            signal.signal(number, old)
