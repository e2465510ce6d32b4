"""The command `polytempo`, called in this process: fast, and with what it says on each stream."""

import io
import json
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from polytempo import cli
from polytempo.core.events import Event
from polytempo.experiments import compare, jobs, progress, result_folder, sweep
from polytempo.experiments.callbacks import Callback


def strict_json(text: str) -> Any:
    """JSON as machines read it: NaN and Infinity are none."""

    def refuse(constant: str) -> None:
        raise ValueError(f"{constant} is no JSON")

    return json.loads(text, parse_constant=refuse)


@dataclass(frozen=True)
class Outcome:
    """What a call of the command left on the terminal."""

    code: int
    out: str
    err: str

    @property
    def error(self) -> str:
        """The one line that a mistake of the user's must come to."""
        assert self.code == 2, f"exit code {self.code}: {self.err}{self.out}"
        assert "Traceback" not in self.err
        assert self.out == ""
        lines = [line for line in self.err.splitlines() if line.startswith("error: ")]
        assert len(lines) == 1, self.err
        assert self.err.endswith(lines[0] + "\n"), "the error is the last line"
        return lines[0].removeprefix("error: ")

    @property
    def json(self) -> Any:
        """The whole of stdout as JSON."""
        assert self.code == 0, self.err
        return strict_json(self.out)


Command = Callable[..., Outcome]


def _command(*arguments: object) -> Outcome:
    out, err, before = io.StringIO(), io.StringIO(), sys.argv
    sys.argv = ["polytempo", *map(str, arguments)]
    code: Any = 0
    try:
        with redirect_stdout(out), redirect_stderr(err):
            cli.main()
    except SystemExit as stop:
        code = stop.code or 0
    finally:
        sys.argv = before
    return Outcome(int(code), out.getvalue(), err.getvalue())


@pytest.fixture(scope="session")
def polytempo() -> Command:
    """`polytempo("run", "--updates", 12)`, with an `Outcome`. A traceback fails the test."""
    return _command


@pytest.fixture(autouse=True)
def plotless(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plots take longer than the runs here: only the folders of the fixtures below have them."""
    monkeypatch.setattr(result_folder, "can_plot", lambda: False)
    monkeypatch.setattr(compare, "can_plot", lambda: False)
    monkeypatch.delenv("POLYTEMPO_DATA", raising=False)


@pytest.fixture(scope="session")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Outcome]:
    """The folder of a run of PACE with everything in it, and what it printed. To be read only."""
    folder = tmp_path_factory.mktemp("finished") / "run"
    given = ("--clients", 6, "--updates", 12, "--limit", 300, "--events", "--check")
    return folder, _command("run", *given, "--out", folder)


@pytest.fixture
def interrupt() -> Iterator[Callable[..., None]]:
    """`interrupt(n)` makes the next run receive a real SIGINT at its n-th event; `n` may also be a
    function that says of an event whether it is the one."""
    usual = jobs.Reporting

    def arm(at: int | Callable[[Event], bool], number: int = signal.SIGINT) -> None:
        class Interrupting(Callback):
            def __init__(self, report: object) -> None:
                pass

            def event(self, event: Event) -> None:
                if at(event) if callable(at) else event.n == at:
                    disarm()
                    signal.raise_signal(number)

        for module in (jobs, progress, sweep):
            module.Reporting = Interrupting

    def disarm() -> None:
        for module in (jobs, progress, sweep):
            module.Reporting = usual

    yield arm
    disarm()
