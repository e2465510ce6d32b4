"""The known data sets that are read from files, and two that come with scikit-learn.

Official training and test parts are pooled: a federation is split again within each client.
"""

from __future__ import annotations

import json
import lzma
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, ClassVar

import numpy as np
from pydantic import Field

from polytempo.core.errors import PolytempoError
from polytempo.core.registry import Options
from polytempo.data import webp
from polytempo.data.cache import cached
from polytempo.data.partition import Array
from polytempo.data.pool import Pool, labels
from polytempo.data.source import SOURCES, Request, locate, reading

Length = Annotated[int, Field(ge=1)]


def _images(name: str, parts: Sequence[tuple[Path, str]], classes: int) -> tuple[Array, Array]:
    """Images and labels of (file, split) pairs, one after another."""
    found = []
    for path, split in parts:
        with reading(path), np.load(path, allow_pickle=False) as archive:
            found.append(labels(archive[f"y_{split}"], len(archive[f"y_{split}"]), name, classes))
    y = np.concatenate(found)

    def build() -> Array:
        decoded = []
        for path, split in parts:
            with reading(path), np.load(path, allow_pickle=False) as archive:
                decoded.append(webp.decode(archive, split))
        return np.concatenate(decoded)

    x = cached(name, list(dict.fromkeys(path for path, _ in parts)), len(y), build)
    if len(x) != len(y):
        raise PolytempoError(
            f"{name}: {len(x)} images but {len(y)} labels in {parts[0][0].parent}; if the files "
            "are damaged, download them again"
        )
    return x, y


def _texts(path: Path, name: str, classes: int) -> tuple[list[str], Array]:
    with reading(path), lzma.open(path, "rt", encoding="utf8") as file:
        stored = json.load(file)
        texts = [str(text) for text in stored["text_train"] + stored["text_test"]]
        return texts, labels(stored["y_train"] + stored["y_test"], len(texts), name, classes)


@SOURCES.register("digits")
class Digits(Options):
    """Handwritten digits of 8 x 8 pixels; the values 0..16 are stretched to 0..255."""

    description: ClassVar[str] = "handwritten digits, 8x8, grey (scikit-learn)"
    samples: ClassVar[int] = 1_797
    classes: ClassVar[int] = 10
    files: ClassVar[tuple[str, ...]] = ()

    def __call__(self, request: Request) -> Pool:
        from sklearn.datasets import load_digits

        found = load_digits()
        x = np.rint(found.images * (255 / 16)).astype(np.uint8)[:, None]
        y = found.target.astype(np.int64)
        return Pool("digits", x, y, self.classes, mean=(0.3053,), std=(0.3760,))


@SOURCES.register("diabetes")
class Diabetes(Options):
    """Ten measurements of 442 patients, and how far diabetes had progressed a year later.

    Measurements are standardised; the progression (25 to 346) is in hundreds, a scale on which
    usual learning rates work. Always predicting the mean gives a mean squared error of 0.59.
    """

    description: ClassVar[str] = "diabetes after a year, 10 features (scikit-learn)"
    samples: ClassVar[int] = 442
    problem: ClassVar[str] = "regression"
    files: ClassVar[tuple[str, ...]] = ()

    def __call__(self, request: Request) -> Pool:
        from sklearn.datasets import load_diabetes

        found = load_diabetes(scaled=False)
        x = (found.data - found.data.mean(axis=0)) / found.data.std(axis=0)
        y = (found.target / 100).astype(np.float32)
        return Pool("diabetes", x.astype(np.float32), y, 1, problem=self.problem)


@SOURCES.register("cifar10")
class CIFAR10(Options):
    """CIFAR-10, complete."""

    description: ClassVar[str] = "photographs, 32x32, colour"
    samples: ClassVar[int] = 60_000
    classes: ClassVar[int] = 10
    files: ClassVar[tuple[str, ...]] = ("cifar10_train.npz", "cifar10_test.npz")

    def __call__(self, request: Request) -> Pool:
        train, test = locate("cifar10", request, self.files)
        x, y = _images("cifar10", [(train, "train"), (test, "test")], self.classes)
        mean, std = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)
        return Pool("cifar10", x, y, self.classes, mean=mean, std=std)


@SOURCES.register("cifar100")
class CIFAR100(Options):
    """CIFAR-100, complete; `coarse` merges its classes into 20."""

    description: ClassVar[str] = "photographs, 32x32, colour"
    samples: ClassVar[int] = 60_000
    classes: ClassVar[int] = 100
    files: ClassVar[tuple[str, ...]] = ("cifar100_train.npz", "cifar100_test.npz")

    coarse: bool = False

    def __call__(self, request: Request) -> Pool:
        train, test = locate("cifar100", request, self.files)
        x, y = _images("cifar100", [(train, "train"), (test, "test")], self.classes)
        classes = self.classes
        if self.coarse:
            with reading(train), np.load(train, allow_pickle=False) as archive:
                y, classes = archive["coarse"].astype(np.int64)[y], 20
        mean, std = (0.5071, 0.4866, 0.4409), (0.2673, 0.2564, 0.2762)
        return Pool("cifar100", x, y, classes, mean=mean, std=std)


@SOURCES.register("mnist")
class MNIST(Options):
    """MNIST, complete."""

    description: ClassVar[str] = "handwritten digits, 28x28, grey"
    samples: ClassVar[int] = 70_000
    classes: ClassVar[int] = 10
    files: ClassVar[tuple[str, ...]] = ("mnist.npz",)

    def __call__(self, request: Request) -> Pool:
        (path,) = locate("mnist", request, self.files)
        x, y = _images("mnist", [(path, "train"), (path, "test")], self.classes)
        return Pool("mnist", x, y, self.classes, mean=(0.1307,), std=(0.3081,))


