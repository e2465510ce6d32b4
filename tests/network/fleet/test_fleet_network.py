"""A server and its clients over loopback, with TLS."""

import errno
import math
import os
import threading
import time
import urllib.error
import urllib.request

import pytest
import torch
from fleet_kit import Fleet, ToyTrainer, make_node, same, until

from polytempo import storage
from polytempo.core.errors import PolytempoError
from polytempo.network.fleet import store as store_module
from polytempo.network.fleet.client import Unreachable
from polytempo.network.fleet.limits import limits_of
from polytempo.network.fleet.metrics import MetricsServer
from polytempo.network.fleet.store import Store, history
from polytempo.nodes.star import Offered, Started
from polytempo.storage import load_state

NAMES = ("a", "b", "c")


@pytest.fixture
def fleet(tmp_path):
    found = Fleet(tmp_path, NAMES)
    yield found
    found.close()


def replayed(fleet, **options):
    """A node that was fed with what the server has recorded."""
    node = make_node(**options)
    for record in history(fleet.folder / "server"):
        node.apply(record)
    return node


def said(client, event):
    return [found for found in client.said if found["event"] == event]


def test_a_run_from_the_first_hello_to_the_last_exam(fleet):
    server = fleet.serve(make_node(clients=3, updates=12))
    clients = [fleet.client(name) for name in NAMES]
    assert server.running.wait() is True
    assert [client.running.wait() for client in clients] == ["the run is over"] * 3
    node = server.node
    assert node.updates == 12 and len(node.exams) == 3 and len(node.exams[-1].handed) == 3
    assert all(client.trainer.kept for client in clients)
    assert sum(client.node.acknowledged for client in clients) == 12
    assert [event.n for event in server.events] == list(range(node.events))
    assert same(replayed(fleet, clients=3, updates=12).state_dict(), node.state_dict())


@pytest.mark.parametrize("strategy", ["fedavg", "fedbuff", "pace", "port", "ace", "ca2fl"])
def test_strategies_run_as_they_are(fleet, strategy):
    server = fleet.serve(make_node(strategy, clients=3, updates=9, concurrency=3))
    clients = [fleet.client(name, ToyTrainer(k)) for k, name in enumerate(NAMES)]
    assert server.running.wait() is True
    assert [client.running.wait() for client in clients] == ["the run is over"] * 3
    found = replayed(fleet, strategy=strategy, clients=3, updates=9, concurrency=3)
    assert same(found.state_dict(), server.node.state_dict())


class SlowStore(Store):
    """A disk that takes its time."""

    def append(self, records):
        if any(isinstance(record, Offered) for record in records):
            self.begun.append(time.monotonic())
            time.sleep(0.5)
            found = super().append(records)
            self.done.append(time.monotonic())
            return found
        return super().append(records)


def test_an_update_is_acknowledged_only_when_it_is_on_disk(fleet):
    store = SlowStore(fleet.folder / "server")
    store.begun, store.done = [], []
    server = fleet.serve(make_node(clients=1, updates=1), store=store)
    client = fleet.client("a")
    until(lambda: store.begun)
    assert not said(client, "acknowledged")
    assert server.running.wait() and client.running.wait()
    assert said(client, "acknowledged") and len(store.done) == 1
    assert client.node.acknowledged == 1


def test_a_server_that_was_killed_goes_on_as_if_nothing_had_happened(fleet):
    """Killed: its threads end without a checkpoint, as in `abandon` below. The clients are
    connected all the time."""
    options = {"clients": 3, "updates": 24}
    clients, address = [], "127.0.0.1:0"
    for life in range(3):
        server = fleet.serve(make_node(**options), listen=address)
        address = server.address
        clients = clients or [fleet.client(name, ToyTrainer(seconds=0.002)) for name in NAMES]
        if life < 2:
            until(lambda server=server, life=life: server.node.updates >= 8 * (life + 1))
            abandon(server)
    assert server.running.wait() is True
    assert [client.running.wait() for client in clients] == ["the run is over"] * 3
    assert same(replayed(fleet, **options).state_dict(), server.node.state_dict())
    records = [*history(fleet.folder / "server")]
    assert sum(isinstance(record, Started) for record in records) == 3
    assert sum(client.node.acknowledged for client in clients) == server.node.updates == 24


