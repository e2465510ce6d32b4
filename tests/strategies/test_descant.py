"""Descant: the step that overshoots nobody, the label prior, the client's own line."""

import math
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch
from dispatching import dispatch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from polytempo import Context, Federation, Task, simulate
from polytempo.core.client_steps import Gap, Line, Prior
from polytempo.core.errors import PolytempoError, Refused
from polytempo.core.messages import Staleness, Update
from polytempo.core.optimizer import Sgd
from polytempo.strategies import Descant
from polytempo.training import Exam, Job, make_executor
from polytempo.training.solvers.native.solver import NativeSolver
from solving import NATIVE, needs_compiler

D = 6


def ready(clients=4, initial=None, hold_out=0.0, **options) -> Descant:
    strategy = Descant(hold_out=hold_out, **options)
    start = torch.zeros(D, dtype=torch.float64) if initial is None else initial
    strategy.setup(Context(start, [10] * clients, Task(), seed=0))
    return strategy


def unit(place: int) -> torch.Tensor:
    return torch.eye(D, dtype=torch.float64)[place]


# -- the step -----------------------------------------------------------------------------------


def test_steps_by_hand():
    """n = 4, s = (1 + tau)^-1/2 / (1 + 0.3 t / 4)^1/2."""
    strategy = ready()
    for client in (0, 1, 2):
        dispatch(strategy, client)
    strategy.fold(Update(0, 0, unit(0), 10), Staleness(0, 0))
    first = 1 / math.sqrt(1.075)
    torch.testing.assert_close(strategy.model_for(0), first * unit(0))
    # Half of what client 1 proposes is what client 0 has brought already.
    strategy.fold(Update(1, 1, unit(0) + unit(1), 10), Staleness(1, 1))
    rate = 1 / math.sqrt(2) / math.sqrt(1.15)
    left = 1 - first / 2
    second = first * unit(0) + rate * left * (unit(0) + unit(1))
    torch.testing.assert_close(strategy.model_for(0), second)
    # Client 2 proposes to go back: what the others did is not undone more than once.
    strategy.fold(Update(2, 2, -unit(0), 10), Staleness(2, 2))
    rate = 1 / math.sqrt(3) / math.sqrt(1.225)
    third = second - rate * (1 + float(second[0])) * unit(0)
    torch.testing.assert_close(strategy.model_for(0), third)


def test_a_way_that_others_have_gone_already_is_not_gone_again():
    strategy = ready(a=0.0, fade=0.0)
    for client in (0, 1):
        dispatch(strategy, client)
    strategy.fold(Update(0, 0, 2 * unit(0), 10), Staleness(0, 0))
    strategy.fold(Update(1, 1, unit(0), 10), Staleness(1, 1))
    torch.testing.assert_close(strategy.model_for(0), 2 * unit(0))


def test_no_displacement_moves_nothing():
    strategy = ready()
    dispatch(strategy, 0)
    strategy.fold(Update(0, 0, torch.zeros(D, dtype=torch.float64), 10), Staleness(0, 0))
    assert not strategy.model_for(0).any()


class Training:
    """As much of a session as a line looks at."""

    def __init__(self, received, memory, targets=(0, 1)):
        self.received = self.result = received
        self.memory, self.parameters = memory, len(received)
        self.targets = lambda: torch.tensor(targets)

    def put(self, model):
        self.result = model

    def trained(self):
        return self.result


def trained(step, received, memory, train, **options):
    """What a client with this step uploads if `train` is what its local steps do."""
    session = Training(received, memory, **options)
    step.before(session)
    session.put(train(session.result))
    step.after(session)
    return session.result - received


