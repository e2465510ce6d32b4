"""Native training of fully connected layers, above all in dual form: of few samples of many
features. Double precision is the judge."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from chains import uploads
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from polytempo import Federation, Plain, Proximal, Pull, Task
from polytempo.core.client_steps import Mask
from polytempo.core.layout import Parts
from polytempo.core.objective import Drift
from polytempo.core.optimizer import Adam, AdamW, Sgd
from polytempo.training import AutogradSolver, Exam, Job
from polytempo.training.jobs import Swap
from polytempo.training.solvers.native import solver as native_solver
from polytempo.training.solvers.native.layers import Unfit
from polytempo.training.solvers.native.solver import NativeSolver
from solving import needs_compiler, upload_of

pytestmark = needs_compiler
FEATURES, CLASSES = 40, 5
TASK = Task(epochs=5, batch_size=4, lr=0.05, optimizer=Sgd(momentum=0.9, weight_decay=0.02))
DUAL = {  # objectives that a layer in dual form can have
    "plain": Plain(),
    "proximal": Proximal(0.7),
    "cosine": Pull(0.8, "cosine"),
    "inner": Pull(0.8, "inner"),
    "away": Pull(-0.8, "cosine"),
}
OBJECTIVES = DUAL | {
    "proximal unsquared": Proximal(0.3, power=1),
    "l1": Pull(0.8, "l1"),
    "l2": Pull(0.8, "l2"),
}
MODELS = {"linear": [], "one hidden": [7], "two hidden": [9, 6]}


def draw(samples: int, features: int = FEATURES, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(100 * samples + seed)
    return torch.randn(samples, features, generator=generator)


def degenerate() -> Tensor:
    """Each sample three times, and features that nobody has: five dimensions for 15 samples."""
    x = draw(5).repeat(3, 1)
    x[:, ::4] = 0
    return x


SHARDS = {
    "few": draw(12),
    "many": draw(30),
    "lone last sample": draw(9),
    "fewer than a batch": draw(3),
    "one sample": draw(1),
    "degenerate": degenerate(),
    "many degenerate": degenerate().repeat(3, 1),
    "zeros": torch.zeros(6, FEATURES),
    "ragged": draw(14),
    "as many as features": draw(FEATURES),
    "a batch and one more": draw(17),
    "two batches and one more": draw(33),
}


def federation(*shards: Tensor) -> Federation:
    """Clients with these training samples, labelled at random."""
    generator = torch.Generator().manual_seed(0)
    clients = []
    for x in shards:
        y = torch.randint(CLASSES, (len(x),), generator=generator)
        clients.append((x, y, x[:2], y[:2]))
    return Federation.from_arrays(clients, classes=CLASSES)


def network(
    hidden: Sequence[int], features: int = FEATURES, between: type[nn.Module] = nn.ReLU
) -> nn.Module:
    layers: list[nn.Module] = [nn.Flatten()]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        for before, after in itertools.pairwise([features, *hidden, CLASSES]):
            layers += [nn.Linear(before, after), between()]
    return nn.Sequential(*layers[:-1])


@pytest.fixture
def duals(monkeypatch) -> list[int]:
    """The clients of all trainings in dual form."""
    clients: list[int] = []
    usual = NativeSolver._gram
    monkeypatch.setattr(
        NativeSolver, "_gram", lambda *given: clients.append(given[1]) or usual(*given)
    )
    return clients


def assert_same(found: tuple[Tensor, Tensor, Tensor, Tensor]) -> None:
    native, _, exact, start = found
    assert native.shape == exact.shape
    assert (native - exact).norm() <= 1e-5 * max(start.norm(), exact.norm())
    assert exact.norm() > 0 and not torch.equal(exact, start)


def elsewhere(module: nn.Module) -> Tensor:
    """Some vector that is not the model."""
    start = nn.utils.parameters_to_vector(module.parameters()).detach()
    return start + 0.3 * torch.randn(len(start), generator=torch.Generator().manual_seed(0))


# -- the same uploads ------------------------------------------------------------------------------


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("kind", OBJECTIVES)
def test_uploads_are_those_of_torch(duals, model, kind):
    task = replace(TASK, objective=OBJECTIVES[kind])
    for name, pays in (("few", True), ("many", False), ("degenerate", True)):
        duals.clear()
        assert_same(uploads(network(MODELS[model]), federation(SHARDS[name]), task))
        assert bool(duals) == (pays and kind in DUAL)


@pytest.mark.parametrize("name", SHARDS)
@pytest.mark.parametrize("model", ["linear", "two hidden"])
def test_on_all_kinds_of_data(model, name):
    for size, objective in ((4, Pull(0.5)), (16, Plain()), (64, Plain())):
        task = replace(TASK, batch_size=size, objective=objective)
        assert_same(uploads(network(MODELS[model]), federation(SHARDS[name]), task))


@pytest.mark.parametrize("upload", ["model", "delta", "gradient", "path"])
@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("weight_decay", [0.0, 0.02])
def test_with_and_without_momentum_and_weight_decay(upload, momentum, weight_decay):
    task = replace(TASK, upload=upload, optimizer=Sgd(momentum=momentum, weight_decay=weight_decay))
    for name in ("few", "many"):
        for objective in (Plain(), Pull(0.5)):
            given = replace(task, objective=objective)
            assert_same(uploads(network([7]), federation(SHARDS[name]), given))


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("kind", [*OBJECTIVES, "drift"])
def test_with_an_anchor_that_was_sent_along(duals, model, kind):
    """Which the dual form knows nothing of."""
    module, objective = network(MODELS[model]), (OBJECTIVES | {"drift": Drift()})[kind]
    anchor = elsewhere(module) * (0.02 if kind == "drift" else 1)  # it is a gradient there
    before = anchor.clone()
    for upload in ("model", "delta", "gradient"):
        task = replace(TASK, objective=objective, upload=upload, epochs=2)
        fed = federation(SHARDS["few"])
        found = uploads(module, fed, task, vectors={"anchor": anchor})
        assert_same(found)
        if kind not in ("plain", "drift"):  # it refers to the anchor, not to the model
            assert not torch.allclose(found[0], uploads(module, fed, task)[0])
    assert torch.equal(anchor, before)
    assert not duals or kind != "drift"


@pytest.mark.parametrize("kind", [Sgd, Adam, AdamW])
def test_the_gradient_holds_the_weight_decay_that_is_a_part_of_it(kind):
    """AdamW's is not."""
    task = replace(TASK, optimizer=kind(weight_decay=0.3), upload="gradient")
    assert_same(uploads(network([7]), federation(SHARDS["few"]), task))


