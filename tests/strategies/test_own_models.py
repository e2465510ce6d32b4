"""Methods whose clients keep something of their own, done again by hand (`replay`)."""

import numpy as np
import pytest
import torch
from replay import (
    BODY,
    COHORT,
    HEAD,
    MOMENTUM,
    RATE,
    START,
    TASK,
    gradient,
    replayed,
    simulated,
)

from polytempo import Task
from polytempo.core.rng import rng

FORMS = pytest.mark.parametrize("asynchronous", [False, True], ids=["cohorts", "on arrival"])
OWN = "own model"


def check(small, name, train, asynchronous, options="", **more):
    """Run it, do it again, compare the global model; both outcomes, to compare more."""
    spec = f"{name}-async:buffer_size={COHORT}" if asynchronous else name
    spec += options and (f",{options}" if asynchronous else f":{options}")
    simulator, log = simulated(small, spec, **more)
    start = START[~HEAD] if more.get("personal") else START
    w, clients = replayed(small, log, train, asynchronous, start)
    found = simulator.strategy.model_for(0).numpy()
    np.testing.assert_allclose(found, w, rtol=1e-9, atol=1e-11)
    assert np.abs(w - start).max() > 0.01
    return simulator, w, clients


def kept(simulator, client, name):
    return simulator.memory.vector(name, client).numpy()


def close(found, expected):
    np.testing.assert_allclose(found, expected, rtol=1e-8, atol=1e-10)


def trained(clients):
    return [number for number, client in enumerate(clients) if client.memory]


# -- parts of the model ---------------------------------------------------------------------------


@FORMS
def test_fedrep_trains_the_head_then_the_body(small, asynchronous):
    def train(client, body):
        theta = np.concatenate([body, client.memory.get("head", START[HEAD])])
        batches = list(client.batches(Task(epochs=5, batch_size=8)))
        first = len(batches) * 3 // 5
        theta = client.sgd(theta, batches[:first], moving=HEAD)
        theta = client.sgd(theta, batches[first:], moving=~HEAD)
        client.memory["head"] = theta[HEAD]
        return theta[~HEAD]

    simulator, _, clients = check(
        small, "fedrep", train, asynchronous, "head_epochs=3", personal=["head"]
    )
    assert len(trained(clients)) > 4
    for number in trained(clients):
        close(kept(simulator, number, "personal"), clients[number].memory["head"])


@FORMS
def test_fedbabu_trains_the_body_under_the_first_head(small, asynchronous):
    def train(client, body):
        theta = np.concatenate([body, START[HEAD]])
        return client.sgd(theta, client.batches(), moving=~HEAD)[~HEAD]

    simulator, _, _ = check(small, "fedbabu", train, asynchronous, personal=["head"])
    for number in range(8):
        assert np.array_equal(kept(simulator, number, "personal"), START[HEAD])


def test_fedbabu_fine_tunes_everything(small):
    simulator, _ = simulated(small, "fedbabu", personal=["head"], adapt_epochs=3)
    last = simulator.history[-1]
    assert last["accuracy_adapted"] > last["accuracy"] + 0.1
    assert len(simulator.strategy.model_for(0)) == BODY


# -- a second model -------------------------------------------------------------------------------


@FORMS
def test_ditto_holds_an_own_model_near_the_received_one(small, asynchronous):
    def train(client, w):
        v = client.memory.get("v", w)
        client.memory["v"] = client.sgd(v, client.batches(TASK, OWN), pull=(0.7, w))
        return client.sgd(w, client.batches())

    simulator, w, clients = check(small, "ditto", train, asynchronous, "lam=0.7")
    for number, client in enumerate(clients):
        close(simulator.in_use(number).numpy(), client.memory.get("v", w))


def test_what_ditto_averages_is_fedavgs(small):
    ditto, plain = (simulated(small, name)[0] for name in ("ditto", "fedavg"))
    # the clock is slower by as much as is trained in addition
    assert ditto.time == pytest.approx(2 * plain.time)
    assert torch.equal(ditto.strategy.model_for(0), plain.strategy.model_for(0))
    half = simulated(small, "ditto:own_epochs=1")[0]
    assert half.time == pytest.approx(1.5 * plain.time)


