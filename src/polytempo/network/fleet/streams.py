"""The server's end of all streams: gRPC on an event loop (`loop.py`).

Theory of operation
-------------------
1. A stream has one task that reads and one that writes. What is read goes to the inbox of the
   server's node, one message at a time: a client is read further when its last message was dealt
   with, so a flood waits on the line of the one that sends it.
2. What is to be said is put into the stream's outbox and never waited for. A client that does not
   accept a frame within a deadline, or leaves too many messages unread, is cut off.
3. A name is that of a certificate. Which stream of a name counts is decided in `server.py`.
4. What a stream held is free when it ends. An exception keeps the frames that it came through, and
   whatever these hold; so none is kept by a task or by gRPC. (It would be a cycle, which Python
   finds rarely in a large process: after some thousand streams with bad updates, 100 MB later.)
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import AsyncIterator, Coroutine, Iterable
from concurrent.futures import TimeoutError as Late
from contextlib import suppress
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any

import grpc
import grpc.aio
import torch

from polytempo.core.errors import PolytempoError, Refused
from polytempo.network.fleet import fleet_pb2 as pb
from polytempo.network.fleet.admission import Admission
from polytempo.network.fleet.limits import Bucket, Budget, Limits, Share
from polytempo.network.fleet.loop import call, network_loop
from polytempo.network.fleet.outbox import Outbox
from polytempo.network.fleet.reading import Reader, Whole, read_from_client
from polytempo.network.fleet.security import check_address, server_credentials
from polytempo.network.fleet.sending import METHOD, NAME_KEY, Outgoing
from polytempo.network.session import Certificates
from polytempo.network.wire import check_name
from polytempo.nodes.star import FromClient, Hello

Code = grpc.StatusCode
log = logging.getLogger(__name__)
_HELLO_FIRST = "it must say hello first, and once"
_LARGE = 2**20  # bytes: what is larger is looked at off the event loop


class Ended(Exception):
    """The stream is to end, with this status."""

    def __init__(self, code: grpc.StatusCode, reason: str) -> None:
        super().__init__(reason)
        self.code, self.reason = code, reason


class Stream:
    """One connection of a client."""

    def __init__(self, name: str, limits: Limits) -> None:
        self.name, self.outbox = name, Outbox(limits.waiting)
        # Why it ends; None: the client has ended it.
        self.over: asyncio.Future[Ended | None] = asyncio.get_running_loop().create_future()
        self.turn = asyncio.Event()  # the last message was dealt with
        self.busy = False  # an update of this stream is in the inbox
        self.share: Share | None = None  # of the budget, for the update that is on its way in
        self.asked = 1  # updates that it may offer: one for its work, and one again after hello
        self.work: int | None = None  # that it was sent last

    def end(self, code: grpc.StatusCode, reason: str) -> None:
        self.ended(Ended(code, reason))

    def ended(self, why: Ended | None) -> None:
        if not self.over.done():
            self.over.set_result(why)


@dataclass(frozen=True)
class Arrived:
    """A client said something."""

    stream: Stream
    message: FromClient


@dataclass(frozen=True)
class Gone:
    """A stream is over."""

    stream: Stream


class Streams:
    """Listens from the moment that it is made. `size`, `dtype`: of the model. `packed`:
    whether updates are compressed.

    `inbox`: what happens, for the node's thread. `counts`: for metrics.
    """

    def __init__(
        self,
        listen: str,
        certificates: Certificates | None,
        admission: Admission,
        limits: Limits,
        size: int,
        dtype: torch.dtype,
        packed: bool = False,
    ) -> None:
        self._limits, self._admission, self._secure = limits, admission, certificates is not None
        self._model = size, dtype, packed
        self._most = 2 * size * dtype.itemsize + limits.extras
        self.inbox: SimpleQueue[Arrived | Gone] = SimpleQueue()
        self.counts: Counter[str] = Counter()
        self._all: dict[Stream, None] = {}
        self._named: dict[str, list[Stream]] = {}  # oldest first
        self._reconnects: dict[str, Bucket] = {}
        self._budget = Budget(
            max(limits.memory, 2 * self._most), limits.contended, limits.hello_seconds
        )
        self._loop = network_loop()
        self.address = call(self._listen(listen, certificates))

    async def _listen(self, listen: str, certificates: Certificates | None) -> str:
        host, _ = check_address("--listen", listen, self._secure)
        self._server = grpc.aio.server(options=self._limits.options())
        handler = grpc.stream_stream_rpc_method_handler(self._join)
        service, method = METHOD.strip("/").split("/")
        self._server.add_generic_rpc_handlers(
            (grpc.method_handlers_generic_handler(service, {method: handler}),)
        )
        try:
            if certificates is None:
                port = self._server.add_insecure_port(listen)
            else:
                port = self._server.add_secure_port(listen, server_credentials(certificates))
        except RuntimeError as error:
            raise PolytempoError(
                f"cannot listen on {listen}: the port is in use, or the address is not this "
                "machine's; choose another"
            ) from error
        await self._server.start()
        return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"

    # -- for the thread of the node ------------------------------------------------------------

    def carry_out(
        self,
        said: Iterable[tuple[Stream, Outgoing]],
        ended: Iterable[tuple[Stream, grpc.StatusCode, str]],
        heard: Iterable[Stream],
    ) -> None:
        """Say this, end these streams, and read on from those. Returns at once."""
        self._loop.call_soon_threadsafe(self._carry_out, said, ended, heard)

    def _carry_out(
        self,
        said: Iterable[tuple[Stream, Outgoing]],
        ended: Iterable[tuple[Stream, grpc.StatusCode, str]],
        heard: Iterable[Stream],
    ) -> None:
        for stream, message in said:
            try:
                stream.outbox.post(message)
                if message.kind == "work" and message.number != stream.work:
                    stream.work, stream.asked = message.number, min(stream.asked + 1, 2)
            except OverflowError as error:
                stream.end(Code.RESOURCE_EXHAUSTED, str(error))
        for stream, code, reason in ended:
            stream.end(code, reason)
        for stream in heard:
            if stream.busy:  # else it may have said something small in the middle of an update
                stream.busy = False
                self._give_back(stream, done=True)
            stream.turn.set()

    def _give_back(self, stream: Stream, done: bool = False) -> None:
        if stream.share is not None:
            self._budget.give_back(stream.share, done)
            stream.share = None

    def tick(self) -> None:
        """Look for uploads that keep others waiting (about twice a second). Returns at once."""
        self._loop.call_soon_threadsafe(self._make_room)

    def _make_room(self) -> None:
        if not (slow := self._budget.too_slow()):
            return
        for stream in self._all:
            if (share := stream.share) in slow:
                log.warning("%s: its slow upload loses its turn; others wait", stream.name)
                stream.end(
                    Code.RESOURCE_EXHAUSTED,
                    f"its upload has lost its turn: {share.missing:,} of {share.size:,} bytes are "
                    f"missing, it makes less than {self._limits.contended:,.0f} per second, and "
                    "others wait for memory; it may come back. For more room, start the server "
                    "with a larger --limits memory=BYTES",
                )

    @property
    def connected(self) -> int:
        return len(self._all)

    @property
    def held(self) -> int:
        """Bytes of updates on their way in."""
        return self._budget.taken

    def quiet(self) -> bool:
        """Whether all has been said (as far as another thread can tell)."""
        return all(stream.outbox.empty for stream in [*self._all])

    def close(self, grace: float = 0.5) -> None:
        with suppress(Late):
            call(self._server.stop(grace), grace + 10)

    # -- a stream ------------------------------------------------------------------------------

    async def _join(self, requests: AsyncIterator[bytes], context: Any) -> None:
        try:
            name = self._name(context)
            self._let_in(name)
        except Ended as ended:
            await self._abort(context, ended)
            return
        # Now, since a status cannot be sent while a write that brings them is under way.
        await context.send_initial_metadata(())
        stream = Stream(name, self._limits)
        self._all[stream] = None
        self._named.setdefault(name, []).append(stream)
        tasks = [
            asyncio.create_task(_until_it_ends(stream, work))
            for work in (self._read(stream, requests), self._write(stream, context))
        ]
        try:
            why = await stream.over
        finally:
            for task in tasks:
                task.cancel()
            self._forget(stream)
            if not stream.busy:  # else when the node has dealt with it
                self._give_back(stream)
            self.inbox.put(Gone(stream))
        if why is not None:
            log.info("%s: %s", name, why.reason)
            await self._abort(context, why)

    async def _abort(self, context: Any, why: Ended) -> None:
        """Tell the client. One that accepts nothing does not accept this either."""
        self.counts[f"refused {why.code.name}"] += 1
        try:
            async with asyncio.timeout(1.0):
                await context.abort(why.code, why.reason)
        except grpc.aio.AbortError as error:  # gRPC keeps it, and raises it itself
            error.__traceback__ = None
        except TimeoutError:
            log.info("it did not hear why its stream ended: %s", why.reason)

    def _forget(self, stream: Stream) -> None:
        del self._all[stream]
        self._named[stream.name].remove(stream)
        if not self._named[stream.name]:
            del self._named[stream.name]

    def _name(self, context: Any) -> str:
        if self._secure:
            found = context.auth_context().get("x509_common_name", [])
        else:
            found = [value for key, value in context.invocation_metadata() if key == NAME_KEY]
        names = [n.decode("utf8", "replace") if isinstance(n, bytes) else n for n in found]
        if len(names) != 1:
            raise Ended(Code.UNAUTHENTICATED, "it must have exactly one name: a common name")
        try:
            return check_name("client", names[0])
        except PolytempoError as error:
            raise Ended(Code.UNAUTHENTICATED, str(error)) from error

    def _let_in(self, name: str) -> None:
        if (reason := self._admission.refusal(name)) is not None:
            raise Ended(Code.PERMISSION_DENIED, reason)
        if len(self._all) >= self._limits.connections:
            raise Ended(Code.RESOURCE_EXHAUSTED, "the server is full; try again later")
        if len(self._reconnects) > 1_000:
            for other in [name for name, bucket in self._reconnects.items() if bucket.full]:
                del self._reconnects[other]
        bucket = self._reconnects.setdefault(name, self._bucket())
        if bucket.take():
            bucket.give_back()
            raise Ended(Code.RESOURCE_EXHAUSTED, f"{name!r} comes back too often; wait a little")
        # The one that counts, and the one that is about to take its place: not more.
        for older in self._named.get(name, [])[:-1]:
            older.end(Code.ABORTED, replaced(name))

    def _bucket(self) -> Bucket:
        return Bucket(self._limits.reconnects, self._limits.reconnect_burst)

    async def _read(self, stream: Stream, requests: AsyncIterator[bytes]) -> None:
        limits, loop = self._limits, asyncio.get_running_loop()
        reader, bucket = (
            Reader(pb.FromClient, self._most),
            Bucket(limits.messages, limits.message_burst),
        )
        greeted, due = False, 0.0
        async with asyncio.timeout(limits.hello_seconds) as deadline:
            async for data in requests:
                self.counts["bytes in"] += len(data)
                before = reader.expected
                whole = reader.take(data)
                if reader.expected > before:  # an update begins
                    if not greeted:
                        raise Refused(_HELLO_FIRST)
                    deadline.reschedule(None)
                    await self._ration(stream, reader.expected)
                    share = Share(stream.name, reader.expected)
                    await self._budget.take(share)
                    stream.share = share
                    due = loop.time() + limits.hello_seconds + share.size / limits.slowest
                    deadline.reschedule(due)
                if stream.share is not None:
                    stream.share.missing = reader.missing
                if whole is None:
                    continue
                deadline.reschedule(None)
                message = await self._decoded(whole)
                if isinstance(message, Hello) == greeted:
                    raise Refused(_HELLO_FIRST)
                greeted = True
                if seconds := bucket.take():
                    await asyncio.sleep(seconds)
                stream.busy = whole.kind == "upload"
                self.inbox.put(Arrived(stream, message))
                del data, whole, message  # an idle stream must not keep its last update
                await stream.turn.wait()
                stream.turn.clear()
                if reader.expected:  # it was a small message in the middle of an update
                    deadline.reschedule(due)

    async def _ration(self, stream: Stream, size: int) -> None:
        """An update that nobody has asked for is read slowly: floods cost others little."""
        if stream.asked:
            stream.asked -= 1
        else:
            self.counts["unasked"] += 1
            await asyncio.sleep(size / self._limits.unasked)

    async def _decoded(self, whole: Whole) -> FromClient:
        self.counts[whole.kind] += 1
        if whole.payload is None or len(whole.payload) < _LARGE:
            return read_from_client(whole, *self._model)
        return await asyncio.to_thread(read_from_client, whole, *self._model)

    async def _write(self, stream: Stream, context: Any) -> None:
        while True:
            frame = await stream.outbox.next()
            async with asyncio.timeout(self._limits.write_seconds):
                await context.write(frame)
            self.counts["bytes out"] += len(frame)
            del frame  # as above


def replaced(name: str) -> str:
    return f"another client with the certificate of {name!r} has connected"


async def _until_it_ends(stream: Stream, work: Coroutine[Any, Any, None]) -> None:
    """Read or write; then the stream is over."""
    try:
        await work
        stream.ended(None)
    except (grpc.RpcError, grpc.aio.BaseError, asyncio.CancelledError):
        stream.ended(None)
    except Refused as error:
        stream.end(Code.INVALID_ARGUMENT, f"refused: {error}")
    except TimeoutError:
        stream.end(Code.DEADLINE_EXCEEDED, "it took too long to read, or to say hello")
    except Exception as error:
        log.error("stream of %s failed", stream.name, exc_info=error)
        stream.end(Code.INTERNAL, "the server failed on it; see its log")
