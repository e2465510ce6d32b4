"""Jobs, outcomes and the like as bytes, for processes that trust each other: pickle, with tensors
as plain memory. (On files and networks nothing is ever pickled.)"""

from __future__ import annotations

import io
import math
import pickle
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


class _Pickler(pickle.Pickler):
    def reducer_override(self, thing: Any) -> Any:
        return reduced(thing) if type(thing) is Tensor else NotImplemented


def reduced(tensor: Tensor) -> tuple[Any, ...]:
    """What a pickler makes of it."""
    # numpy does not know all of torch's types of numbers, but every one has bytes
    raw = tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
    return _rebuild, (raw, tensor.dtype, tuple(tensor.shape))


def _rebuild(raw: bytes, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    """In torch's own memory: it is aligned, so sums come out the same bit for bit."""
    found = torch.empty(shape, dtype=dtype)
    if math.prod(shape):
        found.view(-1).view(torch.uint8).copy_(torch.frombuffer(bytearray(raw), dtype=torch.uint8))
    return found


def dumps(thing: Any, pickler: Callable[..., pickle.Pickler] = _Pickler) -> bytes:
    """As bytes that `pickle.loads` reads. The usual pickler sends classes by their names: for
    processes that have the same modules, `__main__` included."""
    file = io.BytesIO()
    pickler(file, protocol=pickle.HIGHEST_PROTOCOL).dump(thing)
    return file.getvalue()
