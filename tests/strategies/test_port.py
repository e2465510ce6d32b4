"""PORT against its formulas, and against what public implementations of it get wrong."""

import numpy as np
import pytest
import torch
from dispatching import dispatch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from polytempo import Context, Server, Staleness, Task, Update
from polytempo.core.events import as_dict
from polytempo.core.messages import Dispatch, InFlight, Stop
from polytempo.simulation import Simulator
from polytempo.simulation.devices import Devices
from polytempo.storage import load_state, save_state
from polytempo.strategies import PORT
from polytempo.training import AutogradSolver, Executor

INITIAL = torch.tensor([1.0, -2.0, 0.5])


def ready(strategy, initial=INITIAL) -> PORT:
    strategy.setup(Context(initial, (10, 30, 60), Task(), seed=0))
    return strategy


def fold(strategy, delta, tau=0, samples=10) -> bool:
    dispatch(strategy, 100 + strategy.models.version)  # somebody holds every version
    update = Update(0, 0, torch.as_tensor(delta), samples)
    return strategy.fold(update, Staleness(updates=99, versions=tau))


def moved(strategy, delta, tau=0):
    """How far a full buffer of one update moves the model."""
    before = strategy.model_for(0)
    assert fold(strategy, delta, tau) is True
    return strategy.model_for(0) - before


# -- the arithmetic -------------------------------------------------------------------------------


def by_the_formula(arrivals, options, initial):
    """PORT in double precision: every version and every buffered update kept as it came."""
    alpha, beta, omega, m = options
    w, buffer = [np.asarray(initial, dtype=np.float64)], []
    for delta, tau, samples in arrivals:
        buffer.append((np.asarray(delta, dtype=np.float64), tau, samples))
        if len(buffer) < m:
            continue
        u = []
        for delta_i, tau_i, samples_i in buffer:
            agreement = 1.0
            if tau_i > 1:
                way = w[-1] - w[-1 - tau_i]
                norms = np.sqrt(np.sum(delta_i**2)) * np.sqrt(np.sum(way**2))
                agreement = (1 + np.sum(delta_i * way) / norms) / 2 if norms else 0.5
            u.append(samples_i * (alpha * omega / (tau_i + omega) + beta * agreement))
        q = np.array(u) / np.sum(u)
        w.append(w[-1] + sum(q_i * delta_i for q_i, (delta_i, _, _) in zip(q, buffer, strict=True)))
        buffer = []
    return w


@given(
    alpha=st.floats(0.1, 5),
    beta=st.floats(0, 5),
    omega=st.integers(1, 12),
    m=st.integers(1, 4),
    seed=st.integers(0, 2**32 - 1),
)
def test_port_is_its_formula(alpha, beta, omega, m, seed):
    draw = np.random.default_rng(seed)
    strategy = PORT(alpha=alpha, beta=beta, bound=omega, buffer_size=m)
    ready(strategy, INITIAL.double())
    arrivals, version = [], 0
    for _ in range(6 * m):
        arrival = draw.normal(size=3), int(draw.integers(version + 1)), int(draw.integers(1, 90))
        arrivals.append(arrival)
        version += fold(strategy, *arrival)
    expected = by_the_formula(arrivals, (alpha, beta, omega, m), INITIAL)
    assert version == len(expected) - 1 == 6
    np.testing.assert_allclose(strategy.model_for(0).numpy(), expected[-1], rtol=1e-9, atol=1e-12)


@given(m=st.integers(1, 4), seed=st.integers(0, 2**32 - 1))
def test_the_mean_of_models_is_the_mean_of_what_clients_ended_with(m, seed):
    """Whatever the weights of a buffer are: they are those of the steps."""
    draw = np.random.default_rng(seed)
    strategy = ready(PORT(buffer_size=m, average="models"), INITIAL.double())
    served = [strategy.model_for(0)]
    for _ in range(5):
        ended, weights = [], []
        for _ in range(m):
            delta, tau = torch.from_numpy(draw.normal(size=3)), int(draw.integers(len(served)))
            samples = int(draw.integers(1, 90))
            ended.append(served[-1 - tau] + delta)
            weights.append(samples * strategy.importance(delta, tau))
            full = fold(strategy, delta, tau, samples)
        assert full
        mean = sum(w * model for w, model in zip(weights, ended, strict=True)) / sum(weights)
        torch.testing.assert_close(strategy.model_for(0), mean, rtol=1e-9, atol=1e-12)
        served.append(strategy.model_for(0))


