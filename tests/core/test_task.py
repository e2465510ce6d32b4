"""Objectives against autograd, and what a task amounts to."""

import json
from dataclasses import replace

import pydantic
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from polytempo import PolytempoError
from polytempo.core.client_steps import Basis, Choose, ClientStep, Mask
from polytempo.core.objective import Plain, Proximal, Pull
from polytempo.core.optimizer import AdamW, Sgd
from polytempo.core.rng import rng
from polytempo.core.task import TASKS, Task

SIZE = 6


def norm(x):
    return x.square().sum().sqrt()


# What each objective adds to the loss, as its docstring says it.
PENALTIES = {
    "plain": (Plain(), lambda t, a: 0 * t.sum()),
    "proximal": (Proximal(0.7), lambda t, a: 0.35 * (t - a).square().sum()),
    "proximal, power 1": (Proximal(0.7, 1), lambda t, a: 0.7 * norm(t - a)),
    "cosine": (Pull(0.4), lambda t, a: -0.4 * (t @ a) / (norm(t) * norm(a))),
    "inner": (Pull(0.4, "inner"), lambda t, a: -0.4 * (t @ a) / (a @ a)),
    "l1": (Pull(0.4, "l1"), lambda t, a: 0.4 * (t - a).abs().sum() / a.abs().sum()),
    "l2": (Pull(0.4, "l2"), lambda t, a: 0.4 * norm(t - a) / norm(a)),
    "cosine, pushing": (Pull(-2.0), lambda t, a: 2.0 * (t @ a) / (norm(t) * norm(a))),
    "l2, pushing": (Pull(-2.0, "l2"), lambda t, a: -2.0 * norm(t - a) / norm(a)),
}


def pair(seed: int, scale: float = 1.0) -> tuple[torch.Tensor, torch.Tensor]:
    stream = rng(seed, "objective")
    return tuple(torch.from_numpy(stream.normal(size=SIZE) * s) for s in (1.0, scale))


@pytest.mark.parametrize("kind", PENALTIES)
@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 10**6), scale=st.floats(1e-2, 1e2))
def test_closed_form_gradient_equals_autograd(kind, seed, scale):
    objective, penalty = PENALTIES[kind]
    theta, anchor = pair(seed, scale)
    theta.requires_grad_()
    [expected] = torch.autograd.grad(penalty(theta, anchor), theta)
    already = torch.linspace(-1, 1, SIZE, dtype=torch.float64)
    grad = already.clone()  # the loss has left its gradient there
    kept = theta.detach().clone(), anchor.clone()
    objective.add_gradient(theta.detach(), anchor, grad)
    assert grad - already == pytest.approx(expected, rel=1e-9, abs=1e-12)
    assert torch.equal(theta.detach(), kept[0]) and torch.equal(anchor, kept[1])


@pytest.mark.parametrize("kind", PENALTIES)
def test_at_the_anchor_there_is_no_pull_sideways(kind):
    """Every minimum is at the anchor: no gradient there (inner product: along the anchor only)."""
    objective, _ = PENALTIES[kind]
    anchor, _ = pair(3)
    grad = torch.zeros(SIZE, dtype=torch.float64)
    objective.add_gradient(anchor.clone(), anchor, grad)
    if kind == "inner":
        assert grad == pytest.approx(-0.4 * anchor / (anchor @ anchor))
    else:
        assert grad.abs().max() < 1e-12


@pytest.mark.parametrize("kind", PENALTIES)
@pytest.mark.parametrize("zero", ["theta", "anchor", "both"])
def test_zero_vectors_give_finite_gradients(kind, zero):
    objective, _ = PENALTIES[kind]
    theta, anchor = (x.float() for x in pair(4))
    if zero != "anchor":
        theta = torch.zeros(SIZE)
    if zero != "theta":
        anchor = torch.zeros(SIZE)
    grad = torch.ones(SIZE)
    objective.add_gradient(theta, anchor, grad)
    assert torch.isfinite(grad).all()
    if zero == "both":
        assert torch.equal(grad, torch.ones(SIZE))


@settings(max_examples=50, deadline=None)
@given(seed=st.integers(0, 10**6), strength=st.floats(1e-3, 10))
def test_cosine_pull_turns_towards_the_anchor_and_a_negative_one_away(seed, strength):
    theta, anchor = pair(seed)

    def turned(signed: float) -> float:
        grad = torch.zeros(SIZE, dtype=torch.float64)
        Pull(signed).add_gradient(theta, anchor, grad)
        step = theta - 1e-3 / strength * grad
        return float(torch.cosine_similarity(step, anchor, dim=0))

    before = float(torch.cosine_similarity(theta, anchor, dim=0))
    assert turned(-strength) < before < turned(strength)


