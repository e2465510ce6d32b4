"""Data sets in the formats of their publishers: one function per format.

Each takes the files, packed or not (see `unpack`), and returns the arrays of one of our own files
(docs/data.md): `X_train`, `y_train`, ..., and for text lists such as `text_train`.
"""

from __future__ import annotations

import csv
import io
import pickle
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from polytempo.core.errors import PolytempoError
from polytempo.data.partition import Array
from polytempo.data.unpack import unpack

Arrays = dict[str, Any]  # arrays, or lists of text
SPLITS = ("train", "test")


def _base(name: str) -> str:
    return name.rpartition("/")[2]


def _complete(found: Iterable[str], needed: Iterable[str], paths: Sequence[Path]) -> None:
    if lacking := sorted(set(needed) - set(found)):
        raise PolytempoError(
            f"{', '.join(str(path) for path in paths)}: lacks {', '.join(lacking[:5])}"
            f"{' and more' if len(lacking) > 5 else ''}; is it the official archive, and complete?"
        )


# -- CIFAR: pickled batches -----------------------------------------------------------------------


class _Batch(pickle.Unpickler):
    """Reads arrays and plain values; whatever else a pickle asks for is refused."""

    ALLOWED = frozenset({"_reconstruct", "ndarray", "dtype", "_frombuffer", "scalar"})

    def find_class(self, module: str, name: str) -> Any:
        if module.split(".")[0] == "numpy" and name in self.ALLOWED:
            return super().find_class(module.replace("numpy.core", "numpy._core"), name)
        if (module, name) == ("_codecs", "encode"):  # bytes, in pickles that Python 3 made
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"it asks for {module}.{name}, which no CIFAR batch needs")


def _batch(content: bytes, name: str) -> dict[bytes, Any]:
    try:
        found = _Batch(io.BytesIO(content), encoding="bytes").load()
    except (pickle.UnpicklingError, EOFError, ValueError, TypeError, AttributeError) as error:
        raise PolytempoError(
            f"{name} cannot be read: {error}; get the official archive again"
        ) from error
    if not isinstance(found, dict):
        raise PolytempoError(f"{name} holds a {type(found).__name__}, not a batch of CIFAR")
    # Keys are bytes where Python 2 wrote them, as in the official archives.
    return {key.encode() if isinstance(key, str) else key: value for key, value in found.items()}


def _batches(
    paths: Sequence[Path], files: dict[str, Sequence[str]], label: bytes
) -> tuple[Arrays, dict[str, dict[bytes, Any]]]:
    """Images and labels of the files of each split, and the batches themselves."""
    needed = {name for names in files.values() for name in names}
    held = {
        _base(name): _batch(content, name)
        for name, content in unpack(paths, lambda name: _base(name) in needed)
    }
    _complete(held, needed, paths)
    arrays: Arrays = {}
    for split, names in files.items():
        for name in names:
            if not {b"data", label} <= held[name].keys():
                raise PolytempoError(f"{name} lacks 'data' or {label.decode()!r}: no CIFAR batch")
        pixels = np.concatenate([np.asarray(held[name][b"data"]) for name in names])
        arrays[f"X_{split}"] = pixels.astype(np.uint8).reshape(-1, 3, 32, 32)
        arrays[f"y_{split}"] = np.concatenate([held[name][label] for name in names]).astype(
            np.uint8
        )
    return arrays, held


def cifar10(paths: Sequence[Path]) -> Arrays:
    """CIFAR-10, python version: cifar-10-python.tar.gz, or its folder."""
    train = tuple(f"data_batch_{number}" for number in range(1, 6))
    return _batches(paths, {"train": train, "test": ("test_batch",)}, b"labels")[0]


def cifar100(paths: Sequence[Path]) -> Arrays:
    """CIFAR-100, python version: cifar-100-python.tar.gz, or its folder. `coarse` is the superclass
    of each class."""
    arrays, held = _batches(paths, {"train": ("train",), "test": ("test",)}, b"fine_labels")
    coarse = np.zeros(100, dtype=np.uint8)
    for batch in held.values():
        coarse[np.asarray(batch[b"fine_labels"])] = batch[b"coarse_labels"]
    return {**arrays, "coarse": coarse}


# -- idx: MNIST and its relatives -----------------------------------------------------------------

_IDX = {8: "u1", 9: "i1", 11: ">i2", 12: ">i4", 13: ">f4", 14: ">f8"}


