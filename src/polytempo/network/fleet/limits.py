"""What one client, and all together, may take of a server; and how soon silence is noticed."""

from __future__ import annotations

import asyncio
import math
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from polytempo.core.errors import PolytempoError, nearest
from polytempo.network.fleet.reading import MOST_FRAME

WINDOW = 262_144  # bytes of one direction that are on the line, or wait in the system's buffers


@dataclass(frozen=True)
class Keepalive:
    """Milliseconds. For fleets on mobile links choose longer times: each ping wakes the radio.

    An answer may have to wait behind what is on the line already, so that is little (`WINDOW`):
    a link that carries it within the time-out, 26 KB per second by default, is not taken for dead.
    """

    time_ms: int = 1_000  # silence after which the other side is asked whether it is there
    timeout_ms: int = 10_000  # and how long its answer may take

    def options(self) -> list[tuple[str, int]]:
        return [
            ("grpc.keepalive_time_ms", self.time_ms),
            ("grpc.keepalive_timeout_ms", self.timeout_ms),
            # Without it an idle client that was frozen was not noticed in 28 s.
            ("grpc.http2.ping_timeout_ms", self.timeout_ms),
            ("grpc.http2.max_pings_without_data", 0),
            ("grpc.keepalive_permit_without_calls", 1),
            ("grpc.max_receive_message_length", MOST_FRAME),
            ("grpc.http2.bdp_probe", 0),  # else the window grows with the queue in front of it
            ("grpc.http2.lookahead_bytes", WINDOW),
        ]


@dataclass(frozen=True)
class Limits:
    """What one client, and all together, may take.

    `connections`: streams of all clients (of one name there are two at most: the one that counts,
    and the one that takes its place). `reconnects`: of one name, per second, after
    `reconnect_burst` that are free. `messages`: of one client, per second, after `message_burst` (a
    flood is read more slowly, and costs nobody else anything). `waiting`: messages that a client
    has not read yet before it is cut off.
    `memory`: bytes of updates that are on their way in. `extras`: bytes that an update may have
    beyond twice its vector. `write_seconds`: how long a client may take to accept a quarter of a
    megabyte. `slowest`: bytes per second that an upload must reach after `hello_seconds`.
    `contended`: bytes per second with which an upload keeps its turn while others wait for memory.
    `unasked`: bytes per second that are read of updates that no work was sent for.
    `farewell`: seconds for clients to hear that the run is over.
    """

    connections: int = 10_000
    reconnects: float = 2.0
    reconnect_burst: int = 10
    messages: float = 50.0
    message_burst: int = 200
    waiting: int = 1_000
    memory: int = 2**30
    extras: int = 2**20
    write_seconds: float = 20.0
    hello_seconds: float = 10.0
    slowest: float = 8_192.0
    contended: float = 1e6
    unasked: float = 1e6
    farewell: float = 5.0
    keepalive: Keepalive = Keepalive()

    def options(self) -> list[tuple[str, int]]:
        """gRPC's own."""
        return [
            *self.keepalive.options(),
            ("grpc.max_concurrent_streams", 2),
            # Clients ping as well, every few seconds; on a machine under load their pings arrive in
            # bunches. Only a flood of them is cut off (by default one in five minutes is allowed).
            ("grpc.http2.min_recv_ping_interval_without_data_ms", 10),
            ("grpc.http2.max_ping_strikes", 100),
            # A connection without a stream, or that never ends its handshake, costs a descriptor.
            ("grpc.max_connection_idle_ms", 15_000),
            ("grpc.server_handshake_timeout_ms", 10_000),
            ("grpc.max_metadata_size", 8_192),
            ("grpc.so_reuseport", 0),  # a second server on the port is an error
        ]


def limits_of(given: Mapping[str, Any]) -> Limits:
    """The usual limits with these changes, by name. The keepalive's are called `ping_after` and
    `ping_timeout` here, in seconds."""
    usual: dict[str, Any] = {f.name: f.default for f in fields(Limits) if f.name != "keepalive"}
    pings = {"ping_after": "time_ms", "ping_timeout": "timeout_ms"}
    chosen: dict[str, Any] = {}
    keepalive = Keepalive()
    for name, value in given.items():
        if name not in {*usual, *pings}:
            raise PolytempoError(
                f"unknown limit {name!r}{nearest(name, [*usual, *pings])}; there are "
                f"{', '.join([*usual, *pings])}"
            )
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if not number or not 0 < value < math.inf:
            raise PolytempoError(f"limit {name} = {value!r}: give a number above 0")
        if name in pings:
            keepalive = replace(keepalive, **{pings[name]: max(1, round(1e3 * value))})
        elif isinstance(usual[name], int) and value != int(value):
            raise PolytempoError(f"limit {name} = {value!r}: give a whole number")
        else:
            chosen[name] = type(usual[name])(value)
    return Limits(**chosen, keepalive=keepalive)


