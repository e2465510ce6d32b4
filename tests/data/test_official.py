"""The publishers' formats: read where they lie, and converted."""

import gzip
import pickle
import tarfile
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch

import archives
from polytempo.core.errors import PolytempoError
from polytempo.data import Federation, available, cache, get, official
from polytempo.data.origin import ORIGINS
from polytempo.data.source import canonical

pytestmark = pytest.mark.usefixtures("no_data")
# Files of these names may be another set's in the data folder itself.
WHERE = {"fashion_mnist": "fashion-mnist", "agnews": "ag_news_csv"}


def lay(name: str, folder: Path) -> list[Path]:
    """The publisher's files, in a data folder."""
    place = folder / WHERE.get(name, ".")
    place.mkdir(parents=True, exist_ok=True)
    return archives.MAKERS[name](place)


def extract(path: Path) -> None:
    """Unpack an archive, and those in it, as a user would; it is removed."""
    if path.suffix == ".zip":
        with zipfile.ZipFile(path) as archive:
            archive.extractall(path.parent)
            inside = [path.parent / name for name in archive.namelist()]
    elif path.name.endswith(".tar.gz"):
        with tarfile.open(path) as archive:
            archive.extractall(path.parent, filter="data")
        inside = []
    elif path.suffix == ".gz":
        path.with_suffix("").write_bytes(gzip.decompress(path.read_bytes()))
        inside = []
    else:
        return
    path.unlink()
    for each in inside:
        extract(each)


def load(name: str, folder: Path) -> Federation:
    """All natural clients, or a few."""
    users = {info.name: info.users for info in available()}[canonical(name)]
    few = {} if users else {"clients": 2, "partition": "iid"}
    return Federation.load(name, data_dir=folder, **few)


@pytest.mark.parametrize("name", archives.MAKERS)
def test_archives_folders_and_what_get_makes_of_them_hold_the_same(
    name: str, tmp_path: Path
) -> None:
    packed, unpacked, own = (tmp_path / each for each in ("packed", "unpacked", "own"))
    needed = [ORIGINS[name].needs] if ORIGINS[name].needs else []
    for each in (*needed, name):
        given = lay(each, packed)
        for path in lay(each, unpacked):
            extract(path)
        got = get(each, data_dir=own, files=given)
        assert got.new and got.path == own / ORIGINS[each].own[0][0]
    for folder in (packed, unpacked, own):
        assert {info.name: info.available for info in available(folder)}[name]
    first = load(name, packed)
    assert load(name, unpacked).digest == first.digest
    assert load(name, own).digest == first.digest
    assert len(list(own.iterdir())) == 1 + len(needed), "only our own files are left"


