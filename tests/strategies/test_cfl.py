"""CFL and ICFL: the bipartition, its condition, clients by their own numbers, newcomers."""

import itertools

import numpy as np
import pytest
import torch
from dispatching import dispatch

from polytempo import Context, Staleness, Task, Update
from polytempo.strategies import CFL, ICFL, CFLAsync, ICFLAsync
from polytempo.strategies.cfl import bipartition

D = 12


def unit(k: int) -> torch.Tensor:
    vector = torch.zeros(D)
    vector[k] = 1.0
    return vector


def ready(strategy, clients=8, samples=None):
    strategy.setup(Context(torch.zeros(D), samples or [10] * clients, Task(), seed=0))
    return strategy


def upload(strategy, client, change):
    dispatch(strategy, client)
    start = strategy.model_for(client)
    strategy.fold(Update(client, 0, start + change, 10), Staleness(0, 0))


def cohort(strategy, changes):
    for client in changes:
        dispatch(strategy, client)
    starts = {client: strategy.model_for(client) for client in changes}
    for client, change in changes.items():
        strategy.fold(Update(client, 0, starts[client] + change, 10), Staleness(0, 0))
    assert strategy.close_cohort()


# -- the bipartition ----------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(20))
def test_the_largest_similarity_across_is_the_least_possible(seed):
    random = np.random.default_rng(seed)
    points = random.normal(size=(7, 3))
    points /= np.linalg.norm(points, axis=1, keepdims=True)
    similarity = points @ points.T
    best = min(
        similarity[np.ix_(list(part), [k for k in range(7) if k not in part])].max()
        for size in range(1, 7)
        for part in itertools.combinations(range(7), size)
    )
    parts = bipartition(similarity)
    assert set(parts.tolist()) == {0, 1} and parts[0] == 0
    assert similarity[np.ix_(parts == 0, parts == 1)].max() == pytest.approx(best)


def test_equal_similarities_are_still_parted_in_two():
    assert set(bipartition(np.ones((5, 5))).tolist()) == {0, 1}


@pytest.mark.parametrize("linkage", ["single", "complete"])
def test_two_plain_groups_are_found(linkage):
    similarity = np.kron(np.eye(2), np.ones((3, 3)))
    assert bipartition(similarity, linkage).tolist() == [0, 0, 0, 1, 1, 1]


# -- CFL ----------------------------------------------------------------------------------------

# Four groups of two; each pair of groups is opposed along an axis, so that the mean stands still.
TREE = [unit(0), unit(0), unit(0) / 2 + unit(1), unit(0) / 2 + unit(1)]
CHANGES = {k: v for k, v in enumerate([*TREE, *(-v for v in TREE)])}


def test_a_cluster_is_split_only_when_its_mean_is_short_and_some_update_long():
    for eps_1, eps_2, parts in ((0.1, 0.5, 2), (0.1, 5.0, 1), (0.0, 0.5, 1)):
        strategy = ready(CFL(eps_1=eps_1, eps_2=eps_2))
        cohort(strategy, CHANGES)
        assert len(set(strategy.clusters().tolist())) == parts


def test_clients_keep_their_own_numbers_through_the_second_split():
    """Opposed halves part first; the second split, of the half that holds clients 4 to 7, must move
    clients by their own numbers, not by their places in the cluster."""
    strategy = ready(CFL(eps_1=0.1, eps_2=0.5))
    cohort(strategy, CHANGES)
    assert strategy.clusters().tolist() == [0, 0, 0, 0, 1, 1, 1, 1]
    second = {4: unit(2), 5: unit(2), 6: -unit(2), 7: -unit(2)}
    quiet = {client: 0.01 * unit(3) for client in range(4)}
    cohort(strategy, quiet | second)
    assert strategy.clusters().tolist() == [0, 0, 0, 0, 1, 1, 2, 2]
    cohort(strategy, {client: unit(4) for client in (6, 7)})  # nothing but their cluster moves
    assert torch.equal(strategy.model_for(6), strategy.model_for(7))
    assert strategy.model_for(6)[4] == 1 and strategy.model_for(4)[4] == 0


def test_both_parts_begin_with_the_parents_model_which_is_the_mean_of_its_clients():
    strategy = ready(CFL(eps_1=10, eps_2=0.5))
    cohort(strategy, {client: change + unit(5) for client, change in CHANGES.items()})
    assert set(strategy.clusters().tolist()) == {0, 1}
    for client in range(8):
        torch.testing.assert_close(strategy.model_for(client), unit(5))


def test_the_first_update_is_a_change_not_a_model():
    """From a model of length 100, a change of length 0.1 is short."""
    strategy = CFL(eps_1=10, eps_2=0.7)
    strategy.setup(Context(100 * unit(0), [10] * 4, Task(), seed=0))
    cohort(strategy, {client: 0.1 * unit(client) for client in range(4)})
    np.testing.assert_allclose(strategy.lengths, 0.1, rtol=1e-4)
    assert set(strategy.clusters().tolist()) == {0}


