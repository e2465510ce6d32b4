"""What is trained: models of the papers, on made-up data of the right shape and size.

Nothing is learned from such data, but it costs what real data cost. Texts have the length of AG
News (39 words on average, 64 at most) and about as many different words (1,150 in a batch of 64).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from polytempo.core.rng import rng
from polytempo.data import Federation

CLIENTS = 100


@dataclass(frozen=True)
class Case:
    """A model, for us and for the plain loop, and its data."""

    model: str
    plain: Callable[[], nn.Module]
    make: Callable[[int, np.random.Generator], tuple[Tensor, int]]  # samples, and classes
    lr: float = 0.01
    batch_size: int = 64
    plain_trainings: int = 40  # of the plain loop in one turn: it does each alike
    strategies: tuple[str, ...] = ("pace",)
    banks: tuple[str, ...] = ("memory",)  # how the server keeps models

    def federation(self) -> Federation:
        """A hundred clients of 400 to 600 samples, three quarters of them for training."""
        stream = rng(0, "bench", self.model)
        clients = []
        for size in stream.integers(400, 601, CLIENTS):
            x, classes = self.make(int(size), stream)
            clients.append((x, torch.from_numpy(stream.integers(0, classes, size))))
        return Federation.from_arrays(clients, name=f"made up for {self.model}", classes=classes)


class PlainTextCNN(nn.Module):
    """Kim's network as everybody writes it."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(32_000, 192, padding_idx=0)
        self.convolutions = nn.ModuleList(nn.Conv1d(192, 100, width) for width in (3, 4, 5))
        self.dropout = nn.Dropout(0.5)
        self.output = nn.Linear(300, 4)

    def forward(self, tokens: Tensor) -> Tensor:
        words = self.embedding(tokens).transpose(1, 2)
        peaks = [convolution(words).relu().amax(2) for convolution in self.convolutions]
        scores: Tensor = self.output(self.dropout(torch.cat(peaks, 1)))
        return scores


def plain_lenet() -> nn.Module:
    """LeNet for CIFAR-10 as everybody writes it."""
    return _plain_cnn((6, 16), (120, 84))


def plain_cnn64() -> nn.Module:
    """The larger network for CIFAR-10."""
    return _plain_cnn((64, 64), (120, 64))


def _plain_cnn(filters: tuple[int, int], hidden: tuple[int, int]) -> nn.Module:
    return nn.Sequential(
        *(nn.Conv2d(3, filters[0], 5), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(*filters, 5), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Linear(25 * filters[1], hidden[0]), nn.ReLU()),
        *(nn.Linear(*hidden), nn.ReLU(), nn.Linear(hidden[1], 10)),
    )


def plain_mlp() -> nn.Module:
    """The network for windows of sensor data."""
    return nn.Sequential(nn.Linear(900, 300), nn.ReLU(), nn.Linear(300, 5))


def _images(size: int, stream: np.random.Generator) -> tuple[Tensor, int]:
    return torch.from_numpy(stream.integers(0, 256, (size, 3, 32, 32), dtype=np.uint8)), 10


def _windows(size: int, stream: np.random.Generator) -> tuple[Tensor, int]:
    return torch.from_numpy(stream.standard_normal((size, 900), dtype=np.float32)), 5


def _texts(size: int, stream: np.random.Generator) -> tuple[Tensor, int]:
    weights = (np.arange(1, 32_000) + 5.0) ** -1.15
    words = 1 + stream.choice(len(weights), (size, 64), p=weights / weights.sum())
    lengths = np.clip(stream.normal(39, 10, size), 8, 64).astype(int)
    words[np.arange(64) >= lengths[:, None]] = 0
    words[0, 0] = 31_999  # so that the vocabulary is the same whatever was drawn
    return torch.from_numpy(words), 4


CASES = {
    "lenet": Case("lenet", plain_lenet, _images),
    "lenet-10": Case("lenet", plain_lenet, _images, batch_size=10),
    "cnn64": Case("cnn64", plain_cnn64, _images, plain_trainings=10),
    "mlp": Case("mlp:hidden=300", plain_mlp, _windows, lr=0.001, strategies=("pace", "fedasync")),
    "textcnn": Case("textcnn", PlainTextCNN, _texts, plain_trainings=10, banks=("memory", "half")),
}
