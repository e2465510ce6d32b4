"""A client's end of its stream: connects, and connects again, on an event loop (`loop.py`).

The client's thread hears of it through `inbox`. A connection is numbered; what is said on one that
is gone is forgotten, since the node offers again whatever still matters.
"""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any

import grpc
import grpc.aio

from polytempo.core.errors import PolytempoError
from polytempo.network.fleet import fleet_pb2 as pb
from polytempo.network.fleet.limits import Keepalive
from polytempo.network.fleet.loop import network_loop
from polytempo.network.fleet.outbox import Outbox
from polytempo.network.fleet.reading import Reader, Whole, read_from_server
from polytempo.network.fleet.security import (
    channel_credentials,
    check_address,
    check_certificates,
)
from polytempo.network.fleet.sending import METHOD, NAME_KEY, Writer
from polytempo.network.session import Certificates
from polytempo.nodes.star import FromClient, FromServer

Code = grpc.StatusCode
FINAL = {
    Code.PERMISSION_DENIED,
    Code.FAILED_PRECONDITION,
    Code.INVALID_ARGUMENT,
    Code.UNAUTHENTICATED,
    Code.ABORTED,
    Code.UNIMPLEMENTED,
}
# What TLS says if one side does not accept the other's certificate: trying again does not help.
_UNTRUSTED = ("SSL_ERROR_SSL", "CERTIFICATE_VERIFY_FAILED")
FIRST, LONGEST = 0.2, 10.0  # seconds before another attempt
_LARGE = 2**20  # bytes: what is larger is looked at off the event loop
_MOST = 2**33  # bytes of a model: the server is trusted to know its size


@dataclass(frozen=True)
class Ready:
    """There will be a connection, of this number, once hello is said on it."""

    connection: int


@dataclass(frozen=True)
class Heard:
    """The server said something."""

    connection: int
    message: FromServer


@dataclass(frozen=True)
class Down:
    """There is no connection (any more); another attempt follows."""

    reason: str


@dataclass(frozen=True)
class Final:
    """The server does not want this client, or cannot be trusted."""

    reason: str


class Line:
    """`name`: for a server without certificates."""

    def __init__(
        self,
        connect: str,
        certificates: Certificates | None,
        name: str | None,
        keepalive: Keepalive,
    ) -> None:
        check_address("--connect", connect, certificates is not None)
        if certificates is not None:
            check_certificates(certificates)
        elif not name:
            raise PolytempoError("a client needs a certificate (or, for tests, a name)")
        self._connect, self._certificates, self._name = connect, certificates, name
        # A connection of its own: gRPC would let several clients in one process share one, and with
        # it the streams that the server allows on it.
        self._options = [*keepalive.options(), ("grpc.use_local_subchannel_pool", 1)]
        self.inbox: SimpleQueue[Ready | Heard | Down | Final] = SimpleQueue()
        self._connection, self._failures = 0, 0
        self._writer = Writer()
        self._outbox: Outbox | None = None
        self._loop, self._over = network_loop(), threading.Event()
        self._work = asyncio.run_coroutine_threadsafe(self._keep_connected(), self._loop)

    # -- for the client's thread -----------------------------------------------------------------

    def say(self, connection: int, messages: Iterable[FromClient]) -> None:
        """Say this, if that connection still stands. Returns at once."""
        outgoing = [self._writer.from_client(message) for message in messages]

        def post() -> None:
            if self._outbox is not None and connection == self._connection:
                for message in outgoing:
                    with suppress(OverflowError):  # the server reads nothing: it is being noticed
                        self._outbox.post(message)

        self._loop.call_soon_threadsafe(post)

    def close(self) -> None:
        self._work.cancel()
        self._over.wait(10)

    # -- the loop ----------------------------------------------------------------------------------

    async def _keep_connected(self) -> None:
        try:
            await self._connect_for_ever()
        finally:
            self._over.set()

    async def _connect_for_ever(self) -> None:
        while True:
            try:
                reason = await self._attempt()
            except grpc.aio.AioRpcError as error:
                details = error.details() or error.code().name
                if error.code() in FINAL:
                    self.inbox.put(Final(details))
                    return
                if any(sign in details for sign in _UNTRUSTED):
                    self.inbox.put(Final(f"the certificates do not belong together ({details})"))
                    return
                reason = details
            except PolytempoError as error:
                self.inbox.put(Final(str(error)))
                return
            self.inbox.put(Down(reason))
            longest = min(LONGEST, FIRST * 2 ** min(self._failures, 16))
            self._failures += 1
            await asyncio.sleep(longest * random.uniform(0.5, 1.0))  # not all at the same time

    async def _attempt(self) -> str:
        self._connection += 1
        self._outbox = outbox = Outbox()
        self.inbox.put(Ready(self._connection))
        hello = await outbox.next()
        metadata = None if self._name is None else ((NAME_KEY, self._name),)
        async with self._channel() as channel:
            call = channel.stream_stream(METHOD)(metadata=metadata)
            writer = asyncio.create_task(_write(call, outbox, hello))
            try:
                await self._read(call)
            finally:
                self._outbox = None
                writer.cancel()
                call.cancel()
        return "the server has ended the stream"

    def _channel(self) -> Any:
        # A new one for each attempt: gRPC's own attempts would become rare, and a certificate that
        # was renewed is read again.
        if self._certificates is None:
            return grpc.aio.insecure_channel(self._connect, self._options)
        check_certificates(self._certificates)
        credentials = channel_credentials(self._certificates)
        return grpc.aio.secure_channel(self._connect, credentials, self._options)

    async def _read(self, call: Any) -> None:
        reader, connection = Reader(pb.FromServer, _MOST), self._connection
        async for data in call:
            whole = reader.take(data)
            if whole is not None:
                self._failures = 0
                self.inbox.put(Heard(connection, await _decoded(whole)))


async def _decoded(whole: Whole) -> FromServer:
    if whole.payload is None or len(whole.payload) < _LARGE:
        return read_from_server(whole)
    return await asyncio.to_thread(read_from_server, whole)


async def _write(call: Any, outbox: Outbox, frame: bytes) -> None:
    with suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):  # whoever reads hears why
        while True:
            await call.write(frame)
            frame = await outbox.next()
