"""Steps before and after training: alone, together, on every solver and executor."""

from collections.abc import Iterator, Mapping
from dataclasses import replace

import numpy as np
import pytest
import torch
from sklearn.decomposition import PCA
from torch import Tensor, nn

from polytempo import Federation, Task
from polytempo.core.client_steps import CLIENT_STEPS, Basis, Choose, ClientStep, Mask, Session
from polytempo.core.masks import largest, unpack
from polytempo.core.optimizer import AdamW, Sgd
from polytempo.core.task import TASKS
from polytempo.training import Executor, Job, Outcome, make_executor
from polytempo.training.jobs import Swap
from solving import NATIVE

SEED = 5
COMBINATIONS = {
    "basis": (Basis(2),),
    "choose": (Choose(3),),
    "mask": (Mask(0.4),),
    "choose, basis": (Choose(3), Basis(2)),
    "choose, mask": (Choose(3), Mask(0.4)),
    "mask, basis": (Mask(0.4), Basis(2)),
    "choose, mask, basis": (Choose(3), Mask(0.4), Basis(2)),
}
TASK = Task(epochs=2, batch_size=5, lr=0.05)


def module() -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(12, 7), nn.ReLU(), nn.Linear(7, 4))


def candidates() -> list[Tensor]:
    start = nn.utils.parameters_to_vector(module().parameters()).detach()
    draw = torch.Generator().manual_seed(2)
    return [start + 0.5 * torch.randn(len(start), generator=draw) for _ in range(3)]


def jobs_for(task: Task) -> list[Job]:
    first, *others = candidates()
    beside = {f"candidate {k}": model for k, model in enumerate(others, start=1)}
    return [Job(client, first, task, ("client", client), vectors=beside) for client in range(8)]


def backend_of(fed: Federation, solver: str, workers: int) -> Executor:
    where = {"name": "processes", "workers": workers} if workers else {"name": "serial"}
    return make_executor(module(), fed, SEED, solver=solver, **where)


def outcomes(backend: Executor, jobs: list[Job]) -> list[Outcome]:
    for job in jobs:
        backend.expect(job)
    return [backend.carry_out(job) for job in jobs]


