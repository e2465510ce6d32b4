"""PACE against its paper: order-independence, a straight-line replay, the multicast."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from polytempo import Context, InFlight, Server, Staleness, Task, Update
from polytempo.core.bank import Storage
from polytempo.strategies import PACE, Likeness, PFedGraphAsync

D = 5


def vector(*seed: int) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(seed).normal(size=D)).float()


def context(samples=(10, 20, 30, 40)) -> Context:
    return Context(vector(99), samples, Task(), seed=0)


def ready(samples=(10, 20, 30, 40), **options) -> PACE:
    pace = PACE(**options)
    pace.setup(context(samples))
    return pace


def fold(pace: PACE, client: int, theta: torch.Tensor, tau: int = 0) -> None:
    pace.fold(Update(client, 0, theta, 10), Staleness(tau, tau))


# -- Eq. 7-10 -----------------------------------------------------------------------------------


@given(st.lists(st.sampled_from([1, 2, 3]), min_size=1, max_size=8), st.randoms())
@settings(deadline=None)
def test_without_decay_the_buffer_is_a_weighted_mean_whatever_the_order(senders, random):
    """phi_0 = sum of W_0k theta_k over j's own upload and what came since, normalised."""
    pace = ready(a=0.0, graph=Likeness(gamma=0.4))
    for client in range(4):  # rows other than p, with weight on several clients
        fold(pace, client, vector(client))
    fold(pace, 0, own := vector(50))  # 0's upload empties its sequence
    row = pace.rows.row(0)
    folded = [(client, vector(60, k)) for k, client in enumerate(senders)]
    random.shuffle(folded)
    for client, theta in folded:
        fold(pace, client, theta)
    weights = [row[0]] + [row[client] for client, _ in folded]
    models = [own] + [theta for _, theta in folded]
    mean = sum(w * m.double() for w, m in zip(weights, models, strict=True)) / sum(weights)
    np.testing.assert_allclose(pace.model_for(0).double().numpy(), mean.numpy(), atol=2e-6)


def test_a_client_without_upload_collects_the_size_weighted_mean():
    pace = ready(a=0.0)
    fold(pace, 1, vector(1))
    fold(pace, 3, vector(3))
    p = [0.1, 0.2, 0.3, 0.4]
    initial = vector(99)
    expected = (p[2] * initial + p[1] * vector(1) + p[3] * vector(3)) / (p[2] + p[1] + p[3])
    torch.testing.assert_close(pace.model_for(2), expected)


def test_staleness_decays_what_is_mixed_in():
    fresh, stale = ready(a=1.5), ready(a=1.5)
    fold(fresh, 0, vector(1), tau=0)
    fold(stale, 0, vector(1), tau=3)
    moved = [(p.model_for(2) - vector(99)).norm().item() for p in (fresh, stale)]
    assert moved[1] / moved[0] == pytest.approx((1 + 3) ** -1.5, rel=1e-4)


# -- a replay in plain Python, written from the paper -------------------------------------------


