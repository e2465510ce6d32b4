"""The tutorial runs as it stands, and what it says of its results is so."""

import re
import sys
from pathlib import Path

import pytest
from safetensors.torch import load_file

from polytempo.cli import main
from polytempo.strategies import STRATEGIES

TUTORIAL = (Path(__file__).parents[1] / "docs" / "tutorial.md").read_text(encoding="utf8")
BLOCKS = re.findall(r"```python\n(.*?)```", TUTORIAL, re.DOTALL)
[STRATEGY] = [block for block in BLOCKS if block.startswith("# blend.py\n")]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The reader's folder, with the file that the tutorial has them save."""
    (tmp_path / "blend.py").write_text(STRATEGY)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    # The strategy is imported and registers itself: both are undone when the test ends.
    monkeypatch.setattr(STRATEGIES, "_known", {**STRATEGIES._known})
    monkeypatch.setitem(sys.modules, "blend", None)
    del sys.modules["blend"]
    return tmp_path


def test_the_python_of_the_tutorial_runs(folder):
    names = {}
    for block in BLOCKS:
        if block != STRATEGY:
            exec(block, names)
    scores = {row: found[0] for row, found in names["found"].results.items()}
    blend, pace, fedavg, alone = (scores[row] for row in scores)
    assert list(scores) == ["blend:Blend", "pace", "fedavg", "standalone"]
    assert fedavg.accuracy < 0.6 and fedavg.accuracy_adapted > fedavg.accuracy + 0.2
    assert blend.accuracy > fedavg.accuracy + 0.2
    assert abs(blend.accuracy - alone.accuracy) < 0.06
    assert pace.accuracy > max(blend.accuracy, alone.accuracy) + 0.05
    assert fedavg.history[-1]["updates"] == 240 and fedavg.history[-1]["version"] == 60
    result = names["result"]
    assert [client["name"] for client in result.clients] == [f"sensor {i}" for i in range(8)]
    assert (folder / "runs" / "blend" / "result.json").exists()
    saved, used = load_file(folder / "sensor5.safetensors"), names["net"].state_dict()
    assert saved.keys() == used.keys() and all((saved[key] == used[key]).all() for key in saved)


def test_the_commands_of_the_tutorial_run(folder, monkeypatch, capsys):
    commands = re.findall(r"PYTHONPATH=\. polytempo (.*?)(?: +#.*)?\n", TUTORIAL)
    assert [command.split()[0] for command in commands] == ["compare", "run"]
    small = ["--clients", "6", "--limit", "120", "--updates", "12", "--adapt-epochs", "1"]
    for command in commands:
        monkeypatch.setattr(sys, "argv", ["polytempo", *command.split(), *small])
        with pytest.raises(SystemExit) as ended:
            main()
        assert not ended.value.code, capsys.readouterr()
    assert (folder / "runs" / "own" / "report.html").exists()
