"""What users bring as their own clients, in the forms that they have it in, as arrays."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset, IterableDataset

from polytempo.core.errors import PolytempoError
from polytempo.data.partition import Array


def listed(
    clients: Iterable[Any] | Mapping[str, Any], names: Sequence[Any] | None
) -> tuple[list[Any], tuple[str, ...] | None]:
    """The clients in order, and their names if they have some."""
    if isinstance(clients, Mapping):
        if names is not None:
            raise PolytempoError("the clients have names already: omit names=")
        names = list(clients)
        clients = clients.values()
    found = list(clients)
    if names is None:
        return found, None
    called = tuple(str(name) for name in names)
    if len(called) != len(found):
        raise PolytempoError(f"{len(called)} names for {len(found)} clients; give one for each")
    if len(set(called)) < len(called):
        twice = next(name for name in called if called.count(name) > 1)
        raise PolytempoError(f"two clients are called {twice!r}; give each a name of its own")
    return found, called


def group_numbers(groups: Sequence[Any] | None, clients: int) -> Array | None:
    """The true group of each client, as a number."""
    if groups is None:
        return None
    given = np.asarray(groups)
    if given.shape != (clients,):
        raise PolytempoError(
            f"groups has shape {given.shape}, but there are {clients} clients; give one for each"
        )
    return np.unique(given, return_inverse=True)[1].reshape(-1).astype(np.int64)


def arrays_of(client: Any, who: str, target: str | None) -> Any:
    """One client's data as (X, y) or (X, y, X_test, y_test); what is not one of the other forms is
    returned as it is."""
    if _is_frame(client) or isinstance(client, Dataset):
        return _pair(client, who, target)
    if not isinstance(client, tuple | list):
        return client
    if len(client) == 2 and all(_is_frame(p) or isinstance(p, Dataset) for p in client):
        train, test = client
        if target is not None or isinstance(train, Dataset):  # a training set and a test set
            return [*_pair(train, who, target), *_pair(test, f"{who}, test", target)]
    return [_values(part, who, at % 2 == 1) for at, part in enumerate(client)]


def _pair(given: Any, who: str, target: str | None) -> list[Any]:
    if isinstance(given, Dataset):
        return _of_dataset(given, who)
    if target is None or target not in given.columns:
        columns = ", ".join(map(str, given.columns[:8]))
        raise PolytempoError(
            f"{who}: which column of the frame is the target? It has {columns}; name it with "
            "target=..."
        )
    return [_values(given.drop(columns=[target]), who, False), given[target].to_numpy()]


def _is_frame(given: Any) -> bool:
    pandas = sys.modules.get("pandas")  # without it, nobody has a frame
    return pandas is not None and isinstance(given, pandas.DataFrame)


def _values(given: Any, who: str, is_target: bool) -> Any:
    """A frame or series as an array. Columns of a frame are features, whatever their type."""
    pandas = sys.modules.get("pandas")
    if pandas is not None and isinstance(given, pandas.Series):
        texts = given.dtype.kind not in "biuf"
        return [str(item) for item in given] if texts else given.to_numpy()
    if not _is_frame(given):
        return given
    if is_target:
        return given.to_numpy()[:, 0] if given.shape[1] == 1 else given.to_numpy()
    for column, kind in given.dtypes.items():
        if kind.kind not in "biuf":
            raise PolytempoError(
                f"{who}: the column {column!r} is of type {kind}, expected numbers; encode it "
                "(pandas.get_dummies) or drop it"
            )
    return given.to_numpy(dtype=np.float32)


def _of_dataset(given: Dataset[Any], who: str) -> list[Any]:
    """A map-style dataset of pairs (sample, target)."""
    if isinstance(given, IterableDataset) or not hasattr(given, "__len__"):
        raise PolytempoError(
            f"{who}: a dataset without a length cannot be divided; give one with __getitem__ and "
            "__len__"
        )
    items = [given[index] for index in range(len(given))]
    if not all(isinstance(item, tuple | list) and len(item) == 2 for item in items):
        raise PolytempoError(f"{who}: a dataset must give pairs (sample, target)")
    return [_stacked([item[part] for item in items], who) for part in (0, 1)]


def _stacked(values: list[Any], who: str) -> Any:
    if not values or isinstance(values[0], str):
        return values
    if isinstance(values[0], torch.Tensor):
        try:
            return torch.stack(values)
        except RuntimeError as error:
            raise PolytempoError(
                f"{who}: the samples are not of one shape ({error}); pad or crop them"
            ) from error
    if isinstance(values[0], int | float | np.generic | np.ndarray):
        return np.array(values)
    raise PolytempoError(
        f"{who}: the dataset gives {type(values[0]).__name__}; transform samples to tensors or "
        "arrays (for images: torchvision's PILToTensor)"
    )
