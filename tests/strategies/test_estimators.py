"""Rows of the collaboration graph against their formulas, and the overlap of feature spaces."""

import math

import numpy as np
import pytest
import quadprog
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.linalg import subspace_angles

from polytempo.core.errors import Refused
from polytempo.storage import load_state, save_state
from polytempo.strategies.estimators import GRAPHS, Attention, Bases, Complement, Likeness

SEEDS = st.integers(0, 2**32 - 1)


def solve_qp(prior, penalty):
    """min ||x - p||^2 + q.x over the simplex, by a general active-set solver."""
    n = len(prior)
    constraints = np.column_stack([np.ones(n), np.eye(n)])
    bounds = np.concatenate([[1.0], np.zeros(n)])
    return quadprog.solve_qp(2 * np.eye(n), 2 * prior - penalty, constraints, bounds, meq=1)[0]


# -- FedAMP ---------------------------------------------------------------------------------------


def softmax_row(me, cosines, sigma, own):
    """The formula as it is written, over Python floats."""
    total = sum(math.exp(sigma * c) for h, c in enumerate(cosines) if h != me)
    return [
        own if j == me else (1 - own) * math.exp(sigma * c) / total for j, c in enumerate(cosines)
    ]


def test_attention_by_hand():
    cosines = np.array([0.0, 1.0, math.log(3) / math.log(2)])  # e^(ln 2 cos): 1, 2, 3
    row = Attention(sigma=math.log(2), self_weight=0.4).row(1, -cosines, np.ones(3) / 3, None)
    assert row.tolist() == pytest.approx([0.6 / 4, 0.4, 0.6 * 3 / 4])


@given(SEEDS, st.integers(2, 9), st.floats(0, 30), st.floats(0, 1), st.data())
def test_attention_is_a_softmax_over_the_others(seed, n, sigma, own, data):
    me = data.draw(st.integers(0, n - 1))
    cosines = np.random.default_rng(seed).uniform(-1, 1, n)
    cosines[me] = 1.0
    prior = np.random.default_rng(seed).dirichlet(np.ones(n))  # plays no role
    row = Attention(sigma=sigma, self_weight=own).row(me, -cosines, prior, None)
    np.testing.assert_allclose(row, softmax_row(me, cosines, sigma, own), rtol=1e-9, atol=1e-300)
    assert row.sum() == pytest.approx(1)
    assert row[me] == own


@pytest.mark.parametrize("me", range(4))
def test_a_large_sigma_chooses_the_most_alike_and_does_not_overflow(me):
    cosines = np.array([0.3, -0.8, 0.31, -1.0])
    cosines[me] = 1.0
    with np.errstate(over="raise", invalid="raise"):
        row = Attention(sigma=1e6).row(me, -cosines, np.ones(4) / 4, None)
    best = max((j for j in range(4) if j != me), key=lambda j: cosines[j])
    expected = np.zeros(4)
    expected[me], expected[best] = 0.7, 0.3
    np.testing.assert_allclose(row, expected)


def test_attention_of_a_client_alone_and_of_two():
    assert Attention().row(0, np.array([-1.0]), np.ones(1), None).tolist() == [1.0]
    for me in (0, 1):
        row = Attention(self_weight=0.25).row(me, np.array([-1.0, -1.0]), np.ones(2) / 2, None)
        assert row[me] == 0.25 and row[1 - me] == 0.75


def test_defaults_are_those_of_pace():
    assert (Attention().sigma, Attention().self_weight) == (10.0, 0.7)
    assert (Complement().alpha, Complement().beta, Complement().k) == (1.5, 1.5, 3)
    assert Complement().clip == 0.9
    assert (Likeness().gamma, Likeness().clip) == (1.5, None)
    assert [GRAPHS.create(name).directions for name in ("pfedgraph", "fedamp", "fedsac:k=5")] == [
        0,
        0,
        5,
    ]


# -- FedSaC ---------------------------------------------------------------------------------------


