"""FedSaC against its formulas, from the features of the clients to the models that they get."""

import math
from copy import deepcopy

import numpy as np
import pytest
import quadprog
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.linalg import subspace_angles
from sklearn.decomposition import PCA
from torch import nn

from polytempo import Context, Server, Staleness, Task, Update
from polytempo.core.errors import Diverged, Refused
from polytempo.core.objective import Pull
from polytempo.simulation import Simulator
from polytempo.simulation.devices import TwoSpeed
from polytempo.strategies import (
    PACE,
    STRATEGIES,
    Attention,
    Complement,
    FedSaC,
    FedSaCAsync,
    FedSaCPACE,
    Likeness,
    PFedGraph,
    PFedGraphAsync,
)

INITIAL = torch.tensor([0.3, -0.2, 0.5, 0.1, 0.7], dtype=torch.float64)
SAMPLES = (10, 30, 60, 20, 40)
FORMS = {"fedsac": FedSaC, "fedsac-async": FedSaCAsync, "fedsac-pace": FedSaCPACE}


def ready(strategy):
    strategy.setup(Context(INITIAL, SAMPLES, Task(), seed=0))
    return strategy


def upload(k: int) -> torch.Tensor:
    return INITIAL + torch.from_numpy(np.random.default_rng(k).normal(size=5))


def basis(k: int) -> torch.Tensor:
    draw = np.random.default_rng([7, k])
    return torch.from_numpy(np.linalg.qr(draw.normal(size=(6, 3)))[0].T.copy())


def fold(strategy, client, k, tau=0):
    extras = {"basis": basis(k)} if "basis" in strategy.task(client).extras else {}
    update = Update(client, 0, upload(k), SAMPLES[client], extras)
    return strategy.fold(update, Staleness(tau, tau))


def row_by_solver(me, models, bases, prior, graph, initial=INITIAL):
    """The row problem, stated with principal angles and cosines, by a general solver. `models`,
    `bases` (None: not known) and `prior` are of the clients that take part."""
    moved = [np.asarray(model) - initial.numpy() for model in models]
    penalty = []
    for other, its_basis in zip(moved, bases, strict=True):
        norms = math.sqrt((moved[me] @ moved[me]) * (other @ other))
        cosine = float(moved[me] @ other) / norms if norms else 0.0
        if graph.clip is not None and cosine > graph.clip:
            cosine = 1.0
        overlap = 1.0
        if its_basis is not None:
            overlap = math.cos(subspace_angles(bases[me].numpy().T, its_basis.numpy().T).mean())
        penalty.append(graph.alpha * overlap - graph.beta * cosine)
    n = len(models)
    constraints = np.column_stack([np.ones(n), np.eye(n)])
    bounds = np.concatenate([[1.0], np.zeros(n)])
    linear = 2 * np.asarray(prior) - np.array(penalty)
    return quadprog.solve_qp(2 * np.eye(n), linear, constraints, bounds, meq=1)[0]


GRAPHS = [
    Complement(alpha=0.6, beta=0.9),
    Complement(alpha=0.9, beta=0.4, clip=None),
    Complement(alpha=0.0, beta=0.7),
    Complement(alpha=0.7, beta=0.0),
]


# -- the server -----------------------------------------------------------------------------------


@pytest.mark.parametrize("graph", GRAPHS, ids=str)
def test_cohorts_are_mixed_by_the_formula_under_partial_participation(graph):
    strategy = ready(FedSaC(graph=graph))
    stored, kept = [INITIAL.numpy() for _ in SAMPLES], {}
    for number, cohort in enumerate([[3, 0, 4], [1, 3], [2, 4, 0, 1], [3]]):
        keys = [10 * number + k for k in range(len(cohort))]
        for client, k in zip(cohort, keys, strict=True):
            assert fold(strategy, client, k) is False
            kept[client] = basis(k)
        assert strategy.close_cohort() is True
        sizes = np.array([SAMPLES[c] for c in cohort], dtype=float)
        uploads = [upload(k).numpy() for k in keys]
        bases = [kept[client] for client in cohort]
        for k, client in enumerate(cohort):
            row = row_by_solver(k, uploads, bases, sizes / sizes.sum(), graph)
            stored[client] = sum(w * m for w, m in zip(row, uploads, strict=True))
            np.testing.assert_allclose(strategy.rows.row(client)[cohort], row, atol=1e-6)
            assert strategy.rows.row(client).sum() == pytest.approx(1)
    for client in range(5):
        np.testing.assert_allclose(strategy.model_for(client).numpy(), stored[client], atol=1e-6)


