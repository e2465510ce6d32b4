"""Who is there in the simulated world, when, and which updates get lost or come late."""

from __future__ import annotations

import csv
import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Annotated, Literal

import numpy as np
from pydantic import Field

from polytempo.core.errors import PolytempoError
from polytempo.core.registry import Options, Registry
from polytempo.core.rng import rng

Fraction = Annotated[float, Field(ge=0, le=1)]


@dataclass(frozen=True)
class Change:
    """From `time` on the client is there, or is not; `latency` replaces its training time."""

    time: float
    client: int
    available: bool
    latency: float | None = None
    for_good: bool = False  # it leaves in the middle of its training and never comes back
    version: int | None = None  # not at `time`, but at this version of the server's model
    updates: int | None = None  # not at `time`, but when this many updates are folded

    @property
    def timed(self) -> bool:
        return self.version is None and self.updates is None


class Dropout(Options):
    """Base: everybody is always there and nothing is lost."""

    def fate(self, stream: np.random.Generator) -> Literal["arrives", "lost"] | float:
        """What becomes of one update: it arrives, is lost, or arrives later by this factor."""
        return "arrives"

    def changes(self, clients: int, seed: int) -> list[Change]:
        """When clients leave and return."""
        return []

    def quorum(self) -> int:
        """Clients that must be there before the server begins."""
        return 1


DROPOUTS: Registry[Dropout] = Registry("dropout model", Dropout)


@DROPOUTS.register("none")
class NoDropout(Dropout):
    """Everybody is always there and nothing is lost."""


@DROPOUTS.register("delay")
class Delay(Dropout):
    """With `probability`, a training takes `factor` times as long (the device was busy or away)."""

    probability: Fraction = 0.1
    factor: Annotated[float, Field(ge=1)] = 2.0

    def fate(self, stream: np.random.Generator) -> Literal["arrives", "lost"] | float:
        return self.factor if stream.random() < self.probability else "arrives"


@DROPOUTS.register("drop")
class Drop(Dropout):
    """With `probability`, an update is lost; the server notices when it should have arrived."""

    probability: Annotated[float, Field(ge=0, lt=1)] = 0.1

    def fate(self, stream: np.random.Generator) -> Literal["arrives", "lost"] | float:
        return "lost" if stream.random() < self.probability else "arrives"


@DROPOUTS.register("leave")
class Leave(Dropout):
    """A `share` of the clients, chosen at random, vanishes for good: at simulated time `at`, or
    when the server has changed its model `version` times, however long that takes."""

    at: Annotated[float, Field(ge=0)] | None = None
    version: Annotated[int, Field(ge=1)] | None = None
    share: Fraction = 0.3

    def __post_init__(self) -> None:
        if (self.at is None) == (self.version is None):
            raise PolytempoError(
                f"leave needs one of at (a time) and version, got at={self.at}, "
                f"version={self.version}"
            )

    def changes(self, clients: int, seed: int) -> list[Change]:
        gone = rng(seed, "dropout").permutation(clients)[: round(self.share * clients)]
        at = math.inf if self.at is None else self.at
        return [
            Change(at, int(client), False, for_good=True, version=self.version)
            for client in sorted(gone)
        ]


@DROPOUTS.register("join")
class Join(Dropout):
    """Newcomers: a `share` of the clients, chosen at random, is not there at first, and joins at
    simulated time `at`, or when the server has folded so many `updates`."""

    at: Annotated[float, Field(gt=0)] | None = None
    updates: Annotated[int, Field(ge=1)] | None = None
    share: Annotated[float, Field(ge=0, lt=1)] = 0.2

    def __post_init__(self) -> None:
        if (self.at is None) == (self.updates is None):
            raise PolytempoError(
                f"join needs one of at (a time) and updates, got at={self.at}, "
                f"updates={self.updates}"
            )

    def changes(self, clients: int, seed: int) -> list[Change]:
        late = min(round(self.share * clients), clients - 1)  # somebody must begin
        chosen = sorted(int(c) for c in rng(seed, "dropout").permutation(clients)[:late])
        if self.at is None:
            return [Change(math.inf, client, True, updates=self.updates) for client in chosen]
        return [
            *(Change(0.0, client, False) for client in chosen),
            *(Change(self.at, client, True) for client in chosen),
        ]