def test_a_cluster_moves_by_the_sample_weighted_mean():
    strategy = ready(CFL(), samples=[30, 10, 10])
    cohort(strategy, {0: unit(0), 1: unit(1)})  # the third is not in the cohort
    torch.testing.assert_close(strategy.model_for(2), 0.75 * unit(0) + 0.25 * unit(1))


def test_who_is_in_no_cluster_is_handed_the_mean_by_sizes():
    strategy = ready(CFL(), clients=5)
    strategy.cluster[:] = [0, 0, 0, 1, -1]
    strategy.models, strategy.revisions = [unit(0), unit(1)], [1, 2]
    torch.testing.assert_close(strategy.model_for(4), 0.75 * unit(0) + 0.25 * unit(1))


@pytest.mark.parametrize("kind", [CFL, CFLAsync])
def test_nothing_is_split_before_all_of_a_cluster_are_heard_of(kind):
    strategy = ready(kind(eps_1=0.1, eps_2=0.5))
    seven = {client: change for client, change in CHANGES.items() if client}
    if kind is CFL:
        cohort(strategy, seven)
    else:
        for client, change in seven.items():
            upload(strategy, client, change)
    assert set(strategy.clusters().tolist()) == {0}


def test_on_arrival_the_last_update_of_each_client_counts():
    strategy = ready(CFLAsync(eps_1=0.1, eps_2=0.5))
    for client in (3, 1, 7, 0, 2, 5, 4):
        upload(strategy, client, unit(6))  # replaced below
    for client, change in CHANGES.items():
        if client != 6:
            upload(strategy, client, change)
    before = strategy.model_for(6)
    upload(strategy, 6, CHANGES[6])
    assert strategy.clusters().tolist() == [0, 0, 0, 0, 1, 1, 1, 1]
    torch.testing.assert_close(strategy.model_for(0), before + 0.3 * CHANGES[6])


@pytest.mark.parametrize("kind", [CFL, CFLAsync, ICFL, ICFLAsync])
def test_what_a_client_received_is_forgotten_with_what_it_trained(kind):
    strategy = ready(kind())
    for client in range(3):
        dispatch(strategy, client)
    strategy.lost(0)
    strategy.left(1)
    strategy.left(5)  # it was not in training
    assert set(strategy.received) == {"2"}


# -- ICFL ---------------------------------------------------------------------------------------


def test_the_threshold_rises_from_its_start_towards_1():
    strategy = ready(ICFL(start=0.85, eps=4.0, updates=500))
    assert strategy.threshold == pytest.approx(0.85)
    strategy.t = 500
    assert strategy.threshold == pytest.approx(1 - 0.15 * 0.0183156, rel=1e-6)  # e^-4
    assert ready(ICFLAsync()).updates == 100 * strategy.updates  # the paper's factor 0.01


def test_a_cluster_that_is_not_alike_enough_is_parted_by_the_fiedler_vector():
    for start, expected in ((0.5, [0, 1] * 4), (-1.0, [0] * 8)):
        strategy = ready(ICFL(start=start))
        noise = torch.from_numpy(np.random.default_rng(0).normal(size=(8, D))).float()
        changes = {c: unit(c % 2) + 0.05 * noise[c] for c in range(8)}
        cohort(strategy, changes)
        assert strategy.clusters().tolist() == expected


@pytest.mark.parametrize("alike", [True, False])
def test_a_newcomer_joins_those_like_it_or_opens_a_cluster(alike):
    strategy = ready(ICFLAsync(start=0.5, founders=2.0), clients=7)
    for turn in range(3):
        for client in range(6):
            upload(strategy, client, unit(client % 2) + 0.01 * unit(7 + turn))
    assert strategy.clusters().tolist() == [0, 1, 0, 1, 0, 1, -1]
    handed, joined = strategy.model_for(6), strategy.model_for(1)
    assert not torch.equal(handed, joined)
    change = unit(1) if alike else unit(5)
    upload(strategy, 6, change)
    assert strategy.clusters().tolist() == [0, 1, 0, 1, 0, 1, 1 if alike else 2]
    begin = joined if alike else handed  # a cluster of its own begins with what it was handed
    torch.testing.assert_close(strategy.model_for(6), 0.7 * begin + 0.3 * (handed + change))


def test_parts_that_are_no_more_alike_within_than_across_stay_together():
    """All pairs are equally alike: the threshold asks for a split, but there is none to gain by."""
    strategy = ready(ICFL(start=0.9))
    similarity = np.full((4, 4), 0.75)
    np.fill_diagonal(similarity, 1.0)
    members = np.arange(4)
    assert strategy.parts(members, similarity) is None


def test_a_newcomers_revision_changes_as_soon_as_its_model_does():
    strategy = ready(ICFL(start=-1.0), clients=3)
    cohort(strategy, {0: unit(0), 1: unit(1)})
    strategy.cluster[:] = [0, 1, -1]
    strategy.models, strategy.revisions = [unit(0), unit(1)], [1, strategy.changes]
    dispatch(strategy, 2)
    model, revision = strategy.model_for(2), strategy.revision(2)
    strategy.fold(Update(2, 0, model + unit(1), 10), Staleness(0, 0))
    assert strategy.clusters()[2] == 1 and not torch.equal(strategy.model_for(2), model)
    assert strategy.revision(2) != revision
