"""What the simulated world means: latencies, multicast, urgent requests, losses, traces."""

import math
from copy import deepcopy
from dataclasses import replace
from typing import ClassVar

import numpy as np
import pytest
import torch
from torch import nn

from polytempo import Federation, PolytempoError, Staleness, Strategy, Task, Update
from polytempo.core.errors import Diverged
from polytempo.core.events import Multicast, as_dict
from polytempo.core.optimizer import Sgd
from polytempo.core.rng import rng
from polytempo.core.schedule import SCHEDULES
from polytempo.simulation import Simulator
from polytempo.simulation.devices import Devices, Equal, Exponential, Links, TwoSpeed
from polytempo.simulation.dropout import Delay, Drop, Leave, NoDropout, Trace
from polytempo.strategies import (
    PACE,
    STRATEGIES,
    FedAsync,
    FedAvg,
    FedBuff,
    FedSGD,
    PerFedAvg,
    PerFedAvgAsync,
    Standalone,
)
from polytempo.strategies.gradients import GradientStrategy
from polytempo.training import AutogradSolver, Exam, Executor, Job
from solving import upload_of

TASK = Task(epochs=2, batch_size=4, lr=0.05)


def module() -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return nn.Linear(12, 4)


class Recorder(Executor):
    """Trains in this process and remembers what was asked of it."""

    def __init__(self, fed: Federation, seed: int = 0) -> None:
        super().__init__(AutogradSolver(module(), fed, seed))
        self.jobs: list[Job] = []

    def carry_out(self, job):
        self.jobs.append(job)
        return super().carry_out(job)


def make(fed: Federation, strategy: Strategy, **options) -> tuple[Simulator, list[dict]]:
    defaults = {"task": TASK, "adapt_epochs": 0, "eval_every": 10_000, "check": True}
    simulator = Simulator(fed, module(), strategy, **(defaults | options))
    log: list[dict] = []
    simulator.observers.append(lambda event: log.append(as_dict(event)))
    return simulator, log


def of_kind(log, *kinds):
    return [event for event in log if event["event"] in kinds]


class Scripted(FedAsync):
    """Sends a multicast or an urgent request to chosen clients after chosen updates."""

    multicast_after: ClassVar[dict[int, list[int]]] = {}
    stop_after: ClassVar[dict[int, list[int]]] = {}
    state: ClassVar[tuple[str, ...]] = (*FedAsync.state, "seen")

    def setup(self, context):
        super().setup(context)
        self.seen = 0

    def fold(self, update: Update, staleness: Staleness) -> bool:
        self.seen += 1
        return super().fold(update, staleness)

    def refresh(self, in_flight):
        wanted = self.multicast_after.get(self.seen, [])
        return [f.client for f in in_flight if f.client in wanted]

    def urgent(self, in_flight):
        wanted = self.stop_after.get(self.seen, [])
        return [f.client for f in in_flight if f.client in wanted]


def scripted(multicast=None, stop=None) -> Scripted:
    kind = type("Script", (Scripted,), {})
    kind.multicast_after, kind.stop_after = multicast or {}, stop or {}
    return kind(rho=0)


class Fixed(Devices):
    """Training takes a known time for each client."""

    durations: ClassVar[list[float]] = []

    def factors(self, clients, seed):
        return self.durations[:clients]

    def seconds(self, factor, work, stream):
        return factor


def fixed(*durations: float) -> Fixed:
    return type("Known", (Fixed,), {"durations": list(durations)})()


# -- the clock ----------------------------------------------------------------------------------


def test_arrivals_come_when_their_training_ends(small):
    simulator, log = make(small, Standalone(), devices=fixed(3, 5, 7, 100, 100, 100, 100, 100))
    simulator.run(6)
    uploads = [(event["time"], event["client"]) for event in of_kind(log, "upload")]
    assert uploads == [(3, 0), (5, 1), (6, 0), (7, 2), (9, 0), (10, 1)]


def test_equal_times_are_taken_in_the_order_of_dispatch(small):
    simulator, log = make(small, FedAsync(), devices=fixed(*[2.0] * 8), concurrency=8)
    simulator.run(8)
    sent = [event["client"] for event in of_kind(log, "dispatch")][:8]
    assert [event["client"] for event in of_kind(log, "upload")] == sent
    assert {event["time"] for event in of_kind(log, "upload")} == {2.0}


