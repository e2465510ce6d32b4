"""The lean loop does what a plain torch loop does."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from polytempo import Federation, Plain, Proximal, Pull, Task
from polytempo.core.objective import Drift
from polytempo.core.optimizer import Sgd
from polytempo.core.rng import rng
from polytempo.training import AutogradSolver, Exam, Job
from solving import upload_of

STREAM = ("client", 0, "dispatch", 3)
SEED = 5


def network() -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(12, 9), nn.Tanh(), nn.Linear(9, 4)).double()


def plain_loop(fed: Federation, start: dict, task: Task, penalty, first=0, last=None, anchor=None):
    """Textbook training: torch's own SGD, autograd through the penalty, one batch at a time."""
    model = network()
    model.load_state_dict(start)
    if anchor is None:
        anchor = torch.cat([p.detach().flatten() for p in model.parameters()])
    given = {"momentum": task.optimizer.momentum, "weight_decay": task.optimizer.weight_decay}
    optimiser = torch.optim.SGD(model.parameters(), task.lr, **given)
    x, y = fed.x[fed.train[0]].double(), fed.y[fed.train[0]]
    schedule = []
    for epoch in range(task.epochs):
        order = torch.from_numpy(rng(SEED, *STREAM, "epoch", epoch).permutation(len(y)))
        schedule += list(order.split(task.batch_size))
    for rows in schedule[first:last]:
        optimiser.zero_grad()
        theta = torch.cat([p.flatten() for p in model.parameters()])
        loss = nn.functional.cross_entropy(model(x[rows]), y[rows]) + penalty(theta, anchor)
        loss.backward()
        optimiser.step()
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def cosine(theta, anchor):
    return nn.functional.cosine_similarity(theta, anchor, dim=0)


OBJECTIVES = {
    "plain": (Plain(), lambda t, a: 0.0),
    "proximal": (Proximal(0.7), lambda t, a: 0.35 * (t - a).square().sum()),
    "pull": (Pull(0.4), lambda t, a: -0.4 * cosine(t, a)),
    "drift": (Drift(), lambda t, a: t @ a),
}


@pytest.fixture
def trainer(small):
    return AutogradSolver(network(), small, SEED)


@pytest.mark.parametrize("kind", OBJECTIVES)
@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_lean_loop_equals_plain_torch_loop(small, trainer, kind, momentum):
    objective, penalty = OBJECTIVES[kind]
    task = Task(
        epochs=3, batch_size=4, lr=0.05, objective=objective, optimizer=Sgd(momentum=momentum)
    )
    assert len(small.y[small.train[0]]) % 4 != 1  # no merged last batch: the schedules agree
    expected = plain_loop(small, network().state_dict(), task, penalty)
    found = upload_of(trainer, Job(0, trainer.layout.read(), task, STREAM))
    assert found.dtype == torch.float64
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-9)
    assert (found - trainer.layout.read()).abs().max() == 0  # the model stays resident


@pytest.mark.parametrize("kind", OBJECTIVES)
@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_an_anchor_that_is_sent_along_takes_the_place_of_the_received_model(
    small, trainer, kind, momentum
):
    objective, penalty = OBJECTIVES[kind]
    task = Task(
        epochs=3, batch_size=4, lr=0.05, objective=objective, optimizer=Sgd(momentum=momentum)
    )
    start = trainer.layout.read()
    draw = torch.Generator().manual_seed(1)
    anchor = start + 0.3 * torch.randn(len(start), generator=draw, dtype=torch.float64)
    kept = start.clone(), anchor.clone()
    job = Job(0, start, task, STREAM, first_step=2, last_step=11, vectors={"anchor": anchor})
    found = upload_of(trainer, job)
    given = (small, network().state_dict(), task, penalty, 2, 11)
    torch.testing.assert_close(found, plain_loop(*given, anchor), rtol=1e-8, atol=1e-10)
    assert torch.equal(job.params, kept[0]) and torch.equal(anchor, kept[1])
    without = upload_of(trainer, replace(job, vectors={}))
    torch.testing.assert_close(without, plain_loop(*given), rtol=1e-8, atol=1e-10)
    assert torch.allclose(found, without) == (kind == "plain")


def test_a_gradient_has_the_pull_towards_the_anchor_and_a_delta_starts_at_the_model(trainer):
    start = trainer.layout.read()
    anchor = start + 1.0
    task = Task(
        batch_size=6, objective=Proximal(0.5), upload="gradient", optimizer=Sgd(weight_decay=0.0)
    )
    job = Job(0, start, task, STREAM)
    pulled = upload_of(trainer, replace(job, vectors={"anchor": anchor}))
    torch.testing.assert_close(pulled - upload_of(trainer, job), torch.full_like(start, -0.5))
    job = replace(job, vectors={"anchor": anchor})
    delta, model = (
        upload_of(trainer, replace(job, task=replace(task, upload=upload)))
        for upload in ("delta", "model")
    )
    torch.testing.assert_close(start + delta, model)


