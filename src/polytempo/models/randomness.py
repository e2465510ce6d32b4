"""Torch's global random numbers, from which layers draw: one thread at a time."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch

_GENERATORS = threading.RLock()  # there is one of each for all threads of a process


def _renew() -> None:
    """In a process that was forked while another thread held the lock, nobody would release it."""
    global _GENERATORS
    _GENERATORS = threading.RLock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_renew)


@contextmanager
def own_torch_randomness(device: torch.device | None = None) -> Iterator[None]:
    """For layers that draw from torch's global generators: seed them inside as you like, no other
    thread that asks here disturbs them, and afterwards they are as they were."""
    if device is None or device.type == "cpu":
        forked = torch.random.fork_rng(devices=[])
    else:
        forked = torch.random.fork_rng(devices=[device], device_type=device.type)
    with _GENERATORS, forked:
        yield
