import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from polytempo.core.errors import PolytempoError
from polytempo.core.rng import rng
from polytempo.data.files import recordings as put_together
from polytempo.data.split import split

labels = st.lists(st.integers(0, 6), min_size=2, max_size=80).map(np.array)
fractions = st.floats(0.05, 0.95)


@given(labels, fractions, st.integers(0, 1000))
def test_split_is_complete_disjoint_and_has_both_kinds(y, fraction, seed) -> None:
    train, test = split(y, fraction, rng(seed))
    assert sorted([*train, *test]) == list(range(len(y)))
    assert len(train) >= 1 and len(test) >= 1


@given(labels, fractions, st.integers(0, 1000))
def test_each_label_is_cut_at_the_fraction_give_or_take_one(y, fraction, seed) -> None:
    _, test = split(y, fraction, rng(seed))
    counts = np.bincount(y, minlength=7)
    tested = np.bincount(y[test], minlength=7)
    if (counts > 1).any():
        assert (tested[counts == 1] == 0).all()
        several = counts > 1
        wanted = np.minimum(fraction * counts, counts - 1)
        assert (np.abs(tested - wanted)[several] < 1).all() or tested.sum() == 1
        assert (tested < counts)[several].all()
    else:
        assert tested.sum() == 1


@given(labels, st.integers(0, 1000))
def test_same_seed_same_split(y, seed) -> None:
    first, again = split(y, 0.25, rng(seed)), split(y, 0.25, rng(seed))
    assert np.array_equal(first[0], again[0]) and np.array_equal(first[1], again[1])


def test_exact_quarters_stay_exact() -> None:
    y = np.repeat([0, 1, 2], [40, 8, 4])
    train, test = split(y, 0.25, rng(0))
    assert np.bincount(y[test]).tolist() == [10, 2, 1]
    assert np.bincount(y[train]).tolist() == [30, 6, 3]


def test_the_samples_tested_are_drawn_at_random() -> None:
    y = np.zeros(100, dtype=int)
    assert len({tuple(split(y, 0.25, rng(seed))[1]) for seed in range(5)}) == 5


def test_a_single_sample_is_for_training() -> None:
    train, test = split(np.array([3]), 0.25, rng(0))
    assert train.tolist() == [0] and test.tolist() == []


@pytest.mark.parametrize("fraction", [0, 1, -0.5, 25, float("nan")])
def test_a_fraction_that_is_none_is_refused(fraction: float) -> None:
    with pytest.raises(PolytempoError, match=r"between 0 and 1, such as 0\.25"):
        split(np.zeros(8), fraction, rng(0))


def test_the_largest_remainder_gets_what_is_left_over() -> None:
    y = np.repeat([0, 1, 2], [7, 5, 4])  # quotas 1.75, 1.25 and 1: four in all
    for seed in range(5):
        _, test = split(y, 0.25, rng(seed))
        assert np.bincount(y[test]).tolist() == [2, 1, 1]


def test_a_whole_quota_is_not_exceeded_for_labels_that_cannot_give_more() -> None:
    y = np.repeat([0, 1, 2, 3], [2, 2, 2, 5])  # quotas 1.2 (of which 1 can be given) and 3
    _, test = split(y, 0.6, rng(0))
    assert np.bincount(y[test]).tolist() == [1, 1, 1, 3]


@given(
    y=st.lists(st.integers(0, 2), min_size=2, max_size=30).map(np.array),
    sizes=st.lists(st.integers(1, 6), min_size=30, max_size=30),
    seed=st.integers(0, 9),
)
def test_recordings_stay_together(y, sizes, seed) -> None:
    recordings = np.repeat(np.arange(len(y)), sizes[: len(y)])
    shuffled = np.random.default_rng(seed).permutation(len(recordings))
    recordings = recordings[shuffled]
    train, test = split(y[recordings], 0.25, rng(seed), recordings)
    assert sorted([*train, *test]) == list(range(len(recordings)))
    assert len(train) and len(test)
    assert not set(recordings[train]) & set(recordings[test])
    several = [label for label in np.unique(y) if (y == label).sum() > 1]
    assert all((y[recordings[train]] == label).any() for label in several)


def test_recordings_come_near_the_fraction_of_every_label() -> None:
    recordings = np.repeat(np.arange(40), 5)
    y = recordings % 2
    for seed in range(5):
        _, test = split(y, 0.25, rng(seed), recordings)
        assert [int((y[test] == label).sum()) for label in (0, 1)] == [25, 25]


def test_a_single_recording_is_split_like_any_samples() -> None:
    y = np.arange(40) % 2
    alone = split(y, 0.25, rng(0), np.zeros(40))
    assert [part.tolist() for part in alone] == [part.tolist() for part in split(y, 0.25, rng(0))]


def test_recordings_are_put_together_by_their_halves() -> None:
    """Two people, recordings of 4, 1, 3 and 2 windows, which are then shuffled."""
    draw, windows, users, true = np.random.default_rng(0), [], [], []
    for number, (user, length) in enumerate(((7, 4), (7, 1), (9, 3), (7, 2))):
        signal = draw.normal(size=(3, 8 * (length + 1))).astype(np.float16)
        windows += [signal[:, 8 * k : 8 * k + 16] for k in range(length)]
        users += [user] * length
        true += [number] * length
    mixed = draw.permutation(len(true))
    found = put_together(np.stack(windows)[mixed], np.array(users)[mixed])
    same = np.array(true)[mixed]
    assert ((found[:, None] == found) == (same[:, None] == same)).all()
