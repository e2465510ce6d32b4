"""Files that are there whole or not at all, and folders that belong to one process at a time.

A file is written next to the one that it replaces, synced to disk, and renamed; then the folder is
synced too, since otherwise a crash may undo the renaming. Whatever goes wrong, such as a full disk,
the old file is as it was.
"""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType

from polytempo.core.errors import PolytempoError

LOCK = ".lock"  # in a folder that somebody writes to: the number of that process


@contextmanager
def writing(path: str | os.PathLike[str]) -> Iterator[None]:
    """What the system refuses becomes an error that says what to do."""
    try:
        yield
    except OSError as error:
        raise PolytempoError(
            f"{error.filename or path} could not be written: {error.strerror or error}; what was "
            "saved before is intact: free some space (or grant write permission), then resume"
        ) from error


@contextmanager
def replacing(
    path: str | os.PathLike[str],
    keep: str | os.PathLike[str] | None = None,
    durable: bool = True,
) -> Iterator[Path]:
    """Yields a path to write to; what is there in the end takes the place of `path` at once. If
    anything goes wrong, nothing has changed. `keep`: what was there before goes there (a crash in
    that moment may leave it there alone). Not `durable`: a crash of the whole machine may undo it,
    or leave the file empty."""
    path = Path(path)
    partial = path.with_name(path.name + ".partial")
    with writing(path):
        try:
            yield partial
            if durable:
                sync(partial)  # the new bytes are on the disk before the old ones go
            if keep is not None and path.exists():
                os.replace(path, keep)
            os.replace(partial, path)
            if durable:
                sync(path.parent)
        except BaseException:
            with suppress(OSError):
                partial.unlink()
            raise


def replace_text(path: str | os.PathLike[str], text: str, durable: bool = True) -> None:
    """Write a small file; a crash leaves either the old file or the new one."""
    with replacing(path, durable=durable) as partial:
        partial.write_text(text, encoding="utf8", newline="")


def sync(path: Path) -> None:
    """Sync a file, or the names in a folder, to disk."""
    if path.is_dir() and sys.platform == "win32":
        return  # where folders cannot be opened, and renaming is durable
    number = os.open(path, os.O_RDONLY)
    try:
        os.fsync(number)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # no such thing on this file system
            raise
    finally:
        os.close(number)


class Appended:
    """Lines at the end of a file, which keeps its first `keep` lines (and must have them)."""

    def __init__(self, path: Path, keep: int = 0) -> None:
        self._path = path
        size = _length(path, keep)
        with writing(path):
            self._file = path.open("ab")
            self._file.truncate(size)

    def add(self, line: str) -> None:
        with writing(self._path):
            self._file.write(line.encode() + b"\n")

    def flush(self, durable: bool = True) -> None:
        """Hand all lines to the system, and (`durable`) sync them to disk."""
        with writing(self._path):
            self._file.flush()
            if durable:
                os.fsync(self._file.fileno())

    def __enter__(self) -> Appended:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: object, trace: TracebackType | None
    ) -> None:
        if kind is None:
            with writing(self._path):
                self._file.close()
        else:  # perhaps because this file cannot be written
            with suppress(OSError):
                self._file.close()


def _length(path: Path, lines: int) -> int:
    """Bytes that the first lines of a file take."""
    if not lines:
        return 0
    found = 0
    if path.exists():
        with path.open("rb") as file:
            for found, _ in enumerate(file, 1):
                if found == lines:
                    return file.tell()
    raise PolytempoError(
        f"{path} holds {found} of the {lines} lines that it had at the checkpoint; restore it, "
        "or start a new run"
    )


def _make(folder: Path) -> None:
    """Make the folder, though another process may be making or removing it."""
    while not folder.is_dir():
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except FileExistsError:  # a file, or a folder that was there for a moment
            if folder.exists() and not folder.is_dir():
                raise


class Claim:
    """A folder that no other process, and no other part of this one, writes to meanwhile. The
    system lets go of it when the process ends, however that happens."""

    def __init__(self, folder: Path, instead: str = "another --out") -> None:
        self._path, self._new = folder / LOCK, not folder.exists()
        try:
            _make(folder)
        except OSError as error:
            raise PolytempoError(
                f"{folder} cannot be made: {error.strerror}; choose {instead}"
            ) from error
        try:
            self._file = self._lock()
        except BlockingIOError as error:
            raise PolytempoError(
                f"{folder} is being written by another run{self._owner()}; wait for it, or choose "
                f"{instead}"
            ) from error
        except OSError as error:
            raise PolytempoError(
                f"{folder} cannot be written: {error.strerror}; choose {instead}"
            ) from error

    def _lock(self) -> int:
        while True:
            try:
                number = os.open(self._path, os.O_RDWR | os.O_CREAT, 0o644)
            except FileNotFoundError:  # the process that made the folder has just removed it
                _make(self._path.parent)
                continue
            try:
                _lock(number)
                # Whoever had it before has taken the file away: ours must be the one that is there.
                with suppress(FileNotFoundError):
                    if os.path.samestat(os.fstat(number), os.stat(self._path)):
                        os.ftruncate(number, 0)
                        os.write(number, str(os.getpid()).encode())
                        return number
            except BaseException:
                os.close(number)
                raise
            os.close(number)

    def _owner(self) -> str:
        with suppress(OSError):
            return f" (process {self._path.read_text(encoding='utf8')})"
        return ""

    def close(self) -> None:
        if self._file >= 0:
            with suppress(OSError):
                self._path.unlink()
                if self._new:
                    self._path.parent.rmdir()  # if nothing came of it
            os.close(self._file)
            self._file = -1

    def __enter__(self) -> Claim:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


if sys.platform == "win32":
    import msvcrt

    def _lock(number: int) -> None:
        try:
            msvcrt.locking(number, msvcrt.LK_NBLCK, 1)
        except OSError as error:
            raise BlockingIOError(*error.args) from error
else:
    import fcntl

    def _lock(number: int) -> None:
        fcntl.flock(number, fcntl.LOCK_EX | fcntl.LOCK_NB)
