"""Which solver and which executor a run gets, and what cannot be had."""

import pytest
import torch
from torch import nn

from polytempo import PolytempoError
from polytempo.core.layout import Parts
from polytempo.training import AutogradSolver, find_device, make_executor
from polytempo.training.solvers.native.solver import NativeSolver
from solving import NATIVE, needs_compiler


def stack() -> nn.Module:
    return nn.Sequential(nn.Linear(12, 7), nn.ReLU(), nn.Linear(7, 4))


def normed() -> nn.Module:
    return nn.Sequential(nn.Linear(12, 7), nn.BatchNorm1d(7), nn.Linear(7, 4))


WHY = "Sequential: it has buffers (running statistics)"


@needs_compiler
@pytest.mark.parametrize(
    ("make", "parts", "solver", "expected"),
    [
        (stack, Parts(), "auto", NativeSolver),
        (stack, Parts(), "native", NativeSolver),
        (stack, Parts(["head"]), "auto", NativeSolver),
        (stack, Parts(frozen=["0.*"]), "auto", NativeSolver),
        (stack, Parts(), "torch", AutogradSolver),
        (normed, Parts(), "torch", AutogradSolver),
    ],
)
def test_the_solver_is_the_fastest_that_fits(small, make, parts, solver, expected):
    backend = make_executor(make(), small, 0, parts, solver=solver, name="serial")
    assert type(backend.solver) is expected
    how = "native" if expected is NativeSolver else "torch"
    assert backend.name == f"{how}, serial"
    assert backend.solver.parts == parts


@pytest.mark.parametrize(
    ("where", "expected"),
    [({"name": "serial"}, ", serial"), ({"name": "processes", "workers": 2}, " on 2 processes")],
)
def test_what_does_not_fit_goes_to_torch_and_the_run_says_why(small, where, expected):
    backend = make_executor(normed(), small, 0, **where)
    assert type(backend.solver) is AutogradSolver
    assert backend.name == f"torch{expected} (not native: {WHY})"


def test_without_a_compiler_torch_takes_over(small, monkeypatch):
    monkeypatch.setenv("POLYTEMPO_CXX", "{none-such}")
    why = "POLYTEMPO_CXX='{none-such}' is not a command here"
    backend = make_executor(stack(), small, 0, name="serial")
    assert type(backend.solver) is AutogradSolver
    assert backend.name == f"torch, serial (not native: {why})"
    with pytest.raises(PolytempoError) as caught:
        make_executor(stack(), small, 0, solver="native")
    assert str(caught.value) == f"solver native: {why}; use --solver auto"


def test_a_solver_that_does_not_fit_is_refused(small):
    with pytest.raises(PolytempoError) as caught:
        make_executor(normed(), small, 0, solver="native")
    assert str(caught.value) == f"solver native: {WHY}; use --solver auto"


@pytest.mark.parametrize("solver", ["torch", NATIVE])
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
    assert backend.name == "torch, serial (not native: it is for CPUs, not meta)"
    solver = backend.solver
    assert {solver.x.device.type, solver.y.device.type, solver.layout.vector.device.type} == {
        "meta"
    }
    assert small.x.device.type == "cpu"
    with pytest.raises(PolytempoError, match="solver native: it is for CPUs, not meta"):
        make_executor(stack(), small, 0, device="meta", solver="native")


def test_devices_are_found_or_named(monkeypatch):
    assert find_device("cpu") == "cpu"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert find_device("auto") == "cuda"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    assert find_device("auto") == "cpu"
    with pytest.raises(PolytempoError, match=r"device 'warp' cannot be used here.*cpu, cuda"):
        find_device("warp")
