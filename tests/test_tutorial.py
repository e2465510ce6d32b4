"""The tutorials run as they stand, and what they say of their results is so.

A page is followed as a reader does, in a folder of its own: a block that begins with `# name.py` is
saved, other Python is run in one namespace, and so are commands. Blocks marked `text` are for
reading.
"""

import io
import re
import sys
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

import polytempo as pt
from polytempo.cli import main
from polytempo.experiments import compare, result_folder
from polytempo.strategies import STRATEGIES

DOCS = Path(__file__).parents[1] / "docs"
SMALL = "--clients 6 --limit 120 --updates 12 --adapt-epochs 1"  # for commands with the defaults


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The reader's folder. What a page imports and registers is undone when the test ends."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(STRATEGIES, "_known", {**STRATEGIES._known})
    before = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - before:
        if str(tmp_path) in str(getattr(sys.modules[name], "__file__", "")):
            del sys.modules[name]


@pytest.fixture
def plotless(monkeypatch):
    """Plots take longer than the runs; one page draws them, the others do without."""
    monkeypatch.setattr(result_folder, "can_plot", lambda: False)
    monkeypatch.setattr(compare, "can_plot", lambda: False)


def command(line: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """What the command prints; it must succeed."""
    words = re.sub(r" +#.*", "", line).removeprefix("PYTHONPATH=. ").split()
    monkeypatch.setattr(sys, "argv", words)
    with redirect_stdout(io.StringIO()) as out, pytest.raises(SystemExit) as ended:
        main()
    assert not ended.value.code, line
    return out.getvalue()


def follow(page: str, monkeypatch: pytest.MonkeyPatch, more: str = "") -> dict[str, Any]:
    """Do all that a page says, its commands with `more` options. Returns the names of its Python,
    and under `printed` what each command has printed."""
    names: dict[str, Any] = {"printed": {}}
    text = (DOCS / page).read_text(encoding="utf8")
    for language, block in re.findall(r"(?m)^```(\w*)\n(.*?)^```$", text, re.DOTALL):
        if language == "python" and (name := re.match(r"# (\w+\.py)\n", block)):
            Path(name[1]).write_text(block)
        elif language == "python":
            exec(block, names)
        elif not language:
            for line in block.splitlines():
                names["printed"][line] = command(f"{line.partition(' #')[0]} {more}", monkeypatch)
    return names


def test_a_first_run(folder, monkeypatch):
    names = follow("tutorials/first-run.md", monkeypatch)
    assert (folder / "runs" / "first" / "report.html").exists()
    [table] = names["printed"].values()
    assert all(word in table for word in ("pace", "fedavg", "standalone", "handed", "adapted"))
    found = {name: pt.load(f"runs/first/{name}/seed0") for name in ("pace", "fedavg", "standalone")}
    assert found["fedavg"].simulated_time > 2 * found["pace"].simulated_time
    assert abs(found["fedavg"].accuracy - found["pace"].accuracy) < 0.03
    for name in ("pace", "fedavg"):
        assert found[name].accuracy > found["standalone"].accuracy + 0.04
    assert found["fedavg"].history[-1]["version"] == 50


def test_own_data_model_and_strategy(folder, monkeypatch):
    names = follow("tutorial.md", monkeypatch, SMALL)
    assert [line.split()[2] for line in names["printed"]] == ["compare", "run"]
    assert (folder / "runs" / "own" / "report.html").exists()
    scores = {row: found[0] for row, found in names["found"].results.items()}
    blend, pace, fedavg, alone = (scores[row] for row in scores)
    assert list(scores) == ["blend:Blend", "pace", "fedavg", "standalone"]
    assert fedavg.accuracy < 0.6 and fedavg.accuracy_adapted > fedavg.accuracy + 0.2
    assert blend.accuracy > fedavg.accuracy + 0.2
    assert abs(blend.accuracy - alone.accuracy) < 0.06
    assert pace.accuracy > max(blend.accuracy, alone.accuracy) + 0.05
    assert fedavg.history[-1]["updates"] == 240 and fedavg.history[-1]["version"] == 60
    clients = names["result"].clients
    assert [client["name"] for client in clients] == [f"sensor {i}" for i in range(8)]
    assert (folder / "runs" / "blend" / "result.json").exists()
    saved, used = load_file(folder / "sensor5.safetensors"), names["net"].state_dict()
    assert saved.keys() == used.keys() and all((saved[key] == used[key]).all() for key in saved)


def test_personalised_methods(folder, plotless, monkeypatch):
    names = follow("tutorials/personalised.md", monkeypatch)
    rows = [row["strategy"] for row in names["found"].table()]
    assert "fedavg + fine-tuning" in rows
    scores = {row: found[0].accuracy for row, found in names["found"].results.items()}
    fedavg, ditto, alone = (scores.pop(name) for name in ("fedavg", "ditto", "standalone"))
    assert set(scores) == {"fedper", "pace", "casa"}
    assert min(scores.values()) > alone - 0.04 > fedavg + 0.4 and fedavg < ditto < alone - 0.3
    assert (names["graph"] * names["same"]).sum(axis=1).mean() > 0.9
    assert names["head"].accuracy > names["shared"].accuracy + 0.1
    assert names["head"].messages["upload_bytes"] < names["shared"].messages["upload_bytes"]


def test_from_the_simulator_to_a_fleet(folder, monkeypatch):
    pytest.importorskip("grpc")
    names = follow("tutorials/deploy.md", monkeypatch)
    assert names["fleet"]["arrivals"] == 20
    fleet, same, other = names["printed"].values()
    assert all(word in fleet for word in ("client-0", "client-1", "fleet", "simulator"))
    assert same.startswith("the same, bit for bit")
    assert "pace, recorded" in other and "fedbuff, simulated" in other


def test_reproduce_a_run_and_a_paper(folder, plotless, monkeypatch):
    names = follow("tutorials/reproduce.md", monkeypatch)
    *_, first, second = names["printed"].values()
    assert re.search(r"\bPACE +\d", first) and re.search(r"FedBuff +- ", first)
    assert re.search(r"\bPACE +\d", second) and re.search(r"FedBuff +\d", second)
    places = folder / "runs" / "reproduce" / "quick" / "pace"
    assert list(places.rglob("table.md")) and list(places.rglob("report.html"))
