"""Who is not let in, and what a certified client that misbehaves can do to the others: nothing."""

import gc
import os
import queue
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import grpc
import pytest
import torch
from fleet_kit import Fleet, ToyTrainer, certificates, make_node, until

from polytempo.core.errors import PolytempoError
from polytempo.network.certificates import make_certificates
from polytempo.network.fleet import fleet_pb2 as pb
from polytempo.network.fleet.admission import Admission, admit, revoke
from polytempo.network.fleet.limits import Limits
from polytempo.network.fleet.sending import CHUNK, METHOD, NAME_KEY, Writer
from polytempo.network.fleet.streams import Stream
from polytempo.network.session import Certificates
from polytempo.nodes.star import Hello, Scores, Swapped, Upload

Code = grpc.StatusCode
HELLO = Hello(1, "toy", "toy", 10, 5)
ENDLESS = {"updates": 1_000_000, "every": 1_000_000}


@pytest.fixture
def fleet(tmp_path):
    found = Fleet(tmp_path, ["a", "b", "evil"])
    yield found
    found.close()


def frames(message):
    found = Writer().from_client(message)
    return [found.head, *(found.blob.frame(k) for k in range(len(found.blob or ())))]


class Raw:
    """A client that says what it likes. `root`, `pair`: the authority that it trusts, and its
    certificate."""

    def __init__(self, address, files=None, *, pair=True, name=None):
        key, cert = (files.key.read_bytes(), files.cert.read_bytes()) if pair else (None, None)
        credentials = grpc.ssl_channel_credentials(files.ca.read_bytes(), key, cert)
        options = [("grpc.max_send_message_length", 2**30), ("grpc.use_local_subchannel_pool", 1)]
        self.channel = grpc.secure_channel(address, credentials, options)
        self.out = queue.Queue()
        metadata = ((NAME_KEY, name),) if name else None
        self.call = self.channel.stream_stream(METHOD)(
            iter(self.out.get, None), metadata=metadata, timeout=60
        )

    def say(self, *found):
        for frame in found:
            self.out.put(frame)
        return self

    def hear(self):
        """The next frame."""
        return pb.FromServer.FromString(next(self.call))

    def end(self):
        """How the stream ended."""
        try:
            for _ in self.call:
                pass
            return self.call.code(), self.call.details()
        except grpc.RpcError as error:
            return error.code(), error.details()

    def close(self):
        self.out.put(None)
        self.call.cancel()
        self.channel.close()


@pytest.fixture
def raw():
    made = []

    def make(*args, **options):
        made.append(Raw(*args, **options))
        return made[-1]

    yield make
    for found in made:
        found.close()


# -- who is let in -------------------------------------------------------------------------------


def test_a_stranger_does_not_get_past_the_handshake(fleet, raw):
    server = fleet.serve(make_node(**ENDLESS))
    files = fleet.files["a"]
    assert raw(server.address, files, pair=False).say(*frames(HELLO)).end()[0] == Code.UNAVAILABLE
    assert server.streams.counts["hello"] == 0


def test_another_authority_is_no_authority(fleet, raw, tmp_path):
    server = fleet.serve(make_node(**ENDLESS))
    other = certificates(tmp_path / "other", ["a"])["a"]
    mixed = Certificates(fleet.files["a"].ca, other.cert, other.key)
    assert raw(server.address, mixed).say(*frames(HELLO)).end()[0] == Code.UNAVAILABLE
    with pytest.raises(PolytempoError, match="was not issued by the authority"):
        fleet.client("a", files=mixed).running.wait()
    with pytest.raises(PolytempoError, match="do not belong together"):
        fleet.client("a", files=other).running.wait()
    assert server.streams.counts["hello"] == 0


