"""What is hung onto a run is told of all that happens, is saved with it, and changes nothing."""

import csv
import json

import numpy as np
import pytest
import torch
from torch import nn

from polytempo import PolytempoError, Task
from polytempo.core.events import Evaluate, Upload
from polytempo.experiments.result_folder import write_result
from polytempo.experiments.summary import summarise
from polytempo.simulation import Extension, PeerSimulator, Simulator
from polytempo.simulation.checks import Checker, InvariantError, PeerChecker
from polytempo.simulation.devices import TwoSpeed
from polytempo.simulation.dropout import Drop, Join, Leave
from polytempo.storage import load_state, save_state
from polytempo.strategies import STRATEGIES


class Diary(Extension):
    """Keeps what it is told."""

    name = "diary"

    def __init__(self) -> None:
        self.begun, self.kinds, self.uploads, self.keys = 0, [], [0] * 8, []

    def started(self):
        self.begun += 1

    def popped(self, key):
        self.keys.append(key)

    def happened(self, event):
        self.kinds.append(event.kind)
        if isinstance(event, Upload):
            self.uploads[event.client] += 1

    def evaluated(self, scores):
        return {"tested": len(scores)}

    def figures(self):
        return {"uploads": self.uploads}

    def tables(self):
        return {"diary": [{"kind": kind} for kind in self.kinds], "empty": []}

    def arrays(self):
        return {"uploads": {"counts": np.array(self.uploads)}}

    def state_dict(self):
        return {"begun": self.begun, "kinds": self.kinds, "uploads": self.uploads}

    def load_state_dict(self, state):
        self.begun, self.kinds, self.uploads = state["begun"], state["kinds"], state["uploads"]


def module() -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return nn.Linear(12, 4)


def world(small, *extensions: Extension, strategy="fedbuff:buffer_size=2", **options) -> Simulator:
    given = {"adapt_epochs": 0, "eval_every": 6, "concurrency": 4, "devices": TwoSpeed()} | options
    task = Task(epochs=1, batch_size=4, lr=0.05)
    made = Simulator(small, module(), STRATEGIES.create(strategy), task=task, **given)
    for extension in extensions:
        made.extend(extension)
    return made


def peers(small, **options) -> PeerSimulator:
    strategy = STRATEGIES.create("p2p:local_steps=3,decision=every,decision.rounds=1")
    given = {"adapt_epochs": 0, "eval_every": 40, "updates": 160} | options
    return PeerSimulator(small, module(), strategy, task=Task(batch_size=8, lr=0.05), **given)


def test_an_extension_is_told_of_all_that_happens_and_changes_nothing(small):
    diary, log = Diary(), []
    plain, watched = world(small), world(small, diary)
    watched.observers.append(log.append)
    plain.run(20)
    watched.run(20)
    assert plain.fingerprint == watched.fingerprint
    assert diary.begun == 1
    assert diary.kinds == [event.kind for event in log]
    assert diary.keys == sorted(diary.keys) and len(diary.keys) >= 20
    assert [row["tested"] for row in watched.history] == [8] * len(watched.history)
    assert len(watched.history) == sum(isinstance(event, Evaluate) for event in log)


def test_an_extension_of_peers_is_told_of_what_the_queue_gives_out(small):
    diary, simulator = Diary(), peers(small)
    simulator.extend(diary)
    simulator.run(20)
    assert len(diary.keys) + len(simulator.queue) == simulator.counter  # the rest is still in it
    assert [time for time, *_ in diary.keys] == sorted(time for time, *_ in diary.keys)


def test_an_extension_has_a_part_in_the_summary_and_the_folder(small, tmp_path):
    simulator = world(small, Diary())
    simulator.run(20)
    write_result(tmp_path, summarise(simulator, {"name": "fedbuff"}, complete=True), {})
    found = json.loads((tmp_path / "result.json").read_text())["uploads"]
    assert sum(found) == 20
    with (tmp_path / "diary.csv").open() as file:
        assert len(list(csv.DictReader(file))) == simulator.events
    with np.load(tmp_path / "uploads.npz") as arrays:
        assert arrays["counts"].tolist() == found
    assert not (tmp_path / "empty.csv").exists()


