"""What stands between updates and the strategy: each update is looked at beside the recent ones of
all clients, and what is out of line is cut down before it is folded.

A defence sees how far a client has moved the model that it was sent, or its gradient. It returns
what is left of that; nothing at all counts as if the client had not moved the model. The update is
folded in any case, so that counters and cohorts are as they would be without a defence, and no
strategy knows of it. `limit` is a query; what a defence remembers changes in `folded` alone.

    @DEFENCES.register("half")
    class Half(Defence):
        '''Trusts nobody more than half.'''

        def limit(self, moved: Tensor) -> Tensor:
            return moved / 2
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from polytempo.core.registry import Options, Registry


class Defence(Options):
    """Base: everything passes. `state`: what changes from update to update."""

    name: ClassVar[str] = ""
    state: ClassVar[tuple[str, ...]] = ()

    def setup(self) -> None:
        """A run begins."""
        self.uploads = 0  # folded so far
        self.changed = 0  # and how many of them not as they came

    def limit(self, moved: Tensor) -> Tensor:
        """What is left of it; itself, if that is all."""
        return moved

    def folded(self, moved: Tensor, changed: bool) -> None:
        """An update that came like this was folded."""
        self.uploads += 1
        self.changed += changed

    def state_dict(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in ("uploads", "changed", *self.state)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for name in ("uploads", "changed", *self.state):
            setattr(self, name, state[name])


DEFENCES: Registry[Defence] = Registry("defence", Defence)


@DEFENCES.register("norm")
class Norm(Defence):
    """Nobody moves farther than `times` the median length of the last `window` uploads, as they
    came: what is longer is shortened. Against a few that shout; not against those that lie at the
    usual length."""

    state: ClassVar[tuple[str, ...]] = ("lengths",)

    times: Annotated[float, Field(gt=0)] = 3.0
    window: Annotated[int, Field(ge=1)] = 50

    def setup(self) -> None:
        super().setup()
        self.lengths: list[float] = []

    def limit(self, moved: Tensor) -> Tensor:
        if not self.lengths:
            return moved
        most, length = self.times * float(np.median(self.lengths)), float(moved.double().norm())
        return moved if length <= most else moved * (most / length)

    def folded(self, moved: Tensor, changed: bool) -> None:
        super().folded(moved, changed)
        self.lengths = [*self.lengths, float(moved.double().norm())][-self.window :]


@DEFENCES.register("direction")
class Direction(Defence):
    """Nobody moves against the others: of an upload whose cosine with the mean direction of recent
    ones (about the last `window`, each with the same say, as they came) is below `least`, nothing
    is left. The first `window` pass."""

    state: ClassVar[tuple[str, ...]] = ("mean",)

    least: Annotated[float, Field(ge=-1, le=1)] = 0.0
    window: Annotated[int, Field(ge=1)] = 20

    def setup(self) -> None:
        super().setup()
        self.mean: Tensor | None = None

    def limit(self, moved: Tensor) -> Tensor:
        if self.mean is None or self.uploads < self.window:
            return moved
        lengths = float(moved.double().norm()) * float(self.mean.norm())
        cosine = float(moved.double() @ self.mean) / lengths if lengths else 0.0
        return moved if cosine >= self.least else torch.zeros_like(moved)

    def folded(self, moved: Tensor, changed: bool) -> None:
        super().folded(moved, changed)
        unit = moved.double() / max(float(moved.double().norm()), 1e-300)
        if self.mean is None:
            self.mean = torch.zeros_like(unit)
        self.mean = torch.lerp(self.mean, unit, 1 / min(self.uploads, self.window))


@DEFENCES.register("trimmed")
class Trimmed(Defence):
    """A trimmed mean, for whatever strategy: an upload is looked at among the last `window`, itself
    included, number by number. One of the `share` at either end is replaced by the mean of those
    in between. So what a window's uploads become has as its mean their trimmed mean (Yin et al.,
    2018). Keeps `window` models. Clients whose data differ lose what is theirs alone."""

    state: ClassVar[tuple[str, ...]] = ("last",)

    share: Annotated[float, Field(gt=0, lt=0.5)] = 0.2
    window: Annotated[int, Field(ge=3)] = 20

    def setup(self) -> None:
        super().setup()
        self.last: list[Tensor] = []  # all but one of the window

    def limit(self, moved: Tensor) -> Tensor:
        count = len(self.last) + 1
        cut = int(self.share * count)
        if not cut:
            return moved
        ordered = torch.stack([*self.last, moved]).sort(0).values
        middle = ordered[cut : count - cut]
        inside = (middle[0] <= moved) & (moved <= middle[-1])
        return moved if bool(inside.all()) else torch.where(inside, moved, middle.mean(0))

    def folded(self, moved: Tensor, changed: bool) -> None:
        super().folded(moved, changed)
        self.last = [*self.last, moved][1 - self.window :]
