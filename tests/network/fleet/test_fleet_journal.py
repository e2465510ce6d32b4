"""The journal and the store: what was written is there, whatever happened to the file since."""

import errno
import json
import math
import os
import queue
import resource
import shutil
import subprocess
import sys
import threading
from itertools import islice
from pathlib import Path

import pytest
import torch
from fleet_kit import make_node, same, until

from polytempo import files, storage
from polytempo.core.errors import PolytempoError
from polytempo.files import Appended
from polytempo.network.fleet import journal as journal_module
from polytempo.network.fleet import store as store_module
from polytempo.network.fleet.journal import Journal, read_journal
from polytempo.network.fleet.records import Skipped, read_entry, write_entry
from polytempo.network.fleet.store import Store, history
from polytempo.nodes.star import (
    Away,
    Closed,
    Continued,
    Enrolled,
    GivenUp,
    Joined,
    Left,
    Offered,
    Scored,
    Scores,
    Started,
    Swapped,
    Upload,
)
from polytempo.storage import load_state, restored

BATCHES = [[b"one", b"two"], [b""], [b"four" * 20, b"five", b"six"]]
ENTRIES = [entry for batch in BATCHES for entry in batch]


def written(folder):
    """A journal of these batches; where each entry ends."""
    journal = Journal(folder)
    ends = []
    for batch in BATCHES:
        journal.append([[entry] for entry in batch])
        ends.append(journal.segments()[-1].stat().st_size)
    journal.close()
    return ends


def read(folder, start=0):
    return [bytes(data) for _, data in read_journal(folder, start)]


def test_what_was_written_is_read(tmp_path):
    written(tmp_path / "j")
    assert read(tmp_path / "j") == ENTRIES
    assert read(tmp_path / "j", 3) == ENTRIES[3:]


def test_a_tail_torn_at_any_byte_is_cut_off_and_written_again(tmp_path):
    ends = written(tmp_path / "whole")
    path = Journal(tmp_path / "whole").segments()[0]
    data = path.read_bytes()
    for size in range(ends[1], len(data)):
        folder = tmp_path / str(size)
        folder.mkdir()
        (folder / path.name).write_bytes(data[:size])
        journal = Journal(folder)
        kept = read(folder)
        assert kept == ENTRIES[: len(kept)] and len(kept) >= 3
        assert journal.next == len(kept)
        journal.append([[b"new"]])
        journal.close()
        assert read(folder) == [*kept, b"new"]


def test_a_tail_of_zeros_or_of_old_bytes_is_cut_off(tmp_path):
    """What a disk may leave of a batch that was being written when the power failed."""
    ends = written(tmp_path / "j")
    path = Journal(tmp_path / "j").segments()[0]
    data = bytearray(path.read_bytes())
    data[ends[1] : ends[1] + 60] = bytes(60)  # the first of the last batch; the others are good
    path.write_bytes(data)
    journal = Journal(tmp_path / "j")
    assert journal.next == 3 and journal.torn == len(data) - ends[1]


def test_a_bit_that_flips_before_the_last_batch_is_an_error_that_says_where(tmp_path):
    ends = written(tmp_path / "j")
    path = Journal(tmp_path / "j").segments()[0]
    data = path.read_bytes()
    for byte in range(ends[1]):
        flipped = bytearray(data)
        flipped[byte] ^= 1 << (byte % 8)
        path.write_bytes(flipped)
        with pytest.raises(PolytempoError, match=r"damaged at byte \d+.*truncate"):
            Journal(tmp_path / "j")
        assert path.read_bytes() == flipped, "nothing was changed"


def test_damage_in_an_earlier_segment_or_a_missing_one_is_an_error(tmp_path):
    journal = Journal(tmp_path)
    for _ in range(3):
        journal.append([[b"entry"]])
        journal.rotate()
    first, second, *_ = journal.segments()
    data = first.read_bytes()
    first.write_bytes(data[:-1])
    with pytest.raises(PolytempoError, match="damaged at byte 0"):
        read(tmp_path)
    first.write_bytes(data)
    second.unlink()
    with pytest.raises(PolytempoError, match="lacks the entries from 1 to 1"):
        read(tmp_path)


