"""ResNet-18 (He et al., "Deep residual learning for image recognition", CVPR 2016)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from torch import Tensor, nn

from polytempo.core.registry import Options
from polytempo.models.spec import MODELS, Inputs, require_image

Norm = Callable[[int], nn.Module]


class _Block(nn.Module):
    """Two 3x3 convolutions around which the input is added back."""

    def __init__(self, before: int, after: int, stride: int, norm: Norm) -> None:
        super().__init__()
        self.residual = nn.Sequential(
            nn.Conv2d(before, after, 3, stride, padding=1, bias=False),
            norm(after),
            nn.ReLU(),
            nn.Conv2d(after, after, 3, padding=1, bias=False),
            norm(after),
        )
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or before != after:
            projection = nn.Conv2d(before, after, 1, stride, bias=False)
            self.shortcut = nn.Sequential(projection, norm(after))

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.relu(self.residual(x) + self.shortcut(x))


@MODELS.register("resnet18")
class ResNet18(Options):
    """ResNet-18 for small images: a 3x3 stem without pooling, as is usual on CIFAR.

    norm:   "group" by default, because it has no running statistics: those of "batch" are averages
            over one client's data, and the average over clients with different labels describes
            none of them. With "batch" they are buffers of the module, and travel as buffers do.
    groups: how many groups GroupNorm makes of the channels
    """

    norm: Literal["group", "batch"] = "group"
    groups: Literal[2, 4, 8, 16, 32] = 32

    def _norm(self, channels: int) -> nn.Module:
        if self.norm == "batch":
            return nn.BatchNorm2d(channels)
        return nn.GroupNorm(self.groups, channels)

    def build(self, inputs: Inputs) -> nn.Module:
        channels, _, _ = require_image("resnet18", inputs, smallest=8)
        stem = nn.Conv2d(channels, 64, 3, padding=1, bias=False)
        layers: list[nn.Module] = [stem, self._norm(64), nn.ReLU()]
        before = 64
        for width, stride in ((64, 1), (128, 2), (256, 2), (512, 2)):
            layers.append(_Block(before, width, stride, self._norm))
            layers.append(_Block(width, width, 1, self._norm))
            before = width
        head = (nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(before, inputs.outputs))
        return nn.Sequential(*layers, *head)
