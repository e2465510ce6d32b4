"""How well clusters are found, and what is kept of them."""

from itertools import combinations
from types import SimpleNamespace
from typing import ClassVar

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from polytempo import Federation, Staleness, Task, Update, simulate
from polytempo.core.events import Upload
from polytempo.core.strategy import Context
from polytempo.simulation import Simulator
from polytempo.simulation.clusters import MATRICES, Clusters, adjusted_rand, purity
from polytempo.storage import load_state, save_state
from polytempo.strategies import FedAsync


@pytest.mark.parametrize(
    ("truth", "found", "pure", "ari"),
    [
        ("aabb", "1100", 1.0, 1.0),  # the same, otherwise numbered
        ("aabb", "0000", 0.5, 0.0),  # all in one: no better than chance
        ("aabb", "0123", 1.0, 0.0),  # all alone: pure, and no better than chance
        ("aabb", "0101", 0.5, -0.5),  # 0 of 2 pairs, 2/3 by chance, of 2: -(2/3) / (4/3)
        ("aaabbb", "000011", 5 / 6, 0.32432432),  # 4 of 6 and 7; 2.8 by chance: 1.2 / 3.7
        ("aaaa", "0000", 1.0, 1.0),
        ("a", "0", 1.0, 1.0),
    ],
)
def test_purity_and_rand_index_by_hand(truth, found, pure, ari):
    truth, found = np.array(list(truth)), np.array(list(found))
    assert purity(truth, found) == pytest.approx(pure)
    assert adjusted_rand(truth, found) == pytest.approx(ari)


def test_of_nobody_nothing_is_known():
    nobody = np.array([], dtype=np.int64)
    assert purity(nobody, nobody) is None and adjusted_rand(nobody, nobody) is None


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 4)), min_size=2, max_size=30))
def test_the_rand_index_counts_pairs(clients):
    """Pairs in the same group and cluster, less those by chance, of the most there can be."""
    pairs = [(a == b, c == d) for (a, c), (b, d) in combinations(clients, 2)]
    groups, clusters = (sum(same) for same in zip(*pairs, strict=True))
    together = sum(group and cluster for group, cluster in pairs)
    chance, most = groups * clusters / len(pairs), (groups + clusters) / 2
    expected = (together - chance) / (most - chance) if most != chance else 1.0
    truth, found = np.array(clients).T
    assert adjusted_rand(truth, found) == pytest.approx(expected)


class Splits(FedAsync):
    """Everybody in one cluster; whoever has reported twice goes to cluster 1 + its id % 2, and
    client 5 is in none before it reports."""

    state: ClassVar[tuple[str, ...]] = (*FedAsync.state, "reports")

    def setup(self, context: Context) -> None:
        super().setup(context)
        self.reports = np.zeros(context.clients, dtype=np.int64)

    def fold(self, update: Update, staleness: Staleness) -> bool:
        self.reports[update.client] += 1
        return super().fold(update, staleness)

    def clusters(self):
        found = np.where(self.reports > 1, 1 + np.arange(len(self.reports)) % 2, 0)
        if self.reports[5] == 0:
            found[5] = -1
        return found

    def similarity(self):
        return np.outer(self.reports, self.reports) / 1.0


def world(every: int = 3) -> Simulator:
    fed = Federation.load("synthetic:groups=2,samples=12,features=5,classes=4", clients=6, seed=1)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        module = nn.Linear(5, 4)
    task = Task(epochs=1, batch_size=4)
    return Simulator(
        fed,
        module,
        Splits(),
        task=task,
        concurrency=3,
        eval_every=every,
        adapt_epochs=0,
        check=True,
    )


def clusters(simulator: Simulator) -> Clusters:
    return simulator.extensions["clusters"]


def test_every_evaluation_says_how_well_clusters_are_found():
    simulator = world()
    simulator.run(24)
    first, last = simulator.history[0], simulator.history[-1]
    assert first["clusters"] == 1 and first["cluster_purity"] == pytest.approx(3 / 5)
    truth, found = simulator.federation.groups, simulator.strategy.clusters()
    held = found >= 0
    assert last["clusters"] == len(set(found[held].tolist()))
    assert last["cluster_ari"] == adjusted_rand(truth[held], found[held])
    assert first["unclustered"] == 1 and last["unclustered"] == (~held).sum()


def test_changes_are_dated_and_lead_to_the_present():
    simulator, seen = world(), []

    def watch(event):
        if isinstance(event, Upload):
            seen.append((event.updates, event.time, simulator.strategy.clusters()))

    simulator.observers.append(watch)
    simulator.run(24)
    changes = clusters(simulator).changes
    for round_, time, expected in seen:
        now = np.full(6, -1)
        for at, when, client, cluster in changes:
            if at <= round_:
                assert when <= time
                now[client] = cluster
        assert np.array_equal(now, expected)
    assert len(changes) < 6 * 3  # nothing but changes


def test_a_bounded_number_of_matrices_is_kept_spread_over_the_run():
    class Always(FedAsync):
        def similarity(self):
            return np.eye(3)

    for evaluations in (1, MATRICES, MATRICES + 1, 50, 1000):
        run = SimpleNamespace(strategy=Always(), federation=SimpleNamespace(groups=None, clients=3))
        kept = Clusters(run)
        for number in range(evaluations):
            run.updates, run.time = number, float(number)
            kept.evaluated({})
        updates = [round_ for round_, _, _ in kept.alike.kept]
        assert len(updates) <= MATRICES and len(updates) >= min(evaluations, MATRICES // 2)
        assert updates[0] == 0
        assert len(set(np.diff(updates).tolist())) <= 1  # evenly
        assert evaluations - updates[-1] <= max(1, evaluations // (MATRICES // 2))


def test_a_run_goes_on_with_what_it_kept(tmp_path):
    straight = world()
    straight.run(20)
    first = world()
    first.run(9)
    save_state(tmp_path / "state", first.state_dict())
    second = world()
    second.load_state_dict(load_state(tmp_path / "state"))
    second.run(20)
    assert second.history == straight.history
    assert second.fingerprint == straight.fingerprint
    assert clusters(second).changes == clusters(straight).changes
    resumed, whole = clusters(second).alike.kept, clusters(straight).alike.kept
    assert [m[0] for m in resumed] == [m[0] for m in whole]
    for one, other in zip(resumed, whole, strict=True):
        assert np.array_equal(one[2], other[2])


def test_strategies_without_clusters_have_no_such_columns():
    fed = Federation.load("synthetic:groups=2,samples=12,features=5,classes=4", clients=6)
    simulator = Simulator(fed, nn.Linear(5, 4), FedAsync(), concurrency=3, adapt_epochs=0)
    simulator.run(4)
    assert not {"clusters", "cluster_purity", "cluster_ari"} & set(simulator.history[-1])
    assert clusters(simulator).changes == [] and clusters(simulator).alike.kept == []


def test_casa_finds_the_true_groups_among_stragglers():
    """Four groups, 30% of the devices five times slower, everybody always in training."""
    federation = Federation.load("synthetic", clients=16, seed=0)
    found = simulate(
        federation,
        model="linear",
        strategy="casa",
        updates=200,
        concurrency=16,
        refill="same",
        devices="casa-default",
        lr=0.05,
        adapt_epochs=0,
        eval_every=50,
    )
    assert found.history[0]["clusters"] == 1
    assert found.summary["clusters"] == len(np.unique(federation.groups)) == 4
    assert found.summary["cluster_ari"] == found.summary["cluster_purity"] == 1
