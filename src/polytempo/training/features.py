"""What a model sees in a client's samples: the features before its last layer, and their principal
directions (FedSaC compares clients by them)."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from polytempo.core.errors import PolytempoError


def last_features(module: nn.Module, inputs: Tensor) -> Tensor:
    """What enters the linear layer that the module uses last [samples, features]."""
    layers = [layer for layer in module.modules() if isinstance(layer, nn.Linear)]
    if not layers:
        raise PolytempoError(
            f"{type(module).__name__} has no linear layer, so it has no features to compare "
            "clients by; use another strategy than fedsac, or a model that ends in nn.Linear"
        )
    seen: list[Tensor] = []
    handles = [
        layer.register_forward_pre_hook(lambda _, given: seen.append(given[0])) for layer in layers
    ]
    try:
        module(inputs)
    finally:
        for handle in handles:
            handle.remove()
    return seen[-1].flatten(1)


def principal_directions(features: Tensor, count: int) -> Tensor:
    """An orthonormal basis [count, features] of the directions in which the samples vary most.

    Rows are zero where the samples vary in fewer directions. The basis as such is not unique
    (signs, rotations among equal variances); the space that it spans is what counts. Features that
    are not finite have a basis of NaN, for the server to refuse.
    """
    centred = features.double() - features.double().mean(0)
    if not bool(centred.isfinite().all()):
        return features.new_full((count, features.shape[1]), torch.nan)
    _, sizes, directions = torch.linalg.svd(centred, full_matrices=False)
    basis = centred.new_zeros(count, centred.shape[1])
    found = int((sizes[:count] > 1e-7 * max(float(sizes[0]), 1e-30)).sum())
    basis[:found] = directions[:found]
    return basis.to(features.dtype)
