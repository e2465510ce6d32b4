"""Shakespeare's plays by role: what people say, to be continued character by character."""

from __future__ import annotations

from typing import Annotated, ClassVar

import numpy as np
from pydantic import Field

from polytempo.core.registry import Options
from polytempo.data.partition import Array
from polytempo.data.pool import Pool
from polytempo.data.source import SOURCES, Request, reading
from polytempo.data.stored import locate, read_json
from polytempo.data.text import PADDING


def windows(tokens: Array, length: int) -> tuple[Array, Array]:
    """A sequence cut into samples [n, length], and for each of their tokens the one that follows.

    Samples do not overlap, so none is partly in another; every token but the first is a target
    once. The last sample is filled up with padding.
    """
    count = -(-(len(tokens) - 1) // length)
    x, y = np.full((2, count, length), PADDING, dtype=np.int64)
    x.reshape(-1)[: len(tokens) - 1] = tokens[:-1]
    y.reshape(-1)[: len(tokens) - 1] = tokens[1:]
    return x, y


@SOURCES.register("shakespeare")
class Shakespeare(Options):
    """Next character in the lines of each role (634 in shakespeare_roles.json.xz; editions differ a
    little), a user with a test part of its own, the end.

    length: characters per sample.
    """

    description: ClassVar[str] = "plays by role, next character"
    samples: ClassVar[int] = 51_354
    users: ClassVar[int] = 634
    problem: ClassVar[str] = "next-token"

    length: Annotated[int, Field(ge=1)] = 80

    def __call__(self, request: Request) -> Pool:
        (path,) = locate("shakespeare", request)
        with reading(path):
            stored = read_json(path)
            number = {character: place for place, character in enumerate(stored["alphabet"], 1)}
            parts = [
                (role, test, windows(np.array([number[c] for c in text]), self.length))
                for test, key in ((False, "text_train"), (True, "text_test"))
                for role, text in zip(stored["user"], stored[key], strict=True)
                if len(text) > 1
            ]
        sizes = [len(y) for _, _, (_, y) in parts]
        return Pool(
            name="shakespeare",
            x=np.concatenate([x for _, _, (x, _) in parts]),
            y=np.concatenate([y for _, _, (_, y) in parts]),
            outputs=len(number) + 1,
            users=np.repeat([role for role, _, _ in parts], sizes),
            test=np.repeat([test for _, test, _ in parts], sizes),
            problem=self.problem,
        )
