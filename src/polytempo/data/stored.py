"""The files of a data set in the data folder: our own, or the publisher's, which are converted into
our own the first time and kept in the cache."""

from __future__ import annotations

import glob
import hashlib
import json
import lzma
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from polytempo.core.errors import PolytempoError
from polytempo.data.cache import cache_dir
from polytempo.data.official import Arrays
from polytempo.data.origin import ORIGINS, Origin, megabytes
from polytempo.data.source import Request, reading
from polytempo.files import replacing


def lying(folder: Path, groups: Iterable[Sequence[str]]) -> list[Path]:
    """The paths of the first group of patterns that are all there; none if there is no such."""
    for group in groups:
        found = [sorted(glob.glob(glob.escape(str(folder)) + "/" + item)) for item in group]
        if all(found):
            return [Path(path) for paths in found for path in paths]
    return []


def at_hand(name: str, folder: Path) -> list[Path]:
    """The files of a data set in the folder, our own or the publisher's, if it is there."""
    origin = ORIGINS[name]
    return lying(folder, origin.own) or lying(folder, origin.lies)


def is_here(name: str, folder: Path) -> bool:
    """Whether the data set, and what it needs, is in the folder."""
    needs = ORIGINS[name].needs
    return bool(at_hand(name, folder)) and (needs is None or is_here(needs, folder))


def remedy(name: str, folder: Path) -> str:
    """What to do about a data set that is not there."""
    origin = ORIGINS[name]
    official = origin.remotes[0].file + (" ..." if len(origin.remotes) > 1 else "")
    return (
        f"{name} is not in {folder}; get it with `polytempo data get {name}` "
        f"({megabytes(origin.size)}), or set POLYTEMPO_DATA or --data-dir to a folder with "
        f"{' and '.join(origin.own[-1])} or the publisher's {official}; digits and synthetic need "
        "no files"
    )


def locate(name: str, request: Request) -> list[Path]:
    """The paths of a data set's files in our own format."""
    origin, folder = ORIGINS[name], request.folder
    if found := lying(folder, origin.own):
        return found
    found = lying(folder, origin.lies)
    if not found:
        raise PolytempoError(f"data set {remedy(name, folder)}")
    path = cache_dir() / f"{_key(name, found)}-{origin.own[0][0]}"
    if not path.is_file():
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            write(path, convert(name, origin, found))
        except (OSError, PolytempoError) as error:
            if isinstance(error, PolytempoError) and not isinstance(error.__cause__, OSError):
                raise
            raise PolytempoError(
                f"{name}: {path.parent} cannot be written ({error}); set POLYTEMPO_CACHE to a "
                "folder that can be"
            ) from error
    return [path]


def _key(name: str, paths: Sequence[Path]) -> str:
    """Changes when any of the files does."""
    files = [
        file
        for path in paths
        for file in (sorted(path.rglob("*")) if path.is_dir() else [path])
        if file.is_file()
    ]
    stats = [(str(file), file.stat().st_size, file.stat().st_mtime_ns) for file in files]
    return name + "-" + hashlib.blake2b(repr(stats).encode(), digest_size=8).hexdigest()


def convert(name: str, origin: Origin, paths: Sequence[Path]) -> Arrays:
    """The publisher's files as arrays of ours."""
    for path in paths:
        if not path.exists():
            raise PolytempoError(f"{name}: there is no {path}; give the path of an existing file")
    where = paths[0] if len(paths) == 1 else paths[0].parent
    with reading(where):
        return origin.convert(paths)


def write(path: Path, arrays: Arrays) -> None:
    """One of our own files: there whole, or not at all."""
    with replacing(path) as partial:
        if path.name.endswith(".json.xz"):
            with lzma.open(partial, "wt", preset=2, encoding="utf8") as file:
                json.dump(arrays, file, ensure_ascii=False)
        else:
            with partial.open("wb") as target:
                np.savez_compressed(target, **arrays)


def read_json(path: Path) -> dict[str, Any]:
    """One of our own files of text."""
    with lzma.open(path, "rt", encoding="utf8") as file:
        found: dict[str, Any] = json.load(file)
    return found
