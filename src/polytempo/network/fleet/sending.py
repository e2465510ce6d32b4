"""What is said, as frames of a stream (fleet.proto)."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import count
from typing import Any
from weakref import WeakValueDictionary

from torch import Tensor

from polytempo.core.task import TASKS
from polytempo.network.fleet import fleet_pb2 as pb
from polytempo.network.fleet.payload import Payload
from polytempo.nodes.star import (
    Acknowledge,
    Decline,
    Examine,
    Finished,
    FromClient,
    FromServer,
    Hello,
    Hurry,
    Scores,
    Swapped,
    Upload,
    Welcome,
    Work,
)

METHOD = "/polytempo.fleet.v1.Fleet/Join"
NAME_KEY = "polytempo-name"  # metadata: who a client is, where there are no certificates
CHUNK = 262_144  # bytes
EXTRA = "extra "  # tensors along with an update are called so


class Blob:
    """The vectors of a message as frames. What is sent to several clients is encoded once, and kept
    for as long as somebody is being sent it."""

    def __init__(self, number: int, tensors: Mapping[str, Tensor]) -> None:
        self.number, self.shared = number, False
        self._payload = Payload(tensors)
        self._frames: dict[int, bytes] = {}

    @property
    def size(self) -> int:
        return self._payload.size

    def __len__(self) -> int:
        return -(-self.size // CHUNK)

    def frame(self, index: int) -> bytes:
        found = self._frames.get(index)
        if found is None:
            data = self._payload.cut(index * CHUNK, (index + 1) * CHUNK)
            chunk = pb.Chunk(payload=self.number, data=data)
            # In both directions a chunk has the same place in its frame.
            found = pb.FromServer(chunk=chunk).SerializeToString()
            if self.shared:
                self._frames[index] = found
        return found

    def announced(self) -> pb.Payload:
        return pb.Payload(id=self.number, bytes=self.size)


@dataclass(frozen=True)
class Outgoing:
    """A message in frames: its head, and the vectors that follow. `kind`: of messages with vectors
    only the newest of a kind counts. `number`: of the dispatch that it is about."""

    head: bytes
    kind: str = ""
    number: int | None = None
    blob: Blob | None = None


class Writer:
    """Turns messages into frames."""

    def __init__(self) -> None:
        self._numbers = count(1)
        self._blobs: WeakValueDictionary[tuple[Any, ...], Blob] = WeakValueDictionary()

    def blob(self, kind: str, tensors: Mapping[str, Tensor]) -> Blob:
        # A blob keeps its tensors alive, so that their ids are theirs while it is here. The
        # kind counts as well: one stream may bring the same model to train and to examine.
        key = (kind, *((name, id(tensor)) for name, tensor in tensors.items()))
        found = self._blobs.get(key)
        if found is None:
            found = self._blobs[key] = Blob(next(self._numbers), tensors)
        else:
            found.shared = True
        return found

    def from_server(self, message: FromServer) -> Outgoing:
        match message:
            case Welcome():
                run = json.dumps(dict(message.run))
                return _small(welcome=pb.Welcome(client=message.client, run=run))
            case Work(dispatch=sent):
                blob = self.blob("work", {"params": sent.params, **sent.vectors})
                task = json.dumps(TASKS.describe(sent.task))
                work = pb.Work(
                    number=sent.number,
                    client=sent.client,
                    preempt=sent.preempt,
                    task=task,
                    payload=blob.announced(),
                )
                head = pb.FromServer(work=work).SerializeToString()
                return Outgoing(head, "work", sent.number, blob)
            case Examine():
                blob = self.blob("exam", {"params": message.params})
                examine = pb.Examine(
                    exam=message.exam,
                    adapt_epochs=message.adapt_epochs,
                    payload=blob.announced(),
                )
                return Outgoing(
                    pb.FromServer(examine=examine).SerializeToString(), "exam", None, blob
                )
            case Hurry(number=number):
                return _small(number, hurry=pb.Hurry(number=number))
            case Acknowledge(number=number):
                return _small(acknowledge=pb.Acknowledge(number=number))
            case Decline(number=number):
                return _small(number, decline=pb.Decline(number=number, reason=message.reason))
            case Finished(reason=reason):
                return _small(finished=pb.Finished(reason=reason))

    def from_client(self, message: FromClient) -> Outgoing:
        match message:
            case Hello():
                said = pb.FromClient(hello=pb.Hello(**vars(message)))
            case Upload():
                extras = {EXTRA + name: extra for name, extra in message.extras.items()}
                blob = self.blob("upload", {"vector": message.vector, **extras})
                upload = pb.Upload(
                    number=message.number,
                    samples=message.samples,
                    seconds=message.seconds,
                    payload=blob.announced(),
                )
                head = pb.FromClient(upload=upload).SerializeToString()
                return Outgoing(head, "upload", message.number, blob)
            case Swapped():
                said = pb.FromClient(swapped=pb.Swapped(**vars(message)))
            case Scores(exam=exam, handed=handed, adapted=adapted):
                scores = pb.Scores(exam=exam, handed=pb.Sums(values=handed))
                if adapted is not None:
                    scores.adapted.CopyFrom(pb.Sums(values=adapted))
                said = pb.FromClient(scores=scores)
        return Outgoing(said.SerializeToString())


def _small(number: int | None = None, **said: Any) -> Outgoing:
    return Outgoing(pb.FromServer(**said).SerializeToString(), "", number)
