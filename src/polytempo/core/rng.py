"""Random numbers by name, not by order.

Every draw in the project comes from a stream that is named by what it is for:
`rng(seed, "client", 3, "dispatch", 17)`. Two streams with different names are independent, and a
stream is the same however many others were drawn before it, on whichever worker process. Nothing
about random state has to be saved in a checkpoint.
"""

from __future__ import annotations

import hashlib

import numpy as np


def stream_seed(seed: int, *name: str | int) -> int:
    """A 128-bit seed for the stream of that name."""
    return int.from_bytes(_digest(seed, name), "little")


def rng(seed: int, *name: str | int) -> np.random.Generator:
    """The random stream of that name: numpy's usual generator, seeded by `stream_seed`."""
    words = np.frombuffer(_digest(seed, name), "<u4")  # as numpy would take the seed apart
    return np.random.Generator(np.random.PCG64(np.random.SeedSequence(words)))


def _digest(seed: int, name: tuple[str | int, ...]) -> bytes:
    text = str(seed)
    for part in name:
        text += f"\x1fstr:{part}" if isinstance(part, str) else f"\x1fint:{int(part)}"
    return hashlib.blake2b(text.encode(), digest_size=16).digest()