def test_latency_is_proportional_to_samples_epochs_and_device_factor(small):
    devices = TwoSpeed(unit=0.01, jitter=0.0, slow=0.5, factor=3.0)
    simulator, log = make(small, Standalone(), devices=devices)
    simulator.run(30)
    first = {}
    for event in of_kind(log, "upload"):
        first.setdefault(event["client"], event["time"])
    factors = devices.factors(8, 0)
    for client, time in first.items():
        assert time == pytest.approx(2 * small.samples[client] * 0.01 * factors[client])
    assert sorted(factors) == [1.0] * 4 + [3.0] * 4


def test_messages_take_bytes_over_bandwidth_each_way(small):
    bytes_each = 4 * (12 * 4 + 4)
    network = Links(low=8e-6 * 100, high=8e-6 * 100)  # 100 bytes a second
    simulator, log = make(
        small, FedAvg(), devices=fixed(*[1.0] * 8), network=network, concurrency=2
    )
    simulator.run(2)
    for event in of_kind(log, "upload"):
        assert event["time"] == pytest.approx(1 + 2 * bytes_each / 100)


def test_a_synchronous_round_lasts_as_long_as_its_slowest_client(small):
    durations = [1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0]
    simulator, log = make(small, FedAvg(), devices=fixed(*durations), concurrency=3)
    simulator.run(9)
    start, version = 0.0, 0
    uploads = of_kind(log, "upload")
    for k in range(3):
        cohort = uploads[3 * k : 3 * k + 3]
        ends = [start + durations[event["client"]] for event in cohort]
        assert [event["time"] for event in cohort] == pytest.approx(ends)
        assert [event["version"] for event in cohort] == [version, version, version + 1]
        start, version = max(ends), version + 1


def test_mean_staleness_is_slots_minus_one(small):
    simulator, _ = make(small, FedAsync(), devices=Equal(), concurrency=5)
    simulator.run(400)
    total = sum(k * v for k, v in simulator.staleness.items())
    assert total / 400 == pytest.approx(4, abs=0.1)


def test_exponential_latencies_are_redrawn_at_each_dispatch(small):
    simulator, log = make(small, Standalone(), devices=Exponential(beta=3.0))
    simulator.run(600)
    sent, durations = {}, []
    for event in log:
        if event["event"] == "dispatch":
            sent[event["dispatch"]] = event["time"]
        elif event["event"] == "upload":
            durations.append(event["time"] - sent[event["dispatch"]])
    assert len(set(durations)) == 600
    assert np.mean(durations) == pytest.approx(3.0, rel=0.15)


# -- lazy training, multicast, urgent requests --------------------------------------------------


def test_a_result_is_what_its_job_says_whenever_it_is_trained(small):
    recorder = Recorder(small)
    simulator, _ = make(small, PACE(omega=15), devices=TwoSpeed(factor=9.0), backend=recorder)
    uploads = []
    fold = simulator.strategy.fold
    simulator.strategy.fold = lambda u, s: (uploads.append(u.vector.clone()), fold(u, s))[1]
    simulator.run(60)
    trainer = AutogradSolver(module(), small, 0)
    again = [upload_of(trainer, job) for job in reversed(recorder.jobs)][::-1]
    assert any(job.first_step for job in recorder.jobs)
    for vector, repeat in zip(uploads, again, strict=True):
        assert torch.equal(vector, repeat)


def test_multicast_swaps_the_model_in_and_keeps_the_steps_left(small):
    """Client 1 needs 10 s; at 3 s client 0 uploads, which triggers a multicast to client 1."""
    recorder = Recorder(small)
    strategy = scripted(multicast={1: [1]})
    durations = fixed(3, 10, 50, 50, 50, 50, 50, 50)
    simulator, log = make(small, strategy, devices=durations, concurrency=8, backend=recorder)
    fresh = {}
    simulator.observers.append(
        lambda e: (
            fresh.setdefault("model", strategy.model_for(1).clone())
            if isinstance(e, Multicast)
            else None
        )
    )
    simulator.run(5)
    [sent] = of_kind(log, "multicast")
    [restart] = of_kind(log, "restart")
    total = TASK.total_steps(small.samples[1])
    assert restart["time"] == sent["time"] == 3
    assert restart["step"] == math.ceil(0.3 * total)
    [upload] = [e for e in of_kind(log, "upload") if e["client"] == 1]
    assert upload["time"] == 10  # the schedule is unchanged
    assert upload["dispatch"] == sent["dispatch"]
    assert upload["staleness"] == upload["updates"] - 1 - sent["updates"]
    [job] = [job for job in recorder.jobs if job.client == 1]
    assert job.first_step == restart["step"]
    assert torch.equal(job.params, fresh["model"])


