"""The contest between frameworks (benchmarks/), with made-up contestants."""

import importlib
import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"

# An honest contestant: writes down what it is asked to do, prints what frameworks print.
HONEST = """
import sys
sys.path.insert(0, {benchmarks!r})
import protocol
print("a framework says hello")
for trainings in protocol.blocks(lambda: 0.5):
    print("training", trainings, "clients")
    with open({diary!r}, "a") as diary:
        diary.write(f"{name} {{trainings}}\\n")
"""

# One whose child does the work, and has ended by the time it answers.
PARENT = """
import subprocess, sys
sys.path.insert(0, {benchmarks!r})
import protocol
burn = "import time\\nwhile time.process_time() < 0.5: pass"
for trainings in protocol.blocks(lambda: 0.5):
    subprocess.run([sys.executable, "-c", burn], check=True)
"""

# One that does not rest while others have their turn.
RESTLESS = """
import sys, threading
sys.path.insert(0, {benchmarks!r})
import protocol
def burn():
    while True: pass
threading.Thread(target=burn, daemon=True).start()
for trainings in protocol.blocks(lambda: 0.5): pass
"""


@pytest.fixture
def contest(monkeypatch):
    monkeypatch.syspath_prepend(BENCHMARKS)
    return importlib.import_module("contest")


@pytest.fixture
def peers(contest):
    return importlib.import_module("peers")


@pytest.fixture
def play(contest, tmp_path):
    """Start a contestant with this text."""
    players = []

    def start(name, text, **options):
        file = tmp_path / f"{name}.py"
        diary = str(tmp_path / "diary.txt")
        file.write_text(text.format(benchmarks=str(BENCHMARKS), name=name, diary=diary))
        command = [sys.executable, str(file)]
        players.append(contest.Player(name, command, tmp_path / f"{name}.log", **options))
        return players[-1]

    yield start
    for player in players:
        player.__exit__()


def test_contestants_take_turns_and_the_warm_up_does_not_count(contest, play, tmp_path):
    players = [play(name, HONEST) for name in ("plain", "ours", "theirs")]
    told = []
    blocks = contest.contest(players, turns=2, block=20, watch=told.append)
    done = (tmp_path / "diary.txt").read_text().split("\n")[:-1]
    order = ["plain", "ours", "theirs", "ours", "theirs", "plain"]
    assert done == [f"{name} 20" for name in ["plain", "ours", "theirs", *order]]
    assert [(block["turn"], block["name"]) for block in blocks] == [
        (place // 3, name) for place, name in enumerate(order)
    ]
    assert len(told) == 9 and told[-1] == "turn 2 of 2, plain"


def test_what_a_framework_prints_is_in_the_log_and_not_in_the_answers(play):
    player = play("chatty", HONEST)
    player.train(10)
    assert player.loss() == 0.5
    player.__exit__()
    assert player.process.returncode == 0
    assert player.log.read_text() == "a framework says hello\ntraining 10 clients\n"


def test_processor_time_includes_children_that_have_ended(play):
    spent = play("parent", PARENT).train(10)
    assert spent["cpu"] >= 0.45
    assert spent["wall"] >= 0.45


def test_processor_time_of_those_who_wait_is_told_apart(contest, play):
    players = [play("parent", PARENT), play("restless", RESTLESS)]
    parent, restless = contest.contest(players, turns=1, block=10)
    assert parent["cpu_of_others"] > 0.1
    assert restless["cpu_of_others"] < 0.1


def test_processor_time_includes_grandchildren_that_are_running(contest):
    burn = "import time\nwhile time.process_time() < 0.3: pass\nprint(flush=True)\ninput()"
    middle = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {burn!r}])"
    command = [sys.executable, "-c", middle]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe) as process:
        process.stdout.readline()
        assert contest.cpu_seconds(process.pid) >= 0.25
        process.stdin.write(b"\n")


@pytest.mark.parametrize(
    "text, complaint",
    [
        ("import sys; print('no memory', file=sys.stderr); sys.exit(3)", "exit code 3"),
        ("input(); print('fine', flush=True); input()", "'fine', which is no JSON object"),
        ("input(); print('7', flush=True); input()", "'7', which is no JSON object"),
        ("input(); print('{{\"done\": 5}}', flush=True); input()", "it answered {'done': 5}"),
        ("import time; time.sleep(600)", "no answer within 1 s"),
    ],
)
def test_a_contestant_that_fails_is_named_with_the_end_of_its_log(contest, play, text, complaint):
    player = play("clumsy", text, patience=1 if "1 s" in complaint else 60)
    if "exit code" in complaint:
        player.process.wait()  # the request finds nobody
        complaint = f"asked to 'go 10': it ended with {complaint}"
    with pytest.raises(contest.ContestError) as failure:
        player.train(10)
    assert str(failure.value).startswith("clumsy, ")
    assert complaint in str(failure.value)
    if "exit code" in complaint:
        assert str(failure.value).endswith("clumsy.log ends with\n    no memory")


def test_a_contestant_that_does_not_end_is_ended(play):
    player = play("stubborn", "import time; time.sleep(600)", patience=0.2)
    begin = time.monotonic()
    player.__exit__()
    assert player.process.returncode == -9
    assert time.monotonic() - begin < 30


