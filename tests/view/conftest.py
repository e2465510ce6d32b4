"""Folders of runs as they are written, without running anything."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

CONFIG = 'updates = {updates}\nclients = {clients}\nseed = 0\n\n[strategy]\nname = "pace"\n'


class Log:
    """Makes events of a run, numbered and dated as the simulator does."""

    def __init__(self) -> None:
        self.n, self.updates = 0, 0

    def __call__(self, kind: str, time: float, **more: Any) -> bytes:
        self.updates += kind in ("upload", "train")
        head = {"n": self.n, "time": time, "event": kind, "updates": self.updates, "version": 0}
        self.n += 1
        return json.dumps(head | more).encode() + b"\n"


@pytest.fixture
def log() -> Log:
    return Log()


@pytest.fixture
def make_run(tmp_path):
    def make(
        name: str = "run", events: Iterable[bytes] = (), clients: int = 4, updates: int = 10
    ) -> Path:
        folder: Path = tmp_path / "runs" / name
        folder.mkdir(parents=True)
        (folder / "config.toml").write_text(CONFIG.format(clients=clients, updates=updates))
        (folder / "history.csv").write_text("time,updates,version,accuracy,loss,messages\n")
        lines = b"".join(events)
        if lines:
            (folder / "events.jsonl").write_bytes(lines)
        return folder

    return make
