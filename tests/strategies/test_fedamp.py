"""FedAMP against its formulas, clients included, and against what public code of it gets wrong."""

import math

import numpy as np
import pytest
import torch
from linear_model import gradient, schedule
from torch import nn

from polytempo import Context, PolytempoError, Server, Staleness, Task, Update
from polytempo.core.events import as_dict
from polytempo.core.objective import Plain, Proximal, Pull
from polytempo.core.optimizer import Sgd
from polytempo.core.rng import rng
from polytempo.simulation import Simulator
from polytempo.simulation.devices import TwoSpeed
from polytempo.simulation.dropout import Drop
from polytempo.strategies import PACE, STRATEGIES, Attention, FedAMP, FedAMPAsync, Standalone
from polytempo.training import AutogradSolver, Job
from solving import upload_of

INITIAL = torch.tensor([0.3, -0.2, 0.5, 0.1, 0.7], dtype=torch.float64)
SAMPLES = (10, 30, 60, 20, 40)
FORMS = {"sync": FedAMP, "async": FedAMPAsync}


def ready(strategy):
    strategy.setup(Context(INITIAL, SAMPLES, Task(), seed=0))
    return strategy


def upload(k: int) -> torch.Tensor:
    return INITIAL + torch.from_numpy(np.random.default_rng(k).normal(size=5))


def cosine(a, b):
    norms = math.sqrt((a @ a) * (b @ b))
    return float(a @ b) / norms if norms else 0.0


def attention(me, models, origin, sigma, own):
    """{client: weight} over `models`, a table of the vectors of some clients."""
    likeness = {j: cosine(models[me] - origin, w - origin) for j, w in models.items() if j != me}
    total = sum(math.exp(sigma * c) for c in likeness.values())
    row = {j: (1 - own) * math.exp(sigma * c) / total for j, c in likeness.items()}
    return row | {me: own if likeness else 1.0}


def mean(row, models):
    return sum(weight * models[j] for j, weight in row.items())


# -- the server ---------------------------------------------------------------------------------


@pytest.mark.parametrize("reference", ["model", "displacement"])
def test_cohorts_keep_their_models_and_send_the_mean_of_those_alike(reference):
    """Under partial participation: everything goes to the client that it is meant for."""
    strategy = FedAMP(graph=Attention(sigma=3.0, self_weight=0.6, reference=reference))
    server = Server(strategy, Context(INITIAL, SAMPLES, Task(), seed=2), concurrency=3)
    origin = INITIAL.numpy() if reference == "displacement" else np.zeros(5)
    models, rows = dict.fromkeys(range(5), INITIAL.numpy()), {}
    sent, anchored = server.join(range(5)), 0
    for cohort in range(8):
        uploads = {}
        for k, dispatch in enumerate(sent):
            i = dispatch.client
            np.testing.assert_allclose(dispatch.params.numpy(), models[i], atol=1e-12)
            assert dispatch.task.objective == Proximal(1.0)
            if i in rows:
                anchored += 1
                expected = mean(rows[i], models)
                np.testing.assert_allclose(dispatch.vectors["anchor"].numpy(), expected, atol=1e-6)
                assert dispatch.nbytes == 2 * dispatch.params.nbytes
            else:  # all models are the initial one, as far as this client knows: the received
                assert not dispatch.vectors
                assert dispatch.nbytes == dispatch.params.nbytes
            theta = upload(10 * cohort + k)
            uploads[i] = theta.numpy()
            following = server.receive(Update(i, dispatch.number, theta, 1))
        rows |= {i: attention(i, uploads, origin, 3.0, 0.6) for i in uploads}
        models |= uploads
        graph = strategy.collaboration()
        for i in uploads:
            dense = [rows[i].get(j, 0.0) for j in range(5)]
            np.testing.assert_allclose(graph[i], dense, atol=1e-6)
        sent = following
    assert anchored > 12
    for i in range(5):
        np.testing.assert_allclose(strategy.model_for(i).numpy(), models[i], atol=1e-12)


@pytest.mark.parametrize("reference", ["model", "displacement"])
def test_on_arrival_the_senders_row_is_estimated_and_the_upload_kept(reference):
    strategy = FedAMPAsync(graph=Attention(sigma=3.0, self_weight=0.6, reference=reference))
    server = Server(strategy, Context(INITIAL, SAMPLES, Task(), seed=2), concurrency=3)
    origin = INITIAL.numpy() if reference == "displacement" else np.zeros(5)
    models, rows = dict.fromkeys(range(5), INITIAL.numpy()), {}
    training, anchored = list(server.join(range(5))), 0
    for k in range(30):
        dispatch = training.pop(k % 3)
        i, theta = dispatch.client, upload(k)
        [started] = server.receive(Update(i, dispatch.number, theta, 1))
        models[i] = theta.numpy()
        rows[i] = attention(i, models, origin, 3.0, 0.6)
        j = started.client
        np.testing.assert_allclose(started.params.numpy(), models[j], atol=1e-12)
        if j in rows:  # the row of j's last upload, over the models as they are now
            anchored += 1
            np.testing.assert_allclose(
                started.vectors["anchor"].numpy(), mean(rows[j], models), atol=1e-6
            )
        else:
            assert not started.vectors
        training.append(started)
    assert anchored > 20


