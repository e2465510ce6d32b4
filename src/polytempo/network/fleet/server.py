"""The server of a fleet on the network: a thin driver of `ServerNode`.

Theory of operation
-------------------
1. Two threads: the streams (`streams.py`), and the one that calls `run`, which alone touches the
   node. It takes whatever has come in meanwhile, hands it to the node, writes all records that come
   of it down with one fsync, applies them in order, and lets the streams say the rest. So the more
   there is to do, the less a record costs; and nobody is told of anything that is not on disk.
   (A third one writes checkpoints: see `store.py`.)
2. Of each name one stream counts, the newest that has said hello; the one before is ended.
3. Should the strategy fail on a record (a bug, or an update made to trigger one), the node is
   brought back to before it, the record is marked as one that never counts, its sender is told, and
   the server goes on.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from queue import Empty
from typing import Any

from polytempo.core import events
from polytempo.network.fleet.admission import Admission
from polytempo.network.fleet.limits import Limits
from polytempo.network.fleet.sending import Outgoing, Writer
from polytempo.network.fleet.store import Store
from polytempo.network.fleet.streams import Arrived, Code, Gone, Stream, Streams, replaced
from polytempo.network.session import Certificates
from polytempo.nodes.server import ServerNode
from polytempo.nodes.star import (
    AnyRecord,
    Decline,
    Drop,
    GivenUp,
    Hello,
    Offered,
    Report,
    Send,
    ServerAction,
    Welcome,
    Write,
)

__all__ = ["FleetServer", "Limits"]
log = logging.getLogger(__name__)
AT_ONCE = 256  # messages that are dealt with together
TICK = 0.5  # seconds between two looks at the clock and at who is admitted
NAP = 0.1
DEFAULT_LIMITS = Limits()


class FleetServer:
    """Listens from the moment that it is made (`address`: where, port included); `run` does the
    work, in the thread that calls it.

    `store` is opened here: `node` is new, and afterwards where the run stood. Without certificates
    it listens on the loopback interface only, and clients say their names themselves: for tests.
    `watch` is told every event that happens, once.
    """

    def __init__(
        self,
        node: ServerNode,
        store: Store,
        listen: str,
        *,
        certificates: Certificates | None,
        admission: Admission,
        limits: Limits = DEFAULT_LIMITS,
        watch: Callable[[events.Event], None] = lambda event: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.node, self.store, self.admission, self.limits = node, store, admission, limits
        self._watch, self._clock = watch, clock
        if not store.opened:
            store.open(node)
        try:
            model = node.server.context.initial
            packed = node.server.compressed
            self.streams = Streams(
                listen, certificates, admission, limits, len(model), model.dtype, packed
            )
        except BaseException:
            store.close()
            raise
        self._base, self._began = node.time, clock()
        self._writer = Writer()
        self._current: dict[str, Stream] = {}  # by name
        self._said: list[tuple[Stream, Outgoing]] = []
        self._ended: list[tuple[Stream, Code, str]] = []
        self._next_tick = 0.0
        self._revoked: set[str] = set()  # those that the node knows of
        self.counts: Counter[str] = Counter()
        self.alive = time.monotonic()  # when the node was last looked after
        self.figures: dict[str, Any] = {}  # for metrics: see there

    @property
    def address(self) -> str:
        """HOST:PORT, as clients connect to it."""
        return str(self.streams.address)

    def now(self) -> float:
        """Seconds since the run began; while the server is down, time stands still."""
        return self._base + self._clock() - self._began

    # -- the loop ----------------------------------------------------------------------------------

    def run(self, interrupted: threading.Event) -> bool:
        """Until the run is over (True) or interrupted (False); then closed, with a checkpoint."""
        try:
            self._commit(self._act(self.node.started(self.now())))
            while not self.node.closed and not interrupted.is_set():
                self._step()
            if self.node.closed:
                self._say_farewell(interrupted)
            self.store.checkpoint(self.node)
            return self.node.closed
        finally:
            self.close()

    def close(self) -> None:
        """Stop listening (if `run` was never called)."""
        self.streams.close()
        self.store.close()

    def _step(self) -> None:
        arrived = self._take()
        records: list[AnyRecord] = []
        for item in arrived:
            records += self._act(self._hear(item))
        if time.monotonic() >= self._next_tick:
            self._next_tick = time.monotonic() + TICK
            records += self._act(self.node.tick(self.now()))
            records += self._look_at_admission()
            self.streams.tick()
            self.figures = self._figures()
        self._commit(records)
        heard = [item.stream for item in arrived if isinstance(item, Arrived)]
        if self._said or self._ended or heard:
            self.streams.carry_out(self._said, self._ended, heard)
            self._said, self._ended = [], []
        self.alive = time.monotonic()
        self.store.checkpoint_if_due(self.node)

    def _take(self) -> list[Arrived | Gone]:
        """What has come in, at least one thing if it comes soon."""
        found: list[Arrived | Gone] = []
        try:
            found.append(self.streams.inbox.get(timeout=NAP))
            while len(found) < AT_ONCE:
                found.append(self.streams.inbox.get_nowait())
        except Empty:
            pass
        return found

    def _hear(self, item: Arrived | Gone) -> Sequence[ServerAction]:
        stream, now = item.stream, self.now()
        name = stream.name
        counts = self._current.get(name)
        if isinstance(item, Gone):
            if counts is not stream:
                return []
            del self._current[name]
            return self.node.disconnected(name, now)
        if isinstance(item.message, Hello):
            if counts is not None:
                self._ended.append((counts, Code.ABORTED, replaced(name)))
            self._current[name] = stream
            self._revoked.discard(name)  # or it would not have been let in
            return self.node.connected(name, item.message, now)
        return self.node.received(name, item.message, now) if counts is stream else []

    def _look_at_admission(self) -> list[AnyRecord]:
        """Cut off who was revoked, or is no longer on the list."""
        changed = self.admission.changed()
        if not changed and self._revoked >= self.admission.revoked:
            return []
        records = []
        for name in self.admission.revoked - self._revoked:
            records += self._act(self.node.revoke(name, self.now()))
        self._revoked = set(self.admission.revoked)
        for name, stream in self._current.items():
            if (reason := self.admission.refusal(name)) is not None:
                self._ended.append((stream, Code.PERMISSION_DENIED, reason))
        return records

    def _say_farewell(self, interrupted: threading.Event) -> None:
        """Give clients a moment to hear that the run is over."""
        until = time.monotonic() + self.limits.farewell
        while self._current and time.monotonic() < until and not interrupted.is_set():
            self._step()

    # -- what the node asks for --------------------------------------------------------------------

    def _act(self, actions: Sequence[ServerAction]) -> list[AnyRecord]:
        """Carry the actions out; what is to be written down first is returned."""
        records: list[AnyRecord] = []
        for action in actions:
            match action:
                case Write(record=record):
                    records.append(record)
                case Report(event=event):
                    self.store.report(event)
                    self._watch(event)
                case Send(name=name, message=message):
                    if (stream := self._current.get(name)) is not None:
                        if isinstance(message, Welcome):
                            message = replace(message, run={"id": self.store.id, **message.run})
                        self._said.append((stream, self._writer.from_server(message)))
                case Drop(name=name, reason=reason):
                    if (stream := self._current.get(name)) is not None:
                        self._ended.append((stream, Code.FAILED_PRECONDITION, reason))
        return records

    def _commit(self, records: list[AnyRecord]) -> None:
        """Write the records down, then let each count."""
        left_out = self.counts["left out"]
        while records:
            begin = time.monotonic()
            numbers = self.store.append(records)
            self.counts["fsync"] += 1
            self.counts["fsync microseconds"] += int(1e6 * (time.monotonic() - begin))
            later: list[AnyRecord] = []
            for number, record in zip(numbers, records, strict=True):
                try:
                    actions = self.node.apply(record)
                except Exception as error:  # of the strategy, which is anybody's code
                    later += self._leave_out(number, record, error)
                else:
                    later += self._act(actions)
            records = later
            self.store.flush()
        if self.counts["left out"] > left_out:  # the next replay, if there is one, is short
            self.store.checkpoint(self.node)

    def _leave_out(self, number: int, record: AnyRecord, error: Exception) -> list[AnyRecord]:
        """The node has failed on a record: it never counts."""
        reason = f"the server failed on it: {type(error).__name__}: {error}"[:500]
        log.error("record %d (%s) is left out", number, type(record).__name__, exc_info=error)
        self.counts["left out"] += 1
        self.store.skip(self.node, number, reason)
        if not isinstance(record, Offered):
            return []
        self._act([Send(record.name, Decline(record.upload.number, reason))])
        client = self.node.names.get(record.name, -1)
        latest = self.node.outstanding.get(client)
        if latest is None:
            return []
        return [GivenUp(self.now(), record.name, latest.number, reason)]  # its slot is free

    def _figures(self) -> dict[str, Any]:
        """What metrics show, taken while the node stands still."""
        node, server = self.node, self.node.server
        return {
            "updates": node.updates,
            "updates_planned": node.planned,
            "versions": server.version,
            "clients": len(node.names),
            "members": len(server.members),
            "training": len(server.open),
            "staleness": dict(node.staleness),
            "messages": dict(node.messages),
            "bytes": dict(node.bytes),
            "closed": node.closed,
        }
