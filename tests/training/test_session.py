"""However a training is cut in pieces, the bits are the same; what a client keeps, it keeps."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_vocabulary import FEDERATION as TEXTS
from test_vocabulary import PADDED, text_model
from torch import Tensor, nn

from polytempo import Federation, PolytempoError, Proximal, Task
from polytempo.core.client_steps import ClientStep, Mask
from polytempo.core.layout import Parts
from polytempo.core.messages import Dispatch
from polytempo.core.optimizer import Adam, AdamW, Sgd
from polytempo.core.rng import rng
from polytempo.training import PERSONAL, AutogradSolver, Job, Outcome
from polytempo.training.jobs import Swap
from polytempo.training.solvers.native.solver import NativeSolver
from solving import needs_compiler, upload_of

SEED, STREAM = 5, ("client", 2, "dispatch", 3)
TASK = Task(epochs=6, batch_size=5, lr=0.05, optimizer=Sgd(weight_decay=0.01))
HEAD = Parts(["head.*"])


class Network(nn.Sequential):
    """With names, random layers and statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(12, 9)
        self.norm = nn.BatchNorm1d(9)
        self.drop = nn.Dropout(0.3)
        self.head = nn.Linear(9, 4)


def network(plain: bool = False) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        module = Network()
    if plain:
        del module.norm, module.drop
    return module.double()


def job_of(solver: AutogradSolver, task: Task = TASK, **more) -> Job:
    memory = {PERSONAL: solver.layout.initial_personal} if solver.layout.personal else {}
    given = {"memory": memory} | more
    client = PADDED if solver.federation is TEXTS else 2
    return Job(client, solver.layout.read(), task, STREAM, **given)


def sent(job: Job, params: Tensor) -> Dispatch:
    """A multicast that brings this model."""
    return Dispatch(job.client, 9, params, job.task, preempt=True)


def moved(vector: Tensor, by: float = 0.1, seed: int = 0) -> Tensor:
    draw = torch.Generator().manual_seed(seed)
    return vector + by * torch.randn(len(vector), generator=draw, dtype=torch.float64).abs()


def assert_same(found: Outcome, expected: Outcome) -> None:
    assert torch.equal(found.upload, expected.upload)
    for mine, theirs in zip(found[1:], expected[1:], strict=True):
        assert mine.keys() == theirs.keys()
        assert all(torch.equal(mine[name], theirs[name]) for name in mine)


# -- pieces ---------------------------------------------------------------------------------------


KINDS = {
    "plain": (lambda fed: AutogradSolver(network(plain=True), fed, SEED), TASK),
    "dropout and statistics": (lambda fed: AutogradSolver(network(), fed, SEED), TASK),
    "statistics that do not travel": (
        lambda fed: AutogradSolver(network(), fed, SEED, Parts(buffers="reset")),
        TASK,
    ),
    "a part of a vocabulary": (
        lambda fed: AutogradSolver(text_model(dropout=0.3), TEXTS, SEED),
        replace(TASK, objective=Proximal(0.5)),
    ),
    "kept momentum": (
        lambda fed: AutogradSolver(network(), fed, SEED),
        replace(TASK, keep_optimizer=True),
    ),
    "kept moments, own head": (
        lambda fed: AutogradSolver(network(), fed, SEED, HEAD),
        replace(TASK, keep_optimizer=True, optimizer=AdamW(), lr=0.01),
    ),
}


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=8)
@given(pieces=st.lists(st.integers(0, 5), max_size=8))
def test_cut_in_any_pieces_the_bits_are_the_same(small, kind, pieces):
    """And another session trains in between, on the same module."""
    make, task = KINDS[kind]
    solver = make(small)
    job = job_of(solver, task)
    total = task.total_steps(solver.federation.samples[job.client])
    expected = solver.carry_out(job)
    session, other = solver.begin(job), solver.begin(replace(job, stream=("other",)))
    taken = 0
    for steps in pieces:
        taken += session.advance(steps)
        other.advance(1)
        assert (session.step, session.finished) == (min(taken, total), taken >= total)
    assert session.advance() == total - taken
    assert session.finished and session.advance() == 0
    assert_same(session.finish(), expected)
    assert not torch.equal(expected.upload, job.params)