def distances(draws, project, clients=12, updates=80, beta=0.8, cut=2.0):
    """Clients with quadratic losses that have their minimum in common train to nearly the end, from
    where their lines lead, and arrive after long and uneven delays: how far from the minimum the
    server is, over time."""
    shrinks = []  # what training leaves of the way to the minimum, which is 0
    for _ in range(clients):
        axes = np.linalg.qr(draws.normal(size=(D, D)))[0]
        shrinks.append(torch.from_numpy(axes @ np.diag(draws.uniform(0, 1, D)) @ axes.T))
    strategy = ready(
        clients,
        torch.from_numpy(draws.normal(size=D)),
        project=project,
        a=0.0,
        fade=0,
        beta=beta,
        cut=cut,
    )
    [line] = [step for step in strategy.task(0).client_steps if isinstance(step, Line)]
    memories = [
        {"line": torch.from_numpy(draws.normal(size=D)), "line.trainings": torch.ones(1)}
        for _ in range(clients)
    ]
    sent = {}
    for client in range(clients):
        dispatch(strategy, client)
        sent[client] = strategy.t, strategy.model_for(client)
    found = [float(strategy.model_for(0).norm())]
    for _ in range(updates):
        client = int(draws.integers(clients))
        begin, start = sent[client]
        way = trained(line, start, memories[client], lambda x, c=client: shrinks[c] @ x)
        age = strategy.t - begin
        strategy.fold(Update(client, 0, way, 10), Staleness(age, age))
        dispatch(strategy, client)
        sent[client] = strategy.t, strategy.model_for(client)
        found.append(float(strategy.model_for(0).norm()))
    return found


@given(st.integers(0, 2**32), st.floats(0.01, 1))
def test_it_never_moves_away_from_a_common_minimum_of_quadratics(seed, beta):
    """Whatever lines clients have, and however much they keep of them."""
    found = distances(np.random.default_rng(seed), project=True, beta=beta)
    assert all(b <= a * (1 + 1e-12) + 1e-12 for a, b in pairwise(found))


def test_without_looking_at_what_others_did_it_diverges_there():
    found = distances(np.random.default_rng(0), False, clients=30, updates=200, cut=0)
    assert max(found) > 20


def test_ways_that_are_longer_than_twice_the_usual_are_cut():
    """By hand: the median of 1 and 5 is 3, so 10 is cut to 6; then it is 5, and 8 stays."""
    strategy = ready(a=0.0, fade=0.0)
    for t, (length, gone) in enumerate([(1.0, 1.0), (5.0, 2.0), (10.0, 6.0), (8.0, 8.0)]):
        dispatch(strategy, 0)
        before = strategy.model_for(0)
        way = length * unit(t)
        strategy.fold(Update(0, t, way, 10), Staleness(0, 0))
        torch.testing.assert_close(strategy.model_for(0) - before, gone * unit(t))
        assert way.norm() == length


def test_ways_of_no_length_are_not_usual():
    """Most clients have nothing to add; who has is not cut to nothing."""
    strategy = ready(a=0.0, fade=0.0)
    for t, way in enumerate([0 * unit(0), 0 * unit(0), 0 * unit(0), unit(1)]):
        dispatch(strategy, 0)
        strategy.fold(Update(0, t, way, 10), Staleness(0, 0))
    torch.testing.assert_close(strategy.model_for(0), unit(1))


def test_what_is_usual_is_that_of_the_last_fifty():
    strategy = ready(a=0.0, fade=0.0)
    for t in range(50):
        dispatch(strategy, 0)
        strategy.fold(Update(0, t, 100 * unit(0), 10), Staleness(0, 0))
    for t in range(50, 80):
        dispatch(strategy, 0)
        strategy.fold(Update(0, t, unit(0), 10), Staleness(0, 0))
    before = strategy.model_for(0)
    dispatch(strategy, 0)
    strategy.fold(Update(0, 80, 100 * unit(1), 10), Staleness(0, 0))
    torch.testing.assert_close(strategy.model_for(0) - before, 2 * unit(1))


