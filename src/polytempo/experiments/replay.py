"""A recorded deployment again: from its log bit for bit, or with another strategy in the simulator.

The log of a server says who joined, left and took how long, and every update that came in. Fed to a
new server with the same strategy, it leads to the same state. Of another strategy it cannot say
what clients would have trained; but on a machine that has the data, the simulator can: with
devices as fast, and clients as present, as those of the log.
"""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from torch import Tensor

from polytempo.core import events
from polytempo.core.errors import PolytempoError
from polytempo.data.npz import client_files
from polytempo.experiments.config import RunConfig, make_config
from polytempo.experiments.fleet_plan import Undertaking, make_node, one_order, recorded
from polytempo.experiments.fleet_settings import OF_CLIENTS
from polytempo.experiments.run_settings import GIVEN
from polytempo.files import replace_text
from polytempo.network.fleet.store import EVENTS, JOURNAL, TABLE, history
from polytempo.nodes.server import ServerNode
from polytempo.nodes.star import (
    AnyRecord,
    Away,
    Closed,
    Enrolled,
    Joined,
    Left,
    Offered,
    Report,
    Started,
)
from polytempo.storage import load_state, restored

# -- the same strategy -----------------------------------------------------------------------------


@dataclass
class Verdict:
    """What a replay has found. `wrong`: what differs, if anything does."""

    records: int
    updates: int
    checked: int  # records that the checkpoint holds, which was compared
    events: int
    wrong: list[str] = field(default_factory=list)

    @property
    def about(self) -> dict[str, Any]:
        return {**vars(self), "same": not self.wrong}


def verify(folder: Path) -> Verdict:
    """Feed the log to a new server, and compare its state with the newest checkpoint, and its
    events with the event log."""
    what = recorded(folder)
    saved = _newest_checkpoint(folder)
    node, lines, checked = make_node(what), _lines(folder / EVENTS), False
    verdict = Verdict(0, 0, saved["applied"], 0)

    def compare() -> None:
        nonlocal checked
        if not checked and node.applied == saved["applied"]:
            checked = True
            verdict.wrong += differences(restored(node.state_dict()), saved)

    compare()
    with one_order():
        for record in history(folder):
            for action in node.apply(record):
                if isinstance(action, Report):
                    verdict.events += 1
                    if events.to_json(action.event) != next(lines, None):
                        verdict.wrong.append(f"event {action.event.n} is not that of {EVENTS}")
            compare()
    verdict.records, verdict.updates = node.applied, node.updates
    if not checked:
        verdict.wrong.append(f"the log ends before record {saved['applied']} of the checkpoint")
    return verdict


def _newest_checkpoint(folder: Path) -> dict[str, Any]:
    table = json.loads((folder / JOURNAL / TABLE).read_text(encoding="utf8"))
    return load_state(folder / JOURNAL / table["checkpoints"][0]["file"])


def _lines(path: Path) -> Iterator[str]:
    if path.exists():
        with path.open(encoding="utf8") as file:
            for line in file:
                yield line.rstrip("\n")


def differences(ours: Any, theirs: Any, where: str = "state") -> list[str]:
    """Where two states differ, in any bit."""
    if isinstance(ours, dict) and isinstance(theirs, dict):
        if ours.keys() != theirs.keys():
            return [f"{where} has other keys: {sorted(ours.keys() ^ theirs.keys())}"]
        pairs = ((ours[key], theirs[key], f"{where}/{key}") for key in ours)
        return [found for pair in pairs for found in differences(*pair)]
    if isinstance(ours, list) and isinstance(theirs, list) and len(ours) == len(theirs):
        triples = ((*pair, f"{where}/{i}") for i, pair in enumerate(zip(ours, theirs, strict=True)))
        return [found for triple in triples for found in differences(*triple)]
    if isinstance(ours, Tensor | np.ndarray):
        same = isinstance(theirs, type(ours)) and _bits(ours) == _bits(theirs)
    else:
        both_nan = ours != ours and theirs != theirs
        same = type(ours) is type(theirs) and (ours == theirs or both_nan)
    return [] if same else [f"{where} differs"]


def _bits(array: Any) -> tuple[Any, ...]:
    found = array.contiguous().numpy() if isinstance(array, torch.Tensor) else array
    return str(found.dtype), found.shape, found.tobytes()


# -- another strategy ------------------------------------------------------------------------------


@dataclass
class Presence:
    """When a client was there, and how long each of its trainings took, with all that came on
    top."""

    changes: list[tuple[float, bool]] = field(default_factory=list)
    began: list[tuple[float, float]] = field(default_factory=list)  # when, and how long


@dataclass
class Attendance:
    """Who was there when, by name; and how many the server waited for before it began (None: it
    never began)."""

    of: dict[str, Presence] = field(default_factory=dict)
    wait_for: int | None = None


