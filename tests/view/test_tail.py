"""Every complete line is read once, whatever happens to the file."""

from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st

from polytempo.view.tail import Tail, Whole


def test_a_torn_last_line_is_read_when_it_is_whole(tmp_path):
    path = tmp_path / "log"
    tail = Tail(path)
    assert tail.look() == (False, [])  # not there yet
    path.write_bytes(b"one\ntw")
    assert tail.look() == (False, [b"one"])
    assert tail.look() == (False, [])
    with path.open("ab") as file:
        file.write(b"o\nthree\n")
    assert tail.look() == (False, [b"two", b"three"])


def test_a_file_that_shrinks_is_read_anew(tmp_path):
    path = tmp_path / "log"
    path.write_bytes(b"one\ntwo\nthree\n")
    tail = Tail(path)
    tail.look()
    with path.open("r+b") as file:
        file.truncate(4)
    assert tail.look() == (True, [b"one"])


def test_a_file_cut_back_and_grown_beyond_what_was_read_is_read_anew(tmp_path):
    path = tmp_path / "log"
    path.write_bytes(b"one\ntwo\n")
    tail = Tail(path)
    tail.look()
    with path.open("r+b") as file:
        file.truncate(4)
        file.seek(4)
        file.write(b"another\nmore\n")
    assert tail.look() == (True, [b"one", b"another", b"more"])


def test_a_file_that_was_replaced_is_read_anew_and_one_that_goes_is_forgotten(tmp_path):
    path = tmp_path / "log"
    path.write_bytes(b"one\n")
    tail = Tail(path)
    tail.look()
    (tmp_path / "new").write_bytes(b"one\ntwo\n")
    (tmp_path / "new").replace(path)
    assert tail.look() == (True, [b"one", b"two"])
    path.unlink()
    assert tail.look() == (True, [])
    assert tail.look() == (False, [])


def test_a_long_file_is_read_in_pieces(tmp_path):
    path = tmp_path / "log"
    path.write_bytes(b"".join(b"line %d\n" % k for k in range(100)))
    tail, found, looks = Tail(path, chunk=64), [], 0
    while True:
        anew, lines = tail.look()
        assert not anew
        found += lines
        looks += 1
        if not tail.behind and not lines:
            break
    assert found == [b"line %d" % k for k in range(100)]
    assert looks > 10


def test_a_line_without_end_does_not_stop_the_reading(tmp_path):
    path = tmp_path / "log"
    path.write_bytes(b"x" * 1000 + b"\ngood\n")
    tail, found = Tail(path, chunk=64), []
    for _ in range(30):
        found += tail.look()[1]
    assert found[-1] == b"good"


@settings(max_examples=50, deadline=None)
@given(st.lists(st.binary(max_size=20).filter(lambda part: b"\r" not in part), max_size=20))
def test_however_it_is_written_the_lines_are_the_same(tmp_path_factory, parts):
    path: Path = tmp_path_factory.mktemp("tail") / "log"
    path.touch()
    tail, found = Tail(path), []
    for part in parts:
        with path.open("ab") as file:
            file.write(part)
        anew, lines = tail.look()
        assert not anew
        found += lines
    whole = b"".join(parts)
    end = whole.rfind(b"\n") + 1
    assert found == whole[:end].splitlines()


def test_a_small_file_keeps_its_last_good_value(tmp_path):
    path = tmp_path / "number"
    whole = Whole[int](path, lambda place: int(place.read_text()), 0)
    assert not whole.look() and whole.value == 0
    path.write_text("7")
    assert whole.look() and whole.value == 7
    assert not whole.look()
    path.write_text("half of it")
    assert whole.look() and whole.value == 7 and whole.bad
    path.write_text("21")
    assert whole.look() and whole.value == 21 and not whole.bad
    path.unlink()
    assert whole.look() and whole.value == 0
