"""Our reading of ASAFL against the formulas in its docstring."""

import inspect
from dataclasses import replace

import numpy as np
import pytest
import torch
from dispatching import dispatch
from hypothesis import given
from hypothesis import strategies as st

from polytempo import Context, Server, Staleness, Task, Update
from polytempo.strategies import ASAFL

INITIAL = torch.tensor([3.0, 4.0])  # of length 5
TASK = Task(lr=0.1)


def ready(strategy, initial=INITIAL, task=TASK) -> ASAFL:
    strategy.setup(Context(initial, (10, 30, 60), task, seed=0))
    return strategy


def fold(strategy, theta, tau=0):
    """The model after the arrival of theta."""
    dispatch(strategy, 100 + strategy.models.version)  # somebody holds every version
    vector = torch.as_tensor(theta, dtype=strategy.model_for(0).dtype)
    update = Update(0, 0, vector, 10, asked=strategy.context.task)
    assert strategy.fold(update, Staleness(updates=99, versions=tau)) is True
    return strategy.model_for(0)


def by_the_formula(arrivals, alpha, beta, eta_s, eta_c):
    w, m, d = [INITIAL.double().numpy()], np.zeros(2), None
    for theta, tau in arrivals:
        g = (w[-1 - tau] - theta) / eta_c
        div = np.sqrt(np.sum((theta - w[-1]) ** 2)) / np.sqrt(np.sum(w[-1] ** 2))
        d = div if d is None else 0.9 * d + 0.1 * div
        a = alpha * min(1.0, d / div)
        m = beta * m + (1 - beta) * g
        w.append(w[-1] - eta_s * a * m)
    return w[-1]


@given(
    alpha=st.floats(0.01, 1),
    beta=st.floats(0, 0.99),
    eta_s=st.floats(0.001, 0.1),
    seed=st.integers(0, 2**32 - 1),
)
def test_asafl_is_its_formula(alpha, beta, eta_s, seed):
    draw = np.random.default_rng(seed)
    strategy = ready(ASAFL(alpha=alpha, beta=beta, server_lr=eta_s), INITIAL.double())
    arrivals = [(draw.normal(4, 2, size=2), int(draw.integers(k + 1))) for k in range(12)]
    for theta, tau in arrivals:
        fold(strategy, theta, tau)
    expected = by_the_formula(arrivals, alpha, beta, eta_s, TASK.lr)
    np.testing.assert_allclose(strategy.model_for(0).numpy(), expected, rtol=1e-8, atol=1e-10)


def test_it_says_that_it_is_a_reading():
    assert ASAFL.paper.startswith("our reading")
    assert inspect.getdoc(ASAFL).startswith("Our reading")


def test_an_update_of_usual_divergence_counts_alpha():
    after = fold(ready(ASAFL(beta=0.0, alpha=0.3)), [4.0, 2.0])
    torch.testing.assert_close(after, torch.tensor([3.0 + 0.3, 4.0 - 0.6]))


def test_an_update_of_unusual_divergence_counts_less():
    strategy = ready(ASAFL(beta=0.0, alpha=0.3), INITIAL.double())
    before = fold(strategy, [3.5, 4.0])
    small, large = 0.5 / 5, 10 / float(before.norm())
    after = fold(strategy, before + torch.tensor([10.0, 0.0]))
    weight = 0.3 * (0.9 * small + 0.1 * large) / large
    assert (after - before).tolist() == pytest.approx([10 * weight, 0.0])
    assert weight < 0.3 / 5
    again = fold(strategy, after + torch.tensor([0.0, 0.01]))  # less than usual: alpha, no more
    assert (again - after).tolist() == pytest.approx([0.0, 0.3 * 0.01])


def test_the_pseudo_gradient_is_taken_from_the_model_that_was_sent():
    strategy = ready(ASAFL(beta=0.0, alpha=1.0, memory=0.0), INITIAL.double())
    current = fold(strategy, [13.0, 4.0])
    assert current.tolist() == pytest.approx([13.0, 4.0])
    after = fold(strategy, [3.0, 5.0], tau=1)  # it was sent (3, 4)
    assert (after - current).tolist() == pytest.approx([0.0, 1.0])


def test_momentum_carries_on():
    strategy = ready(ASAFL(beta=0.5, alpha=1.0), INITIAL.double())
    before = fold(strategy, [7.0, 4.0])
    assert (before - INITIAL).tolist() == pytest.approx([0.5 * 4, 0.0])
    after = fold(strategy, before)  # nothing learned, and a divergence of zero
    assert (after - before).tolist() == pytest.approx([0.25 * 4, 0.0])


@pytest.mark.parametrize("lr", [0.001, 0.1, 1.0])
def test_the_learning_rates_cancel_unless_the_server_has_its_own(lr):
    task = replace(TASK, lr=lr)
    theta = INITIAL + torch.tensor([1.0, 0.0])
    same = fold(ready(ASAFL(beta=0.0, alpha=0.5), task=task), theta)
    torch.testing.assert_close(same, torch.tensor([3.5, 4.0]))
    own = fold(ready(ASAFL(beta=0.0, alpha=0.5, server_lr=2 * lr), task=task), theta)
    torch.testing.assert_close(own, torch.tensor([4.0, 4.0]))


def test_a_model_of_length_zero_is_no_problem():
    strategy = ready(ASAFL(), torch.zeros(2))
    assert torch.isfinite(fold(strategy, [0.0, 0.0])).all()
    assert torch.isfinite(fold(strategy, [1.0, 0.0])).all()


def test_through_the_server_only_the_models_in_use_are_kept():
    strategy = ASAFL()
    server = Server(strategy, Context(INITIAL, [10] * 6, TASK, 0), concurrency=3)
    training = {action.client: action for action in server.join(range(6))}
    for step in range(40):
        oldest = min(training, key=lambda c: training[c].number)
        client = oldest if step % 7 == 0 else max(training, key=lambda c: training[c].number)
        sent = training.pop(client)
        update = Update(client, sent.number, sent.params * 0.9, 10)
        training |= {action.client: action for action in server.receive(update)}
        assert server.version == strategy.models.version == step + 1
        assert len(strategy.models) <= 4
        for c, sent in training.items():
            tau = server.staleness(c, sent.number).versions
            assert strategy.models.ago(tau) is sent.params
