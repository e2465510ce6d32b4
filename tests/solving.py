"""What comes of jobs, for tests that look at the uploads alone; native training, where there is a
compiler; and a device that is not here."""

import pytest
import torch
from torch import Tensor

from polytempo.native.build import NoCompiler, find_compiler
from polytempo.training import Job, Solver

try:
    find_compiler()
    _missing = ""
except NoCompiler as error:
    _missing = str(error)
HAS_COMPILER = not _missing
needs_compiler = pytest.mark.skipif(not HAS_COMPILER, reason=_missing)
NATIVE = pytest.param("native", marks=needs_compiler)


def upload_of(solver: Solver, job: Job) -> Tensor:
    return solver.carry_out(job).upload


class WithoutDoubles(Tensor):
    """Numbers on a device that has no float64, as Apple's mps; `cpu` brings them to one that has.
    What is computed of them is there too."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        found = super().__torch_function__(func, types, args, kwargs)
        if func is Tensor.cpu:
            return found.as_subclass(Tensor)
        if isinstance(found, cls) and found.dtype == torch.float64:
            raise TypeError("this device has no float64")
        return found
