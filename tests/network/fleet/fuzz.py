"""Messages that no honest client sends: broken ones, and nonsense that is in the protocol.

`fuzz` hands them to the server's decoder and its node in this process, many thousand per second;
`hostile.py --wire` sends them over the network.
"""

from __future__ import annotations

import math
import random
import time
from collections import Counter, deque
from collections.abc import Sequence

import torch
from fleet_kit import FIGURES, make_node
from test_fleet_hostile import HELLO, frames

from polytempo.core.errors import Refused
from polytempo.network.fleet import fleet_pb2 as pb
from polytempo.network.fleet.reading import Reader, read_from_client
from polytempo.network.fleet.sending import CHUNK
from polytempo.nodes.server import ServerNode
from polytempo.nodes.star import (
    Drop,
    FromClient,
    Hello,
    Scores,
    ServerAction,
    Swapped,
    Upload,
    Write,
)

NUMBERS = (0, 1, 2, 2**31, 2**53 - 1)
FLOATS = (0.0, -1.0, 5e-324, 1e308)


class Corpus:
    """Frames of all messages, and ways to break them."""

    def __init__(self, size: int, draws: random.Random) -> None:
        self.draws, self.latest = draws, 0  # the work that the client was sent last
        upload = Upload(3, torch.zeros(size), 10, {"mask": torch.ones(2, 3)}, 0.5)
        self.good = [
            *frames(HELLO),
            *frames(Hello(1, "toy", "toy", 10, 5, 3, 4)),
            *frames(Swapped(3, 2, 7)),
            *frames(Scores(1, {"total": 5.0, "value": 1.5}, {"total": 5.0, "value": 2.0})),
            *(frame for frame in frames(upload) if len(frame) < 2_000),
        ]
        self.upload = upload

    def broken(self) -> bytes:
        """A frame with a few random changes, or no frame at all."""
        draws = self.draws
        kind = draws.random()
        if kind < 0.1:
            return draws.randbytes(draws.randrange(1, 200))
        data = bytearray(draws.choice(self.good))
        for _ in range(draws.randrange(1, 4)):
            where = draws.randrange(len(data) + 1)
            match draws.randrange(5):
                case 0 if where < len(data):
                    data[where] ^= 1 << draws.randrange(8)
                case 1:
                    del data[where:]
                case 2:
                    data[where:where] = draws.randbytes(draws.randrange(1, 9))
                case 3:
                    other = draws.choice(self.good)
                    data[where:] = other[draws.randrange(len(other)) :]
                case 4:  # a huge number
                    data[where:where] = b"\xff" * draws.randrange(1, 10) + b"\x01"
        return bytes(data)

    def broken_upload(self) -> list[bytes]:
        """A well-framed upload whose safetensors are not."""
        draws = self.draws
        payload = bytearray(
            b"".join(pb.FromClient.FromString(f).chunk.data for f in frames(self.upload)[1:])
        )
        length = 8 + int.from_bytes(payload[:8], "little")
        for _ in range(draws.randrange(1, 4)):
            where = draws.randrange(length)
            match draws.randrange(4):
                case 0:
                    payload[where] ^= 1 << draws.randrange(8)
                case 1:
                    payload[where] = draws.choice(b'0123456789{}[]",:-eE')
                case 2:
                    del payload[where : where + draws.randrange(1, 5)]
                case 3:
                    payload[where:where] = draws.choice([b"9" * 30, b"[" * 50, b"null", b"1e9"])
        head = pb.FromClient(
            upload=pb.Upload(number=3, samples=10, payload=pb.Payload(id=1, bytes=len(payload)))
        )
        found = [head.SerializeToString()]
        for begin in range(0, len(payload), CHUNK):
            data = bytes(payload[begin : begin + CHUNK])
            found.append(pb.FromClient(chunk=pb.Chunk(payload=1, data=data)).SerializeToString())
        return found

    def strange(self) -> FromClient:
        """In the protocol, and nonsense: numbers of nothing, scores of no exam, odd updates."""
        draws = self.draws
        number = draws.choice((*NUMBERS, self.latest, self.latest))
        kind = draws.random()
        if kind < 0.5:
            step = draws.choice((None, *NUMBERS))
            return Swapped(number, draws.choice((number, *NUMBERS)), step)
        if kind < 0.9:
            names = draws.choice((FIGURES, ("",), (), [f"x{i}" for i in range(64)]))
            sums = {name or "count": draws.choice(FLOATS) for name in names}
            return Scores(number, sums, draws.choice((None, sums)))
        value = draws.choice((0.0, 1e38, math.nan, -math.inf))
        extras = draws.choice(({}, {"mask": torch.ones(2, 3)}, {"a": torch.zeros(0)}))
        vector = torch.full_like(self.upload.vector, value)
        return Upload(number, vector, draws.choice(NUMBERS), extras, draws.choice(FLOATS[::3]))


def fuzz(messages: int, seed: int = 0, size: int = 12) -> Counter:
    """So many messages through the server's decoder, a quarter of them nonsense that is in the
    protocol, the others broken; what is read goes to a node. Refused, read (some changes leave a
    message that is in the protocol), or dropped by the node; anything else is an exception."""
    draws, found, longest = random.Random(seed), Counter(), 0.0
    corpus, node = Corpus(size, draws), make_node(clients=2, size=size, updates=10**9, every=1_000)
    carry_out(node, node.started(0.0))
    most = 2 * 4 * size + 2**20
    reader = None
    for number in range(messages):
        match number % 4:
            case 0:
                said = corpus.broken_upload()
            case 1:
                corpus.latest = node.server.dispatches - 1
                said = frames(corpus.strange())
            case _:
                said = [corpus.broken()]
        begin, now = time.thread_time(), 1e-3 * number
        if reader is None:  # the stream is over: another one
            reader = Reader(pb.FromClient, most)
            heard(node, HELLO, now)
        outcome = "incomplete"
        try:
            for frame in said:
                whole = reader.take(frame)
                if whole is not None:
                    message = read_from_client(whole, size, torch.float32)
                    outcome = "read" if heard(node, message, now) else "dropped"
        except Refused:
            outcome = "refused"
        if outcome in ("refused", "dropped"):
            heard(node, None, now)
            reader = None
        longest = max(longest, time.thread_time() - begin)
        found[outcome] += 1
    found["updates folded"] = node.updates
    found["longest, microseconds of CPU"] = round(1e6 * longest)
    return found


def heard(node: ServerNode, message: FromClient | None, now: float) -> bool:
    """A client says this (None: its connection is gone); False if it is to be cut off."""
    match message:
        case None:
            return carry_out(node, node.disconnected("evil", now))
        case Hello():
            return carry_out(node, node.connected("evil", message, now))
        case _:
            return carry_out(node, node.received("evil", message, now))


def carry_out(node: ServerNode, actions: Sequence[ServerAction]) -> bool:
    waiting, welcome = deque(actions), True
    while waiting:
        match waiting.popleft():
            case Write(record=record):
                waiting.extend(node.apply(record))
            case Drop():
                welcome = False
    return welcome
