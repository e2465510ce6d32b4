"""The machine's own limits, on one thread: what everything else is measured against."""

from __future__ import annotations

import platform
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch

from polytempo.training.executors.processes import cores


def machine() -> dict[str, Any]:
    """What this machine is, and can do."""
    return {
        "processor": _processor(),
        "cores": cores(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "gemm_gflops": gemm_gflops(),
        "read_gb_per_s": 1e-9 * 2**28 / reading(2**26),
    }


def gemm_gflops(size: int = 1024) -> float:
    """Speed of a product of square matrices in float32."""
    a = torch.randn(size, size)
    out = torch.empty_like(a)
    return 2e-9 * size**3 / repeat(lambda: torch.mm(a, a, out=out), 15)


def reading(numbers: int, most: int = 2**28) -> float:
    """Seconds to read this many float32 numbers once; above `most`, in proportion."""
    size = min(numbers, most)
    block, vector = torch.ones(size // 4096 + 1, 4096), torch.ones(4096)
    return repeat(lambda: torch.mv(block, vector), 7) * numbers / block.numel()


def repeat(action: Callable[[], object], times: int) -> float:
    """Median seconds of the action, after one for warming up."""
    action()
    return median(seconds(action) for _ in range(times))


def seconds(action: Callable[[], object]) -> float:
    begin = time.perf_counter()
    action()
    return time.perf_counter() - begin


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()
