"""Compiled training against autograd, with double precision as the judge."""

import copy
import os
from dataclasses import replace

import numpy as np
import pytest
import torch
from chains import distance, federation_for, random_image_chain, random_vector_chain, uploads
from torch import nn
from torch.nn import functional

import polytempo as pt
from polytempo.core.client_steps import Mask
from polytempo.core.errors import PolytempoError
from polytempo.core.layout import Parts
from polytempo.core.objective import Drift, Plain, Proximal, Pull
from polytempo.core.task import Task
from polytempo.data import Federation
from polytempo.models import Inputs, build
from polytempo.native import build as building
from polytempo.native.build import NoCompiler, find_compiler, library
from polytempo.training import AutogradSolver, Exam, Job, make_executor
from polytempo.training.jobs import PERSONAL, Swap
from polytempo.training.solvers.native import solver as native_solver
from polytempo.training.solvers.native.chain import chain
from polytempo.training.solvers.native.layers import Unfit
from polytempo.training.solvers.native.solver import NativeSolver

try:
    find_compiler()
except NoCompiler as error:
    pytest.skip(str(error), allow_module_level=True)

QUICK = "-O1"  # to compile; what comes out is the same to rounding


@pytest.fixture(autouse=True)
def quickly_compiled(monkeypatch):
    monkeypatch.setenv("POLYTEMPO_CXXFLAGS", QUICK)


def assert_as_good_as_torch(found, bound=1e-5):
    native, by_torch, exact, start = found
    assert distance(exact, start) > 1e-4, "nothing was trained"
    assert distance(native, exact) <= max(3 * distance(by_torch, exact), bound)


def network(*layers: nn.Module, seed: int = 0) -> nn.Module:
    module = nn.Sequential(*layers)
    torch.manual_seed(seed)
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return module


def small_cnn(seed: int = 0) -> nn.Module:
    return network(
        nn.Conv2d(2, 5, 3, padding=1),
        nn.MaxPool2d(2),
        nn.ReLU(),
        nn.Conv2d(5, 9, 3),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(9 * 4 * 3, 7),
        nn.ReLU(),
        nn.Linear(7, 4),
        seed=seed,
    )


SHAPE = (2, 12, 10)


