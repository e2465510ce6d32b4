"""Training on the words that a client has gives what training on all words does."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from polytempo import Federation, Plain, Proximal, Pull, Task
from polytempo.core.layout import Parts
from polytempo.core.objective import Drift
from polytempo.core.optimizer import Sgd
from polytempo.models import Inputs, build
from polytempo.training import AutogradSolver, Exam, Job
from solving import WithoutDoubles, upload_of

SEED, VOCABULARY, LENGTH, CLASSES = 4, 40, 9, 3
PADDED, UNPADDED, EVERY_WORD, NO_WORD, ONE_TEXT = range(5)  # clients
TASK = Task(epochs=2, batch_size=4, lr=0.1, optimizer=Sgd(momentum=0.9, weight_decay=0.02))
OBJECTIVES = {
    "plain": Plain(),
    "proximal": Proximal(0.7),
    "proximal unsquared": Proximal(0.3, power=1),
    "cosine": Pull(0.8, "cosine"),
    "inner": Pull(0.8, "inner"),
    "l2": Pull(0.8, "l2"),
    "away": Pull(-0.8, "cosine"),
}


def token_federation() -> Federation:
    generator = torch.Generator().manual_seed(0)

    def draw(low: int, high: int, samples: int) -> Tensor:
        return torch.randint(low, high, (samples, LENGTH), generator=generator)

    shards = [
        draw(3, 12, 11).masked_fill(torch.arange(LENGTH) > 5, 0),
        draw(15, 25, 10),
        torch.cat([torch.arange(VOCABULARY), torch.zeros(5, dtype=torch.long)]).view(5, LENGTH),
        torch.zeros(6, LENGTH, dtype=torch.long),
        draw(30, VOCABULARY, 1),
    ]
    test = draw(0, VOCABULARY, 8)
    x = torch.cat([torch.cat([shard, test]) for shard in shards])
    train, tests, begin = [], [], 0
    for shard in shards:
        middle = begin + len(shard)
        train.append(slice(begin, middle))
        tests.append(slice(middle, middle + len(test)))
        begin = middle + len(test)
    return Federation(
        name="words",
        x=x,
        y=torch.randint(CLASSES, (len(x),), generator=generator),
        train=tuple(train),
        test=tuple(tests),
        outputs=CLASSES,
        groups=None,
        mean=None,
        std=None,
        vocabulary=VOCABULARY,
        description="words",
        partition={},
    )


FEDERATION = token_federation()


def text_model(dtype: torch.dtype = torch.float64, dropout: float = 0.0) -> nn.Module:
    spec = {"name": "textcnn", "embedding": 5, "filters": 4, "widths": [2, 3], "dropout": dropout}
    return build(spec, Inputs((LENGTH,), CLASSES, VOCABULARY), seed=1).to(dtype)


class Own(nn.Module):
    """A user's model: parameters on both sides of the table, a frozen one, and buffers."""

    token_table = "lookup.words"

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.rand(6) + 0.5)
        self.fixed = nn.Parameter(torch.randn(6), requires_grad=False)
        self.lookup = nn.ModuleDict({"words": nn.Embedding(VOCABULARY, 6)})  # row 0 is trained
        self.norm = nn.BatchNorm1d(6)
        self.output = nn.Linear(6, CLASSES)

    def forward(self, tokens: Tensor) -> Tensor:
        mean = (self.lookup["words"](tokens) * self.scale + self.fixed).mean(1)
        return self.output(self.norm(mean))


def own_model(dtype: torch.dtype = torch.float64) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(2)
        return Own().to(dtype)


def trainers(make=text_model, **options) -> tuple[AutogradSolver, AutogradSolver]:
    """One that knows of the table, one that does not."""
    ordinary = make(**options)
    ordinary.token_table = None
    return AutogradSolver(make(**options), FEDERATION, SEED), AutogradSolver(
        ordinary, FEDERATION, SEED
    )


def job_for(trainer: AutogradSolver, client: int, task: Task = TASK, **more) -> Job:
    return Job(client, trainer.layout.read(), task, ("client", client, "dispatch", 3), **more)


