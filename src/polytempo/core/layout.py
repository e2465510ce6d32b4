"""An `nn.Module` as flat vectors, and back: which parts of it are shared, personal, frozen.

Every parameter and buffer of a module plays one of three parts. *Shared*: it travels; on the wire,
in banks and in every strategy a model is one flat vector of the shared numbers, first those that
are trained, then the floating-point buffers (the running statistics of batch normalisation).
*Personal*: it stays with its client, in a vector of its own in the same order. *Frozen*: it never
changes and exists once, in the module. Integer buffers (counters) are none of these: they begin
afresh with every model that is loaded.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cached_property
from typing import Literal

import torch
from torch import Tensor, nn

from polytempo.core.errors import PolytempoError, nearest

BufferPolicy = Literal["share", "reset"]
HEAD, NORM, BODY = "head", "norm", "body"
_NORMALISATION = (nn.modules.batchnorm._NormBase, nn.LayerNorm, nn.GroupNorm, nn.RMSNorm)


@dataclass(frozen=True)
class Parts:
    """What is not simply shared.

    `personal`, `frozen`: which parameters and buffers stay with their client, and which never
    change. Patterns over their names (`features.*`), or one of these: head (the last linear layer,
    or what the module names in `head_modules`), norm (normalisation layers), body (all but the
    head). What both name is frozen; so is what the module itself does not train.
    `trained`: where given, all else is frozen.
    `buffers`: floating-point buffers take part as parameters do ("share"), or are set back to their
    initial values with every model that is loaded ("reset").
    """

    personal: Sequence[str] = ()
    frozen: Sequence[str] = ()
    buffers: BufferPolicy = "share"
    trained: Sequence[str] | None = None


ALL_SHARED = Parts()


class Layout:
    """Where the numbers of a module stand, and the module bound to one vector of them.

    `vector` holds all that changes: [shared trained, personal trained, shared buffers, personal
    buffers]. The module's tensors are views of it and the gradients of its parameters views of
    `grad`, so that loading a model is a copy or two, and a local step a handful of operations on
    whole vectors.

    `size`, `parameters`: length of a model as it travels, and how many of these numbers are
    trained. `personal`: length of the part that stays. `trained`: the trained parameters with their
    places in `vector`; `trainable`: how many numbers those are.
    """

    def __init__(
        self, module: nn.Module, parts: Parts = ALL_SHARED, device: str | torch.device = "cpu"
    ) -> None:
        self.module = module.to(device)
        frozen = _matching(module, parts.frozen, "freeze")
        if parts.trained is not None:
            frozen |= _all_but(module, _matching(module, parts.trained, "trainable"))
        personal = _matching(module, parts.personal, "personal")
        parameters: list[tuple[str, Tensor]] = []
        for name, parameter in module.named_parameters():
            if name in frozen:
                parameter.requires_grad_(False)
            if parameter.requires_grad:
                parameters.append((name, parameter))
            else:
                frozen.add(name)
        self._still = []  # normalisation layers that are frozen, statistics included
        for prefix, layer in _normalisation(module):
            scales = _names(prefix, layer.named_parameters())
            statistics = _names(prefix, layer.named_buffers())
            if (scales or statistics) and (scales or statistics) <= frozen:
                self._still.append(layer)
                frozen |= statistics
        if not parameters:
            what = f"--freeze {','.join(parts.frozen)} leaves" if parts.frozen else "has"
            raise PolytempoError(f"{type(module).__name__}: {what} no parameters to train")
        every = [*module.named_parameters(), *module.named_buffers()]
        self._frozen = [(name, tensor) for name, tensor in every if name in frozen]
        buffers = [(name, b) for name, b in module.named_buffers() if name not in frozen]
        floating = [found for found in buffers if found[1].is_floating_point()]
        moving = floating if parts.buffers == "share" else []
        names = {name for name, _ in moving}
        dtype = parameters[0][1].dtype
        if any(tensor.dtype != dtype for _, tensor in (*parameters, *moving)):
            raise PolytempoError(f"all parameters must have the same type, got {dtype} and others")

        # what travels, in order: two layouts with the same names mean the same by a vector
        travelling = [(n, tensor) for n, tensor in (*parameters, *moving) if n not in personal]
        self.shared_names = [name for name, _ in travelling]
        self._shared_sizes = [tensor.numel() for _, tensor in travelling]
        self.shared_shapes = [list(tensor.shape) for _, tensor in travelling]

        def of(found: list[tuple[str, Tensor]], mine: bool) -> list[Tensor]:
            return [tensor for name, tensor in found if (name in personal) == mine]

        groups = [of(found, mine) for found in (parameters, moving) for mine in (False, True)]
        shared, own, shared_buffers, own_buffers = (sum(t.numel() for t in g) for g in groups)
        if not shared:
            raise PolytempoError(
                f"--personal {','.join(parts.personal)} leaves nothing to share in "
                f"{type(module).__name__}; for local training alone use the strategy standalone"
            )
        self.parameters, self.trainable = shared, shared + own
        self.size, self.personal = shared + shared_buffers, own + own_buffers
        self.vector = torch.empty(self.size + self.personal, dtype=dtype, device=device)
        self.grad = torch.zeros(self.trainable, dtype=dtype, device=device)
        end = self.trainable + shared_buffers
        self._shared = slice(0, shared), slice(self.trainable, end)
        self._own = slice(shared, self.trainable), slice(end, len(self.vector))
        self._others = [b for name, b in module.named_buffers() if name not in names]
        self._initial = self.counters()
        self.trained: list[tuple[nn.Parameter, slice]] = []
        offset = 0
        for tensor in (tensor for group in groups for tensor in group):
            place = slice(offset, offset + tensor.numel())
            view = self.vector[place].view(tensor.shape)
            view.copy_(tensor.detach())
            tensor.data = view
            if isinstance(tensor, nn.Parameter):
                tensor.grad = self.grad[place].view(tensor.shape)
                self.trained.append((tensor, place))
            offset += tensor.numel()
        self._first_personal = self.split(self.vector)[1]

    @property
    def tensors(self) -> list[int]:
        """How long the shared trained tensors are that a model as it travels begins with."""
        places = [place for _, place in self.trained]  # the shared ones come first
        return [p.stop - p.start for p in places if p.stop <= self.parameters]

    @property
    def digest(self) -> str:
        """Of the names and shapes of what travels, and of what is frozen, by which two machines
        know that they mean the same by a vector."""
        shared = zip(self.shared_names, self.shared_shapes, strict=True)
        return digest_of(shared, self.frozen_digest)

    @cached_property
    def frozen_digest(self) -> str:
        """Of all numbers that are frozen; empty if there are none."""
        if not self._frozen:
            return ""
        digest = hashlib.blake2b(digest_size=16)
        for name, tensor in self._frozen:
            digest.update(f"{name} {tensor.dtype} {list(tensor.shape)}".encode())
            flat = tensor.detach().cpu().contiguous().view(-1)
            digest.update(flat.view(torch.uint8).numpy().data)
        return digest.hexdigest()

    @property
    def initial_personal(self) -> Tensor:
        """The part that stays with a client, as it begins: on the CPU, as everything that is not
        being trained."""
        return self._first_personal.cpu()

    # -- vectors -----------------------------------------------------------------------------------

    def join(self, shared: Tensor, personal: Tensor | None = None) -> Tensor:
        """A model as it travels, and a client's own part of it, in the order of `vector`; a new
        vector."""
        if not self.personal:  # in the same order
            return torch.empty_like(self.vector).copy_(shared)
        assert personal is not None, "the personal part is missing"
        whole = torch.empty_like(self.vector)
        for parts, vector in ((self._shared, shared), (self._own, personal)):
            begin = 0
            for part in parts:
                size = part.stop - part.start
                whole[part] = vector[begin : begin + size]
                begin += size
        return whole

    def split(self, whole: Tensor) -> tuple[Tensor, Tensor]:
        """The opposite of `join`: new vectors."""
        if not self.personal:
            return whole.clone(), whole[:0]
        shared, own = (torch.cat([whole[p] for p in parts]) for parts in (self._shared, self._own))
        return shared, own

    def places(self, part: str) -> Tensor:
        """Which numbers of a model, as it travels, belong to that part (head, norm, body, or a
        pattern of names): none if it does not travel."""
        found = names_of(self.module, part)
        each = [name in found for name in self.shared_names]
        return torch.tensor(each).repeat_interleave(torch.tensor(self._shared_sizes))

    # -- the module --------------------------------------------------------------------------------

    def load(self, shared: Tensor, personal: Tensor | None = None) -> None:
        """Make the module the model that the vector(s) describe."""
        self.load_whole(shared if not self.personal else self.join(shared, personal))

    def state(
        self,
        shared: Tensor,
        personal: Tensor | None = None,
        offset: Tensor | None = None,
        *,
        frozen: bool = True,
    ) -> dict[str, Tensor]:
        """The model that the vector(s) describe as a state dict, perhaps without what is frozen.
        What is added to its outputs (a label prior) goes into the biases of the last linear
        layer."""
        self.load(shared, personal)
        left_out = set() if frozen else {id(tensor) for _, tensor in self._frozen}
        found = {
            name: value.detach().cpu().clone()
            for name, value in self.module.state_dict(keep_vars=True).items()
            if id(value) not in left_out
        }
        if offset is not None:
            bias = f"{head_of(self.module)}bias"
            if bias not in found or found[bias].shape != offset.shape:
                raise PolytempoError(
                    f"the last linear layer of {type(self.module).__name__} has no biases that "
                    "could hold the client's label prior; give it biases"
                )
            found[bias] += offset.cpu()
        return found

    def load_whole(self, whole: Tensor, counters: Sequence[Tensor] | None = None) -> None:
        """The same, given the vector that `join` makes; and, to continue a training, `counters`
        as they were."""
        self.vector.copy_(whole)
        for buffer, value in zip(self._others, counters or self._initial, strict=True):
            buffer.copy_(value)

    def counters(self) -> list[Tensor]:
        """The buffers that no vector holds, as they are."""
        return [buffer.clone() for buffer in self._others]

    def read(self) -> Tensor:
        """The module as a new vector, as it travels: always on the CPU."""
        return (self.split(self.vector)[0] if self.personal else self.vector.clone()).cpu()

    def train(self, batch: int) -> None:
        """Put the module in training mode, except for frozen normalisation layers: their
        statistics never change. Nor do those of batch normalisation where a batch has one sample,
        which has no statistics of its own: it uses those that came with the model."""
        self.module.train()
        for layer in self.module.modules():
            alone = batch == 1 and isinstance(layer, nn.modules.batchnorm._BatchNorm)
            if alone or layer in self._still:
                layer.eval()


def digest_of(shared: Iterable[tuple[str, Sequence[int]]], frozen: str = "") -> str:
    """Of what travels: names and shapes, in order; with the digest of what is frozen."""
    text = json.dumps([[name, list(shape)] for name, shape in shared]) + frozen
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def _matching(module: nn.Module, patterns: Sequence[str], option: str) -> set[str]:
    """The names of parameters and buffers that the patterns stand for. What has several names (tied
    weights) is called by its first."""
    every = [*module.named_parameters(remove_duplicate=False), *module.named_buffers()]
    first = {id(tensor): name for name, tensor in reversed(every)}
    names = {name: first[id(tensor)] for name, tensor in every}
    found: set[str] = set()
    for pattern in patterns:
        if pattern in (HEAD, BODY):
            head = _head(module, names)
            tied = {names[name] for name in head}
            matches = head if pattern == HEAD else {n for n in names if names[n] not in tied}
        elif pattern == NORM:
            matches = set()
            for prefix, layer in _normalisation(module):
                matches |= _names(prefix, layer.named_parameters(), layer.named_buffers())
        else:
            matches = {name for name in names if fnmatchcase(name, pattern)}
        if not matches:
            model, known = type(module).__name__, nearest(pattern, [HEAD, NORM, BODY, *names])
            if pattern == NORM:
                raise PolytempoError(f"--{option} norm: {model} has no normalisation layers")
            raise PolytempoError(f"--{option} {pattern}: {model} has nothing of that name{known}")
        found |= {names[name] for name in matches}
    return found


def names_of(module: nn.Module, part: str) -> set[str]:
    """The parameters and buffers of that part: head, norm, body, or a pattern."""
    return _matching(module, [part], "part")


def _all_but(module: nn.Module, trained: set[str]) -> set[str]:
    """What is frozen where these alone are trained: all else, but not the statistics of a
    normalisation layer that is trained."""
    every = (*module.named_parameters(), *module.named_buffers())
    found = {name for name, _ in every} - trained
    for prefix, layer in _normalisation(module):
        if _names(prefix, layer.named_parameters()) & trained:
            found -= _names(prefix, layer.named_buffers())
    return found


def _head(module: nn.Module, names: Iterable[str]) -> set[str]:
    """Which of the names belong to the head."""
    declared = getattr(module, "head_modules", None)
    if declared:
        return {name for name in names if name.startswith(tuple(f"{part}." for part in declared))}
    return {f"{head_of(module)}{name}" for name in ("weight", "bias")} & set(names)


def head_of(module: nn.Module) -> str:
    """The prefix of the names in the last linear layer."""
    layers = [name for name, layer in module.named_modules() if isinstance(layer, nn.Linear)]
    if not layers:
        raise PolytempoError(
            f"{type(module).__name__} has no linear layer, so it has no head; give its parameters "
            "by name"
        )
    return f"{layers[-1]}." if layers[-1] else ""


def _normalisation(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The normalisation layers, with their names."""
    for name, layer in module.named_modules():
        if isinstance(layer, _NORMALISATION):
            yield name, layer


def _names(prefix: str, *found: Iterable[tuple[str, Tensor]]) -> set[str]:
    """In the module, of what a layer calls so."""
    return {f"{prefix}.{name}" if prefix else name for each in found for name, _ in each}
