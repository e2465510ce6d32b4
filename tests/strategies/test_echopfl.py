"""EchoPFL (our reading) against a straight-line derivation, by hand, and on groups it must find."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from polytempo import (
    Context,
    Federation,
    InFlight,
    PolytempoError,
    Server,
    Staleness,
    Task,
    Update,
    simulate,
)
from polytempo.core.messages import Dispatch
from polytempo.strategies import STRATEGIES, EchoPFL

D, CLIENTS = 4, 6


def ready(clients=CLIENTS, initial=(0.0, 0.0), **options) -> EchoPFL:
    strategy = EchoPFL(**options)
    strategy.setup(Context(torch.tensor(initial), [10] * clients, Task(), seed=0))
    return strategy


def fold(strategy: EchoPFL, client: int, *theta: float) -> None:
    assert strategy.fold(Update(client, 0, torch.tensor(theta), 10), Staleness(99, 99))


def send(strategy: EchoPFL, client: int) -> None:
    strategy.dispatched(Dispatch(client, 0, strategy.model_for(client), Task()))


# -- by hand --------------------------------------------------------------------------------------


def test_updates_open_clusters_join_the_nearest_and_count_by_their_staleness():
    strategy = ready(join=0.5, merge=0.9, alpha=0.5, a=1.0)
    fold(strategy, 0, 2.0, 0.0)
    fold(strategy, 1, 0.0, 4.0)  # at a right angle
    assert strategy.clusters().tolist() == [0, 1, -1, -1, -1, -1]
    assert strategy.model_for(1).tolist() == [0.0, 4.0]
    # cosines 0.8 and 0.6; the initial model has missed two updates: 0.5 / 3 of the way
    fold(strategy, 2, 4.0, 3.0)
    assert strategy.clusters().tolist() == [0, 1, 0, -1, -1, -1]
    assert strategy.model_for(0).tolist() == pytest.approx([2 + 2 / 6, 3 / 6])
    send(strategy, 2)
    fold(strategy, 0, 2 + 2 / 6, 3 / 6)  # changes nothing, but 2 misses it
    fold(strategy, 1, 0.0, 4.0)  # not 2's cluster
    fold(strategy, 2, 6 + 2 / 6, 3 / 6)  # 0.5 / 2 of the way
    assert strategy.model_for(0).tolist() == pytest.approx([3 + 2 / 6, 3 / 6])


def test_directions_are_seen_from_the_initial_model():
    strategy = ready(initial=(10.0, 10.0), join=0.5, merge=0.9)
    fold(strategy, 0, 11.0, 10.0)
    fold(strategy, 1, 9.0, 10.0)  # as models nearly parallel, as displacements opposite
    assert strategy.clusters().tolist()[:2] == [0, 1]


def test_clusters_that_have_become_alike_are_merged_by_their_sizes():
    strategy = ready(join=0.5, merge=0.9, alpha=1.0, a=0.0)
    fold(strategy, 0, 1.0, 0.0)
    fold(strategy, 1, 0.0, 1.0)
    fold(strategy, 2, 0.0, 1.0)
    # nearer to (0, 1), at cosine 0.8; with alpha 1 its model is (3, 4), at 0.6 of (1, 0)
    fold(strategy, 1, 3.0, 4.0)
    assert strategy.clusters().tolist()[:3] == [0, 1, 1]
    fold(strategy, 0, 4.0, 3.0)  # to (3, 4) 0.96: moves there, and 0 is empty
    assert strategy.clusters().tolist()[:3] == [1, 1, 1]
    fold(strategy, 3, 1.0, -1.0)  # takes the number that is free: cosine 1 / (5 sqrt 2)
    fold(strategy, 4, 1.0, 0.0)  # 0.8 of (4, 3), 0.707 of (1, -1): model (1, 0)
    assert strategy.clusters().tolist() == [1, 1, 1, 0, 1, -1]
    fold(strategy, 3, 1.0, -0.8)  # own 0.99, other 0.78: own, now at 0.78 of (1, 0)
    fold(strategy, 3, 2.0, -0.9)  # own 0.96, other 0.91: own, now at 0.91, so they are one
    assert strategy.clusters().tolist() == [0, 0, 0, 0, 0, -1]
    mean = [(4 * 1.0 + 2.0) / 5, -0.9 / 5]
    assert strategy.model_for(3).tolist() == pytest.approx(mean)
    # who has not uploaded trains the initial model, and would use the mean of all clusters
    assert strategy.model_for(5).tolist() == [0.0, 0.0]
    assert strategy.serve(5).tolist() == pytest.approx(mean)


def test_a_client_that_is_like_nobody_any_more_leaves_its_cluster():
    strategy = ready(join=0.5, merge=0.9, alpha=0.1)
    fold(strategy, 0, 1.0, 0.0)
    fold(strategy, 1, 1.0, 0.1)
    assert strategy.clusters().tolist()[:2] == [0, 0]
    fold(strategy, 1, -1.0, 0.0)
    assert strategy.clusters().tolist()[:2] == [0, 1]
    fold(strategy, 1, 0.0, -2.0)  # alone: its cluster begins anew
    assert strategy.clusters().tolist()[:2] == [0, 1]
    assert strategy.model_for(1).tolist() == [0.0, -2.0]


def test_who_trains_on_an_old_model_is_sent_a_fresh_one_and_no_one_else():
    strategy = EchoPFL(join=0.5, merge=0.9, alpha=0.5, a=0.0, broadcast=0.3)
    context = Context(torch.zeros(2), [10] * 4, Task(), seed=0)
    server = Server(strategy, context, concurrency=4, refill="same")
    open_ = {action.client: action.number for action in server.join(range(4))}

    def upload(client: int, *theta: float) -> list[int]:
        actions = server.receive(Update(client, open_[client], torch.tensor(theta), 10))
        open_.update({action.client: action.number for action in actions})
        return [action.client for action in actions if action.preempt]

    assert upload(0, 1.0, 0.0) == []
    assert upload(1, 1.0, 0.0) == []  # nothing has changed
    assert upload(2, 0.0, 1.0) == []  # another cluster; 3 is in none
    assert upload(0, 1.8, 0.0) == []  # (1.4, 0): 0.4 / 1.4 < 0.3
    assert upload(0, 1.6, 0.0) == [1]  # (1.5, 0): 0.5 / 1.5 > 0.3 for 1, who still has (1, 0)
    assert upload(0, 1.6, 0.0) == []  # 1 has been sent (1.5, 0)


def test_broadcasts_can_be_turned_off():
    for multicast, expected in ((True, [1]), (False, [])):
        strategy = ready(multicast=multicast, join=0.0)
        fold(strategy, 0, 1.0, 0.0)
        fold(strategy, 1, 1.0, 0.0)
        send(strategy, 1)
        fold(strategy, 0, 9.0, 0.0)
        assert list(strategy.refresh([InFlight(1, Staleness(1, 1))])) == expected


def test_options_that_contradict_each_other_are_refused():
    with pytest.raises(PolytempoError, match=r"merge is 0\.2, below join, 0\.4"):
        EchoPFL(join=0.4, merge=0.2)
    with pytest.raises(PolytempoError, match="broadcast"):
        STRATEGIES.create("echopfl:broadcast=inf")


# -- a replay in plain Python ---------------------------------------------------------------------


def straight_line(initial, first, script, join, merge, alpha, a, broadcast):
    """The formulas over lists: a cluster is a set of clients beside its model. `script`: who
    uploads what, and who is started then. Returns the clusters, and whom was broadcast to."""

    def moved(x):
        return [p - q for p, q in zip(x, initial, strict=True)]

    def cos(x, y):
        dot = sum(p * q for p, q in zip(moved(x), moved(y), strict=True))
        return dot / math.hypot(*moved(x)) / math.hypot(*moved(y))

    def mix(x, y, weight):
        return [(1 - weight) * p + weight * q for p, q in zip(x, y, strict=True)]

    clusters: list[tuple[set, list]] = []
    sent = dict.fromkeys(first, initial)
    missed = [0] * CLIENTS
    broadcasts, openings, merges = [], 0, 0
    for i, theta, started in script:
        del sent[i]
        likeness, best = max(
            ((cos(theta, model), k) for k, (_, model) in enumerate(clusters)), default=(-2, None)
        )
        clusters = [(who - {i}, model) for who, model in clusters]
        if likeness < join:
            openings += 1
            clusters.append(({i}, theta))
        else:
            who, model = clusters[best]
            clusters[best] = who | {i}, mix(model, theta, alpha / (1 + missed[i]) ** a)
        clusters = [(who, model) for who, model in clusters if who]
        while len(clusters) > 1:
            [(who, model)] = [pair for pair in clusters if i in pair[0]]
            others = [pair for pair in clusters if i not in pair[0]]
            likest = max(others, key=lambda pair: cos(model, pair[1]))
            if cos(model, likest[1]) < merge:
                break
            merges += 1
            others.remove(likest)
            share = len(likest[0]) / len(who | likest[0])
            clusters = [*others, (who | likest[0], mix(model, likest[1], share))]
        placed = set().union(*(who for who, _ in clusters))
        [(ours, _)] = [pair for pair in clusters if i in pair[0]]
        for j in range(CLIENTS):
            missed[j] += j in ours or j not in placed
        told = []
        for who, model in clusters:
            for j in who & set(sent):
                if math.dist(model, sent[j]) > broadcast * math.dist(model, initial):
                    told.append(j)
                    sent[j], missed[j] = model, 0
        broadcasts.append(sorted(told))
        sent[started] = initial
        for who, model in clusters:
            if started in who:
                sent[started], missed[started] = model, 0
    return clusters, broadcasts, openings, merges


@pytest.mark.parametrize("seed", range(4))
def test_a_run_equals_the_straight_line_derivation(seed):
    random = np.random.default_rng(seed)
    initial = torch.from_numpy(random.normal(size=D)).float()
    options = {"join": 0.4, "merge": 0.6, "alpha": 0.7, "a": 0.5, "broadcast": 0.25}
    strategy = EchoPFL(**options)
    server = Server(strategy, Context(initial, [10] * CLIENTS, Task(), seed), concurrency=4)
    training = {action.client: action.number for action in server.join(range(CLIENTS))}
    first, script, told = list(training), [], []
    for _ in range(60):
        sender = int(random.choice(sorted(training)))
        theta = strategy.received[str(sender)] + torch.from_numpy(random.normal(size=D)).float()
        actions = server.receive(Update(sender, training.pop(sender), theta, 10))
        told.append(sorted(action.client for action in actions if action.preempt))
        [started] = [action.client for action in actions if not action.preempt]
        training |= {action.client: action.number for action in actions}
        script.append((sender, theta.tolist(), started))
    clusters, broadcasts, openings, merges = straight_line(
        initial.tolist(), first, script, **options
    )
    assert told == broadcasts
    assert sum(map(len, told)) and openings > 1 and merges
    found = strategy.clusters()
    assert sorted(map(sorted, (who for who, _ in clusters))) == sorted(
        np.flatnonzero(found == number).tolist() for number in set(found.tolist()) - {-1}
    )
    for who, model in clusters:
        for client in who:
            np.testing.assert_allclose(strategy.model_for(client), model, rtol=1e-4, atol=1e-5)


# -- properties -----------------------------------------------------------------------------------


@given(st.lists(st.tuples(st.integers(0, CLIENTS - 1), st.integers(0, 7)), max_size=20))
@settings(deadline=None, max_examples=60)
def test_one_cluster_for_all_is_asynchronous_averaging_inside_the_hull_of_uploads(uploads):
    """With `join` at its least everybody joins the first: the model is a mean of what came."""
    strategy = ready(join=-1.0, merge=1.0, a=0.0, alpha=0.25)
    expected = None
    for client, eighths in uploads:
        angle = eighths * math.pi / 4
        theta = np.array([math.cos(angle), math.sin(angle)])
        fold(strategy, client, *theta.tolist())
        expected = theta if expected is None else 0.75 * expected + 0.25 * theta
    heard = {client for client, _ in uploads}
    assert set(np.flatnonzero(strategy.clusters() == 0).tolist()) == heard
    for client in heard:
        np.testing.assert_allclose(strategy.model_for(client), expected, atol=1e-5)


@given(
    st.lists(st.tuples(st.integers(0, CLIENTS - 1), st.integers(0, 11)), min_size=1, max_size=30)
)
@settings(deadline=None, max_examples=60)
def test_the_cluster_of_the_sender_is_like_no_other_and_numbers_are_used_again(uploads):
    strategy = ready(join=0.4, merge=0.7)
    for client, twelfths in uploads:
        angle = twelfths * math.pi / 6 + 0.1
        fold(strategy, client, math.cos(angle), math.sin(angle))
        own = int(strategy.clusters()[client])
        for number in set(strategy.clusters().tolist()) - {-1, own}:
            ours, theirs = strategy.models[own].double(), strategy.models[number].double()
            assert float(ours @ theirs / ours.norm() / theirs.norm()) < 0.7 + 1e-5
    assert len(strategy.models) <= CLIENTS


def test_groups_are_found_without_knowing_their_number():
    fed = Federation.load("synthetic:groups=2,samples=40,features=8,classes=3", clients=8, seed=1)
    settings = {"model": "linear", "updates": 120, "eval_every": 40, "lr": 0.1, "progress": False}
    result = simulate(fed, strategy="echopfl", concurrency=4, adapt_epochs=0, **settings)
    assert result.summary["clusters"] == 2 and result.summary["unclustered"] == 0
    assert result.summary["cluster_ari"] == 1.0