def assert_same_upload(fast: AutogradSolver, slow: AutogradSolver, job: Job) -> None:
    found, expected = upload_of(fast, job), upload_of(slow, job)
    assert found.shape == expected.shape
    assert found.dtype == expected.dtype
    if found.dtype == torch.float64:
        bound = 1e-10 * expected.norm()
    else:  # a small difference of large models has their rounding errors
        whole = expected if job.task.upload == "gradient" else job.params
        bound = 1e-5 * whole.norm()
    assert (found - expected).norm() <= bound
    assert expected.norm() > 0


def table_sizes(trainer: AutogradSolver) -> list[int]:
    """Filled with the number of rows that the table has whenever the model is used."""
    module = trainer.layout.module
    table, sizes = module.get_submodule(type(module).token_table), []
    module.register_forward_pre_hook(lambda *_: sizes.append(len(table.weight)))
    return sizes


# -- the same uploads ---------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("upload", ["model", "delta", "gradient"])
@pytest.mark.parametrize("kind", OBJECTIVES)
def test_uploads_are_those_of_training_on_all_words(kind, upload, dtype):
    fast, slow = trainers(dtype=dtype, dropout=0.3)
    sizes = table_sizes(fast)
    task = replace(TASK, objective=OBJECTIVES[kind], upload=upload)
    for client in (PADDED, UNPADDED):
        assert_same_upload(fast, slow, job_for(fast, client, task))
    assert set(sizes) == {1 + 9, 1 + 10}  # padding, and the words of each


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("weight_decay", [0.0, 0.02])
@pytest.mark.parametrize("kind", ["plain", "proximal unsquared", "cosine", "l2"])
def test_with_and_without_momentum_and_weight_decay(kind, momentum, weight_decay):
    fast, slow = trainers()
    task = replace(
        TASK,
        objective=OBJECTIVES[kind],
        epochs=3,
        optimizer=Sgd(momentum=momentum, weight_decay=weight_decay),
    )
    for client in (PADDED, UNPADDED):
        assert_same_upload(fast, slow, job_for(fast, client, task))


@pytest.mark.parametrize("client", [EVERY_WORD, NO_WORD, ONE_TEXT])
@pytest.mark.parametrize("upload", ["model", "gradient"])
def test_clients_with_all_words_none_or_a_single_text(client, upload):
    fast, slow = trainers()
    task = replace(TASK, objective=Pull(0.5), upload=upload)
    assert_same_upload(fast, slow, job_for(fast, client, task))


def test_a_padding_vector_that_is_not_zero_is_kept():
    """An average of models may have one; weight decay acts on it, the loss does not."""
    fast, slow = trainers()
    params = fast.layout.read() + 0.1
    for client in (PADDED, UNPADDED, NO_WORD):
        assert_same_upload(fast, slow, replace(job_for(fast, client), params=params))


def test_the_rest_of_a_schedule():
    fast, slow = trainers(dropout=0.5)
    job = job_for(fast, PADDED, replace(TASK, objective=Proximal(0.5)))
    part = replace(job, first_step=2, last_step=5)
    assert_same_upload(fast, slow, part)
    assert not torch.allclose(upload_of(fast, part), upload_of(fast, job))


def test_an_objective_that_knows_coordinates_trains_the_whole_table():
    fast, slow = trainers()
    sizes = table_sizes(fast)
    task = replace(TASK, objective=Pull(0.8, "l1"))
    assert_same_upload(fast, slow, job_for(fast, PADDED, task))
    assert set(sizes) == {VOCABULARY}


@pytest.mark.parametrize("make", [text_model, own_model])
@pytest.mark.parametrize("upload", ["model", "delta", "gradient"])
@pytest.mark.parametrize("kind", [*OBJECTIVES, "drift"])
def test_an_anchor_that_was_sent_along_trains_the_whole_table(kind, upload, make):
    """It may stand anywhere, so that words which the client does not have go to their own places
    in it."""
    fast, slow = trainers(make)
    sizes = table_sizes(fast)
    task = replace(TASK, objective=(OBJECTIVES | {"drift": Drift()})[kind], upload=upload)
    draw = torch.Generator().manual_seed(5)
    noise = torch.randn(fast.layout.size, generator=draw, dtype=torch.float64)
    for client in (PADDED, UNPADDED):
        job = job_for(fast, client, task)
        assert_same_upload(fast, slow, replace(job, vectors={"anchor": job.params + noise}))
    assert set(sizes) == {VOCABULARY}
    assert_same_upload(fast, slow, replace(job_for(fast, PADDED, TASK)))  # and then a part again
    assert min(sizes) < VOCABULARY


