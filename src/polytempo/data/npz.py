"""A user's own data in .npz files: one file per client in a folder, or one file for all."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from polytempo.core.errors import PolytempoError
from polytempo.data.partition import Array
from polytempo.data.pool import Features, Pool, features, names, user_ids
from polytempo.data.source import reading
from polytempo.data.targets import kind_of, number_of_outputs, targets


def pool_clients(
    name: str,
    clients: Sequence[Sequence[Any]],
    who: Sequence[str],
    classes: int | None,
    problem: str | None = None,
    groups: Array | None = None,
    names: tuple[str, ...] | None = None,
) -> Pool:
    """One pool of what each client brings: (X, y), or (X, y, X_test, y_test). `groups`, `names`:
    one for each client."""
    if not clients:
        raise PolytempoError("no clients were given; give at least one pair (X, y)")
    _check_pairs(clients, who)
    if problem in (None, "classification"):
        clients = _number_names(clients)
    parts: list[str] = []
    owners: list[tuple[int, bool]] = []  # whose, and whether it is for testing
    pairs: list[tuple[Features, Any]] = []
    for number, (client, label) in enumerate(zip(clients, who, strict=True)):
        for at in range(0, len(client), 2):
            parts.append(label if at == 0 else f"{label}, test")
            x = features(client[at], parts[-1])
            _same_form("samples", pairs[0][0] if pairs else x, x, parts[-1], who[0])
            owners.append((number, at > 0))
            pairs.append((x, client[at + 1]))
    problem = kind_of(pairs, classes, problem)
    found = [
        targets(given, x, part, problem, classes)
        for (x, given), part in zip(pairs, parts, strict=True)
    ]
    for y, part in zip(found, parts, strict=True):
        _same_form("targets", found[0], y, part, who[0])
    x, y = _join([x for x, _ in pairs]), np.concatenate(found)
    sizes = [len(x) for x, _ in pairs]
    whose = [number for number, _ in owners]
    return Pool(
        name=name,
        x=x,
        y=y,
        outputs=number_of_outputs(y, x, name, problem, classes),
        users=np.repeat(whose, sizes),
        groups=None if groups is None else np.repeat(groups[whose], sizes),
        test=np.repeat([test for _, test in owners], sizes),
        problem=problem,
        names=names,
    )


def _check_pairs(clients: Sequence[Sequence[Any]], who: Sequence[str]) -> None:
    for client, label in zip(clients, who, strict=True):
        if not isinstance(client, tuple | list) or len(client) not in (2, 4):
            count = f"{len(client)} things" if isinstance(client, tuple | list) else type(client)
            raise PolytempoError(f"{label}: expected (X, y) or (X, y, X_test, y_test), got {count}")


def _number_names(clients: Sequence[Sequence[Any]]) -> list[list[Any]]:
    """The clients, with labels that are names numbered alike for all of them."""
    named = [[names(y) for y in client[1::2]] for client in clients]
    found = [part for parts in named for part in parts]
    if all(part is None for part in found):
        return [list(client) for client in clients]
    texts = [part for part in found if part is not None]
    if len(texts) < len(found):
        raise PolytempoError("some clients' labels are names, others' are numbers; use one kind")
    known = np.unique(np.concatenate([text.reshape(-1) for text in texts]))
    numbered = []
    for client, parts in zip(clients, named, strict=True):
        made = list(client)
        made[1::2] = [np.searchsorted(known, part) for part in parts if part is not None]
        numbered.append(made)
    return numbered


def _same_form(what: str, first: Features, x: Features, who: str, other: str) -> None:
    def form(x: Features) -> str:
        return "text" if isinstance(x, list) else f"{x.dtype} of shape {x.shape[1:]}"

    if form(first) != form(x):
        raise PolytempoError(
            f"{who}: {what} are {form(x)}, but those of {other} are {form(first)}; they must be "
            "the same for all clients"
        )


def _join(parts: list[Features]) -> Features:
    if isinstance(parts[0], list):
        return [text for part in parts for text in part]
    return np.concatenate(parts)


def read_npz(path: str | Path, classes: int | None = None, problem: str | None = None) -> Pool:
    """The pool in a folder (one .npz per client) or in a single .npz file."""
    path = Path(path).expanduser()
    if path.is_dir():
        return _read_folder(path, classes, problem)
    if not path.is_file():
        raise PolytempoError(
            f"{path}: no such file or folder; expected an .npz file with X and y, or a folder "
            "with one such file per client"
        )
    arrays = _read(path)
    if "X_test" in arrays:
        raise PolytempoError(
            f"{path}: X_test is for files of one client; put one file per client in a folder and "
            "name the folder, or join X_test to X"
        )
    x = features(arrays["X"], str(path))
    users = user_ids(arrays["user"], len(x), str(path)) if "user" in arrays else None
    problem = kind_of([(x, arrays["y"])], classes, problem)
    y = targets(arrays["y"], x, str(path), problem, classes)
    outputs = number_of_outputs(y, x, str(path), problem, classes)
    return Pool(path.stem, x, y, outputs, users=users, problem=problem)


def _read_folder(folder: Path, classes: int | None, problem: str | None) -> Pool:
    files = client_files(folder)
    if not files:
        raise PolytempoError(
            f"{folder}: holds no .npz file; expected one per client, with the arrays X and y"
        )
    clients = [read_client(file) for file in files]
    who, names = [str(file) for file in files], tuple(file.stem for file in files)
    return pool_clients(folder.name, clients, who, classes, problem, names=names)


def client_files(folder: Path) -> list[Path]:
    """The files of a folder with one per client, in the order of clients."""
    return sorted(folder.glob("*.npz"), key=_by_number)


def read_client(path: Path) -> list[Array]:
    """What the file of one client holds: X and y, and X_test and y_test if it has them."""
    arrays = _read(path)
    if ("X_test" in arrays) != ("y_test" in arrays):
        raise PolytempoError(f"{path}: has only one of X_test and y_test; give both or neither")
    names = ("X", "y", "X_test", "y_test") if "X_test" in arrays else ("X", "y")
    return [arrays[name] for name in names]


def _read(path: Path) -> dict[str, Array]:
    with reading(path):
        archive = np.load(path, allow_pickle=False)
        if not isinstance(archive, np.lib.npyio.NpzFile):
            raise ValueError("a single array, not an archive; write it with numpy.savez")
        with archive:
            found = {name: archive[name] for name in archive.files}
    if lacking := [name for name in ("X", "y") if name not in found]:
        raise PolytempoError(
            f"{path}: lacks {' and '.join(lacking)}, has {', '.join(found) or 'nothing'}; save it "
            "with numpy.savez(file, X=..., y=...)"
        )
    return found


def _by_number(path: Path) -> list[tuple[int, str]]:
    """client2 before client10."""
    pieces = re.split(r"(\d+)", path.stem)
    return [(int(piece), "") if piece.isdigit() else (0, piece) for piece in pieces]