def test_the_cut_saves_what_would_diverge():
    asked = dict(clients=20, updates=200, lr=0.3, batch_size=8, adapt_epochs=0, solver="torch")
    assert simulate("synthetic", strategy="descant", **asked).accuracy > 0.85
    with pytest.raises(PolytempoError, match="diverged"):
        simulate("synthetic", strategy="descant:cut=0", **asked)


def test_statistics_move_towards_those_of_the_client_and_never_beyond():
    """The last number stands for a variance. Others have gone back by then, so that the rest goes
    three times as far as was proposed: a variance that did would be below zero."""
    strategy = Descant(a=0.0, fade=0.0, hold_out=0.0)
    start = torch.tensor([0.0, 0.0, 1.0], dtype=torch.float64)
    strategy.setup(Context(start, [10] * 4, Task(), seed=0, tensors=[1, 1]))
    for client in (0, 1):
        dispatch(strategy, client)
    first, second = (torch.tensor(way).double() for way in ([-2.0, 0, -0.25], [1.0, 0, -0.5]))
    strategy.fold(Update(0, 0, first, 10), Staleness(0, 0))
    strategy.fold(Update(1, 1, second, 10), Staleness(1, 1))
    assert strategy.model_for(0).tolist() == [1.0, 0.0, 0.5]


def test_what_is_served_is_a_moving_average():
    strategy = ready(clients=3, horizon=1.0)
    mean = torch.zeros(D, dtype=torch.float64)
    for t in range(1, 9):
        dispatch(strategy, 0)
        strategy.fold(Update(0, t, unit(t % D), 10), Staleness(0, 0))
        mean = mean + (strategy.model_for(0) - mean) / min(3.0, max(1.0, t / 2))
        torch.testing.assert_close(strategy.serve(1), mean)


def test_only_what_clients_in_training_hold_is_kept():
    strategy = ready()
    for t in range(10):
        dispatch(strategy, 0)
        strategy.fold(Update(0, t, unit(0), 10), Staleness(0, 0))
    assert len(strategy.history) == 1
    dispatch(strategy, 1)
    strategy.lost(1)
    assert len(strategy.history) == 1


def test_options_become_the_task():
    steps = ready(beta=0.25, memory=3, prior=0.2).task(0).client_steps
    assert steps == (Prior(0.2), Line(0.25, 3))
    assert ready(beta=0, prior=0).task(0).client_steps == ()
    assert ready().task(0).upload == "delta"
    assert ready().task(0).optimizer == Sgd()


# -- the prior ----------------------------------------------------------------------------------


def test_the_prior_is_the_logarithm_of_label_frequencies():
    found = Prior(0.5).offset(torch.tensor([2, 2, 0, 2]), 4)
    expected = np.log(np.array([1.5, 0.5, 3.5, 0.5]) / 6)
    torch.testing.assert_close(found, torch.from_numpy(expected).float())


@pytest.mark.parametrize("targets", [torch.rand(5), torch.rand(5, 3), torch.ones(5, 3).long()])
def test_there_is_none_where_there_are_no_labels(targets):
    assert Prior().offset(targets, 3) is None


def module() -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(12, 7), nn.ReLU(), nn.Linear(7, 4))


class Shifted(nn.Module):
    """The same network, with constants added to its outputs."""

    def __init__(self, offset):
        super().__init__()
        self.inner, self.offset = module(), offset

    def forward(self, x):
        return self.inner(x) + self.offset


TASK = Task(epochs=2, batch_size=5, lr=0.05, optimizer=Sgd(momentum=0.9, weight_decay=0.1))