@DROPOUTS.register("trace")
class Trace(Dropout):
    """Availability from a CSV file with the columns `client,time,available` and, if wanted,
    `latency`: the seconds that a training lasts from then on (empty: the device model's).

    A client that becomes unavailable while it trains continues, but its upload waits until it is
    available again (forever, if it never is). Clients not named in the file are always there. The
    server begins once `wait_for` clients are there.
    """

    path: str
    wait_for: Annotated[int, Field(ge=1)] = 1

    def quorum(self) -> int:
        return self.wait_for

    @cached_property
    def rows(self) -> list[Change]:
        try:
            with Path(self.path).open(newline="", encoding="utf-8-sig") as file:
                reader = csv.DictReader(file)
                missing = {"client", "time", "available"} - set(reader.fieldnames or ())
                if missing:
                    raise PolytempoError(
                        f"trace {self.path}: no column {', '.join(sorted(missing))}; "
                        "expected: client,time,available and optionally latency"
                    )
                return [self._read(reader.line_num, row) for row in reader]
        except (OSError, UnicodeDecodeError, csv.Error) as error:
            why = error.strerror if isinstance(error, OSError) else error
            raise PolytempoError(f"trace {self.path} cannot be read: {why}") from error

    def _read(self, line: int, row: dict[str, str]) -> Change:
        try:
            available = {"1": True, "true": True, "0": False, "false": False}[
                row["available"].strip().lower()
            ]
            given = (row.get("latency") or "").strip()
            latency = float(given) if given else None
            time = float(row["time"])
            if not math.isfinite(time) or not (latency is None or 0 < latency < math.inf):
                raise ValueError("no such time")
            return Change(time, int(row["client"]), available, latency)
        except (KeyError, ValueError, AttributeError, TypeError) as error:
            raise PolytempoError(
                f"trace {self.path}, line {line}: cannot read {dict(row)}; expected a client "
                "number, a time in seconds, available 0 or 1, and a latency above 0 or nothing"
            ) from error

    def changes(self, clients: int, seed: int) -> list[Change]:
        for change in self.rows:
            if not 0 <= change.client < clients:
                raise PolytempoError(
                    f"trace {self.path} names client {change.client}; the federation has clients "
                    f"0 to {clients - 1}"
                )
        return sorted(self.rows, key=lambda change: (change.time, change.client))


def late(changes: Sequence[Change]) -> set[int]:
    """The clients that are not there at the beginning."""
    absent: set[int] = set()
    for change in changes:
        if change.timed and change.time <= 0:
            (absent.discard if change.available else absent.add)(change.client)
        elif not change.timed and change.available:  # it comes with an update or a version
            absent.add(change.client)
    return absent


class Timeline:
    """Availability and latency of each client over time, from a list of changes."""

    def __init__(self, changes: Sequence[Change]) -> None:
        self._of: dict[int, list[Change]] = {}
        for change in changes:
            self._of.setdefault(change.client, []).append(change)

    def at(self, client: int, time: float) -> Change | None:
        """The last change of that client up to that time."""
        changes = self._of.get(client)
        if changes is None:
            return None
        index = bisect_right([change.time for change in changes], time)
        return changes[index - 1] if index else None

    def next_available(self, client: int, time: float) -> float:
        """The earliest time, not before `time`, at which the client is there."""
        if self._available(client, time):
            return time
        later = (c.time for c in self._of[client] if c.time > time)
        return next((t for t in later if self._available(client, t)), math.inf)

    def _available(self, client: int, time: float) -> bool:
        now = self.at(client, time)
        return now is None or now.available
