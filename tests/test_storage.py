"""State on disk: everything comes back, a crash loses nothing, garbage is recognised."""

import math
import os
import string
from collections import deque
from enum import Enum
from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from polytempo import storage as module
from polytempo.core.errors import PolytempoError
from polytempo.storage import load_state, mapped, restored, save_state


@pytest.fixture
def path(tmp_path):
    return tmp_path / "state.safetensors"


def through(path, state):
    save_state(path, state)
    return load_state(path)


def check(found, expected) -> None:
    """Equal in value, type, shape, element type and bits."""
    if isinstance(expected, torch.Tensor | np.ndarray):
        assert type(found) is type(expected)
        assert found.dtype == expected.dtype and found.shape == expected.shape
        a, b = (
            torch.as_tensor(x.copy() if isinstance(x, np.ndarray) else x) for x in (found, expected)
        )
        assert torch.equal(a, b)
    elif isinstance(expected, dict):
        assert list(found) == list(expected)
        for key, value in expected.items():
            check(found[key], value)
    elif isinstance(expected, list | tuple):
        assert isinstance(found, list) and len(found) == len(expected)
        for a, b in zip(found, expected, strict=True):
            check(a, b)
    else:
        assert type(found) is type(expected) and found == expected


def test_a_nested_state_comes_back(path):
    state = {
        "z first": 1,
        "updates": 12,
        "time": 0.1 + 0.2,
        "huge": 2**70,
        "infinite": float("-inf"),
        "none": None,
        "yes": True,
        "name": "naïve \n 'quoted' \x1f",
        "empty": {},
        "nothing": [],
        "deep": {"bank": {"rows": torch.randn(3, 4, generator=torch.Generator().manual_seed(0))}},
        "queue": [[1.5, 0, torch.ones(2)], [2.5, 1, {"params": np.arange(3)}]],
        "tuple": (1, (2, 3)),
    }
    check(through(path, state), state)


def test_not_a_number_stays_not_a_number(path):
    found = through(path, {"loss": float("nan"), "all": torch.tensor([torch.nan, 1.0])})
    assert np.isnan(found["loss"]) and torch.isnan(found["all"][0]) and found["all"][1] == 1


@pytest.mark.parametrize(
    "dtype", ["float16", "float32", "float64", "int8", "int32", "int64", "uint8", "bool"]
)
def test_element_types_come_back(path, dtype):
    array = np.array([[0, 1, 2], [3, 4, 5]]).astype(dtype)
    check(
        through(path, {"n": array, "t": torch.from_numpy(array)}),
        {"n": array, "t": torch.from_numpy(array)},
    )


def test_numpy_scalars_become_plain_numbers(path):
    found = through(path, {"a": np.float64(0.1), "b": np.int32(7), "c": [np.bool_(True)]})
    check(found, {"a": 0.1, "b": 7, "c": [True]})


def test_arrays_of_no_elements_and_of_no_dimensions_come_back(path):
    state = {
        "none": torch.empty(0),
        "rows": np.zeros((0, 3)),
        "columns": torch.empty(3, 0),
        "scalar": torch.tensor(2.5),
        "count": np.array(7),
    }
    check(through(path, state), state)


def test_an_empty_state_comes_back(path):
    assert through(path, {}) == {}


def test_views_and_non_contiguous_arrays_come_back(path):
    base = torch.arange(24.0).view(4, 6)
    grid = np.arange(24).reshape(4, 6)
    state = {
        "row": base[1],
        "column": base[:, 2],
        "transposed": base.T,
        "strided": base[::2, 1::3],
        "expanded": torch.ones(1).expand(5),
        "channels last": torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
        "reversed": grid[::-1],
        "numpy column": grid[:, 3],
    }
    check(through(path, state), state)


def test_transposed_numpy_arrays_come_back(path):
    grid = np.arange(6.0).reshape(2, 3)
    check(through(path, {"t": grid.T}), {"t": grid.T})


def test_entries_that_share_memory_come_back_apart(path):
    base, grid = torch.arange(6.0), np.arange(6.0)
    found = through(path, {"all": base, "again": base, "part": base[2:4], "n": grid, "m": grid[1:]})
    check(found, {"all": base, "again": base, "part": base[2:4], "n": grid, "m": grid[1:]})
    found["all"].zero_()
    found["n"][:] = 0
    assert torch.equal(found["again"], base) and found["part"].tolist() == [2, 3]
    assert found["m"].tolist() == [1, 2, 3, 4, 5]


def test_gradients_stay_at_home(path):
    found = through(path, {"p": torch.nn.Parameter(torch.ones(2))})
    assert type(found["p"]) is torch.Tensor and not found["p"].requires_grad