def test_a_multicast_too_late_is_missed_and_the_older_dispatch_answered(small):
    """The multicast needs 2.08 s on the wire; client 1 has finished by then."""
    network = Links(low=8e-6 * 100, high=8e-6 * 100)
    strategy = scripted(multicast={1: [1]})
    durations = fixed(3, 5, 50, 50, 50, 50, 50, 50)
    simulator, log = make(small, strategy, devices=durations, concurrency=8, network=network)
    simulator.run(3)
    [sent] = of_kind(log, "multicast")
    [upload] = [e for e in of_kind(log, "upload") if e["client"] == 1]
    [missed] = of_kind(log, "missed")
    assert missed["dispatch"] == sent["dispatch"] > upload["dispatch"]
    assert not of_kind(log, "restart")
    assert upload["staleness"] == 1  # counted from the dispatch that it answers


def test_an_urgent_request_ends_training_at_the_next_epoch(small):
    recorder = Recorder(small)
    task = replace(TASK, epochs=5)
    strategy = scripted(stop={1: [1]})
    durations = fixed(3, 10, 50, 50, 50, 50, 50, 50)
    simulator, log = make(
        small, strategy, devices=durations, concurrency=8, backend=recorder, task=task
    )
    simulator.run(3)
    [upload] = [e for e in of_kind(log, "upload") if e["client"] == 1]
    assert upload["time"] == pytest.approx(4.0)  # 2 of 5 epochs
    [job] = [job for job in recorder.jobs if job.client == 1]
    assert job.last_step == 2 * task.batches(small.samples[1])
    assert len(of_kind(log, "urgent")) == 1


def test_an_urgent_request_in_the_last_epoch_changes_nothing(small):
    strategy = scripted(stop={1: [1]})
    durations = fixed(9, 10, 50, 50, 50, 50, 50, 50)
    simulator, log = make(small, strategy, devices=durations, concurrency=8)
    simulator.run(2)
    assert [e["time"] for e in of_kind(log, "upload")] == [9, 10]


# -- losses -------------------------------------------------------------------------------------


def test_a_lost_update_frees_its_slot_and_is_never_folded(small):
    simulator, log = make(small, FedAsync(), dropout=Drop(probability=0.4), concurrency=3)
    simulator.run(60)
    drops = of_kind(log, "drop")
    assert 20 <= len(drops) <= 70
    lost = {event["dispatch"] for event in drops}
    assert not lost & {event["dispatch"] for event in of_kind(log, "upload")}
    assert simulator.server.updates == 60


@pytest.mark.parametrize("dropout", [NoDropout(), Leave(share=0.2, at=1.0), Drop(), Delay()])
def test_a_fate_is_drawn_by_name_and_only_where_there_is_one(small, dropout, monkeypatch):
    """A stream costs more than the rest of a launch."""
    names = []

    def noted(seed, *name):
        names.append(name)
        return rng(seed, *name)

    monkeypatch.setattr("polytempo.simulation.engine.rng", noted)
    simulator, log = make(small, FedAsync(), dropout=dropout, concurrency=3)
    simulator.run(10)
    sent = [("fate", e["client"], "dispatch", e["dispatch"]) for e in of_kind(log, "dispatch")]
    assert names == (sent if isinstance(dropout, Drop | Delay) else [])


def test_synchronous_rounds_survive_losses(small):
    simulator, log = make(small, FedAvg(), dropout=Drop(probability=0.5), concurrency=4)
    simulator.run(40)
    assert of_kind(log, "drop")
    assert simulator.server.updates == 40


def test_delays_lengthen_training(small):
    plain, log = make(small, Standalone(), devices=fixed(*[2.0] * 8))
    late, late_log = make(
        small, Standalone(), devices=fixed(*[2.0] * 8), dropout=Delay(probability=0.5, factor=4.0)
    )
    plain.run(8)
    late.run(8)
    assert {e["time"] for e in of_kind(log, "upload")} == {2.0}
    assert {e["time"] for e in of_kind(late_log, "upload")} > {2.0}
    assert {e["time"] for e in of_kind(late_log, "upload")} <= {2.0, 4.0, 6.0, 8.0}


