import io
import os
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from polytempo.core.errors import PolytempoError
from polytempo.core.rng import rng
from polytempo.data import Federation, available, cache, webp

pytestmark = pytest.mark.usefixtures("no_data")


def write_strips(path: Path, sizes: dict[str, int], channels: int = 1) -> dict[str, np.ndarray]:
    """A small file in the format of the real ones; the images that it holds."""
    image = pytest.importorskip("PIL.Image")
    arrays, held = {}, {}
    for split, size in sizes.items():
        pixels = rng(0, split).integers(0, 256, (size, 28, 28, channels), dtype=np.uint8)
        packed = []
        for start in range(0, size, 16):
            buffer = io.BytesIO()
            strip = pixels[start : start + 16].reshape(-1, 28, channels)
            image.fromarray(strip[..., 0] if channels == 1 else strip).convert("RGB").save(
                buffer, "WEBP", lossless=True
            )
            packed.append(buffer.getvalue())
        arrays[f"{split}_webp"] = np.frombuffer(b"".join(packed), dtype=np.uint8)
        arrays[f"{split}_len"] = np.array([len(strip) for strip in packed])
        arrays[f"{split}_hwc"] = np.array([28, 28, channels])
        arrays[f"y_{split}"] = (np.arange(size) % 10).astype(np.uint8)
        held[split] = pixels.transpose(0, 3, 1, 2)
    np.savez(path, **arrays)
    return held


def load(folder: Path, name: str = "mnist") -> Federation:
    return Federation.load(name, data_dir=folder, clients=1, partition="iid")


@pytest.mark.parametrize("channels", [1, 3])
def test_strips_decode_to_the_very_pixels(tmp_path: Path, channels: int) -> None:
    held = write_strips(tmp_path / "some.npz", {"train": 40}, channels)
    with np.load(tmp_path / "some.npz") as archive:
        found = webp.decode(archive, "train")
    assert found.flags.c_contiguous and np.array_equal(found, held["train"])


def test_train_and_test_are_pooled(tmp_path: Path) -> None:
    held = write_strips(tmp_path / "mnist.npz", {"train": 40, "test": 20})
    fed = load(tmp_path)
    pooled = np.concatenate([held["train"], held["test"]])
    assert fed.x.shape == (60, 1, 28, 28)
    assert sorted(image.tobytes() for image in fed.x.numpy()) == sorted(
        image.tobytes() for image in pooled
    )


def test_second_load_does_not_decode_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_strips(tmp_path / "mnist.npz", {"train": 40, "test": 20})
    first = load(tmp_path)
    decoded = []
    decode = webp.decode
    monkeypatch.setattr(webp, "decode", lambda *a: (decoded.append(a), decode(*a))[1])
    assert torch.equal(load(tmp_path).x, first.x) and not decoded
    os.utime(tmp_path / "mnist.npz", (1, 1))
    load(tmp_path)
    assert len(decoded) == 2, "a file that changed must be decoded anew"


