"""Server and clients as hosts of their own (network namespaces, for root on Linux), on links that
lose, delay and hold up packets, or carry none.

    sudo python tests/network/fleet/namespaces.py --out FOLDER      prints a table in Markdown

Each client's host has one link to the server's: two TUN devices, and between them this process,
which passes IP packets on as the link's settings say. So loss is loss of packets, and TCP does
what it does on such a link. (Not every kernel has `netem`.) A phase lasts a minute; in the end
everything is checked as after a storm (`fleet_chaos.py`).
"""

from __future__ import annotations

import argparse
import ctypes
import fcntl
import heapq
import os
import random
import select
import shutil
import struct
import subprocess
import sys
import threading
import time
from collections import Counter
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median

from fleet_chaos import Forked, Storm, check, collect, end_well, enter, until

from polytempo.experiments.fleet_group import SERVER

NET = "10.77"  # link k: server 10.77.k.1, client 10.77.k.2
_TUNSETIFF, _TUN, _NO_PI = 0x400454CA, 0x0001, 0x1000
QUEUE = 128_000  # bytes that wait for their turn on a slow link; what exceeds them is lost


# -- links -----------------------------------------------------------------------------------------


@dataclass
class Way:
    """One direction of a link."""

    rate: float = 0.0  # bytes per second; 0: as fast as it goes
    free: float = 0.0  # when the packets before have left


@dataclass
class Link:
    """Two devices, and how packets travel between them."""

    ends: tuple[int, int]  # file descriptors: the server's, the client's
    up: bool = True
    loss: float = 0.0  # of packets, in each direction
    delay: float = 0.0  # seconds, in each direction
    ways: tuple[Way, Way] = field(default_factory=lambda: (Way(), Way()))
    lost: int = 0

    def set(self, up: bool = True, loss: float = 0.0, delay: float = 0.0, rate: float = 0.0):
        self.up, self.loss, self.delay = up, loss, delay
        for way in self.ways:
            way.rate = rate

    def arrival(self, side: int, size: int, now: float, draws: random.Random) -> float | None:
        """When a packet that leaves now is there; None: never."""
        way = self.ways[side]
        begin = max(now, way.free)
        if not self.up or draws.random() < self.loss or (begin - now) * way.rate > QUEUE:
            self.lost += 1
            return None
        way.free = begin + (size / way.rate if way.rate else 0.0)
        return way.free + self.delay


class Relay(threading.Thread):
    """Passes packets on, until it is asked to stop."""

    def __init__(self, links: list[Link], seed: int = 0) -> None:
        super().__init__(daemon=True)
        self.links, self.over, self._draws = links, threading.Event(), random.Random(seed)

    def run(self) -> None:
        ends = {fd: (link, side) for link in self.links for side, fd in enumerate(link.ends)}
        under_way: list[tuple[float, int, int, bytes]] = []
        number = 0
        while not self.over.is_set():
            wait = max(0.0, under_way[0][0] - time.monotonic()) if under_way else 0.1
            ready, _, _ = select.select([*ends], [], [], min(wait, 0.1))
            for fd in ready:
                link, side = ends[fd]
                packet = os.read(fd, 65_536)
                when = link.arrival(side, len(packet), time.monotonic(), self._draws)
                if when is not None:
                    number += 1
                    heapq.heappush(under_way, (when, number, link.ends[1 - side], packet))
            while under_way and under_way[0][0] <= time.monotonic():
                _, _, fd, packet = heapq.heappop(under_way)
                os.write(fd, packet)


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True)


def open_device(host: str, name: str, own: str, other: str) -> int:
    """A TUN device in that namespace, with these addresses at its ends."""
    with Path("/proc/thread-self/ns/net").open() as home:
        enter(host)
        try:
            fd = os.open("/dev/net/tun", os.O_RDWR)
            fcntl.ioctl(fd, _TUNSETIFF, struct.pack("16sH", name.encode(), _TUN | _NO_PI))
        finally:
            ctypes.CDLL(None).setns(home.fileno(), 0)
    ip("-n", host, "addr", "add", own, "peer", other, "dev", name)
    ip("-n", host, "link", "set", name, "up")
    return fd


# -- hosts -----------------------------------------------------------------------------------------


class Hosts(Forked):
    """A server and its clients, each in a network namespace of its own."""

    def __init__(self, folder: Path, clients: int, strategy: str, size: int) -> None:
        self.count, self.tag = clients, f"pt{os.getpid()}"
        super().__init__(folder, clients, strategy, size)
        self.links: list[Link] = []

    def addresses(self):
        return [f"{NET}.{k}.1" for k in range(1, self.count + 1)]

    def host(self, name: str) -> str:
        return f"{self.tag}-{name}"

    def where(self, name: str) -> tuple[str, str | None]:
        if name == SERVER:
            return f"0.0.0.0:{self.port}", self.host(SERVER)
        return f"{NET}.{self.clients.index(name) + 1}.1:{self.port}", self.host(name)

    def __enter__(self):
        for name in (SERVER, *self.clients):
            ip("netns", "add", self.host(name))
            ip("-n", self.host(name), "link", "set", "lo", "up")
        for k, name in enumerate(self.clients, 1):
            here, there = f"{NET}.{k}.1", f"{NET}.{k}.2"
            ends = (
                open_device(self.host(SERVER), f"tun{k}", here, there),
                open_device(self.host(name), "tun0", there, here),
            )
            self.links.append(Link(ends))
        self.relay = Relay(self.links)
        self.relay.start()
        return self

    def __exit__(self, *_):
        super().__exit__()
        self.relay.over.set()
        self.relay.join(10)
        for link in self.links:
            for fd in link.ends:
                os.close(fd)
        for name in (SERVER, *self.clients):
            subprocess.run(["ip", "netns", "del", self.host(name)], check=False)


