"""What a peer keeps on disk: who it is, how far it has come, and what happened.

incarnation.json     grows at each start, and is written before the peer joins the network
state.safetensors    model, momentum, progress and history, replaced as a whole
events.jsonl         one event per line, of all incarnations
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from polytempo.core.errors import PolytempoError
from polytempo.core.strategy import State
from polytempo.files import Claim, replace_text, writing
from polytempo.storage import load_state, save_state

STATE, EVENTS, INCARNATION = "state.safetensors", "events.jsonl", "incarnation.json"


class Folder:
    """The folder of one peer. `watch` is told every event, from any thread."""

    def __init__(
        self, path: Path, peer: str, watch: Callable[[dict[str, Any]], None] = lambda event: None
    ) -> None:
        self.path, self.peer, self.watch = path, peer, watch
        self._claim = Claim(path)
        try:
            self.incarnation = self._next_incarnation()
            self._events = (path / EVENTS).open("ab", buffering=0)
        except BaseException:
            self._claim.close()
            raise
        self.iteration = 0  # noted with each event
        self._lock = threading.Lock()

    def _next_incarnation(self) -> int:
        """Larger than any before, even if the folder was lost: the clock makes sure of that."""
        file = self.path / INCARNATION
        try:
            found = json.loads(file.read_text()) if file.exists() else {"peer": self.peer}
            owner, last = found["peer"], int(found.get("incarnation", 0))
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise PolytempoError(
                f"{file} was not written by a peer ({error}); give another --out, or delete it"
            ) from error
        if owner != self.peer:
            raise PolytempoError(
                f"{self.path} is the folder of peer {owner!r}, not of {self.peer!r}; "
                "choose another --out"
            )
        now = max(last + 1, int(1000 * time.time()))
        replace_text(file, json.dumps({"peer": self.peer, "incarnation": now}) + "\n")
        return now

    def record(self, event: str, **what: Any) -> None:
        """Note an event. A line goes to the system in one call, so that a kill loses none."""
        found = {
            "time": round(time.time(), 4),
            "peer": self.peer,
            "incarnation": self.incarnation,
            "iteration": self.iteration,
            "event": event,
            **what,
        }
        with self._lock, writing(self.path / EVENTS):
            if not self._events.closed:
                self._events.write(json.dumps(found).encode() + b"\n")
        self.watch(found)

    def save(self, state: State) -> None:
        """Replace the state; a crash leaves the old one or the new one."""
        save_state(self.path / STATE, state)
        self.record("saved")

    def load(self) -> State | None:
        """The state that was saved last, if any was."""
        return load_state(self.path / STATE) if (self.path / STATE).exists() else None

    def close(self) -> None:
        with self._lock:
            self._events.close()
        self._claim.close()
