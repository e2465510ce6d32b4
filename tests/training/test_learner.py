"""A learner trains as torch's own optimiser would, through fusions and interruptions."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from polytempo import Federation, PolytempoError, Task
from polytempo.core.errors import Diverged
from polytempo.core.layout import Parts
from polytempo.core.optimizer import Sgd
from polytempo.core.rng import rng
from polytempo.core.schedule import Steps
from polytempo.storage import load_state, save_state
from polytempo.training import PERSONAL, AutogradSolver, Learner, Solver

SEED = 3
TASK = Task(batch_size=5, lr=0.1, optimizer=Sgd(momentum=0.9, weight_decay=0.01))


def network(dropout: float = 0.0) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        layers = [nn.Linear(12, 9), nn.Tanh(), nn.Dropout(dropout), nn.Linear(9, 4)]
        return nn.Sequential(*layers).double()


def learner(
    fed: Federation,
    peer: int = 2,
    target: int = 20,
    task: Task = TASK,
    dropout: float = 0.0,
    solver: Solver | None = None,
) -> Learner:
    solver = solver or AutogradSolver(network(dropout), fed, SEED)
    steps = Steps(at=(target // 2, target * 3 // 4), gamma=0.1)
    return Learner(solver, peer, replace(task, schedule=steps))


def textbook(fed, peer, iterations, target, fusions=None):
    """Torch's SGD and MultiStepLR, with `fusions`: iteration -> new weights."""
    model = network()
    optimiser = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9, weight_decay=0.01)
    scheduler = torch.optim.lr_scheduler.MultiStepLR(optimiser, [target // 2, target * 3 // 4])
    x, y = fed.x[fed.train[peer]].double(), fed.y[fed.train[peer]]
    rows = []
    for epoch in range(20):
        order = torch.from_numpy(rng(SEED, "peer", peer, "epoch", epoch).permutation(len(y)))
        rows += list(order.split(5))
    for step in range(iterations):
        if fusions and step in fusions:
            nn.utils.vector_to_parameters(fusions[step].clone(), model.parameters())
        optimiser.zero_grad()
        nn.functional.cross_entropy(model(x[rows[step]]), y[rows[step]]).backward()
        optimiser.step()
        scheduler.step()
    return nn.utils.parameters_to_vector(model.parameters()).detach()


def test_it_trains_as_torch_does_with_a_stepped_learning_rate(small):
    assert len(small.y[small.train[2]]) % 5 != 1  # no lone last sample: plain cuts of five
    one = learner(small)
    for count in (5, 6, 6):  # a milestone in the middle of a round, another at its end
        one.steps(count)
    torch.testing.assert_close(one.params, textbook(small, 2, 17, 20))
    assert one.iteration == 17


def test_a_fusion_replaces_the_weights_and_keeps_momentum_and_schedule(small):
    other = textbook(small, 5, 3, 20)
    one = learner(small)
    one.steps(8)
    one.fuse(other)
    one.steps(8)
    torch.testing.assert_close(one.params, textbook(small, 2, 16, 20, {8: other}))


def test_a_peer_keeps_a_part_of_its_own(small):
    """What others send moves the body; the head goes on, and is what it is tested with."""
    solver = AutogradSolver(network(), small, SEED, Parts(["head"]))
    one = learner(small, solver=solver)
    assert len(one.params) == 12 * 9 + 9
    one.steps(8)
    whole = textbook(small, 2, 8, 20)
    torch.testing.assert_close(torch.cat([one.params, one.memory[PERSONAL]]), whole)
    other = textbook(small, 5, 3, 20)[:117]
    one.fuse(other)
    one.steps(8)
    mixed = torch.cat([other, whole[117:]])
    expected = textbook(small, 2, 16, 20, {8: mixed})
    found = torch.cat([one.params, one.memory[PERSONAL]])
    torch.testing.assert_close(found, expected)
    model = network()
    nn.utils.vector_to_parameters(found, model.parameters())
    x, y = small.x[small.test[4]].double(), small.y[small.test[4]]
    loss = nn.functional.cross_entropy(model(x), y, reduction="sum").item()
    assert one.evaluate([4])[0].sums["loss"] == pytest.approx(loss)


def test_a_round_is_a_job_that_may_be_carried_out_anywhere(small):
    here, elsewhere = learner(small, dropout=0.5), learner(small, dropout=0.5)
    worker = AutogradSolver(network(0.5), small, SEED)
    for count in (5, 8, 3):
        here.steps(count)
        outcome = worker.carry_out(elsewhere.job(count))
        elsewhere.take(outcome, count)
    assert torch.equal(here.params, elsewhere.params) and elsewhere.iteration == 16


def test_what_was_saved_goes_on_bit_for_bit(small, tmp_path):
    whole = learner(small, dropout=0.5)
    whole.steps(16)
    half = learner(small, dropout=0.5)
    half.steps(7)
    save_state(tmp_path / "learner.safetensors", half.state_dict())
    again = learner(small, dropout=0.5)
    again.load_state_dict(load_state(tmp_path / "learner.safetensors"))
    again.steps(9)
    assert torch.equal(again.params, whole.params)
    assert torch.equal(again.memory["optimizer.momentum"], whole.memory["optimizer.momentum"])
    assert again.iteration == whole.iteration


def test_learners_that_share_a_module_do_not_disturb_each_other(small):
    shared = AutogradSolver(network(0.5), small, SEED)
    one, two = learner(small, 1, solver=shared), learner(small, 2, solver=shared)
    alone = learner(small, 1, dropout=0.5)
    for _ in range(3):
        before = one.params
        kept = before.clone()
        one.steps(3)
        two.steps(2)
        alone.steps(3)
        assert torch.equal(before, kept)  # a snapshot stays what it was
    assert torch.equal(one.params, alone.params)


def test_it_is_scored_by_counting(small):
    one = learner(small)
    one.steps(10)
    x, y = small.x[small.test[2]], small.y[small.test[2]]
    model = network()
    nn.utils.vector_to_parameters(one.params, model.parameters())
    logits = model(x.double()).detach()
    [score] = one.evaluate([2])
    assert score.sums["correct"] == sum(
        int(row.argmax()) == label for row, label in zip(logits, y.tolist(), strict=True)
    )
    assert score.total == len(y)
    chances = logits.softmax(1)[range(len(y)), y]
    assert score.sums["loss"] == pytest.approx(float(-chances.log().sum()))


def test_divergence_and_strange_models_are_named(small):
    wild = learner(small, task=Task(batch_size=5, lr=1e200))
    with pytest.raises(Diverged, match=r"peer 2: .* after iteration 5; lower the learning rate"):
        wild.steps(5)
    assert wild.iteration == 0 and wild.memory == {}  # what was good is still there
    assert bool(wild.params.isfinite().all())
    with pytest.raises(PolytempoError, match="157 numbers and was given one of 3"):
        learner(small).fuse(torch.zeros(3))
    with pytest.raises(PolytempoError, match="peer 0 has no sample"):
        learner(replace(small, train=(slice(0, 0), *small.train[1:])), peer=0)
