"""Where each data set comes from: addresses, hashes, licences, and what its files are called.

Hashes are those that torchvision, torchtext and scikit-learn check; the others' publishers give
none, and the first download is remembered instead (`fetch`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from polytempo.data import official
from polytempo.data.official import Arrays


@dataclass(frozen=True)
class Remote:
    """A file that can be downloaded, from any of the addresses.

    size: about how many bytes.
    digest: `md5:...` or `sha256:...`.
    """

    file: str
    urls: tuple[str, ...]
    size: int
    digest: str | None = None


@dataclass(frozen=True)
class Origin:
    """How a data set is had.

    own: our own files in the data folder; any of these groups will do. The first group is the one
        file that `get` writes.
    lies: official files in the data folder that are read where they lie: any of these groups of
        patterns, each of which must be there.
    samples: how many there are, where the official files determine it.
    needs: another data set that is needed too.
    """

    convert: Callable[[Sequence[Path]], Arrays]
    own: tuple[tuple[str, ...], ...]
    lies: tuple[tuple[str, ...], ...]
    remotes: tuple[Remote, ...]
    page: str
    licence: str
    samples: int | None = None
    needs: str | None = None

    @property
    def size(self) -> int:
        """Bytes to download, about."""
        return sum(remote.size for remote in self.remotes)


def megabytes(size: int) -> str:
    """A size in bytes for people to read."""
    return f"{size / 1e6:.0f} MB" if size >= 1e6 else f"{size / 1e3:.0f} kB"


def _mirrored(file: str, folders: Sequence[str], size: int, digest: str) -> Remote:
    return Remote(file, tuple(folder + file for folder in folders), size, digest)


def _idx(*places: str) -> tuple[tuple[str, ...], ...]:
    """The four files of MNIST, in any of these places."""
    files = (
        *("train-images?idx3-ubyte*", "train-labels?idx1-ubyte*"),
        *("t10k-images?idx3-ubyte*", "t10k-labels?idx1-ubyte*"),
    )
    return tuple(tuple(place + file for file in files) for place in places)


_TORONTO = "https://www.cs.toronto.edu/~kriz/"
_MNIST = (
    "https://ossci-datasets.s3.amazonaws.com/mnist/",
    "https://storage.googleapis.com/cvdf-datasets/mnist/",
    "http://yann.lecun.com/exdb/mnist/",
)
_FASHION = (
    "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/",
    "https://github.com/zalandoresearch/fashion-mnist/raw/master/data/fashion/",
)
_QMNIST = ("https://raw.githubusercontent.com/facebookresearch/qmnist/master/",)
_AGNEWS = "https://raw.githubusercontent.com/mhjabreel/CharCnn_Keras/master/data/ag_news_csv/"
_UCI = "https://archive.ics.uci.edu/"
_GUTENBERG = "https://www.gutenberg.org/files/100/old/"
_CC_BY = "CC BY 4.0"
_NONE = "none stated"

ORIGINS: dict[str, Origin] = {
    "cifar10": Origin(
        official.cifar10,
        own=(("cifar10.npz",), ("cifar10_train.npz", "cifar10_test.npz")),
        lies=(("cifar-10-batches-py",), ("cifar-10-python.tar.gz",)),
        remotes=(
            _mirrored(
                "cifar-10-python.tar.gz",
                (_TORONTO,),
                170_498_071,
                "md5:c58f30108f718f92721af3b95e74349a",
            ),
        ),
        page=_TORONTO + "cifar.html",
        licence=_NONE,
        samples=60_000,
    ),
    "cifar100": Origin(
        official.cifar100,
        own=(("cifar100.npz",), ("cifar100_train.npz", "cifar100_test.npz")),
        lies=(("cifar-100-python",), ("cifar-100-python.tar.gz",)),
        remotes=(
            _mirrored(
                "cifar-100-python.tar.gz",
                (_TORONTO,),
                169_001_437,
                "md5:eb9058c3a382ffc7106e4002c42a8d85",
            ),
        ),
        page=_TORONTO + "cifar.html",
        licence=_NONE,
        samples=60_000,
    ),
    "mnist": Origin(
        official.mnist,
        own=(("mnist.npz",),),
        lies=_idx("", "MNIST/raw/", "mnist/"),
        remotes=tuple(
            _mirrored(f"{part}-ubyte.gz", _MNIST, size, f"md5:{digest}")
            for part, size, digest in (
                ("train-images-idx3", 9_912_422, "f68b3c2dcbeaaa9fbdd348bbdeb94873"),
                ("train-labels-idx1", 28_881, "d53e105ee54ea40749a09fcbcd1e9432"),
                ("t10k-images-idx3", 1_648_877, "9fb629c4189551a2d022fa330f9573f3"),
                ("t10k-labels-idx1", 4_542, "ec29112dd5afa0611ce80d1b7f02629c"),
            )
        ),
        page="http://yann.lecun.com/exdb/mnist/",
        licence="CC BY-SA 3.0",
        samples=70_000,
    ),
    "mnist_writers": Origin(
        official.mnist_writers,
        own=(("mnist_writers.npz",),),
        lies=(("qmnist-train-labels-idx2-int*", "qmnist-test-labels-idx2-int*"),),
        remotes=tuple(
            _mirrored(f"qmnist-{split}-labels-idx2-int.gz", _QMNIST, size, f"md5:{digest}")
            for split, size, digest in (
                ("train", 463_024, "0058f8dd561b90ffdd0f734c6a30e5e4"),
                ("test", 526_800, "5b5b05890a5e13444e108efe57b788aa"),
            )
        ),
        page="https://github.com/facebookresearch/qmnist",
        licence="BSD 3-clause",
        samples=70_000,
        needs="mnist",
    ),
    "fashion_mnist": Origin(
        official.mnist,
        own=(("fashion_mnist.npz",),),
        # Not in the data folder itself: files of these names are MNIST's there.
        lies=_idx("FashionMNIST/raw/", "fashion-mnist/", "fashion_mnist/"),
        remotes=tuple(
            _mirrored(f"{part}-ubyte.gz", _FASHION, size, f"md5:{digest}")
            for part, size, digest in (
                ("train-images-idx3", 26_421_880, "8d4fb7e6c68d591d4c3dfef9ec88bf0d"),
                ("train-labels-idx1", 29_515, "25c81989df183df01b3e8a0aad5dffbe"),
                ("t10k-images-idx3", 4_422_102, "bef4ecab320f06d8554ea6380940ec79"),
                ("t10k-labels-idx1", 5_148, "bb300cfdad3c16e7a12a480ee83cd310"),
            )
        ),
        page="https://github.com/zalandoresearch/fashion-mnist",
        licence="MIT",
        samples=70_000,
    ),
    "emnist": Origin(
        official.emnist,
        own=(("emnist.npz",), ("emnist47.npz",)),
        lies=(
            *(
                (f"{place}emnist-balanced-train-*", f"{place}emnist-balanced-test-*")
                for place in ("", "EMNIST/raw/", "emnist/", "gzip/")
            ),
            ("gzip.zip",),
            ("emnist.zip",),
        ),
        remotes=(
            Remote(
                "gzip.zip",
                (
                    "https://biometrics.nist.gov/cs_links/EMNIST/gzip.zip",
                    "https://www.itl.nist.gov/iaui/vip/cs_links/EMNIST/gzip.zip",
                ),
                561_753_746,
                "md5:58c8d27c78d21e728a6bc7b3cc06412e",
            ),
        ),
        page="https://www.nist.gov/itl/products-and-services/emnist-dataset",
        licence=_NONE,
        samples=131_600,
    ),
    "uci_har": Origin(
        official.uci_har,
        own=(("uci_har.npz",),),
        lies=(
            ("UCI HAR Dataset",),
            ("UCI HAR Dataset.zip",),
            ("human+activity+recognition+using+smartphones.zip",),
        ),
        remotes=(
            Remote(
                "human+activity+recognition+using+smartphones.zip",
                (
                    f"{_UCI}static/public/240/human+activity+recognition+using+smartphones.zip",
                    f"{_UCI}ml/machine-learning-databases/00240/UCI%20HAR%20Dataset.zip",
                ),
                61_000_000,
            ),
        ),
        page=_UCI + "dataset/240",
        licence=_CC_BY,
        samples=10_299,
    ),
    "wisdm": Origin(
        official.wisdm,
        own=(("wisdm_watch.npz",),),
        lies=(
            ("wisdm-dataset",),
            ("wisdm-dataset.zip",),
            ("wisdm+smartphone+and+smartwatch+activity+and+biometrics+dataset.zip",),
        ),
        remotes=(
            Remote(
                "wisdm+smartphone+and+smartwatch+activity+and+biometrics+dataset.zip",
                (
                    f"{_UCI}static/public/507/wisdm+smartphone+and+smartwatch+activity+and+"
                    "biometrics+dataset.zip",
                    f"{_UCI}ml/machine-learning-databases/00507/wisdm-dataset.zip",
                ),
                295_000_000,
            ),
        ),
        page=_UCI + "dataset/507",
        licence=_CC_BY,
    ),
    "heart_disease": Origin(
        official.heart_disease,
        own=(("heart_disease4.npz",),),
        lies=(
            *(
                tuple(f"{place}processed.{hospital}.data" for hospital in official.HOSPITALS)
                for place in ("", "heart-disease/", "heart_disease/", "heart+disease/")
            ),
            ("heart+disease.zip",),
        ),
        remotes=(
            Remote("heart+disease.zip", (f"{_UCI}static/public/45/heart+disease.zip",), 130_000),
        ),
        page=_UCI + "dataset/45",
        licence=_CC_BY,
        samples=920,
    ),
    "agnews": Origin(
        official.agnews,
        own=(("agnews.json.xz",), ("agnews_partial.json.xz",)),
        lies=(
            *(("ag_news_csv",), ("AG_NEWS",)),
            *(("ag_news_csv.tar.gz",), ("ag_news_csv.tgz",)),
        ),
        remotes=(
            Remote(
                "train.csv",
                (_AGNEWS + "train.csv",),
                29_470_338,
                "md5:b1a00f826fdfbd249f79597b59e1dc12",
            ),
            Remote(
                "test.csv",
                (_AGNEWS + "test.csv",),
                1_857_427,
                "md5:d52ea96a97a2d943681189a97654912d",
            ),
        ),
        page="http://groups.di.unipi.it/~gulli/AG_corpus_of_news_articles.html",
        licence="non-commercial use",
        samples=127_600,
    ),
    "newsgroups20": Origin(
        official.newsgroups,
        own=(("newsgroups20.json.xz",),),
        lies=(
            ("20news-bydate",),
            ("20news-bydate-train", "20news-bydate-test"),
            ("20news-bydate.tar.gz",),
        ),
        remotes=(
            Remote(
                "20news-bydate.tar.gz",
                (
                    "https://ndownloader.figshare.com/files/5975967",
                    "http://qwone.com/~jason/20Newsgroups/20news-bydate.tar.gz",
                ),
                14_464_277,
                "sha256:8f1b2514ca22a5ade8fbb9cfa5727df95fa587f4c87b786e15c759fa66d95610",
            ),
        ),
        page="http://qwone.com/~jason/20Newsgroups/",
        licence=_NONE,
        samples=18_846,
    ),
    "shakespeare": Origin(
        official.shakespeare,
        own=(("shakespeare_roles.json.xz",),),
        lies=(("1994-01-100.zip",), ("100.txt",), ("t8.shakespeare.txt",)),
        remotes=(
            Remote(
                "1994-01-100.zip",
                (_GUTENBERG + "1994-01-100.zip", _GUTENBERG + "old/1994-01-100.zip"),
                2_100_000,
            ),
        ),
        page="https://www.gutenberg.org/ebooks/100",
        licence="personal, non-commercial use (this edition)",
    ),
}
