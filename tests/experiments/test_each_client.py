"""Each client by itself: one schema, whatever kind of run it was."""

import csv
import json
from collections import Counter, defaultdict
from pathlib import Path

import numpy as np
import pytest

import polytempo as pt
from polytempo.experiments.result_folder import read_result
from polytempo.experiments.tables import gains
from polytempo.simulation import each_client

COLUMNS = [
    *("client", "name", "group", "samples", "tested", "slowdown", "seconds", "updates"),
    *("staleness", "evaluated_at", "accuracy", "accuracy_adapted"),
]
TINY = {"model": "linear", "epochs": 1, "adapt_epochs": 1, "updates": 30, "solver": "torch"}


def federation(**given) -> pt.Federation:
    return pt.Federation.load("digits", clients=6, limit=200, **given)


def table(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A run with every event."""
    place = tmp_path_factory.mktemp("clients") / "run"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("polytempo.experiments.result_folder.can_plot", lambda: False)
        more = {"concurrency": 3, "devices": "two-speed:slow=0.5,factor=4", "events": True}
        pt.simulate(federation(), strategy="fedbuff", out=place, eval_every=10, **more, **TINY)
    return place


def test_the_table_agrees_with_the_events_and_the_history(folder):
    rows = table(folder / "clients.csv")
    assert list(rows[0]) == COLUMNS
    events = [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]
    stale, seconds, sent = defaultdict(list), defaultdict(list), {}
    for event in events:
        if event["event"] == "dispatch":
            sent[event["client"]] = event["time"]
        if event["event"] == "upload":
            stale[event["client"]].append(event["staleness"])
            seconds[event["client"]].append(event["time"] - sent[event["client"]])
    assert [int(row["updates"]) for row in rows] == [len(stale[client]) for client in range(6)]
    for client, row in enumerate(rows):
        if stale[client]:
            assert float(row["staleness"]) == pytest.approx(np.mean(stale[client]))
            assert float(row["seconds"]) == pytest.approx(np.mean(seconds[client]))
    assert Counter(row["slowdown"] for row in rows) == {"1.0": 3, "4.0": 3}
    last = table(folder / "history.csv")[-1]
    for column in ("accuracy", "accuracy_adapted"):
        mean = np.mean([float(row[column]) for row in rows])
        assert mean == pytest.approx(float(last[column]))
    found = json.loads((folder / "result.json").read_text())
    handed, adapted = ([float(row[name]) for row in rows] for name in COLUMNS[-2:])
    assert found["accuracy_std"] == pytest.approx(np.std(handed))
    assert found["accuracy_adapted_std"] == pytest.approx(np.std(adapted))
    assert found["accuracy_best10"] == pytest.approx(max(handed))


def test_the_history_of_clients_has_every_evaluation(folder):
    rows, history = table(folder / "clients_history.csv"), table(folder / "history.csv")
    by_updates = defaultdict(list)
    for row in rows:
        by_updates[row["updates"]].append(float(row["accuracy"]))
    assert list(by_updates) == [row["updates"] for row in history]
    for row in history:
        assert np.mean(by_updates[row["updates"]]) == pytest.approx(float(row["accuracy"]))
    assert [bool(row["accuracy_adapted"]) for row in rows] == [False] * 18 + [True] * 6


def test_a_result_that_is_read_again_has_the_same_clients(folder):
    again = read_result(folder).clients
    assert [row["name"] for row in again] == [str(client) for client in range(6)]
    assert [row["client"] for row in again] == list(range(6))
    assert again[0]["group"] is None


def test_an_interrupted_run_has_the_same_table(folder, tmp_path):
    short = {**TINY, "updates": 13}
    more = {
        "concurrency": 3,
        "devices": "two-speed:slow=0.5,factor=4",
        "events": True,
        "eval_every": 10,
    }
    fed = federation()
    pt.simulate(fed, strategy="fedbuff", out=tmp_path, **more, **short)
    pt.simulate(fed, strategy="fedbuff", out=tmp_path, resume=True, **more, **TINY)
    for name in ("clients.csv", "clients_history.csv"):
        assert (tmp_path / name).read_bytes() == (folder / name).read_bytes()


@pytest.mark.parametrize("strategy", ["p2p:local_steps=2", "majority", "pooled", "standalone"])
def test_every_kind_of_run_has_the_same_columns(strategy):
    fed = federation(shift="rotation:angles=[0,90]")
    given = {key: value for key, value in TINY.items() if key != "epochs"}
    result = pt.simulate(fed, strategy=strategy, **given)
    assert [list(row) for row in result.clients] == [COLUMNS] * 6
    assert [row["group"] for row in result.clients] == fed.groups.tolist()
    assert [row["samples"] for row in result.clients] == fed.samples
    count = sum(row["updates"] for row in result.clients)
    assert count == (0 if strategy in ("majority", "pooled") else result.arrivals)
    mean = np.mean([row["accuracy"] for row in result.clients])
    assert mean == pytest.approx(result.history[-1]["accuracy"])


def test_of_very_many_clients_there_is_no_table(monkeypatch):
    monkeypatch.setattr(each_client, "LISTED", 5)
    monkeypatch.setattr(each_client, "FOLLOWED", 5)
    result = pt.simulate(federation(), strategy="fedavg", **TINY)
    assert result.clients == [] and result.accuracy_best10 is None
    [extension] = [e for e in result.all_extensions() if e.name == "clients"]
    assert len(extension.scores) == 1


# -- better off than alone? ------------------------------------------------------------------------


def results(alone: list[float | None], together: list[float | None], better: str):
    metric = {"name": "m", "label": "m", "better": better, "share": False}
    made = []
    for values in (alone, together):
        rows = [{"client": client, "m": value} for client, value in enumerate(values)]
        made.append(pt.RunResult({"metric": metric}, [], rows=rows))
    return made


@pytest.mark.parametrize(("better", "sign"), [("higher", 1), ("lower", -1)])
def test_gains_are_counted_per_client(better, sign):
    alone, together = results([1.0, 2.0, 3.0, 4.0, None], [3.0, 2.0, 2.5, None, 9.0], better)
    found = gains(together, alone)
    assert (found["better_off"], found["worse_off"]) == (1, 1)
    assert found["gain"] == pytest.approx(sign * (2.0 + 0.0 - 0.5) / 3)
    assert found["gain_worst"] == pytest.approx(-0.5 if sign > 0 else -2.0)


def test_a_comparison_says_who_is_better_off_than_alone(polytempo, tmp_path):
    given = ("--clients", 6, "--updates", 30, "--limit", 200, "--model", "linear", "--epochs", 1)
    arguments = ("compare", "fedavg", "standalone", *given, "--adapt-epochs", 1, "-o", tmp_path)
    plain = polytempo(*arguments)
    assert "better off" not in plain.out
    outcome = polytempo(*arguments, "--fairness")
    assert outcome.code == 0, outcome.err
    handed = {
        name: [float(row["accuracy"]) for row in table(tmp_path / name / "seed0" / "clients.csv")]
        for name in ("fedavg", "standalone")
    }
    pairs = list(zip(handed["fedavg"], handed["standalone"], strict=True))
    better, worse = sum(a > b for a, b in pairs), sum(a < b for a, b in pairs)
    assert f"{better} of 6" in outcome.out and f"{worse} of 6" in outcome.out
    fedavg, alone = table(tmp_path / "summary.csv")
    assert (float(fedavg["better_off"]), float(fedavg["worse_off"])) == (better, worse)
    assert float(fedavg["gain"]) == pytest.approx(np.mean([a - b for a, b in pairs]))
    assert alone["better_off"] == ""