def idx(content: bytes, name: str) -> Array:
    """An array in the idx format: two zeros, the type, the number of sizes, the sizes, the data."""
    if len(content) < 4 or content[:2] != b"\0\0" or content[2] not in _IDX:
        raise PolytempoError(f"{name} is not an idx file: it starts with {content[:4]!r}")
    head = 4 + 4 * content[3]
    shape = np.frombuffer(content[4:head], ">i4").tolist()
    kind = np.dtype(_IDX[content[2]])
    if len(content) - head != kind.itemsize * int(np.prod(shape)):
        raise PolytempoError(
            f"{name}: {len(content) - head} bytes of data, expected {shape} of {kind.itemsize} "
            "bytes each; it is damaged: get it again"
        )
    return np.frombuffer(content[head:], kind).reshape(shape)


def _idx_pairs(paths: Sequence[Path], names: dict[str, str]) -> Arrays:
    """Images and labels; `names`: how the files of each split begin."""
    needed = {
        f"{begin}-{kind}-idx{sizes}-ubyte": f"{key}_{split}"
        for split, begin in names.items()
        for kind, sizes, key in (("images", 3, "X"), ("labels", 1, "y"))
    }
    arrays = {
        needed[_usual(name)]: idx(content, name)
        for name, content in unpack(paths, lambda name: _usual(name) in needed)
    }
    _complete((name for name, key in needed.items() if key in arrays), needed, paths)
    return arrays


def _usual(name: str) -> str:
    """Some unpacked copies are called train-images.idx3-ubyte."""
    return _base(name).replace(".idx", "-idx")


def mnist(paths: Sequence[Path]) -> Arrays:
    """MNIST and Fashion-MNIST: four idx files, with or without .gz."""
    return _idx_pairs(paths, {"train": "train", "test": "t10k"})


def emnist(paths: Sequence[Path]) -> Arrays:
    """EMNIST, the Balanced split, from gzip.zip or its files. Its images lie on their side: rows
    are columns. `classes` are the characters of its mapping."""
    arrays = _idx_pairs(paths, {split: f"emnist-balanced-{split}" for split in SPLITS})
    for split in SPLITS:
        arrays[f"X_{split}"] = np.ascontiguousarray(arrays[f"X_{split}"].transpose(0, 2, 1))
    for _, content in unpack(paths, lambda name: _base(name) == "emnist-balanced-mapping.txt"):
        codes = [int(line.split()[1]) for line in content.decode().splitlines() if line.split()]
        arrays["classes"] = np.array([chr(code) for code in codes])
    return arrays


def mnist_writers(paths: Sequence[Path]) -> Arrays:
    """Who wrote the digits of MNIST, from QMNIST's labels: class, series, writer, number of the
    image among the writer's. The first 10,000 of its test images are MNIST's."""
    needed = {f"qmnist-{split}-labels-idx2-int": split for split in SPLITS}
    found = {
        needed[_base(name)]: idx(content, name)
        for name, content in unpack(paths, lambda name: _base(name) in needed)
    }
    _complete((name for name, split in needed.items() if split in found), needed, paths)
    arrays: Arrays = {}
    for split, table in found.items():
        rows = table[: 10_000 if split == "test" else None]
        for column, key in enumerate(("y", "hsf", "user", "index")):
            arrays[f"{key}_{split}"] = rows[:, column].astype(np.int32)
    return arrays


# -- UCI: motion and hearts -----------------------------------------------------------------------

_SIGNALS = tuple(
    f"{kind}_{axis}" for kind in ("body_acc", "body_gyro", "total_acc") for axis in "xyz"
)


def uci_har(paths: Sequence[Path]) -> Arrays:
    """UCI HAR: the raw inertial signals, [windows, 9, 128], from the zip (or the zip in it)."""
    needed = [f"{part}_{split}.txt" for split in SPLITS for part in (*_SIGNALS, "subject", "y")]
    held = {
        _base(name): _numbers(content, name)
        for name, content in unpack(paths, lambda name: _base(name) in needed)
    }
    _complete(held, needed, paths)
    arrays: Arrays = {}
    for split in SPLITS:
        signals = [held[f"{signal}_{split}.txt"] for signal in _SIGNALS]
        arrays[f"X_{split}"] = np.stack(signals, axis=1).astype(np.float32)
        arrays[f"y_{split}"] = held[f"y_{split}.txt"][:, 0].astype(np.uint8) - 1
        arrays[f"user_{split}"] = held[f"subject_{split}.txt"][:, 0].astype(np.uint8)
    return arrays


def _numbers(content: bytes, name: str) -> Array:
    """A table of numbers, separated by blanks."""
    try:
        return np.loadtxt(io.BytesIO(content), ndmin=2)
    except ValueError as error:
        raise PolytempoError(f"{name} is not a table of numbers: {error}") from error


_ACTIVITIES = dict(A="walking", B="jogging", C="stairs", D="sitting", E="standing", M="kicking")
WINDOW = 200  # steps: 10 seconds at 20 Hz


