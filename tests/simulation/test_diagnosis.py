"""The three error terms, on quadratics whose gradients are known, and on real training."""

import numpy as np
import pytest
import torch
from torch import nn

import polytempo as pt
from polytempo.core.errors import PolytempoError
from polytempo.core.events import Dispatch, Upload
from polytempo.core.layout import Layout
from polytempo.core.optimizer import Sgd
from polytempo.core.rng import rng
from polytempo.core.schedule import SCHEDULES
from polytempo.core.task import Task
from polytempo.simulation import Simulator
from polytempo.simulation.devices import TwoSpeed
from polytempo.simulation.diagnosis import Diagnosis
from polytempo.simulation.dropout import Drop
from polytempo.storage import load_state, save_state
from polytempo.strategies import STRATEGIES
from polytempo.training import Executor, Outcome, Score, problem_for

CLIENTS, SIZE = 6, 4
CENTRES = torch.from_numpy(np.random.default_rng(0).normal(size=(CLIENTS, SIZE))).float()
RATE = 0.1


class Quadratic:
    """Client i's loss is `|w - c_i|^2 / 2`; a mini-batch adds noise to its gradient."""

    def __init__(self, noise: float) -> None:
        module = nn.Linear(SIZE, 1, bias=False)
        nn.init.constant_(module.weight, 0.7)
        self.layout = Layout(module)
        self.problem = problem_for(federation())
        self.noise = noise

    def carry_out(self, job):
        return Outcome(self.train(job), {}, {})

    def train(self, job):
        task, w = job.task, job.params.clone()
        steps = task.total_steps(20)
        stream = rng(0, *job.stream)
        for _ in range(steps):
            gradient = w - CENTRES[job.client]
            if task.batch_size < 20:
                gradient = (
                    gradient + self.noise * torch.from_numpy(stream.normal(size=SIZE)).float()
                )
            anchor = job.vectors.get("anchor", job.params)
            gradient = gradient.clone()
            task.objective.add_gradient(w, anchor, gradient)
            if task.upload == "gradient":
                return gradient
            w = w - task.lr * gradient
        return w - job.params if task.upload == "delta" else w

    def evaluate(self, exam):
        sums = {"total": 2.0, "loss": 1.0, "correct": 1.0, "top5": 2.0}
        return [Score(sums) for _ in exam.clients]


def federation() -> pt.Federation:
    clients = [(torch.zeros(27, SIZE), torch.arange(27) % 2) for _ in range(CLIENTS)]
    return pt.Federation.from_arrays(clients, test_fraction=0.25)


def simulator(strategy, noise=0.0, steps=1, every=1, **options) -> Simulator:
    solver = Quadratic(noise)
    task = Task(steps=steps, batch_size=5, lr=RATE, optimizer=Sgd(momentum=0.0, weight_decay=0.0))
    return Simulator(
        federation(),
        solver.layout.module,
        STRATEGIES.create(strategy),
        task=task,
        devices=TwoSpeed(slow=0.5, factor=4),
        backend=Executor(solver),
        adapt_epochs=0,
        eval_every=1000,
        diagnose=every,
        **options,
    )


def diagnosis(run: Simulator) -> Diagnosis:
    return run.extensions["diagnosis"]


def test_bias_and_delay_of_single_updates_by_hand():
    """FedBuff with a buffer of one: u is the sender's gradient at the model that it was sent."""
    run = simulator("fedbuff:buffer_size=1,weighting=constant", concurrency=3)
    held, models = {}, []

    def watch(event):
        if isinstance(event, Dispatch):
            held[event.client] = run.strategy.model_for(0).double()
        elif isinstance(event, Upload):
            models.append((event.client, held[event.client].clone()))

    run.observers.append(watch)
    run.run(1)
    w0 = run.server.context.initial.double()
    centres = CENTRES.double()
    stale = {client: w0 for client in range(CLIENTS)}
    w = w0
    run.run(40)
    assert [row["updates"] for row in diagnosis(run).rows] == list(range(1, 41))
    for row, (client, received) in zip(diagnosis(run).rows, models, strict=True):
        stale[client] = received
        u = received - centres[client]
        mean = torch.stack([stale[i] - centres[i] for i in range(CLIENTS)]).mean(0)
        current = w - centres.mean(0)
        assert row["noise"] == pytest.approx(0, abs=1e-9)
        assert row["bias"] == pytest.approx(float((u - mean).square().sum()), rel=1e-4, abs=1e-9)
        assert row["delay"] == pytest.approx(
            float((mean - current).square().sum()), rel=1e-3, abs=1e-9
        )
        assert row["error"] == pytest.approx(float((u - current).square().sum()), rel=1e-4)
        assert row["gradient"] == pytest.approx(float(current.square().sum()), rel=1e-4)
        assert row["step"] == pytest.approx(RATE)
        w = w - RATE * u
    counts = np.bincount([client for client, _ in models], minlength=CLIENTS)
    np.testing.assert_allclose(diagnosis(run).influence, counts / counts.sum(), atol=1e-12)


@pytest.mark.parametrize("name", ["ace", "ace-incremental"])
def test_all_clients_in_every_step_leave_no_bias(name):
    """ACE's cache is the stale gradient itself; FedBuff's buffer is that of fast clients."""
    ace = simulator(f"{name}:server_lr=0.05", noise=0.3)
    buffered = simulator("fedbuff:buffer_size=2", concurrency=4)
    ace.run(120)
    buffered.run(120)
    assert len(diagnosis(ace).rows) > 50
    assert all(row["bias"] < 1e-9 for row in diagnosis(ace).rows)
    assert all(row["noise"] > 1e-4 for row in diagnosis(ace).rows)
    assert all(row["step"] == pytest.approx(0.05) for row in diagnosis(ace).rows)
    np.testing.assert_allclose(diagnosis(ace).influence, np.full(CLIENTS, 1 / CLIENTS))
    assert min(row["bias"] for row in diagnosis(buffered).rows) > 1e-3
    assert diagnosis(buffered).influence.max() > 1.5 / CLIENTS