def abandon(server):
    """End a server as a crash would: no checkpoint, no farewell."""

    def crash(*_):
        raise RuntimeError("killed")

    server.store.checkpoint = crash
    with pytest.raises(RuntimeError, match="killed"):
        server.running.stop()


def test_a_client_offers_again_what_was_never_acknowledged(fleet):
    """Its first server is killed after the update came, and before it was on disk."""
    options = {"clients": 1, "updates": 2}

    class Lost(Store):
        def append(self, records):
            if any(isinstance(record, Offered) for record in records):
                raise PolytempoError("killed")
            return super().append(records)

    folder = fleet.folder / "server"
    server = fleet.serve(make_node(**options), store=Lost(folder))
    client = fleet.client("a")
    with pytest.raises(PolytempoError, match="killed"):
        server.running.wait()
    saved = load_state(fleet.folder / "a" / "client.safetensors")
    assert saved["pending"]["number"] == 0
    again = fleet.serve(make_node(**options), listen=server.address)
    assert again.running.wait() and client.running.wait()
    assert client.trainer.begun[0][1] == 0 and [n for _, n in client.trainer.begun].count(0) == 1
    offered = [record for record in history(folder) if isinstance(record, Offered)]
    assert [record.upload.number for record in offered] == [0, 1]


def test_a_full_disk_stops_the_server_with_nothing_lost(fleet, monkeypatch):
    options = {"clients": 2, "updates": 20}
    server = fleet.serve(make_node(**options))
    clients = [fleet.client(name, ToyTrainer(seconds=0.001)) for name in NAMES[:2]]
    until(lambda: server.node.updates > 4)

    def full(file, parts):
        file.write(b"some of it")
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr("polytempo.network.fleet.journal._write_all", full)
        with pytest.raises(PolytempoError, match=r"No space left.*intact: free some space"):
            server.running.wait()
    again = fleet.serve(make_node(**options), listen=server.address)
    assert again.node.updates == server.node.updates
    assert again.running.wait() is True
    for client in clients:
        client.running.wait()
    assert sum(client.node.acknowledged for client in clients) == 20
    assert same(replayed(fleet, **options).state_dict(), again.node.state_dict())


def test_a_client_that_was_killed_offers_what_it_had_saved(fleet):
    server = fleet.serve(make_node(clients=1, updates=3))
    client = fleet.client("a", ToyTrainer(seconds=0.01))
    say, held = client._act, threading.Event()

    def act(actions):
        kinds = [type(action).__name__ for action in actions]
        if kinds == ["Save", "Say"]:  # saved, and killed before it was said
            say(actions[:1])
            held.set()
            client.running.interrupted.set()
        else:
            say(actions)

    client._act = act
    assert client.running.wait() is None and held.is_set()
    assert server.node.updates == 0
    again = fleet.client("a")
    assert server.running.wait() and again.running.wait()
    assert 0 not in [number for _, number in again.trainer.begun], "it was not trained again"
    assert float(again.node.memory["trainings"]) == 3.0


# -- what reaches a client in training -------------------------------------------------------------


def test_a_multicast_reaches_a_client_in_training_between_two_steps(fleet):
    """PACE refreshes clients in training; one of them is slow."""
    server = fleet.serve(make_node("pace:omega=16", clients=3, updates=60, concurrency=3, steps=50))
    slow = fleet.client("a", ToyTrainer(seconds=0.02))
    others = [fleet.client(name, ToyTrainer(seconds=0.001)) for name in NAMES[1:]]
    assert server.running.wait() is True
    for client in (slow, *others):
        client.running.wait()
    swapped = [found for found in said(slow, "swapped") if found["step"] is not None]
    assert swapped and all(0 <= found["step"] < 50 for found in swapped)
    assert any(found["step"] > 0 for found in swapped)
    restarts = [event for event in server.events if event.kind == "restart"]
    assert len(restarts) >= 1


