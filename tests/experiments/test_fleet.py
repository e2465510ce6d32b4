"""Strategies over the network, each from enrolment to its last exam; deployed clients train what
simulated ones would."""

import csv
import json

import pytest
import torch

from fleets import TINY, Tap, run_fleet, trained_as_simulated
from polytempo import Federation, PolytempoError, Task
from polytempo.core.client_steps import Basis
from polytempo.core.messages import Dispatch
from polytempo.core.privacy import Gaussian
from polytempo.experiments.fleet_trainer import SolverTrainer
from polytempo.experiments.replay import verify
from polytempo.nodes.star import Continued, Offered
from polytempo.storage import load_state
from polytempo.training import problem_for

SLOW = {3: 0.02}  # seconds after each step


def check(outcome, updates=TINY["updates"]):
    """What holds of every fleet that has come to its end."""
    summary = outcome.result.summary
    assert summary["complete"] and summary["arrivals"] == updates
    assert summary["messages"]["upload"] == updates
    done = sum(client["acknowledged"] for client in outcome.clients.values())
    assert done == updates
    assert outcome.result.history[-1]["updates"] == updates
    assert outcome.result.history[-1]["clients"] == 4
    verdict = verify(outcome.folder / "server")
    assert verdict.wrong == [] and verdict.checked == verdict.records


@pytest.mark.parametrize("strategy", ["fedasync", "fedbuff", "ace", "pace"])
def test_a_strategy_runs_over_the_network(strategy, tmp_path):
    outcome = run_fleet(tmp_path, SLOW, strategy=strategy)
    check(outcome)
    assert trained_as_simulated(tmp_path)[0] >= TINY["updates"]
    assert outcome.result.staleness_mean > 0


def test_cohorts_start_together_and_are_waited_for(tmp_path):
    outcome = run_fleet(tmp_path, SLOW, strategy="fedavg", concurrency=3)
    check(outcome)
    assert trained_as_simulated(tmp_path)[0] >= TINY["updates"]
    inside, largest, starting = set(), 0, False
    for line in (tmp_path / "server" / "events.jsonl").read_text().splitlines():
        event = json.loads(line)
        if event["event"] == "dispatch":
            assert not inside or starting, "nobody is started before all are in"
            starting = True
            inside.add(event["client"])
        elif event["event"] == "upload":
            starting = False
            inside.discard(event["client"])
        largest = max(largest, len(inside))
    assert largest == 3


def test_multicasts_reach_clients_in_training_between_two_steps(tmp_path):
    outcome = run_fleet(tmp_path, {2: 0.03, 3: 0.03}, strategy="pace:omega=3", updates=40)
    check(outcome, 40)
    swapped = [record.swapped for record in outcome.records(Continued)]
    assert any(found.step for found in swapped), "none came in the middle of a training"
    assert len(outcome.events("restart")) == sum(found.step is not None for found in swapped)
    assert outcome.result.summary["messages"]["multicast"] >= len(swapped)
    assert trained_as_simulated(tmp_path)[0] >= 40  # from the new model, with the steps left
    told = [e for heard in outcome.heard.values() for e in heard if e["event"] == "swapped"]
    assert sum(e["step"] is not None for e in told) >= len(outcome.events("restart"))


def test_urgent_requests_end_a_training_with_its_epoch(tmp_path):
    options = {"strategy": "port:bound=1,buffer_size=1", "epochs": 30, "updates": 30}
    outcome = run_fleet(tmp_path, {0: 0.001, 1: 0.001, 2: 0.001, 3: 0.02}, **options)
    check(outcome, 30)
    hurried = [e for e in outcome.heard["client-3"] if e["event"] == "hurried"]
    trained = [e["seconds"] for e in outcome.heard["client-3"] if e["event"] == "trained"]
    assert outcome.events("urgent") and hurried
    whole = 0.02 * 30 * 4  # pauses alone: 30 epochs of 4 steps or more
    assert min(trained) < whole / 2


def test_masks_travel_with_updates(tmp_path):
    outcome = run_fleet(tmp_path, strategy="casa+:s_0=0.5")
    check(outcome)
    assert trained_as_simulated(tmp_path)[0] >= TINY["updates"]
    masks = [record.upload.extras["mask"] for record in outcome.records(Offered)]
    assert all(mask.dtype == torch.uint8 for mask in masks)


def test_clients_choose_among_models(tmp_path):
    outcome = run_fleet(tmp_path, strategy="ifca:k=2")
    check(outcome)
    assert trained_as_simulated(tmp_path)[0] >= TINY["updates"]
    choices = {int(record.upload.extras["choice"]) for record in outcome.records(Offered)}
    assert choices <= {0, 1}
    assert outcome.result.clusters is not None


