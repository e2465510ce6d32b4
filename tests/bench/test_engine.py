"""The benchmark of the engine counts what it says it counts."""

import json
import time

import pytest
from typer.testing import CliRunner

import polytempo.bench.engine as bench
import polytempo.bench.suite as suite
from polytempo.bench.engine import crowd, measure_crowd, measure_engine
from polytempo.cli import app
from polytempo.core.server import Server
from polytempo.files import Appended
from polytempo.training import Executor

LINEAR = 32 * 10 + 10


@pytest.mark.parametrize("strategy", bench.SPEEDS)
def test_an_update_has_its_parts(strategy):
    found = measure_engine(strategy, updates=40, repeats=1)
    assert (found["strategy"], found["parameters"], found["steps"]) == (strategy, LINEAR, 8)
    assert found["backend"].split(",")[1].startswith(" serial")
    assert min(found[f"{part}_us"] for part in ("training", "server", "bookkeeping")) > 0
    assert found["evaluation_us"] > 0
    assert found["updates_per_s"] == pytest.approx(1e6 / found["update_us"])


def burning(real, seconds):
    """The same, and so much CPU time more."""

    def slow(*given, **named):
        end = time.process_time() + seconds
        while time.process_time() < end:
            pass
        return real(*given, **named)

    return slow


@pytest.mark.parametrize(
    "part, owner, name, times",
    [
        ("bookkeeping", bench, "save_state", 1),
        ("server", Server, "receive", 10),
        ("training", Executor, "carry_out", 10),
        ("evaluation", Executor, "evaluate", 10),
    ],
)
def test_what_is_slow_shows_up_in_its_part(monkeypatch, part, owner, name, times):
    monkeypatch.setattr(owner, name, burning(getattr(owner, name), 2.0 / times))
    found = measure_engine("fedasync", updates=10, repeats=1)
    others = {"training", "server", "bookkeeping", "evaluation"} - {part}
    assert 10 * found[f"{part}_us"] >= 1.9e6
    assert all(10 * found[f"{other}_us"] < 1.0e6 for other in others)


def test_a_run_writes_its_log_and_its_checkpoint_and_trains_eight_steps(monkeypatch):
    lines, saved, made = [], [], []
    add, simulator = Appended.add, bench._simulator
    monkeypatch.setattr(Appended, "add", lambda log, line: (lines.append(line), add(log, line)))
    monkeypatch.setattr(bench, "save_state", lambda path, state: saved.append(state))
    monkeypatch.setattr(
        bench, "_simulator", lambda *a, **k: made.append(simulator(*a, **k)) or made[-1]
    )
    measure_engine("fedasync", updates=40, repeats=1)
    assert len(made) == 2  # one to warm up
    assert len(lines) == sum(each.events for each in made) > 2 * 2 * 40
    assert [state["server"]["updates"] for state in saved] == [40, 40]
    for each in made:
        assert [row["updates"] for row in each.history] == list(range(41))  # 40 evaluations
        for flight in each.flights.values():
            assert flight.job.task.total_steps(each.federation.samples[flight.job.client]) == 8


def test_waiting_does_not_count(monkeypatch):
    """CPU time is measured: a disk that is slow, or another program, costs nothing."""
    monkeypatch.setattr(bench, "save_state", lambda path, state: time.sleep(1.0))
    found = measure_engine("fedasync", updates=20, repeats=1)
    assert 20 * found["bookkeeping_us"] < 0.9e6


def test_a_crowd_shares_its_samples_and_a_thousand_of_it_are_tested():
    federation = crowd(2_500)
    assert federation.clients == 2_500 and len(federation.x) == 1_000 * 32
    assert federation.samples == [24] * 2_500
    assert federation.train[7] is federation.train[1_007]  # a million clients take no memory there
    assert federation.tested == list(range(1_000))


def test_a_crowd_is_measured_in_a_process_of_its_own():
    found = measure_crowd("fedbuff", 2_000, 30, 40)
    assert (found["clients"], found["concurrency"], found["updates"]) == (2_000, 30, 40)
    assert found["update_us"] > 0 and found["start_s"] > 0 and found["peak_mb"] >= 0
    assert found["updates_per_s"] == pytest.approx(1e6 / found["update_us"])


def test_the_command_shows_both(monkeypatch, tmp_path):
    monkeypatch.setattr(suite, "UPDATES", 40)
    monkeypatch.setattr(suite, "CROWD", (1_200, 20, 30))
    file = tmp_path / "bench.json"
    done = CliRunner().invoke(app, ["bench", "engine", "--repeats", "1", "--out", str(file)])
    assert done.exit_code == 0, done.output
    assert "bookkeeping" in done.output and "1,200 clients, concurrency 20" in done.output
    found = json.loads(file.read_text())
    assert [row["strategy"] for row in found["engine"]] == ["fedasync", "fedbuff", "pace"]
    assert [row["strategy"] for row in found["crowd"]] == ["fedasync", "fedbuff"]
    assert {row["updates"] for row in found["engine"]} == {40}
    assert found["training"] == found["server"] == []
