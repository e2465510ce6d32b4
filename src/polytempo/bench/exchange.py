"""One pairing of two peers in two processes, over the loopback interface: a claim, then a model
each way, checked on arrival."""

from __future__ import annotations

import multiprocessing
import tempfile
import threading
import time
from collections.abc import Sequence
from multiprocessing.synchronize import Event
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

from polytempo.core.errors import PolytempoError
from polytempo.core.layout import Layout
from polytempo.core.strategy import State
from polytempo.network.certificates import LOCAL, make_certificates
from polytempo.network.link import Link
from polytempo.network.session import Address, Certificates, free_ports
from polytempo.network.wire import Wire
from polytempo.nodes import DECISIONS, FusionRule, Pairing, PeerNode, Snapshot
from polytempo.nodes.protocol import RoundEnded

PARAMETERS = (62_006, 325_000, 11_250_000)  # 0.25, 1.3 and 45 MB: LeNet, a CNN, ResNet-18
_PATIENCE = 30.0  # seconds for the other process to end


def measure_exchange(parameters: int, *, tls: bool, repeats: int = 20) -> dict[str, Any]:
    """From the wish to communicate until the partner's model is at hand, in milliseconds."""
    with tempfile.TemporaryDirectory() as folder:
        addresses = _addresses(Path(folder), tls)
        spawn = multiprocessing.get_context("spawn")
        over = spawn.Event()
        owner = spawn.Process(target=_own, args=(addresses[0], parameters, over))
        owner.start()
        try:
            seconds = _claim(addresses[1], parameters, repeats)
        finally:
            over.set()
            owner.join(_PATIENCE)
            owner.kill()  # if it has not ended by itself
            owner.join(_PATIENCE)
    size = 4e-6 * parameters
    return {
        "parameters": parameters,
        "megabytes": size,
        "tls": tls,
        "repeats": repeats,
        "median_ms": 1e3 * median(seconds),
        "worst_ms": 1e3 * max(seconds),
        "mb_per_s": 2 * size / median(seconds),
    }


def _addresses(folder: Path, tls: bool) -> list[Address]:
    here, there = (f"{'tls' if tls else 'tcp'}/127.0.0.1:{port}" for port in free_ports(2))
    if not tls:
        return [Address([here]), Address([there], [here])]
    make_certificates(folder, {"a": LOCAL, "b": LOCAL})
    a, b = (
        Certificates(folder / "ca.pem", folder / f"{name}.pem", folder / f"{name}.key")
        for name in "ab"
    )
    return [Address([here], (), a), Address([there], [here], b)]


class _Still:
    """A model that neither learns nor is mixed, so that only the exchange is measured."""

    iteration = 1

    def __init__(self, params: Tensor) -> None:
        self.params = params

    def fuse(self, params: Tensor) -> None:
        pass

    def state_dict(self) -> State:
        return {}

    def load_state_dict(self, state: State) -> None:
        pass


class _Nothing(FusionRule):
    def weights(self, own_progress: float, others: Sequence[float]) -> list[float]:
        return [0.0] * len(others)

    def fuse(self, current: Tensor, snapshots: Sequence[Snapshot], own_progress: float) -> Tensor:
        return current


def _link(name: str, address: Address, parameters: int) -> tuple[Link, threading.Event]:
    """A link, and what is set when it has got a model."""
    layout = Layout(nn.Linear(parameters - 1, 1))
    pairing = Pairing(name, 1, DECISIONS.create("always"), peers=2, patience=10**9)
    node = PeerNode(pairing, _Still(layout.read()), _Nothing(), target=2, local_steps=1)
    paired = threading.Event()

    def record(event: str, **what: Any) -> None:
        if event == "paired":
            paired.set()

    return Link(node, Wire("bench", layout), record, address), paired


def _own(address: Address, parameters: int, over: Event) -> None:
    """The other process: always pending, until it is over."""
    torch.set_num_threads(1)
    link, _ = _link("a", address, parameters)
    with link:
        while not over.wait(0.001):
            link.tell(RoundEnded())
        link.leave()


def _claim(address: Address, parameters: int, repeats: int) -> list[float]:
    link, paired = _link("b", address, parameters)
    seconds = []
    with link:
        for _ in range(repeats + 1):  # the first warms up
            while "a" not in link.node.pairing.hints:
                time.sleep(0.0005)
            paired.clear()
            begin = time.perf_counter()
            link.tell(RoundEnded())
            if not paired.wait(60):
                raise PolytempoError("no model came within a minute; is the machine overloaded?")
            seconds.append(time.perf_counter() - begin)
        link.leave()
    return seconds[1:]