@pytest.mark.parametrize("measure", ["inner", "l1", "l2"])
def test_other_pulls_bring_theta_nearer_too(measure):
    theta, anchor = pair(9)
    grad = torch.zeros(SIZE, dtype=torch.float64)
    Pull(1.0, measure).add_gradient(theta, anchor, grad)
    step = theta - 1e-3 * grad
    if measure == "inner":
        assert step @ anchor > theta @ anchor
    else:
        power = 1 if measure == "l1" else 2
        assert torch.dist(step, anchor, power) < torch.dist(theta, anchor, power)


# -- how much a task is ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("samples", "batches"),
    [
        (1, 1),  # one sample is all there is
        (2, 1),
        (9, 1),
        (10, 1),
        (11, 1),  # ten and one: eleven together
        (12, 2),
        (20, 2),
        (21, 2),
        (22, 3),
        (101, 10),
    ],
)
def test_a_single_last_sample_joins_the_batch_before(samples, batches):
    assert Task(batch_size=10).batches(samples) == batches


@settings(max_examples=60, deadline=None)
@given(samples=st.integers(1, 300), size=st.integers(2, 64))
def test_batches_cover_all_samples_and_never_leave_one_alone(samples, size):
    batches = Task(batch_size=size).batches(samples)
    last = samples - (batches - 1) * size
    assert 2 <= last <= size + 1 or samples == 1


def test_batches_of_one_sample_are_what_the_user_asked_for():
    assert Task(batch_size=1).batches(7) == 7


@pytest.mark.parametrize(
    ("task", "steps", "work"),
    [
        (Task(epochs=3, batch_size=10), 9, 3 * 25),  # batches of 10, 10, 5
        (Task(epochs=1, batch_size=12), 2, 25),  # 12, 13
        (Task(epochs=2, batch_size=64), 2, 2 * 25),
        (Task(epochs=9, steps=6, batch_size=10), 6, 2 * 25),  # steps replace epochs
        (Task(steps=1, batch_size=100), 1, 25),
        (Task(epochs=4, upload="delta", batch_size=10), 12, 4 * 25),
        (Task(epochs=4, upload="gradient", batch_size=100), 1, 25),
        (Task(steps=4, upload="gradient", batch_size=5), 1, 5),
    ],
)
def test_steps_and_work_of_a_client_with_25_samples(task, steps, work):
    assert task.total_steps(25) == steps
    assert task.work(25) == pytest.approx(work)


@settings(max_examples=40, deadline=None)
@given(samples=st.integers(1, 500), epochs=st.integers(1, 9), size=st.integers(1, 70))
def test_work_is_epochs_times_samples_and_steps_count_alike(samples, epochs, size):
    task = Task(epochs=epochs, batch_size=size)
    assert task.work(samples) == pytest.approx(epochs * samples)
    counted = replace(task, epochs=1, steps=task.total_steps(samples))
    assert counted.work(samples) == pytest.approx(task.work(samples))


# -- validation and travel -------------------------------------------------------------------------


@pytest.mark.parametrize(
    "wrong",
    [
        {"epochs": 0},
        {"epochs": 1.5},
        {"steps": 0},
        {"batch_size": 0},
        {"lr": 0},
        {"lr": -0.1},
        {"lr": float("nan")},
        {"keep_optimizer": "perhaps"},
        {"upload": "weights"},
        {"epoch": 5},
    ],
    ids=str,
)
def test_a_wrong_setting_is_an_error_that_names_it(wrong):
    [key] = wrong
    with pytest.raises(pydantic.ValidationError) as error:
        Task(**wrong)
    assert error.value.errors()[0]["loc"][0] == key


@pytest.mark.parametrize(
    ("key", "spec", "named"),
    [
        ("optimizer", "sgdd", "optimizer is called .sgdd.*sgd"),
        ("optimizer", "sgd:momentum=1.0", "sgd: momentum"),
        ("optimizer", "sgd:momentum=-0.1", "sgd: momentum"),
        ("optimizer", "adam:weight_decay=-1", "adam: weight_decay"),
        ("optimizer", "adam:momentum=0.9", "adam: .*momentum"),
        ("optimizer", "adamw:beta2=1", "adamw: beta2"),
        ("client_steps", ["masc"], "client step is called .masc.*mask"),
        ("client_steps", ["mask:share=1.0"], "mask: share"),
        ("client_steps", ["choose:models=1"], "choose: models"),
        ("client_steps", ["basis:directions=0"], "basis: directions"),
        ("objective", "pulll:strength=1", "objective is called .pulll.*pull"),
        ("objective", "pull", "pull: .*strength"),
        ("objective", "proximal:mu=-1", "proximal: mu"),
        ("objective", "proximal:mu=1,power=3", "proximal: power"),
        ("objective", "pull:strength=1,measure=l3", "pull: measure"),
        ("objective", "plain:mu=1", "plain: .*mu"),
    ],
)
def test_so_is_a_wrong_part_of_it(key, spec, named):
    with pytest.raises(PolytempoError, match=named):
        Task(**{key: spec})


