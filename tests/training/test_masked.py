"""Training in which a part of the parameters stays as it is."""

import pytest
import torch
from torch import nn

from polytempo.core.client_steps import Mask
from polytempo.core.masks import largest, unpack
from polytempo.core.objective import Plain, Proximal
from polytempo.core.optimizer import Adam, AdamW, Sgd
from polytempo.core.task import Task
from polytempo.training import Job
from polytempo.training.solvers.autograd import AutogradSolver
from polytempo.training.solvers.native.solver import NativeSolver
from solving import needs_compiler, upload_of


def module():
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        return nn.Sequential(nn.Flatten(), nn.Linear(12, 9), nn.ReLU(), nn.Linear(9, 4))


def task(share: float | None = 0.4, **options) -> Task:
    """With a mask that drops this share; None: without a mask."""
    given = {"epochs": 3, "batch_size": 8, "lr": 0.1, "optimizer": Sgd(weight_decay=0.05)}
    steps = () if share is None else (Mask(share),)
    return Task(**{**given, "client_steps": steps, **options})


@pytest.mark.parametrize(
    "trainer", [AutogradSolver, pytest.param(NativeSolver, marks=needs_compiler)]
)
@pytest.mark.parametrize("objective", [Plain(), Proximal(0.5)], ids=str)
@pytest.mark.parametrize(
    "optimizer",
    [Sgd(weight_decay=0.05), Adam(weight_decay=0.05), AdamW(weight_decay=0.05)],
    ids=lambda found: type(found).__name__,
)
def test_masked_parameters_are_bit_identical_and_others_are_not(
    small, trainer, objective, optimizer
):
    solver = trainer(module(), small, seed=0)
    params = solver.layout.read()
    given = task(objective=objective, optimizer=optimizer)
    kept = largest(params, 0.4)
    assert int(kept.sum()) == len(params) - int(0.4 * len(params))
    for client in range(4):
        upload, extras, _ = solver.carry_out(Job(client, params, given, ("client", client)))
        assert torch.equal(upload[~kept], params[~kept])
        assert (upload[kept] != params[kept]).float().mean() > 0.9
        assert torch.equal(unpack(extras["mask"], len(params)), kept)


@needs_compiler
def test_both_ways_to_train_agree(small):
    plain, native = AutogradSolver(module(), small, seed=0), NativeSolver(module(), small, seed=0)
    job = Job(2, plain.layout.read(), task(), ("client", 2))
    torch.testing.assert_close(upload_of(plain, job), upload_of(native, job), atol=1e-5, rtol=1e-4)


def test_a_mask_that_drops_nothing_changes_nothing(small):
    solver = AutogradSolver(module(), small, seed=0)
    params = solver.layout.read()
    whole = upload_of(solver, Job(1, params, task(None), ("client", 1)))
    assert torch.equal(upload_of(solver, Job(1, params, task(0.0), ("client", 1))), whole)


def test_what_is_no_parameter_is_never_masked(small):
    normal = nn.Sequential(nn.Flatten(), nn.Linear(12, 4), nn.BatchNorm1d(4))
    solver = AutogradSolver(normal, small, seed=0)
    job = Job(0, solver.layout.read(), task(0.9), ("client", 0))
    statistics = slice(solver.layout.parameters, solver.layout.size)
    upload, extras, _ = solver.carry_out(job)
    assert unpack(extras["mask"], solver.layout.size)[statistics].all()
    assert not torch.equal(upload[statistics], job.params[statistics])


def test_a_sparse_task_takes_less_time_in_proportion():
    assert task(0.25).work(100) == pytest.approx(0.75 * task(None).work(100))
    assert task(0.0).extras == {"mask": 1} and task(None).extras == {}


def test_nothing_is_sorted_if_nothing_is_dropped(small, monkeypatch):
    monkeypatch.setattr(torch, "sort", None)
    solver = AutogradSolver(module(), small, seed=0)
    job = Job(1, solver.layout.read(), task(0.0), ("client", 1))
    _, extras, _ = solver.carry_out(job)
    assert unpack(extras["mask"], solver.layout.size).all()
