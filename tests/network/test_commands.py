"""The commands `peer`, `peers` and `certs` as a newcomer meets them."""

import csv
import json
import socket

import pytest
from typer.testing import CliRunner

from polytempo.cli import app
from polytempo.cli.board import Board, in_words
from polytempo.cli.peers import is_local
from polytempo.core.errors import PolytempoError
from polytempo.experiments.config import make_config
from polytempo.experiments.peer import client_of
from polytempo.experiments.peer_group import Group
from solving import NATIVE

TINY = ("--data", "synthetic:groups=2,features=8", "--clients", 2, "--model", "linear")


def polytempo(*arguments):
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def error(*arguments):
    outcome = polytempo(*arguments)
    assert isinstance(outcome.exception, PolytempoError), outcome.output
    return str(outcome.exception)


def peer(folder, *arguments, listen="tcp/127.0.0.1:0", name="peer-0"):
    return ("peer", "--id", name, "--listen", listen, "--out", folder / "p", *TINY, *arguments)


def test_certs_writes_an_authority_and_a_certificate_for_each(tmp_path):
    outcome = polytempo("certs", "--out", tmp_path, "--names", "ann, bob=10.0.0.7")
    assert outcome.exit_code == 0, outcome.output
    names = {file.name for file in tmp_path.iterdir()}
    assert names == {f"{who}.{kind}" for who in ("ca", "ann", "bob") for kind in ("pem", "key")}
    assert "already" in error("certs", "--out", tmp_path, "--names", "bob")
    assert "at least one peer" in error("certs", "--out", tmp_path, "--names", ",")
    assert "invalid peer name" in error("certs", "--out", tmp_path, "--names", "a/b")


def test_one_peer_alone_reaches_its_target_and_goes_on_for_more(tmp_path):
    """Its folder holds what a run's folder holds; a longer target goes on from there."""
    first = polytempo(*peer(tmp_path, "--strategy", "p2p:target=20"))
    assert first.exit_code == 0, first.output
    result = json.loads((tmp_path / "p" / "result.json").read_text())
    assert (result["iterations"], result["complete"], result["client"]) == (20, True, 0)
    history = (tmp_path / "p" / "history.csv").read_text().splitlines()
    assert history[0].startswith("iteration,accuracy,messages")
    assert history[-1].startswith("20,")
    said = error(*peer(tmp_path, "--strategy", "p2p:target=30", "--seed", 5, "--lr", 0.5))
    assert "seed=0" in said and "seed=5" in said and "lr=0.5" in said and "--out" in said
    assert "client=0, not with client=1" in error(
        *peer(tmp_path, "--strategy", "p2p:target=30", "--client", 1)
    )
    more = polytempo(*peer(tmp_path, "--strategy", "p2p:target=30", "--json"))
    assert more.exit_code == 0, more.output
    events = [json.loads(line) for line in more.output.splitlines() if line.startswith("{")]
    assert events[0]["event"] == "started" and events[0]["iteration"] == 20
    assert json.loads((tmp_path / "p" / "result.json").read_text())["iterations"] == 30


def test_a_peer_is_resumed_in_the_same_run_with_the_same_strategy(tmp_path):
    """For the same target or a higher one; what it is evaluated for may change at any time."""
    assert polytempo(*peer(tmp_path, "--strategy", "p2p:target=20")).exit_code == 0
    for options, was, now in (
        (("--strategy", "p2p:target=20,local_steps=4"), "p2p:local_steps=5", "p2p:local_steps=4"),
        (("--strategy", "p2p:target=20,gamma=0.5"), "p2p:gamma=0.1", "p2p:gamma=0.5"),
        (("--strategy", "p2p:target=20", "--run", "other"), "run=polytempo", "run=other"),
    ):
        assert f"trained with {was}, not with {now}; give" in error(*peer(tmp_path, *options))
    other = error(*peer(tmp_path, "--strategy", "p2p:target=20,decision=always"))
    assert "p2p:decision={'name': 'uniform'" in other and "'always'" in other
    for shorter in (("--strategy", "p2p:target=10"), ("--updates", 4)):
        assert "on its way to 20 iterations, more than 10" in error(*peer(tmp_path, *shorter))
    again = polytempo(*peer(tmp_path, "--updates", 8, "--eval-every", 1, "--messages", 50))
    assert again.exit_code == 0, again.output  # 8 updates of 2 peers are 20 iterations each