@given(SEEDS, st.integers(1, 12), st.floats(0, 4), st.floats(0, 4), st.none() | st.just(0.9))
def test_complement_solves_its_row_problem(seed, n, alpha, beta, clip):
    draw = np.random.default_rng(seed)
    prior = draw.dirichlet(np.ones(n))
    cosines, overlap = draw.uniform(-1, 1, n), draw.uniform(0, 1, n)
    cosines[0] = overlap[0] = 1.0
    row = Complement(alpha=alpha, beta=beta, clip=clip).row(0, -cosines, prior, overlap)
    counted = np.array([1.0 if clip is not None and c > clip else c for c in cosines])
    np.testing.assert_allclose(row, solve_qp(prior, alpha * overlap - beta * counted), atol=1e-9)


def test_overlap_is_penalised_and_likeness_rewarded():
    prior, nothing = np.full(3, 1 / 3), np.zeros(3)
    row = Complement(alpha=0.5, beta=0).row(0, nothing, prior, np.array([1.0, 0.9, 0.2]))
    assert row[0] < row[1] < row[2]
    row = Complement(alpha=0, beta=0.5).row(0, np.array([-1.0, -0.5, 0.5]), prior, nothing)
    assert row[0] > row[1] > row[2]
    # by hand: p - (c - cos) / 2 = (1/3, 1/3 - 0.05, 1/3 + 0.05), which sums to 1
    unlike, overlap = np.array([-1.0, -0.8, -0.3]), np.array([1.0, 0.9, 0.2])
    row = Complement(alpha=1, beta=1).row(0, unlike, prior, overlap)
    np.testing.assert_allclose(row - prior, [0.0, -0.05, 0.05], atol=1e-12)


@given(SEEDS, st.integers(1, 9), st.floats(0, 4))
def test_without_alpha_it_is_pfedgraphs_to_the_bit(seed, n, gamma):
    draw = np.random.default_rng(seed)
    prior, unlike = draw.dirichlet(np.ones(n)), draw.uniform(-1, 1, n)
    mine = Complement(alpha=0, beta=gamma).row(0, unlike, prior, draw.uniform(0, 1, n))
    theirs = Likeness(gamma=gamma, clip=0.9).row(0, unlike, prior, None)
    assert mine.tolist() == theirs.tolist()


# -- the overlap of bases -------------------------------------------------------------------------


def space(draw, rank=3, features=7, rows=3):
    """An orthonormal basis of a random space: rows beyond its rank are zero."""
    basis = np.zeros((rows, features))
    basis[:rank] = np.linalg.qr(draw.normal(size=(features, rank)))[0].T
    return basis


def known(*bases):
    kept = Bases(len(bases))
    for client, basis in enumerate(bases):
        if basis is not None:
            kept.set(client, torch.from_numpy(basis))
    return kept


@given(SEEDS, st.integers(1, 4), st.integers(4, 9), st.floats(0, 1))
def test_overlap_is_the_cosine_of_the_mean_principal_angle(seed, k, features, near):
    draw = np.random.default_rng(seed)
    first = space(draw, k, features, k)
    second = np.linalg.qr(((1 - near) * first + near * space(draw, k, features, k)).T)[0].T
    third = space(draw, k, features, k)
    kept = known(first, second, third)
    for me, mine in enumerate((first, second, third)):
        expected = [
            math.cos(subspace_angles(mine.T, other.T).mean()) for other in (first, second, third)
        ]
        np.testing.assert_allclose(kept.overlap(me), expected, atol=1e-7)
        assert kept.overlap(me)[me] == 1.0


def test_overlap_by_hand():
    eye = np.eye(6)
    turned = np.array([eye[0], eye[1], math.cos(0.6) * eye[2] + math.sin(0.6) * eye[3]])
    kept = known(eye[:3], eye[3:], eye[[2, 0, 4]], turned)
    expected = [1.0, 0.0, math.cos(math.pi / 6), math.cos(0.2)]
    np.testing.assert_allclose(kept.overlap(0), expected, atol=1e-7)


@given(SEEDS)
def test_signs_and_rotations_of_the_bases_do_not_matter(seed):
    draw = np.random.default_rng(seed)
    bases = [space(draw, rank) for rank in (3, 3, 2, 1)]
    expected = np.array([known(*bases).overlap(k) for k in range(4)])
    turned = []
    for basis in bases:
        signs = np.diag(draw.choice([-1.0, 1.0], size=3))
        turned.append(signs @ np.linalg.qr(draw.normal(size=(3, 3)))[0] @ basis)
    found = np.array([known(*turned).overlap(k) for k in range(4)])
    np.testing.assert_allclose(found, expected, atol=1e-6)
    np.testing.assert_allclose(found, found.T, atol=1e-6)


