"""The commands server, client, fleet, admit, revoke, certs and replay as people meet them."""

import json
import signal
import subprocess
import sys
import threading

import numpy as np
import pytest

from fleets import TINY, WAIT, run_fleet
from polytempo import Federation, PolytempoError
from polytempo.core.task import TASKS, Task
from polytempo.experiments.config import RunConfig, make_config
from polytempo.experiments.fleet_plan import make_node, undertaking
from polytempo.experiments.fleet_settings import (
    EITHER_WAY,
    OF_CLIENT,
    SERVER_SETTINGS,
    SIMULATED,
    alone,
    figures_of,
    for_fleet,
    known,
    own_samples,
    problem_of,
    read_limits,
    read_patience,
    read_seconds,
    server_table,
)
from polytempo.experiments.fleet_trainer import SolverTrainer
from polytempo.experiments.replay import attendance, differences, in_simulator, verify
from polytempo.experiments.run import run
from polytempo.network.fleet.store import Store, history
from polytempo.nodes.star import Enrolled, Joined, Started
from polytempo.training import problem_for

SMALL = ("--data", TINY["data"], "--model", "linear", "--updates", 12, "--epochs", 1)


# -- settings --------------------------------------------------------------------------------------


def test_every_setting_of_a_run_means_something_to_a_fleet_or_is_refused():
    groups = [*SERVER_SETTINGS, *OF_CLIENT, *SIMULATED, *EITHER_WAY]
    assert sorted(groups) == sorted(name for name in RunConfig.model_fields if name != "strategy")


@pytest.mark.parametrize(
    ("name", "value"),
    [("devices", "severe"), ("dropout", "drop"), ("workers", 3), ("until", 9.0), ("check", True)],
)
def test_what_is_for_simulations_is_refused_with_what_there_is_instead(name, value):
    with pytest.raises(PolytempoError, match=f"^{name} = .* is for simulations.*: .*; omit {name}"):
        for_fleet(make_config({name: value}))


def test_a_strategy_without_a_server_is_sent_elsewhere():
    with pytest.raises(PolytempoError, match="p2p is not a strategy with a server; see"):
        for_fleet(make_config({"strategy": "p2p"}))


def test_a_server_without_data_is_told_their_shape():
    config = make_config({"clients": 7, "problem": "regression", "updates": 80})
    complete, samples = known(config, for_fleet(config), "3x8x8", 2)
    assert samples.inputs.shape == (3, 8, 8) and complete.clients == 7
    assert complete.eval_every == 2 and complete.concurrency == 4
    assert figures_of(problem_of(complete, samples), samples) >= {"squared", "y.0", "y.1"}
    for given, said in (
        (("3xx", 2), "as in 3x32x32"),
        (("8", None), "needs --outputs too"),
        ((None, 2), "--outputs goes with --shape"),
    ):
        with pytest.raises(PolytempoError, match=said):
            known(config, for_fleet(config), *given)


def test_deadlines_are_read():
    assert read_patience("none").seconds([5.0], 5.0) == float("inf")
    assert read_patience("12").seconds([50.0], 5.0) == 12
    assert read_patience("auto").seconds([50.0], 5.0) == 200
    with pytest.raises(PolytempoError, match="--deadline soon: give auto, none, or"):
        read_patience("soon")


def test_what_a_server_waits_for_and_its_limits_are_in_a_table_of_their_own():
    given = {"updates": 9, "server": {"wait-for": 3, "limits": {"ping-after": 2}}}
    assert server_table(given) == {"wait_for": 3, "limits": {"ping_after": 2}}
    assert given == {"updates": 9}
    assert server_table({}) == {"wait_for": 1, "limits": {}}
    assert read_limits("messages=20, memory=4e9") == {"messages": 20.0, "memory": 4e9}
    for wrong, said in (
        ({"server": 3}, "write a table"),
        ({"server": {"wait": 3}}, "unknown setting 'wait'.*wait_for"),
        ({"server": {"wait_for": "all"}}, "give a number of clients"),
        ({"server": {"limits": 3}}, "write a table"),
    ):
        with pytest.raises(PolytempoError, match=said):
            server_table(wrong)
    with pytest.raises(PolytempoError, match=r"as in messages=20,memory=4e9"):
        read_limits("messages")


def test_how_long_a_client_goes_without_a_server_is_read():
    assert read_seconds("--give-up-after", "none") == float("inf")
    assert read_seconds("--give-up-after", "90") == 90.0
    with pytest.raises(PolytempoError, match="--give-up-after never: give none or a number"):
        read_seconds("--give-up-after", "never")


