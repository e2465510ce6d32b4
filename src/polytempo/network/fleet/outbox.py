"""What one side of a stream has yet to say: small messages in order, and of each kind of message
with vectors only the newest.

A small message overtakes the vectors of a large one, unless it is about that very one (a request to
hurry, or to drop it): then it follows it. Used from one event loop only.
"""

from __future__ import annotations

import asyncio
from collections import deque
from dataclasses import dataclass, field

from polytempo.network.fleet.sending import Outgoing


@dataclass
class _Large:
    message: Outgoing
    next: int = -1  # the chunk that comes next; -1: the head
    after: list[bytes] = field(default_factory=list)  # small messages about it

    def frame(self) -> bytes:
        self.next += 1
        blob = self.message.blob
        assert blob is not None
        return self.message.head if self.next == 0 else blob.frame(self.next - 1)

    @property
    def over(self) -> bool:
        return self.message.blob is None or self.next >= len(self.message.blob)


class Outbox:
    """`most`: small messages that may wait; one more is an `OverflowError`."""

    def __init__(self, most: int = 1_000) -> None:
        self._most = most
        self._small: deque[bytes] = deque()
        self._waiting: dict[str, _Large] = {}  # by kind
        self._sending: dict[str, _Large] = {}
        self._turn: deque[str] = deque()  # kinds that are being sent
        self._more = asyncio.Event()

    def post(self, message: Outgoing) -> None:
        if message.blob is not None:
            self._waiting[message.kind] = _Large(message)
        else:
            about = self._about(message.number)
            if len(self._small) >= self._most or (about and len(about.after) >= self._most):
                raise OverflowError("too many messages wait to be read")
            (self._small if about is None else about.after).append(message.head)
        self._more.set()

    def _about(self, number: int | None) -> _Large | None:
        if number is not None:
            for found in (*self._waiting.values(), *self._sending.values()):
                if found.message.number == number:
                    return found
        return None

    @property
    def empty(self) -> bool:
        return not (self._small or self._waiting or self._sending)

    async def next(self) -> bytes:
        """The next frame; waits until there is one."""
        while True:
            if self._small:
                return self._small.popleft()
            for kind in [kind for kind in self._waiting if kind not in self._sending]:
                self._sending[kind] = self._waiting.pop(kind)
                self._turn.append(kind)
            if self._turn:
                return self._part(self._turn.popleft())
            self._more.clear()
            await self._more.wait()

    def _part(self, kind: str) -> bytes:
        large = self._sending[kind]
        frame = large.frame()
        if large.over:
            del self._sending[kind]
            self._small.extend(large.after)
        else:
            self._turn.append(kind)
        return frame
