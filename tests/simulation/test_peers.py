"""Peers on a virtual clock: they train as they would alone, pair as their machines say, and the
simulation adds nothing of its own."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from polytempo import Federation, PolytempoError, Task
from polytempo.core.events import KINDS, Discard, Fuse, Train, as_dict
from polytempo.core.optimizer import Sgd
from polytempo.core.schedule import Constant, Steps
from polytempo.simulation import PeerSimulator
from polytempo.simulation.checks import InvariantError, PeerChecker
from polytempo.simulation.devices import Equal, Links, TwoSpeed
from polytempo.simulation.dropout import Delay, Drop, Leave, Trace
from polytempo.storage import load_state, save_state
from polytempo.strategies import STRATEGIES
from polytempo.training import AutogradSolver, Learner

TASK = Task(batch_size=8, lr=0.05, optimizer=Sgd(weight_decay=5e-4))


def module() -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return nn.Sequential(nn.Flatten(), nn.Linear(12, 4))


def simulation(fed, options="", updates=160, **world):
    """Eight peers, at most twenty local rounds of three steps each."""
    strategy = STRATEGIES.create(f"p2p:local_steps=3{options}")
    given = {"task": TASK, "eval_every": 40, "adapt_epochs": 0, "check": True, "seed": 0} | world
    made = PeerSimulator(fed, module(), strategy, updates=updates, **given)
    log: list[dict] = []
    made.observers.append(lambda event: log.append(as_dict(event)))
    return made, log


def alone(fed, client, schedule) -> Learner:
    return Learner(AutogradSolver(module(), fed, 0), client, replace(TASK, schedule=schedule))


def of_kind(log, kind):
    return [event for event in log if event["event"] == kind]


def models(simulator):
    return torch.stack([simulator.strategy.model_for(client) for client in range(8)])


def test_same_seed_same_bits_and_another_seed_other_bits(small):
    runs = []
    for seed in (0, 0, 1):
        simulator, log = simulation(small, seed=seed)
        simulator.run(160)
        runs.append((log, simulator.history, models(simulator), simulator.fingerprint))
    assert runs[0][0] == runs[1][0] and runs[0][1] == runs[1][1]
    assert torch.equal(runs[0][2], runs[1][2])
    assert runs[0][3] == runs[1][3] != runs[2][3]


WORLDS = {
    "plain": {},
    "slow links": {"network": Links(low=1e-3, high=1e-2)},  # a model takes up to 1.7 s
    "losses": {"dropout": Drop(probability=0.3)},
    "departures": {"dropout": Leave(at=0.2, share=0.25)},
}


@pytest.mark.parametrize("world", WORLDS.values(), ids=WORLDS)
@pytest.mark.parametrize("stop", [0, 5, 77, 190])
def test_stopped_and_resumed_is_bit_identical(small, world, stop, tmp_path):
    whole, log = simulation(small, **world)
    whole.run(160)
    broken, before = simulation(small, **world)
    steps = iter(range(100_000))
    assert broken.run(160, stop=lambda: next(steps) == stop) is False
    save_state(tmp_path / "checkpoint", broken.state_dict())
    resumed, after = simulation(small, **world)
    resumed.load_state_dict(load_state(tmp_path / "checkpoint"))
    resumed.run(160)
    assert before + after == log
    assert resumed.history == whole.history
    assert torch.equal(models(resumed), models(whole))
    assert resumed.fingerprint == whole.fingerprint
    assert resumed.each.figures() == whole.each.figures()


def test_another_target_is_not_gone_on_with(small):
    first, _ = simulation(small)
    first.run(10)
    second, _ = simulation(small, updates=320)
    with pytest.raises(PolytempoError, match=r"60 iterations.* not to 120; leave --updates"):
        second.load_state_dict(first.state_dict())


def test_never_is_local_training_to_the_bit(small):
    simulator, log = simulation(small, ",decision=never", devices=TwoSpeed(factor=3.0))
    simulator.run(160)
    for client in range(8):
        learner = alone(small, client, Steps((30, 45), gamma=0.1))
        learner.steps(60)
        assert torch.equal(simulator.strategy.model_for(client), learner.params)
    assert simulator.sent == simulator.pairings == 0
    assert {event["event"] for event in log} == {"train", "evaluate"}


@pytest.mark.parametrize("decision", ["uniform", "uniform,decision.rate=8", "every", "always"])
@pytest.mark.parametrize("network", [None, Links(low=1e-2, high=1e-1)], ids=["instant", "slow"])
def test_a_pairing_costs_two_models_and_moves_both(small, decision, network):
    simulator, log = simulation(small, f",decision={decision}", network=network)
    simulator.run(160)
    exchanges = of_kind(log, "exchange")
    fusions = of_kind(log, "fuse") + of_kind(log, "discard")  # in their last round
    assert len(of_kind(log, "discard")) < len(of_kind(log, "fuse"))
    assert simulator.pairings > 5
    assert simulator.messages["exchange"] == len(exchanges) == 2 * simulator.pairings
    assert simulator.bytes["exchange"] == len(exchanges) * 4 * (12 * 4 + 4)
    assert simulator.messages["claim"] == len(of_kind(log, "claim")) >= simulator.pairings
    told = len(of_kind(log, "announce")) + len(of_kind(log, "withdraw"))
    assert simulator.messages["announce"] == told
    assert simulator.history[-1]["messages"] == len(exchanges)
    pairs: dict[str, list] = {}
    for event in fusions:
        pairs.setdefault(event["ticket"], []).append(event)
    assert len(pairs) == simulator.pairings
    for one, other in pairs.values():
        assert (one["client"], one["partner"]) == (other["partner"], other["client"])


@pytest.mark.parametrize("wf0", [1.0, 0.6])
def test_the_weights_of_a_pair_sum_to_wf0_and_are_those_of_the_progress_that_was_sent(small, wf0):
    world = {"devices": TwoSpeed(slow=0.5, factor=4.0), "network": Links(low=1e-2, high=1e-1)}
    simulator, log = simulation(small, f",fusion.wf0={wf0}", **world)
    simulator.run(160)
    sent = {(e["ticket"], e["client"]): e["progress"] for e in of_kind(log, "exchange")}
    weights: dict[str, list] = {}
    for event in of_kind(log, "fuse"):
        own = sent[event["ticket"], event["client"]]
        other = sent[event["ticket"], event["partner"]]
        assert event["weight"] == pytest.approx(wf0 * other / (own + other))
        weights.setdefault(event["ticket"], []).append(event["weight"])
    pairs = [pair for pair in weights.values() if len(pair) == 2]
    assert len(pairs) > 5
    assert all(sum(pair) == pytest.approx(wf0) for pair in pairs)
    assert any(abs(pair[0] - pair[1]) > 0.2 * wf0 for pair in pairs)


def test_a_fusion_mixes_what_was_sent_into_the_weights_as_they_are(small):
    """Two peers of one speed, done again by hand: they pair after every round, and mix what the
    other had then into what they have at the end of the next, unless that was their last."""
    fed = Federation.load(
        "synthetic:groups=2,kind=permutation,samples=24,features=12,classes=4", clients=2, seed=1
    )
    options = ",decision=always,fusion=naive,fusion.weight=0.25,milestones=[]"
    simulator, log = simulation(fed, options, updates=8, devices=Equal(jitter=0.0))
    simulator.run(8)
    pair = [alone(fed, client, Constant()) for client in range(2)]
    sent: list[torch.Tensor] = []
    for number in range(4):
        for learner in pair:
            learner.steps(3)
        if number == 3:
            break
        for learner, other in zip(pair, reversed(sent), strict=False):
            learner.fuse(0.75 * learner.params + 0.25 * other)
        sent = [learner.params for learner in pair]
    assert len(of_kind(log, "fuse")) == 2 * 2 and len(of_kind(log, "discard")) == 2
    for client in range(2):
        torch.testing.assert_close(simulator.strategy.model_for(client), pair[client].params)


def test_fast_peers_are_ahead_until_they_are_done(small):
    devices = TwoSpeed(slow=0.5, factor=4.0, jitter=0.0)
    simulator, log = simulation(small, devices=devices)
    simulator.run(90)
    done = [learner.iteration for learner in simulator.learners]
    fast = [p for p, factor in zip(done, simulator.factors, strict=True) if factor == 1]
    slow = [p for p, factor in zip(done, simulator.factors, strict=True) if factor == 4]
    assert min(fast) > 2 * max(slow)
    simulator.run(10_000)
    assert all(learner.iteration == 60 for learner in simulator.learners)
    assert simulator.updates == 160
    assert simulator.time == max(event["time"] for event in of_kind(log, "train"))


@pytest.mark.parametrize("budget", [2, 3, 10, 31])
@pytest.mark.parametrize("network", [None, Links(low=1e-3, high=1e-2)], ids=["instant", "slow"])
def test_a_budget_of_messages_is_spent_and_not_exceeded(small, budget, network):
    simulator, log = simulation(small, ",decision=always", network=network, updates=8_000)
    assert simulator.run(8_000, messages=budget) is True
    assert simulator.sent == budget - budget % 2 == len(of_kind(log, "exchange"))
    assert simulator.updates < 8_000
    assert simulator.history[-1]["updates"] == simulator.updates


def test_who_leaves_is_forgotten_and_who_comes_back_goes_on(small, tmp_path):
    trace = tmp_path / "trace.csv"
    trace.write_text("client,time,available\n3,0.1,0\n3,0.4,1\n5,0,0\n5,0.3,1\n")
    simulator, log = simulation(small, ",decision=always", dropout=Trace(path=str(trace)))
    simulator.run(10_000)
    assert all(learner.iteration == 60 for learner in simulator.learners)
    assert simulator.incarnations == [1, 1, 1, 2, 1, 1, 1, 1]
    assert [event["client"] for event in of_kind(log, "return")] == [3]
    assert [event["client"] for event in of_kind(log, "join")] == [5]  # for the first time
    away = [e for e in log if e.get("client") == 3 and 0.1 < e["time"] < 0.4]
    assert [event["event"] for event in away] == []
    assert min(e["time"] for e in of_kind(log, "train") if e["client"] == 5) > 0.3
    gone, events = simulation(small, ",decision=always", dropout=Leave(at=0.2, share=0.25))
    gone.run(10_000)
    left = {event["client"] for event in of_kind(events, "leave")}
    assert len(left) == 2
    late = [e for e in events if e["time"] > 0.2 and e.get("client") in left]
    assert late == []
    assert sum(learner.iteration == 60 for learner in gone.learners) == 6
    assert all(e["partner"] not in left for e in of_kind(events, "exchange") if "partner" in e)


@pytest.mark.parametrize("network", [None, Links(low=1e-3, high=1e-2)], ids=["instant", "slow"])
def test_nobody_fuses_after_its_last_step(small, network):
    """Every fusion is trained on: the models at the end are those of a last local round."""
    world = {"devices": TwoSpeed(slow=0.5, factor=4.0), "network": network}
    simulator, log = simulation(small, ",decision=always", **world)
    trained: dict[int, torch.Tensor] = {}

    def look(event):
        if isinstance(event, Train):
            trained[event.client] = simulator.learners[event.client].params
            if event.iteration == 60:
                done.add(event.client)
        assert not isinstance(event, Fuse) or event.client not in done
        assert not isinstance(event, Discard) or event.client in done

    done: set[int] = set()
    simulator.observers.append(look)
    simulator.run(10_000)
    assert len(done) == 8 and of_kind(log, "discard")
    assert torch.equal(models(simulator), torch.stack([trained[client] for client in range(8)]))


def test_an_exchange_with_a_peer_that_leaves_breaks_off_at_once(small, tmp_path):
    """A model takes 2 s each way; the owner leaves while its answer is under way."""
    links = Links(low=8e-6 * 100, high=8e-6 * 100)  # 100 bytes a second
    world = {"network": links, "devices": Equal(unit=0.5, jitter=0.0)}
    _, log = whole = simulation(small, ",decision=always", **world)
    whole[0].run(160)
    first, answer = (e for e in of_kind(log, "exchange") if e["ticket"] == "0.1.1")
    assert answer["client"] == 0
    trace = tmp_path / "trace.csv"
    trace.write_text(f"client,time,available\n0,{answer['time'] + 1},0\n")
    broken, log = simulation(small, ",decision=always", dropout=Trace(path=str(trace)), **world)
    broken.run(160)
    mine = [e for e in log if e.get("client") == first["client"] and e["time"] > answer["time"]]
    seeks = [e["time"] for e in mine if e["event"] in ("claim", "announce")]
    assert seeks[0] == answer["time"] + 1
    assert not any(e.get("ticket") == "0.1.1" for e in mine)


def test_a_lost_model_harms_nobody_and_a_delay_takes_time(small):
    world = {"dropout": Drop(probability=0.5), "devices": Equal(unit=0.5)}  # updates of 10 s or so
    lossy, log = simulation(small, ",decision=always", **world)
    lossy.run(10_000)
    sent = len(of_kind(log, "exchange"))  # about as many in vain as there are pairings
    assert 5 < lossy.pairings < sent - 2 * lossy.pairings + 15
    taken = len(of_kind(log, "fuse")) + len(of_kind(log, "discard"))
    assert taken == 2 * lossy.pairings < sent
    assert all(learner.iteration == 60 for learner in lossy.learners)
    times = []
    for dropout in (None, Delay(probability=1.0, factor=3.0)):
        world = {"dropout": dropout, "devices": Equal(jitter=0.0)}
        simulator, _ = simulation(small, ",decision=never", **world)
        simulator.run(10_000)
        times.append(simulator.time)
    assert times[1] == pytest.approx(3 * times[0])


def test_a_model_takes_its_time_over_the_slower_link(small):
    links = Links(low=8e-6 * 1000, high=8e-6 * 1000)  # 1000 bytes a second
    world = {"network": links, "devices": Equal(jitter=0.0)}
    simulator, log = simulation(small, ",decision=always", **world)
    simulator.run(160)
    sent: dict[str, list] = {}
    for event in of_kind(log, "exchange"):
        sent.setdefault(event["ticket"], []).append(event["time"])
    whole = [pair for pair in sent.values() if len(pair) == 2]
    assert len(whole) > 5
    assert all(b - a == pytest.approx(4 * 52 / 1000) for a, b in whole)


def test_common_test_samples_are_those_of_all(small):
    own, _ = simulation(small)
    common, _ = simulation(small, ",common_test=true")
    own.run(80)
    common.run(80)
    assert torch.equal(models(own), models(common))
    x = torch.cat([small.x[part] for part in small.test]).float()
    y = torch.cat([small.y[part] for part in small.test])
    right = []
    for vector in models(common):
        weight, bias = vector[:48].view(4, 12), vector[48:]
        right.append(float(((x @ weight.T + bias).argmax(1) == y).double().mean()))
    assert common.history[-1]["accuracy"] == pytest.approx(sum(right) / 8)
    assert [peer["accuracy"] for peer in common.each.figures()["peers"]] == pytest.approx(right)
    assert own.history[-1]["accuracy"] != common.history[-1]["accuracy"]


def test_fusions_are_scored_on_request_and_change_nothing(small):
    plain, log = simulation(small)
    scored, events = simulation(small, ",score_fusions=true")
    plain.run(160)
    scored.run(160)
    assert log == events
    assert sum(map(len, scored.each.effects)) == len(of_kind(log, "fuse"))
    assert all(peer["fusion_effect"] is None for peer in plain.each.figures()["peers"])
    assert any(peer["fusion_effect"] for peer in scored.each.figures()["peers"])


def test_departures_by_version_need_a_server(small):
    with pytest.raises(PolytempoError, match=r"p2p has no server; use at"):
        simulation(small, dropout=Leave(version=3))


def test_who_is_waited_for_is_a_servers_question(small, tmp_path):
    path = tmp_path / "trace.csv"
    path.write_text("client,time,available\n0,1,0\n")
    with pytest.raises(PolytempoError, match=r"p2p has no server; .* no wait_for"):
        simulation(small, dropout=Trace(str(path), wait_for=2))


@pytest.mark.parametrize(
    ("events", "why"),
    [
        ([("grant", 0, 1), ("grant", 0, 2)], "granted twice"),
        ([("grant", 0, 1), ("exchange", 2, 0)], "the pair is"),
        ([("grant", 0, 1), ("exchange", 0, 1)], "the claimer sends first"),
        ([("grant", 0, 1), ("exchange", 1, 0), ("exchange", 1, 0)], "sent twice"),
        ([("grant", 0, 1), ("exchange", 1, 0), ("fuse", 1, 0)], "not exchanged"),
        (
            [
                ("grant", 0, 1),
                ("exchange", 1, 0),
                ("exchange", 0, 1),
                ("fuse", 1, 0),
                ("fuse", 1, 0),
            ],
            "of .* have",
        ),
    ],
)
def test_the_checker_notices(events, why):
    checker = PeerChecker()
    with pytest.raises(InvariantError, match=why):
        for number, (kind, client, partner) in enumerate(events):
            about = {
                "grant": {"partner": partner},
                "exchange": {"progress": 1.0},
                "fuse": {"partner": partner, "weight": 0.5},
            }[kind]
            head = {"n": number, "time": 0.0, "updates": 0, "version": 0}
            checker.happened(KINDS[kind](**head, client=client, ticket="0.1.1", **about))
