"""Losses and metrics against scikit-learn and by hand; merged sums give what the whole gives."""

from __future__ import annotations

import itertools
import math
import pickle
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sklearn import metrics as reference
from torch.nn import functional

from polytempo.core.errors import PolytempoError
from polytempo.data import Federation
from polytempo.models import Inputs, build
from polytempo.training.problem import (
    PROBLEMS,
    Classification,
    Multilabel,
    NextToken,
    Own,
    Problem,
    Regression,
    Score,
    problem_for,
)
from solving import WithoutDoubles


def batch(problem: str, samples: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Outputs and targets, as a model and a federation would give them."""
    random = torch.Generator().manual_seed(seed)
    if problem == "classification":
        return torch.randn(samples, 8, generator=random), torch.randint(
            0, 8, (samples,), generator=random
        )
    if problem == "multilabel":
        scores = torch.randn(samples, 6, generator=random)
        return scores, (torch.rand(samples, 6, generator=random) < 0.4).float()
    if problem == "regression":
        y = 3 + torch.randn(samples, generator=random)
        return (y + torch.randn(samples, generator=random))[:, None], y
    tokens = torch.randint(1, 9, (samples, 5), generator=random)
    tokens[::3, 3:] = 0
    return torch.randn(samples, 5, 9, generator=random), tokens


def figures(problem: Problem, score: Score) -> dict[str, float]:
    return {metric.name: metric.value(score.sums) for metric in problem.metrics}


def judged(problem: Problem, outputs: torch.Tensor, targets: torch.Tensor) -> dict[str, float]:
    return figures(problem, Score(problem.sums(outputs, targets)))


BUILT_IN = ["classification", "multilabel", "regression", "next-token"]


# -- each problem against an independent derivation -----------------------------------------------


def test_classification_is_cross_entropy_bit_for_bit_and_scikit_learns_accuracies():
    problem = Classification()
    outputs, y = batch("classification", 300)
    assert torch.equal(problem.loss(outputs, y), functional.cross_entropy(outputs, y))
    summed = float(functional.cross_entropy(outputs, y, reduction="sum"))
    assert problem.sums(outputs, y)["loss"] == summed
    assert judged(problem, outputs, y) == {
        "accuracy": pytest.approx(reference.accuracy_score(y, outputs.argmax(1))),
        "top5": pytest.approx(reference.top_k_accuracy_score(y, outputs, k=5)),
    }


def test_five_classes_or_fewer_are_all_in_the_top_five():
    found = judged(Classification(), torch.tensor([[1.0, 0.0, 2.0]]), torch.tensor([1]))
    assert found == {"accuracy": 0.0, "top5": 1.0}


def test_a_model_that_knows_nothing_is_in_the_top_five_by_chance_only():
    y = torch.arange(8)
    assert judged(Classification(), torch.zeros(8, 8), y) == {"accuracy": 1 / 8, "top5": 5 / 8}
    assert judged(Classification(), torch.full((8, 8), torch.nan), y)["top5"] == 0


def test_multilabel_is_scikit_learns_micro_f1_and_subset_accuracy():
    outputs, y = batch("multilabel", 200)
    outputs[:40] = 2 * y[:40] - 1  # some samples are right throughout
    found = (outputs > 0).numpy()
    assert judged(Multilabel(), outputs, y) == {
        "f1": pytest.approx(reference.f1_score(y.numpy(), found, average="micro")),
        "exact_match": pytest.approx(reference.accuracy_score(y.numpy(), found)),
    }


def test_multilabel_by_hand():
    outputs = torch.tensor([[2.0, -1.0, 1.0], [-1.0, -1.0, -3.0]])
    y = torch.tensor([[1.0, 1.0, 0.0], [0.0, 0.0, 0.0]])
    sums = Multilabel().sums(outputs, y)
    assert (sums["tp"], sums["fp"], sums["fn"], sums["exact"]) == (1, 1, 1, 1)
    wrong = [math.log1p(math.exp(-z)) for z in (2, -1, -1, 1, 1, 3)]  # each decision's own loss
    assert sums["loss"] == pytest.approx(sum(wrong) / 3, rel=1e-6)
    assert float(Multilabel().loss(outputs, y)) == pytest.approx(sum(wrong) / 6, rel=1e-6)
    assert judged(Multilabel(), outputs[1:], y[1:]) == {"f1": 0.0, "exact_match": 1.0}


@pytest.mark.parametrize("width", [1, 3])
def test_regression_is_scikit_learns(width):
    random = np.random.default_rng(0)
    y = random.normal(5, [1.0, 2.0, 0.5][:width], (100, width)).astype(np.float32)
    outputs = (y + random.normal(0, 0.7, y.shape)).astype(np.float32)
    given = torch.from_numpy(y[:, 0] if width == 1 else y)
    found = judged(Regression(), torch.from_numpy(outputs), given)
    assert found == {
        "mse": pytest.approx(reference.mean_squared_error(y, outputs)),
        "mae": pytest.approx(reference.mean_absolute_error(y, outputs)),
        "r2": pytest.approx(reference.r2_score(y, outputs, multioutput="variance_weighted")),
    }
    loss = float(Regression().loss(torch.from_numpy(outputs), given))
    assert loss == pytest.approx(found["mse"], rel=1e-5)


def test_r2_far_from_zero_keeps_its_digits_and_constant_targets_are_right_or_wrong():
    y = 1e4 + torch.randn(200, generator=torch.Generator().manual_seed(0))
    outputs = y + 0.5
    found = judged(Regression(), outputs[:, None], y)
    assert found["r2"] == pytest.approx(reference.r2_score(y.double(), outputs.double()), rel=1e-6)
    same = torch.full((4,), 0.1)
    assert judged(Regression(), same[:, None], same)["r2"] == 1
    assert judged(Regression(), same[:, None] + 1, same)["r2"] == 0
    assert math.isnan(judged(Regression(), same[:1, None], same[:1])["r2"])


def test_next_token_counts_tokens_and_leaves_padding_out():
    outputs, y = batch("next-token", 30)
    real = (y != 0).flatten().numpy()
    chances = outputs.softmax(-1).flatten(0, 1).numpy()[real]
    true = y.flatten().numpy()[real]
    loss = reference.log_loss(true, chances, labels=list(range(9)))
    sums = NextToken().sums(outputs, y)
    assert sums["total"] == real.sum() == 30 * 5 - 10 * 2
    assert float(NextToken().loss(outputs, y)) == pytest.approx(loss, rel=1e-5)
    assert judged(NextToken(), outputs, y) == {
        "perplexity": pytest.approx(math.exp(loss), rel=1e-5),
        "accuracy": pytest.approx(reference.accuracy_score(true, chances.argmax(1))),
    }


def test_a_uniform_guess_has_the_perplexity_of_the_number_of_tokens():
    outputs, y = torch.zeros(2, 4, 7), torch.ones(2, 4, dtype=torch.int64)
    assert judged(NextToken(), outputs, y)["perplexity"] == pytest.approx(7)
    worst = torch.zeros(2, 4, 7)
    worst[..., 2] = 1e6
    assert judged(NextToken(), worst, y)["perplexity"] == math.inf


# -- merging --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [*BUILT_IN, "own"])
@given(cuts=st.sets(st.integers(1, 39)), seed=st.integers(0, 100))
def test_any_division_into_batches_gives_the_same_figures(name, cuts, seed):
    problem = Own(functional.mse_loss, _near) if name == "own" else PROBLEMS.create(name)
    outputs, y = batch("regression" if name == "own" else name, 40, seed)
    edges = [0, *sorted(cuts), 40]
    parts = [slice(a, b) for a, b in itertools.pairwise(edges)]
    merged = sum((Score(problem.sums(outputs[p], y[p])) for p in parts), Score({}))
    whole = Score(problem.sums(outputs, y))
    assert merged.total == whole.total
    assert merged.sums == pytest.approx(whole.sums, rel=1e-4)
    assert figures(problem, merged) == pytest.approx(figures(problem, whole), rel=1e-4)


@pytest.mark.parametrize("name", BUILT_IN)
def test_the_loss_is_the_mean_of_the_summed_one_and_can_be_trained_on(name):
    problem = PROBLEMS.create(name)
    outputs, y = batch(name, 20)
    outputs.requires_grad_()
    loss, sums = problem.loss(outputs, y), problem.sums(outputs.detach(), y)
    assert loss.item() == pytest.approx(sums["loss"] / sums["total"], rel=1e-5)
    torch.autograd.backward(loss)
    stepped = outputs.detach() - 0.5 * outputs.grad
    assert float(problem.loss(stepped, y)) < loss.item()


@pytest.mark.parametrize("name", BUILT_IN)
def test_problems_and_scores_cross_process_boundaries(name):
    problem = pickle.loads(pickle.dumps(PROBLEMS.create(name)))
    score = Score(problem.sums(*batch(name, 10)))
    assert pickle.loads(pickle.dumps(score)) == score
    assert len(pickle.dumps(score)) < 300
    metric = pickle.loads(pickle.dumps(problem.metrics[0]))
    assert metric.value(score.sums) == problem.metrics[0].value(score.sums)


@pytest.mark.parametrize("name", ["classification", "regression", "next-token"])
def test_no_samples_have_no_figure(name):
    for metric in PROBLEMS.create(name).metrics:
        assert math.isnan(metric.value(Score({}).sums))


def test_the_metric_of_each_problem_and_its_direction():
    found = {name: PROBLEMS.create(name).metrics[0] for name in BUILT_IN}
    assert {name: (m.name, m.better, m.share) for name, m in found.items()} == {
        "classification": ("accuracy", "higher", True),
        "multilabel": ("f1", "higher", True),
        "regression": ("mse", "lower", False),
        "next-token": ("perplexity", "lower", False),
    }


def test_text_may_be_judged_by_accuracy():
    text = PROBLEMS.create("next-token:first=accuracy")
    assert [metric.name for metric in text.metrics] == ["accuracy", "perplexity"]
    outputs, y = batch("next-token", 30)
    assert judged(text, outputs, y) == judged(NextToken(), outputs, y)


# -- functions and classes of one's own -----------------------------------------------------------


def _near(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return (outputs - targets).abs() < 1


def _matrix(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return outputs[:, None] - targets[None]


class Huber(Regression):
    def loss(self, outputs, targets, reduction="mean"):
        return functional.huber_loss(outputs.reshape(targets.shape), targets, reduction=reduction)


def test_own_functions_get_a_single_output_in_the_shape_of_the_targets():
    outputs, y = batch("regression", 50)
    problem = Problem.of(functional.huber_loss, _near, name="hits", share=True)
    expected = functional.huber_loss(outputs[:, 0], y)
    assert torch.equal(problem.loss(outputs, y), expected)
    sums = problem.sums(outputs, y)
    assert sums["loss"] == pytest.approx(50 * float(expected), rel=1e-6)
    (metric,) = problem.metrics
    assert (metric.name, metric.better, metric.share) == ("hits", "higher", True)
    near = np.mean(np.abs(outputs[:, 0].numpy() - y.numpy()) < 1)
    assert metric.value(sums) == pytest.approx(near)


def test_a_loss_per_sample_is_as_good_as_its_mean():
    outputs, y = batch("regression", 12)
    each = Problem.of(lambda outputs, targets: (outputs - targets) ** 2)
    mean = Problem.of(functional.mse_loss)
    assert float(each.loss(outputs, y)) == pytest.approx(float(mean.loss(outputs, y)))
    assert each.sums(outputs, y) == pytest.approx(mean.sums(outputs, y))


def test_without_a_metric_the_loss_is_the_metric_and_lower_is_better():
    (metric,) = Problem.of(functional.cross_entropy).metrics
    assert (metric.name, metric.better) == ("loss", "lower")
    (metric,) = Problem.of(functional.cross_entropy, lambda o, t: 0.5).metrics
    assert (metric.name, metric.label) == ("measure", "measure")
    (metric,) = Problem.of(functional.cross_entropy, _near, better="lower").metrics
    assert (metric.name, metric.better) == ("_near", "lower")


def test_own_functions_can_be_named_on_the_command_line():
    spec = "own:criterion=torch.nn.functional:huber_loss,measure=torch.nn.functional:l1_loss"
    problem = PROBLEMS.create(spec + ",better=lower")
    (metric,) = problem.metrics
    assert (metric.name, metric.label, metric.better) == ("l1_loss", "l1 loss", "lower")
    outputs, y = batch("regression", 9)
    assert metric.value(problem.sums(outputs, y)) == pytest.approx(
        float(functional.l1_loss(outputs[:, 0], y)), rel=1e-6
    )
    assert PROBLEMS.create(PROBLEMS.describe(problem)) == problem


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("own", "'criterion' is required"),
        ("own:criterion=huber", "criterion='huber' is not a function; write criterion=module:"),
        ("own:criterion=torch:no_such_loss", "cannot be imported"),
        ("own:criterion=math:pi", "criterion='math:pi' is a float; expected a function"),
        ("own:criterion=math:dist,better=more", "better: Input should be 'higher' or 'lower'"),
        ("regresion", "did you mean 'regression'"),
    ],
)
def test_wrong_problems_are_explained(spec, message):
    with pytest.raises(PolytempoError, match=message):
        PROBLEMS.create(spec).loss(*batch("regression", 4))


def test_values_that_are_neither_per_sample_nor_one_are_refused():
    outputs, y = batch("regression", 4)
    with pytest.raises(PolytempoError, match=r"returned shape \[4, 4\] for 4 samples"):
        Problem.of(_matrix).loss(outputs, y)
    with pytest.raises(PolytempoError, match="returned a float; expected a tensor"):
        Problem.of(lambda outputs, targets: 1.0).loss(outputs, y)


@pytest.mark.parametrize("name", ["multilabel", "regression", "next-token"])
def test_a_model_of_the_wrong_size_is_named_instead_of_broadcast(name):
    _, y = batch(name, 4)
    wrong = torch.zeros(4, 1) if name == "multilabel" else torch.zeros(4, 4)
    with pytest.raises(PolytempoError, match=f"{name}: the model outputs"):
        PROBLEMS.create(name).loss(wrong, y)


def test_a_class_that_changes_the_loss_alone_keeps_the_metrics():
    outputs, y = batch("regression", 30)
    found = Huber().sums(outputs, y)
    assert found["loss"] == pytest.approx(
        float(functional.huber_loss(outputs[:, 0], y, reduction="sum")), rel=1e-5
    )
    assert judged(Huber(), outputs, y) == judged(Regression(), outputs, y)


@pytest.mark.parametrize(
    ("source", "lr", "least", "most"),
    [
        ("synthetic", 0.1, 0.9, 1.0),  # accuracy
        ("synthetic-multilabel", 1.0, 0.55, 1.0),  # F1; 0.46 if all labels are guessed
        ("synthetic-regression", 0.02, 0.0, 0.1),  # MSE, of a variance of 1
        ("diabetes", 0.01, 0.0, 0.4),  # MSE, of a variance of 0.59
        ("synthetic-text:tokens=6", 1.0, 1.0, 3.2),  # perplexity, of 6
    ],
)
def test_automatic_models_learn_the_data_sets_of_each_problem(source, lr, least, most):
    clients = 1 if source == "diabetes" else 4  # so that each group is one client
    federation = Federation.load(source, clients=clients, seed=1)
    problem = problem_for(federation)
    inputs = Inputs(federation.shape, federation.outputs, federation.vocabulary, federation.problem)
    module = build("auto", inputs, seed=0)
    optimizer = torch.optim.SGD(module.parameters(), lr)
    x, y = federation.x[federation.train[0]], federation.y[federation.train[0]]
    for _ in range(120):
        optimizer.zero_grad()
        problem.loss(module(x), y).backward()
        optimizer.step()
    x, y = federation.x[federation.test[0]], federation.y[federation.test[0]]
    with torch.no_grad():
        found = problem.metrics[0].value(problem.sums(module(x), y))
    assert least <= found <= most


def test_the_problem_of_a_run_is_that_of_the_data_unless_one_is_given(small):
    assert type(problem_for(small)) is Classification
    assert type(problem_for(small, f"{__name__}:make")) is Own
    with pytest.raises(PolytempoError, match="needs targets for regression, but those of synthe"):
        problem_for(small, "regression")
    with pytest.raises(PolytempoError, match="made a dict; derive it from"):
        problem_for(small, "builtins:dict")


def make() -> Problem:
    return Problem.of(functional.cross_entropy)


def test_the_examples_of_the_documentation_work():
    page = (Path(__file__).parents[2] / "docs/problems.md").read_text(encoding="utf8")
    names: dict = {}
    for example in re.findall(r"```python\n(.*?)```", page, re.DOTALL):
        exec(example, names)
    assert (names["fed"].problem, names["fed"].outputs) == ("regression", 1)
    outputs, y = batch("regression", 30)
    (metric,) = names["problem"].metrics
    near = float(((outputs[:, 0] - y).abs() < 0.5).double().mean())
    assert metric.name == "within_half"
    assert metric.value(names["problem"].sums(outputs, y)) == pytest.approx(near)
    outputs, y = batch("classification", 100)
    problem = names["Balanced"]()
    merged = Score(problem.sums(outputs[:30], y[:30])) + Score(problem.sums(outputs[30:], y[30:]))
    expected = reference.balanced_accuracy_score(y, outputs.argmax(1))
    assert problem.metrics[0].value(merged.sums) == pytest.approx(expected)


# -- devices --------------------------------------------------------------------------------------


IN_DOUBLES = {
    "regression": Regression(),
    "own": Problem.of(functional.mse_loss, lambda outputs, y: (outputs - y).abs()),
}


@pytest.mark.parametrize("name", IN_DOUBLES)
def test_sums_of_a_device_without_doubles_are_those_of_the_cpu(name):
    problem, (outputs, y) = IN_DOUBLES[name], batch("regression", 9)
    there = (part.as_subclass(WithoutDoubles) for part in (outputs, y))
    assert problem.sums(*there) == problem.sums(outputs, y)
