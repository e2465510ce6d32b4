"""A module as one flat vector, and back."""

from collections import OrderedDict

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
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
    with pytest.raises(PolytempoError, match="Tanh: has no parameters"):
        Layout(nn.Tanh())


def test_parameters_of_two_types_are_an_error():
    module = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2).double())
    with pytest.raises(PolytempoError, match=r"the same type.*torch\.float32"):
        Layout(module)


def test_a_shared_buffer_of_another_type_is_an_error_but_may_stay_at_home():
    module = nn.Linear(2, 2)
    module.register_buffer("statistic", torch.zeros(3, dtype=torch.float64))
    with pytest.raises(PolytempoError, match="the same type"):
        Layout(module, Parts(buffers="share"))
    assert Layout(module, Parts(buffers="reset")).size == 6


# -- shared, personal, frozen ---------------------------------------------------------------------


def deep() -> nn.Module:
    """Two linear layers, one convolution and two norms: one that scales, one that does not."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        layers = {
            "conv": nn.Conv1d(1, 2, 3, padding=1),  # 6 + 2
            "norm": nn.BatchNorm1d(2),  # 2 + 2, statistics 2 + 2
            "flat": nn.Flatten(),
            "body": nn.Linear(8, 5),  # 40 + 5
            "bare": nn.BatchNorm1d(5, affine=False),  # statistics 5 + 5
            "head": nn.Linear(5, 3),  # 15 + 3
        }
        return nn.Sequential(OrderedDict(layers))


def sequences(rows: int = 6) -> torch.Tensor:
    return torch.randn(rows, 1, 4, generator=torch.Generator().manual_seed(0))


WHOLE = 6 + 2 + 2 + 2 + 40 + 5 + 15 + 3 + 2 * 2 + 2 * 5


@pytest.mark.parametrize(
    ("parts", "own", "fixed"),
    [
        (Parts(), 0, 0),
        (Parts(["head"]), 18, 0),
        (Parts(["norm"]), 2 + 2 + 4 + 10, 0),
        (Parts(["body"]), WHOLE - 18, 0),
        (Parts(["conv.*"]), 8, 0),
        (Parts(["*.bias"]), 2 + 2 + 5 + 3, 0),
        (Parts(["norm.weight", "head"]), 2 + 18, 0),
        (Parts(["head.weight", "*.running_mean"]), 15 + 7, 0),
        (Parts(frozen=["conv.*"]), 0, 8),
        (Parts(frozen=["norm"]), 0, 4 + 4 + 10),
        (Parts(frozen=["norm.weight", "norm.bias"]), 0, 4 + 4),  # and its statistics
        (Parts(["body.*", "head"], ["head.bias"]), 45 + 15, 3),  # what both name is frozen
    ],
    ids=str,
)
def test_what_travels_what_stays_and_what_is_nowhere(parts, own, fixed):
    layout = Layout(deep(), parts)
    assert (layout.size, layout.personal) == (WHOLE - own - fixed, own)
    assert len(layout.vector) == WHOLE - fixed
    assert len(layout.read()) == layout.size and len(layout.initial_personal) == own
    assert layout.trainable == sum(p.numel() for p in layout.module.parameters() if p.requires_grad)


def test_the_vectors_are_in_the_order_of_the_module():
    layout, left_alone = Layout(deep(), Parts(["conv.*", "norm"])), dict(deep().named_parameters())
    shared = [left_alone[f"{name}.{kind}"] for name in ("body", "head") for kind in WEIGHTS]
    own = [left_alone[f"{name}.{kind}"] for name in ("conv", "norm") for kind in WEIGHTS]
    statistics = [torch.zeros(2), torch.ones(2), torch.zeros(5), torch.ones(5)]
    assert torch.equal(layout.read(), torch.cat([t.detach().flatten() for t in shared]))
    expected = torch.cat([t.detach().flatten() for t in (*own, *statistics)])
    assert torch.equal(layout.initial_personal, expected)


def test_a_model_is_the_shared_part_with_the_clients_own():
    layout = Layout(deep(), Parts(["head"]))
    shared = torch.randn(layout.size, generator=torch.Generator().manual_seed(1))
    shared[-4 - 10 :].abs_()  # statistics: variances are not negative
    outputs = []
    for own in (torch.zeros(18), torch.arange(18.0)):
        layout.load(shared, own)
        assert torch.equal(layout.module.head.weight.flatten(), own[:15])
        assert torch.equal(layout.module.head.bias, own[15:])
        assert torch.equal(layout.module.conv.weight.flatten(), shared[:6])
        assert torch.equal(layout.read(), shared)
        outputs.append(layout.module.eval()(sequences()))
    assert not outputs[0].any() and outputs[1].any()
    with pytest.raises(AssertionError, match="personal part is missing"):
        layout.load(shared)


NAMES = [name for name, _ in (*deep().named_parameters(), *deep().named_buffers())]
WEIGHTS = ("weight", "bias")


@given(
    personal=st.sets(st.sampled_from([*NAMES, "head", "norm"])),
    frozen=st.sets(st.sampled_from([*NAMES, "norm"])),
    buffers=st.sampled_from(["share", "reset"]),
    seed=st.integers(0, 10**6),
)
def test_join_and_split_are_opposites_and_no_number_is_in_two_places(
    personal, frozen, buffers, seed
):
    try:
        layout = Layout(deep(), Parts(sorted(personal), sorted(frozen), buffers))
    except PolytempoError:
        assume(False)
    draw = torch.Generator().manual_seed(seed)
    shared, own = (torch.randn(size, generator=draw) for size in (layout.size, layout.personal))
    whole = layout.join(shared, own)
    assert sorted(whole.tolist()) == sorted([*shared.tolist(), *own.tolist()])
    for found, expected in zip(layout.split(whole), (shared, own), strict=True):
        assert torch.equal(found, expected)
    layout.load(shared, own)
    held = torch.cat([p.detach().flatten() for p in layout.module.parameters() if p.requires_grad])
    assert sorted(held.tolist()) == sorted(layout.vector[: layout.trainable].tolist())
    for parameter, place in layout.trained:
        assert torch.equal(parameter.detach().flatten(), layout.vector[place])
        assert parameter.grad.data_ptr() == layout.grad[place].data_ptr()


@pytest.mark.parametrize("parts", [Parts(), Parts(personal=["head"])])
def test_what_is_joined_or_split_is_new(parts):
    layout = Layout(deep(), parts)
    shared, own = torch.ones(layout.size), torch.ones(layout.personal)
    whole = layout.join(shared, own)
    split = layout.split(whole)
    whole.zero_()
    assert bool((torch.cat([shared, own, *split]) == 1).all())
    with pytest.raises(RuntimeError):
        layout.join(shared[1:], own)


def test_a_frozen_norm_keeps_its_statistics_and_scales_in_training():
    layout = Layout(deep(), Parts(frozen=["norm"]))
    before = {k: v.clone() for k, v in layout.module.state_dict().items() if "conv" not in k}
    layout.train(batch=6)
    assert layout.module.training and layout.module.head.training
    output = layout.module(sequences())
    output.square().sum().backward()
    for name in ("norm", "bare"):
        for key, value in layout.module.get_submodule(name).state_dict().items():
            assert torch.equal(value, before[f"{name}.{key}"])
    # with their running statistics, not with those of the batch
    assert torch.equal(output, layout.module.eval()(sequences()))
    assert layout.grad.any()


def test_a_norm_that_the_module_does_not_train_is_frozen_with_its_statistics():
    module = deep()
    module.norm.requires_grad_(False)
    layout = Layout(module)
    assert layout.size == WHOLE - 4 - 4
    layout.train(batch=6)
    assert not module.norm.training and module.bare.training


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        (Parts(["hed"]), "--personal hed: Sequential has nothing of that name.*head"),
        (Parts(["features.*"]), r"--personal features\.\*: .* nothing of that name"),
        (Parts(frozen=["bodi.weight"]), "--freeze bodi.weight: .*body.weight"),
        (Parts(["*"]), "--personal \\* leaves nothing to share.*standalone"),
        (Parts(["head", "body"]), "--personal head,body leaves nothing to share"),
        (Parts(["head"], ["body"]), "--personal head leaves nothing to share"),
        (Parts(frozen=["*"]), "leaves no parameters to train"),
    ],
    ids=str,
)
def test_parts_that_make_no_sense_are_named(parts, message):
    with pytest.raises(PolytempoError, match=message):
        Layout(deep(), parts)


def test_a_module_without_a_head_is_told_so():
    with pytest.raises(PolytempoError, match="Conv1d has no linear layer, so it has no head"):
        Layout(nn.Conv1d(1, 1, 1), Parts(["head"]))
    with pytest.raises(PolytempoError, match="--personal norm: Linear has no normalisation layers"):
        Layout(nn.Linear(2, 2), Parts(["norm"]))


def test_the_head_may_be_the_module_itself():
    with pytest.raises(PolytempoError, match="leaves nothing to share"):
        Layout(nn.Linear(2, 2), Parts(["head"]))
    assert Layout(nn.Linear(2, 2), Parts(["bias"])).size == 4


class Tied(nn.Module):
    """The head looks words up in the table that they were embedded with."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.middle, self.head = nn.Embedding(5, 3), nn.Linear(3, 3), nn.Linear(3, 5)
        self.head.weight = self.table.weight

    def forward(self, tokens):
        return self.head(self.middle(self.table(tokens).mean(1)))


def test_tied_weights_go_where_any_of_their_names_goes():
    head, body = Layout(Tied(), Parts(["head"])), Layout(Tied(), Parts(["body"]))
    assert (head.personal, head.size) == (15 + 5, 9 + 3)
    assert (body.personal, body.size) == (9 + 3, 15 + 5)
    assert Layout(Tied(), Parts(frozen=["head.weight"])).size == 9 + 3 + 5


def test_places_of_a_part_in_a_model_as_it_travels():
    module = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2), nn.Linear(2, 2))
    layout = Layout(module)
    assert layout.places("head").nonzero().flatten().tolist() == list(range(12, 18))
    # scale and shift, then the running statistics, which come after all parameters
    assert layout.places("norm").nonzero().flatten().tolist() == [8, 9, 10, 11, 18, 19, 20, 21]
    assert torch.equal(layout.places("0.*"), torch.arange(22) < 8)
    without = Layout(nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 2)), Parts(["head"]))
    assert not without.places("head").any() and without.places("body").all()
