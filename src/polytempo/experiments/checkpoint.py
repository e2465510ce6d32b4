"""What a folder holds of a run: its last checkpoint, and the one before in case that is damaged."""

from __future__ import annotations

import warnings
from pathlib import Path

from polytempo.core.errors import PolytempoError
from polytempo.core.strategy import State
from polytempo.storage import load_state

CHECKPOINT = "checkpoint.safetensors"
PREVIOUS = "checkpoint.previous.safetensors"  # the one before, if the last is damaged


def read_checkpoint(folder: Path) -> State | None:
    """The checkpoint that a run has left in its folder, if it got that far; if the last one is
    damaged, the one before it."""
    last, previous = folder / CHECKPOINT, folder / PREVIOUS
    if not last.exists():  # perhaps a crash came between the two
        return load_state(previous) if previous.exists() else None
    try:
        return load_state(last)
    except PolytempoError as error:
        if not previous.exists():
            raise
        state = load_state(previous)
        what, _, _ = str(error).partition("; ")  # what to do about it is done here
        warnings.warn(f"{what}. Used instead: {previous}", stacklevel=2)
        return state


def must_be_new(folder: Path) -> None:
    """A folder that already holds a run is left alone."""
    if holds_run(folder):
        raise PolytempoError(
            f"{folder} already holds a run; continue it with --resume {folder}, choose another "
            "--out, or delete it"
        )


def holds_run(folder: Path) -> bool:
    """Whether there is a run in this folder that could be read or resumed."""
    try:
        return any((folder / name).exists() for name in (CHECKPOINT, PREVIOUS, "result.json"))
    except NotADirectoryError as error:
        raise PolytempoError(f"{folder}: {error.filename} is a file, not a folder") from error