@pytest.mark.parametrize("graph", GRAPHS, ids=str)
def test_on_arrival_the_last_basis_of_each_client_counts(graph):
    strategy = ready(FedSaCAsync(graph=graph))
    stored, kept = [INITIAL.numpy() for _ in SAMPLES], [None] * 5
    prior = np.array(SAMPLES) / sum(SAMPLES)
    for k, client in enumerate([1, 4, 1, 0, 2, 1, 4]):  # client 3 never comes
        assert fold(strategy, client, k, tau=9) is True
        stored[client], kept[client] = upload(k).numpy(), basis(k)
        row = row_by_solver(client, stored, kept, prior, graph)
        stored[client] = sum(w * m for w, m in zip(row, stored, strict=True))
        np.testing.assert_allclose(strategy.rows.row(client), row, atol=1e-6)
    for client in range(5):
        np.testing.assert_allclose(strategy.model_for(client).numpy(), stored[client], atol=1e-6)


@pytest.mark.parametrize("form", ["sync", "async"])
def test_without_alpha_it_is_pfedgraph_to_the_bit(form):
    graph = Likeness(gamma=0.8, clip=0.9)
    mine, theirs = (
        (FedSaC(graph=Complement(alpha=0, beta=0.8)), PFedGraph(graph=graph))
        if form == "sync"
        else (FedSaCAsync(graph=Complement(alpha=0, beta=0.8)), PFedGraphAsync(graph=graph))
    )
    for strategy in (ready(mine), ready(theirs)):
        for k, client in enumerate([1, 4, 0, 3, 1, 2]):
            fold(strategy, client, k % 4 + client // 3)  # some uploads are equal
            if k % 3 == 2:
                strategy.close_cohort()
    np.testing.assert_array_equal(mine.collaboration(), theirs.collaboration())
    for client in range(5):
        assert torch.equal(mine.model_for(client), theirs.model_for(client))


def test_defaults_are_those_of_pace():
    for form in FORMS.values():
        strategy = ready(form())
        assert strategy.graph == Complement(alpha=1.5, beta=1.5, k=3, clip=0.9)
        assert strategy.task(0).objective == Pull(0.01, "cosine")
        assert strategy.task(0).extras == {"basis": 3}
        assert strategy.vectors_for(0) == {}
    assert ready(FedSaC(lam=0, graph=Complement(k=2))).task(0).extras == {"basis": 2}


# -- refusals -------------------------------------------------------------------------------------

GOOD = torch.eye(3, 6, dtype=torch.float64)
BAD = {
    "none": ({}, r"sent the extras \[\], expected \['basis'\]"),
    "another name": ({"bases": GOOD}, r"sent the extras \['bases'\], expected \['basis'\]"),
    "one too many": ({"basis": GOOD, "more": GOOD}, r"\['basis', 'more'\], expected \['basis'\]"),
    "too few rows": ({"basis": GOOD[:2]}, r"'basis' of shape \[2, 6\], expected 3 rows"),
    "too many rows": ({"basis": torch.eye(4, 6)}, r"'basis' of shape \[4, 6\], expected 3 rows"),
    "flat": ({"basis": torch.eye(3, 6).flatten()}, r"'basis' of shape \[18\]"),
    "NaN": ({"basis": GOOD * torch.nan}, "3 rows of finite numbers"),
    "infinite": ({"basis": GOOD + torch.inf}, "3 rows of finite numbers"),
    "of another model": ({"basis": torch.eye(3, 5)}, r"\[3, 5\], others \[3, 6\]"),
    "no basis": ({"basis": 3 * GOOD}, "neither orthonormal nor zero"),
}


def same(a, b):
    """Equal to the bit, wherever in a state."""
    if isinstance(a, torch.Tensor | np.ndarray):
        return a.dtype == b.dtype and a.shape == b.shape and bool((a == b).all())
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
    return bool(a == b)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("wrong", BAD)
def test_a_wrong_basis_is_refused_and_leaves_no_trace(wrong, form):
    extras, message = BAD[wrong]
    server = Server(FORMS[form](), Context(INITIAL, SAMPLES, Task(), 0))
    sent = server.join(range(5))
    for k, dispatch in enumerate(sent[:3]):
        server.receive(Update(dispatch.client, dispatch.number, upload(k), 1, {"basis": basis(k)}))
    before, mine = deepcopy(server.state_dict()), sent[3]
    with pytest.raises(Refused, match=f"client {mine.client} .*{message}"):
        server.receive(Update(mine.client, mine.number, upload(8), 1, extras))
    assert same(server.state_dict(), before)
    server.receive(Update(mine.client, mine.number, upload(8), 1, {"basis": GOOD}))
    assert server.updates == 4


def test_extras_that_nobody_asked_for_are_refused():
    server = Server(PFedGraph(), Context(INITIAL, SAMPLES, Task(), 0))
    [mine, *_] = server.join(range(5))
    with pytest.raises(Refused, match=r"sent the extras \['basis'\], expected \[\]"):
        server.receive(Update(mine.client, mine.number, upload(0), 1, {"basis": GOOD}))


# -- whole runs: features, bases, rows, models ----------------------------------------------------


def network(units: int = 6) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(12, units), nn.Tanh(), nn.Linear(units, 4)).double()


