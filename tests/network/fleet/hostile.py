"""Hostile and broken clients against a real server: what becomes of them, what the server's memory
does, and how long honest clients wait meanwhile.

    python tests/network/fleet/hostile.py --out FOLDER     prints a table in Markdown
    python tests/network/fleet/hostile.py --fuzz 1000000   messages through the decoder, no network
    python tests/network/fleet/hostile.py --wire 100000    the same over the network, one per stream

The server is `polytempo.serve` with its usual limits, and it, each of four honest clients and the
attackers are processes of their own. Waiting is from the end of a training to the acknowledgement
of its update, as the client sees it: with two fsyncs, its own and the server's. An attack lasts ten
seconds, unless it says otherwise. All traffic is on the loopback interface.
"""

from __future__ import annotations

import argparse
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
import numpy as np
import torch
from fleet_chaos import Forked, files, until
from test_fleet_hostile import Raw, frames

from polytempo.core.errors import Refused
from polytempo.experiments.fleet_group import SERVER
from polytempo.network.certificates import LOCAL, make_certificates
from polytempo.network.fleet import fleet_pb2 as pb
from polytempo.network.fleet.admission import revoke
from polytempo.network.fleet.reading import Reader, read_from_client
from polytempo.network.fleet.sending import CHUNK, METHOD
from polytempo.network.session import Certificates
from polytempo.nodes.star import Hello, Scores, Swapped, Upload

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

    def channel(self, whose: str, options=()) -> grpc.Channel:
        own = files(self.folder, whose)
        credentials = grpc.ssl_channel_credentials(
            own.ca.read_bytes(), own.key.read_bytes(), own.cert.read_bytes()
        )
        alone = ("grpc.use_local_subchannel_pool", 1)
        return grpc.secure_channel(self.address, credentials, [alone, *options])

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


def fuzzed(place: Place, seconds: float, names=tuple(CROWD), messages: int = 20_000):
    """Messages that are broken in some way, one on each of very many streams (those of one name
    are let in about twice a second), half of them after a hello."""
    found, draws = Counter(), random.Random(0)
    corpus = Corpus(place.size, draws)
    channels = [place.connect(name) for name in names]
    end = time.monotonic() + seconds
    while time.monotonic() < end and sum(found.values()) < messages:
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
                found[call.code().name] += 4
            except grpc.RpcError as error:
                found[error.code().name] += 4
    for raw in channels:
        raw.close()
    return found


def fuzzed_over_the_wire(place: Place, seconds: float, messages: int):
    """One broken message (or upload) on each of very many streams, half of them after a hello, each
    stream to its end: how the server ended it (OK: what was read is in the protocol, or incomplete,
    and the client has ended the stream)."""
    found, draws = Counter(), random.Random(1)
    corpus = Corpus(place.size, draws)
    methods = [place.channel(name).stream_stream(METHOD) for name in CROWD]
    end = time.monotonic() + seconds
    while (sent := sum(found.values())) < messages and time.monotonic() < end:
        calls = []
        for method in methods[: messages - sent]:
            said = [*frames(HELLO)] if draws.random() < 0.5 else []
            said += corpus.broken_upload() if draws.random() < 0.25 else [corpus.broken()]
            calls.append(method(iter(said), timeout=60))
        for call in calls:
            try:
                for _ in call:
                    pass
                found[call.code().name] += 1
            except grpc.RpcError as error:
                found[error.code().name] += 1
    return found


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
    Attack("20,000 broken messages from 100 clients", fuzzed, "refused", SMALL, 60.0),
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


# -- fuzz ------------------------------------------------------------------------------------------


class Corpus:
    """Frames of all messages, and ways to break them."""

    def __init__(self, size: int, draws: random.Random) -> None:
        self.draws = draws
        upload = Upload(3, torch.zeros(size), 10, {"mask": torch.ones(2, 3)}, 0.5)
        self.good = [
            *frames(HELLO),
            *frames(Hello(1, "toy", "toy", 10, 5, 3, 4)),
            *frames(Swapped(3, 2, 7)),
            *frames(Scores(1, {"total": 5.0, "value": 1.5}, {"total": 5.0, "value": 2.0})),
            *(frame for frame in frames(upload) if len(frame) < 2_000),
        ]
        self.upload = upload

    def broken(self) -> bytes:
        """A frame with a few random changes, or no frame at all."""
        draws = self.draws
        kind = draws.random()
        if kind < 0.1:
            return draws.randbytes(draws.randrange(1, 200))
        data = bytearray(draws.choice(self.good))
        for _ in range(draws.randrange(1, 4)):
            where = draws.randrange(len(data) + 1)
            match draws.randrange(5):
                case 0 if where < len(data):
                    data[where] ^= 1 << draws.randrange(8)
                case 1:
                    del data[where:]
                case 2:
                    data[where:where] = draws.randbytes(draws.randrange(1, 9))
                case 3:
                    other = draws.choice(self.good)
                    data[where:] = other[draws.randrange(len(other)) :]
                case 4:  # a huge number
                    data[where:where] = b"\xff" * draws.randrange(1, 10) + b"\x01"
        return bytes(data)

    def broken_upload(self) -> list[bytes]:
        """A well-framed upload whose safetensors are not."""
        draws = self.draws
        payload = bytearray(
            b"".join(pb.FromClient.FromString(f).chunk.data for f in frames(self.upload)[1:])
        )
        length = 8 + int.from_bytes(payload[:8], "little")
        for _ in range(draws.randrange(1, 4)):
            where = draws.randrange(length)
            match draws.randrange(4):
                case 0:
                    payload[where] ^= 1 << draws.randrange(8)
                case 1:
                    payload[where] = draws.choice(b'0123456789{}[]",:-eE')
                case 2:
                    del payload[where : where + draws.randrange(1, 5)]
                case 3:
                    payload[where:where] = draws.choice([b"9" * 30, b"[" * 50, b"null", b"1e9"])
        head = pb.FromClient(
            upload=pb.Upload(number=3, samples=10, payload=pb.Payload(id=1, bytes=len(payload)))
        )
        found = [head.SerializeToString()]
        for begin in range(0, len(payload), CHUNK):
            data = bytes(payload[begin : begin + CHUNK])
            found.append(pb.FromClient(chunk=pb.Chunk(payload=1, data=data)).SerializeToString())
        return found


