"""State on disk: safetensors for numbers, JSON for the rest, never pickle.

A state is a nested dictionary with string keys, whose leaves are tensors, numpy arrays or JSON
values. One file holds it: the arrays as safetensors, the rest as JSON in the same file's header,
so that replacing the file replaces all of the state or none of it.

`mapped` is for what need not outlive the process: memory that is backed by a disk.
"""

from __future__ import annotations

import hashlib
import json
import mmap
import os
import tempfile
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from polytempo.core.bank import Allocator
from polytempo.core.errors import PolytempoError
from polytempo.core.strategy import State
from polytempo.files import replacing

_ARRAY = "$array"  # {"$array": [kind, name in the file]} marks where an array stood


def save_state(
    path: str | os.PathLike[str], state: State, keep: str | os.PathLike[str] | None = None
) -> None:
    """Write `state` to `path`; a crash leaves either the old file or the new one. `keep`: where the
    old one is kept."""
    text, arrays = _taken_apart(state)
    about = {"state": text, "digest": _digest(text, arrays)}
    with replacing(path, keep) as partial:
        try:
            save_file(_apart(arrays), str(partial), metadata=about)
        except SafetensorError as error:
            raise OSError(str(error)) from error


def load_state(path: str | os.PathLike[str]) -> State:
    """What `save_state` wrote."""
    try:
        with safe_open(str(path), framework="pt") as file:
            about = file.metadata() or {}
            # Copied, because a sum over memory of another alignment may differ in its last bit.
            arrays = {key: file.get_tensor(key).clone() for key in file.keys()}  # noqa: SIM118
        if about.get("digest", "") not in ("", _digest(about["state"], arrays)):  # older: none
            raise ValueError("its content does not match its checksum")
        state: State = _join(json.loads(about["state"]), arrays)
    except FileNotFoundError as error:
        raise PolytempoError(f"there is no checkpoint {path}; start a new run") from error
    except (SafetensorError, KeyError, ValueError, OSError) as error:
        raise PolytempoError(
            f"{path} is not a Polytempo checkpoint, or a damaged one ({error}); restore it from a "
            "copy, or delete it and start a new run"
        ) from error
    return state


def _digest(text: str, arrays: Mapping[str, Tensor]) -> str:
    """A checksum of all that a file holds."""
    found = hashlib.blake2b(text.encode(), digest_size=16)
    for name, array in sorted(arrays.items()):
        found.update(f"{name} {array.dtype} {list(array.shape)}".encode())
        if array.numel():  # what is empty cannot be seen as bytes
            found.update(array.contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return found.hexdigest()


def restored(state: State) -> State:
    """What `load_state` would return had `state` been saved, without the file."""
    text, arrays = _taken_apart(state)
    found: State = _join(json.loads(text), {name: _copy(array) for name, array in arrays.items()})
    return found


def mapped(folder: str | os.PathLike[str] | None = None) -> Allocator:
    """An allocator for `Storage`: each block is a temporary file in `folder` (None: the system's
    folder for such files) that has no name and disappears with the process. Its disk space is
    reserved at once."""

    def allocate(shape: tuple[int, int], dtype: torch.dtype) -> Tensor:
        size = shape[0] * shape[1] * dtype.itemsize
        try:
            with tempfile.TemporaryFile(dir=folder) as file:
                if hasattr(os, "posix_fallocate"):
                    os.posix_fallocate(file.fileno(), 0, size)
                file.truncate(size)
                memory = mmap.mmap(file.fileno(), size)
        except OSError as error:
            raise PolytempoError(
                f"cannot map {size / 1e6:.0f} MB in {folder or tempfile.gettempdir()} "
                f"({error.strerror}); make room there, or name a folder on another disk"
            ) from error
        return torch.frombuffer(memory, dtype=dtype).view(shape)

    return allocate


def _taken_apart(state: State) -> tuple[str, dict[str, Tensor]]:
    """What a file holds: JSON, and the arrays by name, not copied."""
    arrays: dict[str, Tensor] = {}
    return json.dumps(_split(state, "state", arrays)), arrays


def _copy(array: Tensor) -> Tensor:
    return array.clone(memory_format=torch.contiguous_format)


def _apart(arrays: dict[str, Tensor]) -> dict[str, Tensor]:
    """The same arrays, each with memory of its own, as a file needs them; most have it already."""
    seen: set[int] = set()
    found = {}
    for name, array in arrays.items():
        memory = array.untyped_storage()
        alone = array.is_contiguous() and len(memory) == array.nbytes
        if not alone or memory.data_ptr() in seen:
            array = _copy(array)
        seen.add(memory.data_ptr())
        found[name] = array
    return found


def _split(node: Any, where: str, arrays: dict[str, Tensor]) -> Any:
    """The JSON part of a node; its arrays go to `arrays`, named by number and place."""
    if isinstance(node, Tensor | np.ndarray):
        name = f"{len(arrays)} {where}"
        if isinstance(node, Tensor):
            arrays[name] = node.detach()
            return {_ARRAY: ["tensor", name]}
        try:
            arrays[name] = torch.from_numpy(np.array(node, order="C"))
        except TypeError as error:
            raise _unsaved(where, f"is an array of {node.dtype}") from error
        return {_ARRAY: ["numpy", name]}
    if isinstance(node, dict):
        for key in node:
            if not isinstance(key, str):
                raise _unsaved(where, f"has the key {key!r}, which is not a string")
            if key == _ARRAY:
                raise _unsaved(where, f"has the key {key!r}, which is reserved")
        return {key: _split(value, f"{where}/{key}", arrays) for key, value in node.items()}
    if isinstance(node, list | tuple):
        return [_split(value, f"{where}/{i}", arrays) for i, value in enumerate(node)]
    if isinstance(node, np.generic):
        node = node.item()
    if node is None or isinstance(node, str | int | float):
        return node
    raise _unsaved(where, f"is of type {type(node).__name__}")


def _unsaved(where: str, why: str) -> PolytempoError:
    return PolytempoError(
        f"{where} cannot be saved: it {why}; keep it as a tensor, a numpy array of numbers or JSON "
        "(None, numbers, strings, lists, dictionaries with string keys): a set as a sorted list"
    )


def _join(node: Any, arrays: dict[str, Tensor]) -> Any:
    if isinstance(node, dict):
        if _ARRAY in node:
            kind, name = node[_ARRAY]
            return arrays[name] if kind == "tensor" else arrays[name].numpy()
        return {key: _join(value, arrays) for key, value in node.items()}
    return [_join(value, arrays) for value in node] if isinstance(node, list) else node
