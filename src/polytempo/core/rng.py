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
    parts = (f"str:{part}" if isinstance(part, str) else f"int:{int(part)}" for part in name)
    text = "\x1f".join([str(seed), *parts])
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=16).digest(), "little")


def rng(seed: int, *name: str | int) -> np.random.Generator:
    """The random stream of that name."""
    return np.random.Generator(np.random.PCG64(stream_seed(seed, *name)))