@pytest.mark.parametrize("fails", ["write", "fsync"])
@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO])
def test_a_full_disk_leaves_the_journal_as_it_was(tmp_path, monkeypatch, fails, number):
    journal = Journal(tmp_path)
    journal.append([[b"safe"]])
    before = journal.segments()[0].read_bytes()

    def broken(*args):
        if fails == "write":
            args[0].write(b"half of it")
        raise OSError(number, os.strerror(number))

    name = {"write": "_write_all", "fsync": "_sync_data"}[fails]
    with monkeypatch.context() as patch:
        patch.setattr(journal_module, name, broken)
        with pytest.raises(PolytempoError, match=f"{os.strerror(number)}.*intact"):
            journal.append([[b"lost" * 1000]])
    assert journal.segments()[0].read_bytes() == before
    with pytest.raises(PolytempoError, match="restart"):
        journal.append([[b"more"]])
    journal.close()
    again = Journal(tmp_path)
    again.append([[b"more"]])
    assert read(tmp_path) == [b"safe", b"more"]


SCRIPT = """
import resource, signal, sys
from pathlib import Path
from polytempo.core.errors import PolytempoError
from polytempo.network.fleet.journal import Journal
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
journal = Journal(Path(sys.argv[1]))
resource.setrlimit(resource.RLIMIT_FSIZE, (5000, 5000))
for number in range(100):
    try:
        journal.append([[bytes(700)]])
    except PolytempoError as error:
        print(number, error)
        break
"""


def test_a_short_write_of_the_system_leaves_whole_entries_only(tmp_path):
    found = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(tmp_path)], capture_output=True, text=True, timeout=60
    )
    assert found.stdout.startswith("6 ") and "could not be written" in found.stdout, found
    assert read(tmp_path) == [bytes(700)] * 6
    assert resource.getrlimit(resource.RLIMIT_FSIZE)[0] != 5000


RECORDS = [
    Started(0.0, 10),
    Enrolled(0.1, "a", 5, 2),
    Joined(1 / 3, "a"),
    Offered(0.4, "a", Upload(3, torch.rand(7), 5, {"choice": torch.tensor([[2]])}, 0.1)),
    Offered(0.4, "a", Upload(3, torch.rand(7).double(), 5)),
    Continued(0.5, "a", Swapped(4, 3, None)),
    Scored(0.6, "a", Scores(0, {"loss": 0.1}, {"loss": 1e-300})),
    GivenUp(0.7, "a", 4, "why"),
    Away(0.8, "a"),
    Left(0.9, "a"),
    Closed(1.0),
    Skipped(3, "a bug"),
]


@pytest.mark.parametrize("record", RECORDS, ids=lambda record: type(record).__name__)
def test_records_survive_their_way_to_disk(record):
    found = read_entry(bytearray(b"".join(write_entry(record))))
    assert type(found) is type(record)
    assert same(vars(found), vars(record))


# -- the store -----------------------------------------------------------------------------------


def drive(store, node, records):
    """Let the records count, as a server does."""
    from polytempo.nodes.star import Report

    for record in records:
        store.append([record])
        for action in node.apply(record):
            if isinstance(action, Report):
                store.report(action.event)


def some_records(updates=6):
    """Two clients of a node, and what they do."""
    node = make_node(clients=2, updates=100)
    records = [Started(0.0, 100), Enrolled(0.1, "a", 5, 2), Enrolled(0.2, "b", 5, 2)]
    for record in records:
        node.apply(record)
    for number in range(updates):
        client = min(node.outstanding, key=lambda client: node.outstanding[client].number)
        upload = Upload(node.outstanding[client].number, torch.full((12,), number + 0.5), 5)
        records.append(Offered(1.0 + number, node.roster[client], upload))
        node.apply(records[-1])
    return records, node


@pytest.mark.parametrize("after", [0, 1, 4, 9])
def test_state_is_checkpoint_plus_journal_bit_for_bit(tmp_path, after):
    records, expected = some_records()
    store, node = Store(tmp_path), make_node(clients=2, updates=100)
    store.open(node)
    drive(store, node, records[:after])
    store.checkpoint(node)
    drive(store, node, records[after:])
    store.flush()
    lines = (tmp_path / "events.jsonl").read_text()
    store.close()  # nothing is saved by that: as if it had been killed
    for _ in range(2):
        again, found = Store(tmp_path), make_node(clients=2, updates=100)
        again.open(found)
        assert same(found.state_dict(), expected.state_dict())
        again.flush()
        assert (tmp_path / "events.jsonl").read_text() == lines
        assert again.id == store.id
        again.close()
    assert all(same(vars(a), vars(b)) for a, b in zip(history(tmp_path), records, strict=True))
    assert [json.loads(line)["n"] for line in lines.splitlines()] == list(range(expected.events))


