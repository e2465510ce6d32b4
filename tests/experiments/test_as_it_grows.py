"""What can be looked at while a run goes on."""

import csv
import json

import pytest

from polytempo.core.events import Evaluate
from polytempo.experiments import drive
from polytempo.experiments.callbacks import Callback
from polytempo.experiments.compare import compare
from polytempo.experiments.config import make_config
from polytempo.experiments.run import run

SETTINGS = {
    "strategy": "pace",
    "data": "digits",
    "clients": 6,
    "limit": 120,
    "model": "linear",
    "epochs": 1,
    "updates": 12,
    "eval_every": 3,
    "adapt_epochs": 1,
    "events": True,
}


def rows(path):
    if not path.exists():
        return []
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def test_history_events_and_tables_grow_and_end_the_same(tmp_path, monkeypatch):
    plain, watched = tmp_path / "plain", tmp_path / "watched"
    run(make_config(SETTINGS, "test"), plain)
    seen = []

    class Look(Callback):
        def event(self, event):
            if isinstance(event, Evaluate):
                events = watched / "events.jsonl"
                seen.append((len(rows(watched / "history.csv")), events.read_text().count("\n")))

    monkeypatch.setattr(drive, "SHOW_SECONDS", 0.0)
    monkeypatch.setattr(drive, "SHOW_SHARE", 1e9)
    run(make_config(SETTINGS, "test"), watched, callbacks=[Look()])
    history, lines = zip(*seen, strict=True)
    assert list(history) == sorted(history) and 0 < history[-2] <= len(seen) - 2
    assert list(lines) == sorted(lines) and lines[-2] > lines[1] > 0
    for name in ("history.csv", "events.jsonl"):
        assert (plain / name).read_bytes() == (watched / name).read_bytes()


def test_a_folder_says_from_the_beginning_what_it_is(tmp_path, monkeypatch):
    pytest.importorskip("matplotlib")
    monkeypatch.setattr("polytempo.experiments.result_folder.can_plot", lambda: True)
    folder = tmp_path / "run"
    monkeypatch.setattr("sys.argv", ["/usr/bin/polytempo", "run", "--data", "two words"])
    run(make_config({**SETTINGS, "strategy": "fedasync", "concurrency": 1}, "test"), folder)
    found = json.loads((folder / "about.json").read_text())
    assert found["metric"]["name"] == "accuracy" and found["command"].endswith("'two words'")
    assert {"polytempo", "torch"} <= found["versions"].keys()
    report = (folder / "report.html").read_text()
    assert found["began"] in report and found["versions"]["torch"] in report
    assert "two words" in report
    assert "taleness" not in report  # one client at a time: no update was stale
    assert not (folder / "staleness.png").exists()


def test_the_report_of_a_comparison_tells_seeds_and_all_shared_settings(tmp_path, monkeypatch):
    pytest.importorskip("matplotlib")
    monkeypatch.setattr("polytempo.experiments.compare.can_plot", lambda: True)
    monkeypatch.setattr("sys.argv", ["polytempo", "compare", "fedasync", "standalone"])
    given = {name: value for name, value in SETTINGS.items() if name != "strategy"}
    compare(["fedasync", "standalone"], given, tmp_path, seeds=(0, 1))
    report = (tmp_path / "report.html").read_text(encoding="utf8")
    assert "Seeds: 0, 1." in report and "polytempo compare fedasync standalone" in report
    assert "batch_size" in report and "versions" in report  # was not given
    assert '<th scope="row">seed</th>' not in report  # they differ
    assert '<th scope="row">strategy</th>' not in report


def test_a_comparison_goes_on_with_events_as_it_began(tmp_path):
    given = {name: value for name, value in SETTINGS.items() if name not in ("strategy", "events")}
    first = compare(["fedasync"], given, tmp_path)
    again = compare(["fedasync"], {**given, "events": True}, tmp_path)
    assert again.summaries() == first.summaries()
    assert not (tmp_path / "fedasync" / "seed0" / "events.jsonl").exists()