def test_foreign_words_go_straight_to_the_anchor():
    """No loss, no decay: w - u shrinks by 1 - lr mu in every step."""
    fast, _ = trainers()
    task = replace(TASK, objective=Proximal(0.5), optimizer=Sgd(momentum=0.0, weight_decay=0.0))
    job = job_for(fast, PADDED, task)
    draw = torch.Generator().manual_seed(5)
    anchor = torch.randn(fast.layout.size, generator=draw, dtype=torch.float64)
    after, words = table(upload_of(fast, replace(job, vectors={"anchor": anchor}))), foreign_words()
    left = (1 - 0.1 * 0.5) ** task.total_steps(FEDERATION.samples[PADDED])
    expected = table(anchor) + left * (table(job.params) - table(anchor))
    torch.testing.assert_close(after[words], expected[words], rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("upload", ["model", "delta", "gradient"])
@pytest.mark.parametrize("kind", OBJECTIVES)
def test_a_model_of_the_users_own(kind, upload):
    fast, slow = trainers(own_model)
    sizes = table_sizes(fast)
    params = fast.layout.read()
    task = replace(TASK, objective=OBJECTIVES[kind], upload=upload)
    for client in (PADDED, UNPADDED, EVERY_WORD):
        assert_same_upload(fast, slow, job_for(fast, client, task))
    assert sizes[0] < VOCABULARY
    found = upload_of(fast, job_for(fast, PADDED, replace(TASK, upload="delta")))
    trained, statistics = fast.layout.parameters, 2 * 6
    assert len(params) == trained + statistics  # what is not trained does not travel
    assert found[trained:].abs().min() > 0  # running mean and variance have moved


def test_statistics_that_do_not_travel():
    modules = own_model(), own_model()
    modules[1].token_table = None
    at_home = Parts(buffers="reset")
    fast, slow = (AutogradSolver(module, FEDERATION, SEED, at_home) for module in modules)
    job = job_for(fast, PADDED)
    for _ in range(2):  # they are set back each time
        assert_same_upload(fast, slow, job)


# -- the words that a client does not have ------------------------------------------------------


def table(vector: Tensor) -> Tensor:
    """The table comes first in a TextCNN's vector."""
    return vector[: VOCABULARY * 5].view(VOCABULARY, 5)


def foreign_words() -> list[int]:
    own = set(FEDERATION.x[FEDERATION.train[PADDED]].flatten().tolist()) | {0}
    return sorted(set(range(VOCABULARY)) - own)


def test_weight_decay_shrinks_foreign_words_by_a_known_factor():
    fast, _ = trainers()
    task = replace(TASK, optimizer=Sgd(momentum=0.0, weight_decay=0.02))
    job = job_for(fast, PADDED, task)
    steps = task.total_steps(FEDERATION.samples[PADDED])
    before, after = table(job.params), table(upload_of(fast, job))
    words = foreign_words()
    expected = before[words] * (1 - 0.1 * 0.02) ** steps
    torch.testing.assert_close(after[words], expected, rtol=1e-12, atol=0)
    own = sorted(set(range(1, VOCABULARY)) - set(words))
    assert (after[own] - before[own] * (1 - 0.1 * 0.02) ** steps).abs().sum(1).min() > 1e-4


@pytest.mark.parametrize("kind", OBJECTIVES)
def test_all_foreign_words_are_scaled_alike(kind):
    fast, _ = trainers()
    job = job_for(fast, PADDED, replace(TASK, objective=OBJECTIVES[kind]))
    before, after = table(job.params), table(upload_of(fast, job))
    factors = (after / before)[foreign_words()]
    assert factors.std() <= 1e-12 * factors.mean()
    assert abs(factors.mean() - 1) > 1e-6


@pytest.mark.parametrize("seed", range(6))
def test_without_weight_decay_foreign_words_do_not_change_by_a_bit(seed):
    fast, _ = trainers(dtype=torch.float32)
    draws = torch.randn(fast.layout.size, generator=torch.Generator().manual_seed(seed))
    task = replace(TASK, optimizer=Sgd(weight_decay=0.0))
    job = replace(job_for(fast, PADDED, task), params=draws)
    after = upload_of(fast, job)
    assert torch.equal(table(after)[foreign_words()], table(draws)[foreign_words()])


# -- what is left behind ------------------------------------------------------------------------


@pytest.mark.parametrize("make", [text_model, own_model])
def test_the_module_is_whole_again_after_training(make):
    fast, slow = trainers(make)
    params = fast.layout.read()
    trained = upload_of(fast, job_for(fast, PADDED))
    for model in (params, trained):
        assert fast.evaluate(Exam(model, [0, 1, 2])) == slow.evaluate(Exam(model, [0, 1, 2]))
    # the other way to train uses the same parameters and gradients
    coordinates = replace(TASK, objective=Pull(0.8, "l1"))
    assert_same_upload(fast, slow, Job(UNPADDED, params, coordinates, ("a",)))
    fast.layout.load(trained)
    learned = [p for p in fast.layout.module.parameters() if p.requires_grad]
    flat = torch.cat([p.detach().flatten() for p in learned])
    assert torch.equal(flat.sort().values, trained[: len(flat)].sort().values)


class Fails(RuntimeError):
    pass


def test_a_training_that_fails_leaves_the_module_whole():
    fast, slow = trainers()
    job, calls = job_for(fast, PADDED), []

    def fail(*_) -> None:
        calls.append(0)
        if len(calls) == 2:
            raise Fails

    handle = fast.layout.module.register_forward_pre_hook(fail)
    with pytest.raises(Fails):
        upload_of(fast, job)
    handle.remove()
    assert fast.evaluate(Exam(job.params, [2])) == slow.evaluate(Exam(job.params, [2]))
    coordinates = replace(TASK, objective=Pull(0.8, "l1"))
    assert_same_upload(fast, slow, replace(job, task=coordinates))
    assert_same_upload(fast, slow, job)


def test_results_do_not_depend_on_earlier_trainings():
    fast, _ = trainers()
    jobs = [job_for(fast, client) for client in (PADDED, UNPADDED, EVERY_WORD, ONE_TEXT)]
    first = [upload_of(fast, job) for job in jobs]
    again = [upload_of(fast, job) for job in reversed(jobs)][::-1]
    for a, b in zip(first, again, strict=True):
        assert torch.equal(a, b)


# -- when it applies ----------------------------------------------------------------------------


def test_a_table_that_is_not_trained_is_left_alone():
    modules = text_model(), text_model()
    for module in modules:
        module.embedding.weight.requires_grad_(False)
    modules[1].token_table = None
    fast, slow = (AutogradSolver(module, FEDERATION, SEED) for module in modules)
    sizes = table_sizes(fast)
    assert_same_upload(fast, slow, job_for(fast, PADDED))
    assert set(sizes) == {VOCABULARY}


def test_the_received_model_is_not_written_to():
    fast, _ = trainers()
    job = job_for(fast, PADDED)
    before = job.params.clone()
    for upload in ("model", "delta", "gradient"):
        upload_of(fast, replace(job, task=replace(TASK, upload=upload)))
    assert torch.equal(job.params, before)


def test_a_device_without_doubles_finds_the_same_part():
    solver = AutogradSolver(text_model(torch.float32), FEDERATION, SEED)
    tokens, params = FEDERATION.x[FEDERATION.train[PADDED]], solver.layout.read()
    expected = solver.vocabulary.part(tokens, params)
    found = solver.vocabulary.part(*(part.as_subclass(WithoutDoubles) for part in (tokens, params)))
    assert found.rest == expected.rest > 0
    assert torch.equal(found.theta, expected.theta)