def test_who_leaves_for_good_never_comes_back(small):
    simulator, log = make(small, FedAsync(), dropout=Leave(at=0.5, share=0.5), concurrency=6)
    simulator.run(80)
    gone = {event["client"] for event in of_kind(log, "leave")}
    assert len(gone) == 4
    after = [e for e in of_kind(log, "upload", "dispatch") if e["time"] > 0.5]
    assert after
    assert not gone & {event["client"] for event in after}
    assert of_kind(log, "drop")


@pytest.mark.parametrize("strategy", [FedAsync(), FedBuff(buffer_size=3), FedAvg()])
def test_who_leaves_with_a_version_of_the_model_is_gone_from_then_on(small, strategy):
    simulator, log = make(small, strategy, dropout=Leave(version=5, share=0.5), concurrency=6)
    simulator.run(80)
    left = of_kind(log, "leave")
    gone = {event["client"] for event in left}
    assert len(gone) == len(left) == 4
    assert {event["version"] for event in left} == {5}
    begin = left[0]["n"]
    uploads = of_kind(log, "upload")
    assert gone & {e["client"] for e in uploads if e["n"] < begin}
    after = {e["client"] for e in of_kind(log, "upload", "dispatch") if e["n"] > left[-1]["n"]}
    assert after
    assert not gone & after


def test_who_leaves_with_a_version_does_so_after_a_checkpoint_too(small):
    def world():
        return make(small, FedAsync(), dropout=Leave(version=10, share=0.5), concurrency=6)[0]

    whole, first, second = world(), world(), world()
    whole.run(40)
    for pause in (5, 20):  # before and after they leave
        first.run(pause)
        second.load_state_dict(first.state_dict())
        second.run(40)
        assert (second.time, set(second.server.members)) == (whole.time, set(whole.server.members))
        assert torch.equal(second.strategy.model_for(0), whole.strategy.model_for(0))
        second = world()
    assert len(whole.server.members) == 4


def test_a_run_can_end_with_a_version_of_the_model(small):
    simulator, _ = make(small, FedBuff(buffer_size=3), concurrency=6)
    assert simulator.run(10_000, versions=4) is True
    assert (simulator.server.version, simulator.server.updates) == (4, 12)


def test_a_run_without_anybody_left_ends_early(small):
    simulator, _ = make(small, FedAsync(), dropout=Leave(at=0.2, share=1.0))
    assert simulator.run(10_000) is True
    assert simulator.server.updates < 100


def test_an_upload_waits_until_its_client_is_back(small, tmp_path):
    path = tmp_path / "trace.csv"
    path.write_text("client,time,available,latency\n0,1,0,\n0,20,1,4\n")
    simulator, log = make(
        small, Standalone(), devices=fixed(*[3.0] * 8), dropout=Trace(path=str(path))
    )
    simulator.run(60)
    mine = [e["time"] for e in of_kind(log, "upload") if e["client"] == 0]
    assert mine[:2] == [20, 24]  # back at 20 s, and from then on 4 s a training


def test_a_trace_of_clients_that_are_never_there_loses_their_updates(small, tmp_path):
    path = tmp_path / "trace.csv"
    path.write_text("client,time,available\n0,1,0\n1,0,0\n")
    simulator, log = make(
        small, FedAvg(), devices=fixed(*[3.0] * 8), dropout=Trace(path=str(path)), concurrency=8
    )
    simulator.run(12)
    assert [e["client"] for e in of_kind(log, "drop")] == [0]
    assert 1 not in {e["client"] for e in of_kind(log, "dispatch")}


# -- evaluation and endings ---------------------------------------------------------------------


def test_evaluation_leaves_no_trace_in_the_run(small):
    often, log = make(small, PACE(), eval_every=1, adapt_epochs=2, adapt_always=True)
    seldom, other = make(small, PACE(), eval_every=1000)
    often.run(40)
    seldom.run(40)

    def trained(events):
        return [{k: v for k, v in e.items() if k != "n"} for e in events if "client" in e]

    assert trained(log) == trained(other)
    for client in range(8):
        assert torch.equal(often.strategy.model_for(client), seldom.strategy.model_for(client))
    assert all(row["accuracy_adapted"] is not None for row in often.history[1:])
    assert [row["updates"] for row in seldom.history] == [0, 40]