def test_a_session_leaves_its_job_as_it_was(small):
    solver = AutogradSolver(network(), small, SEED, HEAD)
    task = replace(TASK, keep_optimizer=True)
    first = solver.carry_out(job_of(solver, task))
    job = job_of(solver, task, memory=first.memory)
    before = job.params.clone(), {name: value.clone() for name, value in job.memory.items()}
    found = solver.carry_out(job)
    assert torch.equal(job.params, before[0])
    assert job.memory.keys() == before[1].keys() == {PERSONAL, "optimizer.momentum"}
    for name, value in job.memory.items():
        assert torch.equal(value, before[1][name])
        assert not torch.equal(found.memory[name], value)


def test_an_urgent_request_ends_it_at_an_epoch(small):
    """The result is that of a task of so many epochs."""
    solver = AutogradSolver(network(), small, SEED)
    epoch = TASK.batches(small.samples[2])
    job = job_of(solver)
    expected = upload_of(solver, replace(job, task=replace(TASK, epochs=2)))
    assert torch.equal(upload_of(solver, replace(job, last_step=2 * epoch)), expected)
    assert not torch.equal(upload_of(solver, job), expected)


def test_a_session_may_be_finished_before_its_end(small):
    """That is what a deployed client does when it is told to stop."""
    solver = AutogradSolver(network(), small, SEED)
    job = job_of(solver)
    session = solver.begin(job)
    session.advance(4)
    expected = upload_of(solver, replace(job, last_step=4))
    assert torch.equal(session.finish().upload, expected)


# -- another model on the way ---------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("step", [0, 3, 7])
def test_a_model_swapped_in_by_hand_is_that_of_a_job_with_swaps(small, kind, step):
    make, task = KINDS[kind]
    solver = make(small)
    job = job_of(solver, task)
    other = moved(job.params)
    session = solver.begin(job)
    session.advance(step)
    session.swap(other, {})
    session.advance()
    expected = solver.carry_out(replace(job, swaps=(Swap(step, other, {}),)))
    assert_same(session.finish(), expected)
    assert not torch.equal(expected.upload, upload_of(solver, job))


@pytest.mark.parametrize(
    "kind", ["plain", "dropout and statistics", "a part of a vocabulary"]
)  # those that keep nothing
def test_who_keeps_nothing_trains_the_rest_alone(small, kind):
    make, task = KINDS[kind]
    solver = make(small)
    job = job_of(solver, task)
    other, third = moved(job.params), moved(job.params, seed=1)
    swaps = (Swap(2, other, {}), Swap(5, third, {}))
    short = job.swapped(2, sent(job, other)).swapped(5, sent(job, third))
    assert short.swaps == () and (short.first_step, short.since) == (5, 5)
    expected = solver.carry_out(replace(job, swaps=swaps))
    assert_same(solver.carry_out(short), expected)


def test_who_keeps_something_has_to_train_all_of_it(small):
    for parts, task in ((HEAD, TASK), (Parts(), replace(TASK, keep_optimizer=True))):
        solver = AutogradSolver(network(), small, SEED, parts)
        job = job_of(solver, task)
        other = moved(job.params)
        found = job.swapped(2, sent(job, other)).swapped(6, sent(job, job.params))
        assert (found.first_step, found.since) == (0, 6)
        assert [swap.step for swap in found.swaps] == [2, 6]
        tail = replace(job, params=job.params, first_step=6)
        assert not torch.equal(upload_of(solver, found), upload_of(solver, tail))


class Received(ClientStep):
    """How many models the client has been sent, multicasts included."""

    @property
    def keeps(self):
        return ("received",)

    def before(self, session):
        session.memory["received"] = session.memory.get("received", torch.zeros(1)) + 1


@pytest.mark.parametrize("before", [{}, {"received": torch.full((1,), 7.0)}])
def test_what_steps_have_kept_before_a_multicast_is_not_forgotten(small, before):
    """In the first training too, when there is no memory yet: as a client does that was there."""
    solver = AutogradSolver(network(), small, SEED)
    job = job_of(solver, replace(TASK, client_steps=(Mask(0.5), Received())), memory=before)
    other = moved(job.params)
    session = solver.begin(job)
    session.advance(3)
    session.swap(other, {})
    session.advance()
    found = solver.carry_out(job.swapped(3, sent(job, other)))
    assert_same(found, session.finish())
    assert found.memory["received"].item() == sum(before.values()) + 2


