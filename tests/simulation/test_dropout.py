"""Who is there, when, and which updates get lost or come late."""

from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from polytempo.core.errors import PolytempoError
from polytempo.core.rng import rng
from polytempo.simulation.dropout import DROPOUTS, Change, Timeline, Trace, late

DRAWS = 2000


def fates(spec: str) -> Counter:
    dropout = DROPOUTS.create(spec)
    return Counter(dropout.fate(rng(0, "fate", i)) for i in range(DRAWS))


def expected(probability: float) -> tuple[float, float]:
    """Bounds of four standard deviations on the number of unlucky ones."""
    spread = 4 * np.sqrt(DRAWS * probability * (1 - probability))
    return DRAWS * probability - spread, DRAWS * probability + spread


# -- fates -----------------------------------------------------------------------------------------


def test_without_dropout_everything_arrives():
    assert fates("none") == {"arrives": DRAWS}
    assert DROPOUTS.create("none").changes(10, 0) == []


@pytest.mark.parametrize("probability", [0.1, 0.5])
def test_drop_loses_its_share_of_the_updates(probability):
    found = fates(f"drop:probability={probability}")
    assert set(found) == {"lost", "arrives"}
    low, high = expected(probability)
    assert low < found["lost"] < high


@pytest.mark.parametrize("probability", [0.1, 0.5])
def test_delay_slows_its_share_of_the_updates_by_its_factor(probability):
    found = fates(f"delay:probability={probability},factor=3")
    assert set(found) == {3.0, "arrives"}
    assert all(isinstance(fate, float | str) for fate in found)
    low, high = expected(probability)
    assert low < found[3.0] < high


def test_certain_and_impossible_dropout():
    assert fates("drop:probability=0") == {"arrives": DRAWS}
    assert fates("delay:probability=0") == {"arrives": DRAWS}
    assert fates("delay:probability=1,factor=2") == {2.0: DRAWS}


@pytest.mark.parametrize(
    "wrong",
    [
        "drop:probability=1",  # then no update would ever arrive
        "drop:probability=-0.1",
        "delay:probability=1.1",
        "delay:factor=0.5",
        "leave:at=-1",
        "leave:share=0.5",
        "leave:at=1,version=2",
        "leave:version=0",
        "leave:at=3,share=2",
        "leave",
        "trace",
    ],
)
def test_impossible_settings_are_refused(wrong):
    with pytest.raises(PolytempoError, match=wrong.split(":")[0]):
        DROPOUTS.create(wrong)


# -- leaving for good ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("spec", "clients", "gone"),
    [
        ("leave:at=7.5", 20, 6),
        ("leave:at=7.5", 100, 30),
        ("leave:at=7.5,share=0.5", 9, 4),
        ("leave:at=7.5,share=1", 5, 5),
        ("leave:at=7.5,share=0", 5, 0),
    ],
)
def test_a_share_of_the_clients_leaves_for_good(spec, clients, gone):
    changes = DROPOUTS.create(spec).changes(clients, seed=1)
    assert len({change.client for change in changes}) == len(changes) == gone
    assert all(0 <= change.client < clients for change in changes)
    assert all(change.time == 7.5 and change.for_good for change in changes)
    assert all(not change.available and change.latency is None for change in changes)


def test_who_leaves_is_chosen_at_random_by_the_seed():
    dropout = DROPOUTS.create("leave:at=1")

    def gone(seed):
        return tuple(change.client for change in dropout.changes(10, seed))

    assert gone(3) == gone(3)
    assert len({gone(seed) for seed in range(30)}) > 20
    counts = Counter(client for seed in range(300) for client in gone(seed))
    assert all(abs(counts[c] - 90) < 4 * np.sqrt(300 * 0.3 * 0.7) for c in range(10))


# -- traces ----------------------------------------------------------------------------------------


@pytest.fixture
def trace(tmp_path):
    def write(text: str, encoding: str = "utf8") -> Trace:
        path = tmp_path / "trace.csv"
        path.write_bytes(text.encode(encoding))
        return Trace(str(path))

    return write