@pytest.mark.parametrize("strategy", [FedAsync(), PACE()])
def test_who_has_no_test_samples_is_neither_evaluated_nor_adapted(strategy):
    draw = np.random.default_rng(0)
    sizes = [16, 1, 12, 1, 8]
    clients = [(draw.normal(size=(n, 12)).astype("f"), draw.integers(0, 4, n)) for n in sizes]
    fed = Federation.from_arrays(clients, classes=4)
    backend, examined = Recorder(fed), []

    def evaluate(exams):
        exams = list(exams)
        examined.extend(client for exam in exams for client in exam.clients)
        return Executor.evaluate(backend, exams)

    backend.evaluate = evaluate
    simulator, _ = make(fed, strategy, concurrency=3, eval_every=4, adapt_epochs=1, backend=backend)
    simulator.run(12)
    assert set(examined) == {0, 2, 4} == set(fed.tested)
    assert {job.client for job in backend.jobs if job.stream[0] == "adapt"} == {0, 2, 4}
    scores = [
        backend.solver.evaluate(Exam(strategy.serve(client), [client]))[0] for client in (0, 2, 4)
    ]
    shares = [score.sums["correct"] / score.total for score in scores]
    assert simulator.history[-1]["accuracy"] == pytest.approx(np.mean(shares))


def test_until_ends_the_run_at_a_simulated_time(small):
    simulator, log = make(small, Standalone(), devices=fixed(*[2.0] * 8))
    simulator.run(10_000, until=5.0)
    assert simulator.time == 4.0
    assert len(of_kind(log, "upload")) == 16


def test_standalone_sends_no_messages_and_pace_counts_its_multicasts(small):
    simulator, _ = make(small, Standalone(), concurrency=2)
    simulator.run(20)
    assert set(simulator.messages.values()) == {0}
    assert simulator.server.concurrency == 8
    pace, log = make(small, PACE(omega=15), devices=TwoSpeed(factor=9.0))
    pace.run(60)
    assert pace.messages["multicast"] == len(of_kind(log, "multicast")) > 0
    assert pace.messages["upload"] == 60
    assert pace.messages["dispatch"] == len(of_kind(log, "dispatch"))


def test_bytes_are_those_of_anchors_and_extras_too(small):
    model, basis = 4 * (12 * 4 + 4), 4 * 3 * 12
    anchored = ["fedamp", "fedamp-async"]
    for name in [*anchored, "fedac", "fedsac", "fedsac-async", "fedsac-pace", "pace"]:
        simulator, log = make(small, STRATEGIES.create(name), devices=TwoSpeed(factor=9.0))
        simulator.run(40)
        dispatches = of_kind(log, "dispatch")
        twice = 0  # dispatches that have a vector beside the model
        if name == "fedac":
            twice = len(dispatches)
        elif name in anchored:  # those to clients that have uploaded before
            seen = set()
            for event in log:
                if event["event"] == "upload":
                    seen.add(event["client"])
                twice += event["event"] == "dispatch" and event["client"] in seen
            assert 20 < twice < len(dispatches)
        assert simulator.bytes["dispatch"] == model * (len(dispatches) + twice)
        extra = basis if name.startswith("fedsac") else 0
        assert simulator.bytes["upload"] == 40 * (model + extra)
        assert simulator.bytes["multicast"] == model * simulator.messages["multicast"]
        assert simulator.messages["dispatch"] == len(dispatches)
        assert simulator.messages["upload"] == 40


def test_an_anchor_takes_as_long_to_download_as_a_model(small):
    bytes_each = 4 * (12 * 4 + 4)
    network = Links(low=8e-6 * 100, high=8e-6 * 100)  # 100 bytes a second
    strategy = STRATEGIES.create("fedamp")
    simulator, log = make(
        small, strategy, devices=fixed(*[1.0] * 8), network=network, concurrency=8
    )
    simulator.run(16)
    times = sorted({event["time"] for event in of_kind(log, "upload")})
    first = 1 + 2 * bytes_each / 100
    assert times == pytest.approx([first, first + 1 + 3 * bytes_each / 100])


class Anchored(Scripted):
    """Sends an anchor of its own with every model."""

    def vectors_for(self, client):
        return {"anchor": torch.full_like(self.model_for(client), float(self.seen))}


def test_a_multicast_brings_its_own_anchor(small):
    recorder = Recorder(small)
    kind = type("Script", (Anchored,), {"multicast_after": {1: [1]}})
    devices = fixed(3, 20, 100, 100, 100, 100, 100, 100)
    simulator, log = make(small, kind(rho=0.5), devices=devices, concurrency=8, backend=recorder)
    simulator.run(7)  # client 0 six times, then client 1
    assert [event["client"] for event in of_kind(log, "restart")] == [1]
    [job] = [job for job in recorder.jobs if job.client == 1]
    assert job.first_step > 0
    assert set(job.vectors["anchor"].tolist()) == {1.0}
    assert set(recorder.jobs[0].vectors["anchor"].tolist()) == {0.0}


