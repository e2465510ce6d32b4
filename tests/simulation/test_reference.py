"""What methods are compared with: the best constant, and models of pooled data."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

import polytempo as pt
from polytempo.core.errors import PolytempoError
from polytempo.core.task import Task
from polytempo.data import Federation
from polytempo.simulation.reference import PooledData, pool
from polytempo.strategies import STRATEGIES
from polytempo.training import AutogradSolver, Job

PERMUTED = "synthetic:groups=2,kind=permutation,samples=60,features=12,classes=4"


@pytest.fixture(scope="module")
def skewed():
    return Federation.load("digits", clients=8, partition="dirichlet:alpha=0.3", limit=800)


def linear(federation: Federation) -> nn.Module:
    torch.manual_seed(0)
    features = int(np.prod(federation.shape))
    return nn.Sequential(nn.Flatten(), nn.Linear(features, federation.outputs))


def engine(federation: Federation, strategy: str = "pooled", updates: int = 3) -> PooledData:
    return PooledData(
        federation,
        linear(federation),
        STRATEGIES.create(strategy),
        updates=updates,
        trainer_on=lambda data: AutogradSolver(linear(federation), data, 0),
        task=Task(batch_size=16, lr=0.1),
        eval_every=1,
        adapt_epochs=0,
    )


def test_majority_predicts_the_commonest_label(skewed):
    y, right, total = skewed.y.numpy(), [], 0
    for train, test in zip(skewed.train, skewed.test, strict=True):
        labels, counts = np.unique(y[train], return_counts=True)
        right.append((y[test] == labels[counts.argmax()]).mean())
        total += len(y[test])
    found = pt.simulate(skewed, strategy="majority", model="linear")
    assert found.accuracy == pytest.approx(np.mean(right), abs=1e-6)
    assert found.summary["messages"]["dispatch"] == 0 and found.simulated_time == 0
    assert 0.2 < found.accuracy < 0.9 and found.adapted is None


def test_the_best_constant_of_numbers_is_their_mean():
    federation = Federation.load("diabetes", clients=4)
    y = federation.y.numpy()
    errors = [
        ((y[test] - y[train].mean()) ** 2).mean()
        for train, test in zip(federation.train, federation.test, strict=True)
    ]
    found = pt.simulate(federation, strategy="majority", model="linear")
    assert found.value == pytest.approx(np.mean(errors), rel=1e-5)


def test_the_best_constant_of_sequences_is_how_often_tokens_occur():
    federation = Federation.load("synthetic-text", clients=4)
    y, losses = federation.y.numpy(), []
    for train, test in zip(federation.train, federation.test, strict=True):
        seen = y[train][y[train] > 0]
        counts = np.bincount(seen, minlength=federation.outputs) + 0.1
        asked = y[test][y[test] > 0]
        losses += [*-np.log(counts / counts.sum())[asked]]
    found = pt.simulate(federation, strategy="majority", model="gru")
    assert found.history[-1]["loss"] == pytest.approx(np.mean(losses), rel=1e-4)


@pytest.mark.parametrize("data", ["synthetic-multilabel", "synthetic-regression"])
def test_there_is_a_constant_for_other_problems_too(data):
    federation = Federation.load(data, clients=4)
    found = pt.simulate(federation, strategy="majority", model="linear")
    assert np.isfinite(found.value)


def test_no_constant_is_known_for_a_loss_of_ones_own(skewed):
    with pytest.raises(PolytempoError, match="majority does not know which constant"):
        pt.simulate(
            skewed,
            strategy="majority",
            model="linear",
            problem="own:criterion=torch.nn.functional:cross_entropy",
        )


def test_pooled_is_plain_training_on_all_data(skewed):
    """The same as one training of one client that has everything, however it is split up."""
    made = engine(skewed)
    made.run(3)
    everything = pool(skewed, np.zeros(8, dtype=np.int64))
    assert everything.samples == [sum(skewed.samples)]
    steps = -(-everything.samples[0] // 16)
    solver = AutogradSolver(linear(skewed), everything, 0)
    task = Task(batch_size=16, lr=0.1, epochs=3, schedule=made.strategy.schedule(3 * steps))
    job = Job(0, solver.layout.read(), replace(task, keep_optimizer=True), ("peer", 0))
    expected = solver.carry_out(job).upload
    torch.testing.assert_close(made.strategy.serve(5), expected, rtol=1e-5, atol=1e-6)
    assert [row["updates"] for row in made.history] == [0, 1, 2, 3]
    assert made.history[-1]["accuracy"] > 0.7


def test_pooled_resumes_bit_for_bit(skewed):
    whole, first, second = engine(skewed), engine(skewed), engine(skewed)
    whole.run(3)
    first.run(2)
    second.load_state_dict(first.state_dict())
    second.run(3)
    assert torch.equal(second.strategy.serve(0), whole.strategy.serve(0))
    assert second.history[-1]["accuracy"] == whole.history[-1]["accuracy"]
    assert second.fingerprint == whole.fingerprint


def test_groups_have_a_model_each():
    """Labels mean something else in each group, so that one model cannot fit both."""
    federation = Federation.load(PERMUTED, clients=8)
    one, several = (engine(federation, name, 8) for name in ("pooled", "pooled-groups"))
    for made in (one, several):
        made.run(8)
    for client in range(8):
        for other in range(8):
            same = federation.groups[client] == federation.groups[other]
            models = several.strategy.serve(client), several.strategy.serve(other)
            assert torch.equal(*models) == same
    assert several.history[-1]["accuracy"] > one.history[-1]["accuracy"] + 0.1


def test_groups_must_be_known(skewed):
    with pytest.raises(PolytempoError, match="needs the true groups"):
        engine(skewed, "pooled-groups")


def test_nothing_can_be_personal(skewed):
    with pytest.raises(PolytempoError, match="nothing can be personal"):
        pt.simulate(skewed, strategy="pooled", model="mlp", personal="head")


def test_the_length_is_that_of_the_reference(skewed):
    found = pt.simulate(skewed, strategy="pooled:epochs=4", model="linear", lr=0.1)
    assert found.arrivals == 4 and found.simulated_time == 0
    assert found.adapted is not None  # pooled, then adapted by each client