@FORMS
def test_apfl_trains_its_own_model_within_the_mixture(small, asynchronous):
    """The mixture by its definition: a step on v by alpha times the gradient at the mixture."""

    def train(client, w0):
        w = client.sgd(w0, client.batches())
        v, alpha = client.memory.get("v", w0), client.memory.get("alpha", 0.5)
        x, y = next(client.batches(TASK, "alpha"))
        mixed = alpha * v + (1 - alpha) * w
        slope = (v - w) @ (gradient(mixed, x, y) + 0.01 * mixed)
        alpha = min(1.0, max(0.0, alpha - RATE * slope))
        speed = np.zeros_like(v)
        for x, y in client.batches(TASK, OWN):
            mixed = alpha * v + (1 - alpha) * w
            g = alpha * (gradient(mixed, x, y) + 0.01 * mixed)  # chain rule
            speed = MOMENTUM * speed + g
            v = v - RATE * speed
        client.memory = {"v": v, "alpha": alpha}
        return w

    simulator, w, clients = check(small, "apfl", train, asynchronous)
    alphas = {clients[number].memory["alpha"] for number in trained(clients)}
    assert len(alphas) > 3
    for number in trained(clients):
        v, alpha = (clients[number].memory[name] for name in ("v", "alpha"))
        close(kept(simulator, number, OWN), v)
        close(simulator.in_use(number).numpy(), alpha * v + (1 - alpha) * w)


def test_apfl_without_a_share_of_its_own_is_fedavg(small):
    simulator, _ = simulated(small, "apfl:alpha=0,adapt=false")
    plain = simulated(small, "fedavg")[0]
    assert torch.equal(simulator.in_use(0), plain.in_use(0))


@FORMS
def test_pfedme_steps_towards_minimisers_near_the_anchor(small, asynchronous):
    one = Task(epochs=1, batch_size=8)

    def train(client, w):
        theta = w
        for number in range(2):  # one for each epoch of the task
            name = () if number == 0 else (f"round {number}",)
            theta = client.sgd(theta, client.batches(one, *name), pull=(4.0, w))
            w = w - 0.1 * 4.0 * (w - theta)
        client.memory["theta"] = theta
        return w

    simulator, w, clients = check(small, "pfedme", train, asynchronous, "lam=4,eta=0.1")
    for number, client in enumerate(clients):
        close(simulator.in_use(number).numpy(), client.memory.get("theta", w))


def test_pfedmes_server_may_overshoot(small):
    """beta = 2: from the initial model, twice as far."""
    ends = [
        simulated(small, f"pfedme:beta={beta}", updates=COHORT)[0].strategy.model_for(0).numpy()
        for beta in (1, 2)
    ]
    close(ends[1] - START, 2 * (ends[0] - START))


def test_pfedme_takes_no_longer_than_fedavg(small):
    times = [simulated(small, name)[0].time for name in ("pfedme", "fedavg")]
    assert times[0] == pytest.approx(times[1])


# -- other ways to train --------------------------------------------------------------------------


@FORMS
def test_per_fedavg_steps_by_gradients_found_ahead(small, asynchronous):
    def train(client, theta):
        batches, speed = list(client.batches()), np.zeros_like(theta)
        for ahead, step in zip(batches[::2], batches[1::2], strict=False):
            moved = theta - 0.02 * (gradient(theta, *ahead) + 0.01 * theta)
            speed = MOMENTUM * speed + gradient(moved, *step) + 0.01 * moved
            theta = theta - RATE * speed
        return theta

    check(small, "per-fedavg", train, asynchronous, "alpha=0.02")


def test_a_look_ahead_that_is_left_over_is_undone(small):
    task = Task(steps=3, batch_size=8, lr=RATE, optimizer=TASK.optimizer)
    two = Task(steps=2, batch_size=8, lr=RATE, optimizer=TASK.optimizer)
    ends = [simulated(small, "per-fedavg", task=each, updates=3)[0] for each in (task, two)]
    assert torch.equal(ends[0].strategy.model_for(0), ends[1].strategy.model_for(0))


