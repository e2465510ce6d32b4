import numpy as np
import pydantic
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from polytempo.core.errors import PolytempoError
from polytempo.core.rng import rng
from polytempo.data import PARTITIONS, Federation, partition
from polytempo.data.partition import Assignment, proportional

NAMES = ["iid", "dirichlet", "pathological", "label-groups", "natural", "quantity"]
CIFAR = np.repeat(np.arange(10), 600)


def check(found: Assignment, clients: int, samples: int, complete: bool = True) -> None:
    everything = np.concatenate(found.indices)
    assert len(found.indices) == clients
    assert min(len(part) for part in found.indices) >= 1
    assert len(np.unique(everything)) == len(everything)
    assert everything.min() >= 0 and everything.max() < samples
    if complete:
        assert len(everything) == samples


@st.composite
def pools(draw: st.DrawFn) -> tuple[np.ndarray, int, int]:
    """Labels in uneven numbers and out of order, and a number of clients that is reasonable."""
    sizes = draw(st.lists(st.integers(20, 120), min_size=2, max_size=12))
    seed = draw(st.integers(0, 2**32))
    y = rng(seed, "test").permutation(np.repeat(np.arange(len(sizes)), sizes))
    return y, draw(st.integers(1, 12)), seed


def test_all_partitions_are_registered() -> None:
    assert set(NAMES) <= set(PARTITIONS)


@settings(max_examples=40, deadline=None)
@given(pools(), st.sampled_from(["iid", "dirichlet:alpha=0.5", "quantity", "quantity:sigma=3"]))
def test_nothing_is_lost_and_nothing_given_twice(pool: tuple, name: str) -> None:
    y, clients, seed = pool
    check(PARTITIONS.create(name)(y, clients, rng(seed)), clients, len(y))