def attendance(what: Undertaking, folder: Path) -> Attendance:
    """From the log of a server."""
    node, found = make_node(what), Attendance()
    overhead: dict[str, list[float]] = {}
    for record in history(folder):
        if isinstance(record, Closed):
            break  # what follows is the departure of all
        _note(record, node, found.of, overhead)
        node.apply(record)
        if found.wait_for is None and node.server.dispatches:
            found.wait_for = node.server.wait_for
    for name, seen in found.of.items():
        extra = median(overhead[name]) if name in overhead else 0.0
        seen.began = [(begin, seconds + extra) for begin, seconds in seen.began]
    return found


def _note(
    record: AnyRecord,
    node: ServerNode,
    found: dict[str, Presence],
    overhead: dict[str, list[float]],
) -> None:
    match record:
        case Started():
            for seen in found.values():
                if not node.server.dispatches:  # perhaps it waits for fewer now: a new beginning
                    seen.changes.clear()
                seen.changes.append((record.time, False))
        case Enrolled(name=name) | Joined(name=name):
            found.setdefault(name, Presence()).changes.append((record.time, True))
        case Away(name=name) | Left(name=name):
            found.setdefault(name, Presence()).changes.append((record.time, False))
        case Offered(name=name, upload=upload):
            since = node.deadlines.since.get(node.names[name])
            if since is not None:
                found[name].began.append((since, upload.seconds))
                more = max(0.0, record.time - since - upload.seconds)
                overhead.setdefault(name, []).append(more)


def write_trace(
    path: Path, fleet: Mapping[str, Presence], places: Mapping[str, int], clients: int
) -> None:
    """The fleet as a file for `--dropout trace`; `places` says which of so many clients of the
    federation is which. Those that are none of them are never there."""
    rows: list[tuple[float, int, int, float | str]] = [(0.0, c, 0, "") for c in range(clients)]
    for name, seen in fleet.items():
        client, lasts = places[name], seen.began[0][1] if seen.began else 0.0
        ahead = sorted([(t, here, None) for t, here in seen.changes], key=lambda item: item[0])
        timed: list[tuple[float, bool | None, float | None]] = [*ahead]
        timed += [(begin, None, seconds) for begin, seconds in seen.began]
        here = False
        for when, change, seconds in sorted(timed, key=lambda item: item[0]):
            here = here if change is None else change
            lasts = lasts if seconds is None else seconds
            rows.append((max(when, 1e-6), client, int(here), max(lasts, 1e-6) if here else ""))
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(("client", "time", "available", "latency"))
    for when, client, available, latency in sorted(rows, key=lambda row: (row[0], row[1])):
        writer.writerow((client, f"{when:.6f}", available, latency))
    replace_text(path, text.getvalue())


def in_simulator(
    folder: Path, strategy: str, *, data: str | None = None, updates: int | None = None
) -> RunConfig:
    """The settings of a simulation of that strategy on the recorded fleet."""
    what = recorded(folder)
    config = what.config
    source = data or config.data
    if source.startswith((OF_CLIENTS, GIVEN)):
        raise PolytempoError(
            f"{folder} has no data to simulate on ({source}); give --data: a folder with one .npz "
            "file per client, called as the clients are"
        )
    fleet = attendance(what, folder)
    if fleet.wait_for is None:
        raise PolytempoError(
            f"the run in {folder} never began (clients that came: {len(fleet.of)}): there is "
            "nothing to replay"
        )
    trace, path = folder / "fleet.csv", Path(source).expanduser()
    clients = len(client_files(path)) if path.is_dir() else config.clients or len(fleet.of)
    write_trace(trace, fleet.of, _places(list(fleet.of), source, clients), clients)
    usual = config.make("strategy")
    update: dict[str, Any] = {
        "strategy": strategy,
        "data": source,
        "dropout": {
            "name": "trace",
            "path": str(trace.resolve()),
            "wait_for": fleet.wait_for,
        },
        "devices": {"name": "equal"},
        "updates": updates or config.updates,
        "refill": None if config.refill == usual.refill else config.refill,
        "concurrency": None if usual.all_train else config.concurrency,
    }
    if data is not None:
        update |= {"partition": None, "clients": None}
    kept = {key: value for key, value in config.settings().items() if key not in update}
    return make_config({**kept, **{k: v for k, v in update.items() if v is not None}}, "replay")


def _places(names: list[str], source: str, clients: int) -> dict[str, int]:
    """Which client of the federation each of these is: by the file of its name, else by the number
    that its name ends with, else by the order in which they joined."""
    path = Path(source).expanduser()
    if path.is_dir():
        stems = [file.stem for file in client_files(path)]
        if set(names) <= set(stems):
            return {name: stems.index(name) for name in names}
        raise PolytempoError(
            f"{path} lacks {', '.join(sorted(set(names) - set(stems)))}: give one .npz file per "
            "client, called as the clients are"
        )
    tails = [name[len(name.rstrip("0123456789")) :] for name in names]
    numbers = [int(tail) if tail else math.inf for tail in tails]
    if len({*numbers}) == len(names) and max(numbers) < clients:
        return {name: int(number) for name, number in zip(names, numbers, strict=True)}
    return {name: place for place, name in enumerate(names)}
