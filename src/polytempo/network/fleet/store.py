"""What a server keeps on disk: *state = checkpoint + the records after it*, bit for bit.

events.jsonl                       one event per line
journal/NUMBER.log                 the records (see journal.py)
journal/checkpoint-NUMBER...       the state before the entry of that number
journal/checkpoints.json           the last two of these with their checksums; the id of the run

The older checkpoint is there for the day when the newer one cannot be read: replaying a little more
leads to the same bits.

A checkpoint is written in a thread of its own, from a snapshot of the state, while the server goes
on: it stands still only for the snapshot. A checkpoint counts from the moment that the table names
it, and all that the table names is safe by then: whatever a crash interrupts, the table that is
there leads to the state. There is one such thread: never two checkpoints at once.
"""

from __future__ import annotations

import hashlib
import json
import logging
import secrets
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

from polytempo.core import events
from polytempo.core.errors import PolytempoError
from polytempo.core.strategy import State
from polytempo.files import Appended, Claim, replace_text, writing
from polytempo.network.fleet.journal import Journal, read_journal
from polytempo.network.fleet.records import Entry, Skipped, read_entry, write_entry
from polytempo.nodes.server import ServerNode
from polytempo.nodes.star import AnyRecord, Report
from polytempo.storage import load_state, save_state

EVENTS, JOURNAL, TABLE = "events.jsonl", "journal", "checkpoints.json"
KEPT = 2  # checkpoints
SHARE = 0.05  # of the time may go into checkpoints
LONG = 1.0  # seconds: after a longer replay the state is saved, lest the next one begin there too
_SKIPPED = b'{"kind":"Skipped"'
log = logging.getLogger(__name__)