def wisdm(paths: Sequence[Path]) -> Arrays:
    """WISDM's watch accelerometer, six of its activities: windows of 10 seconds without overlap. Of
    each person and activity, the last 15% are for the test."""
    found: dict[str, list[tuple[int, int, Array]]] = {split: [] for split in SPLITS}
    for name, content in unpack(paths, _is_watch):
        for activity, user, signal in _recordings(content, name):
            count = len(signal) // WINDOW
            windows = signal[: count * WINDOW].reshape(count, WINDOW, 3).transpose(0, 2, 1)
            kept = count - round(0.15 * count)
            found["train"] += [(activity, user, window) for window in windows[:kept]]
            found["test"] += [(activity, user, window) for window in windows[kept:]]
    if not found["test"]:
        _complete((), ["raw/watch/accel/data_1600_accel_watch.txt"], paths)
    arrays: Arrays = {"classes": np.array(list(_ACTIVITIES.values()))}
    for split, held in found.items():
        arrays[f"X_{split}"] = np.stack([window for _, _, window in held]).astype(np.float32)
        arrays[f"y_{split}"] = np.array([activity for activity, _, _ in held], dtype=np.uint8)
        arrays[f"user_{split}"] = np.array([user for _, user, _ in held], dtype=np.int32)
    return arrays


def _is_watch(name: str) -> bool:
    return re.fullmatch(r"data_\d+_accel_watch\.txt", _base(name)) is not None


_READING = re.compile(rb"^\s*(\d+),([A-Z]),(\d+),([-+.\dE]+),([-+.\dE]+),([-+.\dE]+) *;? *$", re.M)


def _recordings(content: bytes, name: str) -> Iterator[tuple[int, int, Array]]:
    """Activity, user and signal [steps, 3] in order of time, of each known activity in a file of
    lines `user,activity,time,x,y,z;`."""
    found = _READING.findall(content)
    lines = [line for line in content.splitlines() if line.strip()]
    if len(found) != len(lines):
        wrong = next(line for line in lines if not _READING.match(line))
        raise PolytempoError(
            f"{name}: {wrong.decode(errors='replace')!r} is not a line of WISDM, "
            "user,activity,time,x,y,z;"
        )
    table = np.array(found).reshape(-1, 6)
    numbers = table[:, 2:].astype(np.float64)
    for number, letter in enumerate(_ACTIVITIES):
        for user in np.unique(table[table[:, 1] == letter.encode(), 0]):
            mine = numbers[(table[:, 0] == user) & (table[:, 1] == letter.encode())]
            yield number, int(user), mine[np.argsort(mine[:, 0], kind="stable"), 1:]


HOSPITALS = ("cleveland", "hungarian", "switzerland", "va")


def heart_disease(paths: Sequence[Path]) -> Arrays:
    """UCI heart disease, the processed files of four hospitals: 13 features (NaN where missing),
    and whether there is a disease. Every fourth patient is for the test."""
    needed = {f"processed.{place}.data": number for number, place in enumerate(HOSPITALS)}
    held = {
        needed[_base(name)]: _patients(content, name)
        for name, content in unpack(paths, lambda name: _base(name) in needed)
    }
    _complete((name for name, number in needed.items() if number in held), needed, paths)
    table = np.concatenate([held[number] for number in sorted(held)])
    users = np.repeat(sorted(held), [len(held[number]) for number in sorted(held)])
    order = np.concatenate([np.arange(len(held[number])) for number in sorted(held)])
    test = order % 4 == 3
    arrays: Arrays = {"users": np.array(HOSPITALS)}
    for split, kept in (("train", ~test), ("test", test)):
        arrays[f"X_{split}"] = table[kept, :-1].astype(np.float32)
        arrays[f"y_{split}"] = (table[kept, -1] > 0).astype(np.uint8)
        arrays[f"user_{split}"] = users[kept].astype(np.uint8)
    return arrays


def _patients(content: bytes, name: str) -> Array:
    try:
        rows = [
            [np.nan if cell == "?" else float(cell) for cell in line.split(",")]
            for line in content.decode("latin1").split()
        ]
        table = np.array(rows).reshape(-1, 14)
        if np.isnan(table[:, -1]).any():
            raise ValueError("a diagnosis is missing")
    except ValueError as error:
        raise PolytempoError(
            f"{name}: {error}; expected lines of 14 numbers (or ?), 13 features and the diagnosis"
        ) from error
    return table


# -- text -----------------------------------------------------------------------------------------