def test_a_trace_is_read_in_order_of_time(trace):
    found = trace(
        "client,time,available,latency\n"
        "2,10.5,0,\n"
        "0,3,1,2.5\n"
        "1,3,FALSE,\n"
        "0, 1 , true , \n"
    ).changes(3, 0)  # fmt: skip
    assert found == [
        Change(1.0, 0, True),
        Change(3.0, 0, True, 2.5),
        Change(3.0, 1, False),
        Change(10.5, 2, False),
    ]
    assert not any(change.for_good for change in found)


def test_latency_is_optional_and_columns_come_in_any_order(trace):
    assert trace("available,client,time\n1,4,2\n").changes(5, 0) == [Change(2.0, 4, True)]
    assert trace("note,client,available,time\nx,4,0,2\n").changes(5, 0) == [Change(2.0, 4, False)]
    assert trace("client,time,available\n").changes(5, 0) == []


def test_changes_at_the_same_time_keep_the_order_of_the_file(trace):
    found = trace("client,time,available\n1,5,0\n0,5,1\n1,5,1\n").changes(2, 0)
    assert found == [Change(5.0, 0, True), Change(5.0, 1, False), Change(5.0, 1, True)]


def one_line(action) -> str:
    with pytest.raises(PolytempoError) as error:
        action()
    assert "\n" not in str(error.value)
    return str(error.value)


@pytest.mark.parametrize(
    "row",
    [
        "x,5,1",
        "1.5,5,1",
        "0,soon,1",
        "0,,1",
        "0,5,maybe",
        "0,5,2",
        "0,5,",
        "0,5,1,fast",
        "0,5,1,0",
        "0,5,1,-2",
        "0,5,1,nan",
    ],
)
def test_a_row_that_cannot_be_read_is_named_by_its_line(trace, row):
    made = trace(f"client,time,available,latency\n0,1,1,\n{row}\n")
    message = one_line(lambda: made.changes(2, 0))
    assert "trace.csv, line 3" in message and "available 0 or 1" in message


@pytest.mark.parametrize("text", ["client,time,available\n0,5\n", "available,client,time\n0,5\n"])
def test_a_row_that_is_too_short_is_named_by_its_line(trace, text):
    assert "trace.csv, line 2" in one_line(lambda: trace(text).changes(2, 0))


@pytest.mark.parametrize("row", ["0,nan,1,", "0,inf,1,", "0,5,1,inf"])
def test_times_that_never_come_are_refused(trace, row):
    made = trace(f"client,time,available,latency\n{row}\n")
    assert "trace.csv, line 2" in one_line(lambda: made.changes(2, 0))


def test_lines_are_counted_as_an_editor_counts_them(trace):
    made = trace("client,time,available\n0,1,1\n\n\n0,2,perhaps\n")
    assert "line 5" in one_line(lambda: made.changes(2, 0))


def test_a_file_saved_by_a_spreadsheet_can_be_read(trace):
    made = trace("client,time,available\n0,1,1\n", "utf-8-sig")  # with a byte order mark
    assert made.changes(1, 0) == [Change(1.0, 0, True)]


def test_a_file_that_is_no_text_is_an_error_that_names_it(trace):
    made = trace("client,time,available\n0,1,é\n", "latin1")
    assert "trace.csv" in one_line(lambda: made.changes(1, 0))


def test_missing_columns_are_named(trace):
    message = one_line(lambda: trace("client,when\n0,5\n").changes(2, 0))
    assert "no column available, time" in message and "client,time,available" in message
    assert "available, client, time" in one_line(lambda: trace("").changes(2, 0))


@pytest.mark.parametrize("client", [-1, 3, 99])
def test_a_client_that_the_federation_does_not_have_is_named(trace, client):
    made = trace(f"client,time,available\n0,1,0\n{client},5,1\n")
    assert f"names client {client};" in one_line(lambda: made.changes(3, 0))


def test_a_missing_file_is_named(tmp_path):
    message = one_line(lambda: Trace(str(tmp_path / "nowhere.csv")).changes(3, 0))
    assert message.endswith("nowhere.csv cannot be read: No such file or directory")


# -- timeline --------------------------------------------------------------------------------------

