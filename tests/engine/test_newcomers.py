"""Clients that join in the middle of a run, with every kind of strategy."""

import pytest
import torch
from torch import nn

from polytempo import Federation, Task
from polytempo.core.events import as_dict
from polytempo.simulation import Simulator
from polytempo.simulation.dropout import DROPOUTS
from polytempo.storage import load_state, save_state
from polytempo.strategies import STRATEGIES

CLIENTS, UPDATES = 8, 40
SPECS = [
    *("fedavg", "fedasync", "fedbuff:buffer_size=3", "standalone", "pace", "port", "fedamp"),
    *("pfedgraph-async", "ace", "ace:start=first", "aced", "ca2fl:buffer_size=3", "vanilla-asgd"),
    *("casa:founders=1", "casa+:founders=1", "icfl:founders=1", "icfl-async:founders=1"),
    *("ifca-async", "echopfl"),
]


@pytest.fixture(scope="module")
def fed() -> Federation:
    return Federation.load("synthetic:samples=16,features=6,classes=4", clients=CLIENTS, seed=2)


def world(fed: Federation, strategy: str, dropout: str, **options) -> tuple[Simulator, list[dict]]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        module = nn.Linear(6, 4)
    given = {"concurrency": 3, "eval_every": 5, "adapt_epochs": 0} | options
    simulator = Simulator(
        fed,
        module,
        STRATEGIES.create(strategy),
        task=Task(epochs=1, batch_size=8, lr=0.05),
        dropout=DROPOUTS.create(dropout),
        check=True,
        **given,
    )
    log: list[dict] = []
    simulator.observers.append(lambda event: log.append(as_dict(event)))
    return simulator, log


@pytest.mark.parametrize("spec", SPECS)
def test_newcomers_take_part_from_when_they_join_and_not_before(fed, spec):
    simulator, log = world(fed, spec, "join:updates=12,share=0.25")
    simulator.run(UPDATES)
    assert simulator.server.updates == UPDATES  # nobody waits for those who are not there
    new = simulator.late
    assert len(new) == 2
    joined = {e["client"]: e["n"] for e in log if e["event"] == "join"}
    assert joined.keys() == new and all(e["updates"] == 12 for e in log if e["event"] == "join")
    for client in new:
        first = next(e for e in log if e["event"] == "dispatch" and e["client"] == client)
        assert first["n"] > joined[client]
        if simulator.server.refill != "cohort":
            assert first["updates"] == 12  # at once
    uploads = {e["client"] for e in log if e["event"] == "upload"}
    assert new <= uploads


def test_the_number_in_training_falls_back_to_the_slots(fed):
    simulator, log = world(fed, "fedasync", "join:updates=12,share=0.5")
    busy, most = 0, {}
    simulator.run(UPDATES)
    for event in log:
        busy += {"dispatch": 1, "upload": -1, "drop": -1}.get(event["event"], 0)
        most[event["updates"]] = max(busy, most.get(event["updates"], 0))
    assert most[11] == 3 and most[12] == 3 + 4
    assert most[17] == 3 and all(n == 3 for r, n in most.items() if r >= 17)


def test_a_newcomer_counts_from_when_it_joins(fed):
    simulator, _ = world(fed, "standalone", "join:updates=12,share=0.25")
    simulator.run(UPDATES)
    new = [row["accuracy_newcomers"] for row in simulator.history]
    updates = [row["updates"] for row in simulator.history]
    assert [value is None for value in new] == [r < 12 for r in updates]
    each = [s.sums["correct"] / s.total for s in simulator._evaluate(range(CLIENTS))]
    last = simulator.history[-1]
    assert last["accuracy"] == pytest.approx(sum(each) / CLIENTS)
    assert last["accuracy_newcomers"] == pytest.approx(sum(each[c] for c in simulator.late) / 2)
    old = [c for c in range(CLIENTS) if c not in simulator.late]
    fresh, _ = world(fed, "standalone", "join:updates=12,share=0.25")
    untrained = [s.sums["correct"] / s.total for s in fresh._evaluate(range(CLIENTS))]
    expected = sum(untrained[c] for c in old) / len(old)
    assert simulator.history[0]["accuracy"] == pytest.approx(expected)


def test_without_newcomers_there_is_no_such_column(fed):
    simulator, _ = world(fed, "fedasync", "leave:at=0.01")
    simulator.run(5)
    assert "accuracy_newcomers" not in simulator.history[-1]


def test_newcomers_by_time(fed):
    simulator, log = world(fed, "fedasync", "join:at=0.05,share=0.25")
    simulator.run(UPDATES)
    joined = [e for e in log if e["event"] == "join"]
    assert len(joined) == 2 and {e["time"] for e in joined} == {0.05}
    first = [e for e in log if e["event"] == "dispatch" and e["client"] in simulator.late]
    assert first[0]["time"] == 0.05
    assert all(row["accuracy_newcomers"] is None for row in simulator.history if row["time"] < 0.05)


@pytest.mark.parametrize("spec", ["ace", "aced"])
def test_the_first_step_of_ace_waits_only_for_those_in_training(fed, spec):
    simulator, _ = world(fed, spec, "join:updates=1000,share=0.5")
    simulator.run(UPDATES)
    assert simulator.server.version > 0 and len(simulator.server.known) == 4
    other, _ = world(fed, spec, "join:updates=2,share=0.5")
    other.run(UPDATES)
    assert other.server.version > 0 and len(other.server.known) == CLIENTS


@pytest.mark.parametrize("spec", ["fedavg", "pace", "ace", *SPECS[-5:]])
def test_a_run_with_newcomers_goes_on_where_it_stopped(fed, spec, tmp_path):
    straight, _ = world(fed, spec, "join:updates=12,share=0.25")
    straight.run(UPDATES)
    for stop in (7, 13):
        first, _ = world(fed, spec, "join:updates=12,share=0.25")
        first.run(UPDATES, stop=lambda world=first, at=stop: world.server.updates >= at)
        save_state(tmp_path / f"{stop}", first.state_dict())
        second, _ = world(fed, spec, "join:updates=12,share=0.25")
        second.load_state_dict(load_state(tmp_path / f"{stop}"))
        second.run(UPDATES)
        assert second.history == straight.history
        assert second.fingerprint == straight.fingerprint