def simulated(small, strategy, task=None, updates=40, **options):
    """The simulator when it has run, and all updates that its server was sent."""
    simulator = Simulator(
        small,
        network(),
        strategy,
        task=task or Task(epochs=2, batch_size=8, lr=0.1),
        devices=TwoSpeed(factor=9.0),
        adapt_epochs=0,
        eval_every=10_000,
        check=True,
        **options,
    )
    sent, receive = [], simulator.server.receive

    def spying(update):
        sent.append(update)
        return receive(update)

    simulator.server.receive = spying
    simulator.run(updates)
    return simulator, sent


def features_of(small, client, vector):
    """What enters the last layer, of the client's training samples, by numpy."""
    weights, biases = vector[:72].numpy().reshape(6, 12), vector[72:78].numpy()
    x = small.prepare(small.x[small.train[client]]).double().numpy()
    return np.tanh(x @ weights.T + biases)


@pytest.mark.parametrize("form", FORMS)
def test_clients_upload_the_principal_directions_of_their_features(small, form):
    _, updates = simulated(small, FORMS[form](graph=Complement(k=2)), concurrency=4)
    assert len(updates) == 40
    for update in updates:
        features = features_of(small, update.client, update.vector)
        found = update.extras["basis"].numpy()
        np.testing.assert_allclose(found @ found.T, np.eye(2), atol=1e-9)
        expected = PCA(2, svd_solver="full").fit(features).components_
        assert subspace_angles(found.T, expected.T).max() < 1e-6
        # by hand: of all pairs of directions, these keep the most variance
        variance = np.cov(features.T)
        kept = np.trace(found @ variance @ found.T)
        assert kept == pytest.approx(np.linalg.eigvalsh(variance)[-2:].sum())


@pytest.mark.parametrize("graph", GRAPHS[:2], ids=str)
def test_a_run_is_its_formula(small, graph):
    """From the uploads on: bases from the features, angles, rows, and the models handed out."""
    initial = nn.utils.parameters_to_vector(network().parameters()).detach()
    prior = np.array(small.samples) / sum(small.samples)

    def basis_of(update):
        features = features_of(small, update.client, update.vector)
        return torch.from_numpy(PCA(3, svd_solver="full").fit(features).components_)

    strategy = FedSaCAsync(graph=graph)
    _, updates = simulated(small, strategy, concurrency=4)
    stored, kept = [initial.numpy() for _ in range(8)], [None] * 8
    for update in updates:
        i = update.client
        stored[i], kept[i] = update.vector.numpy(), basis_of(update)
        row = row_by_solver(i, stored, kept, prior, graph, initial)
        stored[i] = sum(w * m for w, m in zip(row, stored, strict=True))
    for client in range(8):
        np.testing.assert_allclose(strategy.model_for(client).numpy(), stored[client], atol=1e-5)

    strategy = FedSaC(graph=graph)
    simulator, updates = simulated(small, strategy, concurrency=4)
    stored = [initial.numpy() for _ in range(8)]
    for begin in range(0, 40, 4):
        cohort = updates[begin : begin + 4]
        uploads = [update.vector.numpy() for update in cohort]
        bases = [basis_of(update) for update in cohort]
        sizes = np.array([small.samples[update.client] for update in cohort], dtype=float)
        for k, update in enumerate(cohort):
            row = row_by_solver(k, uploads, bases, sizes / sizes.sum(), graph, initial)
            stored[update.client] = sum(w * m for w, m in zip(row, uploads, strict=True))
    assert simulator.server.version == 10
    for client in range(8):
        np.testing.assert_allclose(strategy.model_for(client).numpy(), stored[client], atol=1e-5)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("lr", [1e20, 1e200, 1e300])