def agnews(paths: Sequence[Path]) -> Arrays:
    """AG News: train.csv and test.csv with lines "class","title","description", classes from 1."""
    needed = [f"{split}.csv" for split in SPLITS]
    held = dict(unpack(paths, lambda name: _base(name) in needed))
    held = {_base(name): content for name, content in held.items()}
    _complete(held, needed, paths)
    arrays: Arrays = {"classes": ["World", "Sports", "Business", "Sci/Tech"]}
    for split in SPLITS:
        rows = list(csv.reader(io.StringIO(held[f"{split}.csv"].decode("utf8"), newline="")))
        if any(len(row) < 2 or row[0] not in ("1", "2", "3", "4") for row in rows):
            raise PolytempoError(
                f'{split}.csv: expected lines "class","title","description" with classes 1 to 4'
            )
        arrays[f"text_{split}"] = [" ".join(row[1:]) for row in rows]
        arrays[f"y_{split}"] = [int(row[0]) - 1 for row in rows]
    return arrays


def newsgroups(paths: Sequence[Path]) -> Arrays:
    """20 Newsgroups by date: 20news-bydate-train/GROUP/NUMBER and -test, one message per file,
    headers kept. Classes are the groups in order of the alphabet."""
    held: dict[str, list[tuple[str, int, str]]] = {split: [] for split in SPLITS}
    for name, content in unpack(paths, lambda name: _message(name) is not None):
        found = _message(name)
        assert found is not None
        split, group, number = found
        held[split].append((group, number, content.decode("latin1")))
    for split in SPLITS:
        if not held[split]:
            _complete((), [f"20news-bydate-{split}"], paths)
    classes = sorted({group for messages in held.values() for group, _, _ in messages})
    arrays: Arrays = {"classes": classes}
    for split, messages in held.items():
        messages.sort()
        arrays[f"text_{split}"] = [text for _, _, text in messages]
        arrays[f"y_{split}"] = [classes.index(group) for group, _, _ in messages]
    return arrays


def _message(name: str) -> tuple[str, str, int] | None:
    found = re.search(r"20news-bydate-(train|test)/([^/]+)/(\d+)$", name)
    return (found[1], found[2], int(found[3])) if found else None


LEAST = 1_000  # characters: roles that say less are left out


def shakespeare(paths: Sequence[Path]) -> Arrays:
    """Shakespeare's plays in Project Gutenberg's edition of 1994 (100.txt): what each role says.
    The last tenth of a role's lines is for the test."""
    found = [content for _, content in unpack(paths, lambda name: name.endswith(".txt"))]
    text = b"\n".join(found).decode("latin1").replace("\r", "")
    said: dict[str, list[str]] = {}
    plays = re.split(r"\n([^\n]+)\n\s*by William Shakespeare\s*\n", text)
    for title, play in zip(plays[1::2], plays[2::2], strict=True):
        # One play is set two blanks further to the left than the others.
        either = (_roles(play, indent) for indent in (2, 0))
        spoken = max(either, key=lambda roles: sum(map(len, roles.values())))
        said |= {f"{title.strip()}/{role}": lines for role, lines in spoken.items()}
    said = {role: lines for role, lines in said.items() if len("\n".join(lines)) >= LEAST}
    if not said:
        raise PolytempoError(
            f"{', '.join(str(path) for path in paths)}: no plays with roles; expected the text of "
            "Project Gutenberg's 1994-01-100.zip"
        )
    arrays: Arrays = {"user": list(said), "text_train": [], "text_test": []}
    for lines in said.values():
        kept = len(lines) - max(1, round(0.1 * len(lines)))
        arrays["text_train"].append("\n".join(lines[:kept]))
        arrays["text_test"].append("\n".join(lines[kept:]))
    everything = set("\n").union(*(line for lines in said.values() for line in lines))
    return {**arrays, "alphabet": "".join(sorted(everything))}


def _roles(play: str, indent: int) -> dict[str, list[str]]:
    """Lines by role, where a speech begins with `ROLE. text` at that indentation and goes on two
    blanks further in."""
    begin = re.compile(rf" {{{indent}}}([A-Za-z][A-Za-z' ]{{1,30}})\. +(\S.*)")
    onward = re.compile(rf" {{{indent + 2}}}(\S.*)")
    said: dict[str, list[str]] = {}
    role: str | None = None
    for line in play.split("\n"):
        if found := begin.fullmatch(line):
            role, line = found[1].strip().upper(), found[2]
        elif role is not None and (found := onward.fullmatch(line)):
            line = found[1]
        else:
            role = role if not line.strip() else None
            continue
        # A stage direction may follow, far to the right.
        if spoken := re.split(r" {3,}", re.sub(r"\[[^\]]*\]", "", line).strip())[0]:
            said.setdefault(role, []).append(spoken)
    return said