@given(SEEDS, st.integers(1, 3), st.integers(1, 3))
def test_spaces_of_fewer_dimensions_have_fewer_angles(seed, mine, theirs):
    """Two clients are not complementary because one of them has few samples."""
    draw = np.random.default_rng(seed)
    first, second = space(draw, mine), space(draw, theirs)
    angles = subspace_angles(first[:mine].T, second[:theirs].T)
    assert len(angles) == min(mine, theirs)
    found = known(first, second).overlap(0)
    np.testing.assert_allclose(found, [1.0, math.cos(angles.mean())], atol=1e-7)
    contained = np.zeros_like(first)
    contained[0] = first[0]
    np.testing.assert_allclose(known(first, contained).overlap(0), [1.0, 1.0], atol=1e-7)


def test_clients_that_are_not_known_or_do_not_vary_count_as_overlapping():
    draw = np.random.default_rng(0)
    first, second = space(draw), space(draw)
    kept = known(first, None, second, np.zeros((3, 7)), None)
    overlap = kept.overlap(0)
    assert overlap[[0, 1, 3, 4]].tolist() == [1.0] * 4
    assert 0 <= overlap[2] < 1
    assert kept.overlap(1).tolist() == kept.overlap(3).tolist() == [1.0] * 5
    assert Bases(3).overlap(2).tolist() == [1.0] * 3


def test_the_last_basis_of_a_client_counts_and_is_kept_as_a_copy():
    draw = np.random.default_rng(0)
    first, second = torch.from_numpy(space(draw)), torch.from_numpy(space(draw))
    kept = Bases(2)
    kept.set(0, first)
    kept.set(1, second)
    kept.set(1, mine := first.clone())
    mine.zero_()
    np.testing.assert_allclose(kept.overlap(0), [1.0, 1.0], atol=1e-7)


def test_in_single_precision_too():
    draw = np.random.default_rng(3)
    bases = [space(draw) for _ in range(4)]
    single = Bases(4)
    for client, basis in enumerate(bases):
        single.set(client, torch.from_numpy(basis).float())
    np.testing.assert_allclose(single.overlap(2), known(*bases).overlap(2), atol=1e-5)


@pytest.mark.parametrize(
    ("basis", "message"),
    [
        (torch.eye(3, 8), r"client 1 .*\[3, 8\], others \[3, 7\].*a different model"),
        (torch.eye(2, 7), r"client 1 .*\[2, 7\], others \[3, 7\]"),
        (2 * torch.eye(3, 7), "client 1 .*neither orthonormal nor zero"),
        (torch.ones(3, 7), "client 1 .*neither orthonormal nor zero"),
        (torch.full((3, 7), 1e200, dtype=torch.float64), "client 1 .*neither orthonormal nor zero"),
        (torch.full((3, 7), torch.nan), "client 1 .*neither orthonormal nor zero"),
    ],
)
def test_a_basis_that_cannot_be_compared_is_refused_and_changes_nothing(basis, message):
    draw = np.random.default_rng(0)
    kept = known(space(draw), None, space(draw))
    before = kept.overlap(0).tolist()
    with pytest.raises(Refused, match=message):
        kept.set(1, basis)
    assert kept.overlap(0).tolist() == before
    assert kept.overlap(1).tolist() == [1.0] * 3
    kept.set(1, torch.eye(3, 7))
    assert kept.overlap(0)[1] < 1


@pytest.mark.parametrize("clients", [[], [2], [0, 3]])
def test_state_survives_the_disk_and_goes_its_own_way(clients, tmp_path):
    draw = np.random.default_rng(0)
    kept = Bases(4)
    for client in clients:
        kept.set(client, torch.from_numpy(space(draw)))
    save_state(tmp_path / "bases", kept.state_dict())
    for state in (load_state(tmp_path / "bases"), kept.state_dict()):
        again = Bases(4)
        again.load_state_dict(state)
        expected = [kept.overlap(k).tolist() for k in range(4)]
        assert [again.overlap(k).tolist() for k in range(4)] == expected
        again.set(1, torch.eye(3, 7))
        again.set(0, torch.eye(3, 7))
        assert [kept.overlap(k).tolist() for k in range(4)] == expected
    with pytest.raises(Refused):
        again.set(2, torch.eye(3, 8))