def test_a_multicast_brings_the_learning_rate_of_its_own_dispatch(small):
    recorder = Recorder(small)
    kind = type("Script", (Scripted,), {"multicast_after": {1: [1]}, "seen": 0})
    schedule = SCHEDULES.create("exponential:gamma=0.5,every=1")
    devices = fixed(3, 20, 100, 100, 100, 100, 100, 100)
    given = {"concurrency": 8, "backend": recorder, "schedule": schedule}
    simulator, _ = make(small, kind(rho=0.5), devices=devices, **given)
    simulator.run(7)  # client 0 six times, then client 1
    assert [job.client for job in recorder.jobs] == [0] * 6 + [1]
    rates = [job.task.lr / TASK.lr for job in recorder.jobs]
    assert rates == pytest.approx([*(0.5**k for k in range(6)), 0.5])


class Averaged(FedAsync):
    """Trains one model and serves another: its moving average."""

    state: ClassVar[tuple[str, ...]] = (*FedAsync.state, "mean")

    def setup(self, context):
        super().setup(context)
        self.mean = context.initial

    def fold(self, update, staleness):
        changed = super().fold(update, staleness)
        self.mean = torch.lerp(self.mean, self.model_for(0), 0.1)
        return changed

    def serve(self, client):
        return self.mean


def test_what_is_evaluated_and_adapted_is_what_is_served(small):
    """The training is that of a strategy that serves what it trains."""
    plain, log = make(small, FedAsync(rho=0.1), eval_every=10, adapt_epochs=1)
    other, events = make(small, Averaged(rho=0.1), eval_every=10, adapt_epochs=1)
    plain.run(40)
    other.run(40)
    assert torch.equal(plain.strategy.model_for(0), other.strategy.model_for(0))
    uploads, others = of_kind(log, "upload"), of_kind(events, "upload")
    assert [(e["time"], e["client"]) for e in uploads] == [(e["time"], e["client"]) for e in others]
    everybody = list(range(8))
    [scores] = other.backend.evaluate([Exam(other.strategy.mean, everybody)])
    correct = sum(score.sums["correct"] / score.total for score in scores) / 8
    assert other.history[-1]["accuracy"] == pytest.approx(correct)
    [trained] = other.backend.evaluate([Exam(other.strategy.model_for(0), everybody)])
    assert [s.sums["loss"] for s in trained] != [s.sums["loss"] for s in scores]
    assert other.history[-1]["loss"] != plain.history[-1]["loss"]
    assert other.history[-1]["accuracy_adapted"] is not None
    jobs = []
    carry_out = other.backend.carry_out
    other.backend.carry_out = lambda job: jobs.append(job) or carry_out(job)
    other.adapted()
    assert all(job.params is other.strategy.mean for job in jobs) and len(jobs) == 8


def test_adaptation_keeps_the_learning_rate_that_was_set(small):
    schedule = SCHEDULES.create("exponential:gamma=0.5,every=1")
    simulator, _ = make(small, FedAsync(), schedule=schedule, adapt_epochs=1)
    jobs = []
    carry_out = simulator.backend.carry_out
    simulator.backend.carry_out = lambda job: jobs.append(job) or carry_out(job)
    simulator.run(5)
    adapted = [job for job in jobs if job.stream[0] == "adapt"]
    assert len(adapted) == 8 and {job.task.lr for job in adapted} == {TASK.lr}


@pytest.mark.parametrize(
    "name", ["fedamp", "fedamp-async", "fedsac", "fedsac-pace:omega=15", "fedac"]
)
def test_checkpoint_keeps_anchors_and_bases(small, name):
    """Stopped after every tenth event: the run is that of the whole."""
    options = {"devices": TwoSpeed(factor=9.0), "concurrency": 4}
    whole, log = make(small, STRATEGIES.create(name), **options)
    whole.run(40)
    state, pieces = None, []
    for _ in range(1_000):
        part, events = make(small, STRATEGIES.create(name), **options)
        if state is not None:
            part.load_state_dict(state)
        steps = iter([False] * 10)
        finished = part.run(40, stop=lambda steps=steps: next(steps, True))
        state = deepcopy(part.state_dict())
        pieces += events
        if finished:
            break
    assert pieces == log and part.fingerprint == whole.fingerprint
    assert (part.bytes, part.messages) == (whole.bytes, whole.messages)
    for client in range(8):
        assert torch.equal(part.strategy.model_for(client), whole.strategy.model_for(client))


