"""Arrays that take seconds to decode, kept as .npy files from one run to the next."""

from __future__ import annotations

import hashlib
import os
import tempfile
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from polytempo.data.partition import Array


def cache_dir() -> Path:
    """`POLYTEMPO_CACHE`, else `$XDG_CACHE_HOME/polytempo`, else `~/.cache/polytempo`."""
    if own := os.environ.get("POLYTEMPO_CACHE"):
        return Path(own).expanduser()
    if base := os.environ.get("XDG_CACHE_HOME"):
        return Path(base).expanduser() / "polytempo"
    return Path.home() / ".cache" / "polytempo"


def cached(name: str, sources: Sequence[Path], samples: int, build: Callable[[], Array]) -> Array:
    """What `build` makes of the source files, read from the cache when they have not changed.

    `samples` is the length that the array must have. The result may be mapped from the file, read
    only, so that processes on one machine share it.
    """
    stats = [(path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in sources]
    key = hashlib.blake2b(repr(stats).encode(), digest_size=8).hexdigest()
    path = cache_dir() / f"{name}-{key}.npy"
    try:
        kept: Array = np.load(path, mmap_mode="r", allow_pickle=False)
        if len(kept) == samples:
            return kept
    except (OSError, ValueError, EOFError):
        pass  # absent or damaged: rebuilt below
    made = build()
    try:
        _write(path, made)
    except OSError as error:
        warnings.warn(
            f"cannot keep {name} in {path.parent} ({error}); it will be decoded again next time; "
            "set POLYTEMPO_CACHE to a folder that can be written",
            stacklevel=2,
        )
    return made


def _write(path: Path, array: Array) -> None:
    """All or nothing: another process sees the whole file or none."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=path.stem, suffix=".tmp")
    try:
        with os.fdopen(handle, "wb") as file:
            np.save(file, array, allow_pickle=False)
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
