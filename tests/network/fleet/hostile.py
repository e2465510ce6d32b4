"""Hostile and broken clients against a real server: what becomes of them, what the server's memory
does, and how long honest clients wait meanwhile.

    python tests/network/fleet/hostile.py --out FOLDER     prints a table in Markdown
    python tests/network/fleet/hostile.py --wire 1000000   fuzzed messages over the network
    python tests/network/fleet/hostile.py --fuzz 1000000   through decoder and node, no network

The server is `polytempo.serve` with its usual limits, and it, each of four honest clients and the
attackers are processes of their own. Waiting is from the end of a training to the acknowledgement
of its update, as the client sees it: with two fsyncs, its own and the server's. An attack lasts ten
seconds, unless it says otherwise. All traffic is on the loopback interface.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import shutil
import signal
import socket
import ssl
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import count
from pathlib import Path

import grpc
import grpc.aio
import numpy as np
import torch
from fleet_chaos import Forked, files, until
from fuzz import Corpus, fuzz
from test_fleet_hostile import Raw, frames

from polytempo.experiments.fleet_group import SERVER
from polytempo.network.certificates import LOCAL, make_certificates
from polytempo.network.fleet.admission import revoke
from polytempo.network.fleet.sending import METHOD
from polytempo.network.session import Certificates
from polytempo.nodes.star import Hello, Swapped, Upload

HELLO = Hello(1, "", "own code", 10, 0)
EVIL = [f"evil-{number}" for number in range(8)]  # certified, and there is room for them
CROWD = [f"crowd-{number}" for number in range(100)]  # certified, and there is no room for them
LARGE = 1_250_000  # numbers of a model of 5 MB
SMALL = 10_000

# -- attacks: each is the life of a process; what it returns is its outcome ------------------------


class Place:
    """Where the server is, and who one could be."""

    def __init__(self, folder: Path, port: int, size: int) -> None:
        self.folder, self.port, self.size = folder, port, size
        self.address = f"127.0.0.1:{port}"

    def connect(self, whose: str, **options) -> Raw:
        """With the certificate of that one."""
        return Raw(self.address, files(self.folder, whose), **options)

    def channel(self, whose: str, options=(), make=grpc.secure_channel):
        own = files(self.folder, whose)
        credentials = grpc.ssl_channel_credentials(
            own.ca.read_bytes(), own.key.read_bytes(), own.cert.read_bytes()
        )
        alone = ("grpc.use_local_subchannel_pool", 1)
        return make(self.address, credentials, [alone, *options])

    def vector(self) -> torch.Tensor:
        return torch.zeros(self.size)


def again_and_again(make: Callable[[], Raw], seconds: float) -> Counter:
    """Connect and say hello, as often as it is possible: how it ended, how often."""
    found, end = Counter(), time.monotonic() + seconds
    while time.monotonic() < end:
        raw = make().say(*frames(HELLO))
        found[raw.end()[0].name] += 1
        raw.close()
    return found


def no_certificate(place: Place, seconds: float):
    return again_and_again(lambda: place.connect(EVIL[0], pair=False), seconds)


def expired(place: Place, seconds: float):
    return again_and_again(lambda: place.connect("expired"), seconds)


def other_authority(place: Place, seconds: float):
    other = files(place.folder / "other", EVIL[0])
    mixed = Certificates(files(place.folder, EVIL[0]).ca, other.cert, other.key)
    return again_and_again(lambda: Raw(place.address, mixed), seconds)


def revoked(place: Place, seconds: float):
    """Takes part, is revoked, and tries again and again."""
    raw = place.connect(EVIL[1]).say(*frames(HELLO))
    raw.hear()
    begin = time.monotonic()
    revoke(place.folder / SERVER, EVIL[1])
    code, _ = raw.end()
    found = Counter({f"cut off after {time.monotonic() - begin:.1f} s ({code.name})": 1})
    raw.close()
    return found + again_and_again(lambda: place.connect(EVIL[1]), seconds)


def another_name(place: Place, seconds: float):
    """Says in its metadata that it is an honest client, and offers an update as that one."""
    raw = place.connect(EVIL[2], name="client-0").say(*frames(HELLO))
    found, end = Counter(), time.monotonic() + seconds
    for number in count(1):
        if time.monotonic() > end:
            break
        raw.say(*frames(Upload(number, place.vector(), 10)))
        found[_answer(raw, ("decline", "acknowledge"))] += 1
    raw.close()
    return found


def replayed(place: Place, seconds: float):
    """Does its work, and offers the same update again and again; then those of a stream before."""
    raw = place.connect(EVIL[3]).say(*frames(HELLO))
    work = _wait_for(raw, "work")
    upload = frames(Upload(work.number, torch.full((place.size,), 0.5), 10))
    found, end = Counter(), time.monotonic() + seconds
    while time.monotonic() < end:
        raw.say(*upload)
        found[_answer(raw, ("decline", "acknowledge"))] += 1
    raw.close()
    return found


def _wait_for(raw: Raw, kind: str):
    while (said := raw.hear()).WhichOneof("said") != kind:
        pass
    return getattr(said, kind)


def _answer(raw: Raw, kinds: tuple[str, ...]) -> str:
    while (kind := raw.hear().WhichOneof("said")) not in kinds:
        pass
    return kind


def fuzzed(place: Place, seconds: float, names=tuple(CROWD), streams: int = 5_000):
    """Messages that are broken in some way, on each of very many streams (those of one name are let
    in about twice a second), half of them after a hello: how the server ended them."""
    found, draws = Counter(), random.Random(0)
    corpus = Corpus(place.size, draws)
    channels = [place.connect(name) for name in names]
    end = time.monotonic() + seconds
    while time.monotonic() < end and sum(found.values()) < streams:
        calls = []
        for raw in channels:
            said = [*frames(HELLO)] if draws.random() < 0.5 else []
            said += [corpus.broken() for _ in range(4)]
            method = raw.channel.stream_stream(METHOD)
            calls.append(method(iter(said), timeout=20))
        for call in calls:
            try:
                for _ in call:
                    pass
                found[call.code().name] += 1
            except grpc.RpcError as error:
                found[error.code().name] += 1
    for raw in channels:
        raw.close()
    return found


def fuzzed_over_the_wire(place: Place, seconds: float, messages: int):
    """So many messages, each of which the server reads, on as many streams as it takes: a broken
    message ends its stream. So on a quarter of the streams there is a hello and then a dozen that
    are in the protocol but nonsense, and each ends with a broken one."""
    return asyncio.run(_fuzz_over_the_wire(place, seconds, messages))


async def _fuzz_over_the_wire(place: Place, seconds: float, messages: int) -> Counter:
    found, draws = Counter(), random.Random(1)
    corpus, end = Corpus(place.size, draws), time.monotonic() + seconds
    read = {grpc.StatusCode.OK, grpc.StatusCode.INVALID_ARGUMENT}
    read.add(grpc.StatusCode.FAILED_PRECONDITION)

    def on_a_stream() -> tuple[int, list[bytes]]:
        last = corpus.broken_upload() if draws.random() < 0.25 else [corpus.broken()]
        if draws.random() < 0.75:
            return 1, last
        strange = [frame for _ in range(12) for frame in frames(corpus.strange())]
        return 13, [*frames(HELLO), *strange, *last]

    async def send(name: str) -> None:
        async with place.channel(name, make=grpc.aio.secure_channel) as channel:
            method = channel.stream_stream(METHOD)
            while found["messages read"] < messages and time.monotonic() < end:
                count, said = on_a_stream()
                call = method(_each(said), timeout=60)
                with suppress(grpc.aio.AioRpcError):  # how it ended is asked below
                    async for _ in call:
                        pass
                code = await call.code()
                found["messages read" if code in read else "messages not read"] += count
                found[f"streams ended with {code.name}"] += 1

    await asyncio.gather(*map(send, CROWD))
    return found


async def _each(said: list[bytes]):
    for frame in said:
        yield frame


def frozen(place: Place, seconds: float):
    """Stops (SIGSTOP) in the middle of an upload, while it is being sent a model."""
    raw = place.connect(EVIL[4]).say(*frames(HELLO))
    upload = frames(Upload(1, place.vector(), 10))
    raw.say(*upload[: len(upload) // 2])
    time.sleep(0.05)
    Path(place.folder / "frozen").write_text(str(time.time()))
    os.kill(os.getpid(), signal.SIGSTOP)
    code, _ = raw.end()
    return Counter({f"when it wakes up: {code.name}": 1})


def small_flood(place: Place, seconds: float):
    return _flood(place, EVIL[:1], frames(Swapped(999, 998, 1)), seconds)


def small_floods(place: Place, seconds: float):
    return _flood(place, [n for n in EVIL if n != EVIL[1]], frames(Swapped(999, 998, 1)), seconds)


def large_flood(place: Place, seconds: float):
    return _flood(place, EVIL[:1], frames(Upload(7, place.vector(), 10)), seconds)


def large_floods(place: Place, seconds: float):
    return _flood(place, EVIL[:4], frames(Upload(7, place.vector(), 10)), seconds)


def _flood(place: Place, names, said: list[bytes], seconds: float):
    """As many as the line takes."""
    sent, end = Counter(), time.monotonic() + seconds

    def endless(name):
        yield from frames(HELLO)
        while time.monotonic() < end:
            sent[name] += 1
            yield from said

    calls, channels = [], []
    for name in names:
        channels.append(place.channel(name))
        method = channels[-1].stream_stream(METHOD)
        calls.append(method(endless(name), timeout=seconds + 5))
    found = Counter()
    while time.monotonic() < end and not all(call.done() for call in calls):
        time.sleep(0.1)
    for call in calls:
        found["held back on its own line" if not call.done() else call.code().name] += 1
        call.cancel()
    for channel in channels:
        channel.close()
    return found + Counter({"messages accepted": sum(sent.values())})


def never_reads(place: Place, seconds: float):
    """Says hello and reads nothing, with the smallest of windows: the server cannot get rid of the
    model that it has for this client."""
    window = [("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 65_536)]
    channel = place.channel(EVIL[5], window)
    over = threading.Event()

    def said():
        yield from frames(HELLO)
        over.wait(seconds)

    call = channel.stream_stream(METHOD)(said())
    time.sleep(seconds)
    over.set()
    try:
        for _ in call:
            pass
    except grpc.RpcError as error:
        return Counter({error.code().name: 1})
    return Counter({"ended well": 1})


def many_streams(place: Place, seconds: float):
    """One certificate, 300 connections, each with a stream and a hello."""
    raws = [place.connect(EVIL[6]).say(*frames(HELLO)) for _ in range(300)]
    found: Counter = Counter()

    def read(raw: Raw) -> None:
        found[raw.end()[0].name] += 1

    readers = [threading.Thread(target=read, args=(raw,), daemon=True) for raw in raws]
    for reader in readers:
        reader.start()
    time.sleep(seconds)
    still = Counter({"still open at the end": sum(reader.is_alive() for reader in readers)})
    still += found
    for raw in raws:
        raw.close()
    return still


def handshakes(place: Place, seconds: float):
    """500 connections of a stranger that begin no handshake, and 200 of a certified client that
    end theirs and then say nothing."""
    own = files(place.folder, EVIL[7])
    context = ssl.create_default_context(cafile=own.ca)
    context.load_cert_chain(own.cert, own.key)
    context.set_alpn_protocols(["h2"])
    found, sockets = Counter(), []
    for number in range(700):
        with suppress(OSError):
            raw = socket.create_connection(("127.0.0.1", place.port), timeout=5)
            sockets.append(
                raw if number < 500 else context.wrap_socket(raw, server_hostname="127.0.0.1")
            )
    time.sleep(seconds)
    for one in sockets:
        one.setblocking(False)
        kind = "idle connections" if isinstance(one, ssl.SSLSocket) else "without handshake"
        try:
            while one.recv(65_536):
                pass
            found[f"{kind}, cut off"] += 1
        except (ssl.SSLWantReadError, BlockingIOError):
            found[f"{kind}, still there"] += 1
        except OSError:
            found[f"{kind}, cut off"] += 1
        one.close()
    return found


@dataclass(frozen=True)
class Attack:
    """`means`: how it must end; the outcome shows it."""

    what: str
    work: Callable
    means: str
    size: int = SMALL
    seconds: float = 10.0


def nobody(place: Place, seconds: float):
    time.sleep(seconds)
    return Counter()


HANDSHAKE = "does not get past the TLS handshake"
UNASKED = "updates that nobody asked for are read at 1 MB/s, the rest waits on its own line"
ATTACKS = (
    Attack("nobody (to compare)", nobody, ""),
    Attack("a stranger without a certificate", no_certificate, HANDSHAKE),
    Attack("an expired certificate", expired, HANDSHAKE),
    Attack("a certificate of another authority", other_authority, HANDSHAKE),
    Attack("a client that is revoked", revoked, "cut off, and not let in again"),
    Attack(
        "a client that claims another's name",
        another_name,
        "goes by the name of its certificate; updates for another's work are declined",
    ),
    Attack("an old upload again and again", replayed, "acknowledged each time, folded once"),
    Attack("a flood of small messages", small_flood, "read at 50 per second"),
    Attack("floods of small messages from 7 clients", small_floods, "read at 50 per second each"),
    Attack("one certificate, 300 connections", many_streams, "one stream counts, two at most"),
    Attack("700 connections that say nothing", handshakes, "closed after 10 to 15 s", SMALL, 20.0),
    Attack("5,000 streams of 100 clients with broken messages", fuzzed, "refused", SMALL, 60.0),
    Attack("nobody (to compare), model of 5 MB", nobody, "", LARGE),
    Attack("freezes with 5 MB on the line", frozen, "taken for absent", LARGE, 25.0),
    Attack("a flood of uploads of 5 MB", large_flood, UNASKED, LARGE),
    Attack("floods of uploads of 5 MB from 4 clients", large_floods, UNASKED, LARGE),
    Attack("never reads", never_reads, "cut off, since it accepts nothing", LARGE, 40.0),
)


def attack_here(folder: Path, port: int, size: int, work: Callable, seconds: float) -> None:
    """The life of an attacker's process."""
    found = work(Place(folder, port, size), seconds)
    (folder / "outcome.json").write_text(json.dumps(dict(found)))