def test_a_damaged_checkpoint_is_replaced_by_the_one_before(tmp_path):
    records, expected = some_records()
    store, node = Store(tmp_path, keep=False), make_node(clients=2, updates=100)
    store.open(node)
    for begin in range(0, 9, 3):
        drive(store, node, records[begin : begin + 3])
        store.checkpoint(node)
    store.close()
    checkpoints = sorted((tmp_path / "journal").glob("checkpoint-*"))
    assert len(checkpoints) == 2
    assert len([*(tmp_path / "journal").glob("*.log")]) == 2, "older records are discarded"
    data = bytearray(checkpoints[-1].read_bytes())
    data[len(data) // 2] ^= 4
    checkpoints[-1].write_bytes(data)
    again, found = Store(tmp_path), make_node(clients=2, updates=100)
    again.open(found)
    assert same(found.state_dict(), expected.state_dict())
    again.close()
    checkpoints[0].unlink()
    with pytest.raises(PolytempoError, match=r"no checkpoint in .* is as it was written"):
        Store(tmp_path).open(make_node(clients=2, updates=100))


def test_a_checkpoint_that_does_not_fit_on_the_disk_changes_nothing(tmp_path, monkeypatch):
    records, expected = some_records()
    store, node = Store(tmp_path), make_node(clients=2, updates=100)
    store.open(node)
    drive(store, node, records)
    with monkeypatch.context() as patch:

        def full(*_, **__):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        patch.setattr("polytempo.storage.save_file", full)
        with pytest.raises(PolytempoError, match="No space left"):
            store.checkpoint(node)
    store.close()
    again, found = Store(tmp_path), make_node(clients=2, updates=100)
    again.open(found)
    assert same(found.state_dict(), expected.state_dict())
    again.close()


class Stops:
    """Lets the thread that writes checkpoints go from one moment to the next, only when told to."""

    def __init__(self, monkeypatch):
        self._here, self._go = queue.Queue(), threading.Semaphore(0)
        save_file = storage.save_file

        def half_then_all(arrays, path, **more):
            Path(path).write_bytes(b"half of it")
            self._stop("half of a file")
            save_file(arrays, path, **more)

        monkeypatch.setattr(storage, "save_file", half_then_all)
        for owner, name in (
            *((Appended, "flush"), (files, "sync"), (os, "replace"), (Path, "unlink")),
            (store_module, "_checksum"),
        ):
            monkeypatch.setattr(owner, name, self._around(name, getattr(owner, name)))

    def _around(self, name, work):
        def stopping(*args, **named):
            self._stop(f"before {name}")
            found = work(*args, **named)
            self._stop(f"after {name}")
            return found

        return stopping

    def _stop(self, where):
        if threading.current_thread().name.startswith("checkpoint"):
            self._here.put(where)
            assert self._go.acquire(timeout=60)

    def follow(self, written):
        """Yields where it stands, until all is written."""
        while not (written.done() and self._here.empty()):
            try:
                yield self._here.get(timeout=0.01)
            except queue.Empty:
                continue
            self._go.release()


@pytest.mark.parametrize("keep", [True, False])
def test_a_crash_at_any_moment_of_a_checkpoint_loses_nothing(tmp_path, monkeypatch, keep):
    """The server goes on meanwhile; at each moment its folder is copied, as a crash would leave it,
    and from each copy it resumes where it stood."""
    records, _ = some_records(updates=60)
    store, node = Store(tmp_path / "s", keep=keep, every=0.0), make_node(clients=2, updates=100)
    monkeypatch.setattr(store_module, "SHARE", math.inf)
    store.open(node)
    done, left, images = 0, iter(records), []
    for _ in range(2):  # so that there are older ones to be removed
        for record in islice(left, 4):
            drive(store, node, [record])
            done += 1
        store.checkpoint(node)
    drive(store, node, [next(left)])
    done += 1
    with monkeypatch.context() as patch:
        stops = Stops(patch)
        store.checkpoint_if_due(node)
        for where in stops.follow(store._written):
            drive(store, node, [next(left)])
            done += 1
            store.flush()
            images.append((where, done, tmp_path / f"image-{done}"))
            shutil.copytree(tmp_path / "s", images[-1][2])
    store.checkpoint_if_due(node)
    store.close()
    moments = {where for where, *_ in images}
    assert {"half of a file", "after replace", "after sync", "before unlink"} <= moments, moments
    newest, expected, reached = set(), make_node(clients=2, updates=100), 0
    for where, count, folder in images:
        again, found = Store(folder), make_node(clients=2, updates=100)
        again.open(found)
        for record in records[reached:count]:
            expected.apply(record)
        reached = count
        assert same(found.state_dict(), expected.state_dict()), where
        newest.add(again._table["checkpoints"][0]["entries"])
        again.close()
        lines = (folder / "events.jsonl").read_text().splitlines()
        assert [json.loads(line)["n"] for line in lines] == list(range(found.events)), where
    assert newest == {8, 9}, "before it counts, and after"


def test_one_checkpoint_at_a_time_from_the_state_as_it_was(tmp_path, monkeypatch):
    records, _ = some_records(updates=20)
    store, node = Store(tmp_path, every=0.0), make_node(clients=2, updates=100)
    monkeypatch.setattr(store_module, "SHARE", math.inf)
    store.open(node)
    drive(store, node, records[:6])
    go, saved, save = threading.Event(), [], storage.save_file

    def wait_and_save(arrays, path, **more):
        saved.append(path)
        assert go.wait(60)
        save(arrays, path, **more)

    monkeypatch.setattr(storage, "save_file", wait_and_save)
    store.checkpoint_if_due(node)
    before = restored(node.state_dict())
    for record in records[6:]:
        drive(store, node, [record])
        store.checkpoint_if_due(node)
    assert len(saved) <= 1, "the next one waits"
    go.set()
    store._settle()
    assert same(
        load_state(tmp_path / "journal" / "checkpoint-0000000000000006.safetensors"), before
    )
    store.checkpoint(node)
    assert len(saved) == 2
    store.close()


def test_a_checkpoint_that_fails_in_its_thread_stops_the_server_and_loses_nothing(
    tmp_path, monkeypatch
):
    records, expected = some_records()
    store, node = Store(tmp_path, every=0.0), make_node(clients=2, updates=100)
    monkeypatch.setattr(store_module, "SHARE", math.inf)
    store.open(node)
    with monkeypatch.context() as patch:

        def full(*_, **__):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        patch.setattr("polytempo.storage.save_file", full)
        drive(store, node, records[:4])
        store.checkpoint_if_due(node)
        drive(store, node, records[4:])
        with pytest.raises(PolytempoError, match="No space left"):
            until(lambda: store.checkpoint_if_due(node))
    store.close()
    again, found = Store(tmp_path), make_node(clients=2, updates=100)
    again.open(found)
    assert same(found.state_dict(), expected.state_dict())
    again.close()


def test_two_servers_cannot_share_a_folder(tmp_path):
    store = Store(tmp_path)
    store.open(make_node())
    with pytest.raises(PolytempoError, match="another run"):
        Store(tmp_path).open(make_node())
    store.close()


def test_a_record_that_failed_is_left_out_of_every_replay(tmp_path):
    records, _ = some_records()
    store, node = Store(tmp_path), make_node(clients=2, updates=100)
    store.open(node)
    drive(store, node, records[:-1])
    expected = make_node(clients=2, updates=100)
    for record in records[:-1]:
        expected.apply(record)
    (number,) = store.append([records[-1]])
    store.skip(node, number, "it failed")
    assert same(node.state_dict(), expected.state_dict())
    store.close()
    again, found = Store(tmp_path), make_node(clients=2, updates=100)
    again.open(found)
    assert same(found.state_dict(), expected.state_dict())
    again.close()
    assert len([*history(tmp_path)]) == len(records) - 1


def test_a_crash_between_a_failure_and_its_mark_is_made_up_for(tmp_path):
    records, _ = some_records()
    store, node = Store(tmp_path), make_node(clients=2, updates=100)
    store.open(node)
    drive(store, node, records[:5])
    store.append(records[5:6])  # killed here
    store.close()

    def failing():
        found = make_node(clients=2, updates=100)
        fold = found.server.strategy.fold

        def fold_or_fail(update, staleness):
            if update.number == records[5].upload.number:
                raise ZeroDivisionError("a bug")
            return fold(update, staleness)

        found.server.strategy.fold = fold_or_fail
        return found

    for _ in range(2):
        again, found = Store(tmp_path), failing()
        again.open(found)
        assert found.updates == 2
        again.close()
    assert sum(1 for path in Path(tmp_path / "journal").glob("*.log")) == 1
    assert len([*history(tmp_path)]) == 5
