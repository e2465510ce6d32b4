"""IFCA: independent models, the client's own choice, clusters that nobody chose."""

import numpy as np
import pytest
import torch
from linear_model import gradient
from torch import nn

from polytempo import Context, Server, Staleness, Task, Update
from polytempo.core.client_steps import Choose
from polytempo.core.errors import Refused
from polytempo.core.optimizer import Sgd
from polytempo.simulation import Simulator
from polytempo.strategies import IFCA, IFCAAsync
from polytempo.training import AutogradSolver, Job, make_executor
from solving import NATIVE

TENSORS = [12, 4]


def context(clients=4) -> Context:
    initial = torch.cat([torch.randn(12), 100 + torch.randn(4), torch.full((3,), 7.0)])
    return Context(initial, [10, 20, 30, 40][:clients], Task(), seed=0, tensors=TENSORS)


def update(client, vector, choice) -> Update:
    samples = [10, 20, 30, 40][client]
    return Update(client, 0, vector, samples, {"choice": torch.tensor([[choice]])})


def test_models_begin_independently_but_at_the_same_scale():
    made = context()
    models = [made.initial, *(made.another_initial(number) for number in range(1, 4))]
    for k, model in enumerate(models):
        assert model[12:16].min() > 50 > model[:12].max()  # layers are not mixed
        assert torch.equal(model[16:], made.initial[16:])  # what is not trained is the same
        assert torch.equal(model.sort().values, made.initial.sort().values)
        assert all(not torch.equal(model[:16], other[:16]) for other in models[:k])
    assert torch.equal(models[2], made.another_initial(2))


def test_all_models_are_sent_the_last_choice_first():
    server = Server(IFCAAsync(k=3), context())
    first = server.join([2])[0]
    models = list(server.strategy.models)
    assert list(first.vectors) == ["candidate 1", "candidate 2"]
    assert all(map(torch.equal, [first.params, *first.vectors.values()], models))
    assert first.nbytes == 3 * first.params.nbytes
    assert server.strategy.clusters().tolist() == [-1] * 4
    theta = torch.zeros_like(models[0])
    choice = {"choice": torch.tensor([[2]])}
    [second] = server.receive(Update(2, first.number, theta, 30, choice))
    assert server.strategy.clusters().tolist() == [-1, -1, 2, -1]
    moved = 0.7 * models[2]
    torch.testing.assert_close(second.params, moved)
    assert all(map(torch.equal, second.vectors.values(), models[:2]))
    server.receive(Update(2, second.number, theta, 30, {"choice": torch.tensor([[1]])}))
    assert server.strategy.clusters()[2] == 0  # the second that it was sent


def test_a_round_averages_those_who_chose_a_model_and_leaves_the_others():
    strategy = IFCA(k=3)
    strategy.setup(context())
    before = list(strategy.models)
    vectors = [torch.randn(19) for _ in range(4)]
    for client, choice in enumerate([0, 2, 0, 2]):
        assert not strategy.fold(update(client, vectors[client], choice), Staleness(0, 0))
    assert all(a is b for a, b in zip(strategy.models, before, strict=True))
    assert strategy.close_cohort()
    torch.testing.assert_close(strategy.models[0], 0.25 * vectors[0] + 0.75 * vectors[2])
    assert strategy.models[1] is before[1]
    torch.testing.assert_close(strategy.models[2], (vectors[1] + 2 * vectors[3]) / 3)
    assert not strategy.close_cohort()


@pytest.mark.parametrize("choice", [[[3]], [[-1]], [[0, 1]]])
def test_a_choice_that_is_none_is_refused(choice):
    strategy = IFCAAsync(k=3)
    strategy.setup(context())
    with pytest.raises(Refused, match="expected one number from 0 to 2"):
        strategy.fold(
            Update(0, 0, torch.zeros(19), 10, {"choice": torch.tensor(choice)}), Staleness(0, 0)
        )
    assert strategy.changes == 0


# -- the client ---------------------------------------------------------------------------------


def loss(theta, x, y):
    """Mean cross-entropy of the linear model, in double precision."""
    scores = x @ theta[:-4].reshape(4, -1).T + theta[-4:]
    scores -= scores.max(1, keepdims=True)
    return float((np.log(np.exp(scores).sum(1)) - scores[np.arange(len(y)), y]).mean())


def jobs(small, task, clients=range(8)):
    models = torch.from_numpy(np.random.default_rng(5).normal(size=(3, 52))).float()
    others = {f"candidate {k}": models[k] for k in (1, 2)}
    return [Job(c, models[0], task, ("client", c), vectors=others) for c in clients]


def test_the_client_trains_the_model_of_least_loss_on_its_training_samples(small):
    task = Task(
        steps=1,
        batch_size=1000,
        lr=0.1,
        optimizer=Sgd(momentum=0, weight_decay=0),
        client_steps=(Choose(3),),
    )
    trainer = AutogradSolver(nn.Linear(12, 4), small, seed=0)
    chosen = set()
    for job in jobs(small, task):
        x = small.prepare(small.x[small.train[job.client]]).double().numpy()
        y = small.y[small.train[job.client]].numpy()
        models = [m.double().numpy() for m in (job.params, *job.vectors.values())]
        best = int(np.argmin([loss(model, x, y) for model in models]))
        upload, extras, _ = trainer.carry_out(job)
        assert extras["choice"].tolist() == [[best]]
        expected = models[best] - 0.1 * gradient(models[best], x, y)
        np.testing.assert_allclose(upload.numpy(), expected, atol=1e-5)
        chosen.add(best)
    assert len(chosen) > 1  # else this shows little


@pytest.mark.parametrize("solver", ["torch", NATIVE])
@pytest.mark.parametrize("workers", [1, 2])
def test_all_solvers_and_backends_choose_alike(small, solver, workers):
    task = Task(epochs=2, batch_size=8, client_steps=(Choose(3),))
    with torch.random.fork_rng(devices=[]):
        module = nn.Sequential(nn.Flatten(), nn.Linear(12, 4))
        plain = AutogradSolver(nn.Sequential(nn.Flatten(), nn.Linear(12, 4)), small, seed=0)
    with make_executor(module, small, 0, solver=solver, workers=workers) as backend:
        asked = jobs(small, task)
        for job in asked:
            backend.expect(job)
        for job in asked:
            found, expected = backend.carry_out(job), plain.carry_out(job)
            torch.testing.assert_close(found.upload, expected.upload, atol=1e-5, rtol=1e-5)
            assert torch.equal(found.extras["choice"], expected.extras["choice"])


def test_true_groups_are_found(small):
    """Two groups that label alike samples differently, two models: each model gets one group."""
    module = nn.Sequential(nn.Flatten(), nn.Linear(12, 4))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        nn.init.normal_(module[1].weight)
    task = Task(epochs=2, batch_size=8, lr=0.05)
    simulator = Simulator(small, module, IFCA(k=2), task=task, concurrency=8, adapt_epochs=0)
    simulator.run(160)
    found = simulator.strategy.clusters()
    assert len(set(zip(found.tolist(), np.asarray(small.groups).tolist(), strict=True))) == 2
