"""Peers from the command line, beside methods with a server."""

import csv
import itertools
import json

import pytest

from polytempo import Federation, PolytempoError, simulate
from polytempo.experiments.config import RunConfig, make_config, read_config
from polytempo.experiments.paper_specs import load_experiment
from polytempo.experiments.peer_settings import PEER_SETTINGS, SERVER, SIMULATED, WORLD, networked

TINY = (
    *("--data", "digits", "--limit", 200, "--clients", 4, "--model", "linear"),
    *("--updates", 24, "--eval-every", 4, "--adapt-epochs", 1, "--batch-size", 16),
)
P2P = "p2p:decision=always,local_steps=3"


def rows(path):
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def test_a_run_of_peers_leaves_a_folder_as_any_other(polytempo, tmp_path, monkeypatch):
    monkeypatch.undo()  # with plots
    place = tmp_path / "run"
    outcome = polytempo("run", *TINY, "--strategy", P2P, "--out", place, "--check", "--events")
    assert outcome.code == 0, outcome.err
    found = json.loads((place / "result.json").read_text())
    assert "models exchanged" in outcome.out and "24 local rounds" in outcome.out
    assert "staleness" not in outcome.out + (place / "report.html").read_text()
    assert found["staleness_mean"] is None and found["staleness"] == {}
    assert (found["strategy"], found["arrivals"], found["complete"]) == ("p2p", 24, True)
    assert found["accuracy_adapted"] > 0
    sent = found["messages"]
    assert sent["exchange"] > 0 and sent["exchange"] % 2 == 0
    assert sent["exchange_bytes"] == sent["exchange"] * 4 * found["parameters"]
    history = rows(place / "history.csv")
    assert [int(row["updates"]) for row in history] == [0, 4, 8, 12, 16, 20, 24]
    assert int(history[-1]["messages"]) == sent["exchange"]
    each = rows(place / "peers.csv")
    assert len(each) == 4 * len(history)
    last = [float(row["accuracy"]) for row in each[-4:]]
    assert float(history[-1]["accuracy"]) == pytest.approx(sum(last) / 4)
    assert [peer["accuracy"] for peer in found["peers"]] == last
    assert all(peer["iterations"] == 18 for peer in found["peers"])
    for name in ("accuracy.png", "peers.png"):
        assert (place / name).read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    kinds = [json.loads(line)["event"] for line in (place / "events.jsonl").open()]
    assert kinds.count("train") == 24 and kinds.count("exchange") == sent["exchange"]


def test_rounds_do_not_cut_off_a_target(polytempo, tmp_path):
    """30 iterations are 10 local rounds for each of the four; 24 were asked for."""
    options = ("--strategy", f"{P2P},target=30", "--out", tmp_path / "run", "--json")
    found = polytempo("run", *TINY, *options).json
    assert [peer["iterations"] for peer in found["peers"]] == [30] * 4
    assert found["arrivals"] == 40
    assert "updates = 40" in (tmp_path / "run" / "config.toml").read_text()


def test_peers_go_on_where_they_were_interrupted(polytempo, tmp_path, interrupt):
    whole = polytempo("run", *TINY, "--strategy", P2P, "--out", tmp_path / "whole", "--json").json
    place = tmp_path / "part"
    interrupt(40)
    assert polytempo("run", *TINY, "--strategy", P2P, "--out", place).code == 130
    rest = polytempo("run", "--resume", place, "--json").json
    assert rest["fingerprint"] == whole["fingerprint"]
    assert rest["peers"] == whole["peers"]
    outcome = polytempo("run", "--resume", place, "--updates", 48)
    assert "18 iterations" in outcome.error and "36" in outcome.error


def test_peers_and_servers_side_by_side(polytempo, tmp_path, monkeypatch):
    monkeypatch.undo()  # with plots
    methods = (P2P, "p2p:decision=never", "fedavg", "fedsgd", "standalone")
    given = (*TINY, "--steps", 3, "--messages", 10, "--concurrency", 4, "--out", tmp_path)
    found = polytempo("compare", *methods, *given, "--json").json
    models = [
        sum(run["messages"].get(k, 0) for k in ("dispatch", "upload", "multicast", "exchange"))
        for run in found
    ]
    assert models == [10, 0, 10, 10, 0]
    assert [run["arrivals"] for run in found][2:] == [4, 4, 24]
    assert (tmp_path / "accuracy_messages.png").stat().st_size > 10_000
    table = rows(tmp_path / "summary.csv")
    assert [float(row["messages"]) for row in table] == [10, 0, 10, 10, 0]
    steps = [read_config(path).get("steps") for path in sorted(tmp_path.glob("*/*/config.toml"))]
    assert steps == [3, 3, None, None, 3]  # which are not those of peers
    again = polytempo("compare", *methods, *given, "--json").json
    assert again == found


def test_peers_are_listed_with_their_options(polytempo):
    [found] = [row for row in polytempo("strategies", "--json").json if row["name"] == "p2p"]
    assert found["parameters"]["decision"] == "uniform"
    assert found["parameters"]["decision.rate"] == 2
    assert found["parameters"]["fusion.wf0"] == 1
    assert found["parameters"]["local_steps"] == 5


ABOUT_A_SERVER = {
    "refill": "idle",
    "diagnose": 5,
    "lr_schedule": "exponential",
    "epochs": 3,
    "steps": 4,
    "bank": "half",
    "keep_optimizer": True,
}


