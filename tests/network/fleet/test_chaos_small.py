"""Small forms of the storms: `fleet_chaos.py`, `hostile.py` and `namespaces.py` run the large ones.
And the checker of the chaos finds what it is there to find."""

import os
import random
import shutil
import time
from dataclasses import replace
from pathlib import Path

import fleet_chaos
import hostile
import namespaces
import pytest
from fleet_chaos import Found, check
from fuzz import fuzz

A, B = ("client-0", 3), ("client-1", 4)
GOOD = Found([A, A, B], [A, B], [A, B], {"client-0": 1, "client-1": 1})


def test_twelve_kills_lose_nothing_and_fold_nothing_twice(tmp_path):
    wrong, figures = fleet_chaos.run(
        tmp_path / "chaos", kills=12, clients=3, size=100_000, pause=0.5, minutes=2
    )
    assert wrong == []
    assert figures["kills"] == 12 and figures["updates folded"] > 75


def test_a_fleet_that_lost_nothing_is_good():
    assert check(GOOD) == []


@pytest.mark.parametrize(
    ("change", "what"),
    [
        ({"folded": [A], "reported": [A]}, "lost: ('client-1', 4)"),
        ({"folded": [A, B, A], "reported": [A, B, A]}, "folded 2 times: ('client-0', 3)"),
        ({"remembered": {"client-0": 2}}, "remembers 2 acknowledged trainings"),
        ({"reported": [B, A]}, "the event log is not"),
        ({"wrong": ["state/model differs"]}, "state/model differs"),
    ],
)
def test_what_should_not_happen_is_found(change, what):
    assert any(what in line for line in check(replace(GOOD, **change)))


def test_broken_messages_are_refused_and_nothing_else_happens():
    found = fuzz(20_000, seed=1)
    assert found["refused"] > 12_000 and found["read"] > 3_000 and found["updates folded"] > 0


def test_fuzzed_messages_over_the_network_are_all_read_and_hold_up_nobody(tmp_path):
    row = hostile.over_the_wire(tmp_path / "wire", 3_000, 60.0)
    assert "messages read" in row.outcome and "INVALID_ARGUMENT" in row.outcome, row.outcome
    assert row.reconnects == 0 and len(row.waits) > 20, row


def test_a_link_loses_delays_and_holds_up_packets():
    draws, link = random.Random(0), namespaces.Link((0, 1))
    assert link.arrival(0, 1_000, 5.0, draws) == 5.0
    link.set(delay=0.2, rate=10_000.0)
    assert [link.arrival(0, 1_000, 5.0, draws) for _ in range(2)] == pytest.approx([5.3, 5.4])
    assert link.arrival(1, 1_000, 5.0, draws) == pytest.approx(5.3), "the other way is free"
    link.set(loss=0.05)
    there = [link.arrival(0, 1_000, 9.0, draws) for _ in range(10_000)]
    assert 400 < there.count(None) < 600
    link.set(up=False)
    assert link.arrival(0, 1_000, 9.0, draws) is None


def can_make_hosts():
    return os.geteuid() == 0 and shutil.which("ip") and Path("/dev/net/tun").exists()


@pytest.mark.skipif(not can_make_hosts(), reason="needs root, ip and /dev/net/tun")
def test_hosts_that_were_cut_off_go_on_when_the_link_is_back(tmp_path):
    phase = namespaces.Phase("cut off", {"up": False}, 2, 6.0)
    begin = time.monotonic()
    assert namespaces.run(tmp_path / "hosts", [phase], size=1_000, calm=1.0) == []
    assert time.monotonic() - begin < 180