def test_damaged_cache_is_made_anew_and_leaves_no_scraps(tmp_path: Path) -> None:
    write_strips(tmp_path / "mnist.npz", {"train": 40, "test": 20})
    first = load(tmp_path)
    (kept,) = cache.cache_dir().iterdir()
    whole = kept.read_bytes()
    for damaged in (b"", b"nonsense", whole[: len(whole) // 2]):
        kept.write_bytes(damaged)
        assert torch.equal(load(tmp_path).x, first.x)
        assert kept.read_bytes() == whole
    assert list(cache.cache_dir().iterdir()) == [kept]


def test_cache_that_cannot_be_written_is_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_strips(tmp_path / "mnist.npz", {"train": 40, "test": 20})
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("POLYTEMPO_CACHE", str(tmp_path / "file" / "cache"))
    with pytest.warns(UserWarning, match="set POLYTEMPO_CACHE"):
        assert len(load(tmp_path).y) == 60


def test_cache_folder_follows_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("POLYTEMPO_CACHE", "own")
    assert cache.cache_dir() == Path("own")
    monkeypatch.delenv("POLYTEMPO_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", "base")
    assert cache.cache_dir() == Path("base/polytempo")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache.cache_dir() == Path.home() / ".cache" / "polytempo"


def test_without_pillow_the_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_strips(tmp_path / "mnist.npz", {"train": 40, "test": 20})
    monkeypatch.setitem(sys.modules, "PIL", None)
    with pytest.raises(PolytempoError, match=r'pip install "polytempo\[images\]"'):
        load(tmp_path)


def test_missing_files_are_named_with_the_folder_and_the_remedy(tmp_path: Path) -> None:
    with pytest.raises(PolytempoError) as caught:
        load(tmp_path, "cifar10")
    message = str(caught.value)
    for part in (
        *("cifar10_train.npz and cifar10_test.npz", "cifar-10-python.tar.gz", str(tmp_path)),
        *("POLYTEMPO_DATA", "polytempo data get cifar10"),
    ):
        assert part in message
    with pytest.raises(PolytempoError, match=r"uci_har is not in .*cache/data; get it"):
        Federation.load("uci_har")


def test_damaged_files_are_one_line(tmp_path: Path) -> None:
    write_strips(tmp_path / "mnist.npz", {"train": 40, "test": 20})
    whole = (tmp_path / "mnist.npz").read_bytes()
    (tmp_path / "mnist.npz").write_bytes(whole[:-200])
    with pytest.raises(PolytempoError, match=r"mnist\.npz cannot be read"):
        load(tmp_path)
    write_strips(tmp_path / "mnist.npz", {"train": 40})
    with pytest.raises(PolytempoError, match=r"lacks the array .*y_test"):
        load(tmp_path)
    with np.load(tmp_path / "mnist.npz") as archive:
        arrays = dict(archive)
    spoilt = arrays["train_webp"].copy()
    spoilt[:40] = 0
    both = {**arrays, **{key.replace("train", "test"): value for key, value in arrays.items()}}
    np.savez(tmp_path / "mnist.npz", **{**both, "train_webp": spoilt})
    with pytest.raises(PolytempoError, match=r"mnist\.npz cannot be read"):
        load(tmp_path)
    np.savez(tmp_path / "mnist.npz", **{**both, "y_test": both["y_test"][:-1]})
    with pytest.raises(PolytempoError, match="80 images but 79 labels"):
        load(tmp_path)


def test_the_folder_of_the_environment_is_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_strips(tmp_path / "mnist.npz", {"train": 40, "test": 20})
    monkeypatch.setenv("POLYTEMPO_DATA", str(tmp_path))
    assert Federation.load("mnist", clients=2, partition="iid").clients == 2


def test_list_of_data_sets_says_what_is_at_hand(tmp_path: Path) -> None:
    (tmp_path / "mnist.npz").touch()
    found = {info.name: info for info in available(tmp_path)}
    assert {"digits", "synthetic", "cifar10", "mnist", "emnist", "uci_har"} <= set(found)
    assert {"agnews", "newsgroups20", "hub:owner/dataset"} <= set(found)
    assert found["digits"].available and found["synthetic"].available
    assert found["mnist"].available and found["mnist"].where == str(tmp_path)
    assert not found["cifar10"].available and "POLYTEMPO_DATA" in found["cifar10"].where
    assert (found["cifar10"].samples, found["cifar10"].classes) == (60_000, 10)
    assert found["synthetic"].samples is None, "an option is not a fact"


def test_unknown_names_are_corrected() -> None:
    with pytest.raises(PolytempoError, match=r"no data set is called 'cifar11'.*'cifar10'"):
        Federation.load("cifar11")
    with pytest.raises(PolytempoError, match="did you mean 'balanced'"):
        Federation.load("emnist:balance=true")
