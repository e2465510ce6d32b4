"""The collaboration row is the exact solution of its quadratic program."""

import numpy as np
import pytest
import quadprog
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from polytempo.core.bank import ModelBank
from polytempo.strategies.graph import collaboration_row, project_to_simplex

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
    row = collaboration_row(bank, bank.row(0), prior, gamma=0.5)
    assert row[1] > row[2]
    assert row[0] + row[1] > prior[0] + prior[1]
    np.testing.assert_allclose(collaboration_row(bank, bank.row(0), prior, gamma=0.0), prior)


def test_clip_counts_high_cosines_as_one():
    bank = ModelBank(3, torch.zeros(2))
    for client, angle in enumerate([0.0, 0.3, 1.2]):  # cosines 1, 0.955, 0.362
        bank.set(client, torch.tensor([np.cos(angle), np.sin(angle)], dtype=torch.float32))
    prior = np.full(3, 1 / 3)
    clipped = collaboration_row(bank, bank.row(0), prior, 0.4, clip=0.9)
    expected = solve_qp(prior, 0.4, np.array([-1.0, -1.0, -np.cos(1.2)]))
    np.testing.assert_allclose(clipped, expected, atol=1e-6)
    assert not np.allclose(clipped, collaboration_row(bank, bank.row(0), prior, 0.4), atol=1e-3)
