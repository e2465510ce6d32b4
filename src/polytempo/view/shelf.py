"""The runs in some folders: found again every few seconds, known to the page by number alone."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

from polytempo.view.folder import SIGNS, RunFolder, last_change

DEEP = 5  # folders within folders
LISTED = 200  # runs, the latest ones
VISITED = 20_000  # folders at one look
AGAIN = 2.0  # seconds


class Shelf:
    """A run is asked for by its key, which is looked up here: no path ever comes from a request."""

    def __init__(self, roots: Sequence[Path]) -> None:
        self.roots = [root.expanduser().absolute() for root in roots]
        self._runs: dict[Path, RunFolder] = {}
        self._keys: dict[str, RunFolder] = {}
        self._numbers: dict[Path, str] = {}
        self._lock = threading.Lock()
        self._looked = -AGAIN
        self.left_out = 0  # runs that are not listed

    def runs(self) -> dict[str, RunFolder]:
        """By key, the latest first."""
        with self._lock:
            if time.monotonic() > self._looked + AGAIN:
                self._look()
                self._looked = time.monotonic()
            return dict(self._keys)

    def _look(self) -> None:
        found: dict[Path, float] = {}
        for root in self.roots:
            for path in find(root):
                found[path] = last_change(path)
        latest = sorted(found, key=lambda path: (-found[path], path))
        self.left_out = max(0, len(latest) - LISTED)
        runs = {}
        for path in latest[:LISTED]:
            runs[path] = self._runs.get(path) or RunFolder(path, self._name(path))
            self._numbers.setdefault(path, str(len(self._numbers)))
        self._runs = runs
        self._keys = {self._numbers[path]: run for path, run in runs.items()}

    def _name(self, path: Path) -> str:
        """As short as it can be told from the others."""
        for root in self.roots:
            if path == root:
                return path.name
            with suppress(ValueError):
                below = path.relative_to(root).as_posix()
                return below if len(self.roots) == 1 else f"{root.name}/{below}"
        return path.name


def find(root: Path) -> Iterator[Path]:
    """The folders of runs in a folder. Links are not followed; a group of processes on one machine
    is listed by its members."""
    left, visited = [(root, 0)], 0
    while left and visited < VISITED:
        path, depth = left.pop()
        visited += 1
        inner, names = [], set()
        try:
            with os.scandir(path) as entries:
                for entry in entries:
                    if entry.is_dir(follow_symlinks=False):
                        inner.append(entry.name)
                    else:
                        names.add(entry.name)
        except OSError:
            continue
        if "config.toml" in names and (names & {*SIGNS, ".lock"}) and "server" not in inner:
            yield path
            continue
        if depth < DEEP:
            left += [(path / name, depth + 1) for name in inner if not name.startswith(".")]
