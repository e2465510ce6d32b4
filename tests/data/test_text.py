import json
import lzma
from pathlib import Path

import numpy as np
import pytest
import torch

from polytempo.core.errors import PolytempoError
from polytempo.data import Federation
from polytempo.data.text import build_vocabulary, encode, words


def test_words_are_lower_case_and_cut() -> None:
    assert words("It's ÉTÉ: 3 dogs_and--cats!", 10) == ["it's", "été", "3", "dogs", "and", "cats"]
    assert words("a b c d", 2) == ["a", "b"]
    assert words("...", 5) == []


def test_vocabulary_ranks_by_frequency_then_alphabet() -> None:
    texts = [["b", "a", "c"], ["c", "b", "a"], ["c", "z"]]
    assert build_vocabulary(texts, 100) == {"c": 2, "a": 3, "b": 4, "z": 5}
    assert build_vocabulary(texts, 4) == {"c": 2, "a": 3}
    with pytest.raises(PolytempoError, match="vocabulary=2"):
        build_vocabulary(texts, 2)


def test_encoding_pads_cuts_and_marks_the_unknown() -> None:
    tokens = encode([["a", "x"], ["b", "a", "a", "a"], []], {"a": 2, "b": 3}, 3)
    assert tokens.tolist() == [[2, 1, 0], [3, 2, 2], [0, 0, 0]]


def test_vocabulary_knows_only_training_text() -> None:
    """Every text has one word of its own: known if and only if it is trained on."""
    texts = [f"common unique{number}" for number in range(80)]
    fed = Federation.from_pool(texts, np.arange(80) % 2, clients=4, partition="iid", length=4)
    assert fed.x.shape == (80, 4) and fed.x.dtype == torch.int64
    assert fed.vocabulary == 2 + 1 + sum(fed.samples)
    for train, test in zip(fed.train, fed.test, strict=True):
        assert (fed.x[train, 1] > 1).all()
        assert (fed.x[test, 1] == 1).all()
    assert (fed.x[:, 0] == 2).all() and (fed.x[:, 2:] == 0).all()
    assert int(fed.x.max()) == fed.vocabulary - 1


@pytest.mark.usefixtures("no_data")
def test_text_files_are_read_with_options(tmp_path: Path) -> None:
    stored = {
        "text_train": ["good news"] * 30,
        "y_train": [0, 1, 2] * 10,
        "text_test": ["bad omens today"] * 10,
        "y_test": [3] * 10,
    }
    with lzma.open(tmp_path / "agnews_partial.json.xz", "wt", encoding="utf8") as file:
        json.dump(stored, file)
    fed = Federation.load("agnews", data_dir=tmp_path, clients=2, partition="iid")
    assert fed.shape == (64,) and fed.classes == 4 and fed.vocabulary == 7
    short = Federation.load(
        "agnews:length=2,vocabulary=4", data_dir=tmp_path, clients=2, partition="iid"
    )
    assert short.shape == (2,) and short.vocabulary == 4
    (tmp_path / "newsgroups20.json.xz").write_bytes(b"no xz")
    with pytest.raises(PolytempoError, match=r"newsgroups20\.json\.xz cannot be read"):
        Federation.load("newsgroups20", data_dir=tmp_path)