def test_an_expired_certificate_is_refused_by_both_sides(fleet, raw):
    server = fleet.serve(make_node(**ENDLESS))
    folder = fleet.folder / "certs"
    make_certificates(folder, {"old": ["127.0.0.1"]}, days=-0.02)
    old = Certificates(folder / "ca.pem", folder / "old.pem", folder / "old.key")
    assert raw(server.address, old).say(*frames(HELLO)).end()[0] == Code.UNAVAILABLE
    with pytest.raises(PolytempoError, match=r"is valid from .* get a new one"):
        fleet.client("a", files=old).running.wait()
    assert server.streams.counts["hello"] == 0


def test_a_client_is_who_its_certificate_says(fleet, raw):
    server = fleet.serve(make_node(**ENDLESS))
    liar = raw(server.address, fleet.files["evil"], name="a").say(*frames(HELLO))
    assert liar.hear().WhichOneof("said") == "welcome"
    assert [*server.node.names] == ["evil"]


def test_a_revoked_client_is_cut_off_and_may_be_admitted_again(fleet):
    server = fleet.serve(make_node(clients=2, **ENDLESS))
    first = fleet.client("a", ToyTrainer(seconds=0.001))
    until(lambda: first.node.acknowledged > 1)
    revoke(fleet.folder / "server", "a")
    with pytest.raises(PolytempoError, match=r"'a' was revoked|it was revoked"):
        first.running.wait(30)
    until(lambda: not server.node.server.open)
    with pytest.raises(PolytempoError, match="'a' was revoked"):
        fleet.client("a").running.wait(30)
    admit(fleet.folder / "server", "a")
    until(lambda: server.admission.refusal("a") is None)  # it looks at the list twice a second
    again = fleet.client("a")
    until(lambda: again.node.acknowledged > 1)


def test_with_a_list_only_those_on_it_take_part(fleet):
    folder = fleet.folder / "server"
    Admission(folder, "listed")
    server = fleet.serve(make_node(clients=2, **ENDLESS))
    with pytest.raises(PolytempoError, match=r"not admitted.*polytempo admit a"):
        fleet.client("a").running.wait(30)
    admit(folder, "a")
    until(lambda: server.admission.refusal("a") is None)
    client = fleet.client("a")
    until(lambda: client.node.acknowledged > 1)


@pytest.mark.parametrize(
    ("hello", "why"),
    [
        (Hello(2, "toy", "toy", 10, 5), "protocol 2, the server 1"),
        (Hello(1, "other", "toy", 10, 5), "layout other, the server one with toy"),
        (Hello(1, "toy", "regression", 10, 5), "learns regression, the server toy"),
        (Hello(1, "toy", "toy", 0, 5), "0 training"),
    ],
)
def test_who_does_not_fit_hears_why(fleet, raw, hello, why):
    server = fleet.serve(make_node(**ENDLESS))
    code, details = raw(server.address, fleet.files["a"]).say(*frames(hello)).end()
    assert code == Code.FAILED_PRECONDITION and why in details


def test_a_newer_stream_of_the_same_name_ends_the_older(fleet, tmp_path):
    server = fleet.serve(make_node(clients=1, **ENDLESS))
    older = fleet.client("a", ToyTrainer(seconds=0.001))
    until(lambda: older.node.acknowledged > 1)
    twin = Fleet(tmp_path / "twin", secure=False)
    twin.files, twin.address = fleet.files, server.address
    try:
        newer = twin.client("a", ToyTrainer(seconds=0.001))
        with pytest.raises(PolytempoError, match="another client with the certificate of 'a'"):
            older.running.wait(20)
        until(lambda: newer.node.acknowledged > 1)
        assert [*server.node.names] == ["a"]
    finally:
        twin.close()


def test_without_certificates_a_server_stays_on_this_machine(tmp_path):
    fleet = Fleet(tmp_path, secure=False)
    with pytest.raises(PolytempoError, match="without certificates a fleet stays on this machine"):
        fleet.serve(make_node(), listen="0.0.0.0:0")


def test_a_port_that_is_taken_is_an_error(fleet, tmp_path):
    server = fleet.serve(make_node(**ENDLESS))
    other = Fleet(tmp_path / "other", secure=False)
    other.files = fleet.files
    with pytest.raises(PolytempoError, match="the port is in use"):
        other.serve(make_node(), listen=server.address)


