"""Files inside files: folders, tar and zip archives (also zips in zips) and .gz, read in one pass.

Nothing is extracted to disk, so no archive can write outside its place.
"""

from __future__ import annotations

import gzip
import io
import tarfile
import zipfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import IO

Wanted = Callable[[str], bool]  # given a name without .gz


def unpack(paths: Iterable[Path], wanted: Wanted) -> Iterator[tuple[str, bytes]]:
    """Names, with `/` between folders and without .gz, and contents of all wanted files."""
    for path in paths:
        if not path.is_dir():
            yield from _file(path.name, path, wanted)
            continue
        for found in sorted(path.rglob("*")):
            if found.is_file():
                yield from _file(found.relative_to(path.parent).as_posix(), found, wanted)


def _file(name: str, path: Path, wanted: Wanted) -> Iterator[tuple[str, bytes]]:
    if name.endswith((".tar.gz", ".tgz", ".tar")):
        with tarfile.open(path) as archive:
            for member in archive:
                if member.isfile() and wanted(member.name.removesuffix(".gz")):
                    held = archive.extractfile(member)
                    assert held is not None
                    yield _plain(member.name, held.read())
    elif name.endswith(".zip"):
        with path.open("rb") as file:
            yield from _zip(file, wanted)
    elif wanted(name.removesuffix(".gz")):
        yield _plain(name, path.read_bytes())


def _zip(file: IO[bytes], wanted: Wanted) -> Iterator[tuple[str, bytes]]:
    with zipfile.ZipFile(file) as archive:
        for name in archive.namelist():
            if name.startswith("__MACOSX/"):  # what a Mac adds: copies of names, without contents
                continue
            if name.endswith(".zip"):
                yield from _zip(io.BytesIO(archive.read(name)), wanted)
            elif not name.endswith("/") and wanted(name.removesuffix(".gz")):
                yield _plain(name, archive.read(name))


def _plain(name: str, content: bytes) -> tuple[str, bytes]:
    return (name[:-3], gzip.decompress(content)) if name.endswith(".gz") else (name, content)
