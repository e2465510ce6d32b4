"""Building is reproducible, leaves the world as it was, and takes users' own factories."""

from __future__ import annotations

import multiprocessing as mp
import random
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch import nn

from polytempo.core.errors import PolytempoError
from polytempo.core.registry import Options
from polytempo.models import MLP, Inputs, build

INPUTS = Inputs((6,), 3, None)


class NoArguments(nn.Linear):
    def __init__(self, width=3):
        super().__init__(6, width)


class WithInputs(nn.Linear):
    def __init__(self, inputs):
        super().__init__(inputs.shape[0], inputs.classes)


class WithInputsAndWidth(nn.Sequential):
    def __init__(self, inputs, width):
        super().__init__(
            nn.Linear(inputs.shape[0], width), nn.ReLU(), nn.Linear(width, inputs.classes)
        )


class OwnOptions(Options):
    width: int = 5

    def build(self, inputs):
        return nn.Linear(inputs.shape[0], self.width)


def flat(module):
    return torch.cat([parameter.detach().flatten() for parameter in module.parameters()])


def test_the_same_seed_gives_identical_weights_and_another_does_not():
    first, again, other = (flat(build("mlp", INPUTS, seed)) for seed in (7, 7, 8))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_threads_that_build_at_once_get_the_same_weights():
    """As clients of one process do; each layer gives the other threads time to draw."""

    def slowly(inputs):
        layers = []
        for _ in range(4):
            layers.append(nn.Linear(6, 6))
            time.sleep(0.005)
        return nn.Sequential(*layers)

    expected = flat(build(slowly, INPUTS, 7))
    with ThreadPoolExecutor(4) as pool:
        made = list(pool.map(lambda seed: flat(build(slowly, INPUTS, seed)), [7, 8, 7, 9]))
    assert torch.equal(made[0], expected) and torch.equal(made[2], expected)


@pytest.mark.skipif("fork" not in mp.get_all_start_methods(), reason="needs fork")
def test_a_process_that_is_forked_while_a_thread_builds_can_build_too():
    begun, over = threading.Event(), threading.Event()

    def endless(inputs):
        begun.set()
        over.wait(60)
        return nn.Linear(6, 6)

    with ThreadPoolExecutor(1) as pool:
        pool.submit(build, endless, INPUTS, 7)
        assert begun.wait(60)
        process = mp.get_context("fork").Process(target=build, args=("linear", INPUTS, 7))
        process.start()
        process.join(60)
        over.set()
    process.kill()
    assert process.exitcode == 0


def test_weights_do_not_depend_on_the_global_random_state():
    torch.manual_seed(1)
    first = flat(build("lenet", Inputs((1, 28, 28), 10, None), 0))
    torch.manual_seed(2)
    assert torch.equal(first, flat(build("lenet", Inputs((1, 28, 28), 10, None), 0)))


def test_the_global_random_state_is_left_as_it_was():
    before = torch.get_rng_state(), np.random.get_state()[1].copy(), random.getstate()  # noqa: NPY002
    build("mlp", INPUTS, seed=0)
    assert torch.equal(before[0], torch.get_rng_state())
    assert np.array_equal(before[1], np.random.get_state()[1])  # noqa: NPY002
    assert before[2] == random.getstate()


def test_the_global_random_state_is_left_as_it_was_by_a_factory_that_fails():
    def fails():
        torch.rand(3)
        raise RuntimeError("mine")

    before = torch.get_rng_state()
    with pytest.raises(RuntimeError, match="mine"):
        build(fails, INPUTS, seed=0)
    assert torch.equal(before, torch.get_rng_state())


@pytest.mark.parametrize(
    ("model", "outputs"),
    [
        (NoArguments, 3),
        (WithInputs, 3),
        (lambda: nn.Linear(6, 9), 9),
        (lambda inputs: nn.Linear(inputs.shape[0], inputs.classes), 3),
        (lambda inputs, /: nn.Linear(inputs.shape[0], inputs.classes), 3),
        (lambda *rest, **more: nn.Linear(6, 4 + len(rest) + len(more)), 4),
        (OwnOptions(width=8), 8),
        (OwnOptions, 5),
        (MLP(hidden=(4,)), 3),
        (f"{__name__}:NoArguments", 3),
        (f"{__name__}:NoArguments:width=11", 11),
        (f"{__name__}:WithInputs", 3),
        (f"{__name__}:WithInputsAndWidth:width=2", 3),
        ({"name": f"{__name__}:WithInputsAndWidth", "width": 2}, 3),
        (f"{__name__}:OwnOptions", 5),
        (f"{__name__}:OwnOptions:width=7", 7),
        ({"name": f"{__name__}:OwnOptions", "width": 7}, 7),
        ({"name": "mlp", "hidden": [5]}, 3),
    ],
)
def test_users_factories_are_called_as_their_signature_asks(model, outputs):
    module = build(model, INPUTS, seed=1)
    assert module(torch.zeros(2, 6)).shape == (2, outputs)
    assert torch.equal(flat(module), flat(build(model, INPUTS, seed=1)))


@dataclass
class NotAModel:
    width: int = 3


@pytest.mark.parametrize(
    ("model", "says"),
    [
        (nn.Linear, "needs in_features, out_features"),
        (lambda *, width: nn.Linear(6, width), "needs width"),
        (nn.Linear(6, 3), "finished module"),
        (nn.ReLU, "no parameters"),
        (NotAModel, "made a NotAModel"),
        (lambda: None, "made a NoneType"),
        (17, "17 is a int"),
        ("no.such.module:Net", "cannot be imported"),
        ("torch.nn:NoSuchLayer", "cannot be imported"),
        ("torch.nn:ReLU:speed=3", "unexpected keyword argument 'speed'"),
        ("torch:pi", "cannot be called"),
    ],
)
def test_what_is_no_model_is_a_one_line_error(model, says):
    with pytest.raises(PolytempoError, match=says) as error:
        build(model, INPUTS, seed=0)
    assert "\n" not in str(error.value)