def test_full_participation_without_delay_has_neither_bias_nor_delay():
    run = simulator("fedavg", concurrency=CLIENTS)
    run.run(5 * CLIENTS)
    for row in diagnosis(run).rows:
        assert row["bias"] < 1e-10
        assert row["delay"] < 1e-10
        assert row["error"] < 1e-10
    np.testing.assert_allclose(diagnosis(run).influence, np.full(CLIENTS, 1 / CLIENTS))


def test_several_local_steps_are_bias_not_noise():
    run = simulator("fedavg", concurrency=CLIENTS, steps=5)
    run.run(3 * CLIENTS)
    assert all(row["noise"] < 1e-10 for row in diagnosis(run).rows)
    assert diagnosis(run).rows[0]["bias"] > 1e-3


def test_noise_is_that_of_the_mini_batches():
    """The mean of six gradients, each with four numbers of variance 0.25."""
    run = simulator("fedavg", concurrency=CLIENTS, noise=0.5)
    run.run(400 * CLIENTS)
    noise = [row["noise"] for row in diagnosis(run).rows]
    expected = SIZE * 0.25 / CLIENTS
    error = expected * np.sqrt(2 / SIZE / len(noise))
    assert abs(np.mean(noise) - expected) < 4 * error


UNKNOWN = {"descant", "scaffold", "scaffold-async", "per-fedavg", "per-fedavg-async"}
ONE_MODEL = {name for name in STRATEGIES if STRATEGIES[name].single_model}


@pytest.mark.parametrize("name", sorted(UNKNOWN))
def test_steps_that_are_not_plain_gradients_cannot_be_diagnosed(name):
    with pytest.raises(PolytempoError, match="--diagnose"):
        simulator(name, every=7)


@pytest.mark.parametrize("name", [*sorted(ONE_MODEL - UNKNOWN), "descant:hold_out=0"])
def test_the_run_is_not_touched_and_can_be_resumed(name, tmp_path):
    plain, diagnosed, resumed = (
        simulator(name, noise=0.1, steps=2, every=every, concurrency=3) for every in (None, 7, 7)
    )
    plain.run(30)
    plain.run(60)
    diagnosed.run(30)
    save_state(tmp_path / "state", diagnosed.state_dict())
    resumed.load_state_dict(load_state(tmp_path / "state"))
    diagnosed.run(60)
    resumed.run(60)
    assert plain.fingerprint == diagnosed.fingerprint
    assert torch.equal(plain.strategy.model_for(0), diagnosed.strategy.model_for(0))
    assert diagnosis(diagnosed).rows == diagnosis(resumed).rows
    assert len(diagnosis(diagnosed).rows) >= 3
    for row in diagnosis(diagnosed).rows:
        assert all(np.isfinite(value) for value in row.values())
    shares = diagnosis(diagnosed).influence
    np.testing.assert_array_equal(shares, diagnosis(resumed).influence)
    assert shares.sum() == pytest.approx(1)


def test_a_model_for_each_client_cannot_be_diagnosed():
    with pytest.raises(PolytempoError, match=r"--diagnose needs .* one model.*pace"):
        simulator("pace")


@pytest.mark.parametrize("name", ["port", "fedac", "asafl", "ace", "delay-adaptive-asgd"])
def test_shadows_are_told_what_the_strategy_is_told(name):
    """Losses and clients that leave included: they hold what it holds, and wait for whom it waits
    for."""
    run = simulator(name, concurrency=4, refill="idle", dropout=Drop(probability=0.3))
    run.run(40)
    assert run.messages["dispatch"] > 50  # some were lost
    run.server.leave(next(iter(run.server.open)))
    for shadow in diagnosis(run).shadows:
        for key in ("models", "controls"):
            if hasattr(shadow, key):
                ours, theirs = getattr(run.strategy, key), getattr(shadow, key)
                assert theirs.version == ours.version
                assert theirs.state_dict()["held"] == ours.state_dict()["held"]
                assert len(theirs) == len(ours) <= 5
        for key in ("awaited", "sent", "started", "concurrency", "late", "asked"):
            if hasattr(shadow, key):
                assert np.array_equal(getattr(shadow, key), getattr(run.strategy, key))
    assert set(diagnosis(run).anchors) == set(run.server.open)


def test_a_schedule_changes_where_a_gradient_leads():
    """A step is as long as the rate that its client was sent, not as that of now."""
    options = {
        "steps": 1,
        "concurrency": 3,
        "schedule": SCHEDULES.create("exponential:gamma=0.9,every=1"),
    }
    run = simulator("fedasync:alpha=0.5,a=0", **options)
    uploads = []
    run.observers.append(lambda event: uploads.append(event) if isinstance(event, Upload) else 0)
    run.run(30)
    sent = [event.updates - 1 - event.staleness for event in uploads]
    steps = [row["step"] for row in diagnosis(run).rows]
    assert steps == pytest.approx([0.5 * RATE * 0.9**number for number in sent])


def test_what_cannot_be_diagnosed_is_said_at_the_start(small):
    with pytest.raises(PolytempoError, match=r"--diagnose .* use --optimizer sgd, not adamw"):
        pt.simulate(small, model="linear", strategy="fedavg", diagnose=5, optimizer="adamw")
