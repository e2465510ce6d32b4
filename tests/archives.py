"""Small archives in the true formats of the publishers of data sets, made from the seed."""

import gzip
import io
import struct
import tarfile
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np

from polytempo.core.rng import rng

SPLITS = {"train": 40, "test": 20}


def tar(path: Path, files: Mapping[str, bytes]) -> Path:
    with tarfile.open(path, "w:gz") as archive:
        for name, content in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    return path


def zipped(files: Mapping[str, bytes]) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in files.items():
            archive.writestr(name, content)
    return buffer.getvalue()


def idx(array: np.ndarray, kind: int = 8) -> bytes:
    """kind: 8 for uint8, 12 for int32, all of them with the highest byte first."""
    head = struct.pack(f">BBBB{array.ndim}I", 0, 0, kind, array.ndim, *array.shape)
    return head + array.astype({8: ">u1", 12: ">i4"}[kind]).tobytes()


def python2_batch(labels: Mapping[str, list[int]], pixels: np.ndarray) -> bytes:
    """A batch of CIFAR as Python 2 and numpy 1 pickled it, opcode by opcode."""

    def short(text: str) -> bytes:
        return b"U" + bytes([len(text)]) + text.encode()

    numbers = {
        key: b"](" + b"".join(b"K" + bytes([label]) for label in found) + b"e"
        for key, found in labels.items()
    }
    count, width = pixels.shape
    kind = b"cnumpy\ndtype\n" + short("u1") + b"K\0K\1\x87R(K\3" + short("|") + b"NNN"
    kind += b"J\xff\xff\xff\xffJ\xff\xff\xff\xffK\0tb"
    array = (
        b"cnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\nK\0\x85" + short("b") + b"\x87R"
    )
    array += b"(K\1" + b"M" + struct.pack("<H", count) + b"M" + struct.pack("<H", width) + b"\x86"
    array += kind + b"\x89" + b"T" + struct.pack("<i", pixels.size) + pixels.tobytes() + b"tb"
    held = b"".join(short(key) + value for key, value in (*numbers.items(), ("data", array)))
    return b"\x80\x02}(" + held + b"u."


def _pixels(name: str, count: int, *shape: int) -> np.ndarray:
    return rng(0, name).integers(0, 256, (count, *shape), dtype=np.uint8)


def cifar10(folder: Path) -> list[Path]:
    names = [*(f"data_batch_{number}" for number in range(1, 6)), "test_batch"]
    files = {
        f"cifar-10-batches-py/{name}": python2_batch(
            {"labels": [(at + number) % 10 for at in range(12)]}, _pixels(name, 12, 3072)
        )
        for number, name in enumerate(names)
    }
    files["cifar-10-batches-py/readme.html"] = b"<html>"
    return [tar(folder / "cifar-10-python.tar.gz", files)]


def cifar100(folder: Path) -> list[Path]:
    files = {
        f"cifar-100-python/{split}": python2_batch(
            {"coarse_labels": [at % 5 for at in fine], "fine_labels": fine},
            _pixels(split, len(fine), 3072),
        )
        for split, fine in {"train": list(range(100)), "test": list(range(0, 100, 2))}.items()
    }
    return [tar(folder / "cifar-100-python.tar.gz", files)]


def _idx_files(names: Mapping[str, str]) -> dict[str, bytes]:
    made = {}
    for split, begin in names.items():
        count = SPLITS[split]
        made[f"{begin}-images-idx3-ubyte.gz"] = idx(_pixels(begin, count, 28, 28))
        made[f"{begin}-labels-idx1-ubyte.gz"] = idx(np.arange(count) % 10)
    return {name: gzip.compress(content) for name, content in made.items()}


def mnist(folder: Path) -> list[Path]:
    made = _idx_files({"train": "train", "test": "t10k"})
    for name, content in made.items():
        (folder / name).write_bytes(content)
    return [folder / name for name in made]


