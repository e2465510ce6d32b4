"""Files are there whole or not at all, and a folder belongs to one process at a time."""

import os
import signal
import stat
import subprocess
import sys

import pytest
import torch

from polytempo import PolytempoError
from polytempo.files import Appended, Claim, replace_text, replacing
from polytempo.storage import load_state, save_state

# -- replaced as a whole ------------------------------------------------------------------------


def test_a_file_and_then_its_folder_are_brought_to_the_disk(tmp_path, monkeypatch):
    done, fsync, replace = [], os.fsync, os.replace

    def spy(number):
        done.append("folder" if stat.S_ISDIR(os.fstat(number).st_mode) else "file")
        fsync(number)

    def rename(source, target):
        done.append("rename")
        replace(source, target)

    monkeypatch.setattr(os, "fsync", spy)
    monkeypatch.setattr(os, "replace", rename)
    for write in (
        lambda: replace_text(tmp_path / "text", "new"),
        lambda: save_state(tmp_path / "state", {"a": torch.ones(2)}),
    ):
        done.clear()
        write()
        assert done == ["file", "rename", "folder"]


def test_an_error_while_writing_changes_nothing(tmp_path):
    replace_text(tmp_path / "text", "old")
    with pytest.raises(ZeroDivisionError), replacing(tmp_path / "text") as partial:
        partial.write_text("half of the n")
        raise ZeroDivisionError
    assert [path.name for path in tmp_path.iterdir()] == ["text"]
    assert (tmp_path / "text").read_text() == "old"


FULL = """
import resource, sys
from pathlib import Path
import torch
from polytempo import PolytempoError
from polytempo.files import Appended, replace_text
from polytempo.storage import save_state

folder = Path(sys.argv[1])
resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, 50_000))  # no file may grow beyond that
def log():
    with Appended(folder / "log", keep=1) as lines:
        for k in range(10_000):
            lines.add("another line")
for write in (
    lambda: replace_text(folder / "text", "x" * 100_000),
    lambda: save_state(folder / "state", {"model": torch.zeros(100_000)}),
    log,
):
    try:
        write()
    except PolytempoError as error:
        print(error)
"""


def test_a_disk_that_is_full_loses_nothing_and_says_so(tmp_path):
    """A limit on the size of files stands for it, of which the system complains alike."""
    replace_text(tmp_path / "text", "old")
    save_state(tmp_path / "state", {"model": torch.ones(3)})
    (tmp_path / "log").write_text("first line\n")
    done = subprocess.run(
        [sys.executable, "-c", FULL, str(tmp_path)], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    said = done.stdout.splitlines()
    assert len(said) == 3
    for line, name in zip(said, ("text", "state", "log"), strict=True):
        assert line.startswith(f"{tmp_path / name} could not be written: ")
        assert "too large" in line and "is intact" in line and "resume" in line
    assert sorted(path.name for path in tmp_path.iterdir()) == ["log", "state", "text"]
    assert (tmp_path / "text").read_text() == "old"
    assert torch.equal(load_state(tmp_path / "state")["model"], torch.ones(3))
    with Appended(tmp_path / "log", keep=1) as lines:
        lines.add("second line")
    assert (tmp_path / "log").read_text() == "first line\nsecond line\n"


def test_lines_that_are_missing_are_told_and_nothing_is_cut_off(tmp_path):
    path = tmp_path / "log"
    path.write_text("one\ntwo\n")
    with pytest.raises(PolytempoError, match="holds 2 of the 3 lines"):
        Appended(path, keep=3)
    assert path.read_text() == "one\ntwo\n"
    path.unlink()
    with pytest.raises(PolytempoError, match="holds 0 of the 3 lines"):
        Appended(path, keep=3)


# -- claimed ------------------------------------------------------------------------------------


def test_a_folder_belongs_to_one_at_a_time(tmp_path):
    folder = tmp_path / "deep" / "run"
    with Claim(folder):
        with pytest.raises(PolytempoError, match=rf"another run \(process {os.getpid()}\)"):
            Claim(folder)
        (folder / "result").write_text("")
    with Claim(folder):
        pass
    assert [path.name for path in folder.iterdir()] == ["result"]


def test_a_folder_in_which_nothing_was_written_goes_again(tmp_path):
    with Claim(tmp_path / "run"):
        pass
    assert not (tmp_path / "run").exists()
    with Claim(tmp_path):  # which was there before
        pass
    assert tmp_path.exists()


HOLDS = """
import sys, time
from pathlib import Path
from polytempo.files import Claim
with Claim(Path(sys.argv[1])):
    print("claimed", flush=True)
    time.sleep(120)
"""


def test_a_process_that_is_killed_lets_go_of_its_folder(tmp_path):
    command = [sys.executable, "-c", HOLDS, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as other:
        try:
            assert other.stdout.readline() == "claimed\n"
            with pytest.raises(PolytempoError, match=rf"another run \(process {other.pid}\)"):
                Claim(tmp_path)
        finally:
            other.kill()
            other.wait(60)
    assert other.returncode == -signal.SIGKILL
    assert (tmp_path / ".lock").exists()  # and does no harm
    with Claim(tmp_path):
        pass


MANY = """
import sys, time
from pathlib import Path
from polytempo import PolytempoError
from polytempo.files import Claim
place = Path(sys.argv[1])
while not (place / "go").exists():
    pass
for _ in range(200):
    try:
        with Claim(place / "run"):
            (place / "run" / "mine").touch(exist_ok=False)
            (place / "run" / "mine").unlink()
    except PolytempoError as error:
        assert "another run" in str(error), error
print("done")
"""


def test_claims_and_ends_of_claims_do_not_cross(tmp_path):
    command = [sys.executable, "-c", MANY, str(tmp_path)]
    several = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(3)]
    (tmp_path / "go").touch()
    for each in several:
        out, _ = each.communicate(timeout=120)
        assert out == "done\n"
