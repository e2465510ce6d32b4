"""Which solver computes the trainings of a run, and which executor carries them out."""

from __future__ import annotations

import sys
from typing import Literal

import torch
from torch import nn

from polytempo.core.errors import PolytempoError
from polytempo.core.layout import ALL_SHARED, Parts
from polytempo.data import Federation
from polytempo.native.build import NoCompiler
from polytempo.training.executors.executor import Executor
from polytempo.training.executors.processes import Processes, cores
from polytempo.training.problem import Problem
from polytempo.training.solvers.autograd import AutogradSolver
from polytempo.training.solvers.native.layers import Unfit
from polytempo.training.solvers.native.solver import NativeSolver

SolverName = Literal["auto", "torch", "native"]
BackendName = Literal["auto", "serial", "processes", "ray"]


def make_executor(
    module: nn.Module,
    federation: Federation,
    seed: int,
    parts: Parts = ALL_SHARED,
    *,
    problem: Problem | None = None,
    solver: SolverName = "auto",
    device: str = "cpu",
    name: BackendName = "auto",
    workers: int | None = None,
    small: bool = False,
) -> Executor:
    """A backend of that name, with a solver of that name.

    Solvers, how a training is computed:
    torch:     anything, by autograd
    native:    chains of common layers, by code that is compiled for them
    auto:      native if the model allows it and there is a compiler, else torch

    Backends, where trainings run:
    serial:    one after the other, in this process
    processes: on `workers` processes of this machine
    ray:       on the machines of a Ray cluster
    auto:      processes, one for each processor, but serial for a `small` run

    The numbers depend on the solver (equal to about 1e-6) and the device, on nothing else.
    """
    chosen, how, why = make_solver(module, federation, seed, parts, device, problem, name=solver)
    if name == "serial" and workers not in (None, 1):
        raise PolytempoError(f"backend serial has no workers, got {workers}; use backend processes")
    if chosen.device.type != "cpu" and (name in ("processes", "ray") or workers not in (None, 1)):
        raise PolytempoError(
            f"workers cannot share the device {device}; use --backend serial, without --workers"
        )
    if name == "ray":
        from polytempo.training.executors.ray_actors import RayPool, processors

        count = workers or processors()
        about = f"{how} on {count} Ray workers{why}"
        return Executor(chosen, lambda: RayPool(chosen, count), about)
    if workers is None:
        several = sys.platform == "linux" and (name == "processes" or not small)
        workers = cores() if several and name != "serial" and chosen.device.type == "cpu" else 1
    if workers > 1 or name == "processes":
        count = workers
        about = f"{how} on {count} processes{why}"
        return Executor(chosen, lambda: Processes(chosen, count), about)
    return Executor(chosen, None, f"{how}, serial{why}")


def make_solver(
    module: nn.Module,
    federation: Federation,
    seed: int,
    parts: Parts = ALL_SHARED,
    device: str = "cpu",
    problem: Problem | None = None,
    *,
    name: SolverName = "auto",
) -> tuple[AutogradSolver, str, str]:
    """A solver of that name, which it is, and why it is not native where it might be."""
    given = (module, federation, seed, parts, device, problem)
    if name == "torch":
        return AutogradSolver(*given), "torch", ""
    try:
        return NativeSolver(*given), "native", ""
    except (Unfit, NoCompiler) as error:
        if name == "native":
            raise PolytempoError(f"solver native: {error}; use --solver auto") from error
        return AutogradSolver(*given), "torch", f" (not native: {error})"


def find_device(name: str) -> str:
    """The device of that name; auto: a GPU if there is one."""
    if name == "auto":
        if torch.cuda.is_available():
            return "cuda"
        return "mps" if torch.backends.mps.is_available() else "cpu"
    try:
        torch.empty(1, device=name)
    except (RuntimeError, AssertionError) as error:
        raise PolytempoError(
            f"device {name!r} cannot be used here ({str(error).splitlines()[0]}); "
            "use cpu, cuda, cuda:N, mps or auto"
        ) from error
    return name