def mnist_writers(folder: Path) -> list[Path]:
    """Class, series, writer, number among the writer's, and four columns of no use here."""
    made = []
    for split, count in SPLITS.items():
        at = np.arange(count)
        # The writers of the series 0 come first, each with 5 images.
        table = np.stack(
            [at % 10, 4 * (at >= count // 2), 100 + at // 5, at % 5, *[at] * 4], axis=1
        )
        made.append(folder / f"qmnist-{split}-labels-idx2-int.gz")
        made[-1].write_bytes(gzip.compress(idx(table, 12)))
    return made


def emnist(folder: Path) -> list[Path]:
    files = {"gzip/emnist-balanced-mapping.txt": b"0 48\n1 49\n2 65\n"}
    for name, content in _idx_files(
        {split: f"emnist-balanced-{split}" for split in SPLITS}
    ).items():
        files[f"gzip/{name}"] = content
    files["gzip/emnist-byclass-train-images-idx3-ubyte.gz"] = gzip.compress(b"not looked at")
    (folder / "gzip.zip").write_bytes(zipped(files))
    return [folder / "gzip.zip"]


def _table(numbers: np.ndarray) -> bytes:
    return b"".join(
        b" " + b" ".join(f"{number: .7e}".encode() for number in row) + b"\n" for row in numbers
    )


def har_signals(split: str) -> np.ndarray:
    """Windows [n, 9, 128] of one recording for each user: each shares a half with the next."""
    found = []
    for user in range(3):
        signal = rng(0, split, user).normal(size=(9, 64 * 9)).astype(np.float32)
        found += [signal[:, 64 * at : 64 * at + 128] for at in range(8)]
    return np.stack(found)


def uci_har(folder: Path) -> list[Path]:
    files = {}
    for split in SPLITS:
        windows = har_signals(split)
        for channel in range(9):
            kind = ("body_acc", "body_gyro", "total_acc")[channel // 3]
            name = f"{split}/Inertial Signals/{kind}_{'xyz'[channel % 3]}_{split}.txt"
            files[f"UCI HAR Dataset/{name}"] = _table(windows[:, channel])
        users = np.repeat([1, 2, 3] if split == "train" else [4, 5, 6], 8)
        for name, column in (("subject", users), ("y", np.arange(24) // 4 % 6 + 1)):
            text = "".join(f"{number}\n" for number in column)
            files[f"UCI HAR Dataset/{split}/{name}_{split}.txt"] = text.encode()
        files[f"UCI HAR Dataset/{split}/X_{split}.txt"] = b"features, not looked at"
        files[f"__MACOSX/UCI HAR Dataset/{split}/y_{split}.txt"] = b"\0\5\x16\7"
    inner = {"UCI HAR Dataset.zip": zipped(files), "UCI HAR Dataset.names": b"..."}
    path = folder / "human+activity+recognition+using+smartphones.zip"
    path.write_bytes(zipped(inner))
    return [path]


def wisdm_signal(user: int) -> np.ndarray:
    return rng(0, "wisdm", user).normal(size=(1_450, 3)).round(6)


def wisdm(folder: Path) -> list[Path]:
    """Two people who walk (A) and kick (M), 7 windows of each; one activity is not used."""
    files = {"wisdm-dataset/activity_key.txt": b"walking = A"}
    for user in (1600, 1601):
        signal = wisdm_signal(user)
        lines = [
            f"{user},{letter},{252207666810782 + 50000000 * at},{x},{y},{z};\n"
            for letter in "AMS"
            for at, (x, y, z) in enumerate(signal)
        ]
        name = f"wisdm-dataset/raw/watch/accel/data_{user}_accel_watch.txt"
        files[name] = "".join(lines[2_000:] + lines[:2_000]).encode()  # in whatever order
        files[name.replace("accel", "gyro")] = b"not looked at"
    path = folder / "wisdm+smartphone+and+smartwatch+activity+and+biometrics+dataset.zip"
    path.write_bytes(zipped({"wisdm-dataset.zip": zipped(files)}))
    return [path]


def heart_disease(folder: Path) -> list[Path]:
    files = {}
    for number, place in enumerate(("cleveland", "hungarian", "switzerland", "va")):
        cholesterol, vessels = ("?", "?") if number else ("233.0", "0.0")
        rows = [
            f"{50 + at}.0,1,{1 + at % 4},145,{cholesterol},1,2,150,0,2.3,3,{vessels},6,{at % 5}\n"
            for at in range(8 + number)
        ]
        files[f"processed.{place}.data"] = "".join(rows).encode()
    path = folder / "heart+disease.zip"
    path.write_bytes(zipped({**files, "cleveland.data": b"\xff not looked at"}))
    return [path]


def agnews(folder: Path) -> list[Path]:
    made = []
    for split, count in SPLITS.items():
        lines = [
            f'"{at % 4 + 1}","Title {at}","Said ""{split}"", \\$5 and\\more, of day {at}"\n'
            for at in range(count)
        ]
        made.append(folder / f"{split}.csv")
        made[-1].write_text("".join(lines), encoding="utf8")
    return made


def newsgroups20(folder: Path) -> list[Path]:
    groups = [f"group.{number:02}" for number in range(20)]
    files = {
        f"20news-bydate-{split}/{group}/{number}": (
            f"From: caf\xe9 {number}\nSubject: {group}\n\nText of {split} {number} in {group}.\n"
        ).encode("latin1")
        for split in SPLITS
        for group in reversed(groups)
        for number in (51000, 9999)
    }
    return [tar(folder / "20news-bydate.tar.gz", files)]


def shakespeare(folder: Path) -> list[Path]:
    """Two plays; as in the true file, one of them is set two blanks further to the left."""
    text = "The Project Gutenberg Etext\n\n1609\n\nTHE SONNETS\n\nby William Shakespeare\n\n"
    text += "  From fairest creatures we desire increase,\n\n"
    for title, indent in (("ALLS WELL", "  "), ("THE COMEDY", "")):
        text += f"1603\n\n{title}\n\nby William Shakespeare\n\n\nDramatis Personae\n\n  KING\n\n"
        text += "ACT I. SCENE 1.\nRousillon. The COUNT'S palace\n\nEnter all, in black\n\n"
        for at in range(60):
            text += f"{indent}COUNTESS. In delivering my son {at}, I bury.      Exit\n"
            text += f"{indent}  [Aside] A second husband {at}.\n"
            text += f"{indent}FIRST LORD. And I in going, madam, weep {at};\n"
        text += f"{indent}PAGE. Too little to be a client.\n\n                    Exeunt\n\n"
        text += "<<THIS ELECTRONIC VERSION IS COPYRIGHT>>\n\n"
    path = folder / "1994-01-100.zip"
    path.write_bytes(zipped({"100.txt": text.replace("\n", "\r\n").encode()}))
    return [path]


MAKERS: dict[str, Callable[[Path], list[Path]]] = {
    "cifar10": cifar10,
    "cifar100": cifar100,
    "mnist": mnist,
    "mnist_writers": mnist_writers,
    "fashion_mnist": mnist,
    "emnist": emnist,
    "uci_har": uci_har,
    "wisdm": wisdm,
    "heart_disease": heart_disease,
    "agnews": agnews,
    "newsgroups20": newsgroups20,
    "shakespeare": shakespeare,
}


def keras_npz(path: Path) -> None:
    """MNIST as Keras stores it."""
    arrays = {}
    for split, count in SPLITS.items():
        arrays[f"x_{split}"] = _pixels("train" if split == "train" else "t10k", count, 28, 28)
        arrays[f"y_{split}"] = (np.arange(count) % 10).astype(np.uint8)
    np.savez(path, **arrays)