@pytest.mark.parametrize("data", ["digits", "diabetes", "synthetic-multilabel"])
def test_the_sums_of_a_score_are_known_without_scoring(data):
    config = make_config({"data": data, "clients": 5, "limit": 90})
    _, samples = known(config, for_fleet(config))
    federation = Federation.load(data, clients=5, limit=90)
    assert samples.about == federation.description
    problem = problem_for(federation)
    outputs = federation.y[:2].new_zeros((2, federation.outputs)).float()
    assert figures_of(problem, samples) == set(problem.sums(outputs, federation.y[:2]))


# -- a client's data and model ---------------------------------------------------------------------


def test_a_client_brings_a_file_of_its_own(tmp_path):
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(40, 6)).astype(np.float32), np.arange(40) % 3
    np.savez(tmp_path / "mine.npz", X=x, y=y)
    data = own_samples(make_config({"data": str(tmp_path / "mine.npz")}), "ann", None)
    assert data.clients == 1 and data.samples == [30] and data.outputs == 3
    np.savez(tmp_path / "mine.npz", X=x, y=y, X_test=x[:5], y_test=y[:5])
    data = own_samples(make_config({"data": str(tmp_path / "mine.npz")}), "ann", None)
    assert data.samples == [40] and data.test[0].stop - data.test[0].start == 5
    with pytest.raises(PolytempoError, match="no such file"):
        own_samples(make_config({"data": str(tmp_path / "yours.npz")}), "ann", None)


def test_a_share_of_a_data_set_is_what_the_simulated_client_has(small):
    for client in range(small.clients):
        mine = alone(small, client)
        assert mine.x[mine.train[0]].equal(small.x[small.train[client]])
        assert mine.y[mine.test[0]].equal(small.y[small.test[client]])


def welcome(**other):
    run = {
        "model": "linear",
        "shape": [12],
        "outputs": 4,
        "vocabulary": None,
        "scale": None,
        "personal": [],
        "freeze": [],
        "buffers": "share",
        "seed": 0,
        "layout": [["1.weight", [4, 12], "float32"], ["1.bias", [4], "float32"]],
        "task": TASKS.describe(Task()),
    }
    return {**run, **other}


@pytest.mark.parametrize(
    ("other", "said"),
    [
        ({"shape": [13]}, "shape 13, those of .* have 12"),
        ({"outputs": 3}, "--outputs 4"),
        ({"model": "os:getcwd"}, "give --model os:getcwd here as well"),
        ({"model": {"name": "os:getcwd"}}, "does not load"),
        ({"model": {"name": "hf", "path": "/"}}, "give --model hf here as well"),
        ({"tokenizer": "0123"}, "made tokens by the tokenizer 0123"),
        ({"frozen": "0123"}, "digest none, that of the server's 0123"),
        ({"layout": [["weight", [4, 13], "float32"]]}, "where the server's has weight"),
        ({"vocabulary": 9}, "knows 9 tokens"),
        ({"shape": None}, "polytempo.join"),
        ({"task": {"name": "task", "objective": "os:getcwd"}}, "os:getcwd"),
    ],
)
def test_a_client_says_why_it_cannot_take_part(small, other, said):
    trainer = SolverTrainer(alone(small, 0), problem_for(small))
    with pytest.raises(PolytempoError, match=said):
        trainer.welcome(welcome(**other))


# -- a run that goes on ----------------------------------------------------------------------------


def test_a_run_that_was_interrupted_goes_on_and_may_be_extended(tmp_path):
    stop, clients = threading.Event(), threading.Event()
    first = run_fleet(tmp_path, interrupted=stop, stop_clients=clients, until=5)
    assert not first.result.summary["complete"] and first.result.summary["arrivals"] >= 5
    assert json.loads((tmp_path / "client-0" / "result.json").read_text())["complete"] is False
    for changed, said in (({"lr": 0.5}, "lr"), ({"strategy": "fedasync"}, "strategy")):
        with pytest.raises(AssertionError, match=f"was made with {said} = "):
            run_fleet(tmp_path, **changed)
    second = run_fleet(tmp_path, updates=30)
    assert second.result.summary["complete"] and second.result.summary["arrivals"] == 30
    assert verify(tmp_path / "server").wrong == []
    history = [row["updates"] for row in second.result.history]
    assert history == sorted(history) and history[-1] == 30
    with pytest.raises(AssertionError, match="ask for more --updates than 12"):
        run_fleet(tmp_path, updates=12)


