"""A module as one flat vector, and back."""

import pytest
import torch
from torch import nn
from torch.nn import functional

from polytempo.core.errors import PolytempoError
from polytempo.core.layout import Layout, Parts


def network(batch_norm: bool = True) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        norm = [nn.BatchNorm1d(5)] if batch_norm else []
        return nn.Sequential(nn.Linear(4, 5), *norm, nn.Tanh(), nn.Linear(5, 3))


def inputs(seed: int = 0, rows: int = 8) -> torch.Tensor:
    return torch.randn(rows, 4, generator=torch.Generator().manual_seed(seed))


def flat(module: nn.Module, buffers: bool) -> torch.Tensor:
    """Parameters, then floating buffers, as documented; taken from a module left alone."""
    tensors = [p.detach() for p in module.parameters()]
    if buffers:
        tensors += [b for b in module.buffers() if b.is_floating_point()]
    return torch.cat([t.flatten() for t in tensors])


@pytest.mark.parametrize("policy", ["share", "reset"])
def test_vector_is_parameters_then_shared_buffers(policy):
    space = Layout(network(), Parts(buffers=policy))
    # 4*5+5, batch norm 5+5, 5*3+3; running mean and variance 5+5
    assert space.parameters == 53
    assert space.size == (63 if policy == "share" else 53)
    assert space.grad.shape == (53,)
    assert torch.equal(space.read(), flat(network(), policy == "share"))


def test_binding_a_module_does_not_change_what_it_computes():
    untouched, bound = network().eval(), network().eval()
    Layout(bound)
    assert torch.equal(bound(inputs()), untouched(inputs()))
    names = [name for name, _ in bound.named_parameters()]
    assert names == [name for name, _ in untouched.named_parameters()]


@pytest.mark.parametrize("policy", ["share", "reset"])
def test_load_then_read_is_the_same_vector(policy):
    space = Layout(network(), Parts(buffers=policy))
    vector = torch.randn(space.size, generator=torch.Generator().manual_seed(1))
    space.load(vector)
    assert torch.equal(space.read(), vector)


def test_loading_changes_the_output_to_that_of_the_loaded_model():
    space = Layout(network(batch_norm=False))
    vector = torch.randn(space.size, generator=torch.Generator().manual_seed(2))
    x = inputs()
    before = space.module(x)
    space.load(vector)
    w1, b1, w2, b2 = vector.split([20, 5, 15, 3])
    expected = torch.tanh(x @ w1.view(5, 4).T + b1) @ w2.view(3, 5).T + b2
    assert torch.allclose(space.module(x), expected, atol=1e-6)
    assert not torch.allclose(space.module(x), before)


def test_what_goes_in_and_comes_out_is_a_copy():
    space = Layout(network())
    vector = torch.ones(space.size)
    space.load(vector)
    read = space.read()
    vector.zero_()
    assert torch.equal(space.read(), torch.ones(space.size))
    space.vector.zero_()
    assert torch.equal(read, torch.ones(space.size))


def test_gradients_land_in_the_flat_gradient_at_the_place_of_their_parameter():
    reference, space = network(), Layout(network())
    labels = torch.tensor([0, 1, 2, 0, 1, 2, 0, 1])
    for module in (reference, space.module):
        functional.cross_entropy(module(inputs()), labels).backward()
    expected = torch.cat([p.grad.flatten() for p in reference.parameters()])
    assert expected.abs().max() > 1e-3
    assert torch.allclose(space.grad, expected, atol=1e-7)
    functional.cross_entropy(space.module(inputs()), labels).backward()  # accumulated in place
    assert torch.allclose(space.grad, 2 * expected, atol=1e-6)
    space.grad.zero_()
    assert all(not p.grad.any() for p in space.module.parameters())


def test_a_step_on_the_vector_is_a_step_of_every_parameter():
    reference, space = network(), Layout(network())
    for seed in range(3):
        reference.zero_grad()
        space.grad.zero_()
        for module in (reference, space.module):
            module(inputs(seed)).square().mean().backward()
        with torch.no_grad():
            for parameter in reference.parameters():
                parameter -= 0.3 * parameter.grad
        space.vector[: space.parameters].sub_(space.grad, alpha=0.3)
    assert torch.allclose(space.read(), flat(reference, buffers=True), atol=1e-5)
    assert not torch.allclose(space.read(), flat(network(), buffers=True), atol=1e-2)


def test_shared_running_statistics_travel_in_the_vector():
    space = Layout(network(), Parts(buffers="share"))
    fresh = space.read()
    space.module.train()
    space.module(inputs())
    trained = space.read()
    assert torch.equal(trained[:53], fresh[:53])
    assert not torch.equal(trained[53:], fresh[53:])
    hidden = space.module[0](inputs())
    # running mean of batch norm: 0.9 * 0 + 0.1 * mean of the batch
    assert torch.allclose(trained[53:58], 0.1 * hidden.mean(0), atol=1e-6)
    space.load(fresh)
    assert torch.equal(space.module[1].running_mean, torch.zeros(5))
    space.load(trained)
    assert torch.equal(space.module[1].running_mean, trained[53:58])


def test_reset_running_statistics_start_anew_at_every_load():
    space = Layout(network(), Parts(buffers="reset"))
    vector = space.read()
    for seed in range(2):
        space.module.train()
        space.module(inputs(seed))
        assert not torch.equal(space.module[1].running_mean, torch.zeros(5))
        space.load(vector)
        assert torch.equal(space.module[1].running_mean, torch.zeros(5))
        assert torch.equal(space.module[1].running_var, torch.ones(5))
        assert torch.equal(space.read(), vector)


@pytest.mark.parametrize("policy", ["share", "reset"])
def test_integer_buffers_do_not_travel_and_restart_with_every_load(policy):
    space = Layout(network(), Parts(buffers=policy))
    vector = space.read()
    space.module.train()
    space.module(inputs())
    assert int(space.module[1].num_batches_tracked) == 1
    space.load(vector)
    assert int(space.module[1].num_batches_tracked) == 0
    assert space.module[1].num_batches_tracked.dtype == torch.int64


def test_a_parameter_used_twice_is_one_stretch_of_the_vector():
    module = nn.Sequential(nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False))
    module[1].weight = module[0].weight
    space = Layout(module)
    assert space.size == 9
    space.load(torch.arange(9.0))
    assert torch.equal(module[1].weight, torch.arange(9.0).view(3, 3))
    module(torch.ones(1, 3)).sum().backward()
    assert space.grad.abs().sum() > 0


def test_double_precision_modules_have_double_vectors():
    space = Layout(network().double())
    assert space.read().dtype == space.grad.dtype == torch.float64


def test_a_module_without_parameters_is_an_error_that_names_it():
    with pytest.raises(PolytempoError, match="Tanh has no parameters"):
        Layout(nn.Tanh())


def test_parameters_of_two_types_are_an_error():
    module = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2).double())
    with pytest.raises(PolytempoError, match=r"one type.*torch\.float32"):
        Layout(module)


def test_a_shared_buffer_of_another_type_is_an_error_but_may_stay_at_home():
    module = nn.Linear(2, 2)
    module.register_buffer("statistic", torch.zeros(3, dtype=torch.float64))
    with pytest.raises(PolytempoError, match="one type"):
        Layout(module, Parts(buffers="share"))
    assert Layout(module, Parts(buffers="reset")).size == 6
