"""The known data sets that are read from files, and two that come with scikit-learn.

Official training and test parts are pooled: a federation is split again within each client.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, ClassVar

import numpy as np
from pydantic import Field

from polytempo.core.errors import PolytempoError
from polytempo.core.registry import Options
from polytempo.data import webp
from polytempo.data.cache import cached
from polytempo.data.partition import Array
from polytempo.data.pool import Pool, features, labels
from polytempo.data.source import SOURCES, Request, reading
from polytempo.data.stored import locate, read_json

Length = Annotated[int, Field(ge=1)]


def _images(name: str, paths: Sequence[Path], classes: int) -> tuple[Array, Array]:
    """Images and labels of the training and the test split, which are in one file or in two."""
    parts = [(paths[0], "train"), (paths[-1], "test")]
    found = []
    strips = False
    for path, split in parts:
        with reading(path), np.load(path, allow_pickle=False) as archive:
            found.append(labels(archive[f"y_{split}"], len(archive[f"y_{split}"]), name, classes))
            strips = f"{split}_webp" in archive
    y = np.concatenate(found)

    def build() -> Array:
        decoded = []
        for path, split in parts:
            with reading(path), np.load(path, allow_pickle=False) as archive:
                decoded.append(webp.decode(archive, split) if strips else _plain(archive, split))
        return np.concatenate(decoded)

    # Strips take seconds to decode; plain arrays are read as fast as a cache would be.
    x = cached(name, list(dict.fromkeys(paths)), len(y), build) if strips else build()
    if len(x) != len(y):
        raise PolytempoError(
            f"{name}: {len(x)} images but {len(y)} labels in {paths[0].parent}; if the files "
            "are damaged, download them again"
        )
    return x, y


def _plain(archive: Mapping[str, Array], split: str) -> Array:
    """Images as `polytempo data get` stores them (X_train), or Keras (x_train)."""
    key = f"x_{split}" if f"x_{split}" in archive else f"X_{split}"
    return np.asarray(features(archive[key], key))


def _texts(path: Path, name: str, classes: int) -> tuple[list[str], Array]:
    with reading(path):
        stored = read_json(path)
        texts = [str(text) for text in stored["text_train"] + stored["text_test"]]
        return texts, labels(stored["y_train"] + stored["y_test"], len(texts), name, classes)


@SOURCES.register("digits")
class Digits(Options):
    """Handwritten digits of 8 x 8 pixels; the values 0..16 are stretched to 0..255."""

    description: ClassVar[str] = "handwritten digits, 8x8, grey (scikit-learn)"
    samples: ClassVar[int] = 1_797
    classes: ClassVar[int] = 10

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

    def __call__(self, request: Request) -> Pool:
        x, y = _images("cifar10", locate("cifar10", request), self.classes)
        mean, std = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)
        return Pool("cifar10", x, y, self.classes, mean=mean, std=std)


@SOURCES.register("cifar100")
class CIFAR100(Options):
    """CIFAR-100, complete; `coarse` merges its classes into 20."""

    description: ClassVar[str] = "photographs, 32x32, colour"
    samples: ClassVar[int] = 60_000
    classes: ClassVar[int] = 100

    coarse: bool = False

    def __call__(self, request: Request) -> Pool:
        paths = locate("cifar100", request)
        x, y = _images("cifar100", paths, self.classes)
        classes = self.classes
        if self.coarse:
            with reading(paths[0]), np.load(paths[0], allow_pickle=False) as archive:
                y, classes = archive["coarse"].astype(np.int64)[y], 20
        mean, std = (0.5071, 0.4866, 0.4409), (0.2673, 0.2564, 0.2762)
        return Pool("cifar100", x, y, classes, mean=mean, std=std)


@SOURCES.register("mnist")
class MNIST(Options):
    """MNIST, complete."""

    description: ClassVar[str] = "handwritten digits, 28x28, grey"
    samples: ClassVar[int] = 70_000
    classes: ClassVar[int] = 10

    def __call__(self, request: Request) -> Pool:
        x, y = _images("mnist", locate("mnist", request), self.classes)
        return Pool("mnist", x, y, self.classes, mean=(0.1307,), std=(0.3081,))


@SOURCES.register("mnist_writers")
class MNISTWriters(Options):
    """The training images of MNIST by the 539 people who wrote them, 19 to 131 images each, in two
    true groups: employees and pupils. (The writers of the official test images are others, so a
    part of each writer's own is held out instead.)"""

    description: ClassVar[str] = "handwritten digits by writer, 28x28, grey"
    samples: ClassVar[int] = 60_000
    classes: ClassVar[int] = 10
    users: ClassVar[int] = 539

    def __call__(self, request: Request) -> Pool:
        digits = MNIST()(request)
        (path,) = locate("mnist_writers", request)
        with reading(path), np.load(path, allow_pickle=False) as archive:
            y, users, series = (archive[f"{key}_train"] for key in ("y", "user", "hsf"))
        count = len(y)
        if not np.array_equal(digits.y[:count], y):
            raise PolytempoError(
                f"{path}: its labels are not those of MNIST in the same folder, so neither are its "
                "writers; get both again: polytempo data get mnist mnist-writers --force"
            )
        groups = np.unique(series, return_inverse=True)[1]
        return replace(
            digits,
            name="mnist_writers",
            x=digits.x[:count],
            y=digits.y[:count],
            users=users,
            groups=groups,
        )


@SOURCES.register("fashion_mnist")
class FashionMNIST(Options):
    """Fashion-MNIST, complete."""

    description: ClassVar[str] = "pictures of clothes, 28x28, grey"
    samples: ClassVar[int] = 70_000
    classes: ClassVar[int] = 10

    def __call__(self, request: Request) -> Pool:
        x, y = _images("fashion_mnist", locate("fashion_mnist", request), self.classes)
        return Pool("fashion_mnist", x, y, self.classes, mean=(0.2860,), std=(0.3530,))


@SOURCES.register("emnist")
class EMNIST(Options):
    """EMNIST in the 47 merged classes: the official Balanced split has as many of each. Of the file
    emnist47.npz, which has not, `balanced` keeps the same number of each (42,770 in all)."""

    description: ClassVar[str] = "handwritten digits and letters, 28x28, grey"
    samples: ClassVar[int] = 131_600
    classes: ClassVar[int] = 47

    balanced: bool = False

    def __call__(self, request: Request) -> Pool:
        (path,) = locate("emnist", request)
        x, y = _images("emnist", [path], self.classes)
        with reading(path), np.load(path, allow_pickle=False) as archive:
            if self.balanced and "balanced_train" in archive:
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
    users: ClassVar[int] = 30

    def __call__(self, request: Request) -> Pool:
        (path,) = locate("uci_har", request)
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
    users: ClassVar[int] = 51

    def __call__(self, request: Request) -> Pool:
        (path,) = locate("wisdm", request)
        x, y, users, test = _people("wisdm", path, self.classes)
        x = x.astype(np.float32) / np.float32(9.81)
        return Pool("wisdm", x, y, self.classes, users=users, test=test)


@SOURCES.register("heart_disease")
class HeartDisease(Options):
    """Patients of four hospitals, 13 measurements each: is there a disease? Each hospital has test
    patients of its own.

    What was not measured is filled in with the mean of the training patients who have a value, of
    all hospitals; then measurements are standardised, by the training patients too. (Cholesterol of
    0, as in Switzerland, is kept as it was recorded.)
    """

    description: ClassVar[str] = "patients of 4 hospitals, 13 measurements"
    samples: ClassVar[int] = 920
    classes: ClassVar[int] = 2
    users: ClassVar[int] = 4

    def __call__(self, request: Request) -> Pool:
        (path,) = locate("heart_disease", request)
        x, y, users, test = _people("heart_disease", path, self.classes)
        known = x[~test].astype(np.float64)
        mean, std = np.nanmean(known, axis=0), np.nanstd(known, axis=0)
        x = (np.where(np.isnan(x), mean, x) - mean) / np.where(std > 0, std, 1.0)
        return Pool("heart_disease", x.astype(np.float32), y, self.classes, users=users, test=test)


@SOURCES.register("agnews")
class AGNews(Options):
    """AG News. length: words kept of each text; vocabulary: its largest size."""

    description: ClassVar[str] = "news in brief, text"
    samples: ClassVar[int] = 127_600
    classes: ClassVar[int] = 4

    length: Length = 64
    vocabulary: Length = 32_000

    def __call__(self, request: Request) -> Pool:
        (path,) = locate("agnews", request)
        x, y = _texts(path, "agnews", self.classes)
        length, size = self.length, self.vocabulary
        return Pool("agnews", x, y, self.classes, length=length, vocabulary=size)


@SOURCES.register("newsgroups20")
class Newsgroups20(Options):
    """20 Newsgroups, headers kept. length: words kept of a text; vocabulary: its largest size."""

    description: ClassVar[str] = "messages of 20 newsgroups, text"
    samples: ClassVar[int] = 18_846
    classes: ClassVar[int] = 20

    length: Length = 200
    vocabulary: Length = 32_000

    def __call__(self, request: Request) -> Pool:
        (path,) = locate("newsgroups20", request)
        x, y = _texts(path, "newsgroups20", self.classes)
        length, size = self.length, self.vocabulary
        return Pool("newsgroups20", x, y, self.classes, length=length, vocabulary=size)