def paper_pace(initial, samples, gamma, a, omega, capacity, concurrency, script):
    """Algorithm 1 over Python lists. `script` says who uploads what, in which order; clients in
    `training` hold a model. Returns phi, W and who was multicast to after each arrival."""
    n, d = len(samples), len(initial)
    phi = [list(initial) for _ in range(n)]
    p = [s / sum(samples) for s in samples]
    collaboration = [list(p) for _ in range(n)]
    sequence = [[] for _ in range(n)]  # pi_j
    received = [0] * n  # round at which each client last received a model
    t = 0
    multicasts = []
    training = set(concurrency)
    for i, theta, started in script:
        tau = t - received[i]
        phi[i] = list(theta)
        dissimilar = []
        for j in range(n):
            dot = sum(theta[k] * phi[j][k] for k in range(d))
            norms = math.sqrt(sum(v * v for v in theta)) * math.sqrt(sum(v * v for v in phi[j]))
            dissimilar.append(-dot / norms)
        # Eq. 2 by bisection on the multiplier: x_j = max(0, p_j - gamma s_j / 2 - nu)
        target = [p[j] - gamma * dissimilar[j] / 2 for j in range(n)]
        low, high = min(target) - 1.0, max(target)
        for _ in range(200):
            nu = (low + high) / 2
            if sum(max(0.0, v - nu) for v in target) > 1.0:
                low = nu
            else:
                high = nu
        collaboration[i] = [max(0.0, v - high) for v in target]
        sequence[i] = []
        for j in range(n):
            if j == i or collaboration[j][i] == 0.0:
                continue
            sequence[j].append(i)
            below = collaboration[j][j] + sum(collaboration[j][q] for q in sequence[j])
            alpha = collaboration[j][i] / below * (1 + tau) ** (-a)
            phi[j] = [alpha * theta[k] + (1 - alpha) * phi[j][k] for k in range(d)]
        t += 1
        training.remove(i)
        group, total = [], 0
        for client in sorted(training, key=lambda c: (-(t - received[c]), c)):
            if len(group) == capacity or total > omega:
                break
            group.append(client)
            total += (t - received[client]) ** 2
        if total <= omega:
            group = []
        for client in group:
            received[client] = t
        multicasts.append(group)
        training.add(started)
        received[started] = t
    return phi, collaboration, multicasts


@pytest.mark.parametrize("seed", range(5))
def test_a_run_equals_the_straight_line_derivation(seed):
    random = np.random.default_rng(seed)
    samples = [int(k) for k in random.integers(5, 50, size=6)]
    initial = torch.from_numpy(random.normal(size=D)).float()
    capacity, omega = 2, 12.0
    megahertz = capacity * initial.nbytes * 8 / (0.3 * math.log2(11)) / 1e6 * 1.01
    graph = Likeness(gamma=0.9, reference="model")
    pace = PACE(omega=omega, bandwidth_mhz=megahertz, graph=graph)
    server = Server(pace, Context(initial, samples, Task(), seed), concurrency=4, refill="idle")
    training = {action.client: action.number for action in server.join(range(6))}
    first = list(training)
    script, multicast_to = [], []
    for k in range(30):
        sender = int(random.choice(sorted(training)))
        if k == 3:  # one client is kept waiting, so that multicasts do happen
            slow = sorted(set(training) - {sender})[0]
        if k > 3 and sender == slow and k < 25:
            sender = next(c for c in sorted(training) if c != slow)
        theta = torch.from_numpy(random.normal(size=D)).float() + initial
        actions = server.receive(Update(sender, training.pop(sender), theta, samples[sender]))
        multicast = [a.client for a in actions if a.preempt]
        [started] = [a for a in actions if not a.preempt]
        training |= {action.client: action.number for action in actions}
        script.append((sender, theta.tolist(), started.client))
        multicast_to.append(multicast)
    phi, collaboration, expected = paper_pace(
        initial.tolist(), samples, 0.9, 1.5, omega, capacity, first, script
    )
    assert multicast_to == expected
    assert sum(map(len, expected)) > 0
    np.testing.assert_allclose(pace.collaboration(), collaboration, atol=1e-5)
    found = np.array([pace.model_for(client).tolist() for client in range(6)])
    np.testing.assert_allclose(found, phi, atol=1e-5)


def test_denominators_are_made_of_the_weights_as_they_are_stored():
    pace = ready(samples=(10, 20, 30, 40, 50), graph=Likeness(gamma=0.7))
    stream, expected = np.random.default_rng(1), pace.prior.copy()
    for k, client in enumerate(stream.integers(5, size=40)):
        before = pace.collaboration()
        fold(pace, int(client), vector(k), tau=k % 3)
        expected += before[:, client]
        expected[client] = pace.collaboration()[client, client]
        np.testing.assert_allclose(pace.denominators, expected, rtol=1e-12)