# -- what a client may send ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("found", "code", "why"),
    [
        ([b"\xff\xff"], Code.INVALID_ARGUMENT, "not in the protocol"),
        (frames(Scores(0, {"loss": 1.0})), Code.INVALID_ARGUMENT, "hello first"),
        (frames(Upload(0, torch.rand(12), 1))[:1], Code.INVALID_ARGUMENT, "hello first"),
        ([*frames(HELLO), *frames(HELLO)], Code.INVALID_ARGUMENT, "hello first, and once"),
        (
            [*frames(HELLO), *frames(Upload(0, torch.rand(10**6), 1))],
            Code.INVALID_ARGUMENT,
            "announced 4000080 bytes",
        ),
        (
            [*frames(HELLO), *frames(Upload(0, torch.rand(13), 1))],
            Code.INVALID_ARGUMENT,
            r"\[13\]",
        ),
        ([*frames(HELLO), bytes(CHUNK * 2)], Code.RESOURCE_EXHAUSTED, "larger than max"),
    ],
)
def test_what_is_not_in_the_protocol_ends_the_stream(fleet, raw, found, code, why):
    server = fleet.serve(make_node(clients=2, **ENDLESS))
    honest = fleet.client("a")
    ended = raw(server.address, fleet.files["evil"]).say(*found).end()
    assert ended[0] == code and re.search(why, ended[1])
    before = honest.node.acknowledged
    until(lambda: honest.node.acknowledged > before + 2)


def test_a_repeated_update_is_acknowledged_again_and_folded_once(fleet, raw):
    server = fleet.serve(make_node(clients=1, updates=100, every=100))
    client = raw(server.address, fleet.files["a"]).say(*frames(HELLO))
    said = [client.hear().WhichOneof("said") for _ in range(3)]
    assert said == ["welcome", "work", "chunk"]
    for _ in range(3):
        client.say(*frames(Upload(0, torch.ones(12), 10)))
    heard = []
    while len([frame for frame in heard if frame.WhichOneof("said") == "acknowledge"]) < 3:
        heard.append(client.hear())
    work = [frame.work.number for frame in heard if frame.WhichOneof("said") == "work"]
    assert work == [1] and server.node.updates == 1


def test_an_update_that_was_never_asked_for_is_declined(fleet, raw):
    server = fleet.serve(make_node(clients=1, updates=100, every=100))
    client = raw(server.address, fleet.files["a"]).say(*frames(HELLO))
    client.say(*frames(Upload(77, torch.ones(12), 10)))
    heard = [client.hear() for _ in range(4)]
    (decline,) = [frame.decline for frame in heard if frame.WhichOneof("said") == "decline"]
    assert decline.number == 77 and "never sent" in decline.reason
    assert server.node.updates == 0


def test_who_never_says_hello_is_cut_off(fleet, raw):
    server = fleet.serve(make_node(**ENDLESS), limits=Limits(hello_seconds=0.5))
    code, _ = raw(server.address, fleet.files["evil"]).end()
    assert code == Code.DEADLINE_EXCEEDED


def test_an_upload_that_does_not_come_is_given_up_and_its_memory_is_free(fleet, raw):
    limits = Limits(hello_seconds=0.5, slowest=1e6)
    server = fleet.serve(make_node(clients=2, **ENDLESS), limits=limits)
    head = frames(Upload(0, torch.rand(12), 1))[0]
    evil = raw(server.address, fleet.files["evil"]).say(*frames(HELLO), head)
    until(lambda: server.streams.held > 0)
    assert evil.end()[0] == Code.DEADLINE_EXCEEDED
    until(lambda: server.streams.held == 0)


