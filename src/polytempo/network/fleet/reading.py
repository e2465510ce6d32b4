"""What is heard: frames of a stream (fleet.proto) put together and checked.

Whatever does not fit (sizes, names, numbers that are not finite, fields that nobody knows) is
`Refused`, and nothing has happened.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from google.protobuf.message import DecodeError
from google.protobuf.unknown_fields import UnknownFieldSet
from torch import Tensor

from polytempo.core.client_steps import CLIENT_STEPS
from polytempo.core.errors import PolytempoError, Refused
from polytempo.core.messages import Dispatch
from polytempo.core.objective import OBJECTIVES
from polytempo.core.optimizer import OPTIMIZERS
from polytempo.core.registry import Registry
from polytempo.core.schedule import SCHEDULES
from polytempo.core.task import TASKS, Task
from polytempo.network.fleet import fleet_pb2 as pb
from polytempo.network.fleet.payload import read_payload
from polytempo.network.fleet.sending import CHUNK, EXTRA
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
    Sums,
    Swapped,
    Upload,
    Welcome,
    Work,
)

MOST_FRAME = CHUNK + 4_096  # bytes of one with a chunk
MOST_TEXT = 1_048_576  # of a JSON text
MOST_EXTRAS = 16  # tensors along with an update
MOST_SUMS = 64
_NUMBERS = 2**53
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9 ._-]{0,63}")
_REGISTRIES: tuple[Registry[Any], ...] = (TASKS, OPTIMIZERS, SCHEDULES, OBJECTIVES, CLIENT_STEPS)


@dataclass
class Whole:
    """A message that is complete, but not yet looked at."""

    kind: str
    head: Any  # protobuf
    payload: Tensor | None = None  # bytes


@dataclass
class _Partial:
    whole: Whole
    size: int
    got: int = 0


class Reader:
    """Puts the frames of one direction of a stream together again. `most`: bytes of a payload."""

    def __init__(self, frame: type[pb.FromClient] | type[pb.FromServer], most: int) -> None:
        self._frame, self.most = frame, most
        self._partial: dict[int, _Partial] = {}

    @property
    def expected(self) -> int:
        """Bytes of the payloads that are under way."""
        return sum(partial.size for partial in self._partial.values())

    @property
    def missing(self) -> int:
        """Those of them that have not come in yet."""
        return sum(partial.size - partial.got for partial in self._partial.values())

    def take(self, data: bytes) -> Whole | None:
        """The next frame; the message that it completes, if it does."""
        try:
            frame = self._frame.FromString(data)
        except DecodeError as error:
            raise Refused(f"it sent {len(data)} bytes that are not in the protocol") from error
        kind = frame.WhichOneof("said")
        if kind is None or not _known(frame):
            raise Refused("it sent a message with fields that this version does not know")
        head = getattr(frame, kind)
        if kind == "chunk":
            return self._chunk(head)
        whole = Whole(kind, head)
        if kind not in ("upload", "work", "examine"):
            return whole
        number, size = head.payload.id, head.payload.bytes
        if not 8 <= size <= self.most:
            raise Refused(
                f"it announced {size} bytes with its {kind}; at most {self.most} are read"
            )
        if number in self._partial or any(p.whole.kind == kind for p in self._partial.values()):
            raise Refused(f"it began another {kind} before the last one was complete")
        self._partial[number] = _Partial(whole, size)
        return None

    def _chunk(self, chunk: Any) -> Whole | None:
        partial = self._partial.get(chunk.payload)
        if partial is None:
            raise Refused("it sent a part of something that it never announced")
        wanted = min(CHUNK, partial.size - partial.got)
        if len(chunk.data) != wanted:
            raise Refused(f"it sent a chunk of {len(chunk.data)} bytes where {wanted} were due")
        whole = partial.whole
        if whole.payload is None:  # only now: announcing costs nothing
            whole.payload = torch.empty(partial.size, dtype=torch.uint8)
        place = whole.payload.numpy().data
        place[partial.got : partial.got + wanted] = chunk.data
        partial.got += wanted
        if partial.got < partial.size:
            return None
        del self._partial[chunk.payload]
        return whole


def _known(message: Any) -> bool:
    """Whether all fields are known, those of messages within messages included."""
    if len(UnknownFieldSet(message)):
        return False
    for field, value in message.ListFields():
        inner = field.message_type
        if inner is not None and not inner.GetOptions().map_entry and not _known(value):
            return False
    return True


def read_from_client(
    whole: Whole, size: int, dtype: torch.dtype, packed: bool = False
) -> FromClient:
    """What a client says to the server of a model with so many numbers of that type; `packed`: if
    updates are compressed, which the server that knows how will look at in full."""
    head = whole.head
    match whole.kind:
        case "hello":
            return Hello(
                _count(head.protocol),
                _text(head.model, 64),
                _text(head.problem, 256),
                _count(head.samples),
                _count(head.tested),
                _count(head.training) if head.HasField("training") else None,
                _count(head.offering) if head.HasField("offering") else None,
            )
        case "swapped":
            step = _count(head.step) if head.HasField("step") else None
            return Swapped(_count(head.number), _count(head.replaces), step)
        case "scores":
            adapted = _sums(head.adapted) if head.HasField("adapted") else None
            return Scores(_count(head.exam), _sums(head.handed), adapted)
        case "upload":
            tensors = _tensors(whole)
            vector = tensors.pop("vector", None)
            plain = vector is not None and (vector.shape, vector.dtype) == ((size,), dtype)
            short = packed and vector is not None and vector.ndim == 1 and len(vector) <= size
            if vector is None or not (plain or short):
                found = "none" if vector is None else f"{vector.dtype} {list(vector.shape)}"
                raise Refused(f"its update has the vector {found}, expected {dtype} [{size}]")
            if len(tensors) > MOST_EXTRAS:
                raise Refused(
                    f"its update has {len(tensors)} extras; expected {MOST_EXTRAS} at most"
                )
            extras = {}
            for name, tensor in tensors.items():
                if not name.startswith(EXTRA) or not _NAME.fullmatch(name[len(EXTRA) :]):
                    raise Refused(f"its update has a tensor called {name[:64]!r}")
                extras[name[len(EXTRA) :]] = tensor
            if not 0 <= head.seconds < math.inf:
                raise Refused(f"it claims to have trained for {head.seconds} seconds")
            return Upload(_count(head.number), vector, _count(head.samples), extras, head.seconds)
    raise Refused(f"a client does not say {whole.kind!r}")


def read_from_server(whole: Whole) -> FromServer:
    """What the server says."""
    head = whole.head
    match whole.kind:
        case "welcome":
            run = _json(head.run)
            if not isinstance(run, dict):
                raise Refused("its welcome does not describe a run")
            return Welcome(_count(head.client), run)
        case "work":
            tensors = _tensors(whole)
            params = _model(tensors)
            for name, tensor in tensors.items():
                if not _NAME.fullmatch(name) or tensor.shape != params.shape:
                    raise Refused(f"it sent {name[:64]!r} of shape {list(tensor.shape)}")
            task = read_task(_json(head.task))
            return Work(
                Dispatch(
                    _count(head.client), _count(head.number), params, task, head.preempt, tensors
                )
            )
        case "examine":
            params = _model(tensors := _tensors(whole))
            if tensors:
                raise Refused(f"it sent {sorted(tensors)[0][:64]!r} with a model to examine")
            return Examine(_count(head.exam), params, head.adapt_epochs)
        case "hurry":
            return Hurry(_count(head.number))
        case "acknowledge":
            return Acknowledge(_count(head.number))
        case "decline":
            return Decline(_count(head.number), head.reason)
        case "finished":
            return Finished(head.reason)
    raise Refused(f"a server does not say {whole.kind!r}")


def read_task(table: Any) -> Task:
    """A task from the network. A table may name any class that can be imported; from the network,
    only those that this process has registered: nothing is imported on another's word."""
    known = {name for registry in _REGISTRIES for name in registry}
    known |= {
        f"{maker.__module__}:{maker.__qualname__}"
        for registry in _REGISTRIES
        for maker in map(registry.__getitem__, registry)
        if isinstance(maker, type)
    }
    for key, text in _strings(table, 0):
        if text not in known if key == "name" else ":" in text:
            raise Refused(
                f"the task names {text[:64]!r}, which is not registered here; import the module "
                "that registers it before the client joins"
            )
    if not isinstance(table, dict) or table.get("name") not in [*TASKS]:
        raise Refused("the task is not a table with the name of a task")
    try:
        return TASKS.create(table)
    except (PolytempoError, TypeError, ValueError, RecursionError) as error:
        raise Refused(f"the task cannot be read: {error}") from error