AWAY = [
    Change(10.0, 0, False),
    Change(20.0, 0, True, 3.0),
    Change(25.0, 0, True, 4.0),
    Change(30.0, 0, False),
]


@pytest.mark.parametrize(
    ("time", "there"),
    [(0.0, None), (9.99, None), (10.0, 0), (19.0, 0), (20.0, 1), (24.0, 1), (25.0, 2), (99.0, 3)],
)
def test_a_change_holds_from_its_time_until_the_next(time, there):
    assert Timeline(AWAY).at(0, time) == (None if there is None else AWAY[there])


@pytest.mark.parametrize(
    ("time", "expected_time"),
    [
        (0.0, 0.0),
        (9.0, 9.0),
        (10.0, 20.0),
        (15.0, 20.0),
        (20.0, 20.0),
        (29.0, 29.0),
        (30.0, float("inf")),
        (50.0, float("inf")),
    ],
)
def test_an_upload_waits_until_the_client_is_there_again(time, expected_time):
    assert Timeline(AWAY).next_available(0, time) == expected_time


def test_clients_without_changes_are_always_there():
    timeline = Timeline(AWAY)
    assert timeline.at(1, 15.0) is None
    assert timeline.next_available(1, 15.0) == 15.0


def test_of_two_changes_at_one_time_the_last_holds():
    timeline = Timeline([Change(5.0, 0, False), Change(5.0, 0, True, 2.0)])
    assert timeline.at(0, 5.0) == Change(5.0, 0, True, 2.0)
    assert timeline.next_available(0, 5.0) == 5.0


def test_a_client_that_leaves_in_the_instant_of_its_return_was_not_there():
    times = [(1.0, False), (5.0, True), (5.0, False), (9.0, True)]
    timeline = Timeline([Change(time, 0, there) for time, there in times])
    assert timeline.next_available(0, 3.0) == 9.0


@settings(max_examples=80, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 30), st.booleans()), max_size=8, unique_by=lambda x: x[0]),
    st.integers(0, 31),
)
def test_availability_is_that_of_a_walk_through_the_days(changes, now):
    changes = sorted(changes)
    timeline = Timeline([Change(float(time), 0, there) for time, there in changes])
    there, state = {}, True  # everybody is there at first
    for day in range(60):
        state = dict(changes).get(day, state)
        there[day] = state
    first = next((day for day in range(now, 60) if there[day]), float("inf"))
    assert timeline.next_available(0, float(now)) == first
    found = timeline.at(0, float(now))
    assert (found is None or found.available) == there[now]


# -- newcomers -------------------------------------------------------------------------------------


def test_a_share_of_the_clients_joins_at_a_time():
    changes = DROPOUTS.create("join:at=7,share=0.3").changes(10, 0)
    newcomers = late(changes)
    assert len(newcomers) == 3
    timeline = Timeline(changes)
    for client in range(10):
        assert timeline.next_available(client, 0.0) == (7 if client in newcomers else 0)


def test_a_share_of_the_clients_joins_with_a_round():
    changes = DROPOUTS.create("join:updates=5,share=0.3").changes(10, 0)
    assert {change.updates for change in changes} == {5}
    assert late(changes) == {change.client for change in changes} and len(changes) == 3


def test_somebody_is_there_from_the_beginning():
    assert len(late(DROPOUTS.create("join:updates=5,share=0.9").changes(2, 0))) == 1
    assert DROPOUTS.create("join:updates=5,share=0").changes(4, 0) == []


def test_who_leaves_later_is_not_late():
    assert late(DROPOUTS.create("leave:at=5").changes(10, 0)) == set()
    assert late(DROPOUTS.create("leave:version=5").changes(10, 0)) == set()
    there = [Change(0.0, 1, False), Change(0.0, 1, True), Change(-1.0, 2, False)]
    assert late(there) == {2}


@pytest.mark.parametrize("spec", ["join", "join:at=3,updates=4", "join:updates=3,share=1"])
def test_newcomers_that_cannot_be_are_refused(spec):
    assert "join" in one_line(lambda: DROPOUTS.create(spec))
