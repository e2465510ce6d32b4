"""Feature shift: what clients see differs, though their labels mean the same.

The clients are divided at random into groups as even as possible; the group of a client is its
ground truth. A shift is called with the samples of one client and the number of its group.
"""

from __future__ import annotations

import math
from typing import Annotated, Protocol

import numpy as np
import torch
from pydantic import Field

from polytempo.core.errors import PolytempoError
from polytempo.core.registry import Options, Registry

Angle = Annotated[float, Field(allow_inf_nan=False)]
Angles = Annotated[tuple[Angle, ...], Field(min_length=1)]
Level = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Levels = Annotated[tuple[Level, ...], Field(min_length=1)]


class Shift(Protocol):
    """Changes the samples of one client of group `group`; `len` is the number of groups."""

    def __len__(self) -> int: ...

    def __call__(self, x: torch.Tensor, group: int, rng: np.random.Generator) -> torch.Tensor: ...


SHIFTS: Registry[Shift] = Registry("shift")


def rotate(x: torch.Tensor, angle: float) -> torch.Tensor:
    """Images [N, C, H, W] rotated counter-clockwise by `angle` degrees, corners filled with 0."""
    turns, rest = divmod(angle, 90)
    if rest == 0:
        return torch.rot90(x, int(turns) % 4, dims=(-2, -1))
    height, width = x.shape[-2:]
    cos, sin = math.cos(math.radians(angle)), math.sin(math.radians(angle))
    # affine_grid asks where each output pixel comes from, in coordinates scaled to [-1, 1] on
    # either axis: hence the inverse rotation, and the ratio of the sides off the diagonal.
    matrix = torch.tensor([[cos, -sin * height / width, 0.0], [sin * width / height, cos, 0.0]])
    grid = torch.nn.functional.affine_grid(
        matrix.expand(len(x), 2, 3), list(x.shape), align_corners=False
    )
    turned = torch.nn.functional.grid_sample(x.float(), grid, align_corners=False)
    return _as(turned, x.dtype)


def _as(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return x.round().clamp(0, 255).to(torch.uint8) if dtype == torch.uint8 else x.to(dtype)


@SHIFTS.register("rotation")
class Rotation(Options):
    """Images rotated by the angle of the client's group (degrees, counter-clockwise).

    Multiples of 90 are exact; other angles are interpolated, with black corners.
    """

    angles: Angles = (0.0, 90.0, 180.0, 270.0)

    def __len__(self) -> int:
        return len(self.angles)

    def __call__(self, x: torch.Tensor, group: int, rng: np.random.Generator) -> torch.Tensor:
        if x.dim() != 4:
            raise PolytempoError(
                f"rotation needs images [N, channels, height, width], got samples of shape "
                f"{tuple(x.shape[1:])}; use the shift noise, or image data"
            )
        angle = self.angles[group]
        if x.shape[-1] != x.shape[-2] and angle % 180 == 90:
            raise PolytempoError(
                f"rotation by {angle:g} degrees needs square images, got {x.shape[-2]} x "
                f"{x.shape[-1]}; use multiples of 180, or crop the images"
            )
        return rotate(x, angle)


@SHIFTS.register("noise")
class Noise(Options):
    """Gaussian noise whose standard deviation is the level of the client's group.

    For uint8 images the level is on the scale 0..1 of pixel values, and the result is clipped.
    """

    levels: Levels = (0.0, 0.1, 0.25, 0.5)

    def __len__(self) -> int:
        return len(self.levels)

    def __call__(self, x: torch.Tensor, group: int, rng: np.random.Generator) -> torch.Tensor:
        if x.dtype not in (torch.uint8, torch.float32):
            raise PolytempoError(
                "noise needs images or numeric features, but this data set is text; omit shift"
            )
        scale = 255.0 if x.dtype == torch.uint8 else 1.0
        draws = torch.from_numpy(rng.standard_normal(tuple(x.shape), dtype=np.float32))
        return _as(x.float() + draws * (self.levels[group] * scale), x.dtype)
