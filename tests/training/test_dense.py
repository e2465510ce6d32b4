"""Stacks trained the fast way end where plain training ends, whatever is trained together."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from polytempo import Federation, Plain, Proximal, Pull, Task
from polytempo.core.objective import Drift
from polytempo.core.optimizer import Adam, AdamW, Sgd
from polytempo.training import AutogradSolver, Exam, Job
from polytempo.training.solvers import dense
from polytempo.training.solvers.dense import DenseSolver
from solving import upload_of, uploads_of

SEED, FEATURES, CLASSES = 3, 40, 5
TASK = Task(epochs=5, batch_size=4, lr=0.1, optimizer=Sgd(momentum=0.9, weight_decay=0.02))
OBJECTIVES = {
    "plain": Plain(),
    "proximal": Proximal(0.7),
    "proximal unsquared": Proximal(0.3, power=1),
    "cosine": Pull(0.8, "cosine"),
    "inner": Pull(0.8, "inner"),
    "l1": Pull(0.8, "l1"),
    "l2": Pull(0.8, "l2"),
    "away": Pull(-0.8, "cosine"),
}
ANCHORED = OBJECTIVES | {"drift": Drift()}
MODELS = {"linear": [], "one hidden": [7], "two hidden": [9, 6]}


def federation(shards: Sequence[Tensor], seed: int = 0, **more) -> Federation:
    """These training samples, with labels at random; and four test samples each."""
    generator = torch.Generator().manual_seed(seed)
    x, train, test, begin = [], [], [], 0
    for shard in shards:
        x += [shard, shard[:1].repeat(4, *[1] * (shard.dim() - 1))]
        middle = begin + len(shard)
        train.append(slice(begin, middle))
        test.append(slice(middle, middle + 4))
        begin = middle + 4
    options = {"mean": None, "std": None} | more
    return Federation(
        name="numbers",
        x=torch.cat(x),
        y=torch.randint(CLASSES, (begin,), generator=generator),
        train=tuple(train),
        test=tuple(test),
        outputs=CLASSES,
        groups=None,
        vocabulary=None,
        description="numbers",
        partition={},
        **options,
    )


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
NAMES = list(SHARDS)
FEDERATION = federation(list(SHARDS.values()))


def network(hidden: Sequence[int], features: int = FEATURES, dtype=torch.float64) -> nn.Module:
    widths = [features, *hidden, CLASSES]
    layers: list[nn.Module] = [nn.Flatten()]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        for before, after in itertools.pairwise(widths):
            layers += [nn.Linear(before, after), nn.ReLU()]
    return nn.Sequential(*layers[:-1]).to(dtype)


def pair(hidden: Sequence[int], fed: Federation = FEDERATION, **options):
    """The fast trainer, and the plain one."""
    features = fed.x[0].numel()
    return tuple(
        trainer(network(hidden, features, **options), fed, SEED)
        for trainer in (DenseSolver, AutogradSolver)
    )


def job_for(trainer: AutogradSolver, name: str | int, task: Task = TASK, **more) -> Job:
    client = NAMES.index(name) if isinstance(name, str) else name
    job = Job(client, trainer.layout.read(), task, ("client", client, "dispatch", 3))
    return replace(job, **more)


def assert_same_upload(fast: AutogradSolver, plain: AutogradSolver, job: Job) -> None:
    found, expected = upload_of(fast, job), upload_of(plain, job)
    assert found.shape == expected.shape
    assert found.dtype == expected.dtype
    if found.dtype == torch.float64:
        bound = 1e-10 * expected.norm()
    else:  # a small difference of large models has their rounding errors
        whole = expected if job.task.upload == "gradient" else job.params
        bound = 1e-5 * whole.norm()
    assert (found - expected).norm() <= bound
    assert expected.norm() > 0


# -- the same uploads ---------------------------------------------------------------------------


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("kind", OBJECTIVES)
def test_uploads_are_those_of_plain_training(model, kind):
    fast, plain = pair(MODELS[model])
    task = replace(TASK, objective=OBJECTIVES[kind])
    for name in ("few", "many", "degenerate"):
        assert_same_upload(fast, plain, job_for(fast, name, task))


@pytest.mark.parametrize("kind", OBJECTIVES)
def test_in_single_precision_too(kind):
    fast, plain = pair([9, 6], dtype=torch.float32)
    for upload in ("model", "delta", "gradient"):
        task = replace(TASK, objective=OBJECTIVES[kind], upload=upload)
        for name in ("few", "many"):
            assert_same_upload(fast, plain, job_for(fast, name, task))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("model", ["linear", "two hidden"])
def test_on_all_kinds_of_data(model, name):
    fast, plain = pair(MODELS[model])
    for size, objective in ((4, Pull(0.5)), (64, Plain())):
        task = replace(TASK, batch_size=size, objective=objective)
        assert_same_upload(fast, plain, job_for(fast, name, task))


@pytest.mark.parametrize("name", ["a batch and one more", "two batches and one more"])
@pytest.mark.parametrize("epochs", [1, 20])
def test_a_lone_last_sample_joins_a_batch_that_is_full(name, epochs):
    fast, plain = pair([7])
    task = replace(TASK, batch_size=16, epochs=epochs)
    assert_same_upload(fast, plain, job_for(fast, name, task))


@pytest.mark.parametrize("upload", ["model", "delta", "gradient"])
@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("weight_decay", [0.0, 0.02])
def test_with_and_without_momentum_and_weight_decay(upload, momentum, weight_decay):
    fast, plain = pair([7])
    task = replace(TASK, upload=upload, optimizer=Sgd(momentum=momentum, weight_decay=weight_decay))
    for name in ("few", "many"):
        for objective in (Plain(), Pull(0.5)):
            job = job_for(fast, name, replace(task, objective=objective))
            assert_same_upload(fast, plain, job)


def elsewhere(trainer: AutogradSolver, seed: int = 0) -> Tensor:
    """Some vector that is not the model."""
    start = trainer.layout.read()
    noise = torch.randn(len(start), generator=torch.Generator().manual_seed(seed))
    return start + 0.3 * noise.to(start.dtype)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["double", "single"])
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("kind", ANCHORED)
def test_with_an_anchor_that_was_sent_along(model, kind, dtype):
    fast, plain = pair(MODELS[model], dtype=dtype)
    anchor = elsewhere(fast) * (0.02 if kind == "drift" else 1)  # it is a gradient there
    for upload in ("model", "delta", "gradient"):
        task = replace(TASK, objective=ANCHORED[kind], upload=upload, epochs=2)
        for name in ("few", "many", "lone last sample"):
            job = job_for(fast, name, task, vectors={"anchor": anchor})
            assert_same_upload(fast, plain, job)
            if kind not in ("plain", "drift"):  # it refers to the anchor, not to the model
                without = upload_of(fast, replace(job, vectors={}))
                assert not torch.allclose(upload_of(fast, job), without)


def test_an_anchor_is_not_written_to():
    fast, _ = pair([7])
    anchor = elsewhere(fast)
    before = anchor.clone()
    task = replace(TASK, objective=Proximal(0.7))
    upload_of(fast, job_for(fast, "few", task, vectors={"anchor": anchor}))
    assert torch.equal(anchor, before)


@settings(max_examples=60)
@given(
    model=st.sampled_from(list(MODELS)),
    kind=st.sampled_from(list(OBJECTIVES)),
    name=st.sampled_from(NAMES),
    task=st.builds(
        Task,
        epochs=st.integers(1, 6),
        steps=st.none() | st.integers(1, 30),
        batch_size=st.integers(1, 20),
        lr=st.sampled_from([0.001, 0.1, 0.3]),
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
            epsilon=st.just(1e-3),  # small ones turn rounding errors of nothing into whole steps
            weight_decay=st.sampled_from([0.0, 0.1]),
        ),
        upload=st.sampled_from(["model", "delta", "gradient"]),
    ),
    data=st.data(),
)
def test_any_job(model, kind, name, task, data):
    fast, plain = pair(MODELS[model])
    job = job_for(fast, name, replace(task, objective=OBJECTIVES[kind]))
    total = task.total_steps(FEDERATION.samples[job.client])
    first = data.draw(st.integers(0, total - 1))
    last = data.draw(st.none() | st.integers(first + 1, total))
    vectors = {"anchor": elsewhere(fast)} if data.draw(st.booleans(), label="anchor") else {}
    steps = {"first_step": first, "last_step": last}
    assert_same_upload(fast, plain, replace(job, vectors=vectors, **steps))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["double", "single"])
@pytest.mark.parametrize("objective", [Plain(), Pull(3.0), Pull(-3.0), Proximal(2.0)], ids=str)
def test_errors_do_not_grow_over_a_long_training(objective, dtype):
    fast, plain = pair([7], dtype=dtype)
    task = replace(TASK, epochs=30, batch_size=6, lr=0.05, objective=objective)
    assert_same_upload(fast, plain, job_for(fast, "few", task))


def test_part_of_a_schedule_is_not_the_whole():
    fast, plain = pair([7])
    for name in ("few", "many"):
        job = job_for(fast, name)
        results = []
        for first, last in [(0, None), (2, None), (0, 3), (2, 3)]:
            part = replace(job, first_step=first, last_step=last)
            assert_same_upload(fast, plain, part)
            results.append(upload_of(fast, part))
        for k, result in enumerate(results):
            assert not any(torch.allclose(result, other) for other in results[:k])


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("kind", ["plain", "proximal", "cosine", "inner"])
def test_a_model_of_zeros(model, kind):
    fast, plain = pair(MODELS[model])
    task = replace(TASK, objective=OBJECTIVES[kind])
    for name in ("few", "many"):
        job = job_for(fast, name, task, params=torch.zeros(fast.layout.size, dtype=torch.float64))
        assert_same_upload(fast, plain, job)


@pytest.mark.parametrize(
    ("dtype", "bound"), [(torch.float64, 1e-12), (torch.float32, 1e-6)], ids=["double", "single"]
)
@pytest.mark.parametrize("share", [1.0, 1e-4, 1e-6, 1e-8, 1e-10])
def test_what_stands_at_right_angles_to_the_samples_is_kept(share, dtype, bound):
    """However little that is: others have learned it. (A model that begins as zero and is trained
    on this client alone has none of it; mixed with those of others, some.)"""
    fast, plain = pair([], dtype=dtype)
    samples = SHARDS["few"].double()
    for seed in range(3):
        generator = torch.Generator().manual_seed(seed)
        inside, drawn = (
            torch.randn(CLASSES, size, generator=generator, dtype=torch.float64)
            for size in (len(samples), FEATURES)
        )
        inside = inside @ samples
        outside = drawn - drawn @ torch.linalg.pinv(samples) @ samples
        weight = inside / inside.norm() + share * outside / outside.norm()
        params = torch.cat([weight.flatten(), torch.zeros(CLASSES, dtype=torch.float64)])
        job = job_for(fast, "few", replace(TASK, lr=0.001), params=params.to(dtype))
        found, expected = upload_of(fast, job), upload_of(plain, job)
        assert (found - expected).norm() <= bound


def test_images_are_prepared_as_for_plain_training():
    generator = torch.Generator().manual_seed(0)
    shards = [
        torch.randint(256, (size, 2, 5, 6), generator=generator, dtype=torch.uint8)
        for size in (11, 90)
    ]
    fed = federation(shards, mean=(0.3, 0.5), std=(0.2, 0.7))
    fast, plain = pair([7], fed)
    for client in range(2):
        job = job_for(fast, client)
        assert_same_upload(fast, plain, job)
        exam = Exam(job.params, [client])
        assert fast.evaluate(exam) == plain.evaluate(exam)


def test_neither_the_data_nor_the_received_model_is_written_to():
    fast, _ = pair([7], dtype=torch.float32)
    before = FEDERATION.x.clone()
    for name in NAMES:
        job = job_for(fast, name)
        received = job.params.clone()
        upload = upload_of(fast, job)
        assert torch.equal(job.params, received)
        assert not torch.equal(upload, received)
    assert torch.equal(FEDERATION.x, before)


# -- what is trained together -------------------------------------------------------------------


def crowd(sizes: Sequence[int], features: int) -> Federation:
    return federation([draw(size, features, seed=k) for k, size in enumerate(sizes)])


CROWDS = {
    "linear": (crowd([10, 11, 12, 13, 45, 46, 47, 48], 37), []),
    "small": (crowd([10, 11, 12, 13, 45, 46, 47, 48], 64), [20]),
    "deep": (crowd([24, 25, 26, 27, 28, 60, 61, 62], 50), [33, 17]),
    "large": (crowd([20, 22, 24, 26, 60, 61, 62, 63], 123), [100]),
}


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("linear", "plain"),
        ("linear", "cosine"),
        ("small", "cosine"),
        ("small", "l2"),
        ("deep", "plain"),
        ("deep", "proximal unsquared"),
        ("large", "cosine"),
    ],
)
def test_results_are_the_same_bit_for_bit_in_any_group_and_order(name, kind):
    fed, hidden = CROWDS[name]
    task = Task(
        epochs=6,
        batch_size=10,
        lr=0.1,
        objective=OBJECTIVES[kind],
        optimizer=Sgd(weight_decay=1e-3),
    )
    trainer = DenseSolver(network(hidden, fed.x.shape[1], torch.float32), fed, SEED)
    assert trainer.group > 1
    start = trainer.layout.read()
    jobs = []
    for client in range(fed.clients):
        other = start + torch.randn(len(start), generator=torch.Generator().manual_seed(client))
        job = Job(client, start, task, ("client", client, "dispatch", 0))
        jobs += [job, replace(job, params=other, first_step=client % 3, last_step=5 + client)]
        anchored = zip(jobs[-2:], (other, start), strict=True)
        jobs += [replace(job, vectors={"anchor": anchor}) for job, anchor in anchored]
    alone = [upload_of(trainer, job) for job in jobs]
    plain = AutogradSolver(network(hidden, fed.x.shape[1], torch.float32), fed, SEED)
    torch.testing.assert_close(alone[0], upload_of(plain, jobs[0]), rtol=1e-4, atol=1e-5)

    @settings(max_examples=6)
    @given(chosen=st.permutations(range(len(jobs))), most=st.integers(2, 16))
    def check(chosen, most):
        groups: dict[int, list[int]] = {}
        kinds: list[object] = []
        for number in chosen:
            kind = trainer.kind(jobs[number])
            if kind not in kinds:
                kinds.append(kind)
            groups.setdefault(kinds.index(kind), []).append(number)
        for group in groups.values():
            together = uploads_of(trainer, [jobs[number] for number in group[:most]])
            for number, upload in zip(group[:most], together, strict=True):
                assert torch.equal(upload, alone[number])

    check()


def test_every_job_of_a_group_has_its_own_anchor():
    """Jobs are sorted by their steps, and come back in the order in which they were given."""
    fed, hidden = CROWDS["small"]
    trainer = DenseSolver(network(hidden, 64, torch.float32), fed, SEED)
    task = Task(epochs=3, batch_size=10, lr=0.1, objective=Proximal(0.9))
    jobs = []
    for k, (client, last) in enumerate([(0, 2), (1, None), (2, 1), (3, 3)]):
        stream = ("client", client)
        vectors = {"anchor": elsewhere(trainer, k)}
        job = Job(client, trainer.layout.read(), task, stream, 0, last, vectors)
        jobs.append(job)
    assert all(trainer.kind(job) == trainer.kind(jobs[0]) for job in jobs)
    plain = AutogradSolver(network(hidden, 64, torch.float32), fed, SEED)
    for job, found in zip(jobs, uploads_of(trainer, jobs), strict=True):
        torch.testing.assert_close(found, upload_of(plain, job), rtol=1e-4, atol=1e-5)
        assert torch.equal(found, upload_of(trainer, job))


def test_a_new_trainer_and_an_old_one_give_the_same_bits():
    """Whatever it has remembered of earlier jobs."""
    fed, hidden = CROWDS["small"]
    old = DenseSolver(network(hidden, 64, torch.float32), fed, SEED)
    for client in (3, 1, 0, 2, 0, 7):
        job = Job(client, old.layout.read(), TASK, ("client", client))
        new = DenseSolver(network(hidden, 64, torch.float32), fed, SEED)
        assert torch.equal(upload_of(old, job), upload_of(new, job))


def test_jobs_of_different_tasks_are_of_different_kinds():
    fast, _ = pair([7])
    job = job_for(fast, "few")
    assert fast.kind(job) == fast.kind(replace(job, stream=("other",), first_step=1))
    for change in ({"lr": 0.2}, {"upload": "delta"}, {"objective": Proximal(0.1)}):
        assert fast.kind(job) != fast.kind(replace(job, task=replace(TASK, **change)))
    anchored = replace(job, vectors={"anchor": elsewhere(fast)})
    assert fast.kind(anchored) != fast.kind(job)
    assert fast.kind(anchored) == fast.kind(replace(job, vectors={"anchor": job.params}))
    # these two are not trained in the same way, or half of the tests here are in vain
    assert fast.kind(job) != fast.kind(job_for(fast, "many"))


def test_large_models_are_trained_one_at_a_time():
    assert DenseSolver(network([7]), FEDERATION, SEED).group > 1
    fed = federation([draw(3, 3000)])
    assert DenseSolver(network([500], 3000, torch.float32), fed, SEED).group == 1


# -- memory -------------------------------------------------------------------------------------


def held(thing: object, seen: set[int]) -> int:
    """Bytes of all tensors that can be reached from this, each counted once."""
    if id(thing) in seen:
        return 0
    seen.add(id(thing))
    if isinstance(thing, Tensor):
        return thing.untyped_storage().nbytes()
    if isinstance(thing, dict):
        return sum(held(value, seen) for value in thing.values())
    if isinstance(thing, list | tuple):
        return sum(held(value, seen) for value in thing)
    return held(vars(thing), seen) if hasattr(thing, "__dict__") else 0


def test_what_is_remembered_of_clients_is_bounded(monkeypatch):
    fed = crowd([20 + k % 5 for k in range(40)], 400)
    trainer = DenseSolver(network([7], 400, torch.float32), fed, SEED)
    jobs = [Job(client, trainer.layout.read(), TASK, ("client", client)) for client in range(40)]

    def remembered() -> int:
        given = (trainer.layout, trainer.federation, trainer.x, trainer.y)
        return held(trainer, {id(thing) for thing in given})

    first = upload_of(trainer, jobs[0])
    one = remembered()
    assert one > 0  # it does remember something, or this test is in vain
    monkeypatch.setattr(dense, "_KEPT", int(5.5 * one))
    for job in jobs:
        upload_of(trainer, job)
        assert remembered() <= 5.5 * one
    assert remembered() >= 2 * one
    assert torch.equal(upload_of(trainer, jobs[0]), first)
    monkeypatch.setattr(dense, "_KEPT", 0)
    for job in jobs[:8]:
        uploads_of(trainer, [job])
        assert remembered() <= one  # the last one may stay
    assert torch.equal(uploads_of(trainer, jobs[:8])[0], first)


# -- which modules ------------------------------------------------------------------------------


def frozen() -> nn.Module:
    module = network([7])
    module[1].weight.requires_grad_(False)
    return module


@pytest.mark.parametrize(
    "module",
    [
        nn.Sequential(nn.Linear(40, 5)),
        nn.Sequential(nn.Flatten(), nn.Linear(40, 5)),
        nn.Sequential(nn.Linear(40, 7), nn.ReLU(), nn.Linear(7, 5)),
        nn.Sequential(nn.Flatten(), nn.Linear(40, 7), nn.ReLU(inplace=True), nn.Linear(7, 5)),
    ],
)
def test_stacks_fit(module):
    assert DenseSolver.fits(module)


@pytest.mark.parametrize(
    "module",
    [
        nn.Linear(40, 5),
        nn.Sequential(),
        nn.Sequential(nn.Flatten()),
        nn.Sequential(nn.Linear(40, 5, bias=False)),
        nn.Sequential(nn.Linear(40, 7), nn.ReLU(), nn.Linear(7, 5, bias=False)),
        nn.Sequential(nn.Linear(40, 7), nn.Tanh(), nn.Linear(7, 5)),
        nn.Sequential(nn.Linear(40, 7), nn.ReLU(), nn.Dropout(0.5), nn.Linear(7, 5)),
        nn.Sequential(nn.Dropout(0.5), nn.Linear(40, 5)),
        nn.Sequential(nn.Linear(40, 7), nn.Linear(7, 5)),
        nn.Sequential(nn.Linear(40, 5), nn.ReLU()),
        nn.Sequential(nn.ReLU(), nn.Linear(40, 5)),
        nn.Sequential(nn.Linear(40, 7), nn.Flatten(), nn.ReLU(), nn.Linear(7, 5)),
        nn.Sequential(nn.Sequential(nn.Linear(40, 5))),
        nn.Sequential(nn.Linear(40, 7), nn.BatchNorm1d(7), nn.Linear(7, 5)),
        nn.Sequential(nn.Conv1d(1, 3, 5), nn.ReLU(), nn.Linear(36, 5)),
        frozen(),
    ],
    ids=lambda module: " ".join(type(layer).__name__ for layer in module.children()) or "no layers",
)
def test_what_is_no_stack_does_not_fit(module):
    assert not DenseSolver.fits(module)


class Doubled(nn.Sequential):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


class DoubledLinear(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


class Leaky(nn.ReLU):
    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.leaky_relu(x, 0.5)


def tied() -> nn.Module:
    layer = nn.Linear(40, 40)
    return nn.Sequential(layer, nn.ReLU(), layer)


def hooked() -> nn.Module:
    module = nn.Sequential(nn.Linear(40, 5))
    module[0].register_forward_hook(lambda layer, inputs, outputs: 2 * outputs)
    return module


def normed() -> nn.Module:
    return nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(40, 5)))


UNUSUAL = {
    "own forward": lambda: Doubled(nn.Linear(40, 5)),
    "own layer": lambda: nn.Sequential(DoubledLinear(40, 5)),
    "own ReLU": lambda: nn.Sequential(nn.Linear(40, 7), Leaky(), nn.Linear(7, 5)),
    "one layer twice": tied,
    "hook": hooked,
    "weights that are computed": normed,
    "flatten at the end": lambda: nn.Sequential(nn.Linear(40, 5), nn.Flatten()),
    "subclass": lambda: type("Plain", (nn.Sequential,), {})(nn.Linear(40, 5)),
}


@pytest.mark.parametrize("name", UNUSUAL)
def test_a_module_that_fits_is_trained_as_it_computes(name):
    """However it is made up: either it is refused, or the results are right."""
    modules = []
    for _ in range(2):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(1)
            modules.append(UNUSUAL[name]().double())
    if DenseSolver.fits(modules[0]):
        fast, plain = (
            kind(module, FEDERATION, SEED)
            for kind, module in zip((DenseSolver, AutogradSolver), modules, strict=True)
        )
        for client in ("few", "many"):
            assert_same_upload(fast, plain, job_for(fast, client))


def test_a_flattening_between_layers_does_not_fit():
    """Here it is no formality: the first layer takes each row of an image for itself."""
    module = nn.Sequential(nn.Linear(6, 4), nn.Flatten(), nn.ReLU(), nn.Linear(20, 5))
    assert module(torch.zeros(3, 5, 6)).shape == (3, 5)
    assert not DenseSolver.fits(module)


def test_tied_weights_do_not_fit():
    module = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
    assert DenseSolver.fits(module)
    module[2].weight = module[0].weight
    assert not DenseSolver.fits(module)