@SOURCES.register("emnist")
class EMNIST(Options):
    """EMNIST in the 47 merged classes; `balanced` keeps the same number of each (42,770 in all)."""

    description: ClassVar[str] = "handwritten digits and letters, 28x28, grey"
    samples: ClassVar[int] = 109_405
    classes: ClassVar[int] = 47
    files: ClassVar[tuple[str, ...]] = ("emnist47.npz",)

    balanced: bool = False

    def __call__(self, request: Request) -> Pool:
        (path,) = locate("emnist", request, self.files)
        x, y = _images("emnist", [(path, "train"), (path, "test")], self.classes)
        if self.balanced:
            with reading(path), np.load(path, allow_pickle=False) as archive:
                kept = np.concatenate([archive["balanced_train"], archive["balanced_test"]])
                x, y = x[kept], y[kept]
        return Pool("emnist", x, y, self.classes, mean=(0.1730,), std=(0.3316,))


def _people(name: str, path: Path, classes: int) -> tuple[Array, Array, Array, Array]:
    """Windows, labels, users, and whether they are official test data."""
    with reading(path), np.load(path, allow_pickle=False) as archive:
        x, y, users = (
            np.concatenate([archive[f"{part}_train"], archive[f"{part}_test"]])
            for part in ("X", "y", "user")
        )
        test = np.arange(len(y)) >= len(archive["y_train"])
        return x, labels(y, len(x), name, classes), users, test


@SOURCES.register("uci_har")
class UCIHAR(Options):
    """Smartphone motion of 30 people, raw signals: 9 channels of 128 steps, 6 activities.

    A window shares half of its signal with the next one of its recording, and the file does not
    keep their order: recordings are put together again by these halves, and each is either
    trained on or tested on as a whole. (A random split would put halves of nine in ten test
    windows into the training data.)
    """

    description: ClassVar[str] = "motion signals of 30 people, 9 channels x 128 steps"
    samples: ClassVar[int] = 10_299
    classes: ClassVar[int] = 6
    files: ClassVar[tuple[str, ...]] = ("uci_har.npz",)

    def __call__(self, request: Request) -> Pool:
        (path,) = locate("uci_har", request, self.files)
        x, y, users, _ = _people("uci_har", path, self.classes)
        return Pool(
            "uci_har",
            x.astype(np.float32),
            y,
            self.classes,
            users=users,
            recordings=recordings(x, users),
        )


def recordings(x: Array, users: Array) -> Array:
    """The number of the recording that each window [channels, steps] is from: of two that have a
    half in common it is the same."""
    from scipy.sparse import coo_array
    from scipy.sparse.csgraph import connected_components

    half = x.shape[2] // 2
    holders: dict[tuple[int, bytes], list[int]] = {}
    for window, (user, signal) in enumerate(zip(users.tolist(), x, strict=True)):
        for part in (signal[:, :half], signal[:, half:]):
            holders.setdefault((user, part.tobytes()), []).append(window)
    pairs = np.array([(held[0], other) for held in holders.values() for other in held])
    links = coo_array((np.ones(len(pairs)), pairs.T), (len(x), len(x)))
    return np.asarray(connected_components(links, directed=False)[1])


@SOURCES.register("wisdm")
class WISDM(Options):
    """Wrist acceleration of 51 people (WISDM), in g: 3 channels of 200 steps (10 s), 6 activities.
    Training and test data of a person are apart in time."""

    description: ClassVar[str] = "wrist motion of 51 people, 3 channels x 200 steps"
    samples: ClassVar[int] = 6_200
    classes: ClassVar[int] = 6
    files: ClassVar[tuple[str, ...]] = ("wisdm_watch.npz",)

    def __call__(self, request: Request) -> Pool:
        (path,) = locate("wisdm", request, self.files)
        x, y, users, test = _people("wisdm", path, self.classes)
        x = x.astype(np.float32) / np.float32(9.81)
        return Pool("wisdm", x, y, self.classes, users=users, test=test)


@SOURCES.register("agnews")
class AGNews(Options):
    """AG News. length: words kept of each text; vocabulary: its largest size."""

    description: ClassVar[str] = "news in brief, text (a part of the official training rows)"
    samples: ClassVar[int] = 49_840
    classes: ClassVar[int] = 4
    files: ClassVar[tuple[str, ...]] = ("agnews_partial.json.xz",)

    length: Length = 64
    vocabulary: Length = 32_000

    def __call__(self, request: Request) -> Pool:
        (path,) = locate("agnews", request, self.files)
        x, y = _texts(path, "agnews", self.classes)
        length, size = self.length, self.vocabulary
        return Pool("agnews", x, y, self.classes, length=length, vocabulary=size)


@SOURCES.register("newsgroups20")
class Newsgroups20(Options):
    """20 Newsgroups, headers kept. length: words kept of a text; vocabulary: its largest size."""

    description: ClassVar[str] = "messages of 20 newsgroups, text"
    samples: ClassVar[int] = 18_846
    classes: ClassVar[int] = 20
    files: ClassVar[tuple[str, ...]] = ("newsgroups20.json.xz",)

    length: Length = 200
    vocabulary: Length = 32_000

    def __call__(self, request: Request) -> Pool:
        (path,) = locate("newsgroups20", request, self.files)
        x, y = _texts(path, "newsgroups20", self.classes)
        length, size = self.length, self.vocabulary
        return Pool("newsgroups20", x, y, self.classes, length=length, vocabulary=size)