def test_a_hundred_thousand_clients_take_the_memory_of_those_that_have_uploaded():
    allocated = []

    def counting(shape, dtype):
        allocated.append(shape[0] * shape[1] * dtype.itemsize)
        return torch.empty(shape, dtype=dtype)

    pace, size = PACE(), 62_006
    samples = [100, 300] * 50_000
    pace.setup(Context(torch.zeros(size), samples, Task(), 0, Storage(allocate=counting)))
    for k, client in enumerate([5, 99_998, 5, 70_001]):
        theta = torch.from_numpy(np.random.default_rng(k).normal(size=size)).float()
        fold(pace, client, theta)
    assert len(allocated) == 1 and allocated[0] <= 2**26  # of 25 GB
    state = pace.state_dict()
    # three have uploaded; the others differ by their sample size, which is in D
    assert sum(len(rows) for rows in state["bank"]["rows"]) == 3 + 2
    assert state["rows"]["rows"].shape == (3, 100_000)
    assert not torch.equal(pace.model_for(0), pace.model_for(1))
    assert torch.equal(pace.model_for(0), pace.model_for(2))


# -- Eq. 16 -------------------------------------------------------------------------------------


def in_flight(**staleness: int) -> list[InFlight]:
    flights = [InFlight(int(c[1:]), Staleness(tau, tau)) for c, tau in staleness.items()]
    return sorted(flights, key=lambda flight: -flight.staleness.updates)  # as the server does


def test_default_budget_is_the_papers():
    pace = PACE()
    pace.setup(Context(torch.zeros(62_006), [1], Task(), 0))
    assert pace.budget == 5  # 1.297 MB over 248,024 bytes
    pace.setup(Context(torch.zeros(400_000), [1], Task(), 0))
    assert pace.budget == 0
    pace.setup(Context(torch.zeros(324_269), [1], Task(), 0))  # 1,297,076 bytes of 1,297,289
    assert pace.budget == 1


def test_multicast_goes_to_the_smallest_stalest_group():
    pace = ready(omega=2500)
    assert list(pace.refresh(in_flight(c0=10, c1=50, c2=3))) == [1, 0]  # 2500 alone is not more
    assert list(pace.refresh(in_flight(c0=10, c1=51, c2=3))) == [1]
    assert list(pace.refresh(in_flight(c0=30, c1=30))) == []
    assert list(pace.refresh([])) == []


def test_multicast_respects_the_budget():
    three = in_flight(c0=30, c1=30, c2=30)  # 2700 > 2500, but only with all three
    assert len(ready().refresh(three)) == 3
    small = ready(bandwidth_mhz=2.5 * D * 4 * 8 / 0.3 / math.log2(11) / 1e6)
    assert small.budget == 2
    assert list(small.refresh(three)) == []


@given(
    taus=st.lists(st.integers(0, 60), max_size=8),
    omega=st.sampled_from([0, 1, 50, 2500, 9000]),
    budget=st.integers(0, 9),
)
def test_multicast_is_the_first_group_that_exceeds_omega_within_the_budget(taus, omega, budget):
    pace = ready(omega=omega, bandwidth_mhz=(budget + 0.5) * D * 4 * 8 / 0.3 / math.log2(11) / 1e6)
    assert pace.budget == budget
    flights = in_flight(**{f"c{client}": tau for client, tau in enumerate(taus)})
    groups = (flights[:size] for size in range(1, min(budget, len(flights)) + 1))
    wanted = (g for g in groups if sum(flight.staleness.updates**2 for flight in g) > omega)
    assert list(pace.refresh(flights)) == [flight.client for flight in next(wanted, [])]


def test_those_in_training_are_looked_at_as_far_as_needed():
    class Counted(list):
        def __iter__(self):
            for flight in super().__iter__():
                looked.append(flight)
                yield flight

    for tau, expected in ((49, 2), (1, 1), (0, 1)):
        looked: list[InFlight] = []
        many = Counted(InFlight(client, Staleness(tau, tau)) for client in range(1000))
        assert len(ready().refresh(many)) == (2 if tau == 49 else 0)
        assert len(looked) == expected


