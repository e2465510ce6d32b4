"""Networks for tokens as their users write them: what native training makes of them."""

import copy
from collections.abc import Callable

import numpy as np
import pytest
import torch
from chains import distance, uploads
from torch import Tensor, nn
from torch.nn import functional

from polytempo.core.layout import Parts
from polytempo.core.objective import Pull
from polytempo.core.task import Task
from polytempo.data import Federation
from polytempo.training import AutogradSolver, Exam
from polytempo.training.solvers.native.layers import Unfit
from polytempo.training.solvers.native.solver import NativeSolver
from polytempo.training.solvers.native.texts import text_layers
from solving import needs_compiler

pytestmark = needs_compiler
WORDS, LENGTH, CLASSES = 30, 12, 3
WIDTH = 3  # of filters where there is one kind


@pytest.fixture(scope="module")
def texts():
    draw = np.random.default_rng(3)
    clients = []
    for _ in range(2):
        words = draw.integers(1, WORDS, (40, LENGTH))
        words[np.arange(LENGTH) >= draw.integers(1, LENGTH + 1, 40)[:, None]] = 0
        words[0, 0] = WORDS - 1
        clients.append((words, draw.integers(0, CLASSES, 40)))
    return Federation.from_arrays(clients, classes=CLASSES)


class Network(nn.Module):
    """Kim's network; `highest` is how the maximum over time of (not yet activated) responses is
    spelled, and `embedding` and `filters` are made with further options."""

    def __init__(self, highest: Callable[[Tensor], Tensor], widths=(2, 3), turn=None, **options):
        super().__init__()
        embedding = {"padding_idx": 0} | options.get("embedding", {})
        self.words = nn.Embedding(WORDS, 6, **embedding)
        filters = options.get("filters", {})
        self.filters = nn.ModuleList(nn.Conv1d(6, 5, width, **filters) for width in widths)
        self.activation, self.pool = nn.ReLU(), nn.AdaptiveMaxPool1d(1)
        self.output = nn.Linear(5 * len(widths), CLASSES)
        self.last_relu = options.get("last_relu", False)
        self.highest, self.turn = highest, turn or (lambda x: x.transpose(1, 2))

    def forward(self, tokens):
        words = self.turn(self.words(tokens))
        found = [self.highest(self, each(words)) for each in self.filters]
        features = torch.cat(tensors=found, dim=1) if len(found) > 1 else found[0]
        if self.last_relu:
            features = features.relu()
        return self.output(functional.dropout(features, 0.2, self.training))


def pooled(x: Tensor, place: int) -> Tensor:
    return functional.max_pool1d(x, x.shape[place]).squeeze(place)


def sized(x: Tensor, place: int) -> Tensor:
    return torch.max_pool1d(x, x.size(place)).squeeze(place)


SPELLINGS = {
    "amax": lambda net, x: x.relu().amax(2),
    "amax dim": lambda net, x: torch.relu(x).amax(dim=-1),
    "amax first": lambda net, x: functional.relu(torch.amax(x, 2)),
    "max": lambda net, x: net.activation(x).max(2)[0],
    "max values": lambda net, x: net.activation(x).max(dim=2).values,
    "torch.max": lambda net, x: torch.max(net.activation(x), -1)[0],
    "pool": lambda net, x: functional.max_pool1d(x.relu(), LENGTH + 1 - WIDTH).squeeze(2),
    "pool shape": lambda net, x: pooled(x.relu(), 2),
    "pool last": lambda net, x: pooled(x, -1).relu(),
    "pool size": lambda net, x: sized(x.relu(), 2),
    "pool last size": lambda net, x: sized(x.relu(), -1),
    "adaptive": lambda net, x: net.pool(x.relu()).squeeze(-1),
    "adaptive flat": lambda net, x: net.pool(x).flatten(1).relu(),
    "twice": lambda net, x: x.relu().amax(2).relu(),
    "pool size before": lambda net, x: functional.max_pool1d(x.relu(), x.size(2)).squeeze(2),
    "pool named": lambda net, x: torch.max_pool1d(x.relu(), kernel_size=x.size(2)).squeeze(2),
    "adaptive function": lambda net, x: functional.adaptive_max_pool1d(x, 1).relu().squeeze(2),
    "joined, then relu": lambda net, x: x.amax(2),
}


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_filters_in_any_spelling(texts, spelling):
    torch.manual_seed(1)
    widths, last = (WIDTH,) if spelling == "pool" else (2, 3), spelling == "joined, then relu"
    module = Network(SPELLINGS[spelling], widths, last_relu=last)
    task = Task(epochs=2, batch_size=7, lr=0.1, objective=Pull(strength=0.5))
    native, by_torch, exact, start = uploads(module, texts, task)
    assert distance(native, exact) <= max(3 * distance(by_torch, exact), 1e-5)
    assert distance(exact, start) > 1e-3
    solvers = [kind(copy.deepcopy(module), texts, 0) for kind in (NativeSolver, AutogradSolver)]
    exam = Exam(solvers[0].layout.read(), [0, 1])
    for one, other in zip(*(solver.evaluate(exam) for solver in solvers), strict=True):
        assert one.sums == pytest.approx(other.sums, rel=1e-4)


