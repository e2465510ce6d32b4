"""What the tests of the network share: peers within one process."""

import math
from dataclasses import dataclass, field

import pytest
import torch
from nearby import free_ports
from torch import nn

from polytempo.core.layout import Layout
from polytempo.network.link import Link
from polytempo.network.session import Address
from polytempo.network.wire import Wire
from polytempo.nodes import DECISIONS, Pairing
from polytempo.nodes.protocol import RoundEnded
from still import still_node


@dataclass
class Place:
    """A run on the loopback interface; all who enter it leave it at the end of the test."""

    size: int = 12
    ports: list = field(default_factory=lambda: free_ports(6))
    links: list = field(default_factory=list)

    def wire(self, run="test"):
        return Wire(run, Layout(nn.Linear(self.size - 1, 1)))

    def enter(self, name, decision="always", incarnation=1, connect=0, budget=math.inf, **options):
        """A peer that listens on the next port and calls another (the first, unless it is said
        otherwise), and what it recorded. Its target is 40 steps."""
        where = [f"tcp/127.0.0.1:{port}" for port in self.ports]
        number = len(self.links)
        address = Address([where[number]], [where[connect]] if number != connect else [])
        pairing = Pairing(name, incarnation, DECISIONS.create(decision), peers=2, **options)
        node = still_node(pairing, torch.zeros(self.size), budget=budget)
        events = []
        record = lambda event, **what: events.append((event, what))  # noqa: E731
        link = Link(node, self.wire(), record, address)
        link.events = events
        self.links.append(link.__enter__())
        return link

    def leave(self, link):
        link.__exit__()
        self.links.remove(link)


def ends_round(link, params, iteration=20):
    """The peer's local round ends with this model."""
    link.node.learner.params, link.node.learner.iteration = params, iteration
    link.tell(RoundEnded())


@pytest.fixture
def end_round():
    return ends_round


@pytest.fixture
def place():
    found = Place()
    yield found
    for link in [*found.links]:
        found.leave(link)


@pytest.fixture
def vector():
    """Twelve numbers, other ones for each seed."""
    return lambda seed: torch.randn(12, generator=torch.Generator().manual_seed(seed))
