"""The models have the sizes of the papers, and refuse data that they cannot take."""

from __future__ import annotations

import pytest
import torch

from polytempo.core.errors import PolytempoError
from polytempo.models import MODELS, Inputs, build

CIFAR = Inputs((3, 32, 32), 10, None)
EMNIST = Inputs((1, 28, 28), 47, None)
DIGITS = Inputs((1, 8, 8), 10, None)
NEWS = Inputs((60,), 4, 32_000)
PLAYS = Inputs((80,), 77, 77, "next-token")


def parameters(module: torch.nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


@pytest.mark.parametrize(
    ("model", "inputs", "expected"),
    [
        ("linear", DIGITS, 64 * 10 + 10),
        ("mlp", Inputs((9, 100), 5, None), 900 * 300 + 300 + 300 * 5 + 5),
        ("mlp:hidden=[20,30]", DIGITS, 64 * 20 + 20 + 20 * 30 + 30 + 30 * 10 + 10),
        ("mlp:hidden=[]", DIGITS, 64 * 10 + 10),
        ("lenet", CIFAR, 62_006),
        ("cnn64", CIFAR, 307_842),
        ("textcnn", NEWS, 32_000 * 192 + (3 + 4 + 5) * 192 * 100 + 300 + 300 * 4 + 4),
        ("gru", PLAYS, 77 * 32 + 3 * 128 * (32 + 128 + 2) + 128 * 77 + 77),
        ("linear", Inputs((10,), 1, None, "regression"), 11),
        ("resnet18", CIFAR, 11_173_962),
        ("resnet18:norm=batch", CIFAR, 11_173_962),
    ],
)
def test_parameter_counts_are_those_of_the_papers(model, inputs, expected):
    assert parameters(build(model, inputs, seed=0)) == expected


@pytest.mark.parametrize("name", sorted(set(MODELS) - {"gru", "hf", "textcnn"}))
@pytest.mark.parametrize("inputs", [CIFAR, EMNIST, Inputs((3, 20, 34), 7, None)])
def test_image_models_give_one_score_per_class(name, inputs):
    module = build(name, inputs, seed=0).eval()
    assert module(torch.zeros(2, *inputs.shape)).shape == (2, inputs.classes)


@pytest.mark.parametrize("length", [1, 4, 60])
def test_textcnn_takes_texts_of_any_length(length):
    module = build("textcnn", Inputs((length,), 4, 50), seed=0)
    assert module(torch.ones(2, length, dtype=torch.long)).shape == (2, 4)


def test_textcnn_ignores_padding_behind_a_text():
    module = build("textcnn:filters=5,embedding=8", Inputs((20,), 4, 50), seed=0).eval()
    words = torch.randint(1, 50, (3, 12), generator=torch.Generator().manual_seed(1))
    more = [torch.nn.functional.pad(words, (0, size)) for size in (8, 30)]
    torch.testing.assert_close(module(more[0]), module(more[1]))
    assert not torch.equal(module(more[0]), module(more[0].flip(0)))


def test_textcnn_never_trains_the_padding_word():
    module = build("textcnn:filters=5,embedding=8", Inputs((6,), 4, 50), seed=0)
    module(torch.tensor([[3, 4, 5, 6, 7, 0]])).square().sum().backward()
    gradient = module.embedding.weight.grad
    assert gradient[0].abs().max() == 0
    assert gradient[3].abs().max() > 0


def test_dropout_acts_in_training_only_and_can_be_turned_off():
    words = torch.arange(1, 21).reshape(1, 20)
    inputs = Inputs((20,), 4, 50)
    module = build("textcnn", inputs, seed=0)
    assert not torch.equal(module(words), module(words))
    module.eval()
    assert torch.equal(module(words), module(words))
    certain = build("textcnn:dropout=0", inputs, seed=0)
    assert torch.equal(certain(words), certain(words))


def test_resnet_has_no_running_statistics_unless_asked():
    assert not list(build("resnet18", CIFAR, seed=0).buffers())
    assert list(build("resnet18:norm=batch", CIFAR, seed=0).buffers())
    two = [m for m in build("resnet18:groups=2", CIFAR, 0).modules() if hasattr(m, "num_groups")]
    assert {norm.num_groups for norm in two} == {2}


@pytest.mark.parametrize(
    ("inputs", "expected"),
    [
        (NEWS, "textcnn"),
        (PLAYS, "gru"),
        (Inputs((60,), 8, 500, "multilabel"), "textcnn"),
        (Inputs((10,), 1, None, "regression"), "mlp"),
        (Inputs((3, 32, 32), 2, None, "regression"), "lenet"),
        (CIFAR, "lenet"),
        (EMNIST, "lenet"),
        (DIGITS, "mlp"),
        (Inputs((3, 64, 20), 5, None), "mlp"),
        (Inputs((900,), 5, None), "mlp"),
    ],
)
def test_auto_picks_by_the_data(inputs, expected):
    chosen, named = build("auto", inputs, seed=3), build(expected, inputs, seed=3)
    assert [k for k, _ in chosen.named_parameters()] == [k for k, _ in named.named_parameters()]
    assert all(
        torch.equal(a, b) for a, b in zip(chosen.parameters(), named.parameters(), strict=True)
    )


def test_auto_passes_its_options_on():
    assert parameters(build("auto:hidden=7", DIGITS, 0)) == 64 * 7 + 7 + 70 + 10
    assert parameters(build({"name": "auto", "hidden": [7]}, DIGITS, 0)) == 64 * 7 + 7 + 70 + 10


@pytest.mark.parametrize("name", ["lenet", "cnn64", "resnet18"])
@pytest.mark.parametrize("shape", [(1, 7, 7), (3, 32, 5), (64,), (32, 32)])
def test_convolutions_on_small_inputs_name_the_shape_and_a_way_out(name, shape):
    with pytest.raises(PolytempoError) as error:
        build(name, Inputs(shape, 10, None), seed=0)
    text = str(error.value)
    assert name in text and str(shape) in text and "'mlp' or 'linear'" in text
    assert "\n" not in text


def test_the_smallest_image_works_and_one_less_does_not():
    for name, smallest in (("lenet", 16), ("cnn64", 16), ("resnet18", 8)):
        module = build(name, Inputs((1, smallest, smallest), 3, None), seed=0)
        assert module(torch.zeros(1, 1, smallest, smallest)).shape == (1, 3)
        with pytest.raises(PolytempoError, match=f"at least {smallest}x{smallest}"):
            build(name, Inputs((1, smallest, smallest - 1), 3, None), seed=0)


@pytest.mark.parametrize("name", sorted(set(MODELS) - {"gru", "hf", "textcnn"}))
def test_tokens_are_refused_by_models_for_numbers(name):
    with pytest.raises(PolytempoError, match="use 'textcnn'"):
        build(name, NEWS, seed=0)


@pytest.mark.parametrize("name", sorted(set(MODELS) - {"gru", "hf"}))
def test_next_tokens_are_for_gru_alone(name):
    with pytest.raises(PolytempoError, match="use 'gru'"):
        build(name, PLAYS, seed=0)


@pytest.mark.parametrize(("inputs", "other"), [(NEWS, "textcnn"), (DIGITS, "mlp")])
def test_gru_is_for_next_tokens_alone(inputs, other):
    with pytest.raises(PolytempoError, match=f"predicts the next token.*use '{other}'"):
        build("gru", inputs, seed=0)


def test_gru_scores_every_token_by_those_before_it():
    module = build("gru:hidden=8,embedding=4", Inputs((6,), 9, 9, "next-token"), seed=0)
    tokens = torch.randint(1, 9, (3, 6), generator=torch.Generator().manual_seed(1))
    scores = module(tokens)
    assert scores.shape == (3, 6, 9)
    tokens[:, 4] = 0
    changed = (module(tokens) != scores).any(-1)
    assert not changed[:, :4].any() and changed[:, 4:].all()


@pytest.mark.parametrize("inputs", [CIFAR, Inputs((60,), 4, None)])
def test_numbers_are_refused_by_textcnn(inputs):
    with pytest.raises(PolytempoError, match="takes sequences of tokens"):
        build("textcnn", inputs, seed=0)


@pytest.mark.parametrize(
    ("model", "says"),
    [
        ("lenett", "did you mean 'lenet'"),
        ("mlp:hiden=3", "did you mean 'hidden'"),
        ("mlp:hidden=[0]", "greater than or equal to 1"),
        ("resnet18:groups=3", "groups"),
        ("resnet18:norm=layer", "norm"),
        ("textcnn:dropout=1", "dropout"),
        ({"hidden": [3]}, "needs the key 'name'"),
    ],
)
def test_mistakes_in_options_are_one_line_errors(model, says):
    with pytest.raises(PolytempoError, match=says) as error:
        build(model, CIFAR, seed=0)
    assert "\n" not in str(error.value)


def test_textcnn_without_filters_is_refused():
    with pytest.raises(PolytempoError, match="widths is empty"):
        build("textcnn:widths=[]", NEWS, seed=0)


@pytest.mark.parametrize("fields", [((3, 0, 4), 10, None), ((4,), 0, None), ((4,), 2, 1)])
def test_impossible_inputs_are_refused(fields):
    with pytest.raises(PolytempoError):
        Inputs(*fields)