def test_a_server_ends_with_130_when_it_is_interrupted(tmp_path):
    command = [sys.executable, "-m", "polytempo", "server", "--listen", "127.0.0.1:0", "--json"]
    command += [*map(str, SMALL), "--clients", "2", "--out", str(tmp_path / "s")]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        assert json.loads(process.stdout.readline())["event"] == "listening"
        process.send_signal(signal.SIGINT)
        said, complaint = process.communicate(timeout=WAIT)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 130, complaint
    assert json.loads(said.splitlines()[-1])["result"]["complete"] is False
    assert "to continue: the same command" in complaint


def test_a_server_waits_and_a_client_gives_up_with_a_code_of_its_own(tmp_path, polytempo):
    (tmp_path / "s.toml").write_text("[server]\nwait_for = 2\n[server.limits]\nconnections = 3\n")
    command = [sys.executable, "-m", "polytempo", "server", "--listen", "127.0.0.1:0", "--json"]
    command += [*map(str, SMALL), "--clients", "2", "--out", str(tmp_path / "s")]
    command += ["--config", str(tmp_path / "s.toml"), "--limits", "messages=20"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        address = json.loads(process.stdout.readline())["address"]
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=WAIT)
    finally:
        process.kill()
        process.wait()
    [started] = history(tmp_path / "s")
    assert started.wait_for == 2
    client = ("client", "--connect", address, "--client", 0, "--clients", 2, *SMALL[:2])
    found = polytempo(*client, "--out", tmp_path / "c", "--give-up-after", 0.2)
    assert found.code == 75 and f"error: no server at {address}" in found.err
    result = json.loads((tmp_path / "c" / "result.json").read_text())
    assert result["complete"] is False and "no server" in result["reason"]


# -- commands --------------------------------------------------------------------------------------


def test_a_fleet_of_processes_from_nothing_to_a_table_and_again(polytempo, tmp_path):
    settings = ("--local", 2, *SMALL, "--strategy", "fedasync", "--out", tmp_path / "f")
    found = polytempo("fleet", *settings, "--slow", "0.5:3", "--simulate", "--json").json
    assert found["complete"] and found["arrivals"] == 12 and found["failed"] == {}
    assert {row["name"] for row in found["clients"]} == {"client-0", "client-1"}
    assert found["simulated"]["arrivals"] == 12
    for key in (tmp_path / "f" / "certificates").glob("*.key"):
        assert key.stat().st_mode & 0o777 == 0o600
    server = tmp_path / "f" / "server"
    same = polytempo("replay", server)
    assert same.code == 0 and same.out.startswith("the same, bit for bit"), same.err
    table = polytempo("replay", server, "--strategy", "fedbuff")
    assert "fedasync, recorded" in table.out and "fedbuff, simulated" in table.out
    assert "is not the folder of a server" in polytempo("replay", tmp_path / "f").error
    more = polytempo("fleet", *settings, "--updates", 16, "--json").json
    assert more["complete"] and more["arrivals"] == 16


def test_a_fleet_with_data_of_its_own_is_replayed_on_them(polytempo, tmp_path):
    """The files are called as the clients are, and so is who was there when."""
    run_fleet(tmp_path, strategy="fedasync", updates=8)
    server, data = tmp_path / "server", tmp_path / "data"
    config = server / "config.toml"
    lines = config.read_text().splitlines()
    unseen = 'data = "what clients bring: shape 12"'
    config.write_text("\n".join(unseen if x.startswith("data =") else x for x in lines))
    assert "give --data: a folder" in polytempo("replay", server, "--strategy", "fedbuff").error
    data.mkdir()
    rng = np.random.default_rng(0)
    for name in ("client-0", "client-1", "client-3"):
        x, y = rng.normal(size=(24, 12)).astype(np.float32), np.arange(24) % 4
        np.savez(data / f"{name}.npz", X=x, y=y)
    asked = ("replay", server, "--strategy", "fedbuff", "--data", data)
    assert "lacks client-2: give one .npz" in polytempo(*asked).error
    np.savez(data / "client-2.npz", X=x, y=y)
    np.savez(data / "stranger.npz", X=x, y=y)  # never took part
    assert "fedbuff, simulated" in polytempo(*asked).out
    dispatched = dispatches(server, tmp_path / "again", "fedbuff", data=str(data))
    assert {event["client"] for event in dispatched} == {0, 1, 2, 3}


def dispatches(server, out, strategy, **options):
    """What the simulation of another strategy sends."""
    config = in_simulator(server, strategy, **options).model_copy(update={"events": True})
    run(config, out)
    lines = (out / "events.jsonl").read_text().splitlines()
    return [found for line in lines if (found := json.loads(line))["event"] == "dispatch"]


