"""FedAC against its formulas, and against what public implementations of it get wrong."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from dispatching import dispatch
from hypothesis import given
from hypothesis import strategies as st
from linear_model import gradient, schedule
from torch import nn

from polytempo import Context, PolytempoError, Server, Staleness, Task, Update
from polytempo.core.events import as_dict
from polytempo.core.optimizer import Adam, Sgd
from polytempo.simulation import Simulator
from polytempo.simulation.devices import TwoSpeed
from polytempo.simulation.dropout import Drop
from polytempo.strategies import FedAC
from polytempo.strategies.fedac import effective_steps

INITIAL = torch.tensor([1.0, -2.0], dtype=torch.float64)
PLAIN = Task(epochs=2, batch_size=5, lr=0.1, optimizer=Sgd(momentum=0.0, weight_decay=0.0))
SAMPLES = (10, 10, 10, 30)  # 4 steps, and 12


def ready(strategy, task=PLAIN) -> FedAC:
    strategy.setup(Context(INITIAL, SAMPLES, task, seed=0))
    return strategy


def fold(strategy, delta, tau=0, client=0) -> bool:
    dispatch(strategy, 100 + strategy.models.version)  # somebody holds every version
    vector = torch.as_tensor(delta, dtype=torch.float64)
    update = Update(client, 0, vector, SAMPLES[client], asked=strategy.context.task)
    return strategy.fold(update, Staleness(updates=99, versions=tau))


def moved(strategy, *updates) -> list[float]:
    """How far the model moves when the buffer is filled with these."""
    before = strategy.model_for(0)
    assert [fold(strategy, *update) for update in updates][-1] is True
    return (strategy.model_for(0) - before).tolist()


# -- the whole algorithm, clients included --------------------------------------------------------


def local(task, w0, correction, parts):
    """The way that a client goes, and the mean of its own gradients: each counts as often as it
    has acted, now and through the momentum."""
    theta, speed, own = w0.copy(), 0.0, []
    for x, y in parts:
        own.append(gradient(theta, x, y) + task.optimizer.weight_decay * theta)
        speed = task.optimizer.momentum * speed + own[-1] + correction
        theta = theta - task.lr * speed
    acted = [sum(task.optimizer.momentum**j for j in range(len(own) - k)) for k in range(len(own))]
    return theta - w0, np.average(own, axis=0, weights=acted)


def by_the_formula(log, small, strategy, task, initial):
    """FedAC in double precision, with everything kept; who comes when is taken from the log."""
    n, m, u = small.clients, 0.0, 0.0
    w, c, ci = [initial], [np.zeros_like(initial)], [np.zeros_like(initial) for _ in range(n)]
    sent, buffer = {}, []
    for event in log:
        i = event.get("client")
        if event["event"] == "dispatch":
            sent[i] = event["dispatch"], w[-1], c[-1] - ci[i]
        if event["event"] != "upload":
            continue
        number, w0, correction = sent[i]
        x = small.prepare(small.x[small.train[i]]).double().numpy()
        y = small.y[small.train[i]].numpy()
        batches = schedule(task, ("client", i, "dispatch", number), len(y))
        parts = [(x[rows], y[rows]) for rows in batches]
        delta, own = local(task, w0, correction, parts)
        r, way = 1.0, w[-1] - w0
        if way.any():
            r = max(0.1, delta @ way / np.sqrt(delta @ delta) / np.sqrt(way @ way))
        buffer.append((r, delta, own - ci[i]))
        ci[i] = own
        if len(buffer) < strategy.buffer_size:
            continue
        q = np.array([r for r, _, _ in buffer])
        q /= q.sum()
        d = sum(q_i * delta for q_i, (_, delta, _) in zip(q, buffer, strict=True))
        m = strategy.beta1 * m + (1 - strategy.beta1) * d
        u = strategy.beta2 * u + (1 - strategy.beta2) * d**2
        ahead = strategy.beta1 * m + (1 - strategy.beta1) * d
        w.append(w[-1] + strategy.server_lr * ahead / (np.sqrt(u) + 1e-8))
        if strategy.control == "mean":
            c.append(np.mean(ci, axis=0))
        else:
            c.append(c[-1] + sum(q_i * dc for q_i, (_, _, dc) in zip(q, buffer, strict=True)))
        buffer = []
    return w, c, ci


def simulated(small, strategy, task, **options):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        module = nn.Linear(12, 4).double()
    devices = TwoSpeed(factor=9.0)
    quiet = {"adapt_epochs": 0, "eval_every": 10_000, "check": True}
    simulator = Simulator(small, module, strategy, task=task, devices=devices, **quiet, **options)
    log = []
    simulator.observers.append(lambda event: log.append(as_dict(event)))
    simulator.run(60)
    return simulator, log


@pytest.mark.parametrize("control", ["mean", "weighted"])
@pytest.mark.parametrize(("momentum", "weight_decay"), [(0.0, 0.0), (0.9, 0.01)])
@pytest.mark.parametrize("dropout", [Drop(probability=0.0), Drop(probability=0.2)])
def test_a_run_is_its_formula(small, control, momentum, weight_decay, dropout):
    """Corrections at every step, control variates of every client, weights, moments: all of it.
    The reference takes the mean of the gradients themselves, not what follows from the upload."""
    task = Task(
        epochs=2, batch_size=7, lr=0.02, optimizer=Sgd(momentum=momentum, weight_decay=weight_decay)
    )
    strategy = FedAC(buffer_size=3, beta1=0.8, beta2=0.95, control=control)
    simulator, log = simulated(small, strategy, task, concurrency=4, dropout=dropout)
    assert max(event.get("versions", 0) for event in log) > 3
    assert any(event["event"] == "drop" for event in log) == bool(dropout.probability)
    initial = simulator.server.context.initial.numpy()
    w, c, ci = by_the_formula(log, small, strategy, task, initial)
    assert len(w) == simulator.server.version + 1 == 21
    close = {"rtol": 1e-6, "atol": 1e-9}
    np.testing.assert_allclose(strategy.model_for(0).numpy(), w[-1], **close)
    np.testing.assert_allclose(strategy.controls.current.numpy(), c[-1], **close)
    for client in range(small.clients):
        np.testing.assert_allclose(strategy.variates.row(client).numpy(), ci[client], **close)
    assert len(strategy.models) == len(strategy.controls) <= 5  # those in use


def test_c_is_the_mean_of_all_control_variates_but_grows_beyond_it_if_weighted(small):
    task = Task(epochs=2, batch_size=8, lr=0.02)
    ratio = {}
    for control in ("mean", "weighted"):
        strategy = FedAC(buffer_size=2, control=control)
        simulated(small, strategy, task)
        mean = torch.stack([strategy.variates.row(client) for client in range(8)]).mean(0)
        ratio[control] = float(strategy.controls.current.norm() / mean.norm())
    assert ratio["mean"] == pytest.approx(1)
    assert ratio["weighted"] > 2


# -- the server's arithmetic, by hand -------------------------------------------------------------


def test_defaults_are_those_of_pace():
    strategy = FedAC()
    assert (strategy.beta1, strategy.beta2) == (0.9, 0.9)
    assert (strategy.server_lr, strategy.buffer_size) == (0.01, 5)


def test_both_moments_and_the_look_ahead_act():
    strategy = ready(FedAC(buffer_size=1, server_lr=1.0, beta1=0.5, beta2=0.75))
    # m = d/2, u = d^2/4, ahead = d/4 + d/2
    assert moved(strategy, ([4.0, -2.0],)) == pytest.approx([1.5, -1.5])
    # d = (4, 0): m = (3, -0.5), u = (7, 0.75), ahead = (3.5, -0.25)
    second = moved(strategy, ([4.0, 0.0],))
    assert second == pytest.approx([3.5 / 7**0.5, -0.25 / 0.75**0.5])


@given(seed=st.integers(0, 2**32 - 1), spread=st.floats(0, 8))
def test_no_number_moves_by_more_than_the_server_learning_rate(seed, spread):
    """Not even at the start or in a jump: sqrt(1.09) of it is the most that Cauchy and Schwarz
    allow, and constant updates come to 1."""
    draw = np.random.default_rng(seed)
    strategy = ready(FedAC(buffer_size=1))
    for _ in range(30):
        delta = draw.normal(size=2) * np.exp(spread * draw.normal(size=2))
        assert max(np.abs(moved(strategy, (delta,)))) <= 0.01 * 1.045


def test_clients_that_go_where_the_server_went_count_more():
    strategy = ready(FedAC(buffer_size=1, server_lr=1.0, beta1=0.0, beta2=0.0))
    moved(strategy, ([5.0, 0.0],))  # the server moves by (1, 0)
    strategy.buffer_size = 3
    fold(strategy, [3.0, 4.0], 1, 0)  # cos = 0.6
    fold(strategy, [-7.0, 0.0], 1, 1)  # cos = -1, floored
    fold(strategy, [0.0, -8.0], 0, 2)  # sent the current model: 1
    total = np.array([0.6 * 3 - 0.1 * 7, 0.6 * 4 - 8]) / (0.6 + 0.1 + 1.0)
    assert strategy.first.tolist() == pytest.approx(total.tolist())


@pytest.mark.parametrize(
    ("delta", "weight"),
    [([1.0, 0.0], 1.0), ([3.0, 4.0], 0.6), ([0.0, 2.0], 0.1), ([-0.5, 0.0], 0.1), ([-2, -1], 0.1)],
)
def test_negative_cosines_are_floored_not_mirrored(delta, weight):
    strategy = ready(FedAC(buffer_size=1, server_lr=1.0, beta1=0.0, beta2=0.0))
    moved(strategy, ([5.0, 0.0],))
    strategy.buffer_size = 9
    fold(strategy, delta, tau=1)
    assert strategy.weight == pytest.approx(weight)
    fold(strategy, delta, tau=0)
    assert strategy.weight == pytest.approx(weight + 1)


def test_the_direction_is_that_since_the_clients_own_dispatch():
    strategy = ready(FedAC(buffer_size=1, server_lr=1.0, beta1=0.0, beta2=0.0))
    moved(strategy, ([3.0, 0.0],))
    moved(strategy, ([0.0, 3.0],))  # (1, 0), then (0, 1)
    strategy.buffer_size = 9
    fold(strategy, [1.0, 0.0], tau=2)
    assert strategy.weight == pytest.approx(0.5**0.5)
    fold(strategy, [1.0, 0.0], tau=1)
    assert strategy.weight == pytest.approx(0.5**0.5 + 0.1)


# -- control variates -----------------------------------------------------------------------------


@pytest.mark.parametrize("momentum", [0.0, 0.5, 0.9, 0.99])
@pytest.mark.parametrize("steps", [1, 2, 7, 200])
def test_effective_steps_are_how_far_a_constant_gradient_goes(momentum, steps):
    speed = way = 0.0
    for _ in range(steps):
        speed = momentum * speed + 1.0
        way += speed
    assert effective_steps(
        Task(steps=steps, optimizer=Sgd(momentum=momentum)), 50
    ) == pytest.approx(way)


def test_the_divisor_counts_steps_not_epochs():
    strategy = ready(FedAC())
    fold(strategy, [4.0, 0.0], client=0)  # 2 epochs of 2 steps
    fold(strategy, [0.0, 12.0], client=3)  # 2 epochs of 6 steps
    assert strategy.variates.row(0).tolist() == pytest.approx([-4.0 / (4 * 0.1), 0.0])
    assert strategy.variates.row(3).tolist() == pytest.approx([0.0, -12.0 / (12 * 0.1)])
    assert strategy.variates.row(1).tolist() == [0.0, 0.0]


def test_what_a_client_is_sent_is_c_minus_its_own():
    strategy = ready(FedAC(buffer_size=2))
    assert strategy.task(0).upload == "delta"
    for client in range(4):
        assert strategy.vectors_for(client)["anchor"].tolist() == [0.0, 0.0]
    fold(strategy, [0.4, 0.0], client=0)
    assert strategy.vectors_for(0)["anchor"].tolist() == pytest.approx([1.0, 0.0])  # its own is -1
    assert strategy.vectors_for(1)["anchor"].tolist() == [0.0, 0.0]
    fold(strategy, [0.0, 0.8], client=1)
    assert strategy.controls.current.tolist() == pytest.approx([-1 / 4, -2 / 4])
    assert strategy.vectors_for(0)["anchor"].tolist() == pytest.approx([3 / 4, -2 / 4])
    assert strategy.vectors_for(1)["anchor"].tolist() == pytest.approx([-1 / 4, 6 / 4])
    assert strategy.vectors_for(2)["anchor"].tolist() == pytest.approx([-1 / 4, -2 / 4])


def test_a_stale_client_is_judged_by_the_correction_that_it_was_sent():
    """Client 2 goes by its correction alone: it has no gradient of its own."""
    strategy = ready(FedAC(buffer_size=1))
    fold(strategy, [0.4, 0.0], client=0)
    sent = strategy.vectors_for(2)["anchor"]
    assert sent.tolist() == pytest.approx([-1 / 4, 0.0])
    fold(strategy, [0.0, 2.0], client=1)
    fold(strategy, [0.3, 2.0], client=1)
    assert not torch.equal(strategy.vectors_for(2)["anchor"], sent)
    fold(strategy, -4 * 0.1 * sent, tau=2, client=2)
    assert strategy.variates.row(2).tolist() == pytest.approx([0.0, 0.0], abs=1e-12)


def drift(strategy, corrected):
    """Four clients with optima of their own around the server's model, which is the best for all
    and stays: how far they go in the end."""
    offsets = np.array([[2.0, 0.0], [-1.0, 3.0], [-1.0, -3.0], [0.0, 0.0]])
    ready(strategy, replace(PLAIN, steps=20))
    server = Server(strategy, strategy.context, refill="same")
    training = {action.client: action for action in server.join(range(4))}
    for _ in range(100):
        deltas = []
        for client in range(4):
            sent, way = training[client], np.zeros(2)
            for _ in range(20):
                own = 0.5 * (way - offsets[client])
                way = way - 0.1 * (own + corrected * sent.vectors["anchor"].numpy())
            deltas.append(way)
            update = Update(client, sent.number, torch.from_numpy(way), SAMPLES[client])
            [training[client]] = server.receive(update)
    return np.abs(deltas).max()


def test_corrections_keep_clients_from_drifting_apart():
    assert drift(FedAC(server_lr=1e-12), corrected=0) > 1
    assert drift(FedAC(server_lr=1e-12), corrected=1) < 1e-3


def test_momentum_that_is_kept_is_refused():
    """What the client did could not be told from what it did in earlier trainings."""
    task = Task(steps=4, keep_optimizer=True)
    with pytest.raises(PolytempoError, match="omit --keep-optimizer"):
        effective_steps(task, 10)
    without = Task(steps=4, keep_optimizer=True, optimizer=Sgd(momentum=0.0))
    assert effective_steps(without, 10) == 4
    with pytest.raises(PolytempoError, match="use --optimizer sgd, not adam"):
        effective_steps(Task(optimizer=Adam()), 10)
