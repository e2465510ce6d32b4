"""The folder of a run, read again whenever something in it has changed.

A folder may be of a run that goes on, is over, or was broken off; of a simulation or of a deployed
server; damaged, half-written, or of something else altogether. Whatever is missing is missing on
the page; nothing here fails.
"""

from __future__ import annotations

import csv
import io
import json
import math
import os
import sys
import threading
import time
import tomllib
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from polytempo.core.errors import PolytempoError
from polytempo.core.metric import ACCURACY, MetricInfo
from polytempo.files import LOCK
from polytempo.view.activity import Activity
from polytempo.view.tail import Tail, Whole

FRESH = 30.0  # seconds: a run whose files have changed since then goes on, wherever its process is
SIGNS = ("events.jsonl", "history.csv", "result.json")  # files of a run, beside config.toml
Row = dict[str, Any]
Arrays = dict[str, np.ndarray[Any, Any]]


def read_json(path: Path) -> Row:
    found = json.loads(path.read_text(encoding="utf8"))
    if not isinstance(found, dict):
        raise ValueError("not a table")
    return found


def read_toml(path: Path) -> Row:
    return tomllib.loads(path.read_text(encoding="utf8"))


def read_csv(path: Path) -> list[Row]:
    return as_rows(path.read_bytes().splitlines())


def read_arrays(path: Path) -> Arrays:
    """Arrays of an .npz; pickled objects are refused."""
    with np.load(path, allow_pickle=False) as found:
        return {name: found[name] for name in found.files}


def as_rows(lines: Sequence[bytes]) -> list[Row]:
    """The rows of a table of numbers, the first line being its head."""
    text = io.StringIO("\n".join(line.decode("utf8", "replace") for line in lines))
    return [
        {key: number(value) for key, value in row.items() if isinstance(key, str)}
        for row in csv.DictReader(text)
    ]


def number(text: Any) -> float | int | str | None:
    """A cell as a number, if it is one and finite; an empty one is None."""
    if not isinstance(text, str) or text == "":
        return None
    try:
        return int(text)
    except ValueError:
        pass
    try:
        found = float(text)
    except ValueError:
        return text
    return found if math.isfinite(found) else None


def numeric(value: Any) -> float | None:
    """The value, if it is a finite number."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return value if math.isfinite(value) else None


def last_change(path: Path) -> float:
    """When the files of a run were last written, in seconds since 1970."""
    latest = 0.0
    for name in (*SIGNS, "config.toml"):
        with suppress(OSError):
            latest = max(latest, (path / name).stat().st_mtime)
    return latest


class RunFolder:
    """What a folder holds, as of the last `look`. `version` counts the changes."""

    def __init__(self, path: Path, name: str) -> None:
        self.path, self.name = path, name
        self.lock = threading.RLock()  # requests come in threads
        self.version = 0
        self.config = Whole[Row](path / "config.toml", read_toml, {})
        self.about = Whole[Row](path / "about.json", read_json, {})
        self.result = Whole[Row](path / "result.json", read_json, {})
        self.each = Whole[list[Row]](path / "clients.csv", read_csv, [])
        self.clusters = Whole[list[Row]](path / "clusters.csv", read_csv, [])
        self.diagnosis = Whole[list[Row]](path / "diagnosis.csv", read_csv, [])
        self.graph = Whole[Arrays](path / "graph.npz", read_arrays, {})
        self.similarity = Whole[Arrays](path / "similarity.npz", read_arrays, {})
        self._few: Sequence[Whole[Any]] = (self.config, self.about, self.result)
        self._more: Sequence[Whole[Any]] = (
            *(self.each, self.clusters, self.diagnosis),
            *(self.graph, self.similarity),
        )
        self._log, self._table = Tail(path / "events.jsonl"), Tail(path / "history.csv")
        self._head: bytes | None = None  # of the history
        self.history: list[Row] = []
        self.deployed = (path / "journal").is_dir()
        self.activity = Activity(self.deployed)
        self.status = ""

    def look(self, closely: bool = True) -> int:
        """Read what is new; the version. Not closely: only what the list of runs needs."""
        with self.lock:
            changed = [whole.look() for whole in self._few] + [self._look_at_history()]
            if closely:
                changed += [whole.look() for whole in self._more] + [self._look_at_log()]
            status = self._status()
            self.version += any(changed) or status != self.status
            self.status = status
            return self.version

    def _look_at_log(self) -> bool:
        anew, lines = self._log.look()
        if anew:
            self.activity = Activity(self.deployed)
        self.activity.feed(lines)
        return anew or bool(lines)

    def _look_at_history(self) -> bool:
        anew, lines = self._table.look()
        if anew:
            self._head, self.history = None, []
        if lines and self._head is None:
            self._head, lines = lines[0], lines[1:]
        if lines and self._head is not None:
            self.history += as_rows([self._head, *lines])
        return anew or bool(lines)

    # -- what it is about --------------------------------------------------------------------------

    @property
    def unread(self) -> int:
        """Bytes of the log that will be read at the next looks."""
        return self._log.left if self._log.behind else 0

    @property
    def has_events(self) -> bool:
        return self.activity.events > 0

    @property
    def damaged(self) -> list[str]:
        """Files that cannot be read."""
        return [whole.path.name for whole in (*self._few, *self._more) if whole.bad]

    @property
    def strategy(self) -> str:
        found = self.result.value.get("strategy") or self.config.value.get("strategy")
        if isinstance(found, Mapping):
            found = found.get("name")
        return str(found or "run")

    @property
    def communicates(self) -> bool:
        """Whether its models are sent: those of clients alone only seem so in the events."""
        return self.strategy != "standalone"

    @property
    def lets_stale(self) -> bool:
        """Whether updates can be stale: those of a cohort cannot."""
        return self.communicates and self.config.value.get("refill") != "cohort"

    @property
    def seed(self) -> Any:
        return self.config.value.get("seed", self.result.value.get("seed"))

    @property
    def metric(self) -> MetricInfo:
        """As the run says; before it does, as far as the name tells."""
        for about in (self.about.value, self.result.value):
            with suppress(TypeError, PolytempoError):
                return MetricInfo(**about["metric"]) if "metric" in about else self._guessed()
        return self._guessed()

    def _guessed(self) -> MetricInfo:
        columns = list(self.history[0]) if self.history else []
        name = self.activity.metric or next(iter(columns[3:4]), ACCURACY.name)
        if name == ACCURACY.name or not name.isidentifier():
            return ACCURACY
        with suppress(PolytempoError):
            return MetricInfo(name, name, "higher", False)
        return ACCURACY

    @property
    def planned(self) -> int | None:
        """Updates after which the run is over."""
        found = self.config.value.get("updates")
        return found if isinstance(found, int) else None

    @property
    def number_of_clients(self) -> int:
        given = self.config.value.get("clients")
        seen = max(self.activity.clients, default=-1) + 1
        return max(seen, len(self.each.value), given if isinstance(given, int) else 0)

    def _status(self) -> str:
        """running, finished, interrupted, stopped (its process is gone), or empty: nobody knows."""
        if (self.path / LOCK).exists():
            return "running" if self._alive() else "stopped"
        match self.result.value.get("complete"):
            case True:
                return "finished"
            case False:
                return "interrupted"
        return ""

    def _alive(self) -> bool:
        """Whether the process that has locked the folder is there. It may be on another machine:
        then its files tell."""
        if sys.platform != "win32":  # where asking would end it
            with suppress(OSError, ValueError, OverflowError):
                os.kill(int((self.path / LOCK).read_text(encoding="utf8")), 0)
                return True
        return time.time() - last_change(self.path) < FRESH
