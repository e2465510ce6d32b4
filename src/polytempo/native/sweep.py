"""A large bank at the speed of the memory: its pass over the rows as compiled code, and on threads.

Neither changes a bit of the other: every row's numbers are computed by one thread, by the same
operations in the same order, whichever thread it is and whatever else it does.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from polytempo.core.bank import Kernel, Pass
from polytempo.core.objective import Measure
from polytempo.core.tiles import FloatArray, Spread
from polytempo.native.build import NoCompiler, library

GROUP = 128  # numbers that the code takes together
PAYS = 8  # parts, of a million numbers each, for which a further thread pays
_DISTANCES = {"l1": 1, "l2": 2}


@cache
def compiled_sweep() -> Kernel | None:
    """The pass as compiled code; None where there is no compiler, and torch has to do."""
    try:
        code = library(Path(__file__).with_name("sweep.cpp").read_text(encoding="utf8"))
    except NoCompiler:
        return None
    run = code.polytempo_sweep
    number, address = ctypes.c_int64, ctypes.c_void_p
    run.argtypes = [
        *(ctypes.c_int, ctypes.c_int, address, number, number, number, address, address),
        *(ctypes.c_uint64, address, address, address),
    ]
    run.restype = None

    def kernel(vector: Tensor, measure: Measure) -> Pass:
        assert vector.dtype == torch.float32
        filled = functional.pad(vector, (0, -len(vector) % GROUP))
        distance = _DISTANCES.get(measure, 0)

        def read(rows: Tensor, shares: FloatArray, key: int) -> FloatArray:
            assert rows.stride(1) == 1 and shares.flags.c_contiguous
            found = np.zeros((3, len(rows)))
            size, into = rows.element_size(), (line.ctypes.data for line in found)
            run(
                *(8 * size, distance, rows.data_ptr(), rows.stride(0) * size, len(rows)),
                *(len(vector), filled.data_ptr(), shares.ctypes.data, key % 2**64, *into),
            )
            return found

        return read

    return kernel


def on_threads(count: int) -> Spread:
    """Work on up to `count` threads at once, this one among them.

    Nobody waits for a thread that has not begun by the time that all parts are taken: worker
    processes want the same cores, and it may be long before they let it run.
    """

    def spread(work: Callable[[Iterator[Any]], None], parts: Sequence[Any]) -> None:
        left, threads = iter(parts), min(count, len(parts) // PAYS)
        asked = [_pool(count - 1).submit(work, left) for _ in range(threads - 1)]
        try:
            work(left)
        finally:
            begun = [thread for thread in asked if not thread.cancel()]
            wait(begun)
        for thread in begun:
            thread.result()

    return spread


@cache
def _pool(count: int) -> ThreadPoolExecutor:
    """Made when it is first needed; a forked process makes its own, for threads are not forked."""
    return ThreadPoolExecutor(count, "polytempo bank")


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_pool.cache_clear)
