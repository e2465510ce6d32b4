"""What is simulated is what is deployed: with one seed and a network that takes no time, drivers of
peers do the same fusions with the same partners as the simulator, and end with the same bits.

Local rounds end in the order in which they ended in the simulation, and each ends when all that the
one before has led to is over.
"""

import threading
import time
from dataclasses import replace
from functools import partial

import pytest
import torch
from nearby import free_ports, wait_until
from torch import nn

from polytempo import Federation, Task
from polytempo.core.events import Discard, Fuse
from polytempo.core.events import Train as Trained
from polytempo.core.optimizer import Sgd
from polytempo.network.driver import Driver, PeerPlan
from polytempo.network.folder import Folder
from polytempo.network.link import Link
from polytempo.network.session import Address
from polytempo.nodes.protocol import (
    Announce,
    AnswerClaim,
    AnswerExchange,
    Appeared,
    Claim,
    ClaimAnswered,
    Claimed,
    Discarded,
    Exchange,
    ExchangeAnswered,
    Exchanged,
    Fused,
    Gone,
    Idle,
    Pending,
    RoundEnded,
    Started,
    Stop,
    Train,
    Vanished,
    Withdraw,
)
from polytempo.simulation import PeerSimulator
from polytempo.simulation.devices import TwoSpeed
from polytempo.strategies import STRATEGIES
from polytempo.training import AutogradSolver, Learner

TASK = Task(batch_size=8, lr=0.05, optimizer=Sgd(weight_decay=5e-4))
PEERS, STEPS, ROUNDS = 4, 3, 8


class Turns:
    """The peers speak in that order, each when all that was said before is done."""

    def __init__(self, order, settle):
        self.order, self.settle, self.here = [*order], settle, threading.Condition()

    def take(self, peer, say):
        with self.here:
            assert self.here.wait_for(lambda: self.order[0] == peer, 120), f"{peer}: no turn"
            found = say()
            self.settle()
            self.order.pop(0)
            self.here.notify_all()
        return found


class InTurns:
    """A place in a network from which a peer speaks in its turn only."""

    def __init__(self, place, turns, number):
        self.place, self.take_turn = place, partial(turns.take, number)
        self.present, self.failure = place.present, None

    def __enter__(self):
        self.place.__enter__()
        return self

    def __exit__(self, *why):
        self.place.__exit__(*why)

    def wait_for(self, *what):
        return self.place.wait_for(*what)

    def tell(self, event):
        assert isinstance(event, Started | RoundEnded)
        return self.take_turn(lambda: self.place.tell(event))

    def leave(self):
        self.take_turn(self.place.leave)


class Memory:
    """A network within this process that takes no time: messages arrive in the order of their
    sending, and whoever speaks waits until all have."""

    def __init__(self, here, node, wire, record):
        self.here, self.node, self.record = here, node, record
        self.present, self.failure = {}, None

    def __enter__(self):
        self.here[self.node.identity] = self
        return self

    def __exit__(self, *_):
        del self.here[self.node.identity]

    def wait_for(self, others, seconds, stop):
        return True

    def leave(self):
        self.tell(Stop())
        self.deliver([(who, Gone(self.node.identity)) for who in self.others()])

    def tell(self, event):
        return self.deliver([(self.node.identity, event)])

    def others(self):
        return [who for who in self.here if who != self.node.identity]

    def deliver(self, net):
        steps = 0
        while net:
            who, event = net.pop(0)
            place = self.here[who]
            for action in place.node.handle(event):
                match action:
                    case Train(count):
                        steps = count
                    case Fused(fusion) | Discarded(fusion):
                        kind = type(action).__name__.lower()
                        place.record(kind, token=[*fusion.token], partner=[*fusion.partner])
                    case _:
                        net += place.messages(action)
        return steps

    def messages(self, action):
        me = self.node.identity
        match action:
            case Announce(token):
                return [(who, Appeared(token)) for who in self.others()]
            case Withdraw(token):
                return [(who, Vanished(token)) for who in self.others()]
            case Claim(token):
                return [(token.owner, Claimed(me, token))]
            case AnswerClaim(to, token, granted):
                return [(to, ClaimAnswered(token, granted))]
            case Exchange(token, snapshot):
                return [(token.owner, Exchanged(me, token, snapshot))]
            case AnswerExchange(to, token, snapshot):
                return [(to, ExchangeAnswered(token, snapshot))]
        return []


