"""What events add up to."""

import json
from itertools import pairwise

from polytempo.view.activity import (
    DONE,
    GONE,
    IDLE,
    LOST,
    SENDING,
    TRAINING,
    UNDER_WAY,
    Activity,
)


def fed(lines, **options):
    activity = Activity(**options)
    activity.feed(lines)
    return activity


def test_a_training_from_dispatch_to_upload(log):
    activity = fed(
        [
            log("evaluate", 0.0, metric="accuracy", value=0.1, loss=2.0),
            log("dispatch", 0.0, client=2, dispatch=0),
            log("dispatch", 0.0, client=1, dispatch=1),
            log("upload", 3.0, client=2, dispatch=0, staleness=4, versions=4),
            log("evaluate", 3.0, metric="accuracy", value=0.5, loss=1.0),
        ]
    )
    assert activity.clients[2].state == IDLE and activity.clients[1].state == TRAINING
    assert activity.clients[2].staleness == 4 and activity.clients[2].updates == 1
    assert list(activity.trainings) == [(2, 0.0, 3.0, 4, DONE)]
    assert set(activity.bars({1, 2}, 10)) == {(2, 0.0, 3.0, 4, DONE), (1, 0.0, 3.0, 0, UNDER_WAY)}
    assert [(p.time, p.updates, p.messages, p.value) for p in activity.points] == [
        (0.0, 0, 0, 0.1),
        (3.0, 1, 3, 0.5),
    ]


def test_a_restart_is_the_same_training_and_an_older_drop_does_not_end_it(log):
    activity = fed(
        [
            log("dispatch", 0.0, client=0, dispatch=0),
            log("multicast", 1.0, client=0, dispatch=5),
            log("restart", 1.0, client=0, dispatch=5, replaces=0, step=3),
            log("drop", 1.5, client=0, dispatch=0),
            log("upload", 2.0, client=0, dispatch=5, staleness=0, versions=0),
        ]
    )
    assert list(activity.trainings) == [(0, 0.0, 2.0, 0, DONE)]
    assert activity.messages == 3


def test_who_leaves_is_gone_and_what_it_trained_may_be_lost(log):
    activity = fed(
        [
            log("dispatch", 0.0, client=0, dispatch=0),
            log("leave", 1.0, client=0),
            log("drop", 2.0, client=0, dispatch=0),
        ]
    )
    assert activity.clients[0].state == GONE and activity.clients[0].lost == 1
    assert list(activity.trainings) == [(0, 0.0, 2.0, 0, LOST)]
    activity.feed([log("return", 3.0, client=0)])
    assert activity.clients[0].state == IDLE


def test_clients_of_a_deployed_server_are_gone_until_they_come(log):
    activity = fed([log("dispatch", 1.0, client=1, dispatch=0)], absent=True)
    assert activity.client(0).state == GONE and activity.clients[1].state == TRAINING


def test_peers_train_without_a_server(log):
    activity = fed(
        [
            log("train", 1.0, client=0, iteration=5),
            log("exchange", 1.0, client=0, ticket="0.1.1", progress=0.1),
        ]
    )
    assert activity.clients[0].state == SENDING
    activity.feed(
        [
            log("fuse", 1.5, client=0, ticket="0.1.1", partner=1, weight=0.5),
            log("train", 2.5, client=0, iteration=10),
        ]
    )
    assert activity.clients[0].state == TRAINING
    assert list(activity.trainings) == [(0, 0.0, 1.0, 0, DONE), (0, 1.0, 2.5, 0, DONE)]


def test_lines_that_are_no_events_are_counted_and_do_no_harm(log):
    bad = [
        b"",
        b"{",
        b"[1, 2]",
        b"null",
        b'{"event": "upload"}',
        b'{"event": 7, "time": 1, "updates": 0, "version": 0}',
        b'{"event": "upload", "time": "soon", "updates": 0, "version": 0}',
        b'{"event": "upload", "time": NaN, "updates": 0, "version": 0}',
        b'{"event": "dispatch", "time": 1, "updates": 0, "version": 0, "client": -1, "dispatch": 1}',  # noqa: E501
        b'{"event": "dispatch", "time": 1, "updates": 0, "version": 0, "client": 1e12}',
        b'{"event": "upload", "time": 1, "updates": 0, "version": 0, "client": 0, "staleness": []}',
        b"\xff\xfe\x00",
        b"[" * 100_000,
    ]
    activity = fed(bad)
    assert activity.unreadable == len(bad) and activity.events == 0
    activity.feed([log("evaluate", 1.0, metric="mse", value=None, loss=None)])
    assert activity.points[0].value is None and activity.metric == "mse"
    unknown = {
        "n": 1,
        "time": 2.0,
        "event": "of the future",
        "updates": 0,
        "version": 0,
        "client": 1,
    }
    activity.feed([json.dumps(unknown).encode()])
    assert activity.events == 2


def test_memory_is_bounded(log, monkeypatch):
    monkeypatch.setattr("polytempo.view.activity.KEPT", 5)
    activity = Activity()
    for k in range(20):
        activity.feed(
            [
                log("dispatch", float(k), client=0, dispatch=k),
                log("upload", k + 0.5, client=0, dispatch=k, staleness=0, versions=0),
            ]
        )
    assert len(activity.trainings) == 5 and activity.over == 20
    assert len(activity.bars({0}, 3)) == 3
    assert activity.bars({0}, 3)[0] == (0, 19.0, 19.5, 0, DONE)  # the latest


def test_messages_are_counted_now_and_then_over_the_whole_run(log, monkeypatch):
    monkeypatch.setattr("polytempo.view.activity.SAMPLES", 8)
    activity = fed(log("dispatch", float(k), client=0, dispatch=k) for k in range(100))
    assert len(activity.sent) < 8
    assert all(counts[0] == time + 1 for time, counts in activity.sent)
    gaps = {later - sooner for (sooner, _), (later, _) in pairwise(activity.sent)}
    assert len(gaps) == 1 and activity.sent[-1][0] > 80
    assert activity.sent_now() == (100, 0, 0, 0)