def test_an_urgent_request_ends_a_training_early(fleet):
    """PORT hurries clients whose staleness reaches its bound."""
    server = fleet.serve(
        make_node("port:bound=2", clients=3, updates=20, concurrency=3, steps=2000)
    )
    slow = fleet.client("a", ToyTrainer(seconds=0.01))
    fast = [fleet.client(name, Shorter(40)) for name in NAMES[1:]]
    assert server.running.wait() is True
    for client in (slow, *fast):
        client.running.wait()
    assert said(slow, "hurried")
    assert any(event.kind == "urgent" for event in server.events)
    assert said(slow, "trained"), "2000 steps would have taken 20 s"


class Shorter(ToyTrainer):
    """Takes fewer steps than it was asked for."""

    def __init__(self, steps):
        super().__init__()
        self.steps = steps

    def begin(self, dispatch, client, memory):
        training = super().begin(dispatch, client, memory)
        training.last = self.steps
        return training


# -- failures of the strategy, metrics ----------------------------------------------------------


def test_an_update_that_the_strategy_fails_on_is_left_out_and_the_run_goes_on(fleet):
    def node():
        found = make_node(clients=2, updates=8)
        fold = found.server.strategy.fold

        def fold_or_fail(update, staleness):
            if update.number == 3:
                found.server.strategy.model = torch.full((12,), torch.nan)  # half done
                raise ZeroDivisionError("a bug")
            return fold(update, staleness)

        found.server.strategy.fold = fold_or_fail
        return found

    server = fleet.serve(node())
    clients = [fleet.client(name) for name in NAMES[:2]]
    assert server.running.wait() is True
    for client in clients:
        client.running.wait()
    reasons = [found["reason"] for client in clients for found in said(client, "declined")]
    assert any("a bug" in reason for reason in reasons)
    assert server.counts["left out"] == 1
    assert bool(server.node.server.strategy.model_for(0).isfinite().all())
    found = make_node(clients=2, updates=8)
    for record in history(fleet.folder / "server"):
        found.apply(record)
    assert same(found.state_dict(), server.node.state_dict())


def test_metrics_tell_how_it_goes(fleet):
    server = fleet.serve(make_node(clients=1, updates=10_000))
    metrics = MetricsServer(server)
    fleet.client("a")
    until(lambda: server.figures.get("updates", 0) > 3)
    text = fetch(metrics, "/metrics")
    values = dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
    assert float(values["polytempo_updates_total"]) > 3
    assert float(values["polytempo_connected"]) == 1
    assert float(values['polytempo_received_total{kind="upload"}']) > 3
    assert float(values['polytempo_staleness_updates_bucket{le="+Inf"}']) > 3
    assert float(values["polytempo_fsync_seconds_total"]) > 0
    assert fetch(metrics, "/healthz") == "ok\n"
    with pytest.raises(urllib.error.HTTPError):
        fetch(metrics, "/etc/passwd")
    server.running.stop()
    server.alive -= 100
    with pytest.raises(urllib.error.HTTPError, match="503"):
        fetch(metrics, "/healthz")
    metrics.close()


def fetch(metrics, path):
    with urllib.request.urlopen(f"http://{metrics.address}{path}", timeout=10) as answer:
        return answer.read().decode()


def test_a_run_begins_when_those_are_there_that_it_waits_for(fleet):
    options = {"clients": 3, "updates": 9, "wait_for": 3}
    server = fleet.serve(make_node(**options))
    first = [fleet.client(name) for name in NAMES[:2]]
    until(lambda: len(server.node.server.members) == 2)
    assert server.node.server.dispatches == 0 and server.node.gathering
    last = fleet.client(NAMES[2])
    assert server.running.wait() is True
    assert [client.running.wait() for client in (*first, last)] == ["the run is over"] * 3
    dispatched = [event.n for event in server.events if event.kind == "dispatch"]
    joined = [event.n for event in server.events if event.kind == "return"]
    assert len(joined) >= 3 and max(joined[:3]) < min(dispatched)
    assert same(replayed(fleet, **options | {"wait_for": 1}).state_dict(), server.node.state_dict())


