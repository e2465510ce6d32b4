"""The log of a server: numbered entries in segment files, on disk before they count.

Theory of operation
-------------------
1. A segment is named by the number of its first entry. An entry is a header (magic, length, number,
   the number with which its *batch* began, checksum of all that and the bytes) and its bytes.
2. Entries are written in batches, each with one fsync; nobody is told of an entry before that. So
   what a crash leaves behind a batch that is complete belongs to the one batch that was being
   written, and nobody has counted on it: this *torn tail* is cut off when the journal is opened.
3. A batch begins only when the one before is safe. So a bad entry with a good one of a later batch
   (or segment) behind it was once safe and was damaged since: an error, and nothing is changed.
4. If the disk is full, the file is cut back to the last complete batch, and the error says so.
"""

from __future__ import annotations

import os
import struct
import zlib
from collections.abc import Iterator, Sequence
from contextlib import suppress
from io import BufferedReader, FileIO
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

from polytempo.core.errors import PolytempoError
from polytempo.files import sync, writing

Buffer = bytes | bytearray | memoryview
MAGIC = b"\xf0PTJ"
_HEAD = struct.Struct("<4sQQQI")
_SUMMED = struct.Struct("<QQQ")
_JOINED = 65_536  # bytes: smaller parts are written together
_sync_data = getattr(os, "fdatasync", os.fsync)  # the same, less the times of the file


class Journal:
    """Appends to the last segment of a folder, which holds only good entries from now on.

    `next`: the number of the next entry. `durable` False: without fsync, for benchmarks.
    """

    def __init__(self, folder: Path, *, durable: bool = True) -> None:
        self.folder, self._durable = folder, durable
        self._broken = False
        self._file: FileIO | None = None
        with writing(folder):
            folder.mkdir(parents=True, exist_ok=True)
            sync(folder.parent)
        self.next, self.torn = 0, 0
        last = self.segments()[-1:]
        for path in last:
            self.next = _first(path)
            end = 0
            for entry in _scan(path, last=True):
                self.next, end = entry.number + 1, entry.end
            self.torn = path.stat().st_size - end  # bytes that are cut off
            self._use(path, end)
        if not last:
            self.rotate()

    def segments(self) -> list[Path]:
        return sorted(self.folder.glob("*.log"))

    def rotate(self) -> None:
        """From here on, another segment (unless this one is empty)."""
        if self._file is not None and not self._end:
            return
        self._use(self.folder / f"{self.next:016d}.log", 0)
        with writing(self.folder):
            sync(self.folder)

    def _use(self, path: Path, end: int) -> None:
        self.close()
        self._path, self._end = path, end
        with writing(path):
            self._file = path.open("ab", buffering=0)
            self._file.truncate(end)
            os.fsync(self._file.fileno())

    def append(self, entries: Sequence[Sequence[Buffer]]) -> int:
        """Write these down, safely: the number of the first."""
        file = self._file
        if file is None or self._broken:
            raise PolytempoError(f"{self._path} is closed or could not be written; restart")
        first, parts, size = self.next, [], 0
        for number, data in enumerate(entries, first):
            length = sum(map(len, data))
            parts += [_head(length, number, first, data), *data]
            size += _HEAD.size + length
        try:
            with writing(self._path):
                _write_all(file, parts)
                if self._durable:
                    _sync_data(file.fileno())
        except BaseException:
            self._broken = True  # after a failed fsync nobody knows what the disk holds
            with suppress(OSError):
                file.truncate(self._end)
                os.fsync(file.fileno())
            raise
        self._end += size
        self.next += len(entries)
        return first

    def read(self, start: int = 0) -> Iterator[tuple[int, bytearray]]:
        """All entries from that number on, in order."""
        yield from read_journal(self.folder, start)

    def discard(self, before: int) -> None:
        """Remove the segments whose entries are all older than that."""
        paths = self.segments()
        for path, following in pairwise(paths):
            if _first(following) <= before:
                with writing(path):
                    path.unlink()

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None


