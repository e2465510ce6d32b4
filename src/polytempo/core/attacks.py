"""Clients that do harm, to test defences with (simulations only).

An attacker takes part as the others do, and changes what it uploads (`leaving`), or the labels that
it trains on (`targets`). Add one of your own:

    @ATTACKS.register("zero")
    class Zero(Attack):
        '''Sends nothing.'''

        def leaving(self, parting: Parting, moved: Tensor) -> Tensor:
            return torch.zeros_like(moved)
"""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor

from polytempo.core.client_steps import CLIENT_STEPS, ClientStep, Parting
from polytempo.core.errors import PolytempoError
from polytempo.core.registry import Registry
from polytempo.core.rng import rng
from polytempo.core.task import Task


class Attack(ClientStep):
    """Base: this `share` of all clients attack, at least one, and not all."""

    share: Annotated[float, Field(gt=0, lt=1)] = 0.1

    def targets(self, targets: Tensor, outputs: int) -> Tensor:
        """What an attacker takes its training samples' targets for."""
        return targets

    def clients(self, among: int, seed: int) -> frozenset[int]:
        """Who attacks."""
        if among < 2:
            raise PolytempoError("an attack needs two clients at least: one that is honest")
        count = min(max(1, round(self.share * among)), among - 1)
        return frozenset(rng(seed, "attack").permutation(among)[:count].tolist())

    def on(self, task: Task) -> Task:
        """The task as an attacker does it: whatever the client steps make of its upload, this comes
        last but for compression, without which the server could not read it."""
        steps = list(task.client_steps)
        place = len(steps) - (task.compression is not None)
        return replace(task, client_steps=(*steps[:place], self, *steps[place:]))


ATTACKS: Registry[Attack] = Registry("attack", Attack)


@CLIENT_STEPS.register("sign-flip")
@ATTACKS.register("sign-flip")
class SignFlip(Attack):
    """Moves the other way, `times` as far."""

    times: Annotated[float, Field(gt=0)] = 1.0

    def leaving(self, parting: Parting, moved: Tensor) -> Tensor:
        return -self.times * moved


@CLIENT_STEPS.register("scale")
@ATTACKS.register("scale")
class Scale(Attack):
    """Moves the same way, `times` as far, to outweigh everybody else."""

    times: Annotated[float, Field(gt=0)] = 10.0

    def leaving(self, parting: Parting, moved: Tensor) -> Tensor:
        return self.times * moved


@CLIENT_STEPS.register("random")
@ATTACKS.register("random")
class Random(Attack):
    """Moves in a random direction, `times` as far as its training did."""

    times: Annotated[float, Field(gt=0)] = 1.0

    def leaving(self, parting: Parting, moved: Tensor) -> Tensor:
        drawn = torch.from_numpy(parting.stream("attack").standard_normal(len(moved)))
        length = self.times * float(moved.double().norm() / drawn.norm())
        return (drawn * length).to(moved.dtype)


@CLIENT_STEPS.register("replay")
@ATTACKS.register("replay")
class Replay(Attack):
    """Sends its first upload for ever."""

    @property
    def keeps(self) -> tuple[str, ...]:
        return ("replay",)

    def leaving(self, parting: Parting, moved: Tensor) -> Tensor:
        return parting.memory.setdefault("replay", moved)


@CLIENT_STEPS.register("label-flip")
@ATTACKS.register("label-flip")
class LabelFlip(Attack):
    """Trains honestly, on wrong labels: the last for the first, and so on."""

    def targets(self, targets: Tensor, outputs: int) -> Tensor:
        if targets.dim() != 1 or targets.is_floating_point():
            raise PolytempoError(
                "the attack label-flip needs data with one label per sample; use sign-flip, "
                "random, replay or scale"
            )
        return outputs - 1 - targets
