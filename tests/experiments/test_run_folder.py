"""What a run leaves behind; that it can be repeated, interrupted, killed and resumed bit by bit."""

import csv
import hashlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from safetensors import safe_open

import polytempo as pt
from polytempo.experiments import drive
from polytempo.experiments.checkpoint import CHECKPOINT, PREVIOUS
from polytempo.experiments.config import RunConfig, make_config, read_config

SMALL = ("--clients", 6, "--updates", 12, "--limit", 300, "--adapt-epochs", 1)
# An arrival of this one takes about a millisecond.
TINY = (
    *("--clients", 6, "--limit", 120, "--model", "linear", "--epochs", 1),
    *("--eval-every", 25, "--adapt-epochs", 1, "--events"),
)
KEYS = {
    *("strategy", "seed", "accuracy", "accuracy_best", "accuracy_std", "accuracy_worst10"),
    *("accuracy_adapted", "simulated_time", "time_to", "convergence_time", "arrivals", "messages"),
    *("wall_seconds", "peak_rss_mb", "version"),
}
PNG = b"\x89PNG\r\n\x1a\n"


def summary(folder: Path) -> dict:
    return json.loads((folder / "result.json").read_text())


def history(folder: Path) -> list[dict[str, str]]:
    with (folder / "history.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def events(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]


def same(one: Path, other: Path) -> None:
    """Both runs did the same, bit for bit."""
    assert (one / "events.jsonl").read_bytes() == (other / "events.jsonl").read_bytes()
    assert (one / "history.csv").read_bytes() == (other / "history.csv").read_bytes()
    alike = summary(one), summary(other)
    for found in alike:
        for volatile in ("wall_seconds", "peak_rss_mb"):
            del found[volatile]
    assert alike[0] == alike[1]


# -- contents -------------------------------------------------------------------------------------


def test_a_run_writes_a_whole_folder(finished):
    folder, outcome = finished
    assert outcome.code == 0
    files = {path.name for path in folder.iterdir()}
    assert files - {PREVIOUS} == {  # a run that took long has an older checkpoint, too
        *("config.toml", "history.csv", "result.json", "checkpoint.safetensors", "events.jsonl"),
        *("accuracy.png", "staleness.png", "graph.png", "graph.npz", "report.html", "about.json"),
        *("clients.csv", "clients_history.csv", "distribution.png"),
    }
    assert str(folder) in outcome.out


def test_the_plots_are_pictures_with_something_on_them(finished):
    image = pytest.importorskip("matplotlib.image")
    for name in ("accuracy.png", "staleness.png", "graph.png"):
        path = finished[0] / name
        assert path.read_bytes().startswith(PNG)
        pixels = image.imread(path)
        assert min(pixels.shape[:2]) > 200
        assert pixels[..., :3].std() > 0.02


def test_the_report_needs_no_other_file(finished):
    text = (finished[0] / "report.html").read_text()
    assert text.count("data:image/png;base64,") == 4
    assert 'src="http' not in text
    assert "accuracy.png" not in text
    assert "pace" in text


def test_the_result_holds_what_the_design_promises(finished):
    found = summary(finished[0])
    assert found.keys() >= KEYS
    assert found["strategy"] == "pace"
    assert found["complete"] is True
    assert found["arrivals"] == 12
    assert {"dispatch", "upload", "multicast"} <= found["messages"].keys()
    for kind in ("dispatch", "upload", "multicast"):
        size = 4 * found["parameters"]
        assert found["messages"][f"{kind}_bytes"] == size * found["messages"][kind]
    assert {"total", "training", "server", "evaluation"} <= found["wall_seconds"].keys()
    parts = sum(found["wall_seconds"][k] for k in ("training", "server", "evaluation"))
    assert 0 < parts <= found["wall_seconds"]["total"]
    assert found["peak_rss_mb"] > 50
    assert set(found["time_to"]) == {"0.5", "0.6", "0.7", "0.8", "0.9", "0.95"}


def test_the_result_follows_from_the_history(finished):
    found, rows = summary(finished[0]), history(finished[0])
    accuracy = [float(row["accuracy"]) for row in rows]
    assert [int(row["updates"]) for row in rows] == list(range(13))
    assert found["accuracy"] == pytest.approx(sum(accuracy[-3:]) / 3)
    assert found["accuracy_best"] == max(accuracy)
    assert found["accuracy_adapted"] == float(rows[-1]["accuracy_adapted"])
    assert found["simulated_time"] == float(rows[-1]["time"])
    for target, time_ in found["time_to"].items():
        reached = [float(r["time"]) for r in rows if float(r["accuracy"]) >= float(target)]
        assert time_ == (reached[0] if reached else None)


def test_the_event_log_is_what_the_fingerprint_chains(finished):
    folder = finished[0]
    chain = ""
    for line in (folder / "events.jsonl").read_text().splitlines():
        chain = hashlib.sha256((chain + line).encode()).hexdigest()[:32]
    assert chain == summary(folder)["fingerprint"]


def test_the_event_log_agrees_with_the_result(finished):
    log, found = events(finished[0]), summary(finished[0])
    assert [event["n"] for event in log] == list(range(len(log)))
    times = [event["time"] for event in log]
    assert times == sorted(times)
    kinds = [event["event"] for event in log]
    assert kinds.count("upload") == found["arrivals"] == found["messages"]["upload"]
    assert kinds.count("dispatch") == found["messages"]["dispatch"]
    assert kinds.count("evaluate") == len(history(finished[0]))
    stale = [event["staleness"] for event in log if event["event"] == "upload"]
    assert found["staleness"] == {str(s): stale.count(s) for s in sorted(set(stale))}
    assert found["staleness_mean"] == pytest.approx(sum(stale) / len(stale))


def test_the_checkpoint_is_safetensors(finished):
    with safe_open(str(finished[0] / "checkpoint.safetensors"), framework="np") as file:
        assert json.loads(file.metadata()["state"])["server"]["updates"] == 12
        assert list(file.keys())


def test_the_configuration_is_resolved(finished):
    config = make_config(read_config(finished[0] / "config.toml"))
    assert (config.clients, config.updates, config.limit) == (6, 12, 300)
    assert (config.events, config.check) == (True, True)
    text = (finished[0] / "config.toml").read_text()
    for name in ("gamma", "omega", "lr", "momentum", "devices", "network", "seed"):
        assert name in text  # what was not given is written out as well


def test_without_events_there_is_no_log(polytempo, tmp_path):
    assert polytempo("run", *SMALL, "--out", tmp_path / "run").code == 0
    assert not (tmp_path / "run" / "events.jsonl").exists()


def test_each_run_without_out_gets_a_folder_of_its_own(polytempo, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    arguments = ("run", *TINY, "--updates", 2, "--seed", 4, "--strategy", "fedavg")
    assert polytempo(*arguments).code == 0
    assert polytempo(*arguments).code == 0
    names = sorted(path.name for path in (tmp_path / "runs").iterdir())
    [first, second] = names
    assert first.startswith("fedavg-digits-") and first.endswith("-seed4")
    assert "-updates=2-" in first and "-limit=" in first
    assert second == f"{first}-2"
    assert polytempo(*arguments, "--lr", 0.2).code == 0
    assert len([p for p in (tmp_path / "runs").iterdir() if "-lr=0.2-" in p.name]) == 1


# -- the same again -------------------------------------------------------------------------------


def test_the_written_configuration_repeats_the_run(finished, polytempo, tmp_path):
    again = tmp_path / "again"
    assert polytempo("run", "-c", finished[0] / "config.toml", "-o", again).code == 0
    same(finished[0], again)
    assert (again / "config.toml").read_bytes() == (finished[0] / "config.toml").read_bytes()


def test_another_seed_is_another_run(finished, polytempo, tmp_path):
    other = tmp_path / "other"
    assert polytempo("run", "-c", finished[0] / "config.toml", "--seed", 1, "-o", other).code == 0
    assert (other / "events.jsonl").read_bytes() != (finished[0] / "events.jsonl").read_bytes()
    assert (other / "history.csv").read_bytes() != (finished[0] / "history.csv").read_bytes()
    assert summary(other)["fingerprint"] != summary(finished[0])["fingerprint"]


def test_the_event_log_and_the_checks_change_nothing(finished, polytempo, tmp_path):
    bare = tmp_path / "bare"
    given = ("--clients", 6, "--updates", 12, "--limit", 300)
    assert polytempo("run", *given, "-o", bare).code == 0
    assert summary(bare)["fingerprint"] == summary(finished[0])["fingerprint"]


# -- interrupted ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("strategy", "at", "more"),
    [
        ("pace:omega=20", 55, ["--network", "4g"]),
        ("pace", 0, []),  # before the first dispatch
        ("fedavg", 70, ["--dropout", "drop:probability=0.2"]),
        ("fedbuff:buffer_size=3", 31, ["--devices", "exponential"]),
        ("pfedgraph", 64, []),
        ("standalone", 48, []),
    ],
)
def test_an_interrupted_run_resumes_bit_by_bit(
    strategy, at, more, polytempo, interrupt, plotless, tmp_path
):
    arguments = ("run", *TINY, "--updates", 60, "--check", "--strategy", strategy, *more)
    assert polytempo(*arguments, "-o", tmp_path / "whole").code == 0
    interrupt(at)
    stopped = polytempo(*arguments, "-o", tmp_path / "halved")
    assert stopped.code == 130
    assert f"polytempo run --resume {tmp_path / 'halved'}" in " ".join(stopped.err.split())
    found = summary(tmp_path / "halved")
    assert found["complete"] is False
    assert found["arrivals"] < 60
    assert found.keys() >= KEYS
    assert (tmp_path / "halved" / "checkpoint.safetensors").exists()
    assert polytempo("run", "--resume", tmp_path / "halved").code == 0
    same(tmp_path / "whole", tmp_path / "halved")


def test_a_run_may_be_interrupted_again_and_again(polytempo, interrupt, tmp_path):
    arguments = ("run", *TINY, "--updates", 40)
    assert polytempo(*arguments, "-o", tmp_path / "whole").code == 0
    interrupt(10)
    assert polytempo(*arguments, "-o", tmp_path / "parts").code == 130
    for at in (11, 30, 60):
        interrupt(at)
        assert polytempo("run", "--resume", tmp_path / "parts").code == 130
    assert polytempo("run", "--resume", tmp_path / "parts").code == 0
    same(tmp_path / "whole", tmp_path / "parts")


def test_a_polite_kill_is_an_interrupt_too(polytempo, interrupt, tmp_path):
    interrupt(30, signal.SIGTERM)
    assert polytempo("run", *TINY, "--updates", 40, "-o", tmp_path / "run").code == 130
    assert summary(tmp_path / "run")["complete"] is False


def test_an_interrupted_run_with_json_prints_its_partial_result(polytempo, interrupt, tmp_path):
    interrupt(30)
    outcome = polytempo("run", *TINY, "--updates", 40, "--json", "-o", tmp_path / "run")
    assert outcome.code == 130
    assert json.loads(outcome.out) == summary(tmp_path / "run")


def wait_for(condition, process, seconds=120.0):
    deadline = time.monotonic() + seconds
    while not condition():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline, "the command does not get going"
        time.sleep(0.02)


def lines(path: Path) -> int:
    return path.read_bytes().count(b"\n") if path.exists() else 0


def test_control_c_in_a_real_terminal_session(polytempo, tmp_path):
    """The installed command, stopped by SIGINT in the middle of a run without foreseeable end."""
    folder = tmp_path / "run"
    command = [Path(sys.executable).with_name("polytempo"), "run", *TINY]
    process = subprocess.Popen(
        [str(word) for word in [*command, "--updates", 10**6, "--out", folder]],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    wait_for(lambda: lines(folder / "events.jsonl") > 50, process)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "Traceback" not in err
    assert f"polytempo run --resume {folder}" in " ".join(err.split())
    assert "accuracy, as handed" in out
    partial = summary(folder)
    assert partial["complete"] is False
    assert 0 < partial["arrivals"] < 10**6
    assert len(history(folder)) == 1 + partial["arrivals"] // 25
    assert (folder / "report.html").exists()

    updates = partial["arrivals"] + 60
    assert polytempo("run", "--resume", folder, "--updates", updates).code == 0
    assert polytempo("run", *TINY, "--updates", updates, "-o", tmp_path / "whole").code == 0
    same(folder, tmp_path / "whole")


# -- killed ---------------------------------------------------------------------------------------

KILLED = """
import os, signal, sys
from polytempo import cli
from polytempo.experiments import drive
drive.CHECKPOINT_SECONDS = -1e9
save, saved = drive.save_state, []

def save_and_die(path, state, keep):
    save(path, state, keep)
    saved.append(state["server"]["updates"])
    if saved[-1] >= 20:
        os.kill(os.getpid(), signal.SIGKILL)

drive.save_state = save_and_die
cli.main()
"""


def test_a_killed_run_resumes_bit_by_bit(polytempo, tmp_path):
    """SIGKILL right after a checkpoint: what the event log held in memory is lost."""
    arguments = ("run", *TINY, "--updates", 40)
    done = subprocess.run(
        [sys.executable, "-c", KILLED, *map(str, arguments), "--out", str(tmp_path / "killed")],
        capture_output=True,
        text=True,
    )
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert not (tmp_path / "killed" / "result.json").exists()
    assert polytempo("run", "--resume", tmp_path / "killed").code == 0
    assert polytempo(*arguments, "-o", tmp_path / "whole").code == 0
    same(tmp_path / "killed", tmp_path / "whole")


class Clock:
    """Every look at it takes ten seconds."""

    now = 0.0

    def monotonic(self) -> float:
        self.now += 10
        return self.now


def test_checkpoints_that_take_long_are_rare(polytempo, tmp_path, monkeypatch):
    """A write that takes 20 seconds is followed by 400 without, one that takes 200 by 900."""
    clock, save, ends, gaps = Clock(), drive.save_state, [], []

    def slow(path, state, keep=None):
        gaps.extend(clock.now - end for end in ends[-1:])
        save(path, state, keep)
        clock.now += 200 if ends else 20
        ends.append(clock.now)

    monkeypatch.setattr(drive, "time", clock)
    monkeypatch.setattr(drive, "save_state", slow)
    assert polytempo("run", *TINY, "--updates", 400, "-o", tmp_path / "run").code == 0
    first, *others, _ = gaps  # the last one is made when the run ends
    assert 400 < first < 800
    assert len(others) > 1
    assert all(900 < gap < 1000 for gap in others)


def test_what_a_checkpoint_counts_is_in_the_event_log_before_it(polytempo, tmp_path, monkeypatch):
    save, seen = drive.save_state, []

    def watch(path, state, keep=None):
        save(path, state, keep)
        seen.append((state["events"], lines(tmp_path / "run" / "events.jsonl")))

    monkeypatch.setattr(drive, "save_state", watch)
    monkeypatch.setattr(drive, "CHECKPOINT_SECONDS", -1e9)
    assert polytempo("run", *TINY, "--updates", 10, "-o", tmp_path / "run").code == 0
    assert len(seen) > 10
    assert [counted for counted, on_disk in seen if counted > on_disk] == []


@pytest.mark.parametrize("rest", [b"", b'{"n": 9', b'{"n": 99, "event": "upload"}\n{"n": 10'])
def test_what_was_logged_after_the_last_checkpoint_is_cut_off(rest, polytempo, interrupt, tmp_path):
    arguments = ("run", *TINY, "--updates", 30)
    assert polytempo(*arguments, "-o", tmp_path / "whole").code == 0
    interrupt(40)
    assert polytempo(*arguments, "-o", tmp_path / "run").code == 130
    with (tmp_path / "run" / "events.jsonl").open("ab") as file:
        file.write(rest)
    assert polytempo("run", "--resume", tmp_path / "run").code == 0
    same(tmp_path / "whole", tmp_path / "run")


def test_a_run_killed_before_its_first_checkpoint_starts_anew(polytempo, interrupt, tmp_path):
    arguments = ("run", *TINY, "--updates", 30)
    assert polytempo(*arguments, "-o", tmp_path / "whole").code == 0
    interrupt(40)
    assert polytempo(*arguments, "-o", tmp_path / "run").code == 130
    for name in ("checkpoint.safetensors", "result.json", "history.csv"):
        (tmp_path / "run" / name).unlink()
    assert polytempo("run", "--resume", tmp_path / "run").code == 0
    same(tmp_path / "whole", tmp_path / "run")


def test_a_resume_without_its_event_log_says_so(polytempo, interrupt, tmp_path):
    interrupt(40)
    assert polytempo("run", *TINY, "--updates", 30, "-o", tmp_path / "run").code == 130
    (tmp_path / "run" / "events.jsonl").unlink()
    assert "events.jsonl" in polytempo("run", "--resume", tmp_path / "run").error


def test_a_damaged_checkpoint_gives_way_to_the_one_before(polytempo, tmp_path, monkeypatch):
    monkeypatch.setattr(drive, "CHECKPOINT_SECONDS", -1e9)  # one after every event
    whole, torn = tmp_path / "whole", tmp_path / "torn"
    assert polytempo("run", *TINY, "--updates", 8, "-o", whole).code == 0
    assert polytempo("run", *TINY, "--updates", 4, "-o", torn).code == 0
    last, previous = torn / CHECKPOINT, torn / PREVIOUS
    content = bytearray(last.read_bytes())
    content[-100] ^= 1
    last.write_bytes(content)
    outcome = polytempo("run", "--resume", torn, "--updates", 8)
    assert outcome.code == 0, outcome.err
    assert re.search(r"(?m)^warning: .*checksum.*Used instead.*previous", outcome.err)
    same(whole, torn)
    for path in (last, previous):
        path.write_bytes(b"torn")
    assert "checkpoint.previous" in polytempo("run", "--resume", torn, "--updates", 9).error


def test_a_crash_between_two_checkpoints_costs_nothing(polytempo, tmp_path, monkeypatch):
    """The last one may be gone for a moment: the one before is there, and the folder is not new."""
    monkeypatch.setattr(drive, "CHECKPOINT_SECONDS", -1e9)
    assert polytempo("run", *TINY, "--updates", 4, "-o", tmp_path / "run").code == 0
    (tmp_path / "run" / CHECKPOINT).unlink()
    (tmp_path / "run" / "result.json").unlink()
    again = polytempo("run", *TINY, "--updates", 4, "-o", tmp_path / "run")
    assert "already holds a run" in again.error
    assert polytempo("run", "--resume", tmp_path / "run").code == 0
    assert summary(tmp_path / "run")["complete"]


def test_a_damaged_checkpoint_is_named(polytempo, finished, tmp_path):
    shutil.copytree(finished[0], tmp_path / "run")
    (tmp_path / "run" / PREVIOUS).unlink(missing_ok=True)
    (tmp_path / "run" / "checkpoint.safetensors").write_bytes(b"rubbish" * 100)
    error = polytempo("run", "--resume", tmp_path / "run").error
    assert "checkpoint.safetensors" in error
    assert "start a new run" in error


# -- resuming what is finished --------------------------------------------------------------------


@pytest.fixture
def done(polytempo, tmp_path) -> Path:
    assert polytempo("run", *TINY, "--updates", 25, "-o", tmp_path / "done").code == 0
    return tmp_path / "done"


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_more_rounds_extend_a_finished_run(done, polytempo, tmp_path):
    assert polytempo("run", "--resume", done, "--updates", 60).code == 0
    assert polytempo("run", *TINY, "--updates", 60, "-o", tmp_path / "whole").code == 0
    assert (done / "events.jsonl").read_bytes() == (tmp_path / "whole/events.jsonl").read_bytes()
    assert summary(done)["fingerprint"] == summary(tmp_path / "whole")["fingerprint"]
    assert summary(done)["arrivals"] == 60
    assert read_config(done / "config.toml") == read_config(tmp_path / "whole" / "config.toml")


@pytest.mark.parametrize(
    ("strategy", "short", "more"),
    [
        ("fedavg", 23, []),  # in the middle of a cohort, and between two evaluations
        ("fedasync", 25, []),  # an evaluation is due there anyway, but no adaptation
        ("fedbuff:buffer_size=3", 26, ["--diagnose", 7]),
        ("pace:omega=20", 27, ["--network", "4g"]),
        ("casa", 22, ["--dropout", "join:share=0.3,updates=10"]),
    ],
)
def test_a_run_that_was_extended_is_one_that_was_longer_from_the_beginning(
    strategy, short, more, polytempo, plotless, tmp_path, monkeypatch
):
    """What closes the shorter run, evaluation and adaptation, leaves no trace."""
    monkeypatch.setattr(drive, "CHECKPOINT_SECONDS", -1e9)  # whenever one might be made
    given = ("run", *TINY, "--check", "--strategy", strategy, *more)
    assert polytempo(*given, "--updates", short, "-o", tmp_path / "extended").code == 0
    assert int(history(tmp_path / "extended")[-1]["updates"]) == short
    assert polytempo("run", "--resume", tmp_path / "extended", "--updates", 60).code == 0
    assert polytempo(*given, "--updates", 60, "-o", tmp_path / "whole").code == 0
    same(tmp_path / "extended", tmp_path / "whole")


def test_more_rounds_keep_the_interval_of_evaluations(polytempo, tmp_path):
    given = ("--clients", 6, "--limit", 120, "--model", "linear", "--epochs", 1, "-o", tmp_path)
    assert polytempo("run", *given, "--updates", 80).code == 0  # evaluated every 2 updates
    assert polytempo("run", "--resume", tmp_path, "--updates", 120).code == 0
    assert [int(row["updates"]) for row in history(tmp_path)] == list(range(0, 121, 2))


def test_resuming_a_finished_run_changes_nothing(done, polytempo):
    before = contents(done)
    assert polytempo("run", "--resume", done).code == 0
    after = contents(done)
    for name in ("config.toml", "events.jsonl", "history.csv"):
        assert after[name] == before[name]


def test_fewer_rounds_than_were_done_are_refused(done, polytempo):
    before = contents(done)
    error = polytempo("run", "--resume", done, "--updates", 5).error
    assert "25" in error
    assert contents(done) == before


@pytest.mark.parametrize(
    "more", [("--lr", 0.1), ("--strategy", "fedavg"), ("--seed", 1), ("--check",), ("--out", "x")]
)
def test_resume_takes_no_other_settings(more, done, polytempo):
    before = contents(done)
    error = polytempo("run", "--resume", done, *more).error
    assert more[0] in error
    assert "--updates" in error
    assert contents(done) == before


def test_resume_takes_no_configuration_file(done, polytempo):
    assert "--config" in polytempo("run", "--resume", done, "-c", done / "config.toml").error


def test_resume_needs_the_folder_of_a_run(polytempo, tmp_path):
    for folder in (tmp_path, tmp_path / "nowhere"):
        error = polytempo("run", "--resume", folder).error
        assert str(folder) in error
        assert "the folder of a run" in error


def test_a_folder_that_holds_a_run_is_left_alone(done, polytempo):
    before = contents(done)
    error = polytempo("run", *TINY, "--updates", 5, "--out", done).error
    assert str(done) in error
    assert "--resume" in error
    assert contents(done) == before


def test_a_folder_with_other_files_in_it_can_be_used(polytempo, tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    assert polytempo("run", *TINY, "--updates", 3, "--out", tmp_path).code == 0
    assert (tmp_path / "notes.txt").read_text() == "mine"


def test_every_partial_file_is_cleaned_up(done):
    assert [path.name for path in done.iterdir() if "partial" in path.name] == []


def test_the_defaults_of_a_configuration_are_those_of_the_library(done):
    found = read_config(done / "config.toml")
    assert found["lr"] == RunConfig().lr
    assert os.access(done / "result.json", os.R_OK)


def test_a_run_does_not_go_on_with_other_data(polytempo, tmp_path, monkeypatch):
    def write(seed):
        random = np.random.default_rng(seed)
        x = random.normal(size=(60, 4)).astype(np.float32)
        np.savez(tmp_path / "m.npz", X=x, y=random.integers(0, 3, 60))

    write(0)
    monkeypatch.chdir(tmp_path)
    few = ("--clients", 4, "--partition", "iid", "--updates", 6)
    assert polytempo("run", "--data", "m.npz", *few, "-o", "run").code == 0
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert polytempo("run", "--resume", "../run", "--updates", 8).code == 0
    write(1)
    assert "data other than" in polytempo("run", "--resume", "../run", "--updates", 10).error


def test_a_strategy_object_can_be_used_again(small):
    strategy = pt.strategies.PACE()
    first = pt.simulate(small, strategy=strategy, updates=5, model="linear", adapt_epochs=0)
    before = {name: value.clone() for name, value in first.model(0).items()}
    pt.simulate(small, strategy=strategy, updates=9, model="linear", adapt_epochs=0, seed=3)
    assert all((first.model(0)[name] == value).all() for name, value in before.items())


@pytest.mark.parametrize("strategy", ["fedavg", "standalone"])
def test_where_nothing_is_overtaken_there_is_no_staleness(strategy, polytempo, tmp_path):
    given = ("--clients", 6, "--updates", 12, "--limit", 120, "--model", "linear")
    outcome = polytempo("run", "--strategy", strategy, *given, "-o", tmp_path / "run")
    assert outcome.code == 0 and "staleness" not in outcome.out
    found = json.loads((tmp_path / "run" / "result.json").read_text())
    assert found["staleness_mean"] is None and found["staleness"] == {}


def test_a_finished_run_is_drawn_again_as_pdf(polytempo, tmp_path, monkeypatch):
    folder = tmp_path / "run"
    given = ("--clients", 6, "--updates", 12, "--limit", 120, "--model", "linear")
    assert polytempo("run", "--strategy", "fedasync", *given, "-o", folder).code == 0
    before = json.loads((folder / "result.json").read_text())["fingerprint"]
    monkeypatch.setattr("polytempo.experiments.result_folder.can_plot", lambda: True)
    assert polytempo("run", "--resume", folder, "--plots", "pdf").code == 0
    assert {"accuracy.pdf", "staleness.pdf", "distribution.pdf"} <= {
        file.name for file in folder.iterdir()
    }
    assert json.loads((folder / "result.json").read_text())["fingerprint"] == before
