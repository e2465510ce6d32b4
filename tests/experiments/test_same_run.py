"""A folder holds one run: nobody else writes to it, a full disk loses nothing of it, and it is
resumed with the settings and the data that it was made with, from the command line or Python."""

import json
import re
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import polytempo as pt
from polytempo import PolytempoError, Strategy
from polytempo.experiments import compare as compare_module
from polytempo.experiments import run as run_module
from polytempo.experiments.config import difference, make_config, read_config
from polytempo.files import Claim
from polytempo.storage import load_state

TINY = (
    *("--clients", 6, "--limit", 120, "--model", "linear", "--epochs", 1),
    *("--eval-every", 25, "--adapt-epochs", 1, "--events"),
)
CHECKPOINT = "checkpoint.safetensors"


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def changed(folder: Path, **settings: str) -> None:
    """Edit config.toml by hand."""
    lines = (folder / "config.toml").read_text().splitlines()
    kept = [line for line in lines if line.partition(" ")[0] not in settings]
    new = [f"{name} = {value}" for name, value in settings.items() if value]
    (folder / "config.toml").write_text("\n".join([*new, *kept]) + "\n")


# -- one at a time --------------------------------------------------------------------------------


def test_a_folder_that_a_run_writes_to_is_left_alone(polytempo, tmp_path):
    with Claim(tmp_path / "run"):
        said = polytempo("run", *TINY, "--updates", 4, "-o", tmp_path / "run").error
        assert f"{tmp_path / 'run'} is being written by another run" in said
        assert "--out" in said
        assert [path.name for path in (tmp_path / "run").iterdir()] == [".lock"]
    assert polytempo("run", *TINY, "--updates", 4, "-o", tmp_path / "run").code == 0
    before = contents(tmp_path / "run")
    with Claim(tmp_path / "run"):
        said = polytempo("run", "--resume", tmp_path / "run", "--updates", 8).error
        assert "is being written by another run" in said
    with Claim(tmp_path / "run"), pytest.raises(PolytempoError, match="by another run"):
        pt.simulate(pt.Federation.load("digits", clients=4), updates=4, out=tmp_path / "run")
    assert contents(tmp_path / "run") == before


RACE = """
import sys
from polytempo import cli
cli.main()
"""


def test_of_two_runs_that_begin_at_once_one_is_carried_out(tmp_path):
    command = [sys.executable, "-c", RACE, "run", *map(str, TINY), "--updates", "300"]
    command += ["--out", str(tmp_path / "run")]
    both = [subprocess.Popen(command, stderr=subprocess.PIPE, text=True) for _ in range(2)]
    said = [process.communicate(timeout=120)[1] for process in both]
    codes = [process.returncode for process in both]
    assert sorted(codes) == [0, 2], said
    refused = " ".join(said[codes.index(2)].split())
    assert re.search(r"/run (is being written by another run|already holds a run)", refused)
    events = (tmp_path / "run" / "events.jsonl").read_text().splitlines()
    assert [json.loads(line)["n"] for line in events] == list(range(len(events)))


def test_runs_without_out_that_begin_at_once_get_a_folder_each(tmp_path):
    command = [sys.executable, "-c", RACE, "run", *map(str, TINY), "--updates", "30"]
    both = [subprocess.Popen(command, cwd=tmp_path) for _ in range(2)]
    assert [process.wait(120) for process in both] == [0, 0]
    folders = sorted((tmp_path / "runs").iterdir())
    assert len(folders) == 2
    assert all((folder / "result.json").exists() for folder in folders)