def test_divergence_is_a_clear_error(small):
    simulator, _ = make(small, FedAsync(), task=replace(TASK, lr=1e30))
    with pytest.raises(PolytempoError, match=r"NaN or infinite.*lower the learning rate"):
        simulator.run(50)


@pytest.mark.parametrize(
    "strategy",  # without those whose clients take no step, or need two batches for one
    [
        name
        for name in STRATEGIES
        if STRATEGIES[name].engine == "server"
        and not issubclass(STRATEGIES[name], GradientStrategy | FedSGD | PerFedAvg | PerFedAvgAsync)
    ],
)
@pytest.mark.parametrize("lr", [1e20, 1e25, 1e30, 1e38])
def test_training_that_diverges_without_reaching_infinity_is_the_same_error(small, strategy, lr):
    """One step: what is uploaded is finite, but its square need not be."""
    task = Task(steps=1, lr=lr, optimizer=Sgd(momentum=0.0, weight_decay=0.0))
    simulator, _ = make(small, STRATEGIES.create(strategy), task=task)
    with pytest.raises(
        Diverged, match=r"update \d.*(diverged; lower the|served client \d a model)"
    ):
        simulator.run(200)


def test_checkpoint_keeps_multicasts_on_their_way(small):
    """Stopped after every single event, with slow links: the log is that of the whole run."""
    options = {
        "devices": TwoSpeed(factor=9.0),
        "network": Links(low=8e-6 * 2000, high=8e-6 * 2000),
        "concurrency": 4,
    }
    whole, log = make(small, PACE(omega=15), **options)
    whole.run(40)
    assert {"restart", "missed"} <= {event["event"] for event in log}
    in_transit = 0
    state, pieces = None, []
    for _ in range(10_000):
        part, events = make(small, PACE(omega=15), **options)
        if state is not None:
            part.load_state_dict(state)
        steps = iter([False])
        finished = part.run(40, stop=lambda steps=steps: next(steps, True))
        in_transit += bool(part.transit)
        state = part.state_dict()
        pieces += events
        if finished:
            break
    assert in_transit > 0
    assert pieces == log


def test_checkpoint_keeps_urgent_requests_beside_multicasts(small):
    """Both on their way to the same client, stopped after every event: nothing is mixed up."""
    task = replace(TASK, epochs=5)
    options = {
        "devices": fixed(3, 20, 4, 50, 50, 50, 50, 50),
        "network": Links(low=8e-6 * 100, high=8e-6 * 100),  # 2.08 s a message
        "concurrency": 8,
        "task": task,
    }

    def strategy():
        return scripted(multicast={1: [1]}, stop={1: [1], 2: [1]})

    whole, log = make(small, strategy(), **options)
    whole.run(6)
    [upload] = [e for e in of_kind(log, "upload") if e["client"] == 1]
    [restart] = of_kind(log, "restart")
    # client 0 arrives at 2.08 + 3 + 2.08 = 7.16; the request is there at once, the model at 9.24
    assert restart["time"] == pytest.approx(7.16 + 2.08)
    # training began at 2.08 and takes 4 s an epoch: the second one is its last
    assert upload["time"] == pytest.approx(2.08 + 8 + 2.08)
    assert upload["dispatch"] == restart["dispatch"]

    shared, state, pieces = strategy(), None, []
    for _ in range(10_000):
        part, events = make(small, shared, **options)
        if state is not None:
            part.load_state_dict(state)
        steps = iter([False])
        finished = part.run(6, stop=lambda steps=steps: next(steps, True))
        state = part.state_dict()
        pieces += events
        if finished:
            break
    assert pieces == log


def test_a_request_right_after_a_multicast_still_leaves_a_step(small):
    """The new model comes in the last step of an epoch, the request before that epoch's end."""
    recorder = Recorder(small)
    task = replace(TASK, epochs=5)
    epoch = task.batches(small.samples[1])
    late = 10.0 / 5 - 0.5 * 10.0 / (5 * epoch)  # in the last step of the first of 5 epochs
    strategy = scripted(multicast={1: [1]}, stop={2: [1]})
    durations = fixed(late, 10, late + 0.01, 50, 50, 50, 50, 50)
    simulator, _ = make(
        small, strategy, devices=durations, concurrency=8, backend=recorder, task=task
    )
    simulator.run(8)
    [job] = [job for job in recorder.jobs if job.client == 1][:1]
    assert job.first_step == epoch
    assert job.last_step == 2 * epoch