def test_a_personal_head_never_leaves_its_client(tmp_path):
    taps = []

    def through(where):
        taps.append(Tap(where))
        return taps[0].address

    hidden = {"model": "mlp:hidden=[8]", "personal": "head", "strategy": "fedbuff"}
    outcome = run_fleet(tmp_path, through=through, **hidden)
    check(outcome)
    compared, node = trained_as_simulated(tmp_path)
    assert compared >= TINY["updates"]
    seen = bytes(taps[0].up) + bytes(taps[0].down)
    served = node.server.strategy.serve(0)
    assert served.numpy().tobytes()[:64] in seen, "what is shared is seen by whoever listens"
    for client in range(4):
        state = load_state(tmp_path / f"client-{client}" / "client.safetensors")
        own = state["memory"]["personal"]
        assert len(own) == 8 * 4 + 4
        raw = own.numpy().tobytes()
        for place in range(0, len(raw) - 8, 4):  # no two neighbouring numbers of it
            assert raw[place : place + 8] not in seen
    sizes = {len(record.upload.vector) for record in outcome.records(Offered)}
    assert sizes == {12 * 8 + 8}


def test_compressed_updates_are_as_small_on_the_wire_as_they_are_said_to_be(tmp_path):
    """And the defence of a server is replayed with the rest."""
    taps, updates, size = [], 8, 12 * 512 + 512 + 512 * 4 + 4

    def through(where):
        taps.append(Tap(where))
        return taps[0].address

    given = {"compress": "int8", "defend": "norm:times=0.9", "model": "mlp:hidden=[512]"}
    outcome = run_fleet(tmp_path, through=through, strategy="fedasync", updates=updates, **given)
    check(outcome, updates)
    assert trained_as_simulated(tmp_path)[0] >= updates  # what is left out is kept for later
    said = outcome.result.messages["upload_bytes"]
    assert said == updates * (size + 4 * -(-size // 256))
    assert said < len(taps[0].up) < updates * 4 * size / 2
    for record in outcome.records(Offered):
        assert record.upload.vector.dtype == torch.int8 and len(record.upload.vector) == size
    assert outcome.result.defence["changed"] > 0


def test_noise_is_unknown_to_the_server(tmp_path):
    """It knows the seed of everything else."""
    outcome = run_fleet(tmp_path, strategy="fedasync", updates=8, dp="clip=1,noise=2")
    check(outcome, 8)
    with pytest.raises(AssertionError, match="differs"):
        trained_as_simulated(tmp_path)
    private = outcome.result.privacy
    with (tmp_path / "server" / "privacy.csv").open(newline="") as file:
        rows = [*csv.DictReader(file)]
    assert private["epsilon_max"] == max(float(row["epsilon"]) for row in rows) > 0
    assert sum(int(row["uploads"]) for row in rows) >= 8


def test_a_client_insists_on_its_privacy():
    data = Federation.load(TINY["data"], clients=4, seed=1)
    trainer = SolverTrainer(data, problem_for(data), privacy=Gaussian(1.0, 0.8))
    for steps, said in (
        ((), "insists on 0.8"),
        ((Gaussian(1.0, 0.5),), "insists on 0.8"),
        ((Gaussian(1.0, 0.9), Basis(2)), "upload basis"),
    ):
        with pytest.raises(PolytempoError, match=said):
            trainer.begin(Dispatch(0, 0, torch.zeros(52), Task(client_steps=steps)), 0, {})


def test_the_folder_of_a_server_holds_what_a_run_leaves(tmp_path):
    outcome = run_fleet(tmp_path, strategy="fedasync")
    files = {path.name for path in (tmp_path / "server").iterdir()}
    assert files >= {"config.toml", "history.csv", "result.json", "events.jsonl", "clients.csv"}
    with (tmp_path / "server" / "clients.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert {row["name"] for row in rows} == {f"client-{number}" for number in range(4)}
    assert list(rows[0]) == [
        *("client", "name", "group", "samples", "tested", "slowdown", "seconds", "updates"),
        *("staleness", "evaluated_at", "accuracy", "accuracy_adapted"),
    ]
    assert sum(int(row["updates"]) for row in rows) == outcome.result.arrivals
    total = sum(int(row["updates"]) * float(row["staleness"] or 0) for row in rows)
    assert total / outcome.result.arrivals == pytest.approx(outcome.result.staleness_mean)
    assert min(float(row["slowdown"]) for row in rows) == 1
    assert outcome.result.clients[0].keys() == rows[0].keys()
    assert all(float(row["accuracy"]) >= 0 for row in rows)
    mean = sum(float(row["accuracy"]) for row in rows) / 4
    assert outcome.result.history[-1]["accuracy"] == pytest.approx(mean)
    assert outcome.result.accuracy_adapted is not None
    assert outcome.result.seconds > 0 and outcome.result.simulated_time is None
    assert (tmp_path / "client-0" / "model.safetensors").exists()