@pytest.mark.parametrize("solver", ["torch", NATIVE])
@pytest.mark.parametrize("batch", [5, 64])
def test_training_under_a_prior_is_training_with_constants_at_the_outputs(small, solver, batch):
    """Constants, not parameters: weight decay does not touch them."""
    task = replace(TASK, batch_size=batch)
    for client in range(3):
        offset = Prior().offset(small.y[small.train[client]], 4)
        exact = make_executor(Shifted(offset), small, 3, solver="torch", name="serial")
        with_prior = make_executor(module(), small, 3, solver=solver, name="serial")
        start = exact.solver.layout.read()
        expected = exact.train(Job(client, start, task, ("client", client)))
        asked = replace(task, client_steps=(Prior(),))
        found = with_prior.train(Job(client, start, asked, ("client", client)))
        without = with_prior.train(Job(client, start, task, ("client", client)))
        torch.testing.assert_close(found, expected, atol=2e-6, rtol=1e-5)
        assert float((found - without).norm()) > 0.01


@pytest.mark.parametrize("solver", ["torch", NATIVE])
def test_a_client_is_tested_under_its_prior_and_with_its_line(small, solver):
    backend = make_executor(module(), small, 3, solver=solver, name="serial")
    model = backend.solver.layout.read()
    lines = [torch.full_like(model, 0.01 * (client + 1)) for client in range(3)]
    more = {"line.share": torch.tensor([0.5]), "line.trainings": torch.ones(1)}
    memories = [{"line": 2 * line, **more} for line in lines]
    exam = Exam(model, [0, 1, 2], memories, (Prior(), Line()))
    [scores] = backend.evaluate([exam])
    for client, score in enumerate(scores):
        offset = Prior().offset(small.y[small.train[client]], 4)
        network = module()
        nn.utils.vector_to_parameters(model + lines[client], network.parameters())
        x = small.prepare(small.x[small.test[client]])
        y = small.y[small.test[client]]
        outputs = network(x) + offset
        assert score.sums["correct"] == float((outputs.argmax(1) == y).sum())
        loss = nn.functional.cross_entropy(outputs, y, reduction="sum").item()
        assert score.sums["loss"] == pytest.approx(loss, rel=1e-5)


def test_the_prior_is_in_the_model_that_a_user_gets(small):
    result = simulate(small, model=module, strategy="descant", updates=40, lr=0.05, adapt_epochs=0)
    correct = []
    for client in range(small.clients):
        network = module()
        network.load_state_dict(result.model(client))
        x, y = small.prepare(small.x[small.test[client]]), small.y[small.test[client]]
        correct.append(float((network(x).argmax(1) == y).float().mean()))
    assert result.history[-1]["accuracy"] == pytest.approx(np.mean(correct))


# -- the line -----------------------------------------------------------------------------------


def test_the_line_goes_on_and_only_what_is_new_is_uploaded():
    """By hand, in two dimensions. The first trainings add (1, 1) to wherever they start."""
    step, memory = Line(share=0.5, memory=2), {}
    start, added = torch.tensor([10.0, 0.0]), torch.tensor([1.0, 1.0])
    way = trained(step, start, memory, lambda x: x + added)
    assert way.tolist() == [1.0, 1.0]  # there was nothing to go on from
    assert memory["line"].tolist() == [1.0, 1.0]
    # From (10.25, 0.25), by a quarter of the line, to (11.25, 1.25): the half-space
    # x + y >= 12.5 is 5/4 of the step away.
    way = trained(step, start, memory, lambda x: x + added)
    assert way.tolist() == [1.25, 1.25]
    assert memory["line"].tolist() == [1.125, 1.125]
    assert memory["line.share"].tolist() == [0.5]
    assert memory["line.trainings"].tolist() == [2.0]
    # From (10.28125, 0.28125) back by 1: x <= 9.28125 is 0.71875 away.
    way = trained(step, start, memory, lambda x: x + torch.tensor([-1.0, 0.0]))
    assert way.tolist() == [-0.71875, 0.0]
    assert memory["line"].tolist() == [0.203125, 0.703125]
    # Not so far back: the shared model is beyond that already.
    way = trained(step, start, memory, lambda x: x + torch.tensor([-0.03125, 0.0]))
    assert way.tolist() == [0.0, 0.0]