def test_what_a_run_of_peers_refuses_is_refused_on_a_network_too(tmp_path):
    """A file may hold any setting, not only those that the command has options for."""
    for line in ("epochs = 3", "refill = 'idle'", "diagnose = 5", "bank = 'half'", "until = 9.0"):
        (tmp_path / "given.toml").write_text(f"{line}\n")
        given = ("--config", tmp_path / "given.toml")
        for command in (peer(tmp_path, *given), ("peers", "--out", tmp_path / "g", *given)):
            said = error(*command)
            assert said.startswith(line) and "omit" in said
    assert sorted(path.name for path in tmp_path.iterdir()) == ["given.toml"]  # nothing has begun


def test_a_peer_trains_on_the_device_that_it_is_given(tmp_path):
    assert "device 'abacus' cannot be used here" in error(*peer(tmp_path, "--device", "abacus"))


@pytest.mark.parametrize("solver", ["torch", NATIVE])
def test_a_peer_trains_with_the_solver_that_it_is_given(tmp_path, solver):
    outcome = polytempo(*peer(tmp_path, "--solver", solver, "--strategy", "p2p:target=20"))
    assert outcome.exit_code == 0, outcome.output
    assert json.loads((tmp_path / "p" / "result.json").read_text())["solver"] == solver


def test_a_solver_that_a_peer_cannot_have_is_refused(tmp_path, monkeypatch):
    monkeypatch.setenv("POLYTEMPO_CXX", "none-such")
    assert "solver native: POLYTEMPO_CXX" in error(*peer(tmp_path, "--solver", "native"))


def test_a_peer_is_judged_by_the_metric_of_its_problem(tmp_path):
    data = ("--data", "diabetes", "--strategy", "p2p:target=20")
    outcome = polytempo(*peer(tmp_path, *data))
    assert outcome.exit_code == 0, outcome.output
    result = json.loads((tmp_path / "p" / "result.json").read_text())
    with (tmp_path / "p" / "history.csv").open(newline="") as file:
        errors = [float(row["mse"]) for row in csv.DictReader(file)]
    assert (result["metric"]["name"], result["mse"]) == ("mse", errors[-1])
    assert result["mse_best"] == min(errors) < errors[0]
    assert "mse" in outcome.output and "accuracy" not in outcome.output
    board = Board()
    for line in (tmp_path / "p" / "events.jsonl").read_text().splitlines():
        board.note(json.loads(line))
    assert [column.header for column in board.table().columns][2] == "mse"
    assert float(next(iter(board.table().columns[2].cells))) == pytest.approx(errors[-1], rel=1e-3)


def test_mistakes_are_said_with_their_remedy(tmp_path):
    assert "need the strategy p2p, not pace" in error(*peer(tmp_path, "--strategy", "pace"))
    assert "--ca, --cert and --key" in error(*peer(tmp_path, "--ca", tmp_path / "ca.pem"))
    assert "--client" in error(*peer(tmp_path, name="ann"))
    assert "invalid peer name" in error(*peer(tmp_path, name="a/b"))
    assert "from 0 to 1" in error(*peer(tmp_path, "--client", 2))
    assert "tcp/HOST:PORT" in error(*peer(tmp_path, listen="7447"))
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        where = f"tcp/127.0.0.1:{taken.getsockname()[1]}"
        assert "in use" in error(*peer(tmp_path, listen=where))
    files = [tmp_path / name for name in ("ca.pem", "a.pem", "a.key")]
    options = ("--ca", files[0], "--cert", files[1], "--key", files[2])
    assert "there is no file" in error(*peer(tmp_path, *options, listen="tls/127.0.0.1:0"))


def test_slow_lines_get_the_time_that_they_need(tmp_path, monkeypatch):
    given = []
    monkeypatch.setattr(
        "polytempo.experiments.peer.Driver", lambda learner, plan, *_: given.append(plan) or 1 / 0
    )
    polytempo(*peer(tmp_path, "--exchange-timeout", 90))
    polytempo(*peer(tmp_path))
    assert [plan.exchange_timeout for plan in given] == [90, 20]


