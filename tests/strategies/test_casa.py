"""CASA against its paper: the decay, the buffers, the splits, newcomers, and CASA+'s masks."""

import math

import numpy as np
import pytest
import torch
from dispatching import dispatch
from hypothesis import given, settings
from hypothesis import strategies as st

from polytempo import Context, Server, Staleness, Task, Update
from polytempo.core.bank import ModelBank
from polytempo.core.client_steps import Mask
from polytempo.core.errors import PolytempoError, Refused
from polytempo.core.masks import pack
from polytempo.storage import restored
from polytempo.strategies import CASA, STRATEGIES, CASAPlus
from polytempo.strategies import casa as module
from polytempo.strategies.casa import client_decay, cluster_decay, omega, usual_staleness
from polytempo.strategies.similarity_buffer import SimilarityBuffer
from polytempo.strategies.splitting import (
    DENSE,
    FEW,
    gap_by_chance,
    groups,
    spectrum,
    stays_whole,
)

D = 24


def ready(clients=8, strategy=None, samples=None, **options) -> CASA:
    casa = strategy or CASA(**options)
    casa.setup(Context(torch.linspace(-1, 1, D), samples or [10] * clients, Task(), seed=0))
    return casa


# -- Eq. 6-8 ------------------------------------------------------------------------------------


def test_the_cluster_decay_at_points_worked_out_by_hand():
    assert omega(0, 0.001) == 1.0
    assert omega(1000, 0.001) == pytest.approx(2.718281828 / 2.8)
    assert float(cluster_decay(2.0, 1.0, 100)) == pytest.approx(0.2991, abs=5e-5)  # 2 / 6.6865
    assert float(cluster_decay(2.0, 1.0, 5)) == pytest.approx(2 / 3)  # log2 of 8
    assert float(cluster_decay(2.0, 0.5, 13)) == pytest.approx(0.25)  # log2 of 16
    assert float(usual_staleness(1.0, 40)) == 40.0
    assert float(usual_staleness(0.75, 40)) == 50.0


def test_only_what_is_staler_than_usual_is_decayed_further():
    alpha_c, r_c = np.array(0.3), np.array(100.0)
    assert float(client_decay(alpha_c, r_c, 0)) == 0.3
    assert float(client_decay(alpha_c, r_c, 100)) == 0.3
    assert float(client_decay(alpha_c, r_c, 144)) == pytest.approx(0.3 / 12)


@given(st.integers(1, 10_000), st.integers(1, 100_000), st.integers(0, 100_000))
def test_the_decay_is_always_between_0_and_1(size, t, tau):
    casa = ready()
    casa.t = t
    alpha_c, _, alpha_i = casa.decays(size, tau)
    assert 0 < float(alpha_i) <= float(alpha_c) < 1


def test_an_update_that_is_staler_than_usual_counts_less():
    """13 clients: alpha_c is 2 / log2(16) = 0.5 at first, and a staleness of 16 halves it twice."""
    for tau, alpha in ((13, 0.5), (16, 0.125)):
        casa = ready(clients=13, k=0.0)
        start = casa.model_for(0)
        casa.fold(Update(0, 0, start + 1, 10), Staleness(tau, tau))
        torch.testing.assert_close(casa.model_for(0), start + alpha)


def test_without_the_bilevel_decay_every_update_counts_alike():
    casa = ready(strategy=STRATEGIES.create("casa-d"))
    start = casa.model_for(0)
    casa.fold(Update(0, 0, start + 1, 10), Staleness(500, 500))
    torch.testing.assert_close(casa.model_for(0), start + 0.3)


def test_without_clustering_there_is_one_cluster_and_the_decay_stays():
    casa = ready(clients=13, strategy=STRATEGIES.create("casa-c"))
    start = casa.model_for(0)
    casa.fold(Update(0, 0, start + 1, 10), Staleness(0, 0))
    alpha = 2 * (math.e / 2.8) ** 0.001 / 4  # log2 of 16
    torch.testing.assert_close(casa.model_for(5), start + alpha)
    for step in range(60):
        casa.fold(Update(step % 13, 0, torch.randn(D), 10), Staleness(0, 0))
    assert set(casa.clusters().tolist()) == {0}


# -- the buffers (Alg. 2) -----------------------------------------------------------------------


def buffer(clients=5, budget=3) -> SimilarityBuffer:
    return SimilarityBuffer(clients, budget, ModelBank(budget + 1, torch.zeros(D)))


def unit(k: int) -> torch.Tensor:
    vector = torch.zeros(D)
    vector[k] = 1.0
    return vector


UNKNOWN = np.full((5, 5), np.nan)
ALPHAS = np.full(5, 0.3)
ALL = np.arange(5)


def test_a_recurring_model_is_not_buffered_again():
    held = buffer()
    held.offer(0, unit(0), np.array([1, 2]), UNKNOWN, ALPHAS)
    held.clear(2)
    held.offer(0, unit(1), np.array([1, 2]), UNKNOWN, ALPHAS)
    assert held.cosines(1, unit(0)).tolist() == [1.0]  # the first is kept
    assert held.cosines(2, unit(1)).tolist() == [1.0]
    assert len(held) == 2
    held.clear(1)
    assert len(held) == 1  # nobody needs the first any more