def test_an_extension_goes_on_from_a_checkpoint(small, tmp_path):
    whole, before, after = Diary(), Diary(), Diary()
    world(small, whole).run(20)
    first = world(small, before)
    first.run(20, stop=iter([False] * 9 + [True]).__next__)
    save_state(tmp_path / "state", first.state_dict())
    second = world(small, after)
    second.load_state_dict(load_state(tmp_path / "state"))
    second.run(20)
    assert after.kinds == whole.kinds and after.uploads == whole.uploads
    assert after.begun == 1


def test_names_are_unique(small):
    with pytest.raises(PolytempoError, match=r"already has an extension 'diary'"):
        world(small, Diary(), Diary())


def test_an_extension_that_missed_the_beginning_is_refused(small):
    first = world(small)
    first.run(6)
    with pytest.raises(PolytempoError, match=r"made without the checker.* resume without it"):
        world(small, check=True).load_state_dict(first.state_dict())
    world(small).load_state_dict(world(small, check=True).state_dict())  # it need not go on


@pytest.mark.parametrize(
    ("strategy", "options"),
    [
        ("fedbuff:buffer_size=2", {"dropout": Drop(probability=0.3)}),
        ("fedbuff:buffer_size=2", {"dropout": Join(updates=9, share=0.4)}),
        ("fedbuff:buffer_size=2", {"dropout": Leave(at=3.0, share=0.4)}),
        ("pace:omega=20,latency_ms=3000", {}),
        ("fedavg", {}),
    ],
)
def test_a_resumed_checker_knows_what_one_that_saw_it_all_knows(small, strategy, options, tmp_path):
    """Whatever the event at which the run is broken off."""
    log = []
    whole = world(small, strategy=strategy, check=True, **options)
    whole.observers.append(log.append)
    whole.run(24)
    for stop in range(0, 24, 3):
        first = world(small, strategy=strategy, check=True, **options)
        first.run(stop)
        save_state(tmp_path / f"{stop}", first.state_dict())
        second = world(small, strategy=strategy, check=True, **options)
        second.load_state_dict(load_state(tmp_path / f"{stop}"))
        resumed, seen = second.extensions["checker"], Checker(second.concurrency)
        assert isinstance(resumed, Checker)
        replayed = world(small, strategy=strategy, **options)
        replayed.observers.append(seen.happened)
        replayed.run(stop)
        seen.key = resumed.key  # of the queue, which events do not show
        assert vars(resumed) == vars(seen)
        second.run(24)


def test_a_resumed_checker_still_sees_what_is_wrong(small):
    first = world(small, check=True)
    first.run(9)
    second = world(small, check=True)
    second.load_state_dict(first.state_dict())
    checker = second.extensions["checker"]
    client, number = next(iter(checker.training.items()))
    head = (second.events, second.time, second.updates, second.version)
    wrong = Upload(*head, client, number, staleness=10**6, versions=0)
    with pytest.raises(InvariantError, match="updates passed"):
        checker.happened(wrong)
    with pytest.raises(InvariantError, match="came before"):
        checker.popped((0.0, 0, 0))


def test_a_resumed_checker_of_peers_knows_their_tickets(small, tmp_path):
    first = peers(small, check=True)
    first.run(60)
    save_state(tmp_path / "state", first.state_dict())
    second = peers(small, check=True)
    second.load_state_dict(load_state(tmp_path / "state"))
    resumed = second.extensions["checker"]
    assert isinstance(resumed, PeerChecker) and resumed.fused
    assert vars(resumed) == vars(first.extensions["checker"])
    second.run(160)