def test_what_was_loaded_can_be_changed_without_touching_the_file(path):
    save_state(path, {"t": torch.ones(3), "n": np.ones(3)})
    found = load_state(path)
    found["t"].zero_()
    found["n"] += 1
    check(load_state(path), {"t": torch.ones(3), "n": np.ones(3)})


def test_restored_is_what_would_be_loaded(path):
    rows = torch.arange(6.0).view(2, 3)
    state = {"a": (1, np.float64(2), {"b": None}), "t": rows.T, "n": np.arange(3), "i": math.inf}
    found = restored(state)
    check(found, through(path, state))
    found["t"].zero_()
    found["n"][:] = 9
    assert rows.sum() == 15 and state["n"].tolist() == [0, 1, 2]


def test_saving_copies_what_it_saves(path):
    vector = torch.ones(3)
    save_state(path, {"t": vector})
    vector.zero_()
    check(load_state(path), {"t": torch.ones(3)})


LEAVES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(allow_nan=False),
    st.text(max_size=5),
    st.lists(st.floats(width=32), max_size=4).map(torch.tensor),
    st.lists(st.integers(-9, 9), max_size=4).map(lambda x: np.array(x, dtype=np.int64)),
)


def nested(keys):
    return st.dictionaries(
        keys,
        st.recursive(
            LEAVES,
            lambda inner: st.lists(inner, max_size=3) | st.dictionaries(keys, inner, max_size=3),
            max_leaves=8,
        ),
        max_size=4,
    )


@settings(max_examples=30, deadline=None)
@given(state=nested(st.text(string.ascii_letters + "._- 0", max_size=4)))
def test_any_state_with_plain_names_comes_back(state, tmp_path_factory):
    path = tmp_path_factory.getbasetemp() / "any"
    found = through(path, state)
    # torch.equal does not know nan: compare those by their text
    assert repr(found) == repr(state)


def test_names_with_a_slash_are_not_taken_for_a_path(path):
    state = {"a": {"b": torch.ones(1)}, "a/b": torch.zeros(2)}
    check(through(path, state), state)


def test_a_name_that_looks_like_the_mark_of_an_array_is_refused(path):
    with pytest.raises(PolytempoError, match=r"^state/x cannot be saved: .*'\$array'.* reserved"):
        save_state(path, {"x": {"$array": "tensor"}})
    assert not path.exists()


# -- what cannot be saved --------------------------------------------------------------------------


class Color(Enum):
    RED = 1


@pytest.mark.parametrize(
    ("state", "words"),
    [
        ({1: 2}, "state cannot be saved: it has the key 1, which is not a string"),
        ({"a": {2: torch.ones(1)}}, "state/a cannot be saved: it has the key 2"),
        ({"a": [{None: 1}]}, "state/a/0 cannot be saved: it has the key None"),
        ({"a": object()}, "state/a cannot be saved: it is of type object"),
        ({"a": [1, {"b": {1, 2}}]}, "state/a/1/b cannot be saved: it is of type set"),
        ({"a": b"bytes"}, "state/a cannot be saved: it is of type bytes"),
        ({"a": deque()}, "state/a cannot be saved: it is of type deque"),
        ({"a": Color.RED}, "state/a cannot be saved: it is of type Color"),
        ({"a": 1j}, "state/a cannot be saved: it is of type complex"),
        ({"a": np.datetime64("2026-01-01")}, "state/a cannot be saved: it is of type date"),
        ({"a": np.array([None])}, "state/a cannot be saved: it is an array of object"),
        ({"a": np.array(["x"])}, "state/a cannot be saved: it is an array of <U1"),
    ],
)
def test_what_a_file_cannot_hold_is_named_and_the_old_file_stays(path, state, words):
    save_state(path, {"old": 1})
    for save in (restored, partial(save_state, path)):
        with pytest.raises(PolytempoError) as caught:
            save(state)
        assert str(caught.value).startswith(words) and "keep it as" in str(caught.value)
    assert load_state(path) == {"old": 1}


# -- crashes ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("moment", ["while writing", "before the swap"])
def test_a_crash_leaves_the_old_file(path, monkeypatch, moment):
    old = {"updates": 1, "model": torch.ones(3)}
    save_state(path, old)

    def crash(*_, **__):
        raise OSError("the disk is full")

    def half_a_file(arrays, target, **_):
        with open(target, "wb") as file:
            file.write(b"half a fi")
        crash()

    with monkeypatch.context() as patch:
        if moment == "while writing":
            patch.setattr(module, "save_file", half_a_file)
        else:
            patch.setattr(os, "replace", crash)
        with pytest.raises(PolytempoError, match="could not be written: the disk is full; what w"):
            save_state(path, {"updates": 2, "model": torch.zeros(3)})
    assert [file.name for file in path.parent.iterdir()] == [path.name]
    check(load_state(path), old)
    check(through(path, {"updates": 3}), {"updates": 3})  # and the next one succeeds
    assert [file.name for file in path.parent.iterdir()] == [path.name]