@settings(max_examples=60)
@given(
    model=st.sampled_from(list(MODELS)),
    kind=st.sampled_from([kind for kind in OBJECTIVES if kind != "l1"]),
    name=st.sampled_from(list(SHARDS)),
    task=st.builds(
        Task,
        epochs=st.integers(1, 6),
        steps=st.none() | st.integers(1, 30),
        batch_size=st.integers(1, 20),
        lr=st.sampled_from([0.001, 0.05]),
        optimizer=st.builds(
            Sgd,
            momentum=st.sampled_from([0.0, 0.5, 0.9]),
            weight_decay=st.sampled_from([0.0, 1e-4, 0.1]),
        )
        | st.builds(
            lambda kind, **options: kind(**options),
            st.sampled_from([Adam, AdamW]),
            beta1=st.sampled_from([0.0, 0.9]),
            beta2=st.sampled_from([0.9, 0.999]),
            epsilon=st.just(1e-2),  # small ones turn rounding errors of nothing into whole steps
            weight_decay=st.sampled_from([0.0, 0.1]),
        ),
        upload=st.sampled_from(["model", "delta", "gradient"]),
    ),
    data=st.data(),
)
def test_any_job(model, kind, name, task, data):
    """Of layers and objectives that are smooth: a ReLU, or the sign of a difference, may fall on
    the other side of zero."""
    fed, module = federation(SHARDS[name]), network(MODELS[model], between=nn.Tanh)
    total = task.total_steps(fed.samples[0])
    first = data.draw(st.integers(0, total - 1))
    last = data.draw(st.none() | st.integers(first + 1, total))
    vectors = {"anchor": elsewhere(module)} if data.draw(st.booleans(), label="anchor") else {}
    task = replace(task, objective=OBJECTIVES[kind])
    assert_same(uploads(module, fed, task, first_step=first, last_step=last, vectors=vectors))


@pytest.mark.parametrize("objective", [Plain(), Pull(3.0), Pull(-3.0), Proximal(2.0)], ids=str)
def test_errors_do_not_grow_over_a_long_training(duals, objective):
    task = replace(TASK, epochs=60, batch_size=6, objective=objective)
    assert_same(uploads(network([7], between=nn.Tanh), federation(SHARDS["few"]), task))
    assert duals


def test_part_of_a_schedule_is_not_the_whole():
    for name in ("few", "many"):
        results: list[Tensor] = []
        for first, last in [(0, None), (2, None), (0, 3), (2, 3)]:
            steps = {"first_step": first, "last_step": last}
            found = uploads(network([7]), federation(SHARDS[name]), TASK, **steps)
            assert_same(found)
            assert not any(torch.allclose(found[0], other) for other in results)
            results.append(found[0])


