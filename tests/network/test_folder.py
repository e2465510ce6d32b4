"""What a peer keeps survives a kill at any moment, and its incarnation only grows."""

import json
import os

import pytest
import torch

import polytempo.storage
from polytempo.core.errors import PolytempoError
from polytempo.network.folder import Folder


def read(folder):
    return [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]


def incarnation(path):
    folder = Folder(path, "ann")
    folder.close()
    return folder.incarnation


def test_incarnations_grow_even_if_the_clock_goes_back_or_the_folder_is_lost(tmp_path, monkeypatch):
    first = incarnation(tmp_path / "a")
    monkeypatch.setattr("polytempo.network.folder.time.time", lambda: 1.0)
    assert incarnation(tmp_path / "a") == first + 1
    monkeypatch.undo()
    assert incarnation(tmp_path / "b") > first


def test_the_incarnation_is_on_disk_before_anything_else_happens(tmp_path):
    folder = Folder(tmp_path, "ann")
    saved = json.loads((tmp_path / "incarnation.json").read_text())
    assert saved == {"peer": "ann", "incarnation": folder.incarnation}


def test_state_round_trip(tmp_path):
    folder = Folder(tmp_path, "ann")
    assert folder.load() is None
    state = {
        "learner": {"params": torch.randn(5), "momentum": torch.randn(5), "iteration": 7},
        "history": [{"iteration": 0, "accuracy": 0.1}],
        "figures": {"messages": 3, "seconds": 0.5},
    }
    folder.save(state)
    folder.close()
    found = Folder(tmp_path, "ann").load()
    for name in ("params", "momentum"):
        assert torch.equal(found["learner"][name], state["learner"][name])
    assert found["learner"]["iteration"] == 7
    assert (found["history"], found["figures"]) == (state["history"], state["figures"])


@pytest.mark.parametrize("moment", ["save_file", "fsync", "replace"])
def test_a_crash_while_saving_leaves_the_old_state(tmp_path, monkeypatch, moment):
    folder = Folder(tmp_path, "ann")
    folder.save({"iteration": 1, "params": torch.ones(3)})

    def crash(*_, **__):
        raise KeyboardInterrupt

    where = polytempo.storage if moment == "save_file" else os
    monkeypatch.setattr(where, moment, crash)
    with pytest.raises(KeyboardInterrupt):
        folder.save({"iteration": 2, "params": torch.zeros(3)})
    monkeypatch.undo()
    assert folder.load()["iteration"] == 1
    assert torch.equal(folder.load()["params"], torch.ones(3))
    assert [event["event"] for event in read(tmp_path)] == ["saved"]  # only what came to pass


def test_events_of_all_incarnations_are_kept_and_told(tmp_path):
    told = []
    for number in range(2):
        folder = Folder(tmp_path, "ann", told.append)
        folder.iteration = 5 * number
        folder.record("fused", token=["bob", 1, number])
        folder.close()
    assert read(tmp_path) == told
    assert [(event["event"], event["iteration"]) for event in told] == [("fused", 0), ("fused", 5)]
    assert told[0]["incarnation"] < told[1]["incarnation"]


def test_the_folder_of_another_peer_is_left_alone(tmp_path):
    ann = Folder(tmp_path, "ann")
    with pytest.raises(PolytempoError, match="is being written by another run"):
        Folder(tmp_path, "ann")
    ann.close()
    with pytest.raises(PolytempoError, match="folder of peer 'ann', not of 'bob'"):
        Folder(tmp_path, "bob")
    (tmp_path / "incarnation.json").write_text("{")
    with pytest.raises(PolytempoError, match="not written by a peer"):
        Folder(tmp_path, "ann")
    (tmp_path / "file").write_text("")
    with pytest.raises(PolytempoError, match="choose another --out"):
        Folder(tmp_path / "file", "ann")
