"""What can go wrong, in one place. Messages name the value, what was expected and what to do."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class PolytempoError(Exception):
    """A mistake in what the user gave us. The command prints it as one line, with no traceback."""


class Refused(PolytempoError):
    """The server does not accept an update. Its state is as it was before the update came."""


class Diverged(PolytempoError):
    """A client's training diverged, so the run cannot continue."""


def nearest(word: str, known: Iterable[str]) -> str:
    """`"; did you mean 'x'?"` when some known word is close, else the list of known words."""
    known = sorted(known)
    by_lower = {name.lower(): name for name in known}
    close = difflib.get_close_matches(word.lower(), by_lower, n=1, cutoff=0.6)
    if close:
        return f"; did you mean {by_lower[close[0]]!r}?"
    return f"; choose from: {', '.join(known)}" if known else ""
