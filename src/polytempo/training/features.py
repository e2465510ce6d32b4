"""What a model sees in a client's samples: the features before its last layer."""

from __future__ import annotations

from torch import Tensor, nn

from polytempo.core.errors import PolytempoError


def last_features(module: nn.Module, inputs: Tensor) -> Tensor:
    """What enters the linear layer that the module uses last [samples, features]."""
    layers = [layer for layer in module.modules() if isinstance(layer, nn.Linear)]
    if not layers:
        raise PolytempoError(
            f"{type(module).__name__} has no linear layer, so it has no features to compare "
            "clients by; use a strategy other than fedsac, or a model that ends in nn.Linear"
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