def test_statistics_have_no_line():
    memory = {}
    session = Training(torch.zeros(3), memory)
    session.parameters = 2
    session.put(torch.tensor([1.0, 0.0, 4.0]))
    Line(share=0.5).after(session)
    assert session.result.tolist() == [1.0, 0.0, 4.0]
    assert memory["line"].tolist() == [1.0, 0.0, 0.0]


@pytest.mark.parametrize("solver", ["torch", NATIVE])
def test_a_client_trains_from_its_line_which_stays_at_home(small, solver):
    """The upload is the way to the half-space behind the trained model, in double precision."""
    backend = make_executor(module(), small, 3, solver=solver, name="serial")
    start = backend.solver.layout.read()
    plain, asked = replace(TASK, upload="delta"), (Line(0.75, memory=3),)
    line, memory = torch.zeros_like(start).double(), {}
    for number in range(1, 5):
        stream = ("client", 1, "dispatch", number)
        added = backend.train(Job(1, start + 0.5625 * line.float(), plain, stream)).double()
        job = Job(1, start, replace(plain, client_steps=asked), stream, memory=memory)
        upload, extras, memory = backend.carry_out(job)
        assert not extras
        way = max(0.0, float((0.5625 * line + added) @ added) / float(added @ added)) * added
        torch.testing.assert_close(upload.double(), way, atol=1e-5, rtol=1e-4)
        line = line + (0.5625 * line + added - line) / min(number, 3)
        torch.testing.assert_close(memory["line"].double(), line, atol=1e-5, rtol=1e-4)
        assert memory["line.trainings"].tolist() == [number]


def test_who_has_not_trained_yet_uses_what_it_is_served():
    served = torch.arange(3.0)
    assert Line().use(served, {}) is served
    memory = {"line": torch.ones(3), "line.share": torch.tensor([0.25])}
    torch.testing.assert_close(Line(0.5).use(served, memory), served + 0.25)


# -- how much of the line -----------------------------------------------------------------------


@pytest.mark.parametrize("solver", ["torch", NATIVE])
def test_losses_of_samples_that_are_never_trained_on(small, solver):
    """Against plain torch: a quarter of the samples has no influence on any training, and it is
    their losses that are uploaded."""
    backend = make_executor(module(), small, 3, solver=solver, name="serial")
    start = backend.solver.layout.read()
    task = replace(TASK, upload="delta", client_steps=(Prior(), Line(0.75, hold_out=0.25)))
    job = Job(1, start, task, ("client", 1))
    session = backend.solver.begin(job)
    held, count = session.held_out, small.samples[1]
    assert len(held) == count // 4
    batches = session.batches(range(session.last))[0]
    assert set(batches) == set(range(count)) - set(held)
    _, extras, memory = backend.carry_out(job)
    again = replace(job, params=start + 0.1, stream=("client", 1, "again"), memory=memory)
    found = backend.carry_out(again).extras["line.losses"]
    shard = small.train[1]
    x, y = small.prepare(small.x[shard][held]), small.y[shard][held]
    offset = Prior().offset(small.y[shard], 4)

    def loss(share):
        network = module()
        vector = start + 0.1 + share * memory["line"]
        nn.utils.vector_to_parameters(vector, network.parameters())
        return nn.functional.cross_entropy(network(x) + offset, y, reduction="sum").item()

    added = [loss(share) - loss(0) for share in (0.25, 0.5, 0.75, 1)]
    torch.testing.assert_close(found, torch.tensor([added]), atol=1e-4, rtol=1e-4)
    assert not extras["line.losses"].any()  # there was no line yet


