"""Which solver and which executor a run gets, and what cannot be had."""

import pytest
import torch
from torch import nn

from polytempo import PolytempoError
from polytempo.core.layout import Parts
from polytempo.training import AutogradSolver, find_device, make_executor
from polytempo.training.solvers.dense import DenseSolver


def stack() -> nn.Module:
    return nn.Sequential(nn.Linear(12, 7), nn.ReLU(), nn.Linear(7, 4))


def other() -> nn.Module:
    return nn.Sequential(nn.Linear(12, 7), nn.Tanh(), nn.Linear(7, 4))


@pytest.mark.parametrize(
    ("make", "parts", "solver", "expected"),
    [
        (stack, Parts(), "auto", DenseSolver),
        (stack, Parts(), "dense", DenseSolver),
        (stack, Parts(), "torch", AutogradSolver),
        (other, Parts(), "auto", AutogradSolver),
        (stack, Parts(["head"]), "auto", DenseSolver),
        (stack, Parts(frozen=["0.*"]), "auto", AutogradSolver),
    ],
)
def test_the_solver_is_the_fastest_that_fits(small, make, parts, solver, expected):
    backend = make_executor(make(), small, 0, parts, solver=solver, name="serial")
    assert type(backend.solver) is expected
    how = "dense" if expected is DenseSolver else "torch"
    assert backend.name == f"{how}, serial"
    assert backend.solver.parts == parts


@pytest.mark.parametrize(
    ("make", "parts"), [(other, Parts()), (stack, Parts(frozen=["0.*"]))], ids=["tanh", "frozen"]
)
def test_a_solver_that_does_not_fit_is_refused(small, make, parts):
    with pytest.raises(PolytempoError, match=r"solver dense .* unfrozen.*Sequential.* torch"):
        make_executor(make(), small, 0, parts, solver="dense")


@pytest.mark.parametrize("solver", ["torch", "dense"])
@pytest.mark.parametrize(
    ("name", "workers", "small_run", "expected"),
    [
        ("serial", None, False, "serial"),
        ("auto", None, True, "serial"),
        ("auto", 1, False, "serial"),
        ("auto", 3, True, "3 processes"),
        ("processes", 1, False, "1 processes"),
        ("processes", 2, True, "2 processes"),
    ],
)
def test_where_is_independent_of_how(small, solver, name, workers, small_run, expected):
    backend = make_executor(
        stack(), small, 0, solver=solver, name=name, workers=workers, small=small_run
    )
    between = ", " if expected == "serial" else " on "
    assert backend.name == f"{solver}{between}{expected}"


def test_a_serial_backend_has_no_workers(small):
    with pytest.raises(PolytempoError, match="serial has no workers, got 4; use backend processes"):
        make_executor(stack(), small, 0, name="serial", workers=4)


@pytest.mark.parametrize(
    ("name", "workers"), [("processes", None), ("processes", 2), ("auto", 2), ("ray", 2)]
)
def test_workers_cannot_share_a_device(small, name, workers):
    """Any device that is not the CPU will do for this."""
    with pytest.raises(PolytempoError, match="workers cannot share the device meta"):
        make_executor(stack(), small, 0, device="meta", name=name, workers=workers)


def test_on_another_device_one_torch_solver_owns_all(small):
    backend = make_executor(stack(), small, 0, device="meta")
    assert backend.name == "torch, serial"
    solver = backend.solver
    assert {solver.x.device.type, solver.y.device.type, solver.layout.vector.device.type} == {
        "meta"
    }
    assert small.x.device.type == "cpu"
    with pytest.raises(PolytempoError, match="not a Sequential for classification on meta"):
        make_executor(stack(), small, 0, device="meta", solver="dense")


def test_devices_are_found_or_named(monkeypatch):
    assert find_device("cpu") == "cpu"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert find_device("auto") == "cuda"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    assert find_device("auto") == "cpu"
    with pytest.raises(PolytempoError, match=r"device 'warp' cannot be used here.*cpu, cuda"):
        find_device("warp")
