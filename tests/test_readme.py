"""What the README and the page of strategies show works as it stands there."""

import re
import sys
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console
from torch import nn

from polytempo.cli import main
from polytempo.strategies import STRATEGIES

ROOT = Path(__file__).parents[1]
README, STRATEGY = (
    (ROOT / page).read_text(encoding="utf8") for page in ("README.md", "docs/strategies.md")
)
[PYTHON], [MINE] = (
    re.findall(r"```python\n(.*?)```", page, re.DOTALL) for page in (README, STRATEGY)
)


def samples(seed: int) -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(seed)
    return random.normal(size=(40, 6)).astype(np.float32), random.integers(0, 3, 40)


def test_the_python_example_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (x_a, y_a), (x_b, y_b) = samples(0), samples(1)

    def network() -> nn.Module:
        return nn.Linear(6, 3)

    given = {"x_a": x_a, "y_a": y_a, "x_b": x_b, "y_b": y_b}
    names = given | {"MyNet": network, "my_net": network()}
    before = names["my_net"].weight.clone()
    exec(PYTHON, names)
    assert (tmp_path / "pace.png").read_bytes().startswith(b"\x89PNG")
    assert names["result"].summary["strategy"] == "fedasync"
    assert not (names["my_net"].weight == before).all()


def test_the_strategy_of_the_page_runs_from_the_command_line(tmp_path, monkeypatch, capsys):
    (tmp_path / "mine.py").write_text(MINE.replace("# mine.py\n", ""))
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    # The example is imported and registers itself: both are undone when the test ends.
    monkeypatch.setattr(STRATEGIES, "_known", {**STRATEGIES._known})
    monkeypatch.setitem(sys.modules, "mine", None)
    del sys.modules["mine"]
    [command] = re.findall(r"PYTHONPATH=\. polytempo (.*)", STRATEGY)
    small = ["--clients", "6", "--limit", "120", "--updates", "12", "--adapt-epochs", "1"]
    monkeypatch.setattr("polytempo.cli.console.output", Console(width=200))
    monkeypatch.setattr(sys, "argv", ["polytempo", *command.split(), *small])
    with pytest.raises(SystemExit) as ended:
        main()
    assert not ended.value.code
    assert "mine:Mine:mixing=0.3" in capsys.readouterr().out
    assert (tmp_path / "runs/own/report.html").exists()


def test_what_the_readme_points_to_is_there():
    for target in re.findall(r"\]\(([^)]+)\)", README):
        file = target.partition("#")[0]
        assert (ROOT / file).exists(), target


def test_the_page_of_strategies_has_them_all():
    named = set(re.findall(r"`([\w+-]+)`", STRATEGY))
    named |= {f"{name}-async" for name in named}  # "each personalised method above"
    assert not set(STRATEGIES) - named
