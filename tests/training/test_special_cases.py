"""What a solver does not know exactly goes the general way; and clients with a single sample."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

import polytempo as pt
from polytempo import Federation, Task
from polytempo.core.layout import Layout
from polytempo.core.objective import Plain, Pull
from polytempo.models import Inputs, build
from polytempo.training import AutogradSolver, Executor, Job, Learner
from polytempo.training.solvers.native.solver import NativeSolver
from solving import needs_compiler, upload_of

TASK = Task(epochs=2, batch_size=8, lr=0.05)

# -- subclasses -----------------------------------------------------------------------------------


class Ridge(Plain):
    """A user's own: it inherits `isotropic`, and does not mean it."""

    def add_gradient(self, theta, anchor, grad):
        grad.add_(theta.abs().sqrt())


class Softer(Pull):
    def add_gradient(self, theta, anchor, grad):
        grad.add_(torch.tanh(theta - anchor + 1), alpha=self.strength)


def stack() -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(12, 9), nn.ReLU(), nn.Linear(9, 4))


@needs_compiler
@pytest.mark.parametrize("objective", [Ridge(), Softer(0.5)])
@pytest.mark.parametrize("upload", ["model", "delta", "gradient"])
def test_the_fast_solver_does_not_bypass_an_objective_of_ones_own(small, objective, upload):
    general, fast = (kind(stack(), small, 3) for kind in (AutogradSolver, NativeSolver))
    start = general.layout.read()
    # in turns: what one of them has left in the solver's memory must not matter to the other
    tasks = [
        Task(epochs=2, batch_size=8, lr=0.05, upload=upload, objective=o)
        for o in (objective, Plain())
    ]
    jobs = [Job(client, start, tasks[client % 2], ("client", client)) for client in range(6)]
    backend = Executor(fast)
    for job in jobs:
        backend.expect(job)
    for job in jobs:
        torch.testing.assert_close(
            backend.train(job), upload_of(general, job), rtol=1e-5, atol=1e-6
        )
    own = upload_of(fast, jobs[0])
    assert not torch.allclose(
        own, upload_of(fast, Job(0, start, tasks[1], ("client", 0))), atol=1e-3
    )


def test_a_text_model_is_not_cut_down_to_words_for_an_objective_of_ones_own():
    draws = np.random.default_rng(0)
    parts = [(draws.integers(1, 50, size=(20, 6)), draws.integers(3, size=20)) for _ in range(2)]
    fed = Federation.from_arrays(parts, seed=0)
    assert fed.vocabulary
    spec = {"name": "textcnn", "embedding": 5, "filters": 4, "widths": [2], "dropout": 0.0}
    make = lambda: build(spec, Inputs(fed.shape, 3, fed.vocabulary), seed=1).double()  # noqa: E731
    modules = [make(), make()]
    modules[1].token_table = None
    uploads = []
    for module in modules:
        solver = AutogradSolver(module, fed, 3)
        task = Task(epochs=1, batch_size=8, lr=0.05, objective=Ridge())
        uploads.append(upload_of(solver, Job(0, solver.layout.read(), task, ("client", 0))))
    torch.testing.assert_close(*uploads, rtol=1e-9, atol=1e-9)


class Words(nn.Module):
    token_table = "table"

    def __init__(self) -> None:
        super().__init__()
        self.table, self.out = nn.Embedding(50, 6), nn.Linear(6, 3)

    def forward(self, tokens):
        return self.out(self.table(tokens).mean(1))


class Even(Words):
    """Looks at the tokens themselves, which its base does not."""

    def forward(self, tokens):
        return self.out(self.table(tokens * (tokens % 2 == 0)).mean(1))


def test_a_subclass_does_not_inherit_that_words_may_be_renumbered():
    draws = np.random.default_rng(0)
    parts = [(draws.integers(1, 50, size=(20, 6)), draws.integers(3, size=20)) for _ in range(2)]
    fed, uploads = Federation.from_arrays(parts, seed=0), []
    for general in (False, True):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            module = Even().double()
        if general:
            module.token_table = None
        solver = AutogradSolver(module, fed, 3)
        uploads.append(upload_of(solver, Job(0, solver.layout.read(), TASK, ("client", 0))))
    torch.testing.assert_close(*uploads, rtol=1e-9, atol=1e-9)


# -- one sample -----------------------------------------------------------------------------------


def normalised() -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return nn.Sequential(
            nn.Linear(5, 7), nn.BatchNorm1d(7), nn.ReLU(), nn.Linear(7, 3)
        ).double()


def lonely() -> Federation:
    """The first of four clients has one sample to train on, the others twelve."""
    draws = np.random.default_rng(0)
    sizes = ((1, 3), (12, 4), (12, 4), (12, 4))
    return Federation.from_arrays(
        [
            tuple(
                part
                for size in pair
                for part in (draws.normal(size=(size, 5)), draws.integers(3, size=size))
            )
            for pair in sizes
        ],
        classes=3,
    )


def by_hand(fed, client, start, steps, batch) -> torch.Tensor:
    """SGD with the statistics that came with the model, on one sample at a time."""
    module = normalised()
    Layout(module).load(start)
    module.eval()
    x = fed.prepare(fed.x[fed.train[client]]).double()
    y = fed.y[fed.train[client]]
    optimiser = torch.optim.SGD(module.parameters(), TASK.lr, 0.9, weight_decay=1e-4)
    for step in range(steps):
        optimiser.zero_grad()
        nn.functional.cross_entropy(module(x[batch(step)]), y[batch(step)]).backward()
        optimiser.step()
    return nn.utils.parameters_to_vector(module.parameters()).detach()


def test_a_client_with_one_sample_trains_with_the_statistics_it_was_sent():
    fed, solver = lonely(), AutogradSolver(normalised(), lonely(), 3)
    assert fed.samples[0] == 1
    moved = upload_of(solver, Job(1, solver.layout.read(), TASK, ("client", 1)))
    upload = upload_of(solver, Job(0, moved, TASK, ("client", 0)))
    count = solver.layout.parameters
    expected = by_hand(fed, 0, moved, 2, lambda step: slice(0, 1))
    torch.testing.assert_close(upload[:count], expected, rtol=1e-9, atol=1e-9)
    assert torch.equal(upload[count:], moved[count:])  # the statistics stay
    again = upload_of(solver, Job(1, solver.layout.read(), TASK, ("client", 1)))
    assert not torch.equal(again[count:], moved[count:])  # those of others are theirs again


def test_batches_of_one_work_as_well():
    fed, solver = lonely(), AutogradSolver(normalised(), lonely(), 3)
    task = Task(epochs=1, batch_size=1, lr=0.05)
    start = solver.layout.read()
    upload = upload_of(solver, Job(2, start, task, ("client", 2)))
    assert torch.isfinite(upload).all()
    assert not torch.equal(upload, start)
    assert fed.samples[2] == 12


def test_a_peer_with_one_sample():
    fed, solver = lonely(), AutogradSolver(normalised(), lonely(), 3)
    start, space = solver.layout.read(), solver.layout
    learner = Learner(solver, 0, TASK)
    learner.steps(4)
    expected = by_hand(fed, 0, start, 4, lambda step: slice(0, 1))
    torch.testing.assert_close(learner.params[: space.parameters], expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("strategy", ["fedavg", "pace", "p2p"])
def test_a_run_with_such_a_client(strategy):
    result = pt.simulate(lonely(), model=normalised, strategy=strategy, updates=12, check=True)
    assert result.summary["complete"]
    assert 0 <= result.accuracy <= 1