def _strings(node: Any, depth: int, key: str = "") -> Iterator[tuple[str, str]]:
    """All strings of a JSON value, each with the key that it stands under."""
    if depth > 16:
        raise Refused("the task is nested too deeply")
    if isinstance(node, str):
        yield key, node
    elif isinstance(node, dict):
        for inner, value in node.items():
            yield from _strings(value, depth + 1, inner)
    elif isinstance(node, list):
        for value in node:
            yield from _strings(value, depth + 1)


def _tensors(whole: Whole) -> dict[str, Tensor]:
    if whole.payload is None:
        raise Refused(f"its {whole.kind} has no vectors")
    return read_payload(whole.payload)


def _model(tensors: dict[str, Tensor]) -> Tensor:
    params = tensors.pop("params", None)
    if params is None or params.ndim != 1 or not len(params) or not params.is_floating_point():
        raise Refused("it sent no model where one was due")
    return params


def _count(number: int) -> int:
    if not 0 <= number < _NUMBERS:
        raise Refused(f"{number} is not a number between 0 and {_NUMBERS}")
    return number


def _text(text: str, most: int) -> str:
    if len(text) > most or not text.isprintable():
        raise Refused(f"{text[:64]!r} is not a text of at most {most} printable characters")
    return text


def _json(text: str) -> Any:
    if len(text) > MOST_TEXT:
        raise Refused(f"a JSON text of {len(text)} characters; at most {MOST_TEXT} are read")
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise Refused(f"what should be JSON is not: {error}") from error


def _sums(sums: Any) -> Sums:
    values = dict(sums.values)
    if len(values) > MOST_SUMS:
        raise Refused(f"its scores have {len(values)} figures; at most {MOST_SUMS} are read")
    for name, value in values.items():
        if not _NAME.fullmatch(name) or not math.isfinite(value):
            raise Refused(f"its scores say {name[:64]!r} = {value}")
    return values