def fuzz(messages: int, seed: int = 0, size: int = 12) -> Counter:
    """So many broken messages through the server's decoder: refused, or read (some changes leave a
    message that is in the protocol). Anything else is an exception."""
    draws = random.Random(seed)
    corpus, found = Corpus(size, draws), Counter()
    reader, longest = Reader(pb.FromClient, 2 * 4 * size + 2**20), 0.0
    for number in range(messages):
        said = corpus.broken_upload() if number % 4 == 0 else [corpus.broken()]
        begin = time.thread_time()
        try:
            outcome = "incomplete"
            for frame in said:
                whole = reader.take(frame)
                if whole is not None:
                    read_from_client(whole, size, torch.float32)
                    outcome = "read"
        except Refused:
            outcome = "refused"
            reader = Reader(pb.FromClient, reader.most)  # the stream would be over
        longest = max(longest, time.thread_time() - begin)
        found[outcome] += 1
    found["longest, microseconds of CPU"] = round(1e6 * longest)
    return found


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


@dataclass
class Row:
    attack: Attack
    outcome: str
    before: float
    peak: float
    after: float
    waits: list[float]

    def __str__(self) -> str:
        p50, p99 = np.percentile(self.waits, [50, 99]) if self.waits else (np.nan, np.nan)
        return (
            f"| {self.attack.what} | {self.outcome} | {self.before:.0f} / {self.peak:.0f} / "
            f"{self.after:.0f} | {p50:.0f} / {p99:.0f} / {max(self.waits, default=np.nan):.0f} | "
            f"{len(self.waits)} |"
        )


HEADING = (
    "| who | what becomes of it | server's memory before / at most / after, MB | honest clients: "
    "upload to acknowledgement p50 / p99 / max, ms | their updates |\n|---|---|---|---|---|"
)


class Site(Forked):
    """A server that has room for four honest clients and eight others."""

    def __init__(self, folder: Path, size: int) -> None:
        super().__init__(folder, 4, "fedasync", size)
        self.room = len(self.clients) + len(EVIL)
        make_certificates(folder / "certs", dict.fromkeys([*EVIL, *CROWD], LOCAL))
        make_certificates(folder / "certs", {"expired": LOCAL}, days=-0.02)
        make_certificates(folder / "other" / "certs", {EVIL[0]: LOCAL})

    def _measure(self, attack: Attack) -> Row:
        pid = self._processes[SERVER].pid
        outcome = self.folder / "outcome.json"
        outcome.unlink(missing_ok=True)
        before, begin = resident(pid), time.time()
        attacker = self._context.Process(
            target=attack_here,
            args=(self.folder, self.port, self.size, attack.work, attack.seconds),
            daemon=True,
        )
        attacker.start()
        peak, cut, leaves = before, None, self._leaves()
        latest = begin + 60 + 3 * attack.seconds
        while attacker.is_alive() and time.time() < latest:
            peak = max(peak, resident(pid))
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
        return Row(attack, outcome, before, peak, resident(pid), waits(self, begin, end))

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


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    options.add_argument("--out", type=Path, default=Path("runs/hostile"))
    options.add_argument("--only", default="", help="attacks with this in their name")
    options.add_argument("--fuzz", type=int, default=0, help="messages through the decoder alone")
    options.add_argument("--wire", type=int, default=0, help="messages over the network")
    options.add_argument("--seconds", type=float, default=3_600, help="that these may take")
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
        chosen.out.mkdir(parents=True)
        work = partial(fuzzed_over_the_wire, messages=chosen.wire)
        what = "broken messages from 100 clients, one per stream"
        attack = Attack(what, work, "refused", SMALL, chosen.seconds)
        with Site(chosen.out, SMALL) as site:
            site.room += len(CROWD)
            site.limits = {"reconnects": 1e6, "reconnect_burst": 1e6}  # else few are read
            site.run([attack])
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