@pytest.mark.parametrize("name", ABOUT_A_SERVER)
def test_what_is_about_a_server_is_refused_in_simulations_and_on_networks(name, tmp_path):
    fed = Federation.load("digits", clients=4, limit=200, partition="iid")
    settings = {"strategy": "p2p", "model": "linear", name: ABOUT_A_SERVER[name]}
    why = f"^{name} = .* p2p has no server: {SERVER[name].replace('[', '.')[:20]}.*; omit {name}$"
    with pytest.raises(PolytempoError, match=why):
        simulate(fed, **settings)
    with pytest.raises(PolytempoError, match=why):
        networked(make_config(settings))


@pytest.mark.parametrize(
    "settings",
    [{"until": 9.0}, {"versions": 9}, {"strategy": "p2p:score_fusions=true"}],
)
def test_what_is_about_a_simulation_is_refused_on_networks(settings):
    with pytest.raises(PolytempoError, match="is for simulations, not for peers on a network: "):
        networked(make_config({"strategy": "p2p", **settings}))


def test_the_folder_of_a_simulation_can_be_given_to_peers_on_a_network(polytempo, tmp_path):
    """It holds all settings, and those of the simulated world do no harm."""
    world = ("--devices", "equal", "--dropout", "drop", "--workers", 1, "--check")
    options = ("--strategy", P2P, "--solver", "torch", *world, "--out", tmp_path / "run")
    assert polytempo("run", *TINY, *options).code == 0
    strategy = networked(make_config(read_config(tmp_path / "run" / "config.toml")))
    assert strategy.local_steps == 3


def test_peers_use_refuse_or_do_without_every_setting():
    groups = [PEER_SETTINGS, WORLD, SERVER, SIMULATED, ("strategy",)]
    assert sorted(name for group in groups for name in group) == sorted(RunConfig.model_fields)


def test_unknown_options_of_peers_are_named(polytempo):
    assert "did you mean 'rate'?" in polytempo("run", "--strategy", "p2p:decision.rates=2").error
    assert "no decision maker is called" in polytempo("run", "--strategy", "p2p:decision=x").error


# -- the paper's experiments ---------------------------------------------------------------------


def test_table_1_gives_all_methods_one_budget_and_as_many_iterations():
    table = load_experiment("p2p/table1")
    for column in table.columns:
        settings = {row: table.config(row, column, 0, quick=False) for row in table.rows}
        clients, budget = settings["p2p"].clients, settings["p2p"].messages
        talking = [config.messages for row, config in settings.items() if row != "alone"]
        assert set(talking) == {budget} and settings["alone"].messages is None
        assert {config.concurrency for config in settings.values()} == {clients}
        local = settings["p2p"].strategy_table["local_steps"]
        target = settings["p2p"].updates // clients * local
        assert target == 250_000
        assert 2 * target / local == budget  # two messages in a local round of all
        cohorts = budget // (2 * clients)
        assert settings["fedavg"].steps * cohorts == target
        for row in ("fedavg", "fedsgd"):
            assert settings[row].updates >= cohorts * clients
            schedule = settings[row].make("lr_schedule")
            hundred = column.startswith("cifar100/")
            stones, gamma = ((0.3, 0.6, 0.8), 0.2) if hundred else ((0.5, 0.75), 0.1)
            assert schedule.at == tuple(round(stone * cohorts * clients) for stone in stones)
            assert schedule.gamma == gamma
        strategy = settings["p2p"].make("strategy")
        assert (strategy.milestones, strategy.gamma) == (stones, gamma)
        assert budget == int(column.rpartition("-")[2].removesuffix("k")) * 1000


def test_the_slow_peer_is_slower():
    fastslow = load_experiment("p2p/fastslow")
    for row, (column, factor) in itertools.product(
        fastslow.rows, zip(fastslow.columns, (4, 2, 10), strict=True)
    ):
        config = fastslow.config(row, column, 0, quick=False)
        assert sorted(config.make("devices").factors(config.clients, 0)) == [1, factor]
        assert config.updates // config.clients * config.strategy_table["local_steps"] == 2000


def test_peers_without_messages_are_trained_once_for_all_budgets():
    table = load_experiment("p2p/table1")
    for kind in ("cifar10/k5-{}k", "cifar10/k10-{}k", "cifar100/k5-{}k", "cifar100/k10-{}k"):
        first, *others = (
            table.config("alone", column, 0, quick=False)
            for column in (kind.format(budget) for budget in (100, 20, 5))
            if column in table.columns
        )
        assert others and all(each == first for each in others)


def test_along_the_run_only_the_budget_and_the_evaluations_differ():
    along, table = load_experiment("p2p/along"), load_experiment("p2p/table1")
    for column in along.columns:
        whole = f"{column.partition('-')[0]}-100k"
        for row in along.rows:
            early = along.config(row, column, 0, quick=False)
            late = table.config(row, whole, 0, quick=False)
            same = {"messages": 0, "eval_every": 1}
            if row != "alone":
                assert early.messages < late.messages
            else:  # no message ends it: it is cut where the rate has not fallen yet
                assert early.messages is late.messages is None
                first = late.strategy["milestones"][0]
                assert early.strategy["milestones"] == []
                assert early.updates < first * late.updates
                whole_way = early.strategy | {"milestones": late.strategy["milestones"]}
                same |= {"strategy": whole_way, "updates": late.updates}
            assert early.model_copy(update=same) == late.model_copy(update=same)