def test_what_a_fleet_waited_for_is_waited_for_in_its_replay(polytempo, tmp_path):
    """A cohort of the simulated strategy begins with all three, not with the first that came."""
    fleet = run_fleet(tmp_path, strategy="fedasync", updates=8, concurrency=4, wait_for=3)
    server = tmp_path / "server"
    joined = sorted(record.time for record in fleet.records(Enrolled))
    assert "fedavg, simulated" in polytempo("replay", server, "--strategy", "fedavg").out
    for strategy in ("fedavg", "fedbuff"):
        first, *others = dispatches(server, tmp_path / strategy, strategy)
        assert first["time"] == pytest.approx(joined[2], abs=2e-6)
        assert [event["time"] == first["time"] for event in others[:3]] == [True, True, False]


def test_a_wait_that_was_cut_short_is_cut_short_in_the_replay(tmp_path):
    """The server waits for three, is started again, and waits for one: it begins with the first
    that comes then, however many had come before."""
    config = make_config({**TINY, "strategy": "fedasync"})
    strategy = for_fleet(config)
    what = undertaking(*known(config, strategy), strategy)

    def attended(folder, records):
        folder.mkdir()
        store = Store(folder)
        store.open(make_node(what))
        store.append(records)
        store.close()
        return attendance(what, folder)

    records = [
        *(Started(0.0, 8, 3), Enrolled(1.0, "client-0", 6, 2), Enrolled(2.0, "client-1", 6, 2)),
        *(Started(5.0, 8, 1), Joined(7.0, "client-1")),
    ]
    found = attended(tmp_path / "server", records)
    assert found.wait_for == 1
    assert found.of["client-0"].changes == [(5.0, False)]
    assert found.of["client-1"].changes == [(5.0, False), (7.0, True)]
    assert attended(tmp_path / "idle", records[:3]).wait_for is None


def test_a_log_that_leads_elsewhere_is_noticed(tmp_path):
    run_fleet(tmp_path, strategy="fedasync", updates=8)
    events = tmp_path / "server" / "events.jsonl"
    events.write_text(events.read_text().replace('"upload"', '"drop"', 1))
    assert "is not that of events.jsonl" in verify(tmp_path / "server").wrong[0]
    state = {"a": [np.zeros(2), {"b": 1.0}]}
    other = {"a": [np.array([0.0, -0.0]), {"b": 1}]}
    assert differences(state, state) == []
    assert differences(state, other) == ["state/a/0 differs", "state/a/1/b differs"]


def test_certificates_for_a_server_and_its_clients(polytempo, tmp_path):
    made = polytempo("certs", "--out", tmp_path, "--server", "hub=10.0.0.1", "--clients", 2)
    assert made.code == 0, made.err
    names = {path.stem for path in tmp_path.glob("*.key")}
    assert names == {"ca", "hub", "client-0", "client-1"}
    assert all(path.stat().st_mode & 0o777 == 0o600 for path in tmp_path.glob("*.key"))
    assert polytempo("certs", "--out", tmp_path, "--clients", "ann").code == 0
    assert "invalid client name" in polytempo("certs", "--out", tmp_path, "--clients", "a/b").error


def test_admit_and_revoke_write_what_a_server_reads(polytempo, tmp_path):
    assert polytempo("admit", "ann", "--out", tmp_path).code == 0
    assert polytempo("revoke", "bob", "--out", tmp_path).code == 0
    found = json.loads((tmp_path / "admission.json").read_text())
    assert found["admitted"] == ["ann"] and found["revoked"] == ["bob"]
    assert "there is no folder" in polytempo("admit", "ann", "--out", tmp_path / "x").error


def test_mistakes_are_said_with_their_remedy(polytempo, tmp_path):
    out = ("--out", tmp_path / "x")
    both = polytempo("server", "--data", "digits", "--shape", "64", *out).error
    assert both.startswith("give --data or --shape")
    assert "--ca, --cert and --key" in polytempo("server", "--ca", "ca.pem", *out).error
    shaped = ("--shape", "64", "--outputs", "2", "--clients", "2", "--listen", "127.0.0.1:0")
    assert (
        "at most the number of clients, 2"
        in polytempo("server", *shaped, "--wait-for", 3, *out).error
    )
    assert (
        "unknown limit 'speed'" in polytempo("server", *shaped, "--limits", "speed=3", *out).error
    )
    assert "as in 0.3:5" in polytempo("fleet", "--slow", "many", *out).error
    assert "what is this client called" in polytempo("client", "--connect", "127.0.0.1:1").error
    assert (
        "from 0 to 3"
        in polytempo(
            *("client", "--connect", "127.0.0.1:1", "--client", 9, "--clients", 4, *SMALL[:2], *out)
        ).error
    )
    assert not (tmp_path / "x").exists()
