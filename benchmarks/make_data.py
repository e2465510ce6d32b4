"""Write what all contestants train on to the folder PEERS_DATA: CIFAR-10, if POLYTEMPO_DATA names a
folder of Polytempo's data files, else made-up images of the same shape. Runs in Polytempo's own
environment, which can read those files."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import torch

import work
from polytempo import Federation


def cifar10() -> tuple[np.ndarray, np.ndarray]:
    """The photographs in random order, normalised."""
    federation = Federation.load("cifar10", clients=1, seed=0)
    chosen = slice(0, work.CLIENTS * work.SAMPLES)
    return federation.prepare(federation.x[chosen]).numpy(), federation.y[chosen].numpy()


def made_up() -> tuple[np.ndarray, np.ndarray]:
    """Ten patterns, each under much noise: something can be learned, so losses can be compared."""
    stream = np.random.default_rng(0)
    y = stream.integers(0, 10, work.CLIENTS * work.SAMPLES)
    patterns = stream.standard_normal((10, 3, 32, 32), dtype=np.float32)
    noise = stream.standard_normal((len(y), 3, 32, 32), dtype=np.float32)
    return noise + 0.1 * patterns[y], y


if __name__ == "__main__":
    torch.set_num_threads(1)
    x, y = cifar10() if os.environ.get("POLYTEMPO_DATA") else made_up()
    folder = Path(os.environ["PEERS_DATA"])
    np.save(folder / "x.npy", np.ascontiguousarray(x, dtype=np.float32))
    np.save(folder / "y.npy", y.astype(np.int64))
