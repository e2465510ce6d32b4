"""Light clients of a fleet, many in one process: they train nothing, and answer each piece of work
with the same ready-made update. Run as a script; imports no torch.

Its orders come on standard input as JSON, one per line: first what to be, then "begin" (forget what
was measured so far) and "end" (report it, and stop). It answers on standard output, likewise.
"""

from __future__ import annotations

import array
import asyncio
import json
import os
import random
import struct
import sys
import threading
import time
from pathlib import Path
from typing import Any

import grpc.aio

from polytempo.network.fleet import fleet_pb2 as pb

METHOD = "/polytempo.fleet.v1.Fleet/Join"
CHUNK = 262_144
AT_ONCE = 50  # connections that are opened together
MOST_RETURNS = 20  # of one client


def frames_of(numbers: int) -> tuple[int, list[bytes]]:
    """An update of so many float32 numbers: its bytes, and the frames that bring them."""
    header = json.dumps(
        {"vector": {"dtype": "F32", "shape": [numbers], "data_offsets": [0, 4 * numbers]}}
    ).encode()
    header += b" " * (-len(header) % 8)
    values = array.array("f", [0.001]) * numbers
    data = struct.pack("<Q", len(header)) + header + values.tobytes()
    pieces = [data[start : start + CHUNK] for start in range(0, len(data), CHUNK)]
    chunks = [pb.FromClient(chunk=pb.Chunk(payload=1, data=piece)) for piece in pieces]
    return len(data), [chunk.SerializeToString() for chunk in chunks]


class Crowd:
    """Clients that share this process. `orders`: see `bench/fleet_parts.py`."""

    def __init__(self, orders: dict[str, Any]) -> None:
        self.orders, self.rest = orders, float(orders["rest"])
        self.size, self.frames = frames_of(orders["numbers"])
        self.latencies: list[float] = []
        self.connected = self.declined = self.lost = 0
        self.reason = ""
        self.gate = asyncio.Semaphore(AT_ONCE)
        self.failures: list[str] = []

    async def take_part(self, name: str) -> None:
        """Until the run is over; whoever loses its connection comes back, without what it held."""
        folder = Path(self.orders["certificates"])
        credentials = grpc.ssl_channel_credentials(
            (folder / "ca.pem").read_bytes(),
            (folder / f"{name}.key").read_bytes(),
            (folder / f"{name}.pem").read_bytes(),
        )
        known = False
        for _ in range(MOST_RETURNS):
            try:
                await self.visit(credentials, known)
                return
            except grpc.aio.AioRpcError as error:
                self.lost += 1
                self.reason = f"{name}: {error.code().name} {error.details()}"
                known = True
                await asyncio.sleep(random.uniform(0.5, 1.5))
        self.failures.append(self.reason)

    async def visit(self, credentials: Any, known: bool) -> None:
        options = [tuple(option) for option in self.orders["options"]]
        target = self.orders["connect"]
        async with grpc.aio.secure_channel(target, credentials, options) as channel:
            async with self.gate:
                call = channel.stream_stream(METHOD)()
                hello = pb.Hello(protocol=1, problem=self.orders["problem"], samples=10, tested=5)
                await call.write(pb.FromClient(hello=hello).SerializeToString())
                welcome = pb.FromServer.FromString(await call.read()).welcome
            self.connected += not known
            self.figures = json.loads(welcome.run)["figures"]
            await self.converse(call)

    async def converse(self, call: Any) -> None:
        sent: dict[int, float] = {}
        awaited: dict[int, tuple[Any, int]] = {}  # by payload: the message, and bytes to come
        while (data := await call.read()) is not grpc.aio.EOF:
            said = pb.FromServer.FromString(data)
            match said.WhichOneof("said"):
                case "acknowledge":
                    begun = sent.pop(said.acknowledge.number)
                    self.latencies.append(time.perf_counter() - begun)
                case "decline":
                    self.declined += 1
                    sent.pop(said.decline.number, None)
                case "work":
                    awaited[said.work.payload.id] = said.work, said.work.payload.bytes
                case "examine":
                    awaited[said.examine.payload.id] = said.examine, said.examine.payload.bytes
                case "chunk":
                    message, left = awaited.pop(said.chunk.payload)
                    left -= len(said.chunk.data)
                    if left:
                        awaited[said.chunk.payload] = message, left
                    else:
                        await self.answer(call, message, sent)
                case "finished":
                    return

    async def answer(self, call: Any, message: Any, sent: dict[int, float]) -> None:
        if isinstance(message, pb.Examine):
            sums = pb.Sums(values=dict.fromkeys(self.figures, 1.0))
            scores = pb.Scores(exam=message.exam, handed=sums)
            await call.write(pb.FromClient(scores=scores).SerializeToString())
            return
        if message.preempt:  # it would come too late
            swapped = pb.Swapped(number=message.number, replaces=message.number)
            await call.write(pb.FromClient(swapped=swapped).SerializeToString())
            return
        if self.rest:
            await asyncio.sleep(self.rest * random.uniform(0.5, 1.5))
        payload = pb.Payload(id=1, bytes=self.size)
        upload = pb.Upload(number=message.number, samples=10, seconds=self.rest, payload=payload)
        sent[message.number] = time.perf_counter()
        await call.write(pb.FromClient(upload=upload).SerializeToString())
        for frame in self.frames:
            await call.write(frame)


def tell(**what: Any) -> None:
    sys.stdout.write(json.dumps(what) + "\n")
    sys.stdout.flush()


async def main() -> None:
    lines = asyncio.Queue[str]()
    loop = asyncio.get_running_loop()

    def listen() -> None:
        for line in sys.stdin:
            loop.call_soon_threadsafe(lines.put_nowait, line)
        loop.call_soon_threadsafe(lines.put_nowait, "")

    threading.Thread(target=listen, daemon=True).start()
    crowd = Crowd(json.loads(await lines.get()))
    begun = time.perf_counter()
    names = crowd.orders["names"]
    tasks = [asyncio.create_task(crowd.take_part(name)) for name in names]
    while crowd.connected < len(names) and time.perf_counter() - begun < 120:
        for task in tasks:
            if task.done() and (error := task.exception()) is not None:
                crowd.failures.append(repr(error))
        if crowd.failures:
            break
        await asyncio.sleep(0.02)
    tell(connected=crowd.connected, seconds=time.perf_counter() - begun, failures=crowd.failures)
    while (await lines.get()).strip() == '"begin"':
        crowd.latencies.clear()
        tell(begun=True)
    tell(
        latencies=[round(seconds, 7) for seconds in crowd.latencies],
        failures=crowd.failures,
        declined=crowd.declined,
        lost=crowd.lost,
        reason=crowd.reason,
        torch="torch" in sys.modules,
    )
    os._exit(0)  # without waiting for a thousand channels to close


if __name__ == "__main__":
    asyncio.run(main())