def test_figures_are_medians_and_ratios_are_within_a_turn(contest):
    walls = {"plain": [10.0, 40.0, 20.0], "ours": [5.0, 4.0, 10.0]}
    blocks = [
        {"turn": turn, "name": name, "wall": wall, "cpu": 2 * wall}
        for name, turns in walls.items()
        for turn, wall in enumerate(turns)
    ]
    figures = contest.summary(blocks, 10)
    extremes = {"fastest": 1.0, "slowest": 4.0}
    assert figures["plain"] == {"wall": 2.0, "cpu": 4.0, "speedup": 1.0, **extremes}
    assert figures["ours"]["wall"] == 0.5
    assert figures["ours"]["speedup"] == 2.0  # of 2, 10 and 2; the ratio of the medians is 4


def test_without_the_reference_there_is_no_ratio(contest, peers):
    figures = contest.summary([{"turn": 0, "name": "ours", "wall": 2.0, "cpu": 3.0}], 10)
    assert "speedup" not in figures["ours"]
    who = {"title": "Polytempo", "setup": "2 workers", "versions": {"polytempo": "0.1"}}
    setting = {"batch": 64, "medians": figures, "losses": {"ours": 1.5}}
    last = peers.table({"ours": who}, setting).splitlines()[-1]
    assert last == "| Polytempo | 0.1 | 2 workers | 200.0 | 200.0 - 200.0 | 300.0 |  | 1.500 |"


def test_the_script_writes_results_and_tables(contest, peers, monkeypatch, tmp_path, capsys):
    """All of it but the installation and the frameworks."""
    here = tmp_path / "benchmarks"
    here.mkdir()
    text = HONEST.format(benchmarks=str(BENCHMARKS), name="x", diary=str(tmp_path / "diary.txt"))
    for name in ("plain", "polytempo"):
        (here / f"with_{name}.py").write_text(text)
    (here / "make_data.py").write_text("import os; print(os.environ['PEERS_DATA'])")
    monkeypatch.setattr(peers, "HERE", here)
    monkeypatch.setattr(peers, "install", lambda who, folder: Path(sys.executable))
    monkeypatch.delenv("POLYTEMPO_DATA", raising=False)
    out = tmp_path / "found.json"
    words = ["--work", str(tmp_path / "work"), "--only", "polytempo", "plain", "--turns", "2"]
    peers.main([*words, "--block", "10", "--batch", "64", "10", "--out", str(out)])
    found = json.loads(out.read_text())
    assert [setting["batch"] for setting in found["settings"]] == [64, 10]
    assert [len(setting["blocks"]) for setting in found["settings"]] == [4, 4]
    assert found["settings"][0]["losses"] == {"plain": 0.5, "polytempo": 0.5}
    assert found["contestants"]["plain"]["versions"].keys() == {"torch"}
    assert found["data"] == "made up"
    tables = out.with_suffix(".md").read_text()
    assert "**Batch 64**" in tables and "**Batch 10**" in tables
    assert tables.strip() in capsys.readouterr().out


@pytest.mark.parametrize(
    "words, complaint",
    [
        (["--block", "25"], "--block 25: a multiple of 10, the clients of a round"),
        (["--turns", "0"], "--turns 0: at least 1"),
        (["--threads", "0"], "--threads 0: at least 1"),
    ],
)
def test_half_a_round_no_turn_and_no_thread_are_refused(peers, tmp_path, capsys, words, complaint):
    with pytest.raises(SystemExit):
        peers.main(["--work", str(tmp_path), *words])
    assert complaint in capsys.readouterr().err


def test_contestants_are_free_of_this_shell_s_limits(peers, monkeypatch, tmp_path):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("PYTHONPATH", "somewhere")
    found = peers.surroundings(tmp_path, 10, threads=2)
    assert not {"OMP_NUM_THREADS", "PYTHONPATH"} & found.keys()
    assert found["PEERS_BATCH"] == "10" and found["PEERS_THREADS"] == "2"
    assert found["FLWR_TELEMETRY_ENABLED"] == "0"


def test_every_contestant_has_its_program(peers):
    programs = {path.name for path in BENCHMARKS.glob("with_*.py")}
    assert programs == {f"with_{name}.py" for name in peers.CONTESTANTS}


def test_the_picture_shows_the_fastest_of_each(contest, tmp_path):
    picture = importlib.import_module("picture")
    files = []
    for threads, wall in ((1, 0.4), (2, 0.3)):
        setting = {"batch": 64, "medians": {"plain": {"wall": wall}, "polytempo": {"wall": 0.02}}}
        titles = {"plain": {"title": "plain torch loop"}, "polytempo": {"title": "Polytempo"}}
        files.append(tmp_path / f"{threads}.json")
        files[-1].write_text(json.dumps({"contestants": titles, "settings": [setting]}))
    found = picture.fastest(json.loads(file.read_text()) for file in files)
    assert found == {64: {"plain torch loop": pytest.approx(300), "Polytempo": pytest.approx(20)}}
    picture.main([*map(str, files), "--out", str(tmp_path / "speed.png")])
    assert (tmp_path / "speed.png").read_bytes().startswith(b"\x89PNG")