@pytest.mark.parametrize("solver", ["torch", NATIVE])
def test_held_out_samples_are_the_same_on_a_device_of_ones_own_and_in_inner_trainings(
    small, solver
):
    """A deployed client is the only one on its machine, so its number there is 0."""
    backend = make_executor(module(), small, 3, solver=solver, name="serial")
    task = replace(TASK, client_steps=(Line(hold_out=0.25),))
    pair = next((a, b) for a in range(8) for b in range(a) if small.samples[a] == small.samples[b])
    jobs = [Job(client, backend.solver.layout.read(), task, ("x",)) for client in pair]
    session, alone = (backend.solver.begin(job) for job in jobs)
    assert len(session.held_out) and set(session.held_out) == set(alone.held_out)
    begun, begin = [], backend.solver.begin

    def recorded(job):
        begun.append(begin(job))
        return begun[-1]

    backend.solver.begin = recorded
    session.train(backend.solver.layout.read(), TASK, "inner")
    [inner] = begun
    assert not set(inner.batches(range(inner.last))[0]) & set(session.held_out)


def test_a_step_may_not_hold_out_more_than_half(small):
    class Greedy(Line):
        @property
        def holds_out(self):
            return 0.6

    backend = make_executor(module(), small, 3, solver="torch", name="serial")
    task = replace(TASK, client_steps=(Greedy(),))
    with pytest.raises(PolytempoError, match=r"holds out 0\.6 of the samples; expected a share"):
        backend.solver.begin(Job(0, backend.solver.layout.read(), task, ("x",)))


@needs_compiler
def test_samples_that_are_twice_in_a_batch_count_twice_in_every_form_of_a_layer(monkeypatch):
    """Many features and few samples: the native solver takes the first layer in its dual form, and
    samples that are held out have others in their places."""
    federation = Federation.load(
        "synthetic:groups=1,samples=40,features=200,classes=3", clients=2, partition="iid", seed=1
    )
    network = nn.Sequential(nn.Linear(200, 8), nn.ReLU(), nn.Linear(8, 3))
    step = Line(hold_out=0.4)
    task = Task(epochs=10, batch_size=8, lr=0.05, client_steps=(step,), upload="delta")
    found, dual, usual = [], [], NativeSolver._dual
    monkeypatch.setattr(NativeSolver, "_dual", lambda *a: dual.append(usual(*a)) or dual[-1])
    for solver in ("torch", "native"):
        backend = make_executor(network, federation, 3, solver=solver, name="serial")
        job = Job(0, backend.solver.layout.read(), task, ("x",))
        session = backend.solver.begin(job)
        rows, ends = session.batches(range(session.last))
        assert any(len({*batch}) < len(batch) for batch in np.split(rows, ends[:-1]))
        found.append(backend.carry_out(job).upload)
    assert dual[-1]
    assert float((found[0] - found[1]).norm() / found[0].norm()) < 1e-4


def test_a_line_that_leads_astray_does_not_make_an_update_invalid():
    class Astray(Training):
        held_out, extras = np.arange(2), {}

        def __init__(self, losses):
            super().__init__(torch.zeros(2), {})
            self.losses = iter(losses)

        def loss(self, model, rows):
            return next(self.losses)

    for losses, expected in (
        ([1.0, 1.0, 2.0, 1e9, math.nan], [0, 1, 9, 9]),
        ([-2.0, -3.0, -1e9, math.inf, math.nan], [-1, -18, 18, 18]),  # some losses are negative
    ):
        session = Astray(losses)
        Line(hold_out=0.1).after(session)
        assert session.extras["line.losses"].tolist() == [expected]


def told(strategy, losses):
    """What the line adds to the first of these."""
    added = torch.tensor([[each - losses[0] for each in losses[1:]]])
    update = Update(0, 0, torch.zeros(D, dtype=torch.float64), 40, {"line.losses": added})
    strategy.fold(update, Staleness(0, 0))


def share(strategy) -> float:
    [line] = [step for step in strategy.task(0).client_steps if isinstance(step, Line)]
    return line.share


SHARES = np.array([0, 0.25, 0.5, 0.75, 1])


