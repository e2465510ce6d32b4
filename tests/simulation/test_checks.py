"""The invariant checker: silent on a right history, loud on every kind of wrong one."""

from dataclasses import replace

import pytest

from polytempo.core.events import KINDS, Event
from polytempo.simulation.checks import Checker, InvariantError

CONCURRENCY = 2


def event(kind, time, client, dispatch=None, updates=0, version=0, **details) -> Event:
    if client is not None:
        details["client"] = client
    if dispatch is not None:
        details["dispatch"] = dispatch
    return KINDS[kind](n=-1, time=time, updates=updates, version=version, **details)


def numbered(events: list[Event]) -> list[Event]:
    return [replace(e, n=n) for n, e in enumerate(events)]


# Two concurrency, three clients; the served model changes with every update but the second.
HISTORY = numbered(
    [
        event("evaluate", 0.0, None, metric="accuracy", value=0.1, loss=2.3),  # 0
        event("dispatch", 0.0, 0, 0),  # 1
        event("dispatch", 0.0, 1, 1),  # 2
        event("upload", 1.0, 0, 0, 1, 1, staleness=0, versions=0),  # 3
        event("multicast", 1.0, 1, 2, 1, 1),  # 4: client 1 is sent a fresh model
        event("dispatch", 1.0, 2, 3, 1, 1),  # 5
        event("restart", 1.5, 1, 2, 1, 1, replaces=1, step=4),  # 6: and goes on from it
        event("upload", 2.0, 2, 3, 2, 1, staleness=0, versions=0),  # 7
        event("dispatch", 2.0, 0, 4, 2, 1),  # 8
        event("multicast", 2.0, 1, 5, 2, 1),  # 9: this one comes too late
        event("urgent", 2.0, 1, 5, 2, 1),  # 10
        event("upload", 2.5, 1, 2, 3, 2, staleness=1, versions=0),  # 11: crossed on the wire
        event("dispatch", 2.5, 2, 6, 3, 2),  # 12
        event("missed", 2.6, 1, 5, 3, 2),  # 13
        event("drop", 3.0, 0, 4, 3, 2),  # 14
        event("dispatch", 3.0, 0, 7, 3, 2),  # 15
        event("leave", 3.5, 2, None, 3, 2),  # 16
        event("drop", 3.5, 2, 6, 3, 2),  # 17
        event("dispatch", 3.5, 1, 8, 3, 2),  # 18
        event("upload", 4.0, 1, 8, 4, 3, staleness=0, versions=0),  # 19
        event("upload", 4.0, 0, 7, 5, 4, staleness=1, versions=1),  # 20
        event("return", 5.0, 2, None, 5, 4),  # 21
    ]
)


def check(events: list[Event], concurrency: int = CONCURRENCY) -> None:
    checker = Checker(concurrency)
    for e in events:
        checker.happened(e)


def broken_at(events: list[Event], index: int, why: str, concurrency: int = CONCURRENCY) -> None:
    """The checker accepts everything before `index` and refuses that one."""
    checker = Checker(concurrency)
    for e in events[:index]:
        checker.happened(e)
    with pytest.raises(InvariantError, match=why) as error:
        checker.happened(events[index])
    assert repr(events[index]) in str(error.value)  # the message shows the event


def changed(index: int, **changes) -> list[Event]:
    return [*HISTORY[:index], replace(HISTORY[index], **changes), *HISTORY[index + 1 :]]


def inserted(index: int, extra: Event) -> list[Event]:
    return numbered([*HISTORY[:index], extra, *HISTORY[index:]])


def without(index: int) -> list[Event]:
    return numbered(HISTORY[:index] + HISTORY[index + 1 :])


def test_a_right_history_passes():
    check(HISTORY)
    check(HISTORY, concurrency=3)


def test_any_beginning_of_a_right_history_passes():
    for end in range(len(HISTORY)):
        check(HISTORY[:end])


# -- clock and order -------------------------------------------------------------------------------


def test_the_clock_never_goes_back():
    broken_at(changed(7, time=1.4), 7, "the clock goes back from 1.5")
    broken_at(changed(0, time=-1.0), 0, "the clock goes back")
    broken_at(changed(7, time=float("nan")), 7, "the clock goes back")


def test_events_are_numbered_without_gaps():
    broken_at(changed(5, n=6), 5, "follows event 4")
    broken_at(changed(5, n=4), 5, "follows event 4")
    broken_at([*HISTORY[:4], *HISTORY[5:]], 4, "follows event 3")
    broken_at([*HISTORY[:5], HISTORY[4], *HISTORY[5:]], 5, "follows event 4")
    broken_at(HISTORY[1:], 0, "follows event -1")


# -- concurrency ----------------------------------------------------------------------------------


def test_concurrency_is_not_exceeded():
    broken_at(HISTORY, 2, "concurrency is 1", concurrency=1)
    broken_at(inserted(3, event("dispatch", 0.0, 2, 9)), 3, "concurrency is 2")


def test_a_multicast_takes_no_slot():
    second = [event("multicast", 1.0, 1, 3, 1, 1), event("dispatch", 1.0, 2, 4, 1, 1)]
    check(numbered([*HISTORY[:5], *second]))