def test_training_that_diverges_is_an_error_that_says_so(small, form, lr):
    """Features that are not finite have no principal directions."""
    task = Task(epochs=2, batch_size=8, lr=lr)
    with pytest.raises(Diverged, match="diverged; lower the learning rate"):
        simulated(small, FORMS[form](), task, updates=100)


# -- on PACE's machinery --------------------------------------------------------------------------


def test_on_pace_all_but_the_weights_is_paces(small):
    named, _ = simulated(small, STRATEGIES.create("fedsac-pace:omega=20"), concurrency=4)
    for plugged in (
        PACE(graph=Complement(), omega=20),
        STRATEGIES.create("pace:graph=fedsac,omega=20"),
    ):
        other, _ = simulated(small, plugged, concurrency=4)
        assert other.fingerprint == named.fingerprint
        for client in range(8):
            assert torch.equal(plugged.model_for(client), named.strategy.model_for(client))
    assert named.messages["multicast"] > 0


ESTIMATORS = [
    Attention(sigma=2.0, self_weight=0.3),
    Attention(self_weight=0.0),
    Complement(alpha=0.5, beta=0.4),
    Complement(alpha=0.2, beta=0.6, k=3, reference="model"),
]


@pytest.mark.parametrize("graph", ESTIMATORS, ids=str)
def test_without_decay_the_buffer_is_a_weighted_mean_whatever_the_estimator(graph):
    """Eq. 7-10: phi_0 = sum of W_0k theta_k over j's own upload and what came since, normalised."""

    @settings(max_examples=25)
    @given(st.lists(st.sampled_from([1, 2, 3, 4]), min_size=1, max_size=8), st.randoms())
    def check(senders, random):
        pace = ready(PACE(a=0.0, graph=graph))
        for client in range(5):  # rows other than p, with weight on several clients
            fold(pace, client, client)
        fold(pace, 0, 50)  # 0's upload empties its sequence
        row = pace.rows.row(0)
        assert np.count_nonzero(row) > 1
        folded = [(client, 60 + k) for k, client in enumerate(senders)]
        random.shuffle(folded)
        for client, k in folded:
            fold(pace, client, k, tau=k)
        weights = [row[0]] + [row[client] for client, _ in folded]
        models = [upload(50)] + [upload(k) for _, k in folded]
        if sum(weights) > 0:
            mean = sum(w * m for w, m in zip(weights, models, strict=True)) / sum(weights)
            np.testing.assert_allclose(pace.model_for(0).numpy(), mean.numpy(), atol=1e-9)
        np.testing.assert_array_equal(pace.rows.row(0), row)

    check()


@pytest.mark.parametrize("graph", ESTIMATORS, ids=str)
def test_on_pace_the_row_is_the_estimators_over_the_buffered_models(graph):
    pace = ready(PACE(graph=graph))
    prior, kept = np.array(SAMPLES) / sum(SAMPLES), [None] * 5
    for k, client in enumerate([1, 4, 2, 1, 0, 2, 4]):
        buffered = [pace.model_for(j).numpy() for j in range(5)]
        buffered[client], kept[client] = upload(k).numpy(), basis(k)
        fold(pace, client, k, tau=k)
        origin = INITIAL if graph.reference == "displacement" else torch.zeros_like(INITIAL)
        if isinstance(graph, Complement):
            row = row_by_solver(client, buffered, kept, prior, graph, origin)
        else:
            moved = [model - origin.numpy() for model in buffered]
            ways = [m / (math.sqrt(m @ m) or 1.0) for m in moved]
            powers = np.exp([graph.sigma * float(ways[client] @ way) for way in ways])
            powers[client] = 0
            row = (1 - graph.self_weight) * powers / powers.sum()
            row[client] = graph.self_weight
        np.testing.assert_allclose(pace.rows.row(client), row, atol=1e-6)