@pytest.fixture(scope="module")
def federation():
    source = "synthetic:groups=2,kind=permutation,samples=24,features=12,classes=4"
    return Federation.load(source, clients=PEERS, seed=1)


def module():
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return nn.Sequential(nn.Flatten(), nn.Linear(12, 4))


def simulated(federation, strategy):
    """What the peers do with what comes in (in which iteration, whose, for which ticket), their
    models, and in which order their updates ended."""
    world = {"task": TASK, "devices": TwoSpeed(), "adapt_epochs": 0, "check": True}
    simulator = PeerSimulator(federation, module(), strategy, updates=PEERS * ROUNDS, **world)
    done, iterations, order = [], {}, []

    def look(event):
        if isinstance(event, Trained):
            iterations[event.client] = event.iteration
            order.append(event.client)
        if isinstance(event, Fuse | Discard):
            owner, _, ticket = event.ticket.split(".")
            what = {"fuse": "fused", "discard": "discarded"}[event.kind]
            about = (str(event.partner), owner, int(ticket))
            done.append((what, str(event.client), iterations[event.client], *about))

    simulator.observers.append(look)
    simulator.run(PEERS * ROUNDS)
    return sorted(done), [learner.params for learner in simulator.learners], order


def deployed(federation, strategy, folder, order, join, settle=lambda: None):
    """The same of drivers in threads; `join(number)` gives a peer its place in a network."""
    peers = range(PEERS)
    turns, done, failures = Turns([*peers, *order, *peers], settle), [], []  # begin, train, leave

    def look(event):
        if event["event"] in ("fused", "discarded"):
            owner, _, ticket = event["token"]
            about = (event["partner"][0], owner, ticket)
            done.append((event["event"], event["peer"], event["iteration"], *about))

    def driver(number):
        target = STEPS * ROUNDS
        task = replace(TASK, schedule=strategy.schedule(target))
        learner = Learner(AutogradSolver(module(), federation, 0), number, task)
        plan = PeerPlan(
            run="test",
            peers=PEERS,
            decision=strategy.decision,
            fusion=strategy.fusion,
            target=target,
            steps=STEPS,
            wait_for=PEERS - 1,
            wait_seconds=120,
        )

        def take_place(*what):
            return InTurns(join(number)(*what), turns, number)

        kept = Folder(folder / str(number), str(number), look)
        return Driver(learner, plan, take_place, kept, lambda learner: 0.0, {})

    def run(one):
        try:
            one.run()
        except BaseException as error:
            failures.append(error)

    drivers = [driver(number) for number in range(PEERS)]
    threads = [threading.Thread(target=run, args=(one,)) for one in drivers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(300)
        assert not thread.is_alive()
    assert failures == []
    return sorted(done), [one.learner.params for one in drivers]


@pytest.fixture(params=["always", "uniform", "uniform,decision.rate=3,fusion=naive"])
def strategy(request):
    return STRATEGIES.create(f"p2p:local_steps={STEPS},decision={request.param}")


def assert_same(found, expected):
    assert found[0] == expected[0]
    assert {what for what, *_ in expected[0]} == {"fused", "discarded"}
    assert all(torch.equal(one, other) for one, other in zip(found[1], expected[1], strict=True))


def test_drivers_over_an_instant_network_do_what_is_simulated(federation, strategy, tmp_path):
    *expected, order = simulated(federation, strategy)
    here = {}
    join = lambda number: partial(Memory, here)  # noqa: E731
    assert_same(deployed(federation, strategy, tmp_path, order, join), expected)


def test_drivers_over_zenoh_do_what_is_simulated(federation, strategy, tmp_path):
    *expected, order = simulated(federation, strategy)
    where = [f"tcp/127.0.0.1:{port}" for port in free_ports(PEERS)]
    links = []

    def join(number):
        def make(*what):
            address = Address([where[number]], where[:1] if number else [])
            links.append(Link(*what, address))
            return links[-1]

        return make

    def quiet():
        nodes = [link.node for link in links]
        tokens = {node.phase.token for node in nodes if isinstance(node.phase, Pending)}
        return all(
            isinstance(node.phase, Idle | Pending)
            and {*node.pairing.hints.values()} == {t for t in tokens if t.owner != node.identity}
            for node in nodes
        )

    def settle():
        wait_until(lambda: quiet() and (time.sleep(0.005), quiet())[1])  # at two moments

    assert_same(deployed(federation, strategy, tmp_path, order, join, settle), expected)
