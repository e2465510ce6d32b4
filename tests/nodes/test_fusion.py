"""Fusion weights and decisions, against values worked out by hand."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from polytempo import PolytempoError
from polytempo.core.rng import rng
from polytempo.nodes import DECISIONS, FUSIONS, Occasion, Snapshot

progress = st.floats(0, 1, allow_subnormal=False)


def snapshot(values, progress):
    return Snapshot(torch.tensor(values), progress, 0)


def test_a_partner_that_is_three_times_as_far_counts_three_quarters():
    rule = FUSIONS.create("progress")
    assert rule.weights(0.2, [0.6]) == pytest.approx([0.75])
    assert rule.weights(0.6, [0.2]) == pytest.approx([0.25])
    fused = rule.fuse(torch.tensor([4.0, -2.0]), [snapshot([8.0, 2.0], 0.6)], 0.2)
    assert fused.tolist() == pytest.approx([7.0, 1.0])


def test_two_partners_at_once_are_weighed_together():
    """Progress 0.5, 0.2 and 0.3 sum to one: the mean of 10, 20 and 40 with these weights is 21."""
    partners = [snapshot([20.0], 0.2), snapshot([40.0], 0.3)]
    fused = FUSIONS.create("progress").fuse(torch.tensor([10.0]), partners, 0.5)
    assert fused.tolist() == pytest.approx([21.0])


@given(progress, progress, st.floats(0, 2))
def test_the_weights_of_a_pair_sum_to_wf0(mine, yours, wf0):
    rule = FUSIONS.create({"name": "progress", "wf0": wf0})
    (of_yours,), (of_mine,) = rule.weights(mine, [yours]), rule.weights(yours, [mine])
    assert of_yours + of_mine == pytest.approx(wf0)
    assert min(of_yours, of_mine) >= 0
    if mine < yours:
        assert of_yours >= of_mine


def test_beginners_count_half_each():
    assert FUSIONS.create("progress").weights(0.0, [0.0]) == [0.5]
    assert FUSIONS.create("progress:wf0=2").weights(0.0, [0.0]) == [1.0]


def test_a_fusion_leaves_all_it_was_given_as_it_was():
    current, partner = torch.tensor([1.0, 2.0]), snapshot([3.0, 4.0], 0.5)
    FUSIONS.create("progress").fuse(current, [partner], 0.5)
    assert (current.tolist(), partner.params.tolist()) == ([1.0, 2.0], [3.0, 4.0])


@pytest.mark.parametrize("name", list(FUSIONS))
def test_without_a_partner_nothing_changes(name):
    assert FUSIONS.create(name).fuse(torch.tensor([5.0]), [], 0.5).tolist() == [5.0]


def test_naive_fusion_disregards_progress():
    beginner = snapshot([0.0], 0.0)
    current = torch.tensor([8.0])
    assert FUSIONS.create("naive").fuse(current, [beginner], 1.0).tolist() == [4.0]
    assert FUSIONS.create("naive:weight=1").fuse(current, [beginner], 1.0).tolist() == [0.0]
    assert FUSIONS.create("naive").fuse(current, [beginner] * 2, 1.0).tolist() == [4.0]


def decides(spec, peers=10, rounds=1, seed=0):
    stream = rng(seed, "test")
    return DECISIONS.create(spec).communicate(Occasion(peers, rounds, 0.5, False, stream))


def test_one_pair_communicates_a_round_on_average():
    yes = sum(decides("uniform", peers=10, seed=seed) for seed in range(2000))
    assert abs(yes - 400) < 72  # four standard deviations of Binomial(2000, 1/5)
    assert all(decides("uniform", peers=2, seed=seed) for seed in range(20))
    assert not any(decides("uniform:rate=0", seed=seed) for seed in range(20))


def test_fixed_decisions():
    assert decides("always") and not decides("never")
    assert [decides("every:rounds=3", rounds=n) for n in (1, 2, 3, 4)] == [
        False,
        False,
        True,
        True,
    ]


@pytest.mark.parametrize("spec", ["uniform:rate=-1", "every:rounds=0", "sometimes"])
def test_bad_decision_makers_are_refused(spec):
    with pytest.raises(PolytempoError):
        DECISIONS.create(spec)