def test_nobody_is_compared_with_himself():
    held = buffer()
    held.offer(3, unit(0), ALL, UNKNOWN, ALPHAS)
    assert [held.authors(client).tolist() for client in range(5)] == [[3], [3], [3], [], [3]]
    held.offer(3, unit(1), np.array([3]), UNKNOWN, ALPHAS)
    assert len(held) == 1


def test_over_budget_pairs_that_are_known_go_first():
    held, alike = buffer(budget=2), np.zeros((5, 5))
    alike[4, 0] = alike[0, 4] = np.nan
    held.offer(0, unit(0), np.array([4]), alike, ALPHAS)  # the only one that tells something new
    held.offer(1, unit(1), np.array([0, 2, 3, 4]), alike, ALPHAS)
    held.offer(2, unit(2), np.array([0, 1, 3]), alike, ALPHAS)
    assert held.authors(4).tolist() == [0, 1]
    assert held.authors(3).tolist() == [1]  # the model of 2 was in fewer buffers


def test_over_budget_buffers_of_slow_clients_are_preferred():
    held, alphas = buffer(budget=2), np.array([0.3, 0.3, 0.3, 0.3, 0.01])
    held.offer(0, unit(0), np.array([4]), UNKNOWN, alphas)  # for a slow one
    held.offer(1, unit(1), np.array([2, 3]), UNKNOWN, alphas)
    held.offer(2, unit(2), np.array([0, 1, 3]), UNKNOWN, alphas)
    assert held.authors(4).tolist() == [0]
    assert held.authors(3).tolist() == [2]


@given(
    st.integers(1, 6),
    st.lists(st.tuples(st.integers(0, 4), st.sets(st.integers(0, 4)), st.booleans()), max_size=40),
)
def test_the_budget_is_never_exceeded_and_references_are_right(budget, arrivals):
    held = buffer(budget=budget)
    for author, readers, clears in arrivals:
        if clears:
            held.clear(author)
        held.offer(author, torch.randn(D), np.array(sorted(readers), dtype=int), UNKNOWN, ALPHAS)
        rows = held.holds[held.holds >= 0]
        assert len(held) == len(set(rows.tolist())) <= budget
        assert [int((rows == row).sum()) for row in range(budget + 1)] == held.references.tolist()


@given(st.integers(0, 10**6))
def test_what_goes_is_of_the_least_value_summed_one_by_one(seed):
    """Eq. 11: 1 / alpha_j over the buffers that hold a model of somebody not compared with j yet,
    then over all buffers; then age."""
    random = np.random.default_rng(seed)
    held = buffer(budget=4)
    held.holds[:] = random.integers(-1, 4, held.holds.shape)
    held.references[:] = np.bincount(held.holds[held.holds >= 0], minlength=5)
    held.ages[:] = random.permutation(5)
    alike = np.where(random.random((5, 5)) < 0.5, np.nan, 0.1)
    alphas = random.choice([0.25, 0.5, 1.0], 5)
    worth = {row: [0.0, 0.0, int(held.ages[row])] for row in held.holds.ravel().tolist()}
    for (j, i), row in np.ndenumerate(held.holds):
        worth[row][0] += 1 / alphas[j] if np.isnan(alike[j, i]) else 0
        worth[row][1] += 1 / alphas[j]
    worth.pop(-1, None)
    assert held._least(alike, alphas) == min(worth, key=worth.__getitem__)


def test_models_are_buffered_for_those_that_started_at_about_the_same_time():
    casa = ready(clients=4, clock="updates")
    for client in range(4):
        dispatch(casa, client)
    casa.t = 3  # three arrivals later
    dispatch(casa, 1)
    casa.fold(Update(0, 0, torch.randn(D), 10), Staleness(3, 3))
    assert [casa.buffer.authors(client).tolist() for client in range(4)] == [[], [0], [0], [0]]
    casa.t = 9
    dispatch(casa, 1)  # tau_1 = 0; clients 2 and 3 started 9 ago, which is r_c = 4 or more earlier
    casa.fold(Update(1, 0, torch.randn(D), 10), Staleness(0, 0))
    assert [casa.buffer.authors(client).tolist() for client in range(4)] == [[1], [], [0], [0]]


@pytest.mark.parametrize(("earlier", "buffered"), [(3, True), (4, False), (5, False)])
def test_the_limit_itself_is_too_long_before(earlier, buffered):
    """Four clients and no fading: r_c = 4. Client 1 started that many arrivals before client 0."""
    casa = ready(clients=4, k=0.0, clock="updates")
    dispatch(casa, 1)
    casa.t = earlier
    dispatch(casa, 0)
    casa.t = earlier + 2  # two others came meanwhile
    casa.fold(Update(0, 0, torch.randn(D), 10), Staleness(2, 2))
    assert casa.buffer.authors(1).tolist() == ([0] if buffered else [])


