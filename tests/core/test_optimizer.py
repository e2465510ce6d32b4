"""Every optimiser takes the steps of torch's own."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from polytempo.core.optimizer import OPTIMIZERS, Adam, AdamW, Optimizer, Sgd

DECAYS = st.sampled_from([0.0, 1e-4, 0.3])
BETAS = st.sampled_from([0.0, 0.5, 0.9, 0.999])
ANY = (
    st.builds(Sgd, momentum=st.sampled_from([0.0, 0.5, 0.9]), weight_decay=DECAYS)
    | st.builds(Adam, beta1=BETAS, beta2=BETAS, weight_decay=DECAYS)
    | st.builds(
        AdamW, beta1=BETAS, beta2=BETAS, weight_decay=DECAYS, epsilon=st.sampled_from([1e-8, 0.1])
    )
)


def of_torch(ours: Optimizer, parameter: torch.nn.Parameter, lr: float) -> torch.optim.Optimizer:
    decay = {"weight_decay": ours.weight_decay}
    if isinstance(ours, Sgd):
        return torch.optim.SGD([parameter], lr, momentum=ours.momentum, **decay)
    assert isinstance(ours, Adam)
    kind = torch.optim.AdamW if isinstance(ours, AdamW) else torch.optim.Adam
    return kind([parameter], lr, (ours.beta1, ours.beta2), ours.epsilon, **decay)


@settings(max_examples=60)
@given(ours=ANY, seed=st.integers(0, 10**6), lr=st.sampled_from([1e-3, 0.1, 1.0]))
def test_steps_are_those_of_torch(ours, seed, lr):
    draw = torch.Generator().manual_seed(seed)
    theta = torch.randn(7, generator=draw, dtype=torch.float64)
    parameter = torch.nn.Parameter(theta.clone())
    theirs, moments = of_torch(ours, parameter, lr), ours.begin(theta)
    for _ in range(6):
        grad = torch.randn(7, generator=draw, dtype=torch.float64)
        parameter.grad = grad.clone()
        ours.regularise(theta, grad)
        ours.step(theta, grad, moments, lr)
        theirs.step()
        torch.testing.assert_close(theta, parameter.detach(), rtol=1e-10, atol=1e-12)


@settings(max_examples=40)
@given(ours=ANY, seed=st.integers(0, 10**6))
def test_what_is_kept_is_all_that_the_next_steps_depend_on(ours, seed):
    """Moments that begin anew, but for those that are kept, and have no value of before."""
    draw = torch.Generator().manual_seed(seed)
    gradients = torch.randn(6, 5, generator=draw, dtype=torch.float64)
    whole = torch.ones(5, dtype=torch.float64)
    cut, moments, kept = whole.clone(), ours.begin(whole), {}
    for k, grad in enumerate(gradients):
        ours.step(whole, grad.clone(), moments, 0.1)
        if k % 2 == 0:
            pieces = ours.begin(cut) | kept
        ours.step(cut, grad.clone(), pieces, 0.1)
        kept = {name: pieces[name].clone() for name in ours.kept}
    assert torch.equal(whole, cut)


@pytest.mark.parametrize("name", list(OPTIMIZERS))
def test_moments_of_zeros_are_those_of_the_beginning(name):
    """So a client that has none yet may be given zeros."""
    ours = OPTIMIZERS.create(name)
    begun = ours.begin(torch.ones(4))
    assert all(not begun[key].any() for key in ours.kept)