class Store:
    """The folder of one server. The store also writes `events.jsonl`: what was reported after the
    last checkpoint is written again by the replay, so no event is there twice and none is missing.

    `keep`: keep all records (which `polytempo replay` needs), or only those that a restart needs.
    `every`: seconds between two checkpoints, or more if they take long. `sync`: fsync before
    anything counts (False: for benchmarks alone).
    """

    def __init__(
        self, folder: Path, *, keep: bool = True, every: float = 60.0, sync: bool = True
    ) -> None:
        self.folder, self._path = folder, folder / JOURNAL
        self._keep, self._every, self._durable = keep, every, sync
        self._table: dict[str, Any] = {}
        self.opened, self._stack = False, ExitStack()
        self._reported = 0  # events in the log
        self._last, self._took = time.monotonic(), 0.0
        self._written: Future[None] | None = None  # the checkpoint that is being written

    @property
    def id(self) -> str:
        """Names this run for good: a client's folder belongs to one run."""
        return str(self._table["id"])

    def open(self, node: ServerNode) -> ServerNode:
        """Bring the node, which is new, to where the run stands. `FleetServer` does it."""
        self._stack.enter_context(Claim(self._path))
        self.opened = True
        try:
            self._journal = Journal(self._path, durable=self._durable)
            self._stack.callback(self._journal.close)
            if self._journal.torn:
                log.warning("cut %d bytes of an unfinished record off", self._journal.torn)
            if (self._path / TABLE).exists():
                self._table = _read_table(self._path / TABLE)
                start = self._load(node)
                self._begin_writing(node)
                began = time.monotonic()
                self._replay(node, start)
                if time.monotonic() - began > LONG:
                    self.checkpoint(node)
            elif self._journal.next:
                raise PolytempoError(
                    f"{self._path} has records but no {TABLE}; restore it, or start anew in "
                    "another folder"
                )
            else:
                self._table = {"id": secrets.token_hex(8), "checkpoints": []}
                self._begin_writing(node)
                self.checkpoint(node)
        except BaseException:
            self.close()
            raise
        return node

    # -- records -----------------------------------------------------------------------------------

    def append(self, records: list[AnyRecord]) -> list[int]:
        """Write records down, safely: their numbers."""
        first = self._journal.append([write_entry(record) for record in records])
        return list(range(first, first + len(records)))

    def skip(self, node: ServerNode, number: int, reason: str) -> None:
        """The node has failed on that record: bring it back to before, and let the record never
        count again."""
        self._settle()
        self._journal.append([write_entry(Skipped(number, reason[:500]))])
        self._replay(node, self._load(node), before=number)

    def _replay(self, node: ServerNode, start: int, before: int | None = None) -> None:
        while True:
            skipped = _skipped(self._path, start)
            failed = self._replay_once(node, start, before, skipped)
            if failed is None:
                return
            self._journal.append([write_entry(failed)])
            log.error("record %d is left out: %s", failed.number, failed.reason)
            start = self._load(node)

    def _replay_once(
        self, node: ServerNode, start: int, before: int | None, skipped: set[int]
    ) -> Skipped | None:
        for number, data in self._journal.read(start):
            if before is not None and number >= before:
                break
            entry = read_entry(data)
            if number in skipped or isinstance(entry, Skipped):
                continue
            try:
                actions = node.apply(entry)
            except Exception as error:  # of a strategy; a crash came before it was marked
                return Skipped(number, f"{type(error).__name__}: {error}"[:500])
            for action in actions:
                if isinstance(action, Report):
                    self.report(action.event)
        return None

    # -- events ------------------------------------------------------------------------------------

    def _begin_writing(self, node: ServerNode) -> None:
        self._events = self._stack.enter_context(Appended(self.folder / EVENTS, keep=node.events))
        self._reported = node.events
        # The last to be opened, and so the first to be closed.
        self._writer = self._stack.enter_context(ThreadPoolExecutor(1, "checkpoint"))

    def report(self, event: events.Event) -> None:
        """A line for the event log, unless it is there already."""
        if event.n >= self._reported:
            self._events.add(events.to_json(event))
            self._reported = event.n + 1

    def flush(self) -> None:
        """Let readers of the event log see what there is."""
        self._events.flush(durable=False)

    # -- checkpoints -------------------------------------------------------------------------------

    def checkpoint_if_due(self, node: ServerNode) -> None:
        """Begin a checkpoint, if it is time and there is something to save. What went wrong with
        the last one is raised here."""
        if self._written is not None:
            if not self._written.done():
                return
            self._settle()
        waited = time.monotonic() - self._last
        new = self._journal.next > self._table["checkpoints"][0]["entries"]
        if new and waited > max(self._every, self._took / SHARE):
            self._begin(node)

    def checkpoint(self, node: ServerNode) -> None:
        """Save the node's state, and wait until that is done: a restart goes on from here."""
        self._settle()
        self._begin(node)
        self._settle()

    def _begin(self, node: ServerNode) -> None:
        """Every record that was appended was applied to the node."""
        assert self._written is None, "one checkpoint at a time"
        begin, entries = time.monotonic(), self._journal.next
        state = node.snapshot()
        self._journal.rotate()
        self._written = self._writer.submit(self._write, state, entries, begin)

    def _write(self, state: State, entries: int, begin: float) -> None:
        """In a thread of its own."""
        self._events.flush()  # no checkpoint may count events that the log does not hold
        path = self._path / f"checkpoint-{entries:016d}.safetensors"
        save_state(path, state)
        made = {"file": path.name, "entries": entries, "checksum": _checksum(path)}
        others = [old for old in self._table["checkpoints"] if old["entries"] < entries]
        table = {**self._table, "checkpoints": [made, *others][:KEPT]}
        replace_text(self._path / TABLE, json.dumps(table, indent=1) + "\n")
        self._table = table
        self._tidy()
        self._last = time.monotonic()
        self._took = self._last - begin

    def _settle(self) -> None:
        """Wait for the checkpoint that is being written, if there is one."""
        written, self._written = self._written, None
        if written is not None:
            written.result()

    def _tidy(self) -> None:
        known = {found["file"] for found in self._table["checkpoints"]}
        for path in self._path.glob("checkpoint-*"):
            if path.name not in known:
                with writing(path):
                    path.unlink()
        if not self._keep:
            self._journal.discard(self._table["checkpoints"][-1]["entries"])

    def _load(self, node: ServerNode) -> int:
        """Load the newest checkpoint that is as it was written: the number of the next entry."""
        for found in self._table["checkpoints"]:
            path = self._path / found["file"]
            if path.exists() and _checksum(path) == found["checksum"]:
                node.load_state_dict(load_state(path))
                return int(found["entries"])
            log.error("%s is damaged or missing: the one before is used", path)
        raise PolytempoError(
            f"no checkpoint in {self._path} is as it was written (the disk may be failing); "
            "restore them from a copy, or start anew in another folder"
        )

    def close(self) -> None:
        """What is not on disk by now comes from the journal again."""
        self.opened = False
        if self._written is not None and (error := self._written.exception()) is not None:
            log.error("the last checkpoint could not be written", exc_info=error)
        with suppress(PolytempoError):
            self._stack.close()


def history(folder: Path) -> Iterator[AnyRecord]:
    """All records of a run that counted, in order, from the beginning (a run with `keep`)."""
    path = folder / JOURNAL
    if not path.is_dir():
        raise PolytempoError(f"{folder} is not the folder of a server: it has no {JOURNAL}")
    skipped = _skipped(path, 0)
    for number, data in read_journal(path):
        entry: Entry = read_entry(data)
        if number not in skipped and not isinstance(entry, Skipped):
            yield entry


def _skipped(path: Path, start: int) -> set[int]:
    found = set()
    for _, data in read_journal(path, start):
        if data[4 : 4 + len(_SKIPPED)] == _SKIPPED:
            entry = read_entry(data)
            assert isinstance(entry, Skipped)
            found.add(entry.number)
    return found


def _read_table(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf8"))
        if not found["checkpoints"] or not isinstance(found["id"], str):
            raise ValueError("it names no checkpoint")
        return dict(found)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise PolytempoError(f"{path} cannot be read ({error}); restore it from a copy") from error


def _checksum(path: Path) -> str:
    with writing(path), path.open("rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=16)).hexdigest()