def test_models_as_they_are_all_look_alike_and_displacements_do_not():
    """Two clients that went opposite ways from a far initial model."""
    far = 100 * torch.ones(5, dtype=torch.float64)
    rows = {}
    for reference in ("model", "displacement"):
        strategy = FedAMP(graph=Attention(reference=reference))
        strategy.setup(Context(far, (1, 1, 1), Task(), seed=0))
        for client, way in enumerate([1.0, -1.0, 0.9]):
            step = way * torch.tensor([1.0, 0, 0, 0, 0], dtype=torch.float64)
            strategy.fold(Update(client, 0, far + step, 1), Staleness(0, 0))
        strategy.close_cohort()
        rows[reference] = strategy.collaboration()[0]
    np.testing.assert_allclose(rows["model"], [0.7, 0.15, 0.15], atol=1e-3)
    np.testing.assert_allclose(rows["displacement"], [0.7, 0.0, 0.3], atol=1e-6)


def test_a_cohort_of_one_is_its_own_anchor():
    strategy = ready(FedAMP())
    strategy.fold(Update(3, 0, upload(1), 1), Staleness(0, 0))
    assert strategy.close_cohort() is True
    torch.testing.assert_close(strategy.model_for(3), upload(1))
    torch.testing.assert_close(strategy.vectors_for(3)["anchor"], upload(1))
    assert all(strategy.vectors_for(client) == {} for client in (0, 1, 2, 4))


def test_defaults_are_those_of_pace():
    for form in FORMS.values():
        strategy = ready(form())
        assert (strategy.lam, strategy.graph) == (1.0, Attention(sigma=10, self_weight=0.7))
        assert strategy.task(0).objective == Proximal(1.0, power=2)
        assert strategy.task(0).extras == {}
        assert ready(form(lam=0)).task(0).objective == Plain()


@pytest.mark.parametrize("name", ["fedamp", "fedamp-async"])
def test_a_push_away_is_refused_before_the_run(name):
    with pytest.raises(PolytempoError, match=r"lam.*greater than or equal to 0, got -1"):
        STRATEGIES.create(f"{name}:lam=-1")


# -- the client ---------------------------------------------------------------------------------


def network() -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(12, 6), nn.Tanh(), nn.Linear(6, 4)).double()


def trained_by_autograd(fed, client, start, anchor, lam, task, stream):
    """torch's own SGD on F + (lam/2) ||theta - u||^2, with the term in the autograd graph."""
    model = network()
    nn.utils.vector_to_parameters(start.clone(), model.parameters())
    given = {"momentum": task.optimizer.momentum, "weight_decay": task.optimizer.weight_decay}
    optimiser = torch.optim.SGD(model.parameters(), task.lr, **given)
    x, y = fed.x[fed.train[client]].double(), fed.y[fed.train[client]]
    for epoch in range(task.epochs):
        order = torch.from_numpy(rng(4, *stream, "epoch", epoch).permutation(len(y)))
        for rows in order.split(task.batch_size):
            optimiser.zero_grad()
            theta = nn.utils.parameters_to_vector(model.parameters())
            penalty = lam / 2 * (theta - anchor).square().sum()
            (nn.functional.cross_entropy(model(x[rows]), y[rows]) + penalty).backward()
            optimiser.step()
    return nn.utils.parameters_to_vector(model.parameters()).detach()


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("lam", [0.0, 0.3, 1.0])
def test_the_penalty_has_a_gradient(form, lam, small):
    task = Task(epochs=2, batch_size=6, lr=0.05)
    trainer = AutogradSolver(network(), small, seed=4)
    initial = trainer.layout.read()
    strategy = FORMS[form](lam=lam)
    server = Server(strategy, Context(initial, small.samples, task, 0))
    sent, following = {dispatch.client: dispatch for dispatch in server.join(range(8))}, {}
    for client, dispatch in sent.items():
        noise = torch.from_numpy(np.random.default_rng(client).normal(size=len(initial)))
        actions = server.receive(Update(client, dispatch.number, initial + 0.5 * noise, 1))
        following |= {action.client: action for action in actions}
    dispatch = following[7]
    assert len(small.y[small.train[7]]) % 6 != 1  # no merged last batch: the schedules agree
    stream = ("client", 7, "dispatch", dispatch.number)
    anchor = dispatch.vectors["anchor"]
    job = Job(7, dispatch.params, dispatch.task, stream, vectors={"anchor": anchor})
    found = upload_of(trainer, job)
    given = (small, 7, dispatch.params, anchor)
    expected = trained_by_autograd(*given, lam, task, stream)
    torch.testing.assert_close(found, expected, rtol=1e-8, atol=1e-10)
    alone = trained_by_autograd(*given, 0.0, task, stream)
    assert torch.allclose(found, alone, rtol=1e-8, atol=1e-10) == (lam == 0)
    away = (alone - dispatch.vectors["anchor"]).norm() - (found - dispatch.vectors["anchor"]).norm()
    assert away > 0 or lam == 0