def test_a_split_empties_buffers_of_what_comes_from_other_parts_and_precedes_storing():
    """Client 1 started 4 before the others: usual among six, too long among three."""
    casa = ready(clients=6, k=0.0, clock="updates")
    dispatch(casa, 1)
    casa.t = 4
    for client in (0, 2, 3, 4, 5):
        dispatch(casa, client)
    casa.store(0, unit(0), 0)
    casa.store(5, unit(1), 0)
    casa.alike = np.kron(np.eye(2), np.full((3, 3), 0.9))
    np.fill_diagonal(casa.alike, 1.0)
    casa.fold(Update(2, 0, casa.model_for(2) + unit(0), 10), Staleness(0, 0))
    assert casa.clusters().tolist() == [0, 0, 0, 1, 1, 1]
    assert [casa.buffer.authors(client).tolist() for client in range(6)] == [
        *([2], [0], []),
        *([5], [5], []),
    ]


def test_a_checkpoint_of_another_budget_is_refused():
    with pytest.raises(PolytempoError, match="expected 5 and 2"):
        buffer(budget=2).load_state_dict(buffer(budget=3).state_dict())


# -- Eq. 12-14 ----------------------------------------------------------------------------------


def planted(sizes, seed=0, within=0.6, noise=0.1):
    """Groups of these sizes in random order, cosines with noise."""
    random = np.random.default_rng(seed)
    truth = random.permutation(np.repeat(np.arange(len(sizes)), sizes))
    similarity = np.where(truth[:, None] == truth, within, 0.05)
    shake = random.normal(size=similarity.shape) * noise
    similarity = similarity + (shake + shake.T) / 2
    np.fill_diagonal(similarity, 1.0)
    return truth, similarity


def same_partition(a, b) -> bool:
    return len(set(zip(a, b, strict=True))) == len(set(a)) == len(set(b))


@pytest.mark.parametrize("sizes", [(20, 20, 30, 30), (3, 4, 5, 6), (60, 60, 90, 90)])
def test_four_planted_groups_are_found_exactly(sizes):
    truth, similarity = planted(sizes)
    found = spectrum(similarity)
    assert found.parts == 4
    parts = groups(found)
    assert same_partition(parts.tolist(), truth.tolist())
    assert parts[0] == 0
    assert (sum(sizes) > DENSE) == (sum(sizes) == 300)  # both solvers are tried


def test_splitting_draws_no_global_random_numbers():
    found = spectrum(planted((3, 4, 5, 6))[1])
    before = np.random.get_state()[1:3]  # noqa: NPY002  (the global one is what is looked at)
    groups(found)
    key, position = np.random.get_state()[1:3]  # noqa: NPY002
    assert np.array_equal(key, before[0]) and position == before[1]


def test_the_spectrum_of_exact_blocks_is_the_same_every_time():
    """The solver's first vector leads nowhere after a few steps, and it has to take another."""
    similarity = np.kron(np.eye(3), np.ones((80, 80)))
    first, second = spectrum(similarity), spectrum(similarity)
    assert len(similarity) > DENSE and first.parts == 3
    assert np.array_equal(first.vectors, second.vectors)


def test_the_gap_is_that_of_the_laplacian():
    """Two pairs that know nothing of each other: eigenvalues 0, 0, 1 - (1 - c) / (1 + c), ..."""
    c = 0.6
    similarity = np.kron(np.eye(2), [[1, c], [c, 1]])
    found = spectrum(similarity)
    assert found.parts == 2
    assert found.gap == pytest.approx(1 - 0.4 / 1.6)


def test_clients_that_are_all_alike_stay_together():
    assert spectrum(planted((50,), within=0.5)[1]).parts == 1


def halves(size, within, between, noise, seed=0):
    """Two groups of half the clients each."""
    random = np.random.default_rng(seed)
    shake = noise * random.normal(size=(size, size))
    base = np.where(np.arange(size)[:, None] % 2 == np.arange(size) % 2, within, between)
    similarity = base + (shake + shake.T) / 2
    np.fill_diagonal(similarity, 1.0)
    return similarity


def chain(size, within, between, noise, seed=0):
    """Everybody is like his neighbours, and hardly like who is far away."""
    near = np.exp(-((np.arange(size)[:, None] - np.arange(size)) ** 2) / (1 + size * between))
    return within * near + halves(size, 0.0, 0.0, noise, seed)


def odd_ones(size, within, between, noise, seed=0):
    """A group of three beside a large one."""
    group = np.arange(size) < 3
    return np.where(group[:, None] == group, within, between) + halves(size, 0.0, 0.0, noise, seed)


@settings(max_examples=200, deadline=None)
@given(
    make=st.sampled_from([halves, chain, odd_ones]),
    size=st.integers(FEW + 1, 140),
    within=st.floats(0.0, 1.0),
    share=st.floats(0.0, 1.0),
    noise=st.floats(0.0, 0.5),
    needed=st.sampled_from([0.0, 1e-3, 0.1, 0.3, 0.6]),
    seed=st.integers(0, 10**6),
)
def test_what_certainly_stays_whole_does_so_by_a_full_decomposition(
    make, size, within, share, noise, needed, seed
):
    similarity = make(size, within, within * share, noise, seed)
    np.fill_diagonal(similarity, 1.0)
    if stays_whole(similarity, needed):
        affinity = similarity.clip(0, 1)
        scale = affinity.sum(1) ** -0.5
        values = np.linalg.eigvalsh(np.eye(size) - scale[:, None] * affinity * scale)[:10]
        gaps = np.diff(values)
        assert np.argmax(gaps) == 0 or gaps.max() < needed


