"""A part of the model that stays with its client, under every strategy."""

from collections.abc import Iterator
from dataclasses import replace
from itertools import combinations

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from polytempo import Federation, Task, simulate
from polytempo.core.client_steps import in_use, with_offset
from polytempo.core.events import Upload
from polytempo.core.layout import Parts
from polytempo.core.messages import Dispatch
from polytempo.core.optimizer import Sgd
from polytempo.core.rng import rng
from polytempo.simulation import Simulator
from polytempo.simulation.devices import Links, TwoSpeed
from polytempo.simulation.metrics import over_clients
from polytempo.storage import load_state, save_state
from polytempo.strategies import STRATEGIES, FedAvg
from polytempo.training import PERSONAL, Executor, Job, Score, make_executor
from solving import needs_compiler

TASK = Task(epochs=1, batch_size=8, lr=0.05)
HEAD = Parts(["head"])
BODY_SIZE, HEAD_SIZE = 12 * 9 + 9, 9 * 4 + 4
UPDATES = 24
NAMES = [name for name in STRATEGIES if STRATEGIES[name].engine == "server"]


def module() -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return nn.Sequential(nn.Flatten(), nn.Linear(12, 9), nn.ReLU(), nn.Linear(9, 4))


def backend_of(fed: Federation, solver: str = "torch", workers: int = 0) -> Executor:
    where = {"name": "processes", "workers": workers} if workers else {"name": "serial"}
    return make_executor(module(), fed, 0, HEAD, solver=solver, **where)


def simulator(fed: Federation, name: str, backend: Executor | None = None, **more) -> Simulator:
    options = {"task": TASK, "concurrency": 4, "adapt_epochs": 1, "eval_every": 8, "check": True}
    options |= {"devices": TwoSpeed(factor=5.0), "network": Links(low=1e-3, high=1e-2)} | more
    backend = backend or backend_of(fed)
    strategy = STRATEGIES.create(name)
    return Simulator(fed, backend.solver.layout.module, strategy, backend=backend, **options)


def heads(simulation: Simulator) -> list[Tensor]:
    return [simulation.personal(client) for client in range(simulation.federation.clients)]


def bodies(simulation: Simulator) -> list[Tensor]:
    clients = range(simulation.federation.clients)
    return [simulation.strategy.model_for(client).clone() for client in clients]


@pytest.fixture(params=NAMES)
def name(request) -> str:
    return request.param


@pytest.fixture(scope="module")
def runs() -> dict[str, Simulator]:
    """Of each strategy one run, done once."""
    return {}


@pytest.fixture
def whole(small, name, runs) -> Simulator:
    if name not in runs:
        runs[name] = simulator(small, name)
        runs[name].run(UPDATES)
    return runs[name]


# -- what travels, and what stays -----------------------------------------------------------------


def test_only_the_shared_part_travels_and_the_head_is_everybodys_own(small, name):
    simulation, sent, uploads = simulator(small, name), {"dispatch": 0, "multicast": 0}, []
    act, receive = simulation._act, simulation.server.receive

    def watch(actions):
        for action in actions:
            if isinstance(action, Dispatch):
                assert len(action.params) == BODY_SIZE
                models, left = divmod(action.nbytes, 4 * BODY_SIZE)
                assert models >= 1 and left == 0
                sent["multicast" if action.preempt else "dispatch"] += action.nbytes
        act(actions)

    def listen(update):
        assert len(update.vector) == BODY_SIZE
        uploads.append(update)
        return receive(update)

    simulation._act, simulation.server.receive = watch, listen
    simulation.run(UPDATES)
    if simulation.strategy.communicates:
        assert {kind: simulation.bytes[kind] for kind in sent} == sent
        assert simulation.bytes["upload"] == sum(update.nbytes for update in uploads)
    assert {len(body) for body in bodies(simulation)} == {BODY_SIZE}
    trained, own = {update.client for update in uploads}, heads(simulation)
    assert len(trained) >= 4
    if "fedbabu" in name:  # whose heads are trained by fine-tuning alone
        trained = set()
    for a, b in combinations(sorted(trained), 2):
        assert not torch.equal(own[a], own[b])
    for client in set(range(8)) - trained:
        assert torch.equal(own[client], simulation.layout.initial_personal)