# -- whole runs ---------------------------------------------------------------------------------


def local(task, start, anchor, lam, parts):
    theta, speed = start.copy(), 0.0
    for x, y in parts:
        pull = lam * (theta - anchor)
        decay = task.optimizer.weight_decay * theta
        speed = task.optimizer.momentum * speed + gradient(theta, x, y) + pull + decay
        theta = theta - task.lr * speed
    return theta


def by_the_formula(log, small, synchronous, lam, sigma, own, task, initial):
    """FedAMP in double precision; who comes when is taken from the log."""
    models, rows = dict.fromkeys(range(8), initial), {}
    sent, cohort = {}, {}
    for event in log:
        i = event.get("client")
        if event["event"] == "dispatch":
            anchor = mean(rows[i], models) if i in rows else models[i]
            sent[i] = event["dispatch"], models[i], anchor
        elif event["event"] == "drop":
            del sent[i]
        elif event["event"] == "upload":
            number, start, anchor = sent.pop(i)
            x = small.prepare(small.x[small.train[i]]).double().numpy()
            y = small.y[small.train[i]].numpy()
            batches = schedule(task, ("client", i, "dispatch", number), len(y))
            parts = [(x[rows], y[rows]) for rows in batches]
            cohort[i] = local(task, start, anchor, lam, parts)
        if (sent and synchronous) or event["event"] not in ("drop", "upload"):
            continue
        models |= cohort
        compared = cohort if synchronous else models
        rows |= {j: attention(j, compared, initial, sigma, own) for j in cohort}
        cohort = {}
    return models, rows


def simulated(small, strategy, task, **options):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        module = nn.Linear(12, 4).double()
    quiet = {"adapt_epochs": 0, "eval_every": 10_000, "check": True, "concurrency": 4}
    world = {"task": task, "devices": TwoSpeed(factor=9.0), **quiet, **options}
    simulator = Simulator(small, module, strategy, **world)
    log = []
    simulator.observers.append(lambda event: log.append(as_dict(event)))
    simulator.run(60)
    return simulator, log


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dropout", [Drop(probability=0.0), Drop(probability=0.2)])
def test_a_run_is_its_formula(small, form, dropout):
    task = Task(epochs=2, batch_size=7, lr=0.05, optimizer=Sgd(momentum=0.5, weight_decay=0.01))
    strategy = FORMS[form](graph=Attention(sigma=4.0, self_weight=0.5), lam=0.8)
    simulator, log = simulated(small, strategy, task, dropout=dropout)
    assert any(event["event"] == "drop" for event in log) == bool(dropout.probability)
    initial = simulator.server.context.initial.numpy()
    models, rows = by_the_formula(log, small, form == "sync", 0.8, 4.0, 0.5, task, initial)
    graph = strategy.collaboration()
    for client in range(8):
        # (rows are kept in single precision, and act on the models through the anchor)
        np.testing.assert_allclose(strategy.model_for(client).numpy(), models[client], atol=1e-6)
        if client in rows:
            dense = [rows[client].get(j, 0.0) for j in range(8)]
            np.testing.assert_allclose(graph[client], dense, atol=1e-5)
    assert len(rows) > 5


def test_without_the_penalty_it_is_local_training_to_the_bit(small):
    """And with it, it is not: public code builds the penalty of what has no gradient."""
    task = Task(epochs=2, batch_size=7, lr=0.05)
    graph = Attention(reference="model")
    alone, uploads = simulated(small, Standalone(), task, refill="idle")
    without, log = simulated(small, FedAMPAsync(lam=0, graph=graph), task)
    assert [e for e in log if e["event"] == "upload"] == [
        e for e in uploads if e["event"] == "upload"
    ]
    penalised, _ = simulated(small, FedAMPAsync(graph=graph), task)
    changed = 0
    for client in range(8):
        mine = alone.strategy.model_for(client)
        assert torch.equal(without.strategy.model_for(client), mine)
        changed += not torch.allclose(penalised.strategy.model_for(client), mine, atol=1e-3)
    assert changed > 5


# -- on PACE's machinery --------------------------------------------------------------------------


def test_on_pace_all_but_the_weights_is_paces(small):
    task = Task(epochs=2, batch_size=8, lr=0.05)
    named, log = simulated(small, STRATEGIES.create("fedamp-pace:omega=20"), task)
    for plugged in (
        PACE(graph=Attention(), omega=20),
        STRATEGIES.create("pace:graph=fedamp,omega=20"),
    ):
        same, events = simulated(small, plugged, task)
        assert events == log and same.fingerprint == named.fingerprint
        for client in range(8):
            mine, theirs = named.strategy.model_for(client), plugged.model_for(client)
            assert torch.equal(mine, theirs)
    assert named.messages["multicast"] > 0
    assert named.strategy.vectors_for(0) == {}
    assert named.strategy.task(0).objective == Pull(0.01, "cosine")
    other, _ = simulated(small, PACE(omega=20), task)
    assert not torch.equal(other.strategy.model_for(0), named.strategy.model_for(0))
    weights = np.diag(named.strategy.collaboration())
    assert np.count_nonzero(np.isclose(weights, 0.7)) > 5
