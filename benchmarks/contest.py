"""The coordinator's side of the protocol: blocks of work in turns, measured from outside.

Every contestant is a process that waits for lines (see `protocol.py`). What a block costs is
measured here, for all in the same way: wall time from the request to the answer, and the processor
time that the contestant's process and all its descendants have used meanwhile (read from /proc, so
this needs Linux).
"""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from statistics import median
from typing import Any

REFERENCE = "plain"  # the contestant that others are compared with


class ContestError(Exception):
    """A contestant failed; the message says how, and where to look."""


class Player:
    """A contestant's process, from start to end. What it prints goes to the file `log`."""

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        log: Path,
        env: Mapping[str, str] | None = None,
        patience: float = 1800,
    ) -> None:
        self.name, self.log, self.patience = name, log, patience
        with log.open("w") as errors:
            self.process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                env=env,
                cwd=log.parent,
                start_new_session=True,
            )
        assert self.process.stdin is not None and self.process.stdout is not None
        self._to, self._from = self.process.stdin, self.process.stdout

    def __enter__(self) -> Player:
        return self

    def __exit__(self, *error: object) -> None:
        with suppress(BrokenPipeError):  # it has ended already
            self._to.close()
        try:
            self.process.wait(min(60, self.patience))
        except subprocess.TimeoutExpired:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
        self._from.close()

    def train(self, trainings: int) -> dict[str, float]:
        """Let it do so many client trainings; the seconds that they take."""
        used, begin = cpu_seconds(self.process.pid), time.perf_counter()
        answer = self._ask(f"go {trainings}")
        wall, used = time.perf_counter() - begin, cpu_seconds(self.process.pid) - used
        if answer != {"done": trainings}:
            raise self._failed(f"go {trainings}", f"it answered {answer}")
        return {"wall": wall, "cpu": used}

    def loss(self) -> float:
        """Of its global model."""
        return float(self._ask("loss")["loss"])

    def _ask(self, request: str) -> dict[str, Any]:
        with suppress(BrokenPipeError):  # it has ended: there will be no answer
            self._to.write(request + "\n")
            self._to.flush()
        ready, _, _ = select.select([self._from], [], [], self.patience)
        if not ready:
            raise self._failed(request, f"no answer within {self.patience:g} s")
        line = self._from.readline()
        if not line:
            raise self._failed(request, f"it ended with exit code {self.process.wait()}")
        try:
            answer = json.loads(line)
        except ValueError:
            answer = None
        if not isinstance(answer, dict):
            raise self._failed(request, f"it answered {line.strip()!r}, which is no JSON object")
        return answer

    def _failed(self, request: str, why: str) -> ContestError:
        last = self.log.read_text(errors="replace").splitlines()[-8:]
        end = "".join(f"\n    {line}" for line in last)
        return ContestError(f"{self.name}, asked to {request!r}: {why}; {self.log} ends with{end}")


def cpu_seconds(root: int) -> float:
    """Processor time so far of a process and all its descendants, ended ones included."""
    children: dict[int, list[int]] = {}
    ticks: dict[int, int] = {}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            stat = (entry / "stat").read_text()
        except (FileNotFoundError, ProcessLookupError):
            continue  # it has just ended: its parent has its time
        fields = stat.rpartition(")")[2].split()  # what follows the name, which may hold anything
        pid, parent = int(entry.name), int(fields[1])
        children.setdefault(parent, []).append(pid)
        ticks[pid] = sum(map(int, fields[11:15]))  # user and system; those of ended children
    total, left = 0, [root]
    while left:
        pid = left.pop()
        total += ticks.get(pid, 0)
        left += children.get(pid, [])
    return total / os.sysconf("SC_CLK_TCK")


def contest(
    players: Sequence[Player],
    turns: int,
    block: int,
    watch: Callable[[str], None] = lambda now: None,
) -> list[dict[str, Any]]:
    """In each turn, every player does a block of trainings while the others wait. Who comes first
    changes from turn to turn. The first block of each is a warm-up and does not count."""
    for player in players:
        watch(f"warm-up of {player.name}")
        player.train(block)
    found = []
    for turn in range(turns):
        first = turn % len(players)
        for player in [*players[first:], *players[:first]]:
            watch(f"turn {turn + 1} of {turns}, {player.name}")
            others = [other.process.pid for other in players if other is not player]
            before = sum(map(cpu_seconds, others))
            spent = player.train(block)
            waiting = sum(map(cpu_seconds, others)) - before
            found.append({"turn": turn, "name": player.name, **spent, "cpu_of_others": waiting})
    return found


def summary(blocks: Iterable[Mapping[str, Any]], size: int) -> dict[str, dict[str, float]]:
    """By contestant: seconds per client training (median over the turns, and extremes), and how
    many times as fast it is as the reference (median over the turns of the ratio within a turn)."""
    turns: dict[str, dict[int, Mapping[str, Any]]] = {}
    for block in blocks:
        turns.setdefault(block["name"], {})[block["turn"]] = block
    figures = {}
    for name, mine in turns.items():
        walls = [block["wall"] / size for block in mine.values()]
        figures[name] = {
            "wall": median(walls),
            "fastest": min(walls),
            "slowest": max(walls),
            "cpu": median(block["cpu"] / size for block in mine.values()),
        }
        if REFERENCE in turns:
            figures[name]["speedup"] = median(
                turns[REFERENCE][turn]["wall"] / block["wall"] for turn, block in mine.items()
            )
    return figures