def test_a_client_is_tested_with_its_own_head(small, whole):
    """The model by hand, in plain torch; and the same from `result.model`'s point of view."""
    scores, used = [], [whole.in_use(client) for client in range(8)]
    for client, (body, head) in enumerate(zip(used, heads(whole), strict=True)):
        x, y = small.x[small.test[client]], small.y[small.test[client]]
        hidden = torch.relu(x @ body[:108].view(9, 12).T + body[108:])
        logits = hidden @ head[:36].view(4, 9).T + head[36:]
        steps = in_use(whole.strategy.task(client).client_steps)
        prior = whole.backend.solver.offset(client, with_offset(steps))
        logits = logits if prior is None else logits + prior
        for step in steps:
            train = small.x[small.train[client]], small.y[small.train[client]]
            seen = torch.relu(train[0] @ body[:108].view(9, 12).T + body[108:]), train[1]
            logits = step.answer(logits, hidden, seen)
        loss = float(nn.functional.cross_entropy(logits, y, reduction="sum"))
        correct = int((logits.argmax(1) == y).sum())
        # of four classes, the right one is among the first five
        sums = {"total": len(y), "loss": loss, "correct": correct, "top5": len(y)}
        scores.append(Score(sums))
    row = whole.history[-1]
    assert whole.updates == row["updates"]
    known = [scores[client] for client in whole._there()]
    for key, value in over_clients(known, whole.backend.solver.problem).items():
        assert row[key] == pytest.approx(value, rel=1e-5)


# -- however it is run ----------------------------------------------------------------------------


def assert_same(found: Simulator, expected: Simulator) -> None:
    assert found.fingerprint == expected.fingerprint
    assert found.history == expected.history
    for mine, theirs in ((bodies(found), bodies(expected)), (heads(found), heads(expected))):
        assert all(map(torch.equal, mine, theirs))


@pytest.mark.parametrize("keep", [False, True], ids=["fresh", "kept"])
def test_a_run_goes_on_from_a_checkpoint_bit_for_bit(small, name, keep, whole, tmp_path):
    task = replace(TASK, keep_optimizer=keep)
    if keep and name in ("fedac", "scaffold", "scaffold-async"):  # steps stand for gradients
        task = replace(task, optimizer=Sgd(momentum=0.0))
    if keep:
        expected = simulator(small, name, task=task)
        expected.run(UPDATES)
    else:
        expected = whole
    for piece in range(100):
        part = simulator(small, name, task=task)
        if piece:
            part.load_state_dict(load_state(tmp_path / "state"))
        events = iter([False] * 25)
        if part.run(UPDATES, stop=lambda events=events: next(events, True)):
            break
        save_state(tmp_path / "state", part.state_dict())
    assert piece >= 1
    assert_same(part, expected)


@pytest.fixture(scope="module")
def crew(small) -> Iterator[Executor]:
    """Workers that stay for all tests."""
    with backend_of(small, workers=2) as backend:
        yield backend


def test_workers_change_nothing(small, name, whole, crew):
    found = simulator(small, name, crew)
    found.run(UPDATES)
    for flight in found.flights.values():
        crew.forget(flight.job)  # nobody will ask for it
    assert_same(found, whole)


@needs_compiler
def test_the_native_solver_changes_the_last_digits_only(small, name, whole):
    found = simulator(small, name, backend_of(small, "native"))
    found.run(UPDATES)
    for mine, theirs in ((bodies(found), bodies(whole)), (heads(found), heads(whole))):
        for a, b in zip(mine, theirs, strict=True):
            assert (a - b).norm() <= 1e-4 * b.norm()


# -- known algorithms -----------------------------------------------------------------------------