@FORMS
def test_fedala_learns_what_to_take_of_the_global_model(small, asynchronous):
    learned, moved = [], []

    def train(client, w):
        start = w
        if "own" in client.memory:
            own, weights = client.memory["own"], client.memory["weights"]
            passes = 2 if (weights == 1).all() else 1
            for step in range(passes * int(np.ceil(0.8 * len(client.y) / 8))):
                x, y = next(client.batches(TASK, f"weights {step}"))
                slope = gradient(own + (w - own) * weights, x, y) * (w - own)
                weights = np.where(HEAD, np.clip(weights - 3.0 * slope, 0, 1), 1.0)
            client.memory["weights"] = weights
            learned.append(weights)
            start = own + (w - own) * weights
            moved.append(np.abs(start - w).max())
        client.memory["own"] = client.sgd(start, client.batches())
        client.memory.setdefault("weights", np.ones_like(w))
        return client.memory["own"]

    simulator, w, clients = check(small, "fedala", train, asynchronous, "rate=3,first_passes=2")
    assert max(moved) > 0.01 and any(((w > 0) & (w < 1)).any() for w in learned)
    for number in trained(clients):
        own, weights = (clients[number].memory[name] for name in ("own", "weights"))
        close(kept(simulator, number, "weights"), weights)
        close(simulator.in_use(number).numpy(), own + (w - own) * weights)


@FORMS
def test_fedrod_balances_the_model_and_adds_a_head(small, asynchronous):
    """The personal head as a layer of its own, whose outputs are added to the model's."""

    def train(client, w):
        counts = np.bincount(client.y, minlength=4) + 0.1
        theta = client.sgd(w, client.batches(), offset=np.log(counts / counts.sum()).astype("f4"))
        extra = client.memory.get("head", np.zeros(24))
        z = np.maximum(client.x @ theta[:60].reshape(5, 12).T + theta[60:65], 0)
        speed, generic = np.zeros(24), theta[HEAD]
        for rows in rows_of(client, "personal head"):
            both = generic + extra
            scores = z[rows] @ generic[:20].reshape(4, 5).T + generic[20:]
            scores = scores + z[rows] @ extra[:20].reshape(4, 5).T + extra[20:]
            p = np.exp(scores - scores.max(1, keepdims=True))
            p /= p.sum(1, keepdims=True)
            p[np.arange(len(rows)), client.y[rows]] -= 1
            p /= len(rows)
            g = np.concatenate([(p.T @ z[rows]).ravel(), p.sum(0)]) + 0.01 * both
            speed = MOMENTUM * speed + g
            extra = extra - RATE * speed
        client.memory["head"] = extra
        return theta

    simulator, w, clients = check(small, "fedrod", train, asynchronous)
    for number in trained(clients):
        expected = w.copy()
        expected[HEAD] += clients[number].memory["head"]
        close(simulator.in_use(number).numpy(), expected)


def rows_of(client, *name):
    """The samples of each batch."""
    count, found = len(client.y), []
    cuts = list(range(8, count, 8))
    cuts = cuts[:-1] if count % 8 == 1 else cuts
    for epoch in range(2):
        order = rng(0, *client.stream, *name, "epoch", epoch).permutation(count)
        found += np.split(order, cuts)
    return found


def test_the_balance_is_for_training_alone(small):
    """The figures of FedROD's models have no prior in them."""
    simulator, _ = simulated(small, "fedrod", updates=12, eval_every=12)
    correct = []
    for client in range(8):
        theta = simulator.in_use(client).numpy()
        x, y = (part[small.test[client]] for part in (small.x.double().numpy(), small.y.numpy()))
        z = np.maximum(x @ theta[:60].reshape(5, 12).T + theta[60:65], 0)
        scores = z @ theta[65:85].reshape(4, 5).T + theta[85:]
        correct.append((scores.argmax(1) == y).mean())
    assert simulator.history[-1]["accuracy"] == pytest.approx(np.mean(correct))