def test_defaults_are_those_of_pace():
    strategy = PORT()
    assert (strategy.alpha, strategy.beta) == (1, 1)
    assert (strategy.bound, strategy.buffer_size) == (10, 5)
    assert (strategy.average, strategy.requests) == ("steps", True)


def test_fresh_updates_are_weighed_by_samples_alone():
    strategy = ready(PORT(buffer_size=2))
    assert fold(strategy, [4.0, 0.0, 0.0], samples=10) is False
    assert torch.equal(strategy.model_for(0), INITIAL)  # nothing is served before it is full
    assert fold(strategy, [0.0, 4.0, 0.0], samples=30) is True
    torch.testing.assert_close(strategy.model_for(0), INITIAL + torch.tensor([1.0, 3.0, 0.0]))


def test_staleness_is_in_versions_and_weighs_omega_over_tau_plus_omega():
    strategy = ready(PORT(bound=3, beta=0.0, buffer_size=1))
    fold(strategy, [1.0, 0.0, 0.0])
    strategy.buffer_size = 2
    before = strategy.model_for(0)
    fold(strategy, [7.0, 0.0, 0.0], tau=0)  # S = 1
    fold(strategy, [0.0, 7.0, 0.0], tau=1)  # S = 3/4
    torch.testing.assert_close(strategy.model_for(0) - before, torch.tensor([4.0, 3.0, 0.0]))


@pytest.mark.parametrize("tau", [0, 1])
def test_there_is_no_interference_up_to_one_version(tau):
    strategy = ready(PORT(buffer_size=1))
    for _ in range(3):
        fold(strategy, [1.0, 0.0, 0.0])
    against = torch.tensor([-1.0, 0.0, 0.0])
    assert strategy.importance(against, tau) == pytest.approx(10 / (tau + 10) + 1)


# -- defects of public implementations ------------------------------------------------------------


def test_interference_tells_directions_apart_at_every_version():
    """A reference direction of zero length would make it constant after the first flush."""
    strategy = ready(PORT(buffer_size=1))
    along, across = torch.tensor([2.0, 0.0, 0.0]), torch.tensor([0.0, 5.0, 0.0])
    for version in range(2, 7):
        while strategy.models.version < version:
            fold(strategy, [1.0, 0.0, 0.0])
        assert strategy.importance(along, 2) == pytest.approx(10 / 12 + 1.0)
        assert strategy.importance(across, 2) == pytest.approx(10 / 12 + 0.5)
        assert strategy.importance(-along, 2) == pytest.approx(10 / 12 + 0.0)


def test_the_reference_direction_is_that_of_the_clients_own_staleness():
    strategy = ready(PORT(buffer_size=1))
    for step in ([3.0, 0.0, 0.0], [0.0, 4.0, 0.0], [0.0, 0.0, 1.0], [0.0, 0.0, -1.0]):
        fold(strategy, step)
    first = torch.tensor([1.0, 0.0, 0.0])
    interference = [strategy.importance(first, tau) - 10 / (tau + 10) for tau in (2, 3, 4)]
    # the movement is (0, 0, 0), then (0, 4, 0), then (3, 4, 0)
    assert interference == pytest.approx([0.5, 0.5, (1 + 3 / 5) / 2])


@pytest.mark.parametrize("shift", [0.0, 10.0, -3.0])
def test_weights_come_from_differences_not_from_whole_models(shift):
    """Where the origin lies makes no difference to differences."""
    strategy = ready(PORT(buffer_size=1), INITIAL.double() + shift)
    for step in ([1.0, 0.0, 0.0], [0.0, 1.0, 0.0]):
        fold(strategy, np.array(step))
    strategy.buffer_size = 2
    before = strategy.model_for(0)
    fold(strategy, np.array([1.0, 0.0, 0.0]), tau=2)  # I = (1 + 1/sqrt(2)) / 2
    fold(strategy, np.array([0.0, 0.0, 1.0]), tau=0)  # I = 1
    u = np.array([10 / 12 + (1 + 0.5**0.5) / 2, 2.0])
    q = u / u.sum()
    assert (strategy.model_for(0) - before).tolist() == pytest.approx([q[0], 0.0, q[1]])