@pytest.mark.parametrize("size", [80, 300, 900])
@pytest.mark.parametrize(
    ("within", "between", "noise"),
    [(0.5, 0.5, 0.1), (0.03, 0.03, 0.15), (0.7, 0.26, 0.1)],  # alike; unlike; nearly two groups
)
def test_it_takes_no_spectrum_to_see_that_a_cluster_holds_together(size, within, between, noise):
    similarity = halves(size, within, between, noise)
    assert spectrum(similarity).parts == 1
    assert stays_whole(similarity, needed=0.0)


def test_groups_and_doubtful_cases_are_left_to_the_spectrum():
    assert not stays_whole(planted((20, 20, 30, 30))[1], needed=0.0)
    assert not stays_whole(np.kron(np.eye(3), np.ones((80, 80))), needed=0.0)  # exact
    assert not stays_whole(halves(300, 0.7, 0.7 / 3, 0.05), needed=0.0)  # gaps of 1/2 and 1/2
    assert not stays_whole(planted((FEW,), within=0.5)[1], needed=0.0)  # few
    # two groups, with gaps of about 0.1 and 0.9
    assert not stays_whole(halves(300, 0.7, 0.04, 0.05), needed=0.8)
    assert stays_whole(halves(300, 0.7, 0.04, 0.05), needed=0.95)


@pytest.mark.parametrize("stop", [None, 150])
def test_a_run_is_the_same_without_the_shortcut_and_if_it_is_resumed(monkeypatch, stop):
    """Three groups that show after 100 arrivals: until it falls apart, the cluster is looked at on
    every one of them. Nothing of what was seen before is remembered."""
    clients = FEW + 2
    looked = {True: 0, False: 0}

    def counting(*given, **named):
        found = stays_whole(*given, **named)
        looked[found] += 1
        return found

    def states(shortcut):
        monkeypatch.setattr(module, "stays_whole", shortcut)
        random = np.random.default_rng(4)
        casa = ready(clients=clients)
        casa.alike[:] = 0.9
        for number in range(500):
            client = int(random.integers(clients))
            own = 2.0 * (number > 100) * unit(client % 3) + unit(9)
            update = casa.model_for(client) + own + 0.1 * torch.from_numpy(random.normal(size=D))
            dispatch(casa, client)
            casa.fold(Update(client, 0, update.float(), 10), Staleness(0, 0))
            if shortcut is counting and number == stop:
                state, casa = restored(casa.state_dict()), ready(clients=clients)
                casa.load_state_dict(state)
            if number % 50 == 0:
                yield casa.clusters().tolist(), torch.stack(casa.models)

    ours, full = list(states(counting)), list(states(lambda *given, **named: False))
    for (clusters, models), (others, theirs) in zip(ours, full, strict=True):
        assert clusters == others and torch.equal(models, theirs)
    assert len(set(ours[-1][0])) > 1 and looked[True] > 100


def test_no_split_while_a_pair_is_unknown():
    truth, similarity = planted((3, 3, 4, 4))
    casa = ready(clients=14)
    casa.alike = similarity.copy()
    casa.alike[2, 9] = casa.alike[9, 2] = np.nan
    casa.cut(0)
    assert set(casa.clusters().tolist()) == {0}
    casa.alike = similarity.copy()
    casa.cut(0)
    assert same_partition(casa.clusters().tolist(), truth.tolist())


def test_no_split_while_the_decay_is_large():
    """alpha_c < gap^gamma: with two groups and gap 0.46, alpha_c = 2 / log2(7) = 0.71."""
    similarity = np.kron(np.eye(2), [[1, 0.3], [0.3, 1]])  # the gap is 1 - 0.7 / 1.3 = 0.46
    for gamma, parts in ((0.3, 2), (0.6, 1)):  # 0.46^0.3 = 0.79, 0.46^0.6 = 0.63
        casa = ready(clients=4, gamma=gamma)
        casa.alike = similarity.copy()
        casa.cut(0)
        assert len(set(casa.clusters().tolist())) == parts


def test_parts_inherit_the_model_and_then_go_their_own_way():
    casa = ready(clients=6)
    casa.fold(Update(0, 0, torch.randn(D), 10), Staleness(0, 0))
    before = casa.model_for(0)
    casa.alike = np.kron(np.eye(2), np.full((3, 3), 0.9))
    np.fill_diagonal(casa.alike, 1.0)
    casa.cut(0)
    assert casa.clusters().tolist() == [0, 0, 0, 1, 1, 1]
    assert torch.equal(casa.model_for(5), before)
    revision = casa.revision(0)
    casa.fold(Update(4, 0, torch.randn(D), 10), Staleness(0, 0))
    assert torch.equal(casa.model_for(1), before) and casa.revision(0) == revision
    assert not torch.equal(casa.model_for(5), before) and casa.revision(5) != revision


# -- whole runs ---------------------------------------------------------------------------------