def test_a_server_takes_updates_while_it_writes_a_checkpoint(fleet, monkeypatch):
    monkeypatch.setattr(store_module, "SHARE", math.inf)
    go, begun, save = threading.Event(), threading.Event(), storage.save_file

    def wait_and_save(arrays, path, **more):
        if threading.current_thread().name.startswith("checkpoint") and "0000.s" not in str(path):
            begun.set()
            assert go.wait(60)
        save(arrays, path, **more)

    monkeypatch.setattr(storage, "save_file", wait_and_save)
    store = Store(fleet.folder / "server", every=0.0)
    server = fleet.serve(make_node(clients=3, updates=30), store=store)
    clients = [fleet.client(name) for name in NAMES]
    assert begun.wait(60)
    until(lambda: server.node.closed)  # it waits for the disk only when all is done
    go.set()
    assert server.running.wait() is True
    assert [client.running.wait() for client in clients] == ["the run is over"] * 3
    assert same(replayed(fleet, clients=3, updates=30).state_dict(), server.node.state_dict())


def test_a_client_gives_up_after_a_while_without_a_server(fleet):
    """It has missed the end of the run; nobody will tell it."""
    server = fleet.serve(make_node(clients=3, updates=3))
    there = fleet.client("a")
    assert server.running.wait() is True
    assert there.running.wait() == "the run is over"
    late = fleet.client("a", give_up_after=0.5)
    with pytest.raises(Unreachable, match=r"no server at .* the run may be over.*give-up-after"):
        late.running.wait()
    assert len(said(late, "disconnected")) >= 2


def test_a_client_finishes_and_keeps_what_it_trains_before_it_gives_up(fleet):
    server = fleet.serve(make_node(clients=3, updates=3))
    client = fleet.client("a", ToyTrainer(seconds=0.05), give_up_after=0.05)
    until(lambda: client.trainer.begun)
    server.running.stop()
    with pytest.raises(Unreachable, match="its last update is kept in its folder"):
        client.running.wait()
    assert len(said(client, "trained")) == 1
    assert load_state(fleet.folder / "a" / "client.safetensors")["pending"] is not None


def test_a_server_that_is_full_says_so(fleet):
    server = fleet.serve(make_node(clients=3, updates=10**6), limits=limits_of({"connections": 1}))
    fleet.client("a", ToyTrainer(seconds=0.01))
    until(lambda: server.node.here == {"a"})
    other = fleet.client("b")
    until(lambda: said(other, "disconnected"))
    assert "the server is full" in said(other, "disconnected")[0]["reason"]
    assert server.node.here == {"a"}


def test_an_interrupted_fleet_goes_on_with_the_same_command(fleet):
    options = {"clients": 2, "updates": 30}
    server = fleet.serve(make_node(**options))
    clients = [fleet.client(name, ToyTrainer(seconds=0.002)) for name in NAMES[:2]]
    until(lambda: server.node.updates > 5)
    assert clients[0].running.stop() is None
    assert server.running.stop() is False
    assert clients[1].running.stop() is None
    again = fleet.serve(make_node(**options))
    assert again.node.updates >= server.node.updates > 5
    more = [fleet.client(name) for name in NAMES[:2]]
    assert again.running.wait() is True
    for client in more:
        client.running.wait()
    assert same(replayed(fleet, **options).state_dict(), again.node.state_dict())


def test_a_folder_belongs_to_one_run(fleet, tmp_path):
    server = fleet.serve(make_node(clients=2, updates=2))
    client = fleet.client("a")
    assert server.running.wait() and client.running.wait()
    other = Fleet(tmp_path / "other", secure=False)
    other.files, other.folder = fleet.files, tmp_path / "other"
    try:
        other.serve(make_node(clients=2, updates=2))
        client = fleet.client("a", address=other.address)
        with pytest.raises(PolytempoError, match="belongs to run"):
            client.running.wait()
    finally:
        other.close()
