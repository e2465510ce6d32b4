"""A peer that trains and fuses, is interrupted, and goes on as if nothing had happened."""

import threading
from functools import partial

import pytest
import torch
from nearby import free_ports, wait_until
from torch import nn

from polytempo import Federation
from polytempo.core.schedule import Steps
from polytempo.core.task import Task
from polytempo.network.driver import Driver, PeerPlan
from polytempo.network.folder import Folder
from polytempo.network.link import Link
from polytempo.network.session import Address
from polytempo.nodes import DECISIONS, FUSIONS
from polytempo.nodes.protocol import Stop
from polytempo.training import AutogradSolver, Learner


def driver(folder, name, address, target=60, decision="never", watch=lambda event: None, **plan):
    torch.manual_seed(0)
    draws = torch.Generator().manual_seed(len(name))
    x, y = torch.randn(40, 4, generator=draws), torch.randint(3, (40,), generator=draws)
    solver = AutogradSolver(nn.Linear(4, 3), Federation.from_arrays([(x, y, x, y)], classes=3), 1)
    schedule = Steps((max(1, target // 2), max(1, target * 3 // 4)))
    learner = Learner(solver, 0, Task(batch_size=8, lr=0.1, schedule=schedule))
    chosen = PeerPlan(
        run="test",
        peers=2,
        decision=DECISIONS.create(decision),
        fusion=FUSIONS.create("progress"),
        target=target,
        **plan,
    )
    evaluate = lambda learner: learner.evaluate([0])[0].sums["correct"] / len(y)  # noqa: E731
    join = partial(Link, address=address)
    return Driver(learner, chosen, join, Folder(folder, name, watch), evaluate, {"seed": 1})


@pytest.fixture
def addresses():
    here, there = (f"tcp/127.0.0.1:{port}" for port in free_ports(2))
    return Address([here]), Address([there], [here])


def test_an_interrupted_peer_goes_on_bit_for_bit(tmp_path, addresses):
    whole = driver(tmp_path / "whole", "ann", addresses[0])
    assert whole.run()["complete"]
    first = driver(tmp_path / "parts", "ann", addresses[0])
    looks = iter(range(100))
    found = first.run(lambda: next(looks) >= 5)
    first.folder.close()
    assert not found["complete"] and 0 < found["iterations"] < 60
    second = driver(tmp_path / "parts", "ann", addresses[0])
    assert second.learner.iteration == found["iterations"]
    assert second.folder.incarnation > first.folder.incarnation
    done = second.run()
    assert done["complete"] and done["iterations"] == done["target"] == 60
    assert torch.equal(second.learner.params, whole.learner.params)
    momentum = second.learner.memory["optimizer.momentum"]
    assert momentum.any() and torch.equal(momentum, whole.learner.memory["optimizer.momentum"])
    assert second.history[0]["iteration"] == 0 and second.history[-1]["iteration"] == 60
    assert done["seconds"] > found["seconds"]


def test_two_peers_learn_together_until_the_budget_is_spent(tmp_path, addresses):
    events, results = [], {}

    def take_part(number, name):
        one = driver(
            *(tmp_path / name, name, addresses[number], 10**6, "always", events.append),
            messages=3,
            wait_for=1,
            pause=0.01,
        )
        results[name] = one.run(lambda: len(results) > 0)  # when the other has left, leave too

    threads = [threading.Thread(target=take_part, args=each) for each in enumerate(("ann", "bob"))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
        assert not thread.is_alive()
    assert max(found["messages"] for found in results.values()) == 3
    fused = [(event["peer"], event["side"], *event["token"]) for event in events if is_fused(event)]
    assert len(fused) == len({*fused}) >= 4
    owners = {tuple(token) for _, side, *token in fused if side == "owner"}
    assert {tuple(token) for _, side, *token in fused if side == "claimer"} <= owners
    assert sum(found["fusions"] for found in results.values()) == len(fused)


def is_fused(event):
    return event["event"] == "fused"


def test_training_stops_with_the_error_that_the_network_met(tmp_path, addresses):
    """A failure in the node's thread is not swallowed, and what was learnt is saved."""
    one = driver(tmp_path / "a", "ann", addresses[0], 10**6, "always", pause=0.01)
    one.wire.key = broken(one.wire.key)
    with pytest.raises(ZeroDivisionError):
        one.run()
    assert one.folder.load()["node"]["learner"]["iteration"] == one.learner.iteration > 0
    own = ("polytempo node", "polytempo sender")
    wait_until(lambda: not any(t.name.startswith(own) for t in threading.enumerate()))


def broken(key):
    def of(kind, *parts):
        return 1 / 0 if kind == "ticket" and "**" not in parts else key(kind, *parts)

    return of


class Heard:
    """A place in a network where nobody else is; keeps what the driver says."""

    def __init__(self, node, wire, record):
        self.node, self.present, self.failure, self.events = node, {}, None, []

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    def wait_for(self, others, seconds, stop):
        return True

    def tell(self, event):
        self.events.append(type(event).__name__)
        return sum(action.steps for action in self.node.handle(event) if hasattr(action, "steps"))

    def leave(self):
        self.tell(Stop())


def test_an_interrupt_is_told_before_the_round_ends(tmp_path, addresses):
    """Then nothing is fused at its end: nobody would train on it before the result is written."""
    one = driver(tmp_path / "a", "ann", addresses[0])
    places = []
    one.join = lambda *what: places.append(Heard(*what)) or places[-1]
    looks = iter([False, False, True])
    assert one.run(lambda: next(looks))["iterations"] == 10
    assert places[0].events == ["Started", "RoundEnded", "Stop", "RoundEnded", "Stop"]
