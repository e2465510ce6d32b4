"""Where data sets come from: the registry of sources, and how their files are found and read."""

from __future__ import annotations

import lzma
import os
import tarfile
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from polytempo.core.errors import PolytempoError
from polytempo.core.registry import Registry
from polytempo.data.cache import cache_dir
from polytempo.data.pool import Pool


def data_folder(given: str | Path | None = None) -> Path:
    """The folder for data files: as given, else that of POLYTEMPO_DATA, else in our cache."""
    chosen = given or os.environ.get("POLYTEMPO_DATA")
    return Path(chosen).expanduser() if chosen else cache_dir() / "data"


@dataclass(frozen=True)
class Request:
    """What a source is told: where to look for files; and for made-up data, whom to make it for."""

    data_dir: str | Path | None = None
    clients: int | None = None
    seed: int = 0

    @property
    def folder(self) -> Path:
        """The folder for data files."""
        return data_folder(self.data_dir)


class Source(Protocol):
    """A data set that a user can name. Its options are the fields of the class."""

    def __call__(self, request: Request) -> Pool: ...


SOURCES: Registry[Source] = Registry("data set")
# Other names that are in use.
ALIASES = {"20newsgroups": "newsgroups20", "ag_news": "agnews", "fashionmnist": "fashion_mnist"}


def canonical(name: str) -> str:
    """The name of a data set as we write it: `uci-har` is `uci_har`."""
    plain = name.lower().replace("-", "_")
    return ALIASES.get(plain, plain if plain in SOURCES else name)


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
        *(zipfile.BadZipFile, tarfile.TarError, zlib.error, lzma.LZMAError),
    ) as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        raise PolytempoError(
            f"{path} cannot be read: {reason}; if it is damaged, download it again"
        ) from (error)
