"""The hub is not at hand in tests: a stand-in takes the place of the package `datasets`."""

import sys
import types
from typing import Any

import numpy as np
import pytest
import torch

from polytempo.core.errors import PolytempoError
from polytempo.core.rng import rng
from polytempo.data import Federation, available


class ClassLabel:
    dtype = "int64"

    def __init__(self, num_classes: int) -> None:
        self.num_classes = num_classes


class Image:
    pass


class Value:
    def __init__(self, dtype: str) -> None:
        self.dtype = dtype


class Split:
    def __init__(self, features: dict[str, Any], columns: dict[str, list[Any]]) -> None:
        self.features, self.columns = features, columns

    def __getitem__(self, name: str) -> list[Any]:
        return self.columns[name]


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Names to what `load_dataset` is to return; "asked" is what it was last asked for."""
    shelf: dict[str, Any] = {}

    def load_dataset(path: str, name: str | None = None, split: str | None = None) -> Any:
        shelf["asked"] = (path, name, split)
        if path not in shelf:
            raise FileNotFoundError(f"Dataset {path}\ndoes not exist")
        return shelf[path]

    module = types.ModuleType("datasets")
    module.load_dataset = load_dataset
    monkeypatch.setitem(sys.modules, "datasets", module)
    return shelf


def pictures(size: int, mode: str, side: int = 6) -> list[Any]:
    image = pytest.importorskip("PIL.Image")
    shape = (size, side, side) if mode == "L" else (size, side, side, 3)
    return [image.fromarray(p) for p in rng(0).integers(0, 256, shape, dtype=np.uint8)]


def test_pictures_of_all_splits_are_pooled(hub: dict[str, Any]) -> None:
    kinds = {"img": Image(), "label": ClassLabel(4)}
    train = {"img": pictures(20, "RGB"), "label": [0, 1] * 10}
    test = {"img": pictures(12, "RGB"), "label": [2] * 12}
    hub["owner/shapes"] = {"train": Split(kinds, train), "test": Split(kinds, test)}
    fed = Federation.load("hub:owner/shapes", clients=2, partition="iid")
    assert fed.x.shape == (32, 3, 6, 6) and fed.x.dtype == torch.uint8
    assert fed.classes == 4 and sorted(set(fed.y.tolist())) == [0, 1, 2]
    assert fed.mean is not None and len(fed.mean) == 3
    assert fed.name == "hub:owner/shapes"
    assert any(np.array_equal(np.asarray(train["img"][0]).transpose(2, 0, 1), x) for x in fed.x)


def test_grey_pictures_have_one_channel_and_hidden_labels_are_dropped(hub: dict[str, Any]) -> None:
    columns = {"image": pictures(10, "L"), "label": [0, 1] * 4 + [-1, -1]}
    hub["grey"] = Split({"image": Image(), "label": ClassLabel(2)}, columns)
    fed = Federation.load("hub:grey:split=train,config=small", clients=1)
    assert fed.x.shape == (8, 1, 6, 6)
    assert hub["asked"] == ("grey", "small", "train")


def test_text_labels_and_users_by_column_name(hub: dict[str, Any]) -> None:
    kinds = {name: Value("string") for name in ("author", "body", "topic")}
    columns = {
        "author": ["ann", "bob", "cy"] * 8,
        "body": ["some words here"] * 24,
        "topic": ["sport", "arts"] * 12,
    }
    hub["owner/posts"] = Split(kinds, columns)
    spec = "hub:owner/posts:label=topic,text=body,user=author,length=5"
    fed = Federation.load(spec)
    assert fed.clients == 3 and fed.shape == (5,) and fed.classes == 2 and fed.vocabulary == 5
    assert Federation.load("hub:owner/posts:label=topic", clients=2).vocabulary == 5
    with pytest.raises(PolytempoError, match="no column of labels among author, body, topic"):
        Federation.load("hub:owner/posts")
    with pytest.raises(PolytempoError, match="no column is called 'topics'; did you mean 'topic'"):
        Federation.load("hub:owner/posts:label=topics")


def test_numbers_become_features(hub: dict[str, Any]) -> None:
    kinds = {"a": Value("float64"), "b": Value("int32"), "target": Value("int64")}
    columns = {"a": [0.5] * 10, "b": list(range(10)), "target": [0, 1] * 5}
    hub["owner/table"] = Split(kinds, columns)
    fed = Federation.load("hub:owner/table", clients=1)
    assert fed.shape == (2,) and sorted(fed.x[:, 1].tolist()) == list(range(10))
    only = Federation.load({"name": "hub:owner/table", "columns": ["b"]}, clients=1)
    assert only.shape == (1,)


def test_what_the_hub_says_is_one_line(hub: dict[str, Any]) -> None:
    with pytest.raises(PolytempoError, match="hub:owner/none cannot be loaded: Dataset") as caught:
        Federation.load("hub:owner/none")
    assert "\n" not in str(caught.value)


def test_pictures_of_several_sizes_are_refused(hub: dict[str, Any]) -> None:
    columns = {"image": pictures(3, "L") + pictures(3, "L", side=8), "label": [0] * 6}
    hub["mixed"] = Split({"image": Image(), "label": ClassLabel(2)}, columns)
    with pytest.raises(PolytempoError, match="pictures of 2 shapes"):
        Federation.load("hub:mixed")


def test_without_the_package_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(PolytempoError, match=r'pip install "polytempo\[hub\]"'):
        Federation.load("hub:owner/dataset")
    found = {info.name: info for info in available()}["hub:owner/dataset"]
    assert not found.available and "polytempo[hub]" in found.where