class Bucket:
    """So many per second, and a few at once."""

    def __init__(self, rate: float, burst: float) -> None:
        self._rate, self._burst, self._left = rate, burst, burst
        self._last = time.monotonic()

    def take(self) -> float:
        """Take one: the seconds to wait before it is there."""
        now = time.monotonic()
        self._left = min(self._burst, self._left + (now - self._last) * self._rate) - 1
        self._last = now
        return max(0.0, -self._left / self._rate)

    def give_back(self) -> None:
        self._left += 1

    @property
    def full(self) -> bool:
        """Whether nothing is left of what was taken."""
        return self._left + (time.monotonic() - self._last) * self._rate >= self._burst


class Share:
    """What one upload holds of a `Budget`. `missing`: bytes that have not come in yet."""

    def __init__(self, name: str, size: int) -> None:
        self.name, self.size, self.missing = name, size, size
        self.since = 0.0  # when it was given

    def rate(self, now: float) -> float:
        """Bytes per second so far."""
        return (self.size - self.missing) / (now - self.since)


class Budget:
    """Bytes that several take and give back; who finds too few left waits, first come first served.
    Used from one event loop only.

    Nobody keeps others waiting by being slow: every `patience` seconds, as long as somebody waits,
    the slowest uploads lose their turn, as many as the first in line needs. One that is newer than
    that, or makes `contended` bytes per second, is safe. Who has lost a turn, or given up one that
    others waited for, waits behind the others until an update of it is in; but every fourth turn is
    for those.
    """

    def __init__(
        self,
        size: int,
        contended: float,
        patience: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.size, self.taken = size, 0
        self._contended, self._patience, self._clock = contended, patience, clock
        self._shares: dict[Share, None] = {}  # that are held
        self._first: deque[tuple[Share, asyncio.Future[None]]] = deque()
        self._behind: deque[tuple[Share, asyncio.Future[None]]] = deque()  # have lost a turn
        self._lost: set[str] = set()
        self._turns = 0  # so many have been given
        self._looked = 0.0  # when the line began, or somebody lost a turn

    @property
    def _line(self) -> deque[tuple[Share, asyncio.Future[None]]]:
        """Where the next turn goes."""
        if self._turns % 4 == 3:
            return self._behind or self._first
        return self._first or self._behind

    async def take(self, share: Share) -> None:
        if not self._line:
            self._looked = self._clock()
            if self.taken + share.size <= self.size:
                self._grant(share)
                return
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        waiting = share, turn
        (self._behind if share.name in self._lost else self._first).append(waiting)
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self.give_back(share)
            else:
                for line in (self._first, self._behind):
                    if waiting in line:
                        line.remove(waiting)
                self._serve()  # those behind it may fit
            raise

    def give_back(self, share: Share, done: bool = False) -> None:
        """`done`: it was an update, whole and in the format."""
        del self._shares[share]
        self.taken -= share.size
        if done:
            self._lost.discard(share.name)
        elif share.missing and self._line:
            self._lost.add(share.name)
        self._serve()

    def too_slow(self) -> list[Share]:
        """Those that lose their turn now: end them, and give back what they hold. (Ask about once
        a second.)"""
        now, line = self._clock(), self._line
        if not line or now - self._looked < self._patience:
            return []
        slow = [
            share
            for share in self._shares
            if share.missing
            and now - share.since >= self._patience
            and share.rate(now) < self._contended
        ]
        # Of those that are about as slow (within a factor of two) the newest: it loses the least,
        # and the others come to an end even if all are slow.
        slow.sort(key=lambda share: (math.frexp(max(1.0, share.rate(now)))[1], -share.since))
        room, found = self.size - self.taken, []
        while slow and room < line[0][0].size:
            found.append(slow.pop(0))
            room += found[-1].size
        if room < line[0][0].size:
            return []  # in vain
        self._looked = now
        return found

    def _serve(self) -> None:
        while (line := self._line) and self.taken + line[0][0].size <= self.size:
            share, turn = line.popleft()
            if not turn.done():
                self._grant(share)
                turn.set_result(None)

    def _grant(self, share: Share) -> None:
        self._shares[share] = None
        self.taken += share.size
        self._turns += 1
        share.since = self._clock()
