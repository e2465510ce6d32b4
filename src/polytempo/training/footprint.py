"""How much memory a process has needed (on Linux; elsewhere it is not known, and 0)."""

from __future__ import annotations

from pathlib import Path


def peak_memory(reset: bool = False) -> float:
    """The most bytes that this process had in memory since the last reset."""
    try:
        if reset:
            Path("/proc/self/clear_refs").write_text("5")
        return _read("status", "VmHWM")
    except OSError:
        return 0.0


def private_memory() -> float:
    """Bytes that this process shares with no other."""
    try:
        return _read("smaps_rollup", "Private")
    except OSError:
        return 0.0


def _read(file: str, beginning: str) -> float:
    lines = Path("/proc/self", file).read_text().splitlines()
    return sum(float(line.split()[1]) * 1024 for line in lines if line.startswith(beginning))