def test_steps_that_keep_nothing_need_no_history(small):
    solver = AutogradSolver(network(), small, SEED)
    job = job_of(solver, replace(TASK, client_steps=(Mask(0.5),)))
    assert job.swapped(3, sent(job, moved(job.params))).swaps == ()


def by_hand(
    fed: Federation, module: nn.Module, optimiser: torch.optim.Optimizer, steps: range, stream
) -> None:
    """The batches of these steps, by torch's own optimiser."""
    x, y = fed.x[fed.train[2]].double(), fed.y[fed.train[2]]
    per_epoch = TASK.batches(len(y))
    assert len(y) % 5 != 1  # plain cuts of five
    for step in steps:
        order = rng(SEED, *stream, "epoch", step // per_epoch).permutation(len(y))
        rows = order[5 * (step % per_epoch) :][:5]
        optimiser.zero_grad()
        nn.functional.cross_entropy(module(x[rows]), y[rows]).backward()
        optimiser.step()


def test_a_swap_replaces_what_is_shared_and_the_clients_own_goes_on(small):
    solver = AutogradSolver(network(plain=True), small, SEED, HEAD)
    job = job_of(solver)
    other = moved(job.params)
    upload, _, memory = solver.carry_out(job.swapped(5, sent(job, other)))
    module = network(plain=True)

    def fresh() -> torch.optim.Optimizer:  # begins anew with every model
        return torch.optim.SGD(module.parameters(), 0.05, momentum=0.9, weight_decay=0.01)

    by_hand(small, module, fresh(), range(5), STREAM)
    nn.utils.vector_to_parameters(other.clone(), module.body.parameters())
    by_hand(small, module, fresh(), range(5, TASK.total_steps(small.samples[2])), STREAM)
    torch.testing.assert_close(upload, vector_of(module.body))
    torch.testing.assert_close(memory[PERSONAL], vector_of(module.head))


def vector_of(module: nn.Module) -> Tensor:
    return nn.utils.parameters_to_vector(module.parameters()).detach()


# -- an optimiser that is kept --------------------------------------------------------------------


@pytest.mark.parametrize("parts", [Parts(), HEAD], ids=["all shared", "own head"])
@pytest.mark.parametrize("name", ["sgd", "adam", "adamw"])
@pytest.mark.parametrize("keep", [True, False])
def test_a_kept_optimiser_is_torchs_own_with_its_state(small, parts, name, keep):
    """Two trainings, the second on another shared part, and with a swap in it."""
    kinds = {
        "sgd": (Sgd(weight_decay=0.01), torch.optim.SGD, {"momentum": 0.9}),
        "adam": (Adam(weight_decay=0.01), torch.optim.Adam, {}),
        "adamw": (AdamW(weight_decay=0.01), torch.optim.AdamW, {}),
    }
    ours, kind, options = kinds[name]
    solver = AutogradSolver(network(plain=True), small, SEED, parts)
    task = replace(TASK, optimizer=ours, keep_optimizer=keep, lr=0.01)
    total, module = task.total_steps(small.samples[2]), network(plain=True)

    def make() -> torch.optim.Optimizer:
        return kind(module.parameters(), 0.01, weight_decay=0.01, **options)

    optimiser = make()

    def receive(model: Tensor) -> None:
        target = module.body if parts is HEAD else module
        nn.utils.vector_to_parameters(model.clone(), target.parameters())

    job = job_of(solver, task)
    first = solver.carry_out(job)
    by_hand(small, module, optimiser, range(total), STREAM)
    second, third = moved(job.params), moved(job.params, seed=1)
    stream = ("client", 2, "dispatch", 9)
    again = replace(job, params=second, memory=first.memory, stream=stream)
    found = solver.carry_out(replace(again, swaps=(Swap(4, third, {}),)))
    for model, steps in ((second, range(4)), (third, range(4, total))):
        receive(model)
        by_hand(small, module, optimiser if keep else make(), steps, stream)
    shared = module.body if parts is HEAD else module
    torch.testing.assert_close(found.upload, vector_of(shared), rtol=1e-8, atol=1e-10)
    if parts is HEAD:
        torch.testing.assert_close(found.memory[PERSONAL], vector_of(module.head))
    kept = {f"optimizer.{name}" for name in ours.kept}
    assert (found.memory.keys() - {PERSONAL} == kept) == keep


class Momentum(ClientStep):
    """Of its own, by the name that an optimiser has for its."""

    @property
    def keeps(self):
        return ("momentum",)

    def after(self, session):
        session.memory["momentum"] = session.memory.get("momentum", torch.zeros(2)) + 1


def test_what_a_step_keeps_is_not_what_an_optimiser_keeps_by_the_same_name(small):
    solver = AutogradSolver(network(), small, SEED)
    plain = job_of(solver, replace(TASK, keep_optimizer=True))
    both = replace(plain, task=replace(plain.task, client_steps=(Momentum(),)))
    for _ in range(2):
        found, expected = solver.carry_out(both), solver.carry_out(plain)
        both, plain = replace(both, memory=found.memory), replace(plain, memory=expected.memory)
    assert torch.equal(found.upload, expected.upload)
    assert found.memory["momentum"].tolist() == [2.0, 2.0]
    assert torch.equal(found.memory["optimizer.momentum"], expected.memory["optimizer.momentum"])


@pytest.mark.parametrize("optimizer", [Sgd(), Adam(), AdamW()], ids=lambda o: type(o).__name__)
@pytest.mark.parametrize("keep", [True, False])
def test_of_a_gradient_the_shared_part_is_uploaded_and_the_own_part_takes_its_step(
    small, optimizer, keep
):
    """Twice, since what is kept then belongs to the own part alone."""
    solver = AutogradSolver(network(plain=True), small, SEED, HEAD)
    task = replace(TASK, optimizer=optimizer, upload="gradient", keep_optimizer=keep)
    start, job, module = solver.layout.read(), job_of(solver, task), network(plain=True)
    moments = optimizer.begin(vector_of(module.head))
    x, y = small.x[small.train[2]].double(), small.y[small.train[2]]
    for number in range(3):
        stream = ("client", 2, "dispatch", number)
        found = solver.carry_out(replace(job, stream=stream))
        rows = rng(SEED, *stream, "epoch", 0).permutation(len(y))[:5]
        module.zero_grad()
        nn.functional.cross_entropy(module(x[rows]), y[rows]).backward()
        theta = vector_of(module)
        grad = torch.cat([p.grad.flatten() for p in module.parameters()])
        optimizer.regularise(theta, grad)
        torch.testing.assert_close(found.upload, grad[: len(start)])
        own = theta[len(start) :].clone()
        if not keep:
            moments = optimizer.begin(own)
        optimizer.step(own, grad[len(start) :], moments, task.lr)
        torch.testing.assert_close(found.memory[PERSONAL], own)
        nn.utils.vector_to_parameters(own, module.head.parameters())
        job = replace(job, memory=found.memory)


# -- both solvers ---------------------------------------------------------------------------------


def stack() -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(12, 9), nn.ReLU(), nn.Linear(9, 4))