def layers(model: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    w1, b1, w2, b2 = model.split([84, 7, 28, 4])
    return w1.view(7, 12), b1, w2.view(4, 7), b2


def hidden(model: Tensor, x: Tensor) -> Tensor:
    w, b, _, _ = layers(model)
    return torch.relu(x @ w.T + b)


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("solver", ["torch", NATIVE])
@pytest.mark.parametrize("kind", COMBINATIONS)
def test_each_does_its_part_whatever_is_done_beside_it(small, kind, solver, workers):
    steps = COMBINATIONS[kind]
    task = replace(TASK, client_steps=steps)
    chosen = set()
    with backend_of(small, solver, workers) as backend:
        for job, (upload, extras, memory) in zip(
            jobs := jobs_for(task), outcomes(backend, jobs), strict=True
        ):
            x, y = small.x[small.train[job.client]], small.y[small.train[job.client]]
            start = job.params
            assert extras.keys() == task.extras.keys() and memory == {}
            if Choose(3) in steps:
                losses = []
                for model in (job.params, *job.vectors.values()):
                    _, _, w, b = layers(model)
                    logits = hidden(model, x) @ w.T + b
                    losses.append(float(nn.functional.cross_entropy(logits, y)))
                best = int(np.argmin(losses))
                assert extras["choice"].tolist() == [[best]]
                start = [job.params, *job.vectors.values()][best]
                chosen.add(best)
            if Mask(0.4) in steps:
                kept = largest(start, 0.4)
                assert torch.equal(unpack(extras["mask"], len(start)), kept)
                assert torch.equal(upload[~kept], start[~kept])
                assert (upload[kept] != start[kept]).float().mean() > 0.5
            if Basis(2) in steps:
                features = hidden(upload, x).double().numpy()
                expected = PCA(2, svd_solver="full").fit(features).components_
                turned = np.abs(extras["basis"].numpy() @ expected.T)
                np.testing.assert_allclose(turned, np.eye(2), atol=1e-3)
    assert len(chosen) > 1 or Choose(3) not in steps  # else this shows little


@pytest.mark.parametrize("optimizer", [Sgd(), AdamW()], ids=["sgd", "adamw"])
@pytest.mark.parametrize("solver", ["torch", NATIVE])
@pytest.mark.parametrize("kind", COMBINATIONS)
def test_all_solvers_and_executors_agree(small, kind, solver, optimizer):
    task = replace(TASK, client_steps=COMBINATIONS[kind], optimizer=optimizer, lr=0.01)
    jobs = jobs_for(task)
    with backend_of(small, solver, 2) as workers:
        found = outcomes(workers, jobs)
    alone, plain = (outcomes(backend_of(small, each, 0), jobs) for each in (solver, "torch"))
    for mine, same, theirs in zip(found, alone, plain, strict=True):
        assert torch.equal(mine.upload, same.upload)
        assert all(torch.equal(mine.extras[name], same.extras[name]) for name in task.extras)
        torch.testing.assert_close(mine.upload, theirs.upload, rtol=1e-3, atol=1e-4)
        for name in {"choice", "mask"} & task.extras.keys():
            assert torch.equal(mine.extras[name], theirs.extras[name])


def test_the_order_of_the_steps_is_that_of_the_task(small):
    """A mask before the choice is one of the model that came first."""
    [after, before] = (
        outcomes(backend_of(small, "torch", 0), jobs_for(replace(TASK, client_steps=steps)))
        for steps in ((Choose(3), Mask(0.4)), (Mask(0.4), Choose(3)))
    )
    first = largest(candidates()[0], 0.4)
    assert all(torch.equal(unpack(one.extras["mask"], len(first)), first) for one in before)
    assert not all(torch.equal(unpack(one.extras["mask"], len(first)), first) for one in after)


def test_steps_are_taken_again_for_a_model_that_comes_on_the_way(small):
    """The choice and the mask are of the second set of models, for all that is left."""
    task = replace(TASK, client_steps=(Choose(3), Mask(0.4)))
    solver = backend_of(small, "torch", 0).solver
    first, second, third = candidates()
    job = jobs_for(task)[3]
    beside = {"candidate 1": third + 1, "candidate 2": first}
    session = solver.begin(job)
    session.advance(3)
    session.swap(second, beside)
    session.advance()
    found = session.finish()
    alone = Job(3, second, task, ("client", 3), first_step=3, vectors=beside)
    expected = solver.carry_out(alone)
    swapped = solver.carry_out(replace(job, swaps=(Swap(3, second, beside),)))
    for mine in (found, swapped):
        assert torch.equal(mine.upload, expected.upload)
        assert all(torch.equal(mine.extras[name], expected.extras[name]) for name in task.extras)


class Half(ClientStep):
    """Takes half the time."""

    @property
    def cost(self) -> float:
        return 0.5


def test_costs_and_uploads_add_up():
    task = replace(TASK, client_steps=(Choose(3), Mask(0.25), Basis(2)))
    assert task.extras == {"choice": 1, "mask": 1, "basis": 2}
    assert task.work(40) == pytest.approx(0.75 * TASK.work(40))
    both = replace(TASK, client_steps=(Mask(0.25), Half()))
    assert both.work(40) == pytest.approx(0.75 * 0.5 * TASK.work(40))


# -- a user's own ---------------------------------------------------------------------------------


class Visits(ClientStep):
    """Counts the trainings of a client; uploads the count, the model as it came, the length of the
    trained one, and how often each class occurs. Odd clients leave the first parameters alone."""

    still: int = 5

    @property
    def uploads(self) -> Mapping[str, int]:
        return {"visits": 1, "came": 1, "length": 1, "classes": 1}

    @property
    def keeps(self) -> tuple[str, ...]:
        return "visits", "last"

    def before(self, session: Session) -> None:
        if len(session.targets()) % 2:
            session.frozen = torch.arange(session.parameters) < self.still
        session.extras["came"] = session.received[None]

    def after(self, session: Session) -> None:
        session.memory["visits"] = session.memory.get("visits", torch.zeros(1)) + 1
        session.memory["last"] = session.received
        session.extras["visits"] = session.memory["visits"][None]
        session.extras["length"] = session.trained().norm().reshape(1, 1)
        session.extras["classes"] = session.targets().bincount(minlength=4)[None]


@pytest.fixture
def registered() -> Iterator[None]:
    CLIENT_STEPS.register("visits")(Visits)
    yield
    del CLIENT_STEPS._known["visits"]


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("solver", ["torch", NATIVE])
def test_a_step_of_the_users_own(small, registered, solver, workers):
    """On workers, a model that came is not the model that went."""
    task = replace(TASK, client_steps=(Visits(still=9),))
    jobs = jobs_for(task)
    assert len({samples % 2 for samples in small.samples}) == 2
    with backend_of(small, solver, workers) as backend:
        first = outcomes(backend, jobs)
        again = [replace(job, memory=one.memory) for job, one in zip(jobs, first, strict=True)]
        second = outcomes(backend, again)
    alone = [backend_of(small, solver, 0).solver.carry_out(job) for job in jobs]
    for job, one, two, same in zip(jobs, first, second, alone, strict=True):
        assert torch.equal(one.upload, same.upload)  # wherever it was done
        assert torch.equal(one.upload, two.upload)
        assert (one.extras["visits"].item(), two.extras["visits"].item()) == (1, 2)
        assert torch.equal(one.extras["came"][0], job.params)
        assert torch.equal(one.memory["last"], job.params)
        assert one.extras["length"].item() == pytest.approx(float(one.upload.norm()))
        y = small.y[small.train[job.client]]
        assert one.extras["classes"].tolist() == [[int((y == k).sum()) for k in range(4)]]
        unchanged = (one.upload == job.params)[:9]
        assert bool(unchanged.all()) == bool(len(y) % 2)


def test_it_travels_by_its_name(registered):
    task = replace(TASK, client_steps=(Visits(still=9), Mask(0.5)))
    assert TASKS.create(TASKS.describe(task)) == task
    assert Task(client_steps=["visits:still=9"]).client_steps == (Visits(still=9),)