# -- layers, criteria, optimisers ------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(24))
def test_random_chains_train_as_torch_does(seed):
    draw = np.random.default_rng(seed)
    torch.manual_seed(seed)
    module, shape, outputs = (random_image_chain if seed % 3 else random_vector_chain)(draw)
    problem = ("classification", "regression", "multilabel")[seed // 3 % 3]
    if problem != "regression" and outputs == 1:
        problem = "regression"
    optimizer = ("sgd", "adam:epsilon=0.001", "adamw:epsilon=0.001,weight_decay=0.1")[seed % 4 % 3]
    task = Task(epochs=2, batch_size=int(draw.integers(3, 12)), lr=0.02, optimizer=optimizer)
    found = uploads(module, federation_for(shape, outputs, problem, seed), task)
    assert_as_good_as_torch(found)


OBJECTIVES = [
    Plain(),
    Proximal(mu=0.5),
    Proximal(mu=0.5, power=1),
    Pull(strength=0.5),
    Pull(strength=-0.5, measure="inner"),
    Pull(strength=0.5, measure="l1"),
    Pull(strength=0.5, measure="l2"),
    Drift(),
]


@pytest.mark.parametrize("anchored", [False, True])
@pytest.mark.parametrize("objective", OBJECTIVES, ids=str)
@pytest.mark.parametrize("features", [6, 200])  # of many features, the first layer is in dual form
def test_objectives(objective, features, anchored):
    module = network(nn.Linear(features, 8), nn.ReLU(), nn.Linear(8, 3))
    federation = federation_for((features,), 3, samples=24)
    size = sum(parameter.numel() for parameter in module.parameters())
    anchor = 0.1 * torch.from_numpy(np.random.default_rng(1).normal(size=size)).float()
    vectors = {"anchor": anchor} if anchored else {}
    task = Task(
        epochs=3, batch_size=5, lr=0.05, objective=objective, optimizer="sgd:weight_decay=0.01"
    )
    assert_as_good_as_torch(uploads(module, federation, task, vectors=vectors), 2e-5)


@pytest.mark.parametrize("shape", [(3, 20), (2, 3, 2, 5)])
def test_samples_of_any_dimensions_that_are_flattened(shape):
    """Such as windows of a sensor's channels."""
    module = network(nn.Flatten(), nn.Linear(60, 8), nn.ReLU(), nn.Linear(8, 3))
    assert_as_good_as_torch(uploads(module, federation_for(shape, 3), Task(epochs=2, batch_size=5)))


@pytest.mark.parametrize("first", [nn.Conv2d(3, 4, 3), nn.Flatten(2), nn.ReLU(), nn.Linear(20, 2)])
def test_samples_of_two_dimensions_that_are_not_flattened_go_to_torch(first):
    with pytest.raises(Unfit, match=r"2 dimensions|flattens something else"):
        chain(nn.Sequential(first, nn.Flatten(), nn.Linear(60, 3)), (3, 20))


def test_the_dual_form_is_taken_where_it_pays(monkeypatch):
    taken = []
    usual = NativeSolver._dual
    monkeypatch.setattr(
        NativeSolver, "_dual", lambda *given: taken.append(usual(*given)) or taken[-1]
    )
    for features in (6, 200):
        module = network(nn.Linear(features, 8), nn.ReLU(), nn.Linear(8, 3))
        federation = federation_for((features,), 3, samples=24)
        solver = NativeSolver(module, federation, 0)
        taken.clear()
        job = Job(0, solver.layout.read(), Task(epochs=5, batch_size=5), ("x",))
        solver.carry_out(job)
        solver.carry_out(replace(job, task=replace(job.task, keep_optimizer=True)))
        assert taken == [features == 200, False]


@pytest.mark.parametrize("upload", ["model", "delta", "gradient", "path"])
@pytest.mark.parametrize("make", [small_cnn, lambda: network(nn.Flatten(), nn.Linear(240, 4))])
def test_uploads(make, upload):
    task = Task(epochs=1, batch_size=8, upload=upload, objective=Proximal(mu=0.3))
    native, by_torch, exact, start = uploads(make(), federation_for(SHAPE, 4), task)
    assert distance(native, exact) <= max(3 * distance(by_torch, exact), 1e-6)
    assert distance(exact, start * (upload == "model")) > 1e-3


@pytest.mark.parametrize("optimizer", ["sgd", "adam:epsilon=0.001", "adamw:epsilon=0.001"])
def test_masked_parameters_stay(optimizer):
    task = Task(epochs=2, batch_size=8, lr=0.05, optimizer=optimizer, client_steps=(Mask(0.4),))
    found = uploads(small_cnn(), federation_for(SHAPE, 4), task)
    assert_as_good_as_torch(found)
    native, _, _, start = found
    assert 0.38 < float((native == start).double().mean()) < 0.45


@pytest.mark.parametrize(
    "parts",
    [
        Parts(["head"]),
        Parts(["body"]),
        Parts(["*.bias"]),
        Parts((), ["0.*"]),
        Parts((), ["0.*", "3.*", "6.*"]),
        Parts(["3.*"], ["0.weight", "8.bias"]),
    ],
    ids=str,
)
@pytest.mark.parametrize("objective", [Plain(), Pull(strength=0.5)], ids=str)
def test_personal_and_frozen_parts(parts, objective):
    task = Task(epochs=2, batch_size=8, lr=0.05, objective=objective)
    assert_as_good_as_torch(uploads(small_cnn(), federation_for(SHAPE, 4), task, parts))
    solvers = [
        kind(small_cnn(), federation_for(SHAPE, 4), 0, parts)
        for kind in (NativeSolver, AutogradSolver)
    ]
    if not solvers[0].layout.personal:
        return
    own = {PERSONAL: solvers[0].layout.initial_personal}
    job = Job(0, solvers[0].layout.read(), task, ("x",), memory=own)
    one, other = (solver.carry_out(job).memory[PERSONAL] for solver in solvers)
    assert distance(one, other) < 1e-5 < distance(one, own[PERSONAL])


def test_a_mask_holds_against_momentum_that_was_kept():
    federation = federation_for(SHAPE, 4)
    solvers = [kind(small_cnn(), federation, 0) for kind in (NativeSolver, AutogradSolver)]
    start, results, stayed = solvers[0].layout.read(), [], []
    for solver in solvers:
        task = Task(epochs=1, batch_size=5, keep_optimizer=True)
        first = solver.carry_out(Job(0, start, task, ("x",)))
        masked = replace(task, client_steps=(Mask(0.4),))
        again = Job(0, first.upload, masked, ("y",), memory=first.memory)
        results.append(solver.carry_out(again).upload)
        stayed.append(float((results[-1] == first.upload).double().mean()))
    assert distance(*results) < 1e-5
    assert min(stayed) > 0.35


def test_gradients_hold_no_decoupled_decay():
    task = Task(batch_size=8, upload="gradient", optimizer="adamw:weight_decay=0.5")
    native, by_torch, exact, _ = uploads(small_cnn(), federation_for(SHAPE, 4), task)
    assert distance(native, exact) <= max(3 * distance(by_torch, exact), 1e-6)


# -- sessions --------------------------------------------------------------------------------------


@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_a_training_in_pieces_is_the_same_to_the_bit(optimizer):
    solver = NativeSolver(small_cnn(), federation_for(SHAPE, 4), 0)
    job = Job(0, solver.layout.read(), Task(epochs=2, batch_size=5, optimizer=optimizer), ("x",))
    whole, pieces = solver.begin(job), solver.begin(job)
    whole.advance()
    while not pieces.finished:
        pieces.advance(2)
    assert torch.equal(whole.finish().upload, pieces.finish().upload)


@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_swaps_and_kept_moments(keep, optimizer):
    task = Task(epochs=2, batch_size=5, optimizer=optimizer, keep_optimizer=keep)
    federation = federation_for(SHAPE, 4)
    solvers = [kind(small_cnn(), federation, 0) for kind in (NativeSolver, AutogradSolver)]
    start = solvers[0].layout.read()
    swap = Swap(3, start * 0.9, {}, 0.02)
    results = []
    for solver in solvers:
        job = Job(0, start, task, ("x",), swaps=(swap,))
        first = solver.carry_out(job)
        again = Job(0, first.upload, task, ("y",), memory=first.memory)
        results.append((first, solver.carry_out(again)))
    for one, other in zip(*results, strict=True):
        assert distance(one.upload, other.upload) < 1e-5
        assert one.memory.keys() == other.memory.keys()
        assert bool(one.memory) == keep
        for name, vector in one.memory.items():
            assert torch.allclose(vector, other.memory[name], rtol=1e-4, atol=1e-4)


def test_large_shards_are_made_ready_batch_by_batch(monkeypatch):
    solver = NativeSolver(small_cnn(), federation_for(SHAPE, 4), 0)
    job = Job(0, solver.layout.read(), Task(epochs=2, batch_size=5), ("x",))
    whole = solver.carry_out(job).upload
    monkeypatch.setattr(native_solver, "_AT_ONCE", 1)
    assert torch.equal(solver.carry_out(job).upload, whole)


def test_dropout_draws_what_torch_draws():
    module = network(
        nn.Conv2d(2, 5, 3), nn.Dropout(0.5), nn.Flatten(), nn.Dropout(0.2), nn.Linear(400, 4)
    )
    task = Task(epochs=2, batch_size=7, lr=0.02)
    assert_as_good_as_torch(uploads(module, federation_for(SHAPE, 4), task))


def test_what_diverges_is_seen():
    federation = federation_for(SHAPE, 4)
    for make in (small_cnn, lambda: network(nn.Flatten(), nn.Linear(240, 4))):
        solver = NativeSolver(make(), federation, 0)
        task = Task(epochs=5, batch_size=5, lr=1e18)
        upload = solver.carry_out(Job(0, solver.layout.read(), task, ("x",))).upload
        assert not bool(upload.isfinite().all())
    nan = solver.layout.read() * float("nan")
    assert not bool(solver.carry_out(Job(0, nan, Task(steps=1), ("x",))).upload.isfinite().any())


@pytest.mark.parametrize(
    "make",
    [small_cnn, lambda: network(nn.Flatten(), nn.Linear(240, 3), nn.Tanh(), nn.Linear(3, 4))],
)
def test_what_diverges_leaves_no_trace(make):
    """Padding that became NaN would spoil all later trainings of the process."""
    solver = NativeSolver(make(), federation_for(SHAPE, 4), 0)
    good = Job(0, solver.layout.read(), Task(epochs=1, batch_size=5, keep_optimizer=True), ("x",))
    before = solver.carry_out(good).upload
    for optimizer in ("sgd", "adam"):
        bad = Task(epochs=3, batch_size=5, lr=1e18, optimizer=optimizer)
        solver.carry_out(replace(good, task=bad))
    nan = replace(good, params=good.params * float("nan"))
    solver.carry_out(nan)
    assert torch.equal(solver.carry_out(good).upload, before)


def photographs() -> Federation:
    draw = np.random.default_rng(7)
    clients = [
        (draw.integers(0, 256, (20, 3, 32, 32), dtype=np.uint8), draw.integers(0, 3, 20))
        for _ in range(4)
    ]
    return Federation.from_arrays(clients, classes=3)


def sentences() -> Federation:
    draw = np.random.default_rng(8)
    clients = [(draw.integers(0, 30, (20, 12)), draw.integers(0, 3, 20)) for _ in range(4)]
    return Federation.from_arrays(clients, classes=3)


@pytest.mark.parametrize(
    "make, model",
    [(photographs, "lenet"), (photographs, "mlp"), (sentences, "textcnn:embedding=8,filters=8")],
)
def test_the_number_of_workers_does_not_change_a_bit(make, model):
    """Whole runs, multicasts included."""
    federation, runs = make(), []
    for workers in (1, 2, 3):
        made = pt.simulate(
            federation,
            model=model,
            strategy="pace:omega=100000",
            solver="native",
            backend="serial" if workers == 1 else "processes",
            workers=workers,
            updates=30,
            concurrency=3,
            epochs=2,
            batch_size=6,
        )
        assert made.backend.startswith("native")
        runs.append((made.fingerprint, [made.simulator.strategy.serve(c) for c in range(4)]))
    for fingerprint, models in runs[1:]:
        assert fingerprint == runs[0][0]
        assert all(torch.equal(a, b) for a, b in zip(models, runs[0][1], strict=True))


def test_a_solver_leaves_the_model_as_it_was():
    module = small_cnn()
    before = nn.utils.parameters_to_vector(module.parameters()).detach().clone()
    assert torch.equal(NativeSolver(module, federation_for(SHAPE, 4), 0).layout.read(), before)


def test_nan_in_one_pixel_survives_pooling():
    solver = NativeSolver(small_cnn(), federation_for(SHAPE, 4), 0)
    solver.load(solver.layout.read())
    for pixel in range(120):
        solver.x[0] = 0
        solver.x[0].view(2, -1)[0, pixel] = float("nan")
        solver._test_samples._held = None
        assert bool(solver.outputs(slice(0, 1)).isnan().all())


# -- evaluation ------------------------------------------------------------------------------------


@pytest.mark.parametrize("problem", ["classification", "regression", "multilabel"])
def test_scores_are_those_of_torch(problem):
    federation = federation_for(SHAPE, 4, problem)
    solvers = [
        kind(small_cnn(), federation, 0, Parts(["head"])) for kind in (NativeSolver, AutogradSolver)
    ]
    own = solvers[0].layout.initial_personal
    for exam in (
        Exam(solvers[0].layout.read(), [0, 1], [{PERSONAL: own}, {PERSONAL: own * 0.5}]),
        Exam(solvers[0].layout.read() * 2, [1], [{PERSONAL: own}]),
    ):
        for one, other in zip(*(solver.evaluate(exam) for solver in solvers), strict=True):
            assert one.sums == pytest.approx(other.sums, rel=1e-4, abs=1e-4)


def test_bytes_are_normalised_as_torch_sees_them():
    draw = np.random.default_rng(0)
    images = [(draw.integers(0, 256, (20, 3, 9, 11), np.uint8), draw.integers(0, 3, 20))] * 2
    federation = Federation.from_arrays(images)
    module = network(nn.Conv2d(3, 4, 3, padding=2), nn.ReLU(), nn.Flatten(), nn.Linear(572, 3))
    assert_as_good_as_torch(uploads(module, federation, Task(epochs=2, batch_size=4, lr=0.02)))


# -- text ------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def texts():
    draw = np.random.default_rng(3)
    clients = []
    for _ in range(2):
        tokens = draw.integers(1, 60, (30, 12))
        ends = draw.integers(0, 13, 30)
        tokens[np.arange(12)[None] >= ends[:, None]] = 0
        clients.append((tokens, draw.integers(0, 3, 30)))
    return Federation.from_arrays(clients)


@pytest.mark.parametrize(
    "options", ["embedding=8,filters=8", "embedding=11,filters=5,widths=[1,4]"]
)
@pytest.mark.parametrize(
    "task",
    [
        Task(epochs=2, batch_size=7, lr=0.05),
        Task(epochs=2, batch_size=7, lr=0.05, objective=Pull(strength=0.5)),
        Task(epochs=2, batch_size=7, lr=0.05, objective=Pull(strength=0.5, measure="l1")),
        Task(epochs=2, batch_size=7, lr=0.01, optimizer="adam:epsilon=0.001"),
        Task(epochs=1, batch_size=7, upload="gradient", objective=Proximal(mu=0.5)),
        Task(epochs=2, batch_size=7, lr=0.05, client_steps=(Mask(0.3),)),
    ],
    ids=["plain", "cosine", "l1", "adam", "gradient", "mask"],
)
@pytest.mark.parametrize("parts", [Parts(), Parts(["head"]), Parts((), ["embedding.*"])], ids=str)
def test_filters_over_words(texts, options, task, parts):
    if task.upload == "gradient" and parts.personal:
        pytest.skip("goes to torch")
    inputs = Inputs(texts.shape, texts.outputs, texts.vocabulary)
    module = build(f"textcnn:{options}", inputs, 0)
    native, by_torch, exact, start = uploads(module, texts, task, parts)
    assert distance(native, exact) <= max(3 * distance(by_torch, exact), 1e-5)
    assert distance(exact, start) > 1e-3
    solvers = [kind(copy.deepcopy(module), texts, 0) for kind in (NativeSolver, AutogradSolver)]
    exam = Exam(solvers[0].layout.read(), [0, 1])
    for one, other in zip(*(solver.evaluate(exam) for solver in solvers), strict=True):
        assert one.sums == pytest.approx(other.sums, rel=1e-4)


@pytest.mark.parametrize("steps", [(), (Mask(0.3),)], ids=["pull", "mask"])
def test_words_of_the_clients_own(texts, steps):
    """The table of words stays with its client; and what one training leaves is not in the next."""
    inputs = Inputs(texts.shape, texts.outputs, texts.vocabulary)
    module = build("textcnn:embedding=8,filters=8", inputs, 0)
    task = Task(epochs=2, batch_size=7, lr=0.05, objective=Pull(strength=0.5), client_steps=steps)
    for parts in (Parts(["embedding.*"]), Parts()):
        found = uploads(module, texts, task, parts)
        assert distance(found[0], found[2]) <= max(3 * distance(found[1], found[2]), 1e-5)
    solver = NativeSolver(copy.deepcopy(module), texts, 0)
    job = Job(0, solver.layout.read(), replace(task, client_steps=(Mask(0.3),)), ("x",))
    alone = solver.carry_out(job).upload
    solver.carry_out(replace(job, task=replace(task, client_steps=())))
    assert torch.equal(solver.carry_out(job).upload, alone)


def test_padding_that_is_not_zero_goes_to_torch(texts):
    inputs = Inputs(texts.shape, texts.outputs, texts.vocabulary)
    solvers = [
        kind(build("textcnn:embedding=8,filters=8", inputs, 0), texts, 0)
        for kind in (NativeSolver, AutogradSolver)
    ]
    params = solvers[0].layout.read()
    params[:8] = 1.0  # the first row of the table
    job = Job(0, params, Task(epochs=1, batch_size=7), ("x",))
    one, other = (solver.carry_out(job).upload for solver in solvers)
    assert torch.equal(one, other)
    one, other = (solver.evaluate(Exam(params, [0]))[0].sums for solver in solvers)
    assert one == other


@pytest.fixture(scope="module")
def sequences():
    draw = np.random.default_rng(4)
    clients = []
    for _ in range(2):
        tokens = draw.integers(1, 20, (50, 15))
        tokens[np.arange(15)[None] >= draw.integers(3, 16, 50)[:, None]] = 0
        clients.append((tokens[:, :-1], tokens[:, 1:]))
    return Federation.from_arrays(clients, problem="next-token", classes=20)


@pytest.mark.parametrize("batch_size", [3, 37])  # in the latter, gradients are added up in pieces
@pytest.mark.parametrize("options", ["embedding=8,hidden=16", "embedding=5,hidden=11"])
@pytest.mark.parametrize(
    ("objective", "optimizer", "parts"),
    [
        (Plain(), "sgd", Parts()),
        (Pull(strength=0.5), "sgd", Parts(["head"])),
        (Proximal(mu=0.5), "adam:epsilon=0.001", Parts((), ["embedding.*"])),
        (Plain(), "sgd", Parts((), ["recurrent.*"])),
    ],
    ids=str,
)
def test_gated_recurrent_units(sequences, batch_size, options, objective, optimizer, parts):
    inputs = Inputs(sequences.shape, sequences.outputs, sequences.vocabulary, "next-token")
    module = build(f"gru:{options}", inputs, 0)
    task = Task(epochs=2, batch_size=batch_size, lr=0.1, objective=objective, optimizer=optimizer)
    assert_as_good_as_torch(uploads(module, sequences, task, parts))
    solvers = [kind(copy.deepcopy(module), sequences, 0) for kind in (NativeSolver, AutogradSolver)]
    exam = Exam(solvers[0].layout.read() * 2, [0, 1])
    for one, other in zip(*(solver.evaluate(exam) for solver in solvers), strict=True):
        assert one.sums == pytest.approx(other.sums, rel=1e-4)


# -- what fits -------------------------------------------------------------------------------------


class Tutorial(nn.Module):
    """As many write it."""

    def __init__(self):
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(2, 6, 3), nn.Conv2d(6, 8, 3)
        self.fc1, self.fc2 = nn.Linear(8, 10), nn.Linear(10, 4)

    def forward(self, x):
        x = functional.max_pool2d(functional.relu(self.conv1(x)), 2)
        x = torch.relu(functional.max_pool2d(self.conv2(x), (2, 2)))
        x = x.view(x.size(0), -1)
        x = functional.dropout(x, 0.25, training=self.training)
        x = torch.tanh(self.fc1(x))
        return self.fc2(functional.gelu(x))


def test_functions_are_layers_too():
    torch.manual_seed(0)
    assert_as_good_as_torch(
        uploads(Tutorial(), federation_for(SHAPE, 4), Task(epochs=2, batch_size=7, lr=0.05))
    )


class Mine(nn.Linear):
    def forward(self, x):
        return 2 * super().forward(x)


class Branches(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.kind, self.one, self.two = kind, nn.Linear(240, 240), nn.Linear(240, 4)

    def forward(self, x):
        x = x.flatten(1)
        if self.kind == "residual":
            return self.two(x + self.one(x))
        if self.kind == "twice":
            return self.two(self.one(self.one(x)))
        if self.kind == "unused":
            return self.two(x)
        if self.kind == "data":
            return self.two(self.one(x) if x.sum() > 0 else x)
        if self.kind == "always":
            return self.two(functional.dropout(self.one(x)))
        return self.two(torch.sigmoid(self.one(x)))


class Moody(nn.Module):
    """Computes something else when it is tested."""

    def __init__(self):
        super().__init__()
        self.one = nn.Linear(240, 4)

    def forward(self, x):
        x = x.flatten(1)
        return self.one(x if self.training else torch.tanh(x))


def with_hook():
    module = small_cnn()
    module[0].register_forward_hook(lambda *given: None)
    return module


def tied():
    module = network(nn.Flatten(), nn.Linear(240, 240), nn.Linear(240, 240), nn.Linear(240, 4))
    module[2].weight = module[1].weight
    return module


@pytest.mark.parametrize(
    ("module", "why"),
    [
        (network(nn.Flatten(), Mine(240, 4)), "Mine is not a known layer"),
        (
            network(nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3), nn.Flatten(), nn.Linear(240, 4)),
            "buffers",
        ),
        (network(nn.Conv2d(2, 4, 3, groups=2), nn.Flatten(), nn.Linear(320, 4)), "groups"),
        (network(nn.Conv2d(2, 4, 3, dilation=2), nn.Flatten(), nn.Linear(192, 4)), "dilation"),
        (network(nn.Conv2d(2, 4, 3, padding=1, padding_mode="reflect"), nn.Flatten()), "padding"),
        (network(nn.MaxPool2d(3, ceil_mode=True), nn.Flatten(), nn.Linear(32, 4)), "rounds up"),
        (network(nn.Flatten(), nn.Linear(240, 4), nn.ReLU()), "does not end in a linear layer"),
        (network(nn.Linear(10, 10), nn.Flatten(), nn.Linear(240, 4)), "whole samples"),
        (Branches("residual"), "before it"),
        (Branches("twice"), "used twice"),
        (Branches("unused"), "no layer uses"),
        (Branches("data"), "depends on its input"),
        (Branches("always"), "outside of training"),
        (Branches("sigmoid"), "sigmoid is not a known layer"),
        (Moody(), "something else outside of training"),
        (network(nn.AdaptiveAvgPool2d((None, 1)), nn.Flatten(), nn.Linear(24, 4)), "not a pair"),
        (with_hook(), "hooks"),
        (tied(), "used twice"),
        (small_cnn().double(), "float32"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_does_not_fit_goes_to_torch_and_it_is_said_why(module, why):
    federation = federation_for(SHAPE, 4)
    with pytest.raises(Unfit, match=why):
        chain(module, SHAPE)
    executor = make_executor(module, federation, 0, name="serial")
    assert type(executor.solver) is not NativeSolver
    assert why in executor.name
    with pytest.raises(PolytempoError, match=why):
        make_executor(module, federation, 0, solver="native")


def test_targets_that_the_model_has_no_outputs_for_are_not_written_past_it():
    labels = federation_for(SHAPE, 9)
    for problem, why in (("classification", "labels"), ("regression", "targets")):
        federation = federation_for(SHAPE, 9, problem) if problem == "regression" else labels
        with pytest.raises(Unfit, match=why):
            NativeSolver(small_cnn(), federation, 0)


def test_a_solver_that_computes_something_else_is_not_used(monkeypatch):
    module = network(nn.Flatten(), nn.Linear(240, 9), nn.ReLU(), nn.Linear(9, 4))
    monkeypatch.setattr(native_solver, "_LOSSES", {kind: 1 for kind in native_solver._LOSSES})
    with pytest.raises(Unfit, match="first step is off"):
        NativeSolver(module, federation_for(SHAPE, 4), 0)


# -- compilers -------------------------------------------------------------------------------------


@pytest.mark.skipif(os.uname().machine != "x86_64", reason="the flags are for x86-64")
@pytest.mark.parametrize(
    "flags",
    ["-O1 -DPLAIN_VECTORS -mno-avx512f -mno-avx2 -mno-fma -mno-avx", "-mno-avx512f"],
    ids=["plain", "avx2"],
)
def test_with_fewer_vector_instructions(monkeypatch, flags):
    monkeypatch.setenv("POLYTEMPO_CXXFLAGS", flags)
    task = Task(epochs=2, batch_size=7, lr=0.02)
    assert_as_good_as_torch(uploads(small_cnn(), federation_for(SHAPE, 4), task))


def test_without_a_compiler_torch_takes_over(monkeypatch, tmp_path):
    federation = federation_for(SHAPE, 4)
    monkeypatch.setenv("POLYTEMPO_CXX", "no-such-compiler -x")
    executor = make_executor(small_cnn(), federation, 0, name="serial")
    assert type(executor.solver) is AutogradSolver
    assert executor.name == (
        "torch, serial (not native: POLYTEMPO_CXX='no-such-compiler -x' is not a command here)"
    )
    with pytest.raises(PolytempoError, match="no-such-compiler"):
        make_executor(small_cnn(), federation, 0, solver="native")
    monkeypatch.delenv("POLYTEMPO_CXX")
    monkeypatch.setattr(building.shutil, "which", lambda name: None)
    monkeypatch.setattr(building.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(NoCompiler, match=r'pip install "polytempo\[native\]"'):
        find_compiler()


def test_a_compiler_that_fails_is_quoted(monkeypatch, tmp_path):
    monkeypatch.setenv("POLYTEMPO_CACHE", str(tmp_path))
    with pytest.raises(NoCompiler, match="nonsense"):
        library('#error "nonsense"')
    assert not list(tmp_path.rglob("*.so"))


def test_a_library_is_compiled_once(monkeypatch, tmp_path):
    monkeypatch.setenv("POLYTEMPO_CACHE", str(tmp_path))
    text = 'extern "C" int answer() { return 42; }'
    assert library(text).answer() == 42
    assert len(list(tmp_path.rglob("*.so"))) == 1
    monkeypatch.setattr(building.subprocess, "run", None)
    assert library(text).answer() == 42