def test_a_model_that_comes_on_the_way(duals):
    """What was trained before it is lost; after it, the dual form begins anew."""
    module, fed = network([7]), federation(SHARDS["few"])
    other = elsewhere(module)
    solvers = NativeSolver(module, fed, 0), AutogradSolver(network([7]), fed, 0)
    task = replace(TASK, epochs=10, objective=Pull(0.5))
    job = Job(0, solvers[0].layout.read(), task, ("x",), swaps=(Swap(12, other, {}, 0.02),))
    native, by_torch = (upload_of(solver, job) for solver in solvers)
    torch.testing.assert_close(native, by_torch, rtol=1e-4, atol=1e-5)
    assert duals
    assert not torch.allclose(native, upload_of(solvers[0], replace(job, swaps=())), atol=1e-3)


def test_who_is_masked_is_not_trained_in_dual_form(duals):
    fed, module = federation(SHARDS["few"], SHARDS["few"]), network([7])
    assert_same(uploads(module, fed, replace(TASK, client_steps=(Mask(0.4),))))
    assert not duals


@pytest.mark.parametrize("parts", [Parts(["1.*"]), Parts(frozen=["1.weight"])], ids=str)
def test_a_first_layer_of_ones_own_or_frozen(duals, parts):
    assert_same(uploads(network([7]), federation(SHARDS["few"]), TASK, parts))
    assert bool(duals) == (not parts.frozen)


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("kind", ["plain", "proximal", "cosine", "inner"])
def test_a_model_of_zeros(model, kind):
    module = network(MODELS[model])
    for parameter in module.parameters():
        nn.init.zeros_(parameter)
    for name in ("few", "many"):
        task = replace(TASK, objective=OBJECTIVES[kind])
        assert_same(uploads(module, federation(SHARDS[name]), task))


@pytest.mark.parametrize("share", [1.0, 1e-4, 1e-6, 1e-8, 1e-10])
def test_what_stands_at_right_angles_to_the_samples_is_kept(duals, share):
    """However little that is: others have learned it. (A model that begins as zero and is trained
    on this client alone has none of it; mixed with those of others, some.)"""
    module, samples = network([]), SHARDS["few"].double()
    for seed in range(3):
        generator = torch.Generator().manual_seed(seed)
        inside, drawn = (
            torch.randn(CLASSES, size, generator=generator, dtype=torch.float64)
            for size in (len(samples), FEATURES)
        )
        inside = inside @ samples
        outside = drawn - drawn @ torch.linalg.pinv(samples) @ samples
        weight = inside / inside.norm() + share * outside / outside.norm()
        with torch.no_grad():
            module[1].weight.copy_(weight)
            module[1].bias.zero_()
        native, _, exact, _ = uploads(module, federation(samples), replace(TASK, lr=0.001))
        assert (native - exact).norm() <= 1e-6
    assert duals


def test_images_are_prepared_as_for_torch(duals):
    generator = torch.Generator().manual_seed(0)
    shards = [
        torch.randint(256, (size, 2, 5, 6), generator=generator, dtype=torch.uint8)
        for size in (11, 90)
    ]
    fed = replace(federation(*shards), mean=(0.3, 0.5), std=(0.2, 0.7))
    solvers = [kind(network([7], 60), fed, 0) for kind in (NativeSolver, AutogradSolver)]
    for client in range(2):
        job = Job(client, solvers[0].layout.read(), TASK, ("client", client))
        native, by_torch = (upload_of(solver, job) for solver in solvers)
        torch.testing.assert_close(native, by_torch, rtol=1e-4, atol=1e-5)
        exam = Exam(job.params, [client])
        [mine], [theirs] = (solver.evaluate(exam) for solver in solvers)
        assert mine.sums == pytest.approx(theirs.sums, rel=1e-5)
    assert duals == [0]


def test_neither_the_data_nor_the_received_model_is_written_to():
    fed = federation(*SHARDS.values())
    solver, before = NativeSolver(network([7]), fed, 0), fed.x.clone()
    for client in range(fed.clients):
        job = Job(client, solver.layout.read(), TASK, ("client", client))
        received = job.params.clone()
        upload = upload_of(solver, job)
        assert torch.equal(job.params, received)
        assert not torch.equal(upload, received)
    assert torch.equal(fed.x, before)


@pytest.mark.parametrize("parts", [Parts(), Parts(["head"])], ids=str)
def test_making_a_solver_leaves_the_model_as_it_was(parts):
    module = network([7])
    before = nn.utils.parameters_to_vector(module.parameters()).detach().clone()
    NativeSolver(module, federation(SHARDS["few"]), 0, parts)
    assert torch.equal(nn.utils.parameters_to_vector(module.parameters()), before)