def arrive(server, training, client, direction, random):
    """The client uploads what it was handed, moved in its group's direction, with noise."""
    dispatch = training.pop(client)
    noise = torch.from_numpy(random.normal(size=D)).float()
    update = dispatch.params + direction + 0.1 * noise
    bits = {"mask": pack(torch.ones(D, dtype=torch.bool))} if dispatch.task.extras else {}
    for action in server.receive(Update(client, dispatch.number, update, 10, bits)):
        training[action.client] = action


def run(strategy, clients=12, absent=(), updates=120):
    """Groups 0, 1, 2 by turns; clients upload in random order, all of them in training."""
    random = np.random.default_rng(4)
    server = Server(strategy, Context(torch.zeros(D), [10] * clients, Task(), seed=0))
    training = {a.client: a for a in server.join(c for c in range(clients) if c not in absent)}
    for _ in range(updates):
        client = int(random.choice(sorted(training)))
        arrive(server, training, client, 2 * unit(client % 3), random)
    return server, training, random


@pytest.mark.parametrize("name", ["casa", "casa-d", "casa+", "casa:budget=4", "casa:clock=cluster"])
def test_groups_are_found_from_updates_that_arrive_one_by_one(name):
    server, *_ = run(STRATEGIES.create(name), updates=400)
    truth = [client % 3 for client in range(12)]
    assert same_partition(server.strategy.clusters().tolist(), truth)
    assert len(server.strategy.buffer) <= server.strategy.buffer.budget


