"""Records of the journal as bytes and back: JSON, and safetensors where there are vectors."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from polytempo.core.errors import PolytempoError
from polytempo.network.fleet.payload import Payload, read_payload
from polytempo.nodes import star
from polytempo.nodes.star import AnyRecord, Offered, Scores, Swapped, Upload


@dataclass(frozen=True)
class Skipped:
    """The record of that number does not count: the strategy failed on it. Every replay leaves it
    out."""

    number: int
    reason: str


Entry = AnyRecord | Skipped
_KINDS: Mapping[str, type] = {
    kind.__name__: kind
    for kind in (
        *(star.Started, star.Enrolled, star.Joined, star.Away, star.Left, star.GivenUp),
        *(star.Offered, star.Continued, star.Scored, star.Closed, Skipped),
    )
}
_PARTS: Mapping[str, type] = {"swapped": Swapped, "scores": Scores}
Buffer = bytes | bytearray | memoryview


def write_entry(entry: Entry) -> list[Buffer]:
    """The bytes of an entry, in parts: a large update is not copied."""
    fields = {field.name: getattr(entry, field.name) for field in dataclasses.fields(entry)}
    parts: list[Buffer] = []
    if isinstance(entry, Offered):
        upload = entry.upload
        fields["upload"] = {
            "number": upload.number,
            "samples": upload.samples,
            "seconds": upload.seconds,
        }
        extras = {f"extra {name}": extra for name, extra in upload.extras.items()}
        parts = [*Payload({"vector": upload.vector, **extras}).parts]
    for name in _PARTS:
        if name in fields:
            fields[name] = {key: _plain(value) for key, value in vars(fields[name]).items()}
    text = json.dumps({"kind": type(entry).__name__, **fields}, separators=(",", ":")).encode()
    return [len(text).to_bytes(4, "little") + text, *parts]


def _plain(value: Any) -> Any:
    return dict(value) if isinstance(value, Mapping) else value


def read_entry(data: bytearray) -> Entry:
    """What `write_entry` wrote."""
    try:
        end = 4 + int.from_bytes(data[:4], "little")
        fields: dict[str, Any] = json.loads(data[4:end])
        kind = _KINDS[fields.pop("kind")]
        if "upload" in fields:
            tensors = read_payload(torch.frombuffer(data, dtype=torch.uint8, offset=end))
            vector = tensors.pop("vector")
            extras = {name.removeprefix("extra "): extra for name, extra in tensors.items()}
            fields["upload"] = Upload(vector=vector, extras=extras, **fields["upload"])
        for name, part in _PARTS.items():
            if name in fields:
                fields[name] = part(**fields[name])
        found: Entry = kind(**fields)
    except (KeyError, ValueError, TypeError, PolytempoError) as error:
        raise PolytempoError(
            f"a record of the journal cannot be read ({error}): it was written by another version "
            "of Polytempo; resume with that one"
        ) from error
    return found