def test_a_request_right_after_a_multicast_leaves_a_step_to_who_keeps_something_too(small):
    """The new model is swapped in within the job then, and must not be lost by its end."""
    recorder = Recorder(small)
    task = replace(TASK, epochs=5, keep_optimizer=True)
    epoch = task.batches(small.samples[1])
    late = 10.0 / 5 - 0.5 * 10.0 / (5 * epoch)  # in the last step of the first of 5 epochs
    strategy = scripted(multicast={1: [1]}, stop={2: [1]})
    durations = fixed(late, 10, late + 0.01, 50, 50, 50, 50, 50)
    simulator, _ = make(
        small, strategy, devices=durations, concurrency=8, backend=recorder, task=task
    )
    simulator.run(8)
    [job] = [job for job in recorder.jobs if job.client == 1][:1]
    assert [swap.step for swap in job.swaps] == [epoch]
    assert job.last_step == 2 * epoch


def test_a_refused_update_leaves_the_run_as_it_was(small):
    simulator, _ = make(small, FedAsync(), task=replace(TASK, lr=1e30), concurrency=4)
    with pytest.raises(PolytempoError):
        simulator.run(50)
    assert simulator.server.open.keys() == simulator.flights.keys()
    assert len(simulator.flights) == 4
    done, [refused] = (
        simulator.server.updates,
        [
            client
            for client, flight in simulator.flights.items()
            if any(
                item[2] == flight.ticket and item[0] == simulator.time for item in simulator.queue
            )
        ],
    )
    flight = simulator.flights[refused]  # the device comes to reason, and sends a good model
    flight.job = replace(flight.job, task=TASK, params=torch.zeros_like(flight.job.params))
    flight.seen = None  # another model than it was sent
    with pytest.raises(PolytempoError):
        simulator.run(50)
    assert simulator.server.updates > done


def test_synchronous_methods_are_evaluated_when_a_cohort_is_complete(small):
    simulator, log = make(small, FedAvg(), concurrency=4, eval_every=6)
    simulator.run(24)
    assert [row["updates"] for row in simulator.history] == [0, 8, 12, 20, 24]
    closed = {event["time"] for event in of_kind(log, "upload") if event["updates"] % 4 == 0}
    assert {row["time"] for row in simulator.history[1:]} <= closed


def test_void_events_do_not_move_the_clock(small):
    simulator, log = make(
        small, FedAsync(), devices=fixed(*[3.0] * 8), dropout=Leave(at=1.0, share=1.0)
    )
    simulator.run(10)
    assert simulator.time == 1.0
    assert of_kind(log, "drop")


def test_messages_wait_for_a_client_that_is_away(small, tmp_path):
    path = tmp_path / "trace.csv"
    path.write_text("client,time,available\n1,2,0\n1,5,1\n")
    strategy = scripted(multicast={1: [1]})
    durations = fixed(3, 10, 50, 50, 50, 50, 50, 50)
    simulator, log = make(
        small, strategy, devices=durations, concurrency=8, dropout=Trace(path=str(path))
    )
    simulator.run(4)
    assert [event["time"] for event in of_kind(log, "multicast", "restart")] == [3, 5]


def test_adapted_accuracy_is_that_of_a_locally_trained_copy(small):
    simulator, _ = make(small, FedAsync(), adapt_epochs=3, eval_every=10)
    simulator.run(20)
    before = [simulator.strategy.model_for(client).clone() for client in range(8)]
    trainer, each = AutogradSolver(module(), small, 0), []
    for client, model in enumerate(before):
        task = replace(TASK, epochs=3)
        job = Job(client, model, task, ("adapt", client, "round", 20))
        adapted = upload_of(trainer, job)
        weight, bias = adapted[:48].view(4, 12), adapted[48:]
        x, y = small.x[small.test[client]], small.y[small.test[client]]
        each.append(float(((x @ weight.T + bias).argmax(1) == y).float().mean()))
    row = simulator.history[-1]
    assert row["accuracy_adapted"] == pytest.approx(np.mean(each))
    assert row["accuracy_adapted"] != row["accuracy"]
    for client, model in enumerate(before):
        assert torch.equal(simulator.strategy.model_for(client), model)