@settings(max_examples=40, deadline=None)
@given(pools(), st.booleans(), st.floats(0.05, 50))
def test_dirichlet_keeps_its_promises_or_says_that_it_cannot(
    pool: tuple, balanced: bool, alpha: float
) -> None:
    y, clients, seed = pool
    least = min(40 if balanced else 10, max(1, len(y) // (10 * clients)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(partition, "TRIES", 300)  # or the hopeless cases would take seconds each
        try:
            found = partition.Dirichlet(alpha, balanced)(y, clients, rng(seed))
        except PolytempoError as error:
            assert alpha < 5, "an easy case was given up"
            assert "raise alpha" in str(error)
            return
    check(found, clients, len(y))
    assert min(len(part) for part in found.indices) >= least


@settings(max_examples=40, deadline=None)
@given(pools(), st.integers(1, 4))
def test_pathological_clients_hold_so_many_labels_and_each_label_has_an_owner(
    pool: tuple, labels: int
) -> None:
    y, clients, seed = pool
    kinds = len(np.unique(y))
    assume(labels <= kinds and clients * labels >= kinds)
    found = partition.Pathological(labels)(y, clients, rng(seed))
    check(found, clients, len(y))
    held = [np.unique(y[part]) for part in found.indices]
    assert all(len(own) == labels for own in held)
    owners = np.bincount(np.concatenate(held), minlength=kinds)
    assert owners.min() >= 1 and owners.max() - owners.min() <= 1


@settings(max_examples=30, deadline=None)
@given(pools(), st.integers(1, 4))
def test_grouped_pathological_groups_share_labels_with_nobody_else(
    pool: tuple, labels: int
) -> None:
    y, clients, seed = pool
    kinds = len(np.unique(y))
    assume(labels <= kinds and clients >= -(-kinds // labels))
    found = partition.Pathological(labels, grouped=True)(y, clients, rng(seed))
    check(found, clients, len(y))
    for client, part in enumerate(found.indices):
        assert set(y[part] // labels) == {found.groups[client]}


@settings(max_examples=30, deadline=None)
@given(pools(), st.integers(2, 30), st.integers(1, 30))
def test_natural_clients_are_whole_users(pool: tuple, users: int, clients: int) -> None:
    y, _, seed = pool
    owner = rng(seed, "owner").permutation(np.arange(len(y)) % users) * 7
    assume(clients <= users)
    found = partition.Natural()(y, clients, rng(seed), owner)
    check(found, clients, len(y), complete=clients == users)
    ids = [owner[part] for part in found.indices]
    assert all(len(np.unique(own)) == 1 for own in ids)
    assert all(len(own) == (owner == own[0]).sum() for own in ids)
    assert len({own[0] for own in ids}) == clients


@pytest.mark.parametrize("name", NAMES)
def test_same_seed_same_partition_and_another_seed_another(name: str) -> None:
    divide = PARTITIONS.create(name)
    users = np.arange(len(CIFAR)) % 40
    first, again, other = (divide(CIFAR, 20, rng(seed), users) for seed in (1, 1, 2))
    assert all(np.array_equal(a, b) for a, b in zip(first.indices, again.indices, strict=True))
    assert not all(np.array_equal(a, b) for a, b in zip(first.indices, other.indices, strict=True))


def test_iid_sizes_differ_by_one_at_most() -> None:
    sizes = [len(part) for part in partition.IID()(CIFAR[:1003], 10, rng(0)).indices]
    assert sorted(sizes) == [100] * 7 + [101] * 3


def test_balanced_dirichlet_gives_no_label_to_a_client_that_is_full() -> None:
    y, clients = np.repeat(np.arange(10), 600), 20
    found = partition.Dirichlet(0.1, balanced=True)(y, clients, rng(3))
    full = len(y) / clients
    for part in found.indices:
        counts = np.bincount(y[part], minlength=10)
        before = np.cumsum(counts) - counts  # what it held when each label was dealt
        assert (before[counts > 0] < full).all()
    plain = partition.Dirichlet(0.1)(y, clients, rng(3))
    assert max(map(len, found.indices)) < max(map(len, plain.indices))


def test_balanced_dirichlet_deals_on_when_all_open_clients_drew_nothing() -> None:
    class Stubborn:
        """Draws everything for client 0, whoever is full."""

        def dirichlet(self, alpha: np.ndarray) -> np.ndarray:
            return np.eye(len(alpha))[0]

    counts = partition._draw_dirichlet(np.array([30, 30]), 3, 0.1, True, Stubborn())
    assert counts.tolist() == [[30, 0, 0], [0, 15, 15]]


def test_smaller_alpha_is_more_skewed() -> None:
    def labels_held(alpha: float) -> float:
        found = partition.Dirichlet(alpha)(CIFAR, 10, rng(0))
        return np.mean([np.sum(np.bincount(CIFAR[part]) > 6) for part in found.indices])

    assert labels_held(0.1) < 5 < labels_held(10.0)


def test_dirichlet_that_cannot_succeed_says_what_to_change(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(partition, "TRIES", 50)
    with pytest.raises(PolytempoError, match=r"raise alpha, use fewer clients, or lower min_size"):
        partition.Dirichlet(0.01, min_size=50)(CIFAR, 100, rng(0))
    with pytest.raises(PolytempoError, match=r"min_size=70 .* 6000; use min_size=60 or less"):
        partition.Dirichlet(1.0, min_size=70)(CIFAR, 100, rng(0))


def test_grouped_pathological_is_five_groups_of_twenty() -> None:
    found = partition.Pathological(2, grouped=True)(CIFAR, 100, rng(0))
    assert np.bincount(found.groups).tolist() == [20] * 5
    for group in range(5):
        members = np.flatnonzero(found.groups == group)
        assert {tuple(np.unique(CIFAR[found.indices[m]])) for m in members} == {
            (2 * group, 2 * group + 1)
        }
    assert {len(part) for part in found.indices} == {60}
    assert not np.array_equal(found.groups, np.sort(found.groups)), "groups go by client id"


def test_label_groups_follow_the_proportions() -> None:
    found = partition.LabelGroups()(CIFAR, 100, rng(0))
    check(found, 100, len(CIFAR))
    assert np.bincount(found.groups).tolist() == [20, 20, 30, 30]
    held = [
        set(CIFAR[np.concatenate([found.indices[c] for c in np.flatnonzero(found.groups == g)])])
        for g in range(4)
    ]
    assert held == [{0, 1}, {2, 3}, {4, 5, 6}, {7, 8, 9}]


def test_label_groups_leave_no_group_empty() -> None:
    divide = partition.LabelGroups((0.96, 0.02, 0.02))
    found = divide(CIFAR, 5, rng(0))
    assert np.bincount(found.groups).tolist() == [3, 1, 1]
    check(found, 5, len(CIFAR))


def test_quantity_skews_sizes_but_not_labels() -> None:
    even = partition.Quantity(0.0)(CIFAR, 10, rng(0))
    assert {len(part) for part in even.indices} == {600}
    y = np.arange(400_000) % 10
    found = partition.Quantity(1.2, min_size=100)(y, 400, rng(0))
    sizes = np.array([len(part) for part in found.indices])
    assert sizes.min() >= 100
    assert np.log(sizes - 99.5).std() == pytest.approx(1.2, rel=0.1)
    largest = np.bincount(y[found.indices[int(sizes.argmax())]], minlength=10)
    assert largest.min() > 0.9 * largest.mean()


@given(st.integers(0, 5000), st.lists(st.floats(1e-6, 1e3), min_size=1, max_size=30))
def test_proportional_parts_are_whole_and_within_one_of_their_share(
    total: int, weights: list[float]
) -> None:
    parts = proportional(total, weights)
    assert parts.sum() == total and parts.min() >= 0
    assert np.abs(parts - np.array(weights) / sum(weights) * total).max() < 1 + 1e-6


@pytest.mark.parametrize("name", NAMES)
def test_more_clients_than_samples_is_refused_with_a_remedy(name: str) -> None:
    with pytest.raises(PolytempoError, match=r"11 clients cannot share 10 samples: use at most 10"):
        PARTITIONS.create(name)(np.arange(10), 11, rng(0), np.arange(10))


@pytest.mark.parametrize(
    ("make", "clients", "message"),
    [
        (lambda: partition.Natural(), 3, "no users; choose another partition"),
        (lambda: partition.Pathological(11), 20, "has 10 labels; use 10 or fewer"),
        (lambda: partition.Pathological(1), 9, "at least 10 clients or 2 labels"),
        (lambda: partition.Pathological(2, True), 4, "5 groups, more than 4 clients"),
        (lambda: partition.LabelGroups((1.0,) * 11), 20, "11 proportions"),
        (lambda: partition.IID(), 0, "clients=0"),
    ],
)
def test_impossible_wishes_are_explained(make, clients: int, message: str) -> None:
    with pytest.raises(PolytempoError, match=message):
        make()(CIFAR, clients, rng(0))


def test_natural_refuses_more_clients_than_users() -> None:
    with pytest.raises(PolytempoError, match="has 3 users; use clients=3 or fewer"):
        partition.Natural()(CIFAR, 4, rng(0), np.arange(len(CIFAR)) % 3)


def test_natural_leaves_out_users_with_few_samples() -> None:
    y, owner = np.arange(60) % 3, np.repeat([7, 8, 9], [10, 20, 30])
    found = partition.Natural(min_size=20)(y, 2, rng(0), owner)
    assert [set(owner[part]) for part in found.indices] == [{8}, {9}]
    fed = Federation.from_pool(
        np.zeros((60, 2)), y, owner, partition="natural:min_size=11", test_fraction=0.5
    )
    assert fed.clients == 2 and fed.description == "own, 2 clients, natural(min_size=11)"
    with pytest.raises(PolytempoError, match="has 2 users with 20 samples or more; use clients=2"):
        partition.Natural(min_size=20)(y, 3, rng(0), owner)
    with pytest.raises(PolytempoError, match="the largest user has 30 samples"):
        partition.Natural(min_size=31)(y, 1, rng(0), owner)
    assert PARTITIONS.describe(partition.Natural()) == {"name": "natural"}


def test_options_are_checked_wherever_a_partition_is_made() -> None:
    with pytest.raises(pydantic.ValidationError):
        partition.Dirichlet(-0.1)
    with pytest.raises(PolytempoError, match="did you mean 'alpha'"):
        PARTITIONS.create("dirichlet:alpa=0.1")
    assert PARTITIONS.create("dirichlet:alpha=0.3,balanced=true") == partition.Dirichlet(0.3, True)