# -- switches -----------------------------------------------------------------------------------


def test_reply_is_the_model_before_or_after_the_update():
    for reply, expected in (("buffered", "before"), ("fresh", "after")):
        pace = ready(reply=reply)
        fold(pace, 1, vector(1))
        before = pace.model_for(0)
        fold(pace, 0, theta := vector(0))
        torch.testing.assert_close(pace.reply_to(0), before if expected == "before" else theta)
        torch.testing.assert_close(pace.model_for(0), theta)


def test_without_its_components_it_is_the_naive_method():
    bare = ready(buffer=False, multicast=False, staleness_decay=False)
    naive = PFedGraphAsync()
    naive.setup(context())
    for k, client in enumerate([0, 2, 1, 0, 3, 2]):
        for strategy in (bare, naive):
            strategy.fold(Update(client, k, vector(k), 10), Staleness(k, k))
    for client in range(4):
        assert torch.equal(bare.model_for(client), naive.model_for(client))
    assert bare.refresh(in_flight(c0=500)) == ()
    assert torch.equal(bare.reply_to(2), bare.model_for(2))


def test_each_component_is_a_switch():
    def final(**switches):
        pace = ready(**switches)
        for k, client in enumerate([0, 2, 1, 0, 3, 2]):
            fold(pace, client, vector(k), tau=k)
        return pace.model_for(1)

    full, no_decay, no_buffer = final(), final(staleness_decay=False), final(buffer=False)
    assert not torch.allclose(full, no_decay)
    assert not torch.allclose(full, no_buffer)
    torch.testing.assert_close(no_decay, final(a=0.0))
    assert ready(multicast=False).refresh(in_flight(c0=500)) == ()


@pytest.mark.parametrize("similarity", ["cosine", "inner", "l1", "l2"])
def test_every_measure_prefers_the_true_group(similarity):
    pace = ready(samples=(10,) * 6, graph=Likeness(similarity=similarity), a=0.0)
    direction = {0: vector(1), 1: -vector(1)}
    for k in range(12):
        client = k % 6
        noise = 0.1 * vector(7, k)
        fold(pace, client, vector(99) + direction[client // 3] + noise)
    graph = pace.collaboration()
    inside = [graph[i, j] for i in range(6) for j in range(6) if i // 3 == j // 3]
    across = [graph[i, j] for i in range(6) for j in range(6) if i // 3 != j // 3]
    assert np.mean(inside) > 5 * np.mean(across)


# -- a fleet, whose clients enrol one after the other ----------------------------------------------


def enrol(pace: PACE, samples: list[int], counts: dict[int, int]) -> None:
    for client, count in counts.items():
        samples[client] = count
        pace.enrolled(client)


def test_clients_that_have_enrolled_count_as_if_they_had_been_known():
    samples = [1, 1, 1, 1]
    late, known = ready(samples), ready()
    enrol(late, samples, {0: 10, 1: 20, 2: 30, 3: 40})
    for step, client in enumerate([0, 2, 0, 1, 3, 2]):
        for pace in (late, known):
            fold(pace, client, vector(step, client))
    np.testing.assert_array_equal(late.collaboration(), known.collaboration())
    np.testing.assert_allclose(late.denominators, known.denominators, rtol=1e-12)
    for client in range(4):
        torch.testing.assert_close(late.model_for(client), known.model_for(client))


def test_a_restored_strategy_knows_them_too():
    samples = [1, 1, 1, 1]
    pace = ready(samples)
    enrol(pace, samples, {0: 10, 1: 20, 2: 30, 3: 40})
    fold(pace, 0, vector(1))
    again = PACE()
    again_samples = [1, 1, 1, 1]
    again.setup(context(again_samples))
    again_samples[:] = samples
    again.load_state_dict(pace.state_dict())
    np.testing.assert_array_equal(again.collaboration(), pace.collaboration())