# -- what is remembered ----------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["plain", "cosine", "l2"])
def test_a_new_solver_and_an_old_one_give_the_same_bits(kind):
    """Whatever it has remembered of earlier jobs, and whatever has been in its buffers."""
    fed = federation(*(draw(size, 64, size) for size in (10, 45, 12, 63, 11, 48)))
    old = NativeSolver(network([20], 64), fed, 0)
    task = replace(TASK, objective=OBJECTIVES[kind])
    for client in (3, 1, 0, 2, 0, 5, 4, 2):
        job = Job(client, old.layout.read(), task, ("client", client))
        new = NativeSolver(network([20], 64), fed, 0)
        assert torch.equal(upload_of(old, job), upload_of(new, job))


def test_products_of_samples_are_remembered_up_to_a_bound(monkeypatch):
    fed = federation(*(draw(20 + k % 5, 400, k) for k in range(40)))
    solver = NativeSolver(network([7], 400), fed, 0)
    jobs = [Job(k, solver.layout.read(), TASK, ("client", k)) for k in range(40)]

    def remembered() -> int:
        return sum(gram.nbytes for gram in solver._grams.values())

    first = upload_of(solver, jobs[0])
    assert remembered() == 0  # so few are computed again
    monkeypatch.setattr(native_solver, "_WORTH_KEEPING", 0)
    assert torch.equal(upload_of(solver, jobs[0]), first)
    one = remembered()
    assert one > 0
    monkeypatch.setattr(native_solver, "_KEPT", int(5.5 * one))
    for job in jobs:
        upload_of(solver, job)
        assert remembered() <= 5.5 * one
        assert remembered() == solver._gram_bytes
    assert remembered() >= 2 * one
    assert torch.equal(upload_of(solver, jobs[0]), first)
    monkeypatch.setattr(native_solver, "_KEPT", 0)
    for job in jobs[8:16]:
        upload_of(solver, job)
        assert len(solver._grams) == 1  # the last one may stay


# -- which modules ---------------------------------------------------------------------------------


class Doubled(nn.Sequential):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


class DoubledLinear(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


class Leaky(nn.ReLU):
    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.leaky_relu(x, 0.5)


def twice() -> nn.Module:
    layer = nn.Linear(40, 40)
    return nn.Sequential(layer, nn.ReLU(), layer, nn.Linear(40, 5))


def tied() -> nn.Module:
    module = nn.Sequential(nn.Linear(40, 40), nn.ReLU(), nn.Linear(40, 40), nn.Linear(40, 5))
    module[2].weight = module[0].weight
    return module


def hooked(register: str) -> nn.Module:
    module = nn.Sequential(nn.Linear(40, 5))
    getattr(module[0], register)(lambda *given: None)
    return module


def computed() -> nn.Module:
    return nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(40, 5)))


FIT = {
    "no flattening": lambda: nn.Sequential(nn.Linear(40, 7), nn.ReLU(), nn.Linear(7, 5)),
    "in place": lambda: nn.Sequential(nn.Linear(40, 7), nn.ReLU(inplace=True), nn.Linear(7, 5)),
    "no bias": lambda: nn.Sequential(nn.Linear(40, 7, bias=False), nn.Linear(7, 5, bias=False)),
    "nested": lambda: nn.Sequential(nn.Sequential(nn.Linear(40, 5))),
    "a subclass that changes nothing": lambda: type("Mine", (nn.Sequential,), {})(nn.Linear(40, 5)),
    "flattened in between": lambda: nn.Sequential(
        nn.Linear(40, 7), nn.Flatten(), nn.ReLU(), nn.Linear(7, 5)
    ),
}


@pytest.mark.parametrize("name", FIT)
def test_what_fits_is_trained_as_it_computes(name):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        module = FIT[name]()
    for shard in ("few", "many"):
        assert_same(uploads(module, federation(SHARDS[shard]), TASK))


UNFIT = {
    "own forward": lambda: Doubled(nn.Linear(40, 5)),
    "own layer": lambda: nn.Sequential(DoubledLinear(40, 5)),
    "own ReLU": lambda: nn.Sequential(nn.Linear(40, 7), Leaky(), nn.Linear(7, 5)),
    "one layer twice": twice,
    "tied weights": tied,
    "hook": lambda: hooked("register_forward_hook"),
    "hook before": lambda: hooked("register_forward_pre_hook"),
    "hook backward": lambda: hooked("register_full_backward_hook"),
    "weights that are computed": computed,
    "no last layer": lambda: nn.Sequential(nn.Linear(40, 5), nn.ReLU()),
}


@pytest.mark.parametrize("name", UNFIT)
def test_what_might_compute_something_else_does_not_fit(name):
    with pytest.raises(Unfit):
        NativeSolver(UNFIT[name](), federation(SHARDS["few"]), 0)
