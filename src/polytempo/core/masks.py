"""Which parameters are trained and mixed, and which stay as they are (CASA+)."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor


def largest(vector: Tensor, sparsity: float) -> Tensor:
    """True for all but that share of the numbers, rounded down, that are smallest in size; among
    equals the first ones are dropped."""
    mask = torch.ones(len(vector), dtype=torch.bool)
    dropped = int(sparsity * len(vector))
    if dropped:
        mask[torch.sort(vector.abs(), stable=True).indices[:dropped]] = False
    return mask


def pack(mask: Tensor) -> Tensor:
    """As bits, eight to a byte [1, bytes]."""
    return torch.from_numpy(np.packbits(mask.numpy()))[None]


def unpack(bits: Tensor, size: int) -> Tensor:
    """The mask of that size that was packed."""
    return torch.from_numpy(np.unpackbits(bits[0].numpy(), count=size).astype(np.bool_))
