"""Files that others write, read as they grow.

A file may be longer at the next look, cut short (a resumed run cuts its log back to its
checkpoint), replaced by another, half-written, or gone. Nothing here is ever written.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO, Generic, TypeVar

CHUNK = 8 << 20  # bytes of a log that are read at one look, so that the page hears of progress
LARGEST = 64 << 20  # bytes of a file that is read whole
_REMEMBERED = 256  # last bytes read: if they have changed, the file is another one
T = TypeVar("T")


class Tail:
    """The complete lines of a file, each once."""

    def __init__(self, path: Path, chunk: int = CHUNK) -> None:
        self.path, self._chunk = path, chunk
        self.left = 0  # bytes that were not read yet, those of an incomplete line included
        self.behind = False  # whether there may be more to read at once
        self._forget()

    def _forget(self) -> None:
        self._offset, self._file, self._last = 0, (0, 0), b""

    def look(self) -> tuple[bool, list[bytes]]:
        """Whether the file begins anew, so that what was read before no longer counts; and its next
        lines."""
        try:
            with self.path.open("rb") as file:
                found = os.fstat(file.fileno())
                anew = self._offset > 0 and not self._goes_on(file, found)
                if anew:
                    self._forget()
                self._file = (found.st_dev, found.st_ino)
                file.seek(self._offset)
                data = file.read(self._chunk)
                end = data.rfind(b"\n") + 1
                if not end and len(data) == self._chunk:  # no line of ours is so long
                    end = len(data)
                self._offset += end
                self._last = (self._last + data[:end])[-_REMEMBERED:]
                self.left = max(0, found.st_size - self._offset)
                self.behind = len(data) == self._chunk
                return anew, data[:end].splitlines()
        except OSError:
            anew = self._offset > 0
            self._forget()
            self.left, self.behind = 0, False
            return anew, []

    def _goes_on(self, file: BinaryIO, found: os.stat_result) -> bool:
        """Whether this is still the file that was read, up to where it was."""
        if (found.st_dev, found.st_ino) != self._file or found.st_size < self._offset:
            return False
        file.seek(self._offset - len(self._last))
        return file.read(len(self._last)) == self._last


class Whole(Generic[T]):
    """A small file that is replaced now and then. What cannot be read leaves the value as it was:
    it may be whole at the next look."""

    def __init__(self, path: Path, read: Callable[[Path], T], empty: T) -> None:
        self.path, self.value, self._empty, self._read = path, empty, empty, read
        self._stamp: tuple[int, int, int] | None = None
        self.bad = False  # the file is there, and cannot be read

    def look(self) -> bool:
        """Whether there is something new."""
        try:
            found = self.path.stat()
        except OSError:
            gone = self._stamp is not None or self.bad
            self._stamp, self.value, self.bad = None, self._empty, False
            return gone
        stamp = found.st_ino, found.st_mtime_ns, found.st_size
        if stamp == self._stamp:
            return False
        self._stamp = stamp
        before = self.bad
        try:
            if found.st_size > LARGEST:
                raise ValueError(f"{found.st_size} bytes")
            self.value, self.bad = self._read(self.path), False
        except Exception:  # whatever a foreign or damaged file may cause: the page says so
            self.bad = True
            return not before
        return True
