"""Trainings within a training, and trainings in two parts: on every solver and executor."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from polytempo import Federation, Task
from polytempo.core.client_steps import ClientStep, Prior, Session
from polytempo.core.layout import ALL_SHARED, Parts
from polytempo.core.objective import Proximal
from polytempo.core.optimizer import AdamW, Sgd
from polytempo.training import PERSONAL, Executor, Job, make_executor
from solving import NATIVE

SEED = 5
TASK = Task(epochs=2, batch_size=5, lr=0.05)
SOLVERS = pytest.mark.parametrize("solver", ["torch", NATIVE])
HEAD = Parts(["head"])


def module() -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(12, 7), nn.ReLU(), nn.Linear(7, 4))


def backend_of(fed: Federation, solver: str, parts=ALL_SHARED, workers=0) -> Executor:
    where = {"name": "processes", "workers": workers} if workers else {"name": "serial"}
    return make_executor(module(), fed, SEED, parts, solver=solver, **where)


def whole() -> Tensor:
    return nn.utils.parameters_to_vector(module().parameters()).detach()


# -- in two parts ----------------------------------------------------------------------------------


@SOLVERS
@pytest.mark.parametrize("optimizer", [Sgd(), AdamW()], ids=["sgd", "adamw"])
@pytest.mark.parametrize("keep", [False, True], ids=["fresh", "kept"])
def test_first_the_own_part_moves_then_the_shared_one(small, solver, optimizer, keep):
    task = replace(TASK, own_epochs=1, lr=0.01, optimizer=optimizer, keep_optimizer=keep)
    begin = backend_of(small, solver, HEAD).solver.begin
    body, head = whole()[:91], whole()[91:]
    job = Job(2, body, task, ("client", 2), memory={PERSONAL: head})
    session, per_epoch = begin(job), task.batches(small.samples[2])
    layout = session.solver.layout
    assert session.last == 3 * per_epoch
    seen = []
    while not session.finished:
        session.advance(1)
        seen.append(layout.split(session.vector))
    for step, (shared, own) in enumerate(seen, start=1):
        assert torch.equal(shared, body) == (step <= per_epoch)
        assert torch.equal(own, seen[per_epoch - 1][1]) == (step >= per_epoch)
    outcome, in_one_go = session.finish(), begin(job)
    in_one_go.advance()
    assert torch.equal(outcome.upload, in_one_go.finish().upload)


@SOLVERS
def test_each_part_is_trained_as_if_alone(small, solver):
    """By plain SGD of torch, with the other part fixed."""
    task = replace(TASK, own_epochs=1)
    backend = backend_of(small, solver, HEAD)
    job = Job(2, whole()[:91], task, ("client", 2), memory={PERSONAL: whole()[91:]})
    found = backend.carry_out(job)
    session, model = backend.solver.begin(job), module()
    x, y = small.x[small.train[2]], small.y[small.train[2]]
    parts = {0: model[2], task.batches(len(y)): model[0]}
    for step in range(task.total_steps(len(y))):
        if step in parts:
            optimiser = torch.optim.SGD(
                parts[step].parameters(), task.lr, momentum=0.9, weight_decay=1e-4
            )
        rows = session.rows(step)
        model.zero_grad()
        nn.functional.cross_entropy(model(x[rows]), y[rows]).backward()
        optimiser.step()
    expected = nn.utils.parameters_to_vector(model.parameters()).detach()
    torch.testing.assert_close(found.upload, expected[:91], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(found.memory[PERSONAL], expected[91:], rtol=1e-5, atol=1e-6)


# -- within a training -----------------------------------------------------------------------------


class Beside(ClientStep):
    """Trains a copy of what was received, and what it has kept, near an anchor; keeps it."""

    @property
    def keeps(self) -> tuple[str, ...]:
        return ("beside",)

    def after(self, session: Session) -> None:
        task = replace(session.task, objective=Proximal(0.3), upload="model")
        start = session.memory.get("beside", session.received)
        anchor = session.received + 1
        frozen = torch.arange(session.parameters) < 5
        session.memory["beside"] = session.train(
            start, task, "beside", anchor=anchor, frozen=frozen
        )


@SOLVERS
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("parts", [ALL_SHARED, HEAD], ids=["all shared", "own head"])
def test_it_is_a_training_of_its_own(small, solver, workers, parts):
    steps = (Prior(), Beside())
    task = replace(TASK, client_steps=steps, upload="delta")
    size = 91 if parts is HEAD else 123
    memory = {PERSONAL: whole()[91:]} if parts is HEAD else {}
    jobs = [Job(c, whole()[:size], task, ("client", c), memory=memory) for c in range(4)]
    with backend_of(small, solver, parts, workers) as backend:
        for job in jobs:
            backend.expect(job)
        found = [backend.carry_out(job) for job in jobs]
    solver_here = backend_of(small, solver, parts).solver
    for job, outcome in zip(jobs, found, strict=True):
        plain = solver_here.carry_out(replace(job, task=replace(task, client_steps=(Prior(),))))
        assert torch.equal(outcome.upload, plain.upload)  # which it leaves alone
        own = {PERSONAL: outcome.memory[PERSONAL]} if memory else {}
        alone = replace(
            job,
            task=replace(
                task,
                objective=Proximal(0.3),
                upload="model",
                client_steps=(Prior(),),
                own_epochs=0 if memory else None,  # the client's own part stays as it is
            ),
            stream=(*job.stream, "beside"),
            vectors={"anchor": job.params + 1},
            memory=own,
        )
        session = solver_here.begin(alone)
        session.frozen = torch.arange(size) < 5
        session.advance()
        assert torch.equal(outcome.memory["beside"], session.finish().upload)
        assert torch.equal(outcome.memory["beside"][:5], job.params[:5])


class Elsewhere(ClientStep):
    """Starts from another model than the received one, and uploads yet another."""

    def before(self, session: Session) -> None:
        session.put(2 * session.received)

    def after(self, session: Session) -> None:
        session.put(session.trained() + 1)


@SOLVERS
def test_a_step_may_begin_and_end_elsewhere(small, solver):
    backend = backend_of(small, solver)
    task = replace(TASK, client_steps=(Elsewhere(),), upload="delta")
    found = backend.carry_out(Job(1, whole(), task, ("client", 1)))
    twice = backend.carry_out(Job(1, 2 * whole(), TASK, ("client", 1)))
    # what is uploaded is how far it is from the model that was received
    torch.testing.assert_close(found.upload, twice.upload + 1 - whole(), rtol=1e-5, atol=1e-5)