# -- measuring -------------------------------------------------------------------------------------


def resident(pid: int) -> float:
    """MB."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS"):
            return int(line.split()[1]) / 1024
    return 0.0


def waits(fleet: Forked, begin: float, end: float) -> list[float]:
    """Milliseconds from the end of a training to its acknowledgement, of all that began then."""
    found = []
    for name in fleet.clients:
        trained = {}
        for note in fleet.notes(name):
            if note["event"] == "trained":
                trained[note["dispatch"]] = note["time"]
            if note["event"] == "acknowledged" and note["dispatch"] in trained:
                since = trained.pop(note["dispatch"])
                if begin <= since <= end:
                    found.append(1e3 * (note["time"] - since))
        found += [
            1e3 * (time.time() - since) for since in trained.values() if begin <= since <= end
        ]
    return found


def reconnects(fleet: Forked, begin: float, end: float) -> int:
    """Of honest clients, meanwhile."""
    notes = [note for name in fleet.clients for note in fleet.notes(name)]
    return sum(note["event"] == "connected" and begin <= note["time"] <= end for note in notes)


@dataclass
class Row:
    attack: Attack
    outcome: str
    memory: list[float]  # of the server: before, meanwhile, and afterwards
    waits: list[float]
    reconnects: int
    seconds: float

    def __str__(self) -> str:
        p50, p99 = np.percentile(self.waits, [50, 99]) if self.waits else (np.nan, np.nan)
        return (
            f"| {self.attack.what} | {self.outcome} | {self.memory[0]:.0f} / "
            f"{max(self.memory):.0f} / {self.memory[-1]:.0f} | {p50:.0f} / {p99:.0f} / "
            f"{max(self.waits, default=np.nan):.0f} | {len(self.waits)}, {self.reconnects} |"
        )


HEADING = (
    "| who | what becomes of it | server's memory before / at most / after, MB | honest clients: "
    "upload to acknowledgement p50 / p99 / max, ms | their updates, reconnects |\n"
    "|---|---|---|---|---|"
)


class Site(Forked):
    """A server that has room for four honest clients and eight others."""

    def __init__(self, folder: Path, size: int) -> None:
        super().__init__(folder, 4, "fedasync", size)
        self.room, self.every = len(self.clients) + len(EVIL), 60.0
        make_certificates(folder / "certs", dict.fromkeys([*EVIL, *CROWD], LOCAL))
        make_certificates(folder / "certs", {"expired": LOCAL}, days=-0.02)
        make_certificates(folder / "other" / "certs", {EVIL[0]: LOCAL})

    def _measure(self, attack: Attack) -> Row:
        pid = self._processes[SERVER].pid
        outcome = self.folder / "outcome.json"
        outcome.unlink(missing_ok=True)
        memory, begin, told = [resident(pid)], time.time(), time.monotonic()
        attacker = self._context.Process(
            target=attack_here,
            args=(self.folder, self.port, self.size, attack.work, attack.seconds),
            daemon=True,
        )
        attacker.start()
        cut, leaves = None, self._leaves()
        latest = begin + 60 + 3 * attack.seconds
        while attacker.is_alive() and time.time() < latest:
            memory.append(resident(pid))
            if time.monotonic() > told + 60:
                told = time.monotonic()
                sys.stderr.write(f"{time.time() - begin:.0f} s, server {memory[-1]:.0f} MB\n")
            cut = cut or self._frozen(attack, attacker, leaves)
            if attack.work is never_reads and cut is None and self._leaves() > leaves:
                cut = f"cut off after {time.time() - begin:.0f} s"
            time.sleep(0.1)
        end = time.time()
        if attacker.is_alive():
            attacker.kill()
        attacker.join()
        time.sleep(2.0)
        found = json.loads(outcome.read_text()) if outcome.exists() else {"no outcome": 1}
        words = [f"{what}: {n:,}" if n != 1 else what for what, n in found.items()]
        words = [*([cut] if cut else []), *words]
        outcome = f"{attack.means} ({', '.join(words)})" if words else "-"
        memory.append(resident(pid))
        waited, again = waits(self, begin, end), reconnects(self, begin, end)
        return Row(attack, outcome, memory, waited, again, end - begin)

    def _leaves(self) -> int:
        lines = (self.folder / SERVER / "events.jsonl").read_text().splitlines()
        return sum('"leave"' in line for line in lines)

    def _frozen(self, attack: Attack, attacker, leaves: int) -> str | None:
        """When the server has noticed that somebody is frozen; a little later he wakes up."""
        mark = self.folder / "frozen"
        if attack.work is not frozen or not mark.exists():
            return None
        since = float(mark.read_text())
        waited, gone = time.time() - since, self._leaves() > leaves
        if not gone and waited < attack.seconds:
            return None
        time.sleep(max(0.0, since + attack.seconds - time.time()))  # the others are being watched
        os.kill(attacker.pid, signal.SIGCONT)
        return f"{'noticed after' if gone else 'not noticed within'} {waited:.0f} s"

    def run(self, attacks) -> list[Row]:
        for name in (SERVER, *self.clients):
            self.start(name)
        settled = lambda: all(  # noqa: E731
            sum(note["event"] == "acknowledged" for note in self.notes(name)) > 20
            for name in self.clients
        )
        until(settled, "honest clients at work")
        rows = []
        for attack in attacks:
            rows.append(self._measure(attack))
            sys.stdout.write(f"{rows[-1]}\n")
            sys.stdout.flush()
            for name in (SERVER, *self.clients):
                if self.code(name) is not None:
                    raise SystemExit(f"{name} has ended during: {attack.what}; see {self.folder}")
        return rows


def over_the_wire(folder: Path, messages: int, seconds: float) -> Row:
    """Fuzzed messages over the network. The limits on how often a client may come back and on its
    messages are lifted, since otherwise few are read: so the server has more to do with them, and
    honest clients wait longer, than they ever would."""
    folder.mkdir(parents=True)
    work = partial(fuzzed_over_the_wire, messages=messages)
    what = "fuzzed messages from 100 clients, limits lifted"
    with Site(folder, SMALL) as site:
        site.room += len(CROWD)
        lifted = ("reconnects", "reconnect_burst", "messages", "message_burst", "unasked")
        site.limits = dict.fromkeys(lifted, 1_000_000_000)
        return site.run([Attack(what, work, "refused", SMALL, seconds)])[0]


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    options.add_argument("--out", type=Path, default=Path("runs/hostile"))
    options.add_argument("--only", default="", help="attacks with this in their name")
    options.add_argument("--fuzz", type=int, default=0, help="messages through decoder and node")
    options.add_argument("--wire", type=int, default=0, help="messages over the network")
    options.add_argument("--seconds", type=float, default=1_700, help="that these may take")
    chosen = options.parse_args()
    if chosen.fuzz:
        before, begin = resident(os.getpid()), time.monotonic()
        found = fuzz(chosen.fuzz)
        grown, took = resident(os.getpid()) - before, time.monotonic() - begin
        sys.stdout.write(f"{dict(found)}, {took:.0f} s, memory {grown:+.1f} MB\n")
        return
    shutil.rmtree(chosen.out, ignore_errors=True)
    sys.stdout.write(f"{HEADING}\n")
    if chosen.wire:
        row = over_the_wire(chosen.out, chosen.wire, chosen.seconds)
        tenths = [row.memory[round(k * (len(row.memory) - 1) / 10)] for k in range(11)]
        sys.stdout.write(
            f"{row.seconds:.0f} s; the server's memory after each tenth of the time: "
            f"{', '.join(f'{mb:.0f}' for mb in tenths)} MB\n"
        )
        return
    for size in (SMALL, LARGE):
        wanted = [a for a in ATTACKS if a.size == size and chosen.only in a.what]
        if wanted:
            folder = chosen.out / str(size)
            folder.mkdir(parents=True)
            with Site(folder, size) as site:
                site.run(wanted)


if __name__ == "__main__":
    main()