@pytest.mark.parametrize(
    "turn",
    [
        lambda x: x.permute(0, 2, 1),
        lambda x: torch.permute(x, (0, 2, 1)),
        lambda x: torch.transpose(x, -1, -2),
        lambda x: x.transpose(dim0=2, dim1=1),
        lambda x: x.transpose(1, 2).transpose(2, 1).transpose(1, 2),
    ],
)
def test_words_are_turned_in_any_spelling(turn):
    (layer, *_) = text_layers(Network(SPELLINGS["amax"], (WIDTH,), turn), (LENGTH,))
    assert [tuple(weight.shape) for weight in layer.weights] == [(5, 6, 3)]


def test_only_the_words_that_a_client_has_are_trained(texts):
    solver = NativeSolver(Network(SPELLINGS["amax"]), texts, 0)
    assert solver.vocabulary is not None and solver.vocabulary.width == 6


def relu_of_the_narrow(net: nn.Module, x: Tensor) -> Tensor:
    net.narrow = not getattr(net, "narrow", False)
    return x.relu().amax(2) if net.narrow else x.amax(2)


def in_place(x: Tensor) -> Tensor:
    x.relu_()
    return x.amax(2)


OTHERWISE = {
    "no relu": (lambda net, x: x.amax(2), {}, "not followed by ReLU"),
    "a mean": (lambda net, x: x.relu().mean(2), {}, "mean is not a known layer"),
    "over filters": (lambda net, x: x.relu().amax(1), {}, "amax is not over time"),
    "kept": (lambda net, x: x.relu().amax(2, keepdim=True), {}, "amax with these arguments"),
    "where": (lambda net, x: x.relu().max(2)[1], {}, "joins something else"),
    "not whole": (lambda net, x: functional.max_pool1d(x.relu(), 2), {}, "max_pool1d is not over"),
    "two": (
        lambda net, x: functional.adaptive_max_pool1d(x.relu(), 2).flatten(1),
        {},
        "to more than one number",
    ),
    "one of two": (lambda net, x: relu_of_the_narrow(net, x), {}, "differ in more than"),
    "in place": (lambda net, x: in_place(x), {}, "nothing is done with what relu_ finds"),
    "plus": (lambda net, x: x.relu().amax(2) + 1, {}, "add is not a known layer"),
    "twice": (lambda net, x: x.relu().amax(2) + x.amax(2), {}, "add is not a known layer"),
    "no padding": (SPELLINGS["amax"], {"embedding": {"padding_idx": None}}, "padding_idx"),
    "max_norm": (SPELLINGS["amax"], {"embedding": {"max_norm": 1.0}}, "max_norm"),
    "stride": (SPELLINGS["amax"], {"filters": {"stride": 2}}, "stride"),
    "beyond": (SPELLINGS["amax"], {"filters": {"padding": 1}}, "see beyond the text"),
    "no bias": (SPELLINGS["amax"], {"filters": {"bias": False}}, "no bias"),
    "wide": (SPELLINGS["amax"], {"widths": (2, LENGTH + 1)}, "shorter than a filter"),
    "not turned": (SPELLINGS["amax"], {"turn": lambda x: x}, "not known at this place"),
    "turned badly": (SPELLINGS["amax"], {"turn": lambda x: x.transpose(0, 1)}, "turn words"),
}


