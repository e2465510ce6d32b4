"""An `nn.Module` as one flat vector, and back.

On the wire, in the bank and in every strategy a model is a flat vector: first all parameters that
are trained, then those that are frozen, then the floating-point buffers (the running statistics of
batch normalisation), if their policy is "share". Integer buffers (counters) never travel.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor, nn

from polytempo.core.errors import PolytempoError

BufferPolicy = Literal["share", "reset"]


class ParameterSpace:
    """The layout of a module's flat vector, and the module bound to one such vector.

    The module's parameters become views of `vector` and their gradients views of `grad`, so that
    loading a model is one copy and an SGD step is a handful of operations on whole vectors.

    `buffers="share"`: floating-point buffers are part of the vector and are averaged like
    parameters. `buffers="reset"`: they stay out of it, and every `load` sets them back to their
    initial values.
    """

    def __init__(self, module: nn.Module, buffers: BufferPolicy = "share") -> None:
        self.module = module
        parameters = [p for p in module.parameters() if p.requires_grad]
        if not parameters:
            raise PolytempoError(f"{type(module).__name__} has no parameters: nothing to train")
        frozen = [p for p in module.parameters() if not p.requires_grad]
        floating = [b for b in module.buffers() if b.is_floating_point()]
        others = [b for b in module.buffers() if not b.is_floating_point()]
        shared = floating if buffers == "share" else []
        kept = others if buffers == "share" else floating + others
        dtype = parameters[0].dtype
        untrained = [*frozen, *shared]
        if any(t.dtype != dtype for t in [*parameters, *untrained]):
            raise PolytempoError(f"all parameters must have one type, here {dtype} and others")

        self.parameters = sum(p.numel() for p in parameters)
        self.size = self.parameters + sum(t.numel() for t in untrained)
        self.vector = torch.empty(self.size, dtype=dtype)
        self.grad = torch.zeros(self.parameters, dtype=dtype)
        self._reset = [(buffer, buffer.clone()) for buffer in kept]
        self.trained: list[tuple[nn.Parameter, slice]] = []  # and their places in the vector
        offset = 0
        for tensor in [*parameters, *untrained]:
            place = slice(offset, offset + tensor.numel())
            view = self.vector[place].view(tensor.shape)
            view.copy_(tensor.detach())
            tensor.data = view
            if isinstance(tensor, nn.Parameter) and tensor.requires_grad:
                tensor.grad = self.grad[place].view(tensor.shape)
                self.trained.append((tensor, place))
            offset += tensor.numel()

    def load(self, vector: Tensor) -> None:
        """Make the module the model that `vector` describes."""
        self.vector.copy_(vector)
        for buffer, initial in self._reset:
            buffer.copy_(initial)

    def read(self) -> Tensor:
        """The module as a new vector."""
        return self.vector.clone()
