"""State on disk: safetensors for numbers, JSON for the rest, never pickle.

A state is a nested dictionary with string keys, whose leaves are tensors, numpy arrays or JSON
values. One file holds it: the arrays as safetensors, the rest as JSON in the same file's header,
so that replacing the file replaces all of the state or none of it.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from polytempo.core.errors import PolytempoError

State = dict[str, Any]
_ARRAY = "$array"  # {"$array": "tensor" | "numpy"} marks where an array stood


def save_state(path: str | os.PathLike[str], state: State) -> None:
    """Write `state` to `path`; a crash leaves either the old file or the new one."""
    arrays: dict[str, Tensor] = {}
    skeleton = _split(state, "", arrays)
    path = Path(path)
    partial = path.with_name(path.name + ".partial")
    save_file(arrays, str(partial), metadata={"state": json.dumps(skeleton)})
    os.replace(partial, path)


def load_state(path: str | os.PathLike[str]) -> State:
    """What `save_state` wrote."""
    try:
        with safe_open(str(path), framework="pt") as file:
            skeleton = json.loads((file.metadata() or {})["state"])
            # Copied, because a sum over memory of another alignment may differ in its last bit.
            arrays = {key: file.get_tensor(key).clone() for key in file.keys()}  # noqa: SIM118
    except FileNotFoundError as error:
        raise PolytempoError(f"there is no checkpoint {path}; start the run anew") from error
    except (SafetensorError, KeyError, ValueError) as error:
        raise PolytempoError(
            f"{path} is no checkpoint of polytempo ({error}); delete it and start the run anew"
        ) from error
    state: State = _join(skeleton, "", arrays)
    return state


def _split(node: Any, where: str, arrays: dict[str, Tensor]) -> Any:
    if isinstance(node, Tensor):
        arrays[where] = node.detach().clone(memory_format=torch.contiguous_format)
        return {_ARRAY: "tensor"}
    if isinstance(node, np.ndarray):
        arrays[where] = torch.from_numpy(np.array(node))
        return {_ARRAY: "numpy"}
    if isinstance(node, dict):
        if any(not isinstance(key, str) for key in node):
            raise TypeError(f"state at {where!r} has keys that are not strings: {list(node)[:3]}")
        return {key: _split(value, f"{where}/{key}", arrays) for key, value in node.items()}
    if isinstance(node, list | tuple):
        return [_split(value, f"{where}/{i}", arrays) for i, value in enumerate(node)]
    if isinstance(node, np.generic):
        return node.item()
    return node


def _join(node: Any, where: str, arrays: dict[str, Tensor]) -> Any:
    if isinstance(node, dict):
        if _ARRAY in node:
            found = arrays[where]
            return found if node[_ARRAY] == "tensor" else found.numpy()
        return {key: _join(value, f"{where}/{key}", arrays) for key, value in node.items()}
    if isinstance(node, list):
        return [_join(value, f"{where}/{i}", arrays) for i, value in enumerate(node)]
    return node
