"""The contestant's side of the protocol; standard library only, so that it loads anywhere.

The coordinator (`peers.py`) starts every contestant once, in its own virtual environment, and then
writes lines to it: "go N" for N client trainings, "loss" for the loss of its global model. Each is
answered by one line of JSON when it is done. No more lines: time to end.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator

# Frameworks print. From the import of this module on, which is therefore a contestant's first, what
# is printed goes where errors go, and the pipe to the coordinator is for answers alone.
_answers = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)


def blocks(loss: Callable[[], float]) -> Iterator[int]:
    """Yields the number of trainings of every block that is asked for. To come back for the next
    block is to say that this one is done."""
    for line in sys.stdin:
        command, *number = line.split()
        if command == "loss":
            _answer({"loss": loss()})
        else:
            trainings = int(number[0])
            yield trainings
            _answer({"done": trainings})


def _answer(answer: dict[str, float]) -> None:
    _answers.write(json.dumps(answer) + "\n")
    _answers.flush()