@given(st.floats(-0.5, 1.5), st.floats(0.1, 10))
def test_the_share_is_where_the_losses_are_lowest(best, height):
    strategy = ready(hold_out=0.1)
    assert share(strategy) == 0.5
    for _ in range(5):
        dispatch(strategy, 0)
        told(strategy, (1 + height * (SHARES - best) ** 2).tolist())
    assert share(strategy) == pytest.approx(np.clip(best, 0, 1), abs=1e-4)
    assert share(ready(hold_out=0.1, beta=0.3)) == 0.3


def test_losses_weigh_by_their_sums_and_recent_ones_count_most():
    """One client, then another whose losses are the mirror image, a quarter as large."""
    strategy = ready(hold_out=0.1)
    for losses in (SHARES**2 * 4, (SHARES - 1) ** 2):
        dispatch(strategy, 0)
        told(strategy, losses.tolist())
    # The first is averaged with weight 1, then both with 1: the second replaces it.
    assert share(strategy) == pytest.approx(1.0)
    for _ in range(10):
        dispatch(strategy, 0)
        told(strategy, (SHARES**2 * 4).tolist())
    assert share(strategy) < 0.05


@pytest.mark.parametrize("size", [1e6, 1e38])
@pytest.mark.parametrize("honest", [0, 1, 40])
def test_absurd_losses_are_forgotten(honest, size):
    """Whole lines are good for all but one client, whose losses are absurd and say the contrary:
    they count for ten, which is less than what others say after 60 in a mean over 20."""
    strategy = ready(hold_out=0.1)
    for absurd in [*[False] * honest, True, *[False] * 60]:
        dispatch(strategy, 0)
        told(strategy, (size * SHARES**2 if absurd else (SHARES - 1) ** 2).tolist())
    assert share(strategy) > 0.9


@pytest.mark.parametrize(("clients", "arrivals"), [(4, 60), (30, 90)])
def test_nothing_is_held_out_once_beta_has_been_measured(clients, arrivals):
    """After three times n arrivals, 60 at least: beta stays, and updates bring no losses."""
    strategy = ready(clients, hold_out=0.1, measuring=3.0)
    for _ in range(arrivals):
        steps = Prior(), Line(share(strategy), hold_out=0.1), Gap(0.1)
        assert strategy.task(0).client_steps == steps
        dispatch(strategy, 0)
        told(strategy, (1 + (SHARES - 0.7) ** 2).tolist())
    assert share(strategy) == pytest.approx(0.7, abs=1e-4)
    assert strategy.task(0).client_steps == (Prior(), Line(share(strategy)))
    dispatch(strategy, 0)
    told(strategy, (1 + (SHARES - 0.1) ** 2).tolist())  # was asked before, and still counts
    found = share(strategy)
    assert found < 0.7
    dispatch(strategy, 0)
    strategy.fold(Update(0, 0, unit(0), 10), Staleness(0, 0))
    assert strategy.task(0).client_steps == (Prior(), Line(found))


@pytest.mark.parametrize("size", [1e2, 1e6, 1e38])
def test_absurd_losses_do_not_decide_even_if_they_come_last(size):
    strategy = ready(clients=40, hold_out=0.1)
    for absurd in [*[False] * 80, True]:
        dispatch(strategy, 0)
        told(strategy, (size * SHARES**2 if absurd else (SHARES - 1) ** 2).tolist())
    assert share(strategy) > 0.7  # without a limit it would be 0


def test_without_anything_held_out_the_default_stays():
    strategy = ready(hold_out=0.1)
    dispatch(strategy, 0)
    told(strategy, [0.0] * 5)
    assert share(strategy) == 0.5


def test_where_beta_is_set_nothing_is_held_out_for_it():
    steps = ready(hold_out=0.1, beta=0.3).task(0).client_steps
    assert steps == (Prior(), Line(0.3), Gap(0.1))
    assert ready(hold_out=0.1, beta=0).task(0).client_steps == (Prior(), Gap(0.1))
    assert ready(hold_out=0.1, beta=0, decay=0).task(0).client_steps == (Prior(),)


