"""Several runs at once: the same results, and no run is lost."""

import json
import multiprocessing
import os
import signal

import pytest

from polytempo.core.errors import PolytempoError
from polytempo.experiments import jobs
from polytempo.experiments.config import make_config
from polytempo.experiments.jobs import Order, carry_out_all

SETTINGS = {"data": "digits", "clients": 5, "limit": 200, "updates": 12, "epochs": 1, "workers": 1}


def orders(folder, *strategies, **more):
    return [
        Order(name, make_config({**SETTINGS, **more, "strategy": name}, "test"), folder / name)
        for name in strategies
    ]


def quiet(label):
    return lambda *said: None


def fingerprints(folder):
    return {
        file.parent.name: json.loads(file.read_text())["fingerprint"]
        for file in folder.glob("*/result.json")
    }


def test_two_at_once_give_the_same_results_as_one(tmp_path):
    names, seen = ["pace", "fedavg", "majority"], {}

    def watch(label):
        return lambda done, updates, state: seen.setdefault(label, []).append(
            (done, updates, state)
        )

    for at_once in (1, 2):
        made = carry_out_all(orders(tmp_path / str(at_once), *names), at_once, watch)
        ended = list(made)
        assert {each.order.label for each in ended} == set(names)
        assert all(each.complete and each.diverged is None for each in ended)
        assert sorted(seen) == sorted(names) and seen["pace"][-1][:2] == (12, 12)
        assert "accuracy" in seen["pace"][-1][2]
        seen.clear()
    assert fingerprints(tmp_path / "1") == fingerprints(tmp_path / "2")
    assert len(fingerprints(tmp_path / "1")) == 3
    again = list(carry_out_all(orders(tmp_path / "2", *names), 2, watch))
    assert all(each.complete for each in again) and not seen  # nothing is run twice


def test_a_process_takes_one_run_after_the_other(tmp_path, monkeypatch):
    started, start = [], jobs._started

    def counted():
        started.append(start())
        return started[-1]

    monkeypatch.setattr(jobs, "_started", counted)
    names = ["pace", "fedavg", "fedasync", "fedbuff"]
    wrong = orders(tmp_path, "standalone", lr=1e30)
    ended = list(carry_out_all([*wrong, *orders(tmp_path, *names)], 2, quiet))
    assert [each.complete for each in ended].count(True) == 4  # after one that diverged, too
    assert len(started) == 2 and not any(process.is_alive() for _, process in started)


def test_a_run_that_diverges_is_told_apart(tmp_path):
    [ended] = carry_out_all(orders(tmp_path, "fedavg", lr=1e30), 2, quiet)
    assert not ended.complete and "diverged" in (ended.diverged or "")


def test_an_error_names_the_run(tmp_path):
    wrong = orders(tmp_path, "pace", data=str(tmp_path / "nothing.npz"))
    with pytest.raises(PolytempoError, match=r"pace: .*nothing\.npz"):
        list(carry_out_all(wrong, 2, quiet))


@pytest.mark.timeout(120)
def test_an_error_ends_the_other_runs_after_a_checkpoint(tmp_path):
    long = orders(tmp_path, "pace", updates=100_000, eval_every=50)
    first = orders(tmp_path, "fedavg", updates=500)  # while it trains, the long one gets going
    wrong = orders(tmp_path, "fedbuff", data=str(tmp_path / "nothing.npz"))
    with pytest.raises(PolytempoError, match=r"fedbuff: .*nothing\.npz"):
        list(carry_out_all([*long, *first, *wrong], 2, quiet))
    assert not multiprocessing.active_children()
    kept = json.loads((tmp_path / "pace" / "result.json").read_text())
    assert 0 < kept["arrivals"] < 100_000


def test_an_interrupt_leaves_what_can_be_resumed(tmp_path):
    long = {"updates": 100_000, "eval_every": 50}
    begun = []

    def watch(label):
        def report(done, updates, state):
            if done > 20 and label not in begun:
                begun.append(label)
                if len(begun) == 2:
                    signal.raise_signal(signal.SIGINT)

        return report

    ended = list(carry_out_all(orders(tmp_path, "pace", "fedavg", "fedbuff", **long), 2, watch))
    assert {each.order.label for each in ended} == {"pace", "fedavg"}
    assert not any(each.complete or each.diverged for each in ended)
    assert not (tmp_path / "fedbuff").exists()
    for name in ("pace", "fedavg"):
        assert (tmp_path / name / "checkpoint.safetensors").exists()
        assert json.loads((tmp_path / name / "result.json").read_text())["arrivals"] > 20


def test_a_process_that_is_killed_is_an_error_that_says_what_to_do(tmp_path):
    def watch(label):
        def report(done, updates, state):
            for child in multiprocessing.active_children():
                os.kill(child.pid, signal.SIGKILL)

        return report

    with pytest.raises(PolytempoError, match="ended with code -9; run the same command again"):
        list(carry_out_all(orders(tmp_path, "pace", updates=100_000), 2, watch))


def test_an_interrupt_before_a_run_has_begun_is_no_error(tmp_path):
    """The process is asked to end while it still loads its modules."""

    def watch(label):
        signal.raise_signal(signal.SIGINT)
        return lambda *said: None

    [ended] = carry_out_all(orders(tmp_path, "pace", "fedavg"), 2, watch)
    assert ended.order.label == "pace" and not ended.complete and ended.diverged is None