def test_fedavg_with_a_personal_head_is_fedper(small):
    """Done again in torch: a body for all, a head for each, updates of three clients."""
    task = Task(epochs=2, batch_size=8, lr=0.05, optimizer=Sgd(momentum=0.9, weight_decay=0.01))
    backend = make_executor(module().double(), small, 0, HEAD, solver="torch", name="serial")
    options = {
        "task": task,
        "concurrency": 3,
        "adapt_epochs": 0,
        "devices": TwoSpeed(),
        "check": True,
    }
    shared = backend.solver.layout.module
    simulation, log = Simulator(small, shared, FedAvg(), backend=backend, **options), []
    simulation.observers.append(log.append)
    simulation.run(15)
    uploads = [event for event in log if isinstance(event, Upload)]
    start = module().double()
    body = nn.utils.parameters_to_vector(start[1].parameters()).detach()
    own = [nn.utils.parameters_to_vector(start[3].parameters()).detach()] * 8
    for cohort in range(5):
        total, samples = torch.zeros_like(body), 0
        for event in uploads[3 * cohort : 3 * cohort + 3]:
            client, model = event.client, module().double()
            nn.utils.vector_to_parameters(body.clone(), model[1].parameters())
            nn.utils.vector_to_parameters(own[client].clone(), model[3].parameters())
            optimiser = torch.optim.SGD(
                model.parameters(), task.lr, momentum=0.9, weight_decay=0.01
            )
            x, y = small.x[small.train[client]].double(), small.y[small.train[client]]
            for epoch in range(2):
                stream = ("client", client, "dispatch", event.dispatch, "epoch", epoch)
                order = rng(0, *stream).permutation(len(y))
                cuts = list(range(8, len(y), 8))
                for rows in np.split(order, cuts[:-1] if len(y) % 8 == 1 else cuts):
                    optimiser.zero_grad()
                    nn.functional.cross_entropy(model(x[rows]), y[rows]).backward()
                    optimiser.step()
            total += len(y) * nn.utils.parameters_to_vector(model[1].parameters()).detach()
            samples += len(y)
            own[client] = nn.utils.parameters_to_vector(model[3].parameters()).detach()
        body = total / samples
    torch.testing.assert_close(simulation.strategy.model_for(0), body, rtol=1e-9, atol=1e-11)
    for found, expected in zip(heads(simulation), own, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-11)


def test_with_everything_but_a_bias_at_home_clients_hardly_meet(small):
    """Standalone and a personal body agree on the body: nobody else moves it."""
    alone = simulate(small, model=module, strategy="standalone", updates=24, **SETTINGS)
    result = simulate(
        small, model=module, strategy="fedavg", updates=24, personal="1.*,3.weight", **SETTINGS
    )
    assert result.summary["parameters"] == 4
    models = [result.model(client) for client in range(8)]
    for a, b in combinations(models, 2):
        assert torch.equal(a["3.bias"], b["3.bias"])
        assert not torch.equal(a["1.weight"], b["1.weight"])
    assert not torch.equal(alone.model(0)["3.bias"], alone.model(1)["3.bias"])


SETTINGS = {"epochs": 1, "batch_size": 8, "lr": 0.05, "concurrency": 8, "adapt_epochs": 0}


@pytest.mark.parametrize("solver", ["auto", "torch"])
def test_frozen_numbers_are_in_no_message_and_never_change(small, solver):
    settings = SETTINGS | {"solver": solver, "backend": "serial", "freeze": "1.*"}
    result = simulate(small, model=module, strategy="pace", updates=24, **settings)
    assert result.summary["parameters"] == HEAD_SIZE
    sent = result.summary["messages"]
    assert sent["dispatch_bytes"] == 4 * HEAD_SIZE * sent["dispatch"]
    assert sent["upload_bytes"] == 4 * HEAD_SIZE * sent["upload"]
    fresh = simulate(small, model=module, strategy="pace", updates=8, **SETTINGS)
    first = fresh.simulator.context.initial
    for client in range(8):
        found = result.model(client)
        assert torch.equal(found["1.weight"].flatten(), first[:108])
        assert not torch.equal(found["3.weight"].flatten(), first[117:153])


def test_adaptation_is_of_a_copy_own_head_included(small):
    simulation = simulator(small, "fedbuff")
    simulation.run(UPDATES)
    before, row = heads(simulation), simulation.history[-1]
    each = []
    for client in range(8):
        stream, memory = ("adapt", client, "round", UPDATES), simulation.memory.get(client)
        job = Job(client, simulation.strategy.model_for(client), TASK, stream, memory=memory)
        shared, _, memory = simulation.backend.solver.carry_out(job)
        simulation.layout.load(shared, memory[PERSONAL])
        with torch.inference_mode():
            each.append(simulation.backend.solver.score(small.test[client]))
    adapted = over_clients(each, simulation.backend.solver.problem)["accuracy"]
    assert row["accuracy_adapted"] == pytest.approx(adapted)
    assert all(map(torch.equal, heads(simulation), before))