def test_a_new_state_replaces_all_of_the_old_one(path):
    save_state(path, {"a": torch.ones(3), "b": 1})
    check(through(path, {"c": torch.zeros(2)}), {"c": torch.zeros(2)})


# -- files that are none of ours -------------------------------------------------------------------


def test_a_missing_file_is_an_error_that_names_it(path):
    with pytest.raises(PolytempoError, match=r"no checkpoint .*state\.safetensors"):
        load_state(path)


@pytest.mark.parametrize(
    "content", [b"", b"garbage", b"garbage" * 100, b"\x08\0\0\0\0\0\0\0{}      "], ids=len
)
def test_a_corrupt_file_is_an_error_that_names_it(path, content):
    path.write_bytes(content)
    with pytest.raises(
        PolytempoError, match=r"state\.safetensors is not a Polytempo checkpoint"
    ) as error:
        load_state(path)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("kept", [0.1, 0.5, 0.99])
def test_a_truncated_file_is_an_error(path, kept):
    save_state(path, {"model": torch.randn(500), "updates": 3})
    content = path.read_bytes()
    path.write_bytes(content[: int(kept * len(content))])
    with pytest.raises(PolytempoError, match="is not a Polytempo checkpoint"):
        load_state(path)


def test_a_single_flipped_bit_is_noticed(path):
    save_state(path, {"model": torch.randn(500), "updates": 3})
    content = bytearray(path.read_bytes())
    content[-700] ^= 1  # among the numbers, where the format itself sees nothing
    path.write_bytes(content)
    with pytest.raises(PolytempoError, match=r"checksum.*restore it from a copy, or delete it"):
        load_state(path)


def test_a_file_without_a_checksum_can_be_read(path):
    """As older versions wrote it."""
    save_file({"0 state/w": torch.ones(2)}, str(path), metadata={"state": '{"a": 1}'})
    assert load_state(path) == {"a": 1}


@pytest.mark.parametrize("metadata", [None, {"other": "1"}, {"state": "{not json"}])
def test_a_file_of_somebody_else_is_an_error(path, metadata):
    save_file({"weight": torch.ones(2)}, str(path), metadata=metadata)
    with pytest.raises(PolytempoError, match="is not a Polytempo checkpoint"):
        load_state(path)


def test_a_checkpoint_whose_arrays_are_missing_is_an_error(path):
    save_file({"w": torch.ones(2)}, str(path), metadata={"state": '{"b": {"$array": "tensor"}}'})
    with pytest.raises(PolytempoError, match="is not a Polytempo checkpoint"):
        load_state(path)


def test_a_folder_in_the_place_of_a_checkpoint_is_an_error(tmp_path):
    with pytest.raises(PolytempoError, match="checkpoint"):
        load_state(tmp_path)


# -- memory on disk --------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
def test_mapped_memory_holds_what_is_written_to_it(tmp_path, dtype):
    allocate = mapped(tmp_path)
    blocks = [allocate((300, 7), dtype) for _ in range(3)]
    rows = [torch.full((300, 7), float(k), dtype=dtype) for k in range(3)]
    for block, row in zip(blocks, rows, strict=True):
        assert block.shape == (300, 7) and block.dtype == dtype and block.data_ptr() % 64 == 0
        block.copy_(row)
    assert all(torch.equal(block, row) for block, row in zip(blocks, rows, strict=True))


def test_mapped_memory_is_on_the_disk_that_was_named_and_leaves_no_file(tmp_path):
    block = mapped(tmp_path)((2**18, 16), torch.float32).fill_(1)
    assert list(tmp_path.iterdir()) == []  # it has no name: a crash leaves nothing behind
    with open("/proc/self/maps") as file:
        [line] = [line for line in file if str(tmp_path) in line]
    first, last = (int(address, 16) for address in line.split()[0].split("-"))
    assert first <= block.data_ptr() < last and last - first == 2**24


def test_a_folder_that_is_not_there_is_an_error_that_names_it(tmp_path):
    with pytest.raises(PolytempoError, match=r"nowhere.*name a folder"):
        mapped(tmp_path / "nowhere")((2, 2), torch.float32)


def test_a_disk_without_room_is_an_error_that_names_the_folder(tmp_path):
    with pytest.raises(PolytempoError, match=rf"{tmp_path.name}.*make room"):
        mapped(tmp_path)((2**30, 2**27), torch.float32)
    assert list(tmp_path.iterdir()) == []