def test_clients_upload_differences_which_are_added_to_the_model():
    strategy = ready(PORT(buffer_size=1))
    assert strategy.task(0).upload == "delta"
    torch.testing.assert_close(moved(strategy, [0.5, 0.0, 0.0]), torch.tensor([0.5, 0.0, 0.0]))
    torch.testing.assert_close(moved(strategy, [0.5, 0.0, 0.0]), torch.tensor([0.5, 0.0, 0.0]))
    torch.testing.assert_close(strategy.model_for(0), INITIAL + torch.tensor([1.0, 0.0, 0.0]))


# -- urgent requests ------------------------------------------------------------------------------


def flying(**versions):
    return [InFlight(int(name[1:]), Staleness(99, tau)) for name, tau in versions.items()]


def requests(strategy, **versions):
    """Whom it hurries when these are in training, which it is told first."""
    told = sorted(flying(**versions), key=lambda flight: -flight.staleness.versions)
    strategy.training(told)
    return strategy.urgent(told)


def aged(versions, **options) -> PORT:
    strategy = ready(PORT(buffer_size=1, **options))
    for _ in range(versions):
        fold(strategy, [1.0, 0.0, 0.0])
    return strategy


def test_requests_go_to_those_over_the_bound_once_a_dispatch():
    strategy = aged(9, bound=3)
    assert requests(strategy, c0=3, c1=4, c2=9) == [1, 2]
    assert requests(strategy, c0=3, c1=4, c2=9) == []
    fold(strategy, [1.0, 0.0, 0.0])
    assert requests(strategy, c0=4, c1=5, c2=10) == [0]  # only the one that is new
    assert requests(strategy, c0=4, c2=10) == []  # 1 has reported, and starts again
    for later in range(1, 4):
        fold(strategy, [1.0, 0.0, 0.0])
        assert requests(strategy, c0=4 + later, c1=later, c2=10 + later) == []
    fold(strategy, [1.0, 0.0, 0.0])
    assert requests(strategy, c0=8, c1=4, c2=14) == [1]  # late a second time


def run_by_hand(server, training, order):
    """The clients of `order` report one after the other; returns who was sent a request when."""
    stops = []
    for step, client in enumerate(order):
        number = training.pop(client).number
        for action in server.receive(Update(client, number, torch.ones(3), 10)):
            if isinstance(action, Dispatch):
                training[action.client] = action
            else:
                assert isinstance(action, Stop)
                assert action.number == training[action.client].number
                stops.append((step, action.client))
    return stops


def hurried(**options) -> tuple[Server, dict[int, Dispatch]]:
    strategy = PORT(bound=2, buffer_size=1, **options)
    server = Server(strategy, Context(INITIAL, (10, 30, 60), Task(), 0), refill="same")
    return server, {action.client: action for action in server.join(range(3))}


def test_through_the_server_each_dispatch_is_asked_for_once():
    server, training = hurried()
    # client 2 holds version 0, then version 5; at most 2 versions old is in time
    stops = run_by_hand(server, training, [0, 1, 0, 1, 2, 0, 1, 0, 1])
    assert [stop for stop in stops if stop[1] == 2] == [(2, 2), (7, 2)]


def test_who_was_asked_survives_a_checkpoint(tmp_path):
    server, training = hurried()
    assert run_by_hand(server, training, [0, 1, 0]) == [(2, 2)]
    save_state(tmp_path / "state", server.state_dict())
    again, _ = hurried()
    again.load_state_dict(load_state(tmp_path / "state"))
    assert run_by_hand(again, training, [1, 0]) == []