def test_staleness_by_cluster_counts_what_the_own_cluster_has_folded():
    """Four clients start together, two of them upload; then two clusters, {0, 1} and {2, 3}. After
    another upload of 0, client 1 is 3 behind and client 3 is 2; by updates both are 3."""
    for clock, expected in (("updates", [0, 3, 0, 3]), ("cluster", [0, 3, 0, 2])):
        casa = ready(clients=4, clock=clock)
        for client in range(4):
            dispatch(casa, client)
        for client in (0, 2):
            casa.fold(Update(client, 0, unit(client), 10), Staleness(client // 2, 0))
        casa.split(0, np.array([0, 0, 1, 1]))
        dispatch(casa, 0)
        casa.fold(Update(0, 1, unit(0), 10), Staleness(0, 0))
        casa.t += 1  # the next arrival
        assert casa.staleness().tolist() == expected
        assert casa.age(3, updates=3) == expected[3]
        casa.leave_cluster(np.array([3]))
        assert casa.age(3, updates=3) == 3  # in none, so that updates are all that is known


@pytest.mark.parametrize("clock", ["updates", "cluster"])
def test_the_clock_matters_only_where_there_are_clusters(clock):
    """Staleness 6 in a cluster of 8 is usual, and in one of 4 it is not, unless 4 of the 6 arrivals
    were others'."""
    casa = ready(clients=8, clock=clock)
    for client in range(8):
        dispatch(casa, client)
    for client in (0, 1, 2, 4, 5, 6):  # three of each half
        casa.fold(Update(client, 0, casa.model_for(client), 10), Staleness(casa.t, casa.t))
    weights = []
    for number in (1, 2):
        casa.models[-1] = torch.zeros(D)
        casa.fold(Update(7, 0, torch.ones(D), 10), Staleness(6, 6))
        weights.append(float(casa.models[-1][0]))
        if number == 1:
            casa.split(0, np.array([0, 0, 0, 0, 1, 1, 1, 1]))
            casa.begun[7], casa.folded = 0, [7, 3]  # what that half alone has folded
    fading = omega(casa.t, casa.k)
    small = float(cluster_decay(2.0, fading, 4))
    assert weights[0] == pytest.approx(float(cluster_decay(2.0, omega(7, casa.k), 8)), abs=1e-6)
    late = {"updates": math.sqrt(6), "cluster": 1.0}[clock]
    assert weights[1] == pytest.approx(small / late, abs=1e-6)


def test_similarities_are_the_cosines_of_what_was_compared():
    casa = ready(clients=3)
    first, second = torch.randn(D), torch.randn(D)
    for client in range(3):
        dispatch(casa, client)
    start = casa.model_for(0)
    casa.fold(Update(0, 0, start + first, 10), Staleness(0, 0))
    casa.fold(Update(1, 0, start + second, 10), Staleness(1, 1))
    a, b = first.double().numpy(), second.double().numpy()
    expected = a @ b / math.sqrt((a @ a) * (b @ b))
    assert casa.similarity()[0, 1] == pytest.approx(expected, abs=1e-6)
    assert np.isnan(casa.similarity()[0, 2])


@pytest.mark.parametrize("reference", ["update", "model", "displacement"])
def test_what_is_compared_is_for_the_reference_to_say(reference):
    casa = ready(clients=3, reference=reference)
    initial = casa.context.initial
    casa.models[0] = 2 * unit(5)  # what both are handed
    for client in (0, 1):
        dispatch(casa, client)
    models = [torch.randn(D), torch.randn(D)]
    for client in (0, 1):
        casa.fold(Update(client, 0, models[client], 10), Staleness(client, client))
    origin = {"update": 2 * unit(5), "model": torch.zeros(D), "displacement": initial}[reference]
    a, b = ((model - origin).double().numpy() for model in models)
    expected = a @ b / math.sqrt((a @ a) * (b @ b))
    assert casa.similarity()[0, 1] == pytest.approx(expected, abs=1e-6)


def test_large_clients_count_more_in_what_represents_a_cluster():
    """Cluster 0 is e0 and e1 by 1 : 9; unweighted, the newcomer e0 + e2 would be more like it than
    like cluster 1, which is (0.55 e2 + 0.84 e3): cosines 0.5 and 0.39, but by samples 0.08."""
    casa = ready(samples=[10, 90, 10, 10])
    casa.cluster[:] = [0, 0, 1, -1]
    casa.models, casa.revisions, casa.folded = [casa.models[0]] * 2, [0, 0], [0, 0]
    dispatch(casa, 3)
    for client, vector in enumerate([unit(0), unit(1), 0.55 * unit(2) + 0.84 * unit(3)]):
        casa.store(client, vector, 0)
    casa.fold(Update(3, 0, casa.model_for(3) + unit(0) + unit(2), 10), Staleness(0, 0))
    assert casa.clusters().tolist() == [0, 0, 1, 1]


@pytest.mark.parametrize("late", [9, 10, 11])
def test_a_newcomer_joins_the_cluster_that_represents_it_best(late):
    """Client `late` is of group late % 3; it is first seen when the others have long parted."""
    server, training, random = run(CASA(founders=3.0), absent=[late], updates=200)
    clusters = server.strategy.clusters()
    assert clusters[late] == -1
    assert len(set(clusters.tolist())) == 4
    for action in server.join([late]):
        training[action.client] = action
    for client in [c for c in sorted(training) if c != late]:  # others upload while it trains
        arrive(server, training, client, 2 * unit(client % 3), random)
    authors = server.strategy.buffer.authors(late)
    assert {*(authors % 3).tolist()} == {0, 1, 2}  # of all clusters
    arrive(server, training, late, 2 * unit(late % 3), random)
    clusters = server.strategy.clusters()
    assert clusters[late] == clusters[late % 3]


def test_a_newcomer_with_an_empty_buffer_joins_the_most_similar_model():
    casa = ready(clients=3)
    casa.cluster[:] = [0, 1, -1]
    casa.models = [casa.context.initial + unit(0), casa.context.initial + unit(1)]
    casa.revisions, casa.folded = [1, 2], [0, 0]
    casa.fold(Update(2, 0, casa.context.initial + 3 * unit(1) + unit(0), 10), Staleness(0, 0))
    assert casa.clusters().tolist() == [0, 1, 1]


def test_a_representative_is_the_sample_weighted_mean():
    held = buffer()
    held.offer(0, unit(0), np.array([4]), UNKNOWN, ALPHAS)
    held.offer(1, unit(1), np.array([4]), UNKNOWN, ALPHAS)
    mean = held.mean(4, np.array([0, 1]), np.array([30.0, 10.0]))
    torch.testing.assert_close(mean, 0.75 * unit(0) + 0.25 * unit(1))


# -- clients that are gone ------------------------------------------------------------------------


def test_what_is_lost_leaves_nothing_behind():
    casa = ready(clients=3)
    for client in range(3):
        dispatch(casa, client)
    casa.fold(Update(0, 0, torch.randn(D), 10), Staleness(0, 0))
    assert casa.buffer.authors(2).tolist() == [0]
    casa.lost(2)
    assert len(casa.buffer.authors(2)) == 0 and casa.started[2] == -1
    assert set(casa.received) == {"1"}
    casa.fold(Update(1, 0, torch.randn(D), 10), Staleness(1, 1))
    assert casa.buffer.authors(2).tolist() == [1]  # it may be started again


@pytest.mark.parametrize("training", [True, False])
def test_nothing_is_buffered_for_who_has_left_until_it_is_back(training):
    server = Server(CASA(), Context(torch.zeros(D), [10] * 6, Task(), seed=0), refill="same")
    sent = {action.client: action for action in server.join(range(6))}
    random = np.random.default_rng(0)
    if not training:
        server.away(3)
        arrive(server, sent, 3, unit(3), random)
    arrive(server, sent, 0, unit(0), random)
    assert server.strategy.buffer.authors(3).tolist() == [0]
    server.leave(3)
    arrive(server, sent, 1, unit(1), random)
    assert len(server.strategy.buffer.authors(3)) == 0
    sent |= {action.client: action for action in server.join([3])}
    arrive(server, sent, 2, unit(2), random)
    assert server.strategy.buffer.authors(3).tolist() == [2]


def test_those_that_never_came_do_not_keep_models_from_others():
    """Nobody is waited for after 3 n arrivals; what was kept for those that did not come goes."""
    server, *_ = run(CASA(founders=3.0), absent=[3, 7], updates=36)
    assert len(server.strategy.buffer.authors(3)) > 0
    server, *_ = run(CASA(founders=3.0), absent=[3, 7], updates=60)
    assert server.strategy.clusters()[[3, 7]].tolist() == [-1, -1]
    assert not (server.strategy.buffer.holds[[3, 7]] >= 0).any()


@pytest.mark.parametrize("compared", [True, False])
def test_who_has_left_does_not_hold_up_a_split(compared):
    casa = ready(clients=7)
    casa.alike = np.kron(np.eye(2), np.full((4, 4), 0.9))[:7, :7]
    np.fill_diagonal(casa.alike, 1.0)
    if not compared:
        casa.alike[0, 5] = casa.alike[5, 0] = np.nan
        casa.cut(0)
        assert set(casa.clusters().tolist()) == {0}  # it may still come
    casa.cluster[6] = -1
    dispatch(casa, 6)
    casa.store(0, unit(0), 0)
    casa.store(5, unit(1), 0)
    casa.left(0)
    casa.cut(0)
    assert casa.buffer.authors(6).tolist() == ([0, 5] if compared else [5])
    casa.fold(Update(6, 0, casa.model_for(6) + unit(1), 10), Staleness(0, 0))
    expected = [0, 0, 0, 0, 1, 1, 1] if compared else [-1, 0, 0, 0, 1, 1, 1]
    assert casa.clusters().tolist() == expected


def test_the_others_still_wait_for_each_other():
    casa = ready(clients=7)
    casa.alike = np.kron(np.eye(2), np.full((4, 4), 0.9))[:7, :7]
    casa.alike[[0, 2, 5, 6], [5, 6, 0, 2]] = np.nan
    casa.left(0)
    casa.cut(0)
    assert casa.clusters().tolist() == [0] * 7


# -- CASA+ --------------------------------------------------------------------------------------


def share(task: Task) -> float:
    """Of the parameters, that the task leaves as they are."""
    [mask] = task.client_steps
    assert isinstance(mask, Mask)
    return mask.share


def test_the_sparsity_of_the_paper():
    """100 clients, a staleness of 400 at the first arrival: 0.2991 - 0.2991 / 20 = 0.2841."""
    casa = ready(clients=100, strategy=CASAPlus(s_0=0.3, r_end=1000))
    casa.t = 1
    assert share(casa.task(0)) == 0.0  # it is not late
    casa.late[0] = 400
    assert share(casa.task(0)) == pytest.approx(0.3 * 0.2841, abs=1e-4)
    casa.t = 501  # half-way the cosine is 0
    decay = (math.e / 2.8) ** 0.501
    assert share(casa.task(0)) == pytest.approx(0.15 * 0.2841 * decay, abs=1e-4)
    casa.t = 1001
    assert share(casa.task(0)) == pytest.approx(0, abs=1e-12)
    casa.t = 2001  # and does not come back
    assert share(casa.task(0)) == pytest.approx(0, abs=1e-12)


def test_who_was_late_is_to_train_a_part_next_time():
    """Three others upload 5 times each while client 3 trains: 15 is more than usual for four."""
    server = Server(CASAPlus(), Context(torch.zeros(D), [10] * 4, Task(), seed=0), refill="same")
    training = {action.client: action for action in server.join(range(4))}
    random = np.random.default_rng(0)
    for step in range(15):
        arrive(server, training, step % 3, unit(0), random)
    assert share(training[3].task) == 0 and share(training[0].task) == 0
    arrive(server, training, 3, unit(0), random)
    assert share(training[0].task) == 0
    alpha_c = 2 * (math.e / 2.8) ** 0.016 / math.log2(7)
    expected = 0.3 * alpha_c * (1 - 1 / math.sqrt(15))
    assert share(training[3].task) == pytest.approx(expected, rel=1e-5)


def test_only_unmasked_parameters_are_mixed():
    casa = ready(strategy=CASAPlus())
    start, mask = casa.model_for(0), torch.arange(D) % 3 > 0
    update = Update(0, 0, start + 1, 10, {"mask": pack(mask)})
    casa.fold(update, Staleness(0, 0))
    moved = casa.model_for(0) != start
    assert torch.equal(moved, mask)


def test_a_mask_of_the_wrong_size_is_refused_and_leaves_no_trace():
    server = Server(CASAPlus(), Context(torch.zeros(D), [10] * 3, Task(), seed=0))
    actions = server.join(range(3))
    bits = {"mask": torch.zeros(1, D // 8 + 1, dtype=torch.uint8)}
    with pytest.raises(Refused, match="a bit for each of 24 parameters"):
        server.receive(Update(actions[0].client, actions[0].number, torch.ones(D), 10, bits))
    assert server.strategy.t == 0 and server.updates == 0


# -- more than chance ---------------------------------------------------------------------------


def test_a_gap_that_chance_explains_splits_hardly_ever():
    """Clients that are hardly alike, with noise and no groups: the paper's condition splits most
    small clusters of them. With 20 shuffles one in 21 is split by chance."""
    found = {}
    for shuffles in (0, 20):
        found[shuffles] = 0
        for seed in range(20):
            casa = ready(clients=8, shuffles=shuffles)
            casa.alike = planted((8,), seed, within=0.02, noise=0.1)[1]
            casa.cut(0)
            found[shuffles] += len(set(casa.clusters().tolist())) > 1
    assert found[0] >= 12 and found[20] <= 3


def test_groups_are_more_than_chance():
    truth, similarity = planted((5, 6, 7, 8), within=0.4)
    casa = ready(clients=26, shuffles=20)
    casa.alike = similarity.copy()
    casa.cut(0)
    assert same_partition(casa.clusters().tolist(), truth.tolist())
    dealt = np.random.default_rng(0)
    before = similarity.copy()
    assert gap_by_chance(similarity, 20, dealt) < spectrum(similarity).gap / 2
    assert np.array_equal(similarity, before)


# -- a replay in plain Python, written from the paper --------------------------------------------


def paper_casa(n, moved, script, clock):
    """Algorithms 1 to 3 with buffers that hold everything, for at most two parts per split.
    `script` says who uploads, and the noise in what it uploads; everybody is always in training.
    Returns the cluster of each client, the model of each cluster, and A."""
    d = len(moved[0])
    model, cluster, folded, t = [[0.0] * d], [0] * n, [0], 0
    handed = [(model[0], 0, 0)] * n  # the model, and both clocks at that time
    alike = [[1.0 if i == j else None for j in range(n)] for i in range(n)]
    buffer = [{} for _ in range(n)]

    def tau(i):
        _, updates, own = handed[i]
        return folded[cluster[i]] - own if clock == "cluster" else t - updates

    for i, noise in script:
        taus = [tau(j) for j in range(n)]
        way = [moved[i][k] + noise[k] for k in range(d)]
        theta = [handed[i][0][k] + way[k] for k in range(d)]
        t += 1
        for j, other in buffer[i].items():  # Eq. 10
            dot = sum(a * b for a, b in zip(way, other, strict=True))
            norms = math.sqrt(sum(a * a for a in way) * sum(b * b for b in other))
            alike[i][j] = alike[j][i] = dot / norms
        buffer[i] = {}
        fading = (math.e / 2.8) ** (0.001 * t)
        members = [j for j in range(n) if cluster[j] == cluster[i]]
        known = all(alike[a][b] is not None for a in members for b in members)
        if known and len(members) > 2:  # Eq. 12-14
            a = np.array([[max(alike[x][y], 0.0) for y in members] for x in members])
            root = np.diag(a.sum(1) ** -0.5)
            values, vectors = np.linalg.eigh(np.eye(len(members)) - root @ a @ root)
            gaps = np.diff(values[:10])
            parts, alpha_c = int(np.argmax(gaps)) + 1, 2 * fading / math.log2(len(members) + 3)
            if parts > 1 and alpha_c < gaps.max() ** 0.15:
                assert parts == 2
                side = vectors[:, 1] / np.sqrt(a.sum(1)) * np.sign(vectors[0, 1])
                new, old = len(model), cluster[i]
                model.append(model[old])
                folded.append(folded[old])
                for j, value in zip(members, side, strict=True):
                    cluster[j] = new if value < 0 else old
                for j in range(n):
                    buffer[j] = {x: v for x, v in buffer[j].items() if cluster[x] == cluster[j]}
        size = cluster.count(cluster[i])
        alpha_c, r_c = 2 * fading / math.log2(size + 3), size * (2 - fading)  # Eq. 6, 8
        for j in range(n):  # Alg. 2
            if cluster[j] == cluster[i] and j != i and taus[j] - taus[i] < r_c:
                buffer[j].setdefault(i, way)
        alpha = alpha_c if taus[i] <= r_c else alpha_c / math.sqrt(taus[i])  # Eq. 7
        k = cluster[i]
        model[k] = [alpha * x + (1 - alpha) * y for x, y in zip(theta, model[k], strict=True)]
        folded[k] += 1
        handed[i] = (model[k], t, folded[k])
    return cluster, model, alike


@pytest.mark.parametrize("clock", ["updates", "cluster"])
@pytest.mark.parametrize("seed", range(3))
def test_a_run_equals_the_straight_line_derivation(seed, clock):
    random, n = np.random.default_rng(seed), 8
    moved = [
        2 * unit(i % 2) + 0.3 * torch.from_numpy(random.normal(size=D)).float() for i in range(n)
    ]
    chances = random.dirichlet(np.ones(n))  # some come often, some rarely: many are late
    script = [
        (int(i), torch.from_numpy(0.1 * random.normal(size=D)).float())
        for i in random.choice(n, size=300, p=0.9 * chances + 0.1 / n)
    ]
    casa = STRATEGIES.create(f"casa:clock={clock},budget=1000,founders=1000")
    server = Server(casa, Context(torch.zeros(D), [10] * n, Task(), seed=0))
    training = {action.client: action for action in server.join(range(n))}
    for client, noise in script:
        dispatch = training.pop(client)
        vector = dispatch.params + moved[client] + noise
        for action in server.receive(Update(client, dispatch.number, vector, 10)):
            training[action.client] = action
    plain = [(i, noise.tolist()) for i, noise in script]
    cluster, model, alike = paper_casa(n, [m.tolist() for m in moved], plain, clock)
    assert same_partition(casa.clusters().tolist(), cluster) and len(model) > 1
    for client in range(n):
        found, expected = casa.model_for(client).numpy(), np.array(model[cluster[client]])
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4)
    found = casa.similarity()
    expected = np.array([[np.nan if v is None else v for v in row] for row in alike])
    np.testing.assert_allclose(found, expected, atol=1e-5)
