"""Which backend carries a run out."""

from __future__ import annotations

import sys
from typing import Literal

from torch import nn

from polytempo.core.errors import PolytempoError
from polytempo.core.parameters import BufferPolicy
from polytempo.data import Federation
from polytempo.training.executors.executor import Backend
from polytempo.training.executors.processes import Processes, cores
from polytempo.training.solvers.autograd import AutogradSolver, Solver
from polytempo.training.solvers.dense import DenseSolver

BackendName = Literal["auto", "serial", "batched", "processes", "ray"]


def make_backend(
    module: nn.Module,
    federation: Federation,
    seed: int,
    buffers: BufferPolicy = "share",
    *,
    name: BackendName = "auto",
    workers: int | None = None,
    small: bool = False,
) -> Backend:
    """The backend of that name.

    serial:    one training after the other, in this process
    batched:   several clients at once (stacks of fully connected layers only), on `workers`
               processes; with 1, in this process
    processes: one training at a time on each of `workers` processes
    ray:       as processes, on the machines of a Ray cluster
    auto:      batched if the model allows it, else processes, else serial

    The numbers depend on whether training is batched (equal to about 1e-6), on nothing else. By
    default there are as many workers as processors, but none for a `small` run.
    """
    stack = DenseSolver.fits(module)
    if name == "batched" and not stack:
        raise PolytempoError(
            "backend batched trains stacks of fully connected layers with ReLU (mlp, linear), not "
            f"this {type(module).__name__}; use processes, or leave the choice to auto"
        )
    if name == "serial" and workers not in (None, 1):
        raise PolytempoError(f"backend serial has no workers, got {workers}; use processes")
    batched = name in ("auto", "batched", "ray") and stack
    solver: Solver = (DenseSolver if batched else AutogradSolver)(module, federation, seed, buffers)
    how = "batched" if batched else "serial"
    if name == "ray":
        from polytempo.training.executors.ray_actors import RayPool, processors

        count = workers or processors()
        return Backend(solver, lambda: RayPool(solver, count), f"{how} on {count} Ray workers")
    if workers is None:
        several = sys.platform == "linux" and (name == "processes" or not small)
        workers = cores() if several and name != "serial" else 1
    if workers > 1 or name == "processes":
        count = workers
        return Backend(solver, lambda: Processes(solver, count), f"{how} on {count} processes")
    return Backend(solver, None, how)