def test_a_mistake_leaves_no_folder(polytempo, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert "concurrency" in polytempo("run", *TINY, "--concurrency", 100).error
    assert not (tmp_path / "runs").exists()
    assert "concurrency" in polytempo("run", *TINY, "--concurrency", 100, "-o", "mine").error
    assert not (tmp_path / "mine").exists()


# -- a full disk ----------------------------------------------------------------------------------

FULL = """
import resource, sys
from polytempo import cli
from polytempo.experiments import drive
drive.CHECKPOINT_SECONDS = -1e9  # at every event
resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv.pop(1)),) * 2)
cli.main()
"""


def test_a_run_that_fills_the_disk_stops_in_one_line_and_resumes(polytempo, tmp_path):
    """A limit on the size of files stands for it: the event log is what grows."""
    arguments = ("run", *TINY, "--updates", 300)
    command = [sys.executable, "-c", FULL, "35000", *map(str, arguments)]
    command += ["--out", str(tmp_path / "full")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200)
    assert done.returncode == 2, done.stderr
    [line] = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert "could not be written: " in line and "File too large" in line
    assert "intact" in line and "resume" in line
    assert "Traceback" not in done.stderr
    assert not list((tmp_path / "full").glob("*.partial"))
    assert 0 < load_state(tmp_path / "full" / CHECKPOINT)["server"]["updates"] < 300
    assert polytempo("run", "--resume", tmp_path / "full").code == 0
    assert polytempo(*arguments, "-o", tmp_path / "whole").code == 0
    for name in ("events.jsonl", "history.csv"):
        assert (tmp_path / "full" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()


# -- the same settings ----------------------------------------------------------------------------


@pytest.fixture
def halved(polytempo, interrupt, tmp_path):
    interrupt(30)
    folder = tmp_path / "halved"
    assert polytempo("run", *TINY, "--updates", 40, "-o", folder).code == 130
    return folder


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("lr", "0.02", "lr = 0.01, but now it is 0.02"),
        ("strategy", '"fedavg"', "strategy = "),
        ("seed", "1", "seed = 0, but now it is 1"),
        ("adapt_epochs", "2", "adapt_epochs = 1, but now it is 2"),
        ("limit", "", "limit = 120, but now it is None"),
    ],
)
def test_a_setting_that_was_edited_is_named(polytempo, halved, name, value, words):
    changed(halved, **{name: value})
    before = contents(halved)
    if name == "strategy":  # a table: the text has to go, too
        text = (halved / "config.toml").read_text()
        head, _, _ = text.partition("[strategy]")
        (halved / "config.toml").write_text(head)
        before = contents(halved)
    said = polytempo("run", "--resume", halved).error
    assert f"the checkpoint was made with {words}" in said
    assert f"change {name} back" in said
    assert contents(halved) == before


