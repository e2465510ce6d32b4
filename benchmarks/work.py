"""The work that is the same for all contestants: model, data, clients, local training.

`PEERS_DATA` names the folder that `make_data.py` has filled, `PEERS_BATCH` the batch size,
`PEERS_THREADS` the threads of contestants that have one process.
"""

from __future__ import annotations

import os
from functools import cache
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

CLIENTS = 100
SAMPLES = 400  # of each client
COHORT = 10  # clients in a round
EPOCHS = 5
LEARNING_RATE = 0.01
MOMENTUM = 0.9
CORES = 2  # processes, for those that can use several
BATCH = int(os.environ["PEERS_BATCH"])
THREADS = int(os.environ["PEERS_THREADS"])


def lenet() -> nn.Sequential:
    """LeNet for CIFAR-10: 62,006 parameters."""
    return nn.Sequential(
        *(nn.Conv2d(3, 6, 5), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(6, 16, 5), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Linear(400, 120), nn.ReLU()),
        *(nn.Linear(120, 84), nn.ReLU(), nn.Linear(84, 10)),
    )


def initial_model() -> nn.Sequential:
    """The model that all contestants start from."""
    torch.manual_seed(0)
    return lenet()


@cache
def data() -> tuple[Tensor, Tensor]:
    """All samples, ready for use. The file is mapped: processes share one copy in memory."""
    folder = Path(os.environ["PEERS_DATA"])
    x, y = (np.load(folder / file, mmap_mode="c") for file in ("x.npy", "y.npy"))
    return torch.from_numpy(x), torch.from_numpy(y)


def samples(client: int) -> tuple[Tensor, Tensor]:
    """The images and labels of this client."""
    x, y = data()
    mine = slice(client * SAMPLES, (client + 1) * SAMPLES)
    return x[mine], y[mine]


def loader(client: int) -> DataLoader[tuple[Tensor, ...]]:
    """For the frameworks that leave data loading to their user."""
    return DataLoader(TensorDataset(*samples(client)), batch_size=BATCH, shuffle=True)


def sgd(module: nn.Module) -> torch.optim.SGD:
    return torch.optim.SGD(module.parameters(), lr=LEARNING_RATE, momentum=MOMENTUM)


def train(module: nn.Module, batches: DataLoader[tuple[Tensor, ...]]) -> None:
    """For the frameworks that leave local training to their user."""
    module.train()
    optimiser = sgd(module)
    for _ in range(EPOCHS):
        for x, y in batches:
            optimiser.zero_grad()
            nn.functional.cross_entropy(module(x), y).backward()
            optimiser.step()


@torch.no_grad()
def loss_of(module: nn.Module) -> float:
    """Mean loss over the first ten clients' samples: whoever has done the same work has about the
    same."""
    x, y = data()
    first = slice(0, 10 * SAMPLES)
    return float(nn.functional.cross_entropy(module.eval()(x[first]), y[first]))


def let_torchvision_load() -> None:
    """The torchvision of PyPI is built for the torch that has CUDA. Beside one that has not, its
    compiled operators cannot be loaded, and then it fails to describe two of them. FedLab and fluke
    import torchvision, but nothing here uses its operators: it is enough that these two have a
    signature."""
    try:
        import torchvision  # noqa: F401
    except RuntimeError as error:
        if "torchvision::nms" not in str(error):
            raise
        for name in ("nms", "qnms"):
            signature = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
            torch.library.define(f"torchvision::{name}", signature)
