"""pFedGraph, as published and naively asynchronous, against a derivation over plain lists."""

import math

import numpy as np
import torch
from scipy.optimize import minimize

from polytempo import Context, Staleness, Task, Update
from polytempo.core.objective import Pull
from polytempo.strategies import Likeness, PFedGraph, PFedGraphAsync

INITIAL = torch.tensor([0.3, -0.2, 0.5, 0.1])
SAMPLES = (10, 30, 60, 20, 40)


def ready(strategy):
    strategy.setup(Context(INITIAL, SAMPLES, Task(), seed=0))
    return strategy


def upload(k: int) -> torch.Tensor:
    return INITIAL + torch.from_numpy(np.random.default_rng(k).normal(size=4)).float()


def row_by_optimiser(models, own, prior, gamma, clip):
    """Eq. 2 with cosines of displacements, by a general constrained optimiser."""
    start = INITIAL.double().numpy()
    moved = [m.double().numpy() - start for m in models]
    mine = own.double().numpy() - start
    unlike = []
    for other in moved:
        norms = math.sqrt((mine @ mine) * (other @ other))
        cosine = float(mine @ other) / norms if norms else 0.0
        unlike.append(-1.0 if clip is not None and cosine > clip else -cosine)
    unlike, n = np.array(unlike), len(models)
    found = minimize(
        lambda x: ((x - prior) ** 2).sum() + gamma * unlike @ x,
        np.full(n, 1 / n),
        jac=lambda x: 2 * (x - prior) + gamma * unlike,
        bounds=[(0, None)] * n,
        constraints={"type": "eq", "fun": lambda x: x.sum() - 1},
        options={"ftol": 1e-15, "maxiter": 500},
    )
    return found.x


def test_aggregates_go_to_their_own_clients_under_partial_participation():
    strategy = ready(PFedGraph(graph=Likeness(gamma=0.7, clip=0.9)))
    cohort = [3, 0, 4]
    uploads = [upload(k) for k in range(3)]
    for client, theta in zip(cohort, uploads, strict=True):
        assert strategy.fold(Update(client, 0, theta, SAMPLES[client]), Staleness(0, 0)) is False
    assert torch.equal(strategy.model_for(3), INITIAL)
    assert strategy.close_cohort() is True
    sizes = np.array([SAMPLES[c] for c in cohort], dtype=float)
    for client, theta in zip(cohort, uploads, strict=True):
        row = row_by_optimiser(uploads, theta, sizes / sizes.sum(), 0.7, 0.9)
        expected = sum(w * m.double() for w, m in zip(row, uploads, strict=True))
        np.testing.assert_allclose(strategy.model_for(client).double(), expected, atol=1e-5)
        np.testing.assert_allclose(strategy.rows.row(client)[cohort], row, atol=1e-5)
        assert strategy.rows.row(client)[[1, 2]].tolist() == [0.0, 0.0]
    for bystander in (1, 2):
        assert torch.equal(strategy.model_for(bystander), INITIAL)


def test_the_pull_is_towards_the_received_model_unless_asked_otherwise():
    assert ready(PFedGraph()).task(0).objective == Pull(0.01, "cosine")
    assert ready(PFedGraph(lam=-0.01)).task(0).objective == Pull(-0.01, "cosine")


def test_naive_asynchronous_form_mixes_the_stored_models_at_once():
    strategy = ready(PFedGraphAsync(graph=Likeness(gamma=0.7)))
    stored = [INITIAL.double() for _ in SAMPLES]
    prior = np.array(SAMPLES) / sum(SAMPLES)
    for k, client in enumerate([1, 4, 1, 0, 2]):
        theta = upload(k)
        assert strategy.fold(Update(client, k, theta, 1), Staleness(9, 9)) is True
        stored[client] = theta.double()
        row = row_by_optimiser(stored, theta, prior, 0.7, clip=None)
        stored[client] = sum(w * m for w, m in zip(row, stored, strict=True))
    for client in range(5):
        np.testing.assert_allclose(strategy.model_for(client).double(), stored[client], atol=1e-5)