def test_a_small_message_in_the_middle_of_an_upload_does_not_free_its_memory(fleet, raw):
    """It would be held without being counted, and for ever."""
    limits = Limits(hello_seconds=10.0, slowest=1e6)
    server = fleet.serve(make_node(clients=2, size=10**5, **ENDLESS), limits=limits)
    begun = frames(Upload(0, torch.rand(10**5), 1))[:2]
    evil = raw(server.address, fleet.files["evil"]).say(*frames(HELLO), *begun)
    until(lambda: server.streams.held > 0)
    evil.say(*frames(Swapped(999, 998, 1)) * 2)
    until(lambda: server.streams.counts["swapped"] == 2)  # so the first was dealt with
    assert server.streams.held > 400_000
    assert evil.end()[0] == Code.DEADLINE_EXCEEDED
    until(lambda: server.streams.held == 0)


def test_who_comes_back_again_and_again_must_wait(fleet, raw):
    server = fleet.serve(make_node(clients=2, **ENDLESS))
    codes = [raw(server.address, fleet.files["evil"]).say(b"\xff").end()[0] for _ in range(20)]
    assert Code.RESOURCE_EXHAUSTED in codes
    honest = fleet.client("a")
    until(lambda: honest.node.acknowledged > 1)


def streams() -> set[Stream]:
    return {found for found in gc.get_objects() if type(found) is Stream}


def test_what_a_stream_held_is_free_when_it_ends(fleet, raw):
    """At once, and not when the garbage collector comes by: until then a hundred bad updates would
    be kept."""
    limits = Limits(reconnects=1e6, reconnect_burst=10**6)
    server = fleet.serve(make_node(clients=2, size=10**5, **ENDLESS), limits=limits)
    bad = frames(Upload(0, torch.full((10**5 + 1,), 1.0), 1))
    gc.collect()
    earlier = streams()  # of servers of other tests, which may take a while to end
    gc.disable()
    try:
        for _ in range(6):
            ended = raw(server.address, fleet.files["evil"]).say(*frames(HELLO), *bad).end()
            assert ended[0] == Code.INVALID_ARGUMENT
        until(lambda: streams() <= earlier)
    finally:
        gc.enable()


def test_asking_for_the_same_work_again_does_not_make_more_updates_welcome(fleet, raw):
    """Who says that it has missed its work is sent it again, but may not offer more updates."""
    server = fleet.serve(make_node(clients=1, **ENDLESS), limits=Limits(unasked=1e3))
    client = raw(server.address, fleet.files["a"]).say(*frames(HELLO))
    while (said := client.hear()).WhichOneof("said") != "work":
        pass
    number = said.work.number
    client.say(*frames(Swapped(number, number, None)) * 20)
    client.say(*frames(Upload(999, torch.ones(12), 10)) * 4)
    until(lambda: server.streams.counts["unasked"] >= 2)


# -- what a client may do to others ----------------------------------------------------------------


def slowest_round(client, updates=40):
    """Seconds between two acknowledgements of an honest client: the longest of so many."""
    times = []
    begin = client.node.acknowledged
    last, count = time.monotonic(), begin
    until_ = time.monotonic() + 60
    while count < begin + updates:
        assert time.monotonic() < until_, "the honest client is held up"
        if client.node.acknowledged > count:
            now = time.monotonic()
            times.append((now - last) / (client.node.acknowledged - count))
            last, count = now, client.node.acknowledged
        time.sleep(0.001)
    return max(times)


def test_a_flood_waits_on_the_line_of_the_one_that_sends_it(fleet, raw):
    server = fleet.serve(make_node(clients=2, **ENDLESS))
    honest = fleet.client("a")
    until(lambda: honest.node.acknowledged > 3)
    evil = raw(server.address, fleet.files["evil"]).say(*frames(HELLO))
    (nonsense,) = frames(Swapped(999, 998, 1))
    evil.say(*[nonsense] * 100_000)
    assert slowest_round(honest) < 10.0
    assert server.streams.counts["swapped"] < 20_000, "it is read slowly"
    assert server.streams.inbox.qsize() <= 2