def test_a_client_is_not_started_twice():
    broken_at(inserted(2, event("dispatch", 0.0, 0, 9)), 2, "in training already")


def test_a_client_that_waits_is_not_sent_a_multicast():
    broken_at(inserted(2, event("multicast", 0.0, 1, 9)), 2, "not in training")
    broken_at(changed(4, client=0), 4, "not in training")  # it has just reported


# -- the life of a dispatch ------------------------------------------------------------------------


def test_a_dispatch_is_sent_once():
    broken_at(changed(2, dispatch=0), 2, "sent twice")
    broken_at(changed(5, dispatch=0), 5, "sent twice")  # ended, but its number is used up
    broken_at(changed(4, dispatch=1), 4, "sent twice")


def test_a_dispatch_does_not_end_twice():
    again = event("upload", 1.0, 0, 0, 2, 1, staleness=1, versions=1)
    broken_at(inserted(4, again), 4, "dispatch 0 is not open")
    broken_at(inserted(4, event("drop", 1.0, 0, 0, 1, 1)), 4, "dispatch 0 is not open")
    broken_at(inserted(14, event("missed", 2.6, 1, 5, 3, 2)), 14, "dispatch 5 is not open")


def test_an_upload_answers_a_dispatch():
    broken_at(changed(3, dispatch=9), 3, "dispatch 9 is not open")
    broken_at(without(1), 2, "dispatch 0 is not open")


def test_an_upload_comes_from_the_client_that_was_sent_the_model():
    broken_at(changed(3, client=1), 3, "it went to 0")
    broken_at(changed(14, client=2), 14, "it went to 0")


def test_an_upload_answers_what_the_client_trains():
    # the multicast of event 9 had not reached the client
    broken_at(changed(11, dispatch=5, staleness=0), 11, "the client trained 2")


def test_only_what_is_open_can_be_dropped_or_missed():
    broken_at(changed(14, dispatch=9), 14, "dispatch 9 is not open")
    broken_at(changed(13, dispatch=9), 13, "dispatch 9 is not open")


def test_after_a_restart_the_replaced_dispatch_is_closed():
    broken_at(changed(11, dispatch=1, staleness=2, versions=1), 11, "dispatch 1 is not open")


def test_a_restart_replaces_what_the_client_was_training():
    broken_at(changed(6, replaces=0), 6, "dispatch 0 is not open")  # it has ended
    broken_at(changed(6, replaces=9), 6, "dispatch 9 is not open")
    broken_at(changed(6, replaces=3), 6, "it went to 2")


def test_a_restart_without_which_the_upload_could_not_answer_is_missed():
    broken_at(without(6), 10, "the client trained 1")


def test_a_restart_needs_the_multicast_that_it_goes_on_from():
    broken_at(changed(6, dispatch=9), 6, "dispatch 9")  # never sent
    broken_at(changed(6, dispatch=3), 6, "dispatch 3|it went to 2")  # sent to somebody else


def test_a_restart_needs_a_client_in_training():
    """Client 1 has reported; the multicast in transit cannot set it to work again."""
    late = event("restart", 2.55, 1, 5, 3, 2, replaces=5, step=0)
    broken_at(inserted(13, late), 13, "train")


# -- counters --------------------------------------------------------------------------------------


@pytest.mark.parametrize(("index", "right"), [(3, 0), (7, 0), (11, 1), (20, 1)])
@pytest.mark.parametrize("off", [-1, 1])
def test_staleness_is_recounted(index, right, off):
    broken_at(changed(index, staleness=right + off), index, f"{right} updates passed")


@pytest.mark.parametrize(("index", "right"), [(3, 0), (7, 0), (11, 0), (20, 1)])
@pytest.mark.parametrize("off", [-1, 1])
def test_versions_are_recounted(index, right, off):
    broken_at(changed(index, versions=right + off), index, f"{right} versions passed")


def test_staleness_after_a_restart_counts_from_the_multicast():
    """Event 11 answers dispatch 2, sent after update 1; the one that it replaced, before."""
    broken_at(changed(11, staleness=2), 11, "1 updates passed")


@pytest.mark.parametrize("index", [0, 1, 4, 6, 13, 14, 16, 21])
@pytest.mark.parametrize("off", [-1, 1])
def test_rounds_count_uploads_and_nothing_else(index, off):
    right = HISTORY[index].updates
    broken_at(changed(index, updates=right + off), index, f"{right} updates were folded")


@pytest.mark.parametrize("index", [3, 11, 20])
def test_an_upload_is_a_round(index):
    right = HISTORY[index].updates
    broken_at(changed(index, updates=right - 1), index, f"{right} updates were folded")


def test_versions_never_go_back():
    broken_at(changed(7, version=0), 7, "version was 1")
    broken_at(changed(21, version=3), 21, "version was 4")


def test_versions_may_rise_when_a_lost_update_closes_a_cohort():
    check(
        numbered(
            [
                event("dispatch", 0.0, 0, 0),
                event("dispatch", 0.0, 1, 1),
                event("upload", 1.0, 0, 0, 1, 0, staleness=0, versions=0),
                event("drop", 2.0, 1, 1, 1, 1),
                event("dispatch", 2.0, 1, 2, 1, 1),
                event("upload", 3.0, 1, 2, 2, 1, staleness=0, versions=0),
            ]
        )
    )