def test_an_anchor_counts_for_parameters_not_for_statistics(small):
    """It is as long as the model, batch statistics included; these are not pulled."""
    module = nn.Sequential(nn.Linear(12, 9), nn.BatchNorm1d(9), nn.Linear(9, 4)).double()
    trainer = AutogradSolver(module, small, SEED)
    start = trainer.layout.read()
    assert len(start) > trainer.layout.parameters
    job = Job(0, start, Task(epochs=1, objective=Proximal(0.5)), STREAM, vectors={"anchor": start})
    expected = upload_of(trainer, job)
    other = start.clone()
    other[trainer.layout.parameters :] += 7.0
    assert torch.equal(upload_of(trainer, replace(job, vectors={"anchor": other})), expected)
    assert torch.equal(upload_of(trainer, replace(job, vectors={})), expected)


def test_training_from_a_later_step_is_the_tail_of_the_schedule(small, trainer):
    task = Task(epochs=2, batch_size=4, lr=0.05)
    expected = plain_loop(small, network().state_dict(), task, lambda t, a: 0.0, first=3, last=7)
    job = Job(0, trainer.layout.read(), task, STREAM, first_step=3, last_step=7)
    torch.testing.assert_close(upload_of(trainer, job), expected, rtol=1e-5, atol=1e-9)


def test_delta_is_the_model_minus_what_was_received(trainer):
    start = trainer.layout.read()
    model = upload_of(trainer, Job(0, start, Task(), STREAM))
    delta = upload_of(trainer, Job(0, start, Task(upload="delta"), STREAM))
    torch.testing.assert_close(start + delta, model)
    assert delta.abs().max() > 0


def test_gradient_upload_is_the_gradient_of_the_first_batch(small, trainer):
    start = trainer.layout.read()
    task = Task(batch_size=6, upload="gradient", optimizer=Sgd(weight_decay=0.01))
    found = upload_of(trainer, Job(0, start, task, STREAM))
    rows = rng(SEED, *STREAM, "epoch", 0).permutation(len(small.y[small.train[0]]))[:6]
    model = network()
    x, y = small.x[small.train[0]][rows].double(), small.y[small.train[0]][rows]
    nn.functional.cross_entropy(model(x), y).backward()
    expected = torch.cat([(p.grad + 0.01 * p.detach()).flatten() for p in model.parameters()])
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(trainer.layout.vector, start)  # no step was taken


def test_a_lone_last_sample_joins_the_batch_before(small):
    samples = len(small.y[small.train[0]])
    task = Task(
        epochs=1, batch_size=samples - 1, lr=0.1, optimizer=Sgd(momentum=0.0, weight_decay=0.0)
    )
    trainer = AutogradSolver(network(), small, SEED)
    merged = upload_of(trainer, Job(0, trainer.layout.read(), task, STREAM))
    trainer = AutogradSolver(network(), small, SEED)
    whole = replace(task, batch_size=samples)
    expected = upload_of(trainer, Job(0, trainer.layout.read(), whole, STREAM))
    torch.testing.assert_close(merged, expected)


def test_result_depends_on_the_job_alone(small, trainer):
    start = trainer.layout.read()
    jobs = [Job(c, start, Task(epochs=1), ("client", c, "dispatch", 9)) for c in range(4)]
    uploads = [upload_of(trainer, job) for job in jobs]
    backwards = [upload_of(trainer, job) for job in reversed(jobs)]
    assert all(map(torch.equal, uploads, reversed(backwards)))
    other = replace(jobs[0], stream=("client", 0, "dispatch", 10))
    assert not torch.equal(upload_of(trainer, other), uploads[0])


class FunctionalDropout(nn.Module):
    """Draws random numbers without any layer that says so."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(12, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.dropout(self.inner(x), 0.5, self.training)


@pytest.mark.parametrize(
    "make",
    [lambda: nn.Sequential(nn.Linear(12, 9), nn.Dropout(0.5), nn.Linear(9, 4)), FunctionalDropout],
)
def test_random_layers_are_reproducible_and_leave_the_global_stream_alone(small, make):
    module = make()
    trainer = AutogradSolver(module, small, SEED)
    job = Job(0, trainer.layout.read(), Task(epochs=2), STREAM)
    torch.manual_seed(1)
    before = torch.random.get_rng_state()
    first = upload_of(trainer, job)
    assert torch.equal(torch.random.get_rng_state(), before)
    torch.manual_seed(2)
    assert torch.equal(upload_of(trainer, job), first)
    assert not torch.equal(upload_of(trainer, replace(job, stream=("other",))), first)


def test_evaluation_counts_correct_test_samples(small, trainer):
    model = network()
    scores = trainer.evaluate(Exam(trainer.layout.read(), [2, 0]))
    for client, score in zip([2, 0], scores, strict=True):
        x, y = small.x[small.test[client]].double(), small.y[small.test[client]]
        logits = model(x)
        assert score.sums["correct"] == int((logits.argmax(1) == y).sum())
        assert score.total == len(y)
        expected = nn.functional.cross_entropy(logits, y, reduction="sum").item()
        assert score.sums["loss"] == pytest.approx(expected)