def single(job: Job) -> Job:
    """The same, in single precision."""
    vectors = {name: value.float() for name, value in job.vectors.items()}
    memory = {name: value.float() for name, value in job.memory.items()}
    return replace(job, params=job.params.float(), vectors=vectors, memory=memory)


@needs_compiler
@pytest.mark.parametrize("personal", ["head", "body", "0.bias", "2.weight"])
@pytest.mark.parametrize("upload", ["model", "delta", "gradient"])
@pytest.mark.parametrize("objective", ["plain", "proximal:mu=0.5"])
def test_the_native_solver_trains_own_parts_as_torch_does(small, personal, upload, objective):
    """Which does it in double precision here."""
    native = NativeSolver(stack(), small, SEED, Parts([personal]))
    plain = AutogradSolver(stack().double(), small, SEED, Parts([personal]))
    task = replace(TASK, upload=upload, objective=objective)
    for vectors in ({}, {"anchor": moved(plain.layout.read())}):
        job = job_of(plain, task, vectors=vectors)
        job = replace(job, memory={PERSONAL: moved(job.memory[PERSONAL])})
        found, expected = native.carry_out(single(job)), plain.carry_out(job)
        torch.testing.assert_close(found.upload.double(), expected.upload, rtol=1e-5, atol=1e-6)
        own = found.memory[PERSONAL].double()
        torch.testing.assert_close(own, expected.memory[PERSONAL], rtol=1e-5, atol=1e-6)
        assert not torch.allclose(own, job.memory[PERSONAL])


