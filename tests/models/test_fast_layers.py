"""The fast layers compute what torch's own layers do, forward and backward."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional

from polytempo.models import Inputs, build
from polytempo.models.feedforward import Halve

INFINITY = float("inf")


def numbers(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def forward_and_backward(layer: nn.Module, x: Tensor, push: Tensor) -> tuple[Tensor, Tensor]:
    """What the layer makes of x, and the gradient of x if that of the outcome is `push`."""
    x = x.detach().requires_grad_()
    halved = layer(x)
    [back] = torch.autograd.grad(halved, x, push)
    return halved.detach(), back


def assert_pools_like_torch(x: Tensor) -> None:
    halved = nn.MaxPool2d(2)(x.contiguous())
    for push in (
        numbers(*halved.shape, seed=1, dtype=x.dtype),
        numbers(*halved.mT.shape, seed=2, dtype=x.dtype).mT,  # columns in a row
        torch.full_like(halved[..., :1, :1], -3.0).expand_as(halved),  # as that of a sum
    ):
        expected = forward_and_backward(nn.MaxPool2d(2), x.contiguous(), push.contiguous())
        found = forward_and_backward(Halve(), x, push)
        assert torch.equal(found[0], expected[0])
        assert torch.equal(found[1], expected[1])


# -- Halve --------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(
    "shape",
    [(2, 3, 8, 8), (1, 1, 2, 2), (3, 2, 7, 9), (2, 2, 5, 4), (2, 2, 4, 5), (1, 2, 3, 3), (4, 6, 6)],
)
def test_halve_is_max_pooling_bit_for_bit(shape, dtype):
    assert_pools_like_torch(numbers(*shape, dtype=dtype))


@pytest.mark.parametrize(
    "lay_out",
    [
        lambda x: x.contiguous(memory_format=torch.channels_last),
        lambda x: x.mT,
        lambda x: x.transpose(0, 1),
        lambda x: x[:, :, 1:, 1:],
        lambda x: x[:, ::2, :, ::3],
        lambda x: x.flip(-1),
        lambda x: x[:1].expand(4, -1, -1, -1),
    ],
    ids=["channels last", "columns", "batch inside", "cut", "gaps", "mirrored", "repeated"],
)
def test_halve_takes_numbers_however_they_lie_in_memory(lay_out):
    assert_pools_like_torch(lay_out(numbers(3, 4, 11, 14)))


@pytest.mark.parametrize(
    "values",
    [[0.0, 1.0], [0.0], [-2.0, -1.0, 3.0], [-INFINITY, 0.0], [INFINITY, 1.0], [-INFINITY]],
)
def test_of_equal_maxima_one_gets_the_whole_gradient(values):
    choice = torch.randint(len(values), (4, 3, 7, 6), generator=torch.Generator().manual_seed(0))
    x = torch.tensor(values, dtype=torch.float64)[choice]
    push = numbers(4, 3, 3, 3, seed=1)
    halved, back = forward_and_backward(Halve(), x, push)
    assert torch.equal(halved, nn.MaxPool2d(2)(x))
    assert back[:, :, 6:].abs().max() == 0  # the row left over

    def squares(image: Tensor) -> Tensor:
        return image[:, :, :6].unfold(2, 2, 2).unfold(3, 2, 2).flatten(-2)

    received = squares(back) != 0
    assert torch.equal(received.sum(-1), torch.ones(4, 3, 3, 3, dtype=torch.long))
    assert torch.equal(squares(back).sum(-1), push)
    assert torch.equal(squares(x)[received], halved.flatten())


def test_halve_passes_torchs_own_check_of_gradients():
    order = torch.randperm(2 * 2 * 5 * 6, generator=torch.Generator().manual_seed(0))
    x = (order.double() / 10).view(2, 2, 5, 6).requires_grad_()  # 0.1 apart: no maximum changes
    assert torch.autograd.gradcheck(Halve(), x)


def test_halve_works_where_no_gradient_is_wanted():
    x = numbers(2, 3, 6, 8)
    with torch.inference_mode():
        assert torch.equal(Halve()(x), nn.MaxPool2d(2)(x))


# -- convolutional networks ---------------------------------------------------------------------


def by_hand(parameters: list[Tensor], x: Tensor) -> Tensor:
    """Twice convolution, ReLU, pooling; then three layers."""
    for weight, bias in _pairs(parameters[:4]):
        x = functional.max_pool2d(functional.relu(functional.conv2d(x, weight, bias)), 2)
    x = x.flatten(1)
    for weight, bias in _pairs(parameters[4:8]):
        x = functional.relu(functional.linear(x, weight, bias))
    return functional.linear(x, *parameters[8:])


def _pairs(parameters: list[Tensor]) -> list[tuple[Tensor, Tensor]]:
    return list(zip(parameters[0::2], parameters[1::2], strict=True))


@pytest.mark.parametrize("name", ["lenet", "cnn64"])
@pytest.mark.parametrize("shape", [(3, 32, 32), (1, 17, 19), (2, 28, 20)])
def test_networks_equal_convolution_relu_pooling(name, shape):
    module = build(name, Inputs(shape, 7, None), seed=3).double()
    parameters = list(module.parameters())
    x = numbers(5, *shape).requires_grad_()
    labels = torch.arange(5)
    inputs = [x, *parameters]
    logits, expected = module(x), by_hand(parameters, x)
    torch.testing.assert_close(logits, expected, rtol=1e-12, atol=1e-12)
    found = torch.autograd.grad(functional.cross_entropy(logits, labels), inputs)
    wanted = torch.autograd.grad(functional.cross_entropy(expected, labels), inputs)
    for mine, theirs in zip(found, wanted, strict=True):
        assert theirs.abs().max() > 0
        torch.testing.assert_close(mine, theirs, rtol=1e-10, atol=1e-14)


# -- TextCNN ------------------------------------------------------------------------------------

VOCABULARY = 9


def text_model(widths: tuple[int, ...], padding_row: float = 0.0, shift: float = 0.0) -> nn.Module:
    """With large biases of both signs, `shift` added to all of them."""
    spec = {"name": "textcnn", "embedding": 4, "filters": 6, "widths": list(widths), "dropout": 0.5}
    module = build(spec, Inputs((20,), 3, VOCABULARY), seed=1).double().eval()
    with torch.no_grad():
        for number, parameter in enumerate(module.parameters()):
            parameter.copy_(numbers(*parameter.shape, seed=10 + number))
            if parameter.dim() == 1:
                parameter.add_(shift)
        next(module.parameters())[0] = padding_row
    return module


def textbook(module: nn.Module, tokens: Tensor) -> Tensor:
    table, *filters, weight, bias = module.parameters()
    widest = max(kernel.shape[-1] for kernel, _ in _pairs(filters))
    tokens = functional.pad(tokens, (0, max(0, widest - tokens.shape[1])))
    vectors = functional.embedding(tokens, table, padding_idx=0).mT
    peaks = [
        functional.relu(functional.conv1d(vectors, *pair)).amax(-1) for pair in _pairs(filters)
    ]
    return functional.linear(torch.cat(peaks, -1), weight, bias)


def assert_equals_textbook(module: nn.Module, tokens: Tensor) -> None:
    logits, expected = module(tokens), textbook(module, tokens)
    torch.testing.assert_close(logits, expected, rtol=1e-10, atol=1e-10)
    push = numbers(*logits.shape, seed=5)
    parameters = list(module.parameters())
    found = torch.autograd.grad(logits, parameters, push)
    for mine, theirs in zip(found, torch.autograd.grad(expected, parameters, push), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-10, atol=1e-10)


def texts(lengths: list[int], columns: int, seed: int = 0) -> Tensor:
    """Words without gaps, then padding."""
    tokens = torch.zeros(len(lengths), columns, dtype=torch.long)
    generator = torch.Generator().manual_seed(seed)
    for row, length in zip(tokens, lengths, strict=True):
        row[:length] = torch.randint(1, VOCABULARY, (length,), generator=generator)
    return tokens


@st.composite
def batches(draw):
    columns = draw(st.integers(1, 14))
    word = st.integers(0, VOCABULARY - 1)  # padding in the middle, too
    rows = []
    for _ in range(draw(st.integers(1, 4))):
        words = draw(st.lists(word, max_size=columns))
        rows.append(words + [0] * (columns - len(words)))
    return torch.tensor(rows)


@settings(max_examples=60)
@given(
    tokens=batches(),
    widths=st.sampled_from([(3, 4, 5), (1,), (2, 7), (5, 1, 3)]),
    padding_row=st.sampled_from([0.0, 0.7]),
    shift=st.sampled_from([-3.0, 0.0, 3.0]),
)
def test_textcnn_equals_its_textbook_form(tokens, widths, padding_row, shift):
    assert_equals_textbook(text_model(widths, padding_row, shift), tokens)


@pytest.mark.parametrize(
    ("lengths", "columns"),
    [
        ([9, 9, 9], 9),
        ([0, 0], 12),
        ([0], 3),
        ([0, 10], 12),
        ([2, 1], 2),
        ([1], 1),
        ([8], 30),
        ([3, 7, 5], 8),  # a window of three padding words has room, one of four has not
        ([3, 7, 7], 11),
        ([30, 4], 30),
    ],
    ids=lambda value: str(value),
)
@pytest.mark.parametrize("shift", [-4.0, 0.0, 4.0])
def test_textcnn_on_texts_of_chosen_lengths(lengths, columns, shift):
    assert_equals_textbook(text_model((3, 4, 5), shift=shift), texts(lengths, columns))


def test_a_window_of_padding_counts_where_there_is_room_for_one():
    """All words push every filter far down: what is left is the bias, if padding fills a window."""
    module = text_model((2, 3), shift=5.0)
    table, *filters, weight, bias = module.parameters()
    with torch.no_grad():
        table[1:] = 1.0
        for kernel, _ in _pairs(filters):
            kernel.fill_(-100.0)
    heights = torch.cat([functional.relu(offset) for _, offset in _pairs(filters)])
    assert heights.min() > 0
    for columns in (6, 7, 8, 9, 20):  # four words
        narrow, wide = columns >= 6, columns >= 7
        seen = heights * torch.tensor([narrow] * 6 + [wide] * 6)
        torch.testing.assert_close(
            module(texts([4], columns))[0], functional.linear(seen, weight, bias)
        )


def test_padding_that_is_cut_off_changes_no_bit():
    module = text_model((3, 5))
    short = texts([9, 4], 9 + 5)
    push = numbers(2, 3, seed=5)
    results = []
    for more in (0, 1, 50):
        logits = module(functional.pad(short, (0, more)))
        results.append((logits, *torch.autograd.grad(logits, list(module.parameters()), push)))
    for result in results[1:]:
        for a, b in zip(results[0], result, strict=True):
            assert torch.equal(a, b)


def test_textcnn_in_training_drops_features_of_the_textbook_form():
    """With the same draws, dropout meets the same features."""
    module = text_model((3, 4)).train()
    tokens = texts([9, 5, 2], 12)
    table, *filters, weight, bias = module.parameters()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        found = module(tokens)
        torch.manual_seed(3)
        vectors = functional.embedding(tokens, table).mT
        peaks = [functional.conv1d(vectors, *pair).relu().amax(-1) for pair in _pairs(filters)]
        expected = functional.linear(functional.dropout(torch.cat(peaks, -1), 0.5), weight, bias)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    assert not torch.allclose(found, module.eval()(tokens))
