"""Random chains of layers that native training knows, and federations to train them on."""

import copy

import numpy as np
from torch import Tensor, nn

from polytempo.core.layout import ALL_SHARED, Parts
from polytempo.core.task import Task
from polytempo.data import Federation
from polytempo.training import AutogradSolver, Job, Problem
from polytempo.training.solvers.native.solver import NativeSolver


def random_image_chain(draw: np.random.Generator) -> tuple[nn.Module, tuple[int, int, int], int]:
    """A module, the shape of its samples, and how many outputs it has."""
    channels, height, width = (
        int(draw.integers(low, high)) for low, high in ((1, 5), (9, 17), (9, 17))
    )
    shape, layers = (channels, height, width), []
    sides = [height, width]
    for _ in range(int(draw.integers(1, 4))):
        kind = draw.choice(["conv", "conv", "conv", "max", "mean", "norm", "drop", "tanh", "gelu"])
        if kind == "conv":
            kernel = tuple(int(draw.integers(1, min(5, side) + 1)) for side in sides)
            stride = tuple(int(draw.integers(1, 3)) for _ in sides)
            padding = tuple(int(draw.integers(0, 3)) for _ in sides)
            filters = int(draw.choice([3, 8, 10, 16, 24]))
            bias = bool(draw.random() < 0.7)
            layers.append(nn.Conv2d(channels, filters, kernel, stride, padding, bias=bias))
            channels = filters
            sides = _slid(sides, kernel, stride, padding)
            order = draw.choice(["pool relu", "relu pool", "relu", "pool", ""])
            for word in order.split():
                if word == "relu":
                    layers.append(nn.ReLU())
                elif min(sides) >= 2:
                    layers.append(nn.MaxPool2d(2))
                    sides = [side // 2 for side in sides]
        elif kind in ("max", "mean") and min(sides) >= 3:
            make = nn.MaxPool2d if kind == "max" else nn.AvgPool2d
            padding = int(draw.integers(0, 2))
            options = {} if kind == "max" else {"count_include_pad": bool(draw.integers(2))}
            layers.append(make(3, 2, padding, **options))
            sides = _slid(sides, (3, 3), (2, 2), (padding, padding))
        elif kind == "norm":
            groups = int(draw.choice([g for g in (1, 2, 3, channels) if channels % g == 0]))
            layers.append(nn.GroupNorm(groups, channels, affine=bool(draw.random() < 0.8)))
        elif kind == "drop":
            layers.append(nn.Dropout(0.3))
        else:
            layers.append(
                nn.Tanh() if kind == "tanh" else nn.GELU(str(draw.choice(["none", "tanh"])))
            )
    if draw.random() < 0.2:
        layers.append(nn.AdaptiveAvgPool2d(1))
        sides = [1, 1]
    layers.append(nn.Flatten())
    outputs = int(draw.integers(1, 12))
    layers += _dense(draw, channels * sides[0] * sides[1], outputs, vector=False)
    return nn.Sequential(*layers), shape, outputs


def random_vector_chain(draw: np.random.Generator) -> tuple[nn.Module, tuple[int], int]:
    inputs, outputs = int(draw.integers(1, 70)), int(draw.integers(1, 12))
    return nn.Sequential(*_dense(draw, inputs, outputs, vector=True)), (inputs,), outputs


def _dense(draw: np.random.Generator, inputs: int, outputs: int, vector: bool) -> list[nn.Module]:
    layers: list[nn.Module] = []
    for _ in range(int(draw.integers(0, 3))):
        if draw.random() < 0.2:
            layers.append(nn.Dropout(0.4))
        width = int(draw.integers(1, 40))
        layers.append(nn.Linear(inputs, width, bias=bool(draw.random() < 0.8)))
        inputs = width
        if draw.random() < 0.3:
            layers.append(nn.LayerNorm(width))
        layers.append([nn.ReLU(), nn.Tanh(), nn.GELU(), nn.Identity()][int(draw.integers(4))])
    return [*layers, nn.Linear(inputs, outputs)]


def _slid(sides, kernel, stride, padding) -> list[int]:
    return [
        (side + 2 * pad - size) // step + 1
        for side, size, step, pad in zip(sides, kernel, stride, padding, strict=True)
    ]


def federation_for(
    shape: tuple[int, ...],
    outputs: int,
    problem: str = "classification",
    seed: int = 0,
    samples: int = 30,
) -> Federation:
    draw = np.random.default_rng(seed)
    clients = []
    for _ in range(2):
        x = draw.normal(size=(samples, *shape)).astype(np.float32)
        if problem == "classification":
            y = draw.integers(0, outputs, samples)
        elif problem == "multilabel":
            y = draw.integers(0, 2, (samples, outputs))
        else:
            y = draw.normal(size=(samples, outputs)).astype(np.float32)
        clients.append((x, y))
    classes = None if problem == "regression" else outputs
    return Federation.from_arrays(clients, problem=problem, classes=classes)


def uploads(
    module: nn.Module,
    federation: Federation,
    task: Task,
    parts: Parts = ALL_SHARED,
    problem: Problem | None = None,
    **job,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Of a training of client 0: by native code, by torch, in double precision; and its start."""
    native = NativeSolver(copy.deepcopy(module), federation, 0, parts, "cpu", problem)
    torch_ = AutogradSolver(copy.deepcopy(module), federation, 0, parts, "cpu", problem)
    exact = AutogradSolver(copy.deepcopy(module).double(), federation, 0, parts, "cpu", problem)
    start = native.layout.read()
    own = native.layout.initial_personal if native.layout.personal else None
    found = []
    for solver in (native, torch_, exact):
        dtype = solver.layout.vector.dtype
        memory = {} if own is None else {"personal": own.to(dtype)}
        vectors = {name: value.to(dtype) for name, value in job.get("vectors", {}).items()}
        rest = {key: value for key, value in job.items() if key != "vectors"}
        one = Job(0, start.to(dtype), task, ("test",), memory=memory, vectors=vectors, **rest)
        found.append(solver.carry_out(one).upload.double())
    return *found, start.double()


def distance(a: Tensor, b: Tensor) -> float:
    return float((a - b).abs().max())
