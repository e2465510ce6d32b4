"""Named tensors as safetensors bytes, without copying them all into one place first.

Written by hand (the format is a length, a JSON header and the numbers), so that a large model goes
from its own memory to the network or the disk, and arrives with a single copy. What is read is
checked in full: it comes from the network.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from polytempo.core.errors import Refused

MOST_HEADER = 65_536  # bytes
MOST_TENSORS = 64
_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}


class Payload:
    """Tensors as the parts of one safetensors file. They must not change while this is in use."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self._tensors = dict(tensors)  # whose memory the parts are
        header: dict[str, Any] = {}
        self.parts: list[memoryview] = []
        end = 0
        for name, tensor in tensors.items():
            begin, end = end, end + tensor.nbytes
            header[name] = {
                "dtype": _NAMES[tensor.dtype],
                "shape": list(tensor.shape),
                "data_offsets": [begin, end],
            }
            flat = tensor.detach().cpu().contiguous().flatten()
            self.parts.append(flat.view(torch.uint8).numpy().data)
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        self.parts.insert(0, memoryview(len(text).to_bytes(8, "little") + text))
        self.size = sum(map(len, self.parts))

    def cut(self, begin: int, end: int) -> bytes:
        """Some of the bytes."""
        found = []
        for part in self.parts:
            if begin < len(part) and end > 0:
                found.append(part[max(begin, 0) : end])
            begin, end = begin - len(part), end - len(part)
        return b"".join(found)


def read_payload(data: Tensor) -> dict[str, Tensor]:
    """The tensors of a safetensors file that is in memory (uint8), as copies: a sum over memory of
    another alignment may differ in its last bit. `Refused` if it is not as it should be."""
    if len(data) < 8:
        raise Refused(f"its payload has {len(data)} bytes: that is no safetensors file")
    length = int.from_bytes(bytes(data[:8].numpy()), "little")
    if length > min(MOST_HEADER, len(data) - 8):
        raise Refused(f"the header of its payload claims {length} bytes")
    try:
        header = json.loads(bytes(data[8 : 8 + length].numpy()))
    except (ValueError, RecursionError) as error:
        raise Refused(f"the header of its payload is not JSON: {error}") from error
    if not isinstance(header, dict):
        raise Refused("the header of its payload is not a JSON object")
    header.pop("__metadata__", None)
    if len(header) > MOST_TENSORS:
        raise Refused(f"its payload has {len(header)} tensors; at most {MOST_TENSORS} are read")
    found, reached = {}, 0
    numbers = data[8 + length :]
    for name, dtype, shape, begin, end in sorted(_entries(header), key=lambda entry: entry[3:]):
        if begin != reached or end > len(numbers):
            raise Refused(f"the bytes of {name!r} in its payload are not where they should be")
        part = numbers[begin:end].clone()
        # Bytes other than 0 and 1 are no booleans.
        found[name] = ((part != 0) if dtype == torch.bool else part.view(dtype)).reshape(shape)
        reached = end
    if reached != len(numbers):
        raise Refused(f"its payload has {len(numbers) - reached} bytes that belong to nothing")
    return found


def _entries(
    header: Mapping[str, Any],
) -> Iterator[tuple[str, torch.dtype, Sequence[int], int, int]]:
    for name, entry in header.items():
        match entry:
            case {"dtype": str(kind), "shape": [*shape], "data_offsets": [begin, end]} if (
                len(entry) == 3
                and kind in _DTYPES
                and len(shape) <= 4
                and all(type(n) is int and 0 <= n < 2**48 for n in (*shape, begin, end))
                and end - begin == math.prod(shape) * _DTYPES[kind].itemsize
            ):
                yield name, _DTYPES[kind], shape, begin, end
            case _:
                raise Refused(f"its payload describes {name[:64]!r} as {str(entry)[:200]}")
