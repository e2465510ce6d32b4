"""ACE and ACED, direct, incremental and in 8 bits, against their formulas."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from polytempo import Context, PolytempoError, Server, Staleness, Task, Update
from polytempo.core.bank import ModelBank, Storage
from polytempo.core.objective import Drift
from polytempo.core.optimizer import Sgd
from polytempo.core.rng import rng
from polytempo.simulation.dropout import Leave
from polytempo.strategies import ACE, ACED, STRATEGIES, ACE8bit, ACED8bit, ACEIncremental

TASK = Task(batch_size=7, lr=0.03, optimizer=Sgd(momentum=0.9, weight_decay=0.01))
FRESH = Staleness(0, 0)


def ready(strategy, clients=3, size=3, dtype=torch.float64, storage=None):
    context = Context(torch.zeros(size, dtype=dtype), [10] * clients, TASK, seed=0)
    if storage is not None:
        context = Context(context.initial, context.samples, TASK, 0, storage)
    strategy.setup(context)
    return strategy


def fold(strategy, client, *values) -> bool:
    vector = torch.tensor(values, dtype=strategy.model.dtype)
    return strategy.fold(Update(client, 0, vector, 10), FRESH)


def moves(strategy, *arrivals) -> list[list[float]]:
    """How the model moves with each of these gradients."""
    found = []
    for arrival in arrivals:
        before = strategy.model_for(0)
        fold(strategy, *arrival)
        found.append((strategy.model_for(0) - before).tolist())
    return found


# -- whole runs, clients included, in double precision --------------------------------------------


def ace_by_the_formula(arrivals, initial, n, eta, start="all"):
    w, cache = [initial], {}
    for client, sent, upload in arrivals:
        cache[client] = upload(w[sent])
        wait = start == "all" and len(cache) < n
        step = 0.0 if wait else eta * np.mean(list(cache.values()), axis=0)
        w.append(w[-1] - step)
    return w


def aced_by_the_formula(arrivals, initial, n, eta, tau):
    w, cache, t, t_start = [initial], {}, 0, dict.fromkeys(range(n), 1)
    for client, sent, upload in arrivals:
        cache[client] = upload(w[sent])
        if len(cache) < n:
            w.append(w[-1])
            continue
        active = [i for i in range(n) if t - t_start[i] <= tau]
        w.append(w[-1] - eta * np.mean([cache[i] for i in active], axis=0))
        t_start[client] = t + 1
        t += 1
    return w


@pytest.mark.parametrize("local_steps", [1, 4])
@pytest.mark.parametrize("start", ["all", "first"])
def test_a_run_of_ace_is_its_formula(simulated, start, local_steps):
    strategy = ACE(server_lr=0.2, start=start, local_steps=local_steps)
    simulator, arrivals = simulated(strategy, TASK)
    assert max(k - a.sent for k, a in enumerate(arrivals)) > 8
    initial = simulator.server.context.initial.numpy()
    w = ace_by_the_formula(arrivals, initial, 8, 0.2, start)
    np.testing.assert_allclose(strategy.model_for(0).numpy(), w[-1], rtol=1e-9, atol=1e-12)
    waited = sum(np.array_equal(a, initial) for a in w) - 1
    assert simulator.server.version == 80 - waited and (waited > 7) == (start == "all")


@pytest.mark.parametrize("local", ["mean", "displacement"])
def test_a_run_with_whole_trainings_is_its_formula(simulated, local):
    """Two epochs with momentum, of which the mean gradient or the way is uploaded."""
    strategy = ACED(server_lr=0.2, tau_algo=5, local=local)
    simulator, arrivals = simulated(strategy, replace(TASK, epochs=2))
    assert simulator.server.strategy.task(0).total_steps(30) > 2
    initial = simulator.server.context.initial.numpy()
    w = aced_by_the_formula(arrivals, initial, 8, 0.2, 5)
    np.testing.assert_allclose(strategy.model_for(0).numpy(), w[-1], rtol=1e-8, atol=1e-10)


def test_whole_trainings_and_a_number_of_steps_exclude_each_other():
    with pytest.raises(PolytempoError, match="use --steps 3"):
        ready(ACE(local="mean", local_steps=3))


@pytest.mark.parametrize("optimizer", ["adam", "kept"])
def test_a_mean_gradient_is_concluded_from_plain_sgd_alone(optimizer):
    kept = optimizer == "kept"
    task = replace(TASK, keep_optimizer=kept, **({} if kept else {"optimizer": "adam"}))
    context = Context(torch.zeros(3), [10] * 3, task, seed=0)
    with pytest.raises(PolytempoError, match="keep-optimizer" if kept else "use --optimizer sgd"):
        Server(ACE(local="mean"), context)


def test_a_run_of_incremental_ace_is_the_same_formula(simulated):
    strategy = ACEIncremental(server_lr=0.2)
    simulator, arrivals = simulated(strategy, TASK)
    w = ace_by_the_formula(arrivals, simulator.server.context.initial.numpy(), 8, 0.2)
    np.testing.assert_allclose(strategy.model_for(0).numpy(), w[-1], rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("tau", [0, 3, 12])
@pytest.mark.parametrize("local_steps", [1, 3])
def test_a_run_of_aced_is_its_formula(simulated, tau, local_steps):
    strategy = ACED(server_lr=0.2, tau_algo=tau, local_steps=local_steps)
    simulator, arrivals = simulated(strategy, TASK)
    initial = simulator.server.context.initial.numpy()
    w = aced_by_the_formula(arrivals, initial, 8, 0.2, tau)
    np.testing.assert_allclose(strategy.model_for(0).numpy(), w[-1], rtol=1e-9, atol=1e-12)
    assert np.count_nonzero(strategy.active) < 8  # somebody is left out


def test_incremental_equals_direct_over_a_thousand_arrivals(simulated):
    """In single precision, clients, anchors and all; both are stopped and looked at on the way."""
    runs = {}
    for cls in (ACE, ACEIncremental):
        strategy = cls(server_lr=0.1)
        simulator, _ = simulated(strategy, TASK, 20, torch.float32)
        models = []
        for updates in range(50, 1001, 50):
            simulator.run(updates)
            models.append(strategy.model_for(0))
        assert simulator.server.updates == 1000
        runs[cls] = torch.stack(models)
    assert (runs[ACE][-1] - runs[ACE][0]).abs().max() > 0.1
    assert (runs[ACE] - runs[ACEIncremental]).abs().max() < 1e-5


def test_incremental_clients_upload_the_difference():
    strategy = ready(ACEIncremental(server_lr=1.0), clients=1)
    fold(strategy, 0, 1.0, 2.0, 3.0)
    assert strategy.vectors_for(0)["anchor"].tolist() == [-1.0, -2.0, -3.0]
    assert moves(strategy, (0, 0.5, 0.0, -3.0)) == [[-1.5, -2.0, 0.0]]
    assert strategy.vectors_for(0)["anchor"].tolist() == [-1.5, -2.0, 0.0]
    assert strategy.task(0).upload == "gradient" and strategy.task(0).objective == Drift()
    with pytest.raises(PolytempoError, match="local_steps=2"):
        STRATEGIES.create("ace-incremental:local_steps=2")


@pytest.mark.parametrize(("plain", "delayed"), [(ACE, ACED), (ACE8bit, ACED8bit)])
@pytest.mark.parametrize("start", ["all", "first"])
@pytest.mark.parametrize("dropout", [None, Leave(at=0.2, share=0.3)])
def test_aced_with_a_large_threshold_is_ace(simulated, plain, delayed, start, dropout):
    runs = []
    for strategy in (plain(start=start), delayed(start=start, tau_algo=200)):
        simulator, _ = simulated(strategy, TASK, 200, torch.float32, dropout=dropout)
        runs.append((simulator.fingerprint, strategy.model_for(0)))
    assert runs[0][0] == runs[1][0]
    assert torch.equal(runs[0][1], runs[1][1])
    assert not torch.equal(runs[0][1], simulator.server.context.initial)


# -- the sum ---------------------------------------------------------------------------------------


def gradients(times, clients, size):
    """Of sizes from 1e-4 to 1e4."""
    stream = rng(7, "gradients")
    senders = stream.integers(clients, size=times)
    scale = 10.0 ** stream.uniform(-4, 4, size=(times, 1))
    values = torch.from_numpy(stream.normal(size=(times, size)) * scale).float()
    return zip(senders.tolist(), values, strict=True)


@pytest.mark.parametrize(
    ("strategy", "times"),
    [(ACE(), 100_000), (ACED(tau_algo=6), 10_000), (ACE8bit(), 3000), (ACED8bit(), 3000)],
    ids=["ace", "aced", "ace-8bit", "aced-8bit"],
)
def test_the_running_sum_equals_the_direct_one(strategy, times):
    clients = 9
    ready(strategy, clients, 4, torch.float32)
    for client, vector in gradients(times, clients, 4):
        strategy.fold(Update(client, 0, vector, 10), FRESH)
    rows = torch.stack([strategy.cache.row(client).double() for client in range(clients)])
    chosen = rows[torch.from_numpy(strategy.active)] if isinstance(strategy, ACED) else rows
    assert len(chosen) == (clients if not isinstance(strategy, ACED) else len(chosen)) > 3
    largest = float(rows.abs().max())
    torch.testing.assert_close(strategy.total, chosen.sum(0), rtol=0, atol=1e-9 * largest)
    before = strategy.model_for(0)
    fold(strategy, 0, *rows[0].float().tolist())
    assert not torch.equal(before, strategy.model_for(0))


def test_an_arrival_costs_a_few_vectors_however_many_clients(monkeypatch):
    strategy, read, row = ready(ACED(tau_algo=20), clients=50), [], ModelBank.row
    monkeypatch.setattr(ModelBank, "row", lambda *args: read.append(args) or row(*args))
    for client, vector in gradients(2000, 50, 3):
        strategy.fold(Update(client, 0, vector.double(), 10), FRESH)
    assert len(read) <= 2000 * 4 + 50


# -- by hand ---------------------------------------------------------------------------------------


def test_ace_by_hand():
    strategy = ready(ACE(server_lr=3.0))
    found = moves(strategy, (0, 1.0, 0, 0), (2, 0, 0, 1.0), (0, 2.0, 0, 0), (1, 0, 4.0, 0))
    assert found[:3] == [[0, 0, 0]] * 3  # client 1 is still to come
    assert found[3] == [-2.0, -4.0, -1.0]  # the newest gradient of each, a third of 3 each
    assert moves(strategy, (2, 0, 0, -5.0), (2, 0, 0, 0)) == [[-2.0, -4.0, 5.0], [-2.0, -4.0, 0.0]]


def test_starting_with_the_first_means_over_those_that_have_reported():
    strategy = ready(ACE(server_lr=6.0, start="first"))
    found = moves(strategy, (0, 1.0, 0, 0), (2, 0, 0, 1.0), (1, 0, 1.0, 0))
    assert found == [[-6.0, 0, 0], [-3.0, 0, -3.0], [-2.0, -2.0, -2.0]]


def one_hot(client, value=1.0):
    return (client, *(value * (k == client) for k in range(3)))


def test_who_is_gone_keeps_pulling_in_ace_and_stops_in_aced():
    """Client 2 reports for the first step and then never again; 0 and 1 take turns."""
    turns = [one_hot(k % 2) for k in range(10)]
    start = [one_hot(0), one_hot(1), one_hot(2)]
    for_ever = moves(ready(ACE(server_lr=3.0)), *start, *turns)
    assert for_ever[2:] == [[-1.0, -1.0, -1.0]] * 11
    found = moves(ready(ACED(server_lr=6.0, tau_algo=4)), *start, *turns)
    # the first step is t = 0, and t_start[2] = 1: t - 1 <= 4 up to t = 5
    assert found[2:8] == [[-2.0, -2.0, -2.0]] * 6
    assert found[8:] == [[-3.0, -3.0, 0.0]] * 5


def test_who_comes_back_takes_part_from_the_next_step_on():
    strategy = ready(ACED(server_lr=6.0, tau_algo=2))
    moves(strategy, *[one_hot(c) for c in (0, 1, 2, 0, 1, 0, 1, 0)])
    # t = 6: 2 was last sent a model at t = 1; what it brings now is not used yet
    assert moves(strategy, one_hot(2, 7.0)) == [[-3.0, -3.0, 0.0]]
    assert moves(strategy, one_hot(0)) == [[-2.0, -2.0, -14.0]]


def test_the_senders_own_delay_is_looked_at_before_it_is_reset():
    strategy = ready(ACED(server_lr=1.0, tau_algo=0))
    moves(strategy, one_hot(0), one_hot(1), one_hot(2), one_hot(0, 5.0))  # t = 0 and 1
    # at t = 2 only client 0 has been sent a model at t = 2
    assert moves(strategy, one_hot(1)) == [[-5.0, 0.0, 0.0]]
    assert moves(strategy, one_hot(1, 2.0)) == [[0.0, -2.0, 0.0]]


def test_who_leaves_before_it_has_reported_is_not_waited_for():
    context = Context(torch.zeros(3), [10] * 3, TASK, seed=0)
    server = Server(ACE(server_lr=2.0), context)
    sent = {action.client: action.number for action in server.join(range(3))}

    def arrives(client):
        vector = torch.tensor(one_hot(client)[1:])
        for action in server.receive(Update(client, sent[client], vector, 10)):
            sent[action.client] = action.number

    arrives(0)
    arrives(0)
    server.leave(2)
    assert server.version == 0
    arrives(1)  # everybody that is there has reported
    assert server.version == 1
    assert server.strategy.model_for(0).tolist() == [-1.0, -1.0, 0.0]
    for action in server.join([2]):  # and it may come later
        sent[action.client] = action.number
    arrives(2)
    torch.testing.assert_close(server.strategy.model_for(0), torch.tensor([-5 / 3, -5 / 3, -2 / 3]))


def test_the_last_one_awaited_may_leave():
    server = Server(ACE(), Context(torch.zeros(3), [10] * 3, TASK, seed=0))
    sent = {action.client: action.number for action in server.join(range(3))}
    for client in (0, 1):
        for action in server.receive(Update(client, sent[client], torch.ones(3), 10)):
            sent[action.client] = action.number
    server.leave(2)
    assert server.version == 0
    server.receive(Update(0, sent[0], torch.ones(3), 10))
    assert server.version == 1


class Listing(ACE):
    """Lists who is awaited after each message, instead of following it."""

    def setup(self, context):
        super().setup(context)
        self.listed = list(range(context.clients))

    def ready(self):
        self.started = self.started or bool(self.reported[self.listed].all())
        return self.started

    def training(self, in_flight):
        self.listed = [flight.client for flight in in_flight]


@pytest.mark.parametrize("seed", range(40))
@pytest.mark.parametrize("settings", [{}, {"concurrency": 5, "refill": "idle"}, {"concurrency": 5}])
def test_who_is_awaited_is_who_is_in_training_and_has_not_reported(seed, settings):
    context = Context(torch.zeros(2), [10] * 8, TASK, seed=seed)
    ours, theirs = (Server(kind(), context, **settings) for kind in (ACE, Listing))
    order, steps = rng(seed, "test"), []

    def both(act, *arguments):
        actions, others = (getattr(server, act)(*arguments) for server in (ours, theirs))
        assert [(a.client, a.number) for a in actions] == [(a.client, a.number) for a in others]
        steps.append(ours.version)
        assert steps[-1] == theirs.version

    both("join", range(int(order.integers(1, 9))))
    while not ours.version and len(steps) < 300:
        client = int(order.choice(8, p=np.arange(1, 9) / 36))  # some are slow
        luck = order.random()
        if luck < 0.05:
            both("leave", client)
        elif luck < 0.15:
            both("join", [client])
        elif client in ours.open and luck < 0.4:
            both("lost", client)
        elif client in ours.open:
            number = ours.open[client][-1].number
            both("receive", Update(client, number, torch.ones(2), 10))
    assert theirs.version


def test_those_in_training_are_listed_once_before_the_first_step():
    server = Server(ACE(), Context(torch.zeros(2), [10] * 50, TASK, seed=0))
    sent = {action.client: action.number for action in server.join(range(50))}
    looked, age = [], server._age
    server._age = lambda sent: looked.append(sent) or age(sent)
    for client in (*range(1, 50), *range(1, 50)):
        [action] = server.receive(Update(client, sent[client], torch.ones(2), 10))
        sent[client] = action.number
    assert not server.strategy.started
    assert len(looked) == 49 + 2 * 49  # once, and each update's own


# -- uploads and memory ----------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["ace", "aced", "ca2fl", "vanilla-asgd", "delay-adaptive-asgd"])
def test_one_gradient_or_the_way_of_some_plain_steps(name):
    one = ready(STRATEGIES.create(name))
    assert one.task(0).upload == "gradient"
    some = ready(STRATEGIES.create(f"{name}:local_steps=3"))
    task = some.task(0)
    assert (task.upload, task.steps) == ("delta", 3)
    assert task.optimizer == Sgd(momentum=0.0, weight_decay=0.01)
    vector = torch.tensor([3.0, 0.0, -6.0], dtype=torch.float64)
    assert one.gradient(Update(0, 0, vector, 10)) is vector
    sent = replace(task, lr=0.006)  # later in a schedule: the rate that was sent counts
    for asked, scale in ((task, 1.0), (sent, 5.0)):
        found = some.gradient(Update(0, 0, vector, 10, asked=asked))
        np.testing.assert_allclose(found, scale * np.array([-100.0, 0.0, 200.0]))  # by -0.03


@pytest.mark.parametrize(("plain", "small"), [(ACE, ACE8bit), (ACED, ACED8bit)])
def test_eight_bits_take_a_quarter_of_the_servers_memory_and_are_right_on_average(plain, small):
    size, clients, kept = 30_000, 10, {}
    for cls in (plain, small):
        blocks = []

        def counting(shape, dtype, blocks=blocks):
            blocks.append(torch.empty(shape, dtype=dtype))
            return blocks[-1]

        strategy = cls(server_lr=1.0)
        ready(strategy, clients, size, torch.float32, Storage(allocate=counting))
        stream = rng(1, "eight bits")
        for client in range(clients):
            vector = torch.from_numpy(stream.normal(size=size)).float()
            strategy.fold(Update(client, 0, vector, 10), FRESH)
        kept[cls] = sum(block.nbytes for block in blocks), strategy.model_for(0).double()
    assert 0.25 < kept[small][0] / kept[plain][0] <= 0.27
    # rounding changes each number by less than its scale, at most 5/127, and by 0 on average: the
    # mean of all 30,000 errors of u is 0 within 5 of its standard deviations
    errors = kept[small][1] - kept[plain][1]
    assert 0 < float(errors.abs().max()) < 5 / 127
    assert abs(float(errors.mean())) < 5 * float(errors.std()) / size**0.5
    assert float(errors.std()) < 5 / 127 / 2 / clients**0.5


def test_eight_bits_differ_by_seed_and_end_near_full_precision(simulated):
    runs = []
    for cls, seed in ((ACE8bit, 0), (ACE8bit, 1), (ACE, 0)):
        strategy = cls(server_lr=0.1)
        strategy.setup(Context(torch.zeros(500), [10] * 2, TASK, seed))
        stream = rng(2, "both")
        for k in range(300):
            vector = torch.from_numpy(stream.normal(size=500)).float()
            strategy.fold(Update(k % 2, 0, vector, 10), FRESH)
        runs.append(strategy.model_for(0))
    assert not torch.equal(runs[0], runs[1])
    # each gradient acts twice, with 0.1 / 2: 300 errors of variance below scale^2 / 4
    bound = 5 * 0.1 * (4 / 127) / 2 * 300**0.5
    assert (runs[0] - runs[2]).abs().max() < bound < (runs[2]).abs().max()


# -- a step with every so many uploads ------------------------------------------------------------


@pytest.mark.parametrize("kind", [ACE, ACED])
def test_a_step_is_taken_with_every_third_upload(kind):
    """The cache is up to date all the time; who uploads twice meanwhile counts once."""
    strategy = ready(kind(server_lr=1.0, every=3, start="first"))
    found = moves(
        strategy,
        (0, 3.0, 0, 0),
        (1, 0, 3.0, 0),
        (0, 6.0, 0, 0),  # the third: the mean of 6 and 3, over two clients
        (2, 0, 0, 9.0),
        (2, 0, 0, 6.0),
        (1, 0, 9.0, 0),  # the sixth
    )
    assert found[:2] == [[0, 0, 0]] * 2 and found[3:5] == [[0, 0, 0]] * 2
    assert found[2] == pytest.approx([-3.0, -1.5, 0])
    assert found[5] == pytest.approx([-2.0, -3.0, -2.0])


def test_uploads_between_steps_survive_a_checkpoint():
    whole, first = (ready(ACE(server_lr=1.0, every=2, start="first")) for _ in range(2))
    second = ready(ACE(server_lr=1.0, every=2, start="first"))
    for strategy in (whole, first):
        fold(strategy, 0, 1.0, 2.0, 3.0)
    second.load_state_dict(first.state_dict())
    for strategy in (whole, second):
        assert fold(strategy, 1, 3.0, 2.0, 1.0)
    assert torch.equal(whole.model_for(0), second.model_for(0))
