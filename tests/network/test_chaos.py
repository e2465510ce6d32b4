"""The checker of the chaos test finds what it is there to find; and a small storm."""

import signal
import subprocess
import sys

import pytest
from chaos import LAST_SECONDS, check, read
from nearby import wait_until

from polytempo.experiments import local_group
from polytempo.experiments.config import make_config
from polytempo.experiments.peer_group import Group

TICKET = ["ann", 1, 1]


def log(peer, *events, incarnation=1):
    """Events of a peer, a second apart, ten iterations apart."""
    return [
        {"time": float(k), "peer": peer, "incarnation": incarnation, "iteration": 10 * k, **event}
        for k, event in enumerate(events)
    ]


def granted(to="bob"):
    return {"event": "granted", "token": TICKET, "to": [to, 1]}


def paired(side, event="paired"):
    partner = {"owner": ["bob", 1], "claimer": ["ann", 1]}[side]
    return {"event": event, "token": TICKET, "side": side, "to": partner}


def fused(side):
    return paired(side, "fused")


def phase(name, **more):
    return {"event": "phase", "phase": name, **more}


STOPPED = {"event": "stopped"}
ANN = (granted(), paired("owner"), fused("owner"), STOPPED)
BOB = (paired("claimer"), fused("claimer"), STOPPED)


def test_a_good_pairing_is_good():
    assert check({"ann": log("ann", *ANN), "bob": log("bob", *BOB)}) == []


BAD = {
    "granted 2 times": ((granted(), *ANN), BOB),
    "paired 2 times by the owner": ((*ANN[:2], *ANN[1:]), BOB),
    "fused 2 times by the claimer": (ANN, (*BOB[:2], *BOB[1:])),
    "its owner did not": ((granted(), STOPPED), BOB),
    "never granted": (ANN[1:], BOB),
    "granted to ('carl', 1) and paired by ('bob', 1)": ((granted("carl"), *ANN[1:]), BOB),
    "never fused it": ((*ANN[:2], STOPPED), BOB),
    "fused after it had discarded": (ANN, (paired("claimer", "discarded"), *BOB)),
    "never paired": (ANN, (fused("claimer"), STOPPED)),
    "Claiming for 20.0 s": (ANN, (phase("Claiming"), {**phase("Idle"), "time": 20.0})),
    "Granted for 50.0 s": (ANN, (phase("Granted"), {"event": "left", "time": 50.0})),
    "fell from iteration 90 to 20": (
        ANN,
        ({"event": "left"}, {"event": "x", "iteration": 90}, *BOB),
    ),
    "restarted at 10, having saved 99": (
        ANN,
        ({"event": "saved", "iteration": 99}, {"event": "started", "incarnation": 2}),
    ),
    "came back as 1, after 7": (ANN, ({"event": "left", "incarnation": 7}, {"event": "left"})),
}


@pytest.mark.parametrize("what", BAD)
def test_what_should_not_happen_is_found(what):
    ann, bob = BAD[what]
    assert any(what in line for line in check({"ann": log("ann", *ann), "bob": log("bob", *bob)}))


def test_who_has_finished_discards_what_comes_in():
    bob = (paired("claimer"), paired("claimer", "discarded"), STOPPED)
    assert check({"ann": log("ann", *ANN), "bob": log("bob", *bob)}) == []


def test_who_was_killed_need_not_have_fused():
    assert check({"ann": log("ann", *ANN[:2]), "bob": log("bob", *BOB)}) == []


def test_who_stands_still_is_found():
    moving = log("ann", *[{"event": "left"}] * 30)
    still = [{**event, "iteration": 5, "peer": "bob"} for event in moving]
    found = check({"ann": moving, "bob": still}, end=29.0)
    assert found == [f"bob made no progress in the last {LAST_SECONDS:.0f} seconds"]


DEAF = "import signal, time; signal.signal(15, signal.SIG_IGN); print(flush=True); time.sleep(120)"


def test_a_peer_that_does_not_end_when_it_is_asked_to_is_killed(tmp_path, monkeypatch):
    monkeypatch.setattr(local_group, "_PATIENCE", 0.5)
    with (
        Group(make_config({"clients": 2, "strategy": "p2p"}), tmp_path) as group,
        subprocess.Popen([sys.executable, "-c", DEAF], stdout=subprocess.PIPE) as deaf,
    ):
        deaf.stdout.readline()  # from now on
        group.processes["peer-0"] = deaf
        group.stop()
        group.wait()
        assert deaf.returncode == -signal.SIGKILL


def test_a_group_that_is_broken_off_leaves_no_peer_behind(tmp_path):
    config = make_config({"clients": 2, "model": "linear", "strategy": "p2p:target=1000000"})
    with pytest.raises(ZeroDivisionError), Group(config, tmp_path / "out") as group:
        group.start(0)
        raise ZeroDivisionError
    assert group.processes["peer-0"].returncode is not None


def test_a_killed_peer_is_forgotten_and_resumes(tmp_path):
    """Three processes with mutual TLS; one is killed outright and started again."""
    settings = {"data": "synthetic:groups=2,features=8", "clients": 3, "model": "linear"}
    config = make_config({**settings, "strategy": "p2p:target=1000000,decision=always"})
    options = ["--save-every", "5", "--pause", "0.02"]
    with Group(config, tmp_path / "out", tls=True, options=options) as group:
        for number in range(3):
            group.start(number)

        def events(number, kind):
            return [e for e in read(group.out).get(f"peer-{number}", ()) if e["event"] == kind]

        wait_until(lambda: all(events(number, "fused") for number in range(3)))
        wait_until(lambda: events(2, "saved"))
        first = events(2, "started")[0]["incarnation"]
        group.processes["peer-2"].kill()
        group.processes["peer-2"].wait(60)
        dead = ["peer-2", first]
        wait_until(lambda: any(e["who"] == dead for e in events(0, "left")))
        saved = events(2, "saved")[-1]["iteration"]
        group.start(2)
        wait_until(lambda: len(events(2, "started")) == 2)
        again = events(2, "started")[1]
        assert again["incarnation"] > first and again["iteration"] >= saved > 0
        wait_until(lambda: any(e["incarnation"] > first for e in events(2, "fused")))
    assert [process.returncode for process in group.processes.values()] == [130] * 3
    assert check(read(group.out)) == []
    summary = group.result()
    assert summary["failed"] == {} and not summary["complete"]
    assert (group.out / "history.csv").read_text().startswith("peer,iteration,accuracy")
    assert summary["fusions"] > 0 and len(summary["peers"]) == 3