@pytest.mark.parametrize("command", ["peer", "peers", "certs"])
def test_a_missing_library_is_said(monkeypatch, command, tmp_path):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    arguments = {
        "peer": peer(tmp_path),
        "peers": ("peers", "--out", tmp_path / "x"),
        "certs": ("certs", "--out", tmp_path, "--names", "ann"),
    }
    assert 'pip install "polytempo[network]"' in error(*arguments[command])


def test_a_peer_has_the_data_of_its_number():
    assert client_of("peer-12", None, 20) == 12
    assert client_of("peer-12", 3, 20) == 3


def test_a_group_learns_and_leaves_a_summary(tmp_path):
    settings = [*TINY[:2], *TINY[4:], "--strategy", "p2p:target=200,decision=always"]
    settings += ["--pause", 0.1]  # on a busy machine too they train side by side
    outcome = polytempo("peers", "--local", 2, "--out", tmp_path / "two", *settings, "--json")
    assert outcome.exit_code == 0, outcome.output
    summary = json.loads((tmp_path / "two" / "result.json").read_text())
    assert summary["complete"] and summary["failed"] == {}
    assert [found["iterations"] for found in summary["peers"]] == [200, 200]
    mean = sum(found["accuracy"] for found in summary["peers"]) / 2
    assert summary["accuracy"] == pytest.approx(mean)
    for name in ("peer-0", "peer-1"):  # they began together
        assert '"event": "alone"' not in (tmp_path / "two" / name / "events.jsonl").read_text()
    assert summary["fusions"] > 0
    with (tmp_path / "two" / "clients.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [(row["client"], row["name"]) for row in rows] == [("0", "peer-0"), ("1", "peer-1")]
    assert [float(row["accuracy"]) for row in rows] == [r["accuracy"] for r in summary["peers"]]
    assert all(int(row["updates"]) == 40 and int(row["samples"]) > 0 for row in rows)
    assert (tmp_path / "two" / "peers.png").read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    assert "already holds a run" in error("peers", "--out", tmp_path / "two", "--local", 2)


def test_a_group_takes_over_no_peer_of_another(tmp_path):
    (tmp_path / "peer-1").mkdir()
    (tmp_path / "peer-1" / "incarnation.json").write_text("{}")
    said = error("peers", "--out", tmp_path, "--local", 2)
    assert "peer-1 already holds a peer (incarnation.json)" in said and "--out" in said
    assert [path.name for path in tmp_path.iterdir()] == ["peer-1"]


def test_two_groups_do_not_write_to_one_folder(tmp_path):
    config = make_config({"clients": 2, "strategy": "p2p", "seed": 7})
    with Group(config, tmp_path / "two"):
        before = (tmp_path / "two" / "config.toml").read_text()
        said = error("peers", "--out", tmp_path / "two", "--local", 3)
        assert "two is being written by another run" in said and "--out" in said
        assert (tmp_path / "two" / "config.toml").read_text() == before
        assert not [*(tmp_path / "two").glob("peer-*")]
    with Group(config, tmp_path / "two"):  # it was let go of
        pass


def test_only_loopback_addresses_are_safe_without_certificates():
    assert is_local("tcp/127.0.0.1:7447") and is_local("tcp/[::1]:7447")
    assert not is_local("tcp/0.0.0.0:7447") and not is_local("tcp/192.168.1.7:7447")


def test_people_are_told_what_matters():
    said = {"peer": "a", "iteration": 7, "event": "fused", "partner": ["bob", 1]}
    assert in_words(said) == "iteration 7: fused with bob"
    late = in_words({**said, "event": "discarded"})
    assert late == "iteration 7: a model from bob came too late to use"
    assert in_words({**said, "event": "phase", "phase": "Idle"}) is None
    stuck = in_words({**said, "event": "stuck", "threads": ["node", "sender 1"]})
    assert stuck == "leaves without waiting any longer for its threads: node, sender 1"
    board = Board()
    board.note({**said, "event": "started", "target": 9})
    board.note(said)
    row = [list(column.cells) for column in board.table().columns]
    assert row == [["a"], ["7/9"], ["-"], ["1"], ["bob"], ["-"]]