def test_frozen_numbers_are_those_of_the_module_and_are_not_trained(small):
    solver = AutogradSolver(network(), small, SEED, Parts(frozen=["body.*", "norm"]))
    module = solver.layout.module
    before = {name: value.clone() for name, value in module.state_dict().items()}
    upload, _, memory = solver.carry_out(job_of(solver))
    assert memory == {} and len(upload) == solver.layout.size == 9 * 4 + 4
    assert not torch.equal(
        upload, torch.cat([before["head.weight"].flatten(), before["head.bias"]])
    )
    for name, value in module.state_dict().items():
        assert torch.equal(value, before[name]) == (not name.startswith("head"))


def test_an_urgent_request_makes_the_epoch_in_progress_the_last(small):
    trainer = AutogradSolver(network(), small, SEED)
    task = Task(epochs=4, batch_size=4)
    whole = Job(0, trainer.layout.read(), task, STREAM)
    epoch = task.batches(small.samples[0])
    for done in (1, epoch - 1, epoch):
        session = trainer.begin(whole)
        session.advance(done)
        session.stop()
        session.advance()
        ended = epoch if done < epoch else 2 * epoch
        assert session.step == ended and session.finished
        expected = trainer.carry_out(replace(whole, last_step=ended))
        assert torch.equal(session.finish().upload, expected.upload)
    session.stop()
    assert session.last == ended  # it has ended already


def test_a_step_that_changes_memory_in_place_leaves_the_job_as_it_was(small):
    solver = AutogradSolver(network(), small, SEED)
    job = replace(
        job_of(solver), task=replace(TASK, client_steps=(Counts(),)), memory={"n": torch.zeros(1)}
    )
    for _ in range(3):
        assert solver.carry_out(job).memory["n"].tolist() == [1.0]
    assert job.memory["n"].tolist() == [0.0]


class Counts(ClientStep):
    """How often the client has trained."""

    @property
    def keeps(self):
        return ("n",)

    def after(self, session):
        session.memory["n"] += 1


class Keeps(ClientStep):
    """Whatever it was told to, before the training or after it."""

    value: Any = None
    names: tuple[str, ...] = ("mine",)
    early: bool = False

    @property
    def keeps(self):
        return self.names

    def before(self, session):
        if self.early:
            session.memory["mine"] = self.value

    def after(self, session):
        if not self.early:
            session.memory["mine"] = self.value


@pytest.mark.parametrize("early", [True, False])
@pytest.mark.parametrize(
    ("value", "found"),
    [
        (torch.zeros(2, 3), r"torch.float32 of shape \[2, 3\]"),
        (torch.tensor(1.0), r"torch.float32 of shape \[\]"),
        (torch.zeros(0), r"torch.float32 of shape \[0\]"),
        (torch.arange(3), r"torch.int64 of shape \[3\]"),
        ([1.0, 2.0], "a list"),
    ],
)
def test_what_cannot_be_kept_names_the_step_the_name_and_the_shape(small, value, found, early):
    solver = AutogradSolver(network(), small, SEED)
    steps = (Mask(0.5), Keeps(value, early=early))
    with pytest.raises(PolytempoError, match=rf"step Keeps keeps 'mine' as {found}; expected"):
        solver.carry_out(job_of(solver, replace(TASK, client_steps=steps)))


def test_a_step_says_what_it_keeps(small):
    """By that, a training knows whether it can forget what a multicast has replaced."""
    solver = AutogradSolver(network(), small, SEED)
    silent = replace(TASK, client_steps=(Keeps(torch.ones(1), names=()), Mask(0.5)))
    with pytest.raises(PolytempoError, match=r"Keeps stored 'mine' .* `keeps`"):
        solver.carry_out(job_of(solver, silent))
    with pytest.raises(PolytempoError, match="two client steps keep 'n'"):
        replace(TASK, client_steps=(Counts(), Counts()))


@pytest.mark.parametrize("name", [PERSONAL, "optimizer.momentum"])
def test_names_of_the_clients_own_part_and_of_its_optimiser_are_taken(small, name):
    solver = AutogradSolver(network(), small, SEED)
    task = replace(TASK, client_steps=(Keeps(torch.ones(1), names=(name,)),))
    with pytest.raises(PolytempoError, match=f"client step Keeps keeps '{name}'.* another"):
        solver.carry_out(job_of(solver, task))
