"""The collaboration row is the exact solution of its quadratic program."""

import numpy as np
import pytest
import quadprog
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from polytempo.core.bank import ModelBank
from polytempo.core.errors import PolytempoError
from polytempo.storage import load_state, save_state
from polytempo.strategies.estimators import Likeness, project_to_simplex
from polytempo.strategies.graph import CollaborationGraph

# Multiples of 1/8: ties are frequent.
POINTS = hnp.arrays(
    np.float64, st.integers(1, 24), elements=st.integers(-16, 16).map(lambda k: k / 8)
)


def solve_qp(prior, gamma, unlike):
    """min ||x - p||^2 + gamma s.x over the simplex, by a general active-set solver."""
    n = len(prior)
    constraints = np.column_stack([np.ones(n), np.eye(n)])
    bounds = np.concatenate([[1.0], np.zeros(n)])
    linear = 2 * prior - gamma * unlike
    return quadprog.solve_qp(2 * np.eye(n), linear, constraints, bounds, meq=1)[0]


@given(POINTS, st.floats(0, 5))
@settings(deadline=None, max_examples=200)
def test_projection_solves_the_row_problem(unlike, gamma):
    prior = np.arange(1, len(unlike) + 1) / sum(range(1, len(unlike) + 1))
    found = project_to_simplex(prior - gamma / 2 * unlike)
    np.testing.assert_allclose(found, solve_qp(prior, gamma, unlike), atol=1e-9)


@given(POINTS)
def test_projection_is_on_the_simplex_and_optimal(point):
    found = project_to_simplex(point)
    assert found.min() >= 0
    assert found.sum() == pytest.approx(1)
    # KKT: where x > 0, point - x is one constant, and elsewhere it is no larger.
    gap = point - found
    threshold = gap[found > 0]
    np.testing.assert_allclose(threshold, threshold[0], atol=1e-12)
    assert gap.max() <= threshold[0] + 1e-12


def test_projection_by_hand():
    np.testing.assert_allclose(project_to_simplex(np.array([3.0])), [1.0])
    np.testing.assert_allclose(project_to_simplex(np.array([0.5, 0.5, 0.5])), [1 / 3] * 3)
    np.testing.assert_allclose(project_to_simplex(np.array([1.0, 0.8, -1.0])), [0.6, 0.4, 0.0])
    np.testing.assert_allclose(project_to_simplex(np.array([9.0, 0.0])), [1.0, 0.0])


def test_row_favours_the_alike_and_falls_back_to_sizes_without_gamma():
    initial = torch.zeros(3)
    bank = ModelBank(3, initial)
    for client, vector in enumerate([[1.0, 0.0, 0.0], [0.9, 0.1, 0.0], [-1.0, 0.0, 0.2]]):
        bank.set(client, torch.tensor(vector))
    prior = np.array([0.2, 0.3, 0.5])
    unlike = bank.dissimilarity(bank.row(0), "cosine")
    row = Likeness(gamma=0.5).row(0, unlike, prior, None)
    assert row[1] > row[2]
    assert row[0] + row[1] > prior[0] + prior[1]
    np.testing.assert_allclose(Likeness(gamma=0).row(0, unlike, prior, None), prior)


def test_clip_counts_high_cosines_as_one():
    bank = ModelBank(3, torch.zeros(2))
    for client, angle in enumerate([0.0, 0.3, 1.2]):  # cosines 1, 0.955, 0.362
        bank.set(client, torch.tensor([np.cos(angle), np.sin(angle)], dtype=torch.float32))
    prior = np.full(3, 1 / 3)
    unlike = bank.dissimilarity(bank.row(0), "cosine")
    clipped = Likeness(gamma=0.4, clip=0.9).row(0, unlike, prior, None)
    expected = solve_qp(prior, 0.4, np.array([-1.0, -1.0, -np.cos(1.2)]))
    np.testing.assert_allclose(clipped, expected, atol=1e-6)
    free = Likeness(gamma=0.4).row(0, unlike, prior, None)
    assert not np.allclose(clipped, free, atol=1e-3)


# -- the graph as a whole ------------------------------------------------------------------------


@given(st.lists(st.integers(0, 19), max_size=30), st.booleans())
@settings(deadline=None, max_examples=50)
def test_the_graph_equals_a_dense_matrix(clients, reload):
    prior = np.arange(1, 21) / 210
    graph, dense = CollaborationGraph(prior), np.tile(prior, (20, 1))
    for k, client in enumerate(clients):
        dense[client] = np.random.default_rng(k).dirichlet(np.full(20, 0.1))
        graph.set_row(client, dense[client])
        if reload:
            state, graph = graph.state_dict(), CollaborationGraph(prior)
            assert len(state["rows"]) == len(set(clients[: k + 1]))
            graph.load_state_dict(state)
    close = {"rtol": 1e-7, "atol": 1e-40}
    np.testing.assert_allclose(graph.matrix(), dense, **close)
    np.testing.assert_allclose(graph.matrix().sum(1), np.ones(20), atol=1e-6)
    for client in range(20):
        row, column = graph.row(client), graph.column(client)
        assert row.dtype == column.dtype == np.float64
        np.testing.assert_array_equal(row, graph.matrix()[client])
        np.testing.assert_array_equal(column, graph.matrix()[:, client])
    row[:], column[:] = 7, 7  # copies: the graph stays as it is
    graph.matrix()[:] = 7
    np.testing.assert_allclose(graph.matrix(), dense, **close)
    assert prior[19] == 20 / 210


def test_zeros_stay_zero_and_unknown_rows_are_the_prior_to_the_bit():
    prior = np.array([0.2, 0.3, 0.5])
    graph = CollaborationGraph(prior)
    graph.set_row(1, np.array([0.0, 1.0, 0.0]))
    assert graph.row(1).tolist() == [0.0, 1.0, 0.0]
    assert graph.row(0).tolist() == prior.tolist()
    assert graph.column(2).tolist() == [0.5, 0.0, 0.5]


def test_the_graph_survives_the_disk_and_refuses_another_size(tmp_path):
    graph = CollaborationGraph(np.full(4, 0.25))
    for client in (3, 1):
        graph.set_row(client, np.random.default_rng(client).dirichlet(np.ones(4)))
    save_state(tmp_path / "graph", graph.state_dict())
    again = CollaborationGraph(np.full(4, 0.25))
    again.load_state_dict(load_state(tmp_path / "graph"))
    again.set_row(0, np.array([1.0, 0.0, 0.0, 0.0]))
    graph.set_row(0, np.array([1.0, 0.0, 0.0, 0.0]))
    np.testing.assert_array_equal(again.matrix(), graph.matrix())
    with pytest.raises(PolytempoError, match="4 clients, expected 5"):
        CollaborationGraph(np.full(5, 0.2)).load_state_dict(graph.state_dict())
