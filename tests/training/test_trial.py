"""A model that does not suit its data is refused before anything begins."""

import pytest
import torch
from torch import nn

from polytempo import PolytempoError
from polytempo.training import Problem, try_model


class Pair(nn.Linear):
    def forward(self, x):
        return super().forward(x), x


class Noisy(nn.Sequential):
    def forward(self, x):
        return super().forward(x) + torch.rand(1)


@pytest.mark.parametrize(
    ("module", "said"),
    [
        (nn.Linear(7, 4), r"model Linear cannot take samples of shape \[12\] .*first layer"),
        (nn.Linear(12, 3), r"outputs \[2, 3\] for 2 samples of 4 labels; expected \[2, 4\]"),
        (nn.Sequential(nn.Linear(12, 12), nn.Unflatten(1, (3, 4))), r"outputs \[2, 3, 4\]"),
        (Pair(12, 4), "returns a tuple"),
    ],
)
def test_what_does_not_fit_is_named(small, module, said):
    with pytest.raises(PolytempoError, match=said) as caught:
        try_model(module, small)
    assert "\n" not in str(caught.value)


def test_a_loss_that_cannot_judge_the_outputs_is_named(small):
    problem = Problem.of(lambda outputs, targets: (outputs - targets).square().mean())
    with pytest.raises(PolytempoError, match=r"outputs \[2, 4\] for targets of shape \[2\]"):
        try_model(nn.Linear(12, 4), small, problem)


def test_a_trial_leaves_everything_as_it_was(small):
    module = Noisy(nn.Linear(12, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 6)).double()
    before = {name: value.clone() for name, value in module.state_dict().items()}
    state = torch.get_rng_state()
    try_model(module, small)  # more outputs than labels will do
    assert module.training and torch.equal(torch.get_rng_state(), state)
    assert all(value.equal(before[name]) for name, value in module.state_dict().items())
