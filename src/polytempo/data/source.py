"""Where data sets come from: the registry of sources, and how their files are found and read."""

from __future__ import annotations

import lzma
import os
import zipfile
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from polytempo.core.errors import PolytempoError
from polytempo.core.registry import Registry
from polytempo.data.pool import Pool


@dataclass(frozen=True)
class Request:
    """What a source is told: where to look for files; and for made-up data, whom to make it for."""

    data_dir: str | Path | None = None
    clients: int | None = None
    seed: int = 0

    @property
    def folder(self) -> Path | None:
        """The folder for data files: as given, else that of POLYTEMPO_DATA."""
        given = self.data_dir or os.environ.get("POLYTEMPO_DATA")
        return Path(given).expanduser() if given else None


class Source(Protocol):
    """A data set that a user can name. Its options are the fields of the class."""

    def __call__(self, request: Request) -> Pool: ...


SOURCES: Registry[Source] = Registry("data set")


def missing(folder: Path | None, files: Sequence[str]) -> list[str]:
    """Those of the files that are not in the folder."""
    return [file for file in files if folder is None or not (folder / file).is_file()]


def remedy(name: str, folder: Path | None, files: Sequence[str]) -> str:
    """What to do about missing files."""
    looked = f"not in {folder}" if folder else "no data folder is set"
    return (
        f"{name} needs {' and '.join(files)} ({looked}); set POLYTEMPO_DATA or --data-dir to the "
        "folder that holds them; digits and synthetic need no files"
    )


def locate(name: str, request: Request, files: Sequence[str]) -> list[Path]:
    """The paths of a data set's files."""
    folder = request.folder
    if lacking := missing(folder, files):
        raise PolytempoError(f"data set {remedy(name, folder, lacking)}")
    assert folder is not None
    return [folder / file for file in files]


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Turns whatever a damaged file provokes into one line."""
    try:
        yield
    except KeyError as error:
        raise PolytempoError(
            f"{path} lacks the array {error}; it is not the expected file: download it again"
        ) from error
    except (
        *(OSError, ValueError, TypeError, EOFError),
        *(zipfile.BadZipFile, zlib.error, lzma.LZMAError),
    ) as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        raise PolytempoError(
            f"{path} cannot be read: {reason}; if it is damaged, download it again"
        ) from (error)