def read_journal(folder: Path, start: int = 0) -> Iterator[tuple[int, bytearray]]:
    """All entries of a journal from that number on, in order; a torn tail is left out."""
    paths = sorted(folder.glob("*.log"))
    begin = [k for k, path in enumerate(paths) if _first(path) <= start]
    if start and not begin:
        raise PolytempoError(
            f"{folder} lacks the segment with entry {start}; restore it from a copy, or start anew"
        )
    expected: int | None = None
    for k in range(begin[-1] if begin else 0, len(paths)):
        first = _first(paths[k])
        if first != (first if expected is None else expected):
            raise PolytempoError(
                f"{folder} lacks the entries from {expected} to {first - 1}: a segment is missing; "
                "restore it from a copy, or start anew in another folder"
            )
        expected = first
        for entry in _scan(paths[k], last=k == len(paths) - 1):
            expected = entry.number + 1
            if entry.number >= start:
                yield entry.number, entry.data


class _Entry(NamedTuple):
    number: int
    batch: int
    data: bytearray
    end: int  # its last byte is before that


def _first(path: Path) -> int:
    try:
        return int(path.stem)
    except ValueError:
        raise PolytempoError(f"{path} is not a segment of a journal; move it away") from None


def _head(length: int, number: int, batch: int, data: Sequence[Buffer]) -> bytes:
    return _HEAD.pack(MAGIC, length, number, batch, _checksum(length, number, batch, data))


def _checksum(length: int, number: int, batch: int, data: Sequence[Buffer]) -> int:
    found = zlib.crc32(_SUMMED.pack(length, number, batch))
    for part in data:
        found = zlib.crc32(part, found)
    return found


def _scan(path: Path, *, last: bool) -> Iterator[_Entry]:
    """The good entries of a segment; what is bad is a torn tail (of the last one), or an error."""
    size, offset, number = path.stat().st_size, 0, _first(path)
    with path.open("rb") as file:
        while offset < size:
            entry = _entry_at(file, offset, size)
            if entry is None or entry.number != number:
                if last and not _later(file, offset + 1, size, number):
                    return
                raise PolytempoError(
                    f"{path} is damaged at byte {offset} (entry {number}): restore the file from "
                    "a copy. Without one, what was recorded from there on is lost: cut the file "
                    f"with `truncate -s {offset} {path}` and remove later segments and checkpoints"
                )
            yield entry
            offset, number = entry.end, number + 1


def _entry_at(file: BufferedReader, offset: int, size: int) -> _Entry | None:
    """The entry that begins there, if a good one does."""
    file.seek(offset)
    head = file.read(_HEAD.size)
    if len(head) < _HEAD.size:
        return None
    magic, length, number, batch, checksum = _HEAD.unpack(head)
    end = offset + _HEAD.size + length
    if magic != MAGIC or end > size:
        return None
    data = bytearray(length)
    if file.readinto(data) != length or _checksum(length, number, batch, [data]) != checksum:
        return None
    return _Entry(number, batch, data, end)


def _later(file: BufferedReader, offset: int, size: int, number: int) -> bool:
    """Whether a good entry of a batch that began after that number follows anywhere."""
    step = 2**20
    for begin in range(offset, size, step):
        file.seek(begin)
        block = file.read(step + len(MAGIC) - 1)
        place = block.find(MAGIC)
        while place >= 0:
            entry = _entry_at(file, begin + place, size)
            if entry is not None and entry.batch > number:
                return True
            place = block.find(MAGIC, place + 1)
    return False


def _write_all(file: FileIO, parts: Sequence[Buffer]) -> None:
    """Write all of it, in few system calls; each of them may do less than it was asked for."""
    for part in _joined(parts):
        rest = memoryview(part)
        while len(rest):
            rest = rest[file.write(rest) :]


def _joined(parts: Sequence[Buffer]) -> Iterator[Buffer]:
    small = bytearray()
    for part in parts:
        if len(part) < _JOINED:
            small += part
        if len(small) >= _JOINED or (len(part) >= _JOINED and small):
            yield bytes(small)
            small.clear()
        if len(part) >= _JOINED:
            yield part
    yield bytes(small)