@pytest.mark.parametrize("name", OTHERWISE)
def test_what_is_something_else_goes_to_torch(name):
    highest, options, reason = OTHERWISE[name]
    with pytest.raises(Unfit, match=reason):
        text_layers(Network(highest, **options), (LENGTH,))


class Recurrent(nn.Module):
    """Predicts the next token."""

    def __init__(self, **options):
        super().__init__()
        self.words = nn.Embedding(20, 6, padding_idx=0)
        self.units = nn.GRU(6, 9, **{"batch_first": True} | options)
        self.output = nn.Linear(9 * (1 + self.units.bidirectional), 20)

    def forward(self, tokens):
        states, _ = self.units(self.words(tokens))
        return self.output(states)


class LastState(Recurrent):
    def forward(self, tokens):
        return self.output(self.units(self.words(tokens))[1][0])


def sequences(problem: str = "next-token") -> Federation:
    draw = np.random.default_rng(4)
    clients = []
    for _ in range(2):
        tokens = draw.integers(1, 20, (30, 11))
        tokens[0, 0] = 19
        y = tokens[:, 1:] if problem == "next-token" else draw.integers(0, 20, 30)
        clients.append((tokens[:, :-1], y))
    return Federation.from_arrays(clients, problem=problem, classes=20)


def test_recurrent_units_of_ones_own():
    torch.manual_seed(1)
    task = Task(epochs=2, batch_size=8, lr=0.1)
    native, by_torch, exact, start = uploads(Recurrent(), sequences(), task)
    assert distance(native, exact) <= max(3 * distance(by_torch, exact), 1e-5)
    assert distance(exact, start) > 1e-3


class Dropping(Recurrent):
    def forward(self, tokens):
        states, _ = self.units(self.words(tokens))
        return self.output(functional.dropout(states, 0.2, self.training))


def test_dropped_states_go_to_torch():
    with pytest.raises(Unfit, match="drops states"):
        NativeSolver(Dropping(), sequences(), 0)


class Odd(Recurrent):
    def forward(self, tokens):
        return self.output(torch.cat(self.units(self.words(tokens)), 1))


def test_what_is_not_understood_goes_to_torch():
    with pytest.raises(Unfit, match="not understood"):
        NativeSolver(Odd(), sequences(), 0)


def test_frozen_words_with_a_vector_for_padding_go_to_torch(texts):
    """One step of one client might not show the difference."""
    module = Network(SPELLINGS["amax"])
    with torch.no_grad():
        module.words.weight[0] = 1.0
    frozen = Parts((), ["words.*"])
    with pytest.raises(Unfit, match="padding has a vector"):
        NativeSolver(module, texts, 0, frozen)
    with torch.no_grad():
        module.words.weight[0] = 0.0
    native, by_torch, exact, _ = uploads(module, texts, Task(epochs=1, batch_size=7), frozen)
    assert distance(native, exact) <= max(3 * distance(by_torch, exact), 1e-5)


@pytest.mark.parametrize("options", [{"num_layers": 2}, {"bidirectional": True}, {"bias": False}])
def test_other_recurrent_units_go_to_torch(options):
    with pytest.raises(Unfit, match="one layer is known"):
        NativeSolver(Recurrent(**options), sequences(), 0)


def test_recurrent_units_for_whole_texts_go_to_torch():
    with pytest.raises(Unfit, match="not known at this place"):
        NativeSolver(LastState(), sequences("classification"), 0)


def test_filters_do_not_predict_the_next_token(texts):
    module = Network(SPELLINGS["amax"])
    with pytest.raises(Unfit, match="not known for next-token"):
        NativeSolver(module, sequences(), 0)