def test_without_requests_nobody_is_asked_and_the_server_waits():
    server, training = hurried(requests=False)
    assert run_by_hand(server, training, [0, 1, 0]) == []
    assert server.version == 3  # client 2 is 3 versions behind, one more than the bound
    assert run_by_hand(server, training, [1, 0, 1]) == []
    assert server.version == 3
    assert run_by_hand(server, training, [2]) == []
    assert server.version == 4  # one aggregation of all four
    # of four times (1, 1, 1), whatever their weights
    torch.testing.assert_close(server.strategy.model_for(0), INITIAL + 4)


def test_without_requests_the_server_does_not_wait_for_those_that_are_lost():
    server, training = hurried(requests=False)
    run_by_hand(server, training, [0, 1, 0, 1])
    assert server.version == 3
    [fresh] = server.lost(2)
    training[2] = fresh
    run_by_hand(server, training, [0])
    assert server.version == 4


# -- in the simulator -----------------------------------------------------------------------------


class Scripted(Devices):
    """The first training of client 0 takes long; every other training takes a second."""

    def factors(self, clients, seed):
        self.long = [10.0]
        return [0.0] + [1.0] * (clients - 1)

    def seconds(self, factor, work, stream):
        return self.long.pop() if factor == 0.0 and self.long else 1.0


class Recorder(Executor):
    def __init__(self, module, fed) -> None:
        super().__init__(AutogradSolver(module, fed, seed=0))
        self.jobs, self.vectors = [], []

    def carry_out(self, job):
        outcome = super().carry_out(job)
        self.jobs.append(job)
        self.vectors.append(outcome.upload)
        return outcome


def simulated(small, **options):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        module = nn.Linear(12, 4)
    task = Task(epochs=5, batch_size=4, lr=0.05)
    recorder, log, kept = Recorder(module, small), [], []
    strategy = PORT(bound=2, buffer_size=7, **options)
    simulator = Simulator(
        small,
        module,
        strategy,
        task=task,
        concurrency=8,
        devices=Scripted(),
        backend=recorder,
        adapt_epochs=0,
        eval_every=10_000,
        check=True,
    )
    simulator.observers.append(lambda event: log.append(as_dict(event)))
    simulator.observers.append(lambda event: kept.append(len(strategy.models)))
    simulator.run(80)
    return simulator, recorder, log, kept


def test_a_hurried_client_trains_as_usual_the_next_time(small):
    """A version a second; client 0 is 3 versions behind at 3 s, in the second of its 5 epochs."""
    _, recorder, log, _ = simulated(small)
    requests = [event for event in log if event["event"] == "urgent"]
    assert [(event["time"], event["client"]) for event in requests] == [(3.0, 0)]
    mine = [event for event in log if event["event"] == "upload" and event["client"] == 0]
    assert [event["time"] for event in mine[:3]] == pytest.approx([4.0, 5.0, 6.0])
    jobs = [k for k, job in enumerate(recorder.jobs) if job.client == 0]
    epoch = Task(batch_size=4).batches(small.samples[0])
    assert recorder.jobs[jobs[0]].last_step == 2 * epoch  # a partial model, but a trained one
    assert all(recorder.jobs[k].last_step is None for k in jobs[1:])
    assert len(jobs) > 3
    assert all(recorder.vectors[k].norm() > 0 for k in jobs)


def test_without_requests_nobody_gets_more_than_one_version_over_the_bound(small):
    simulator, recorder, log, _ = simulated(small, requests=False)
    assert not [event for event in log if event["event"] == "urgent"]
    assert all(job.last_step is None for job in recorder.jobs)
    uploads = [event for event in log if event["event"] == "upload"]
    assert next(event["versions"] for event in uploads if event["client"] == 0) == 3
    assert max(event["versions"] for event in uploads) == 3
    waiting = [event for event in uploads if 3.0 < event["time"] < 10.0]
    assert len(waiting) == 6 * 7  # they train on meanwhile
    assert {event["version"] for event in waiting} == {3}
    assert simulator.server.version > 3


def test_only_the_models_in_use_are_kept(small):
    simulator, _, _, kept = simulated(small)
    assert max(kept) <= 9  # one per client in training, and the current one
    assert simulator.server.version == simulator.strategy.models.version > 9
