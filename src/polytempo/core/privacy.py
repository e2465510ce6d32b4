"""Differential privacy at the client: what it uploads is clipped, and noise is added, before it
leaves.

Whoever reads an upload, the server included, can hardly tell which data the client has: all of
them may be replaced by any others (client-level, local differential privacy). How hardly is what
`polytempo.simulation.guards` computes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import torch
from pydantic import Field
from torch import Tensor

from polytempo.core.client_steps import CLIENT_STEPS, ClientStep, Parting
from polytempo.core.compression import Compression
from polytempo.core.errors import PolytempoError
from polytempo.core.registry import Registry

if TYPE_CHECKING:
    from polytempo.core.task import Task

SENSITIVITY = 2  # times `clip`: so far apart are what two data sets may upload, before the noise


class Mechanism(ClientStep):
    """Base of what makes uploads private."""


MECHANISMS: Registry[Mechanism] = Registry("privacy mechanism", Mechanism)


@CLIENT_STEPS.register("gaussian")
@MECHANISMS.register("gaussian")
class Gaussian(Mechanism):
    """What is uploaded (how far the model has moved, or a gradient) is cut to the length `clip`,
    and normal noise of standard deviation `noise` * `clip` is added to each number. `delta`: the
    probability with which the guarantee may fail, for which epsilon is reported."""

    clip: Annotated[float, Field(gt=0)]
    noise: Annotated[float, Field(ge=0)]
    delta: Annotated[float, Field(gt=0, lt=1)] = 1e-5

    def leaving(self, parting: Parting, moved: Tensor) -> Tensor:
        exact = moved.double()
        exact = exact * (self.clip / max(float(exact.norm()), self.clip))
        drawn = parting.stream("privacy").standard_normal(len(exact))
        return (exact + self.noise * self.clip * torch.from_numpy(drawn)).to(moved.dtype)

    def multiplier(self) -> float:
        """Standard deviation of the noise over the sensitivity."""
        return self.noise / SENSITIVITY


def check_private(task: Task, who: str) -> None:
    """Uploads are private only if all that leaves is."""
    if not any(isinstance(step, Mechanism) for step in task.client_steps):
        return
    for step in task.client_steps:
        if step.uploads and step.tells and not isinstance(step, Compression):
            what = ", ".join(step.uploads)
            raise PolytempoError(
                f"{who} has its clients upload {what} as well, to which no noise is added: omit "
                "--dp, or use a strategy whose clients upload one vector (descant: hold_out=0)"
            )