def test_official_files_are_converted_once_and_again_when_they_change(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lay("heart_disease", tmp_path)
    first = load("heart_disease", tmp_path)
    (kept,) = cache.cache_dir().glob("*heart*")
    before = kept.stat().st_mtime_ns
    assert load("heart_disease", tmp_path).digest == first.digest
    assert kept.stat().st_mtime_ns == before
    path = tmp_path / "heart+disease.zip"
    with zipfile.ZipFile(path) as archive:
        files = {name: archive.read(name) for name in archive.namelist()}
    files["processed.va.data"] *= 2
    path.write_bytes(archives.zipped(files))
    assert len(load("heart_disease", tmp_path).y) == len(first.y) + 11


def test_cifar_images_are_rows_of_red_green_and_blue(tmp_path: Path) -> None:
    arrays = official.cifar10(archives.cifar10(tmp_path))
    assert arrays["X_train"].shape == (60, 3, 32, 32) and arrays["X_test"].shape == (12, 3, 32, 32)
    raw = archives._pixels("data_batch_2", 12, 3072)
    assert arrays["X_train"][12, 1, 2, 3] == raw[0, 1024 + 2 * 32 + 3]
    assert arrays["y_train"][12:15].tolist() == [1, 2, 3]
    fine = official.cifar100(archives.cifar100(tmp_path))
    assert fine["coarse"].tolist() == [label % 5 for label in range(100)]
    coarse = Federation.load("cifar100:coarse=true", data_dir=tmp_path, clients=2, partition="iid")
    assert coarse.classes == 20 and int(coarse.y.max()) == 4


def test_a_pickle_that_wants_more_than_arrays_is_refused(tmp_path: Path) -> None:
    class Trap:
        def __reduce__(self) -> tuple:
            return Path.touch, (tmp_path / "sprung",)

    for trap in (Trap(), np.random.default_rng(0), {b"data": Trap(), b"labels": [0]}):
        files = {f"data_batch_{number}": pickle.dumps(trap) for number in range(1, 6)}
        path = archives.tar(tmp_path / "cifar-10-python.tar.gz", files)
        with pytest.raises(PolytempoError, match=r"data_batch_1 cannot be read: it asks for"):
            official.cifar10([path])
    assert not (tmp_path / "sprung").exists()


def test_pickles_of_today_are_read_too(tmp_path: Path) -> None:
    pixels = archives._pixels("new", 4, 3072)
    for protocol in range(2, pickle.HIGHEST_PROTOCOL + 1):
        batch = pickle.dumps({"data": pixels, "labels": [0, 1, 2, 3]}, protocol)
        names = [*(f"data_batch_{number}" for number in range(1, 6)), "test_batch"]
        path = archives.tar(tmp_path / "new.tar.gz", dict.fromkeys(names, batch))
        assert np.array_equal(official.cifar10([path])["X_test"].reshape(4, -1), pixels)


def test_emnist_stands_upright_and_its_classes_are_characters(tmp_path: Path) -> None:
    arrays = official.emnist(archives.emnist(tmp_path))
    raw = archives._pixels("emnist-balanced-train", 40, 28, 28)
    assert arrays["X_train"][5, 3, 20] == raw[5, 20, 3]
    assert arrays["classes"].tolist() == ["0", "1", "A"]


def test_mnist_of_keras_and_of_other_spellings(tmp_path: Path) -> None:
    lay("mnist", tmp_path / "idx")
    first = load("mnist", tmp_path / "idx")
    (tmp_path / "keras").mkdir()
    archives.keras_npz(tmp_path / "keras" / "mnist.npz")
    assert load("mnist", tmp_path / "keras").digest == first.digest
    place = tmp_path / "torch" / "MNIST" / "raw"
    place.mkdir(parents=True)
    for path in archives.mnist(place):
        dotted = path.name.removesuffix(".gz").replace("-idx", ".idx")
        (place / dotted).write_bytes(gzip.decompress(path.read_bytes()))
        path.unlink()
    assert load("mnist", tmp_path / "torch").digest == first.digest
    # In the folder itself these names are MNIST's, never another set's.
    with pytest.raises(PolytempoError, match="fashion_mnist is not in"):
        load("fashion_mnist", tmp_path / "idx")


def test_writers_are_clients_in_two_groups(tmp_path: Path) -> None:
    lay("mnist", tmp_path)
    lay("mnist_writers", tmp_path)
    fed = load("mnist-writers", tmp_path)
    assert fed.clients == 8 and len(fed.y) == 40 and fed.groups is not None
    assert fed.groups.tolist() == [0] * 4 + [1] * 4
    with np.load(next(cache.cache_dir().glob("*mnist_writers.npz"))) as archive:
        arrays = dict(archive)
    np.savez(tmp_path / "mnist_writers.npz", **{**arrays, "y_train": arrays["y_train"][::-1]})
    with pytest.raises(PolytempoError, match="its labels are not those of MNIST"):
        load("mnist_writers", tmp_path)


def test_motion_windows_are_those_that_were_recorded(tmp_path: Path) -> None:
    arrays = official.uci_har(archives.uci_har(tmp_path))
    for split in archives.SPLITS:
        assert np.allclose(arrays[f"X_{split}"], archives.har_signals(split), atol=1e-6)
    assert arrays["y_train"].tolist() == (np.arange(24) // 4 % 6).tolist()
    assert np.unique(arrays["user_test"]).tolist() == [4, 5, 6]
    fed = load("uci-har", tmp_path)
    assert fed.clients == 6 and fed.name == "uci_har"


def test_wrist_windows_are_in_order_of_time_and_the_last_are_for_the_test(tmp_path: Path) -> None:
    arrays = official.wisdm(archives.wisdm(tmp_path))
    assert np.bincount(arrays["y_train"]).tolist() == [12, 0, 0, 0, 0, 12]
    assert np.bincount(arrays["y_test"]).tolist() == [2, 0, 0, 0, 0, 2]
    mine = (arrays["user_test"] == 1601) & (arrays["y_test"] == 5)
    signal = archives.wisdm_signal(1601)[6 * 200 : 7 * 200]
    assert np.allclose(arrays["X_test"][mine], signal.T[None])


def test_missing_measurements_of_hearts_are_the_mean_of_those_that_are_known(
    tmp_path: Path,
) -> None:
    lay("heart_disease", tmp_path)
    fed = load("heart-disease", tmp_path)
    assert fed.clients == 4 and len(fed.y) == 8 + 9 + 10 + 11
    assert bool(torch.isfinite(fed.x).all()) and torch.equal(fed.x[:, 11], torch.zeros(38))
    train = torch.cat([fed.x[part] for part in fed.train])
    assert train[:, 0].mean().abs() < 1e-5 and (train[:, 0].std(correction=0) - 1).abs() < 1e-5
    assert torch.cat([fed.y[part] for part in fed.test]).tolist() == [1, 1] * 4, "every fourth"


def test_news_keep_their_text_and_their_group(tmp_path: Path) -> None:
    arrays = official.agnews(archives.agnews(tmp_path))
    assert arrays["text_train"][5] == 'Title 5 Said "train", \\$5 and\\more, of day 5'
    assert arrays["y_test"][:5] == [0, 1, 2, 3, 0]
    arrays = official.newsgroups(archives.newsgroups20(tmp_path))
    assert len(arrays["classes"]) == 20 and arrays["classes"] == sorted(arrays["classes"])
    assert arrays["text_test"][1] == (
        "From: café 51000\nSubject: group.00\n\nText of test 51000 in group.00.\n"
    )
    assert load("20newsgroups", tmp_path).classes == 20


def test_roles_say_their_own_lines_without_stage_directions(tmp_path: Path) -> None:
    arrays = official.shakespeare(archives.shakespeare(tmp_path))
    assert arrays["user"] == [
        f"{play}/{role}"
        for play in ("ALLS WELL", "THE COMEDY")
        for role in ("COUNTESS", "FIRST LORD")
    ]
    lines = [f"In delivering my son {at}, I bury.\nA second husband {at}." for at in range(60)]
    for number in (0, 2):
        said = arrays["text_train"][number] + "\n" + arrays["text_test"][number]
        assert said == "\n".join(lines)
    assert arrays["text_test"][1].count("\n") == 5, "a tenth of 60 lines"
    assert set(arrays["alphabet"]) == set("\n".join(arrays["text_train"] + arrays["text_test"]))


@pytest.mark.parametrize(
    ("name", "files", "message"),
    [
        ("cifar10", {"data_batch_1": b"\x80\x02}."}, "lacks data_batch_2, data_batch_3"),
        ("mnist", {"train-images-idx3-ubyte": b"<html>"}, "is not an idx file"),
        ("mnist", {"train-images-idx3-ubyte": archives.idx(np.zeros((2, 3)))[:-1]}, "5 bytes of"),
        ("mnist", {"train-images-idx3-ubyte": archives.idx(np.zeros((2, 3)))}, "lacks t10k-images"),
        ("uci_har", {"y_train.txt": b"1 2\n3\n"}, "is not a table of numbers"),
        ("uci_har", {"y_train.txt": b"<html>\n"}, "is not a table of numbers"),
        ("uci_har", {"y_train.txt": b"1\n"}, "lacks body_acc_x_test.txt"),
        ("wisdm", {"data_1600_accel_watch.txt": b"1600,A,1.0;"}, "is not a line of WISDM"),
        ("wisdm", {"readme.txt": b""}, "lacks raw/watch/accel"),
        ("heart_disease", {"processed.va.data": b"1,2,3\n"}, "13 features and the diagnosis"),
        ("heart_disease", {"processed.va.data": b"age\n"}, "could not convert"),
        ("agnews", {"train.csv": b'"1","a"\n'}, "lacks test.csv"),
        ("agnews", {"train.csv": b"label,text\n", "test.csv": b""}, "with classes 1 to 4"),
        ("newsgroups20", {"readme": b""}, "lacks 20news-bydate-train"),
        ("shakespeare", {"100.txt": b"To be"}, "no plays with roles"),
    ],
)
def test_other_files_are_refused_with_what_was_expected(
    name: str, files: dict, message: str, tmp_path: Path
) -> None:
    given = archives.tar(tmp_path / "given.tar.gz", files)
    with pytest.raises(PolytempoError, match=message):
        get(name, data_dir=tmp_path / "data", files=[given])
    assert not any(path.is_file() for path in (tmp_path / "data").rglob("*"))


def test_damaged_archives_are_one_line(tmp_path: Path) -> None:
    for name in ("cifar10", "uci_har", "mnist"):
        paths = archives.MAKERS[name](tmp_path)
        for path in paths:
            path.write_bytes(path.read_bytes()[:-200])
        with pytest.raises(PolytempoError, match=r"cannot be read|lacks|damaged"):
            get(name, data_dir=tmp_path / "data", files=paths)
    with pytest.raises(PolytempoError, match=r"there is no .*nowhere"):
        get("mnist", data_dir=tmp_path / "data", files=[tmp_path / "nowhere"])