def test_colluders_that_hold_all_memory_and_send_nothing_lose_their_turns(fleet, raw):
    """With `slowest` alone they would hold it for two minutes, and again."""
    limits = Limits(memory=1, hello_seconds=2.0)  # room for two updates of the largest size
    server = fleet.serve(make_node(clients=3, **ENDLESS), limits=limits)
    largest = pb.Payload(id=1, bytes=2 * 12 * 4 + limits.extras)
    head = pb.FromClient(upload=pb.Upload(payload=largest)).SerializeToString()
    for name in ("b", "evil"):
        raw(server.address, fleet.files[name]).say(*frames(HELLO), head)
    until(lambda: server.streams.held == 2 * largest.bytes)
    honest = fleet.client("a")
    until(lambda: honest.node.acknowledged > 3)
    assert server.streams.counts["refused RESOURCE_EXHAUSTED"] == 1, "one has made room enough"


def test_who_never_reads_holds_up_nobody(fleet, raw):
    """A model of 12 MB is more than the line holds (some 4 MB)."""
    limits = Limits(write_seconds=600.0)
    server = fleet.serve(make_node(clients=2, size=3 * 10**6, steps=2, **ENDLESS), limits=limits)
    raw(server.address, fleet.files["evil"]).say(*frames(HELLO))
    until(lambda: "evil" in server.node.here, 60)
    honest = fleet.client("a")
    until(lambda: honest.node.acknowledged > 3, 100)
    assert "evil" in server.node.here, "its model is still being sent"


def test_who_never_reads_is_cut_off(fleet, raw):
    node = make_node(clients=2, size=3 * 10**6, steps=2, **ENDLESS)
    server = fleet.serve(node, limits=Limits(write_seconds=1.0))
    evil = raw(server.address, fleet.files["evil"]).say(*frames(HELLO))
    until(lambda: "evil" in server.node.here, 60)
    until(lambda: "evil" not in server.node.here, 60)
    assert evil.end()[0] == Code.DEADLINE_EXCEEDED


CLIENT = """
import sys, threading
sys.path.insert(0, sys.argv[1])
from pathlib import Path
from fleet_kit import Fleet, ToyTrainer
folder, address, name = Path(sys.argv[2]), sys.argv[3], sys.argv[4]
fleet = Fleet(folder, secure=False)
from polytempo.network.session import Certificates
certs = folder / "certs"
fleet.files = {name: Certificates(certs / "ca.pem", certs / f"{name}.pem", certs / f"{name}.key")}
fleet.address = address
fleet.client(name, ToyTrainer(seconds=0.002)).running.wait(120)
"""


def test_a_client_that_freezes_is_noticed_and_holds_up_nobody(fleet):
    server = fleet.serve(make_node(clients=2, size=10**6, steps=2, **ENDLESS))
    honest = fleet.client("a")
    here = str(Path(__file__).parent)
    process = subprocess.Popen(
        [sys.executable, "-c", CLIENT, here, str(fleet.folder), server.address, "b"]
    )
    try:
        until(lambda: len(server.node.folded) == 2, 60)
        os.kill(process.pid, signal.SIGSTOP)
        begin = time.monotonic()
        assert slowest_round(honest, 10) < 10.0
        until(lambda: "b" not in server.node.here, 30)
        assert time.monotonic() - begin < 30
        before = honest.node.acknowledged
        until(lambda: honest.node.acknowledged > before + 5)
        os.kill(process.pid, signal.SIGCONT)
        until(lambda: "b" in server.node.here, 60)
    finally:
        process.kill()
        process.wait(10)


def test_a_client_that_is_killed_is_noticed_at_once(fleet):
    server = fleet.serve(make_node(clients=2, **ENDLESS))
    here = str(Path(__file__).parent)
    process = subprocess.Popen(
        [sys.executable, "-c", CLIENT, here, str(fleet.folder), server.address, "b"]
    )
    until(lambda: "b" in server.node.here, 60)
    process.kill()
    process.wait(10)
    until(lambda: "b" not in server.node.here, 30)
    assert threading.active_count() < 50