def test_defaults_are_those_of_the_paper():
    task = Task()
    assert (task.epochs, task.batch_size, task.lr) == (5, 64, 0.01)
    assert task.optimizer == Sgd(momentum=0.9, weight_decay=1e-4) and not task.keep_optimizer
    assert task.objective == Plain() and task.upload == "model" and task.steps is None


@pytest.mark.parametrize("kind", PENALTIES)
@pytest.mark.parametrize("steps", [None, 7])
def test_a_task_survives_the_journey_as_json(kind, steps):
    objective, _ = PENALTIES[kind]
    sent = Task(
        epochs=3,
        steps=steps,
        batch_size=12,
        lr=0.1 + 0.2,
        optimizer=AdamW(beta1=0.5, weight_decay=1e-5),
        keep_optimizer=True,
        objective=objective,
        upload="delta",
        client_steps=(Choose(3), Mask(0.25), Basis(2)),
    )
    received = TASKS.create(json.loads(json.dumps(TASKS.describe(sent))))
    assert received == sent
    assert type(received.objective) is type(objective)
    assert type(received.optimizer) is AdamW
    assert received != replace(sent, lr=0.3)
    for one_less in (sent.client_steps[:2], sent.client_steps[::-1]):
        assert received != replace(sent, client_steps=one_less)


def test_an_unknown_key_is_refused():
    with pytest.raises(PolytempoError, match="epoch"):
        TASKS.create({"name": "task", "epoch": 3})


@pytest.mark.parametrize(
    ("step", "end"), [(0, 4), (0.5, 4), (3, 4), (3.999, 4), (4, 8), (4.001, 8), (11, 12)]
)
def test_the_epoch_in_progress_ends_after_its_last_batch(step, end):
    assert Task(batch_size=5).end_of_epoch(step, 18) == end  # 5 + 5 + 5 + 3 samples


def test_two_client_steps_cannot_upload_under_one_name():
    with pytest.raises(PolytempoError, match="two client steps upload 'basis'"):
        Task(client_steps=(Basis(2), Basis(3)))


def test_a_method_that_looks_at_steps_can_ask_for_plain_sgd():
    assert Task(optimizer=Sgd(momentum=0.5)).plain_sgd("fedac").momentum == 0.5
    with pytest.raises(PolytempoError, match=r"fedac .* use --optimizer sgd, not adamw"):
        Task(optimizer=AdamW()).plain_sgd("fedac")
    kept = Task(keep_optimizer=True)
    with pytest.raises(PolytempoError, match="omit --keep-optimizer"):
        kept.plain_sgd("fedac")
    assert replace(kept, optimizer=Sgd(momentum=0.0)).plain_sgd("fedac").momentum == 0.0
    assert replace(kept, upload="gradient").plain_sgd("ace").momentum == 0.9  # none is taken
    with pytest.raises(PolytempoError, match=r"ace has its clients upload a gradient.* not adamw"):
        Task(optimizer=AdamW(), upload="gradient").plain_sgd("ace")


def test_a_training_in_two_parts_is_longer_by_the_first():
    both = Task(epochs=2, batch_size=8, own_epochs=3)
    assert both.batches(20) == 3
    assert both.own_steps(20) == 9 and both.total_steps(20) == 15
    assert both.work(20) == 5 * 20
    assert Task(steps=4, batch_size=8, own_epochs=3).total_steps(20) == 13
    assert Task(epochs=2, batch_size=8, own_epochs=0).total_steps(20) == 6
    assert Task(epochs=2, batch_size=8).own_steps(20) == 0


def test_work_of_a_step_is_added_to_that_of_the_training():
    class Twice(ClientStep):
        def work(self, task, samples):
            return task.epochs * samples

    assert Task(epochs=2, client_steps=(Twice(), Mask(0.5))).work(100) == 2 * 100 * 0.5 + 200