# -- phases ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Phase:
    what: str
    links: dict  # settings
    whom: int = 4  # so many clients
    seconds: float = 60.0


PHASES = (
    Phase("links as they are", {}),
    Phase("2 of 4 clients cut off for 30 s", {"up": False}, 2, 30.0),
    Phase("the server cut off from all for 30 s", {"up": False}, 4, 30.0),
    Phase("5% loss, 200 ms delay, each way", {"loss": 0.05, "delay": 0.2}),
    Phase("1 Mbit/s each way", {"rate": 125_000.0}),
    Phase("1 Mbit/s, 5% loss, 200 ms delay", {"rate": 125_000.0, "loss": 0.05, "delay": 0.2}),
)


def acknowledged(fleet: Hosts, name: str) -> list[float]:
    return [note["time"] for note in fleet.notes(name) if note["event"] == "acknowledged"]


def go_through(fleet: Hosts, phase: Phase, calm: float) -> str:
    """A row of the table."""
    touched = fleet.clients[: phase.whom]
    lost = sum(link.lost for link in fleet.links)
    begin = time.time()
    for link in fleet.links[: phase.whom]:
        link.set(**phase.links)
    time.sleep(phase.seconds)
    for link in fleet.links:
        link.set()
    end = time.time()
    for name in touched:
        until(lambda: any(t > end for t in acknowledged(fleet, name)), f"{name} is back")  # noqa: B023
    back = [min(t for t in acknowledged(fleet, name) if t > end) - end for name in touched]
    time.sleep(calm)
    counts = {
        name: sum(begin <= t <= end for t in acknowledged(fleet, name)) for name in fleet.clients
    }
    others = [counts[name] for name in fleet.clients if name not in touched]
    downs = Counter(
        note["reason"].partition(":")[0][:60]
        for name in fleet.clients
        for note in fleet.notes(name)
        if note["event"] == "disconnected" and begin <= note["time"] <= end + calm
    )
    again = sum(
        note["event"] == "connected" and begin <= note["time"] <= end + calm
        for name in fleet.clients
        for note in fleet.notes(name)
    )
    sys.stderr.write(f"{phase.what}: {dict(downs)}\n")
    lost = sum(link.lost for link in fleet.links) - lost
    return (
        f"| {phase.what} | {phase.seconds:.0f} | {sum(counts[name] for name in touched)}"
        f"{f' (others {sum(others)})' if others else ''} | {lost:,} | {again} | "
        f"{median(back):.1f} / {max(back):.1f} |"
    )


HEADING = (
    "| links | s | updates acknowledged meanwhile | packets lost | reconnects | seconds from "
    "healing to the next acknowledgement, median / max |\n|---|---|---|---|---|---|"
)


def run(folder: Path, phases=PHASES, size: int = 62_500, calm: float = 5.0) -> list[str]:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    sys.stdout.write(f"{HEADING}\n")
    with Hosts(folder, 4, "fedasync", size) as fleet:
        for name in (SERVER, *fleet.clients):
            fleet.start(name)
        for name in fleet.clients:
            until(lambda: len(acknowledged(fleet, name)) > 3, f"{name} at work")  # noqa: B023
        for phase in phases:
            sys.stdout.write(f"{go_through(fleet, phase, calm)}\n")
            sys.stdout.flush()
        end_well(fleet, Storm(over=time.time()))
        found = collect(fleet)
    wrong = check(found)
    sys.stdout.write(
        f"\nAfterwards: {len(found.folded):,} updates folded, {len(found.heard):,} "
        f"acknowledgements heard, acknowledged updates lost "
        f"{len({*found.heard} - {*found.folded})}, folded twice "
        f"{len(found.folded) - len({*found.folded})}; the state is equal to a replay of the log "
        f"bit for bit: {'yes' if not found.wrong else 'NO'}.\n"
    )
    return wrong


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    options.add_argument("--out", type=Path, default=Path("runs/namespaces"))
    options.add_argument("--size", type=int, default=62_500, help="numbers of the model")
    options.add_argument("--seconds", type=float, default=0.0, help="of each phase")
    options.add_argument("--only", default="", help="phases with this in their name")
    chosen = options.parse_args()
    if os.geteuid() != 0 or not shutil.which("ip") or not Path("/dev/net/tun").exists():
        raise SystemExit("network namespaces need root, ip (iproute2) and /dev/net/tun")
    phases = [
        replace(phase, seconds=chosen.seconds or phase.seconds)
        for phase in PHASES
        if chosen.only in phase.what
    ]
    wrong = run(chosen.out, phases, chosen.size)
    sys.stdout.write("\n".join(wrong[:20]) + "\n" * bool(wrong))
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