# -- weight decay ---------------------------------------------------------------------------------


def told_of_the_gap(strategy, held, others):
    dispatch(strategy, 0)
    losses = torch.tensor([[held, others]])
    update = Update(0, 0, torch.zeros(D, dtype=torch.float64), 40, {"gap.losses": losses})
    strategy.fold(update, Staleness(0, 0))


def decay(strategy) -> float:
    return strategy.task(0).optimizer.weight_decay


def test_weight_decay_is_in_proportion_to_what_is_known_by_heart():
    strategy = ready(hold_out=0.1, decay=0.02)
    assert decay(strategy) == 1e-4  # the user's
    for _ in range(3):
        told_of_the_gap(strategy, 8.0, 6.8)
        assert decay(strategy) == pytest.approx(0.02 * 0.15)
    told_of_the_gap(strategy, 2.0, 2.0)  # counts for two thirds: 4 and 3.6
    assert decay(strategy) == pytest.approx(0.02 * 0.1)
    told_of_the_gap(strategy, 8.0, 1.0)  # too much to be believed
    assert decay(strategy) == pytest.approx(0.02 * 0.2)
    for _ in range(100):
        told_of_the_gap(strategy, 2.0, 3.0)
    assert decay(strategy) == 1e-4
    assert decay(ready(hold_out=0.1, decay=0)) == 1e-4


def test_the_gap_of_one_client_counts_for_ten_at_most():
    strategy = ready(200, hold_out=0.1, decay=1.0)
    for _ in range(400):
        told_of_the_gap(strategy, 1.0, 1.0)
    told_of_the_gap(strategy, 1e9, 0.0)
    assert 0.01 < decay(strategy) < 10 * 2**0.5 / 200


@pytest.mark.parametrize("solver", ["torch", NATIVE])
def test_the_gap_is_between_what_is_held_out_and_as_many_others(small, solver):
    """Against plain torch. With half of the samples held out, the others are all others."""
    backend = make_executor(module(), small, 3, solver=solver, name="serial")
    vector = backend.solver.layout.read() + 0.1
    client = next(each for each in range(8) if small.samples[each] % 2 == 0)
    task = replace(TASK, client_steps=(Prior(), Gap(0.5)))
    job = Job(client, vector, task, ("x",))
    held = backend.solver.begin(job).held_out
    shard, network = small.train[client], module()
    nn.utils.vector_to_parameters(vector, network.parameters())
    x, y = small.prepare(small.x[shard]), small.y[shard]
    each = nn.functional.cross_entropy(network(x) + Prior().offset(y, 4), y, reduction="none")
    out = torch.zeros(len(y), dtype=torch.bool)
    out[torch.as_tensor(held)] = True
    wanted = torch.stack([each[out].sum(), each[~out].sum()]).detach()
    found = backend.carry_out(job).extras["gap.losses"]
    torch.testing.assert_close(found, wanted[None], atol=1e-4, rtol=1e-4)


def test_nothing_is_said_of_a_gap_without_samples_or_finite_losses(small):
    backend = make_executor(module(), small, 3, solver="torch", name="serial")
    start = backend.solver.layout.read()
    for share, model in ((1e-9, start), (0.25, start * torch.nan)):
        task = replace(TASK, client_steps=(Gap(share),))
        session = backend.solver.begin(Job(1, model, task, ("x",)))
        Gap(share).after(session)
        assert session.extras["gap.losses"].tolist() == [[0.0, 0.0]]


# -- updates that make no sense -------------------------------------------------------------------


def test_too_many_losses_are_refused_and_harm_nothing():
    strategy = ready(hold_out=0.1)
    dispatch(strategy, 0)
    before = strategy.heard.mean.clone()
    with pytest.raises(Refused, match="sent 5 numbers as its losses; expected 4"):
        told(strategy, [1.0] * 6)
    assert strategy.t == 0 and torch.equal(strategy.heard.mean, before)