def test_what_the_rest_of_the_run_does_not_depend_on_may_change(polytempo, interrupt, tmp_path):
    interrupt(30)
    halved = tmp_path / "halved"
    assert polytempo("run", *TINY, "--updates", 40, "--check", "-o", halved).code == 130
    changed(halved, updates="60", workers="2", check="false", backend='"auto"')
    assert polytempo("run", "--resume", halved).code == 0
    assert polytempo("run", *TINY, "--updates", 60, "-o", tmp_path / "whole").code == 0
    for name in ("events.jsonl", "history.csv"):
        assert (halved / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()


def test_a_checker_that_missed_the_beginning_is_refused(polytempo, halved):
    changed(halved, check="true")
    before = contents(halved)
    said = polytempo("run", "--resume", halved).error
    assert "made without the checker" in said and "resume without it" in said
    assert contents(halved) == before


def test_is_this_the_same_run():
    kept = make_config(
        {"clients": 20, "concurrency": 4, "refill": "idle", "eval_every": 10}
    ).settings()
    assert difference(make_config({}), kept) is None  # what was left open was filled in
    assert difference(make_config({"workers": 3}), kept) is None
    assert difference(make_config({"clients": 21}), kept) == "clients"
    assert difference(make_config({"limit": 5}), kept) == "limit"
    assert difference(make_config({}), {**kept, "until": 5.0}) == "until"
    assert difference(make_config({}), {**kept, "until": 5.0}, ["until"]) is None
    alone = make_config({"strategy": "standalone", "concurrency": 5})
    assert difference(alone, {**alone.settings(), "concurrency": 20}) is None  # it takes all
    alone = make_config({"strategy": "standalone", "concurrency": 5, "refill": "idle"})
    assert difference(alone, {**alone.settings(), "concurrency": 20}) == "concurrency"


def test_a_comparison_that_is_there_is_read_without_building_a_simulator(
    polytempo, tmp_path, monkeypatch
):
    arguments = ("compare", "fedavg", "standalone", *TINY, "--updates", 8, "-o", tmp_path)
    assert polytempo(*arguments).code == 0

    def build(*_, **__):
        raise AssertionError("built a simulator")

    monkeypatch.setattr(run_module, "make_simulator", build)
    assert polytempo(*arguments).code == 0
    said = polytempo(*arguments, "--concurrency", 5).error
    assert "concurrency = 4, but now it is 5" in said
    assert "make_simulator" not in vars(compare_module)


# -- from Python ----------------------------------------------------------------------------------


class Half(Strategy):
    """Of the user's own, and of a module that no other process could import."""

    state = ("model",)

    def setup(self, context):
        super().setup(context)
        self.model = context.initial

    def model_for(self, client):
        return self.model

    def fold(self, update, staleness):
        self.model = torch.lerp(self.model, update.vector, 0.5)
        return True


def given(shift: float = 0.0) -> pt.Federation:
    draws = np.random.default_rng(0)
    parts = [(draws.normal(size=(30, 5)) + shift, draws.integers(3, size=30)) for _ in range(6)]
    return pt.Federation.from_arrays(parts, seed=0)


def local(strategy: str) -> object:
    return Half() if strategy == "half" else strategy


@pytest.mark.parametrize("strategy", ["pace:omega=20", "standalone", "half", "p2p"])
def test_a_run_from_python_resumes_bit_by_bit(tmp_path, strategy):
    settings = {"model": "linear", "updates": 60, "events": True}
    settings |= {} if strategy == "p2p" else {"epochs": 1}
    whole = pt.simulate(given(), strategy=local(strategy), out=tmp_path / "whole", **settings)
    stopped = tmp_path / "stopped"
    calls = iter(range(1000))

    class Interrupt(pt.Callback):
        def event(self, event):
            if next(calls) == 40:
                signal.raise_signal(signal.SIGINT)

    half = pt.simulate(
        given(), strategy=local(strategy), out=stopped, callbacks=[Interrupt()], **settings
    )
    assert not half.summary["complete"]
    with pytest.raises(PolytempoError, match="already holds a run"):
        pt.simulate(given(), strategy=local(strategy), out=stopped, **settings)
    again = pt.simulate(given(), strategy=local(strategy), out=stopped, resume=True, **settings)
    assert again.summary["complete"]
    assert again.summary["fingerprint"] == whole.summary["fingerprint"]
    for name in ("events.jsonl", "history.csv"):
        assert (stopped / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()
    for client in range(6):
        ours, theirs = again.model(client), whole.model(client)
        assert all(torch.equal(ours[key], theirs[key]) for key in theirs)


def test_a_run_from_python_may_become_longer(tmp_path):
    settings = {"model": "linear", "strategy": "fedasync", "epochs": 1, "out": tmp_path / "run"}
    pt.simulate(given(), updates=40, **settings)
    longer = pt.simulate(given(), updates=80, resume=True, **settings)
    settings |= {"out": tmp_path / "whole", "eval_every": 1}  # as with 40 updates
    whole = pt.simulate(given(), updates=80, resume=True, **settings)  # there is nothing yet
    assert longer.summary["arrivals"] == 80
    assert longer.summary["fingerprint"] == whole.summary["fingerprint"]
    ours, theirs = longer.model(0), whole.model(0)
    assert all(torch.equal(ours[key], theirs[key]) for key in theirs)


def test_from_python_other_data_and_other_settings_are_noticed(tmp_path):
    settings = {"model": "linear", "strategy": "fedasync", "updates": 20, "out": tmp_path / "run"}
    pt.simulate(given(), **settings)
    settings |= {"updates": 40, "resume": True}
    with pytest.raises(PolytempoError, match="data other than"):
        pt.simulate(given(shift=1.0), **settings)
    with pytest.raises(PolytempoError, match=r"'momentum': 0\.9}, but now it is .*0\.5}"):
        pt.simulate(given(), momentum=0.5, **settings)
    with pytest.raises(PolytempoError, match="strategy = "):
        pt.simulate(given(), **{**settings, "strategy": "fedavg"})
    assert pt.simulate(given(), **settings).summary["arrivals"] == 40


def test_from_python_a_folder_is_needed_to_resume():
    with pytest.raises(PolytempoError, match=r"resume=True needs out=FOLDER"):
        pt.simulate(given(), updates=4, resume=True)


def test_the_command_says_how_to_resume_a_run_from_python(polytempo, tmp_path):
    pt.simulate(given(), model="linear", updates=4, out=tmp_path / "run")
    said = polytempo("run", "--resume", tmp_path / "run").error
    assert "polytempo.resume(FOLDER, federation)" in said
    assert read_config(tmp_path / "run" / "config.toml")["concurrency"] == 4
