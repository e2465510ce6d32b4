"""Training ahead of time shows in no result: not in the events, not in a bit of a model."""

from __future__ import annotations

import multiprocessing as mp
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from functools import cache
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from polytempo import STRATEGIES, Federation, Strategy, Task
from polytempo.core.client_steps import ClientStep
from polytempo.core.events import Evaluate, Event, as_dict
from polytempo.simulation import Simulator
from polytempo.simulation.devices import Exponential, Links, TwoSpeed
from polytempo.simulation.dropout import Delay, Drop, Leave
from polytempo.simulation.metrics import over_clients
from polytempo.storage import load_state, save_state
from polytempo.strategies import (
    PACE,
    CASAPlus,
    FedAsync,
    FedAvg,
    FedBuff,
    FedSaCPACE,
    Standalone,
)
from polytempo.training import AutogradSolver, Exam, Executor, Job, Score, make_executor
from solving import HAS_COMPILER, needs_compiler

TASK = Task(epochs=1, batch_size=3, lr=0.05)
UPDATES = 14
SLOW = Links(low=8e-6 * 2000, high=8e-6 * 4000)  # a model takes some tenths of a second
forking = pytest.mark.skipif("fork" not in mp.get_all_start_methods(), reason="needs fork")


def module() -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(12, 9), nn.ReLU(), nn.Linear(9, 4))


class Restless(FedAsync):
    """Refreshes clients that are two updates behind, and hurries those that are three behind."""

    state: ClassVar = ("model",)

    def refresh(self, in_flight):
        return [f.client for f in in_flight if f.staleness.updates == 2 and f.client % 2]

    def urgent(self, in_flight):
        return [f.client for f in in_flight if f.staleness.updates == 3]


class World(NamedTuple):
    strategy: Callable[[], Strategy]
    happens: set[str]  # events that must occur, or the world is not what it says
    options: dict[str, Any]


SPEEDS = TwoSpeed(factor=9.0)
WORLDS = {
    "pace": World(lambda: PACE(omega=15), {"restart"}, {"devices": SPEEDS}),
    "pace, all refreshed": World(lambda: PACE(omega=2), {"restart"}, {"concurrency": 6}),
    "pace, slow network": World(
        lambda: PACE(omega=2),
        {"restart", "missed"},
        {"devices": SPEEDS, "network": SLOW, "concurrency": 4},
    ),
    "pace, losses": World(
        lambda: PACE(omega=8),
        {"restart", "drop"},
        {"devices": Exponential(beta=3.0), "dropout": Drop(probability=0.3), "concurrency": 5},
    ),
    "pace, some leave": World(
        lambda: PACE(omega=4),
        {"restart", "drop", "leave"},
        {"devices": SPEEDS, "dropout": Leave(at=0.04, share=0.5), "concurrency": 6},
    ),
    "fedavg": World(FedAvg, set(), {"concurrency": 3, "dropout": Delay(probability=0.3)}),
    "fedavg, losses": World(FedAvg, {"drop"}, {"concurrency": 4, "dropout": Drop(probability=0.3)}),
    "fedbuff": World(
        lambda: FedBuff(buffer_size=3), set(), {"devices": Exponential(beta=3.0), "concurrency": 5}
    ),
    "fedasync": World(FedAsync, set(), {"devices": SPEEDS, "network": SLOW, "concurrency": 5}),
    "standalone": World(Standalone, set(), {"devices": Exponential(beta=3.0)}),
    "with masks": World(
        lambda: CASAPlus(s_0=1.0, founders=0.5), set(), {"devices": SPEEDS, "concurrency": 6}
    ),
    "with a basis": World(
        lambda: FedSaCPACE(omega=15), {"restart"}, {"devices": SPEEDS, "concurrency": 5}
    ),
    "restless": World(
        Restless,
        {"restart", "urgent"},
        {"devices": SPEEDS, "concurrency": 6, "task": Task(epochs=4, batch_size=8, lr=0.05)},
    ),
}


class Run(NamedTuple):
    fingerprint: str
    history: list[dict]
    log: list[dict]
    models: list[Tensor]
    wasted: int = 0


def simulator(fed: Federation, world: World, backend: Executor, **more) -> Simulator:
    options = {"task": TASK, "adapt_epochs": 1, "eval_every": 6, "check": True}
    return Simulator(
        fed, module(), world.strategy(), **(options | world.options | more), backend=backend
    )


def backend_of(fed: Federation, solver: str, workers: int = 0) -> Executor:
    """On so many processes; 0: in this one."""
    where = {"name": "processes", "workers": workers} if workers else {"name": "serial"}
    return make_executor(module(), fed, 0, solver=solver, **where)


def whole_run(fed: Federation, world: World, backend: Executor, updates: int = UPDATES) -> Run:
    simulation, log, before = simulator(fed, world, backend), [], backend.wasted
    simulation.observers.append(lambda event: log.append(as_dict(event)))
    assert simulation.run(updates)
    assert simulation.server.updates == updates
    assert world.happens <= {event["event"] for event in log}
    wasted = backend.wasted - before
    give_up(simulation)
    models = models_of(simulation)
    return Run(simulation.fingerprint, simulation.history, log, models, wasted)


@cache
def serial_run(fed: Federation, name: str) -> Run:
    """What all others are compared with."""
    return whole_run(fed, WORLDS[name], backend_of(fed, "torch"))


def models_of(simulation: Simulator) -> list[Tensor]:
    clients = range(simulation.federation.clients)
    return [simulation.strategy.model_for(client).clone() for client in clients]


def give_up(simulation: Simulator) -> None:
    """Nobody will ask for what is in flight."""
    for flight in simulation.flights.values():
        simulation.backend.forget(flight.job)


def assert_same(a: Run, b: Run) -> None:
    assert a.log == b.log
    assert a.history == b.history
    assert a.fingerprint == b.fingerprint
    for mine, theirs in zip(a.models, b.models, strict=True):
        assert torch.equal(mine, theirs)


# -- the same run, whoever trains ---------------------------------------------------------------


@pytest.fixture(scope="module")
def crews(small) -> Iterator[dict[tuple[str, int], Executor]]:
    """Backends whose workers stay for all tests (it takes longer to start them than to use them).
    Runs follow one another on them, and must not notice."""
    kinds = [("torch", 1), ("torch", 2), ("torch", 3)] + [("native", 2)] * HAS_COMPILER
    with ExitStack() as stack:
        yield {kind: stack.enter_context(backend_of(small, *kind)) for kind in kinds}


@forking
@pytest.mark.parametrize("name", WORLDS)
def test_workers_change_nothing(small, crews, name):
    serial = serial_run(small, name)
    assert any(not torch.equal(model, serial.models[0]) for model in serial.models) == (
        not WORLDS[name].strategy().single_model
    )
    for workers in (1, 2, 3):
        assert_same(whole_run(small, WORLDS[name], crews["torch", workers]), serial)


def without_scores(log: Sequence[dict]) -> list[dict]:
    return [{k: v for k, v in event.items() if k not in ("value", "loss")} for event in log]


@forking
@needs_compiler
@pytest.mark.parametrize("name", WORLDS)
def test_native_training_changes_nothing_but_the_last_digits(small, crews, name):
    serial = serial_run(small, name)
    native = whole_run(small, WORLDS[name], backend_of(small, "native"))
    assert_same(whole_run(small, WORLDS[name], crews["native", 2]), native)
    assert without_scores(native.log) == without_scores(serial.log)
    for mine, theirs in zip(native.models, serial.models, strict=True):
        assert (mine - theirs).norm() <= 1e-5 * theirs.norm()
    for mine, theirs in zip(native.history, serial.history, strict=True):
        assert mine["loss"] == pytest.approx(theirs["loss"], rel=1e-4)


# -- interrupted runs ---------------------------------------------------------------------------


def after(events: int) -> Callable[[], bool]:
    """Says stop after so many events."""
    left = [events]

    def stop() -> bool:
        left[0] -= 1
        return left[0] < 0

    return stop


def run_in_pieces(
    fed: Federation, world: World, backends: Sequence[Callable[[], Executor]], path: Path
) -> Run:
    """Stopped after every few events, saved, and continued by the next backend (in turn)."""
    log: list[dict] = []
    for piece in range(1000):
        simulation = simulator(fed, world, backends[piece % len(backends)]())
        simulation.observers.append(lambda event: log.append(as_dict(event)))
        if piece:
            simulation.load_state_dict(load_state(path))
        ended = simulation.run(UPDATES, stop=after(8 + piece % 2))
        give_up(simulation)
        if ended:
            assert piece >= 2
            return Run(simulation.fingerprint, simulation.history, log, models_of(simulation))
        save_state(path, simulation.state_dict())
    raise AssertionError("the run does not end")


@forking
@pytest.mark.parametrize(
    "name", ["pace, slow network", "pace, some leave", "fedavg", "fedbuff", "restless"]
)
def test_a_run_goes_on_with_another_backend(small, crews, name, tmp_path):
    backends = [
        lambda: crews["torch", 2],
        lambda: backend_of(small, "torch"),
        lambda: crews["torch", 3],
        lambda: crews["torch", 1],
    ]
    pieces = run_in_pieces(small, WORLDS[name], backends, tmp_path / "state")
    assert_same(pieces, serial_run(small, name))


@forking
@needs_compiler
@pytest.mark.parametrize("name", ["pace", "standalone"])
def test_a_native_run_goes_on_with_another_number_of_workers(small, crews, name, tmp_path):
    whole = whole_run(small, WORLDS[name], crews["native", 2])
    backends = [lambda: backend_of(small, "native"), lambda: crews["native", 2]]
    assert_same(run_in_pieces(small, WORLDS[name], backends, tmp_path / "state"), whole)


@forking
def test_the_same_simulation_can_be_run_on_and_on(small):
    """Workers come and go with every call; what they had begun is not lost or mixed up."""
    whole = serial_run(small, "pace")
    simulation, log = simulator(small, WORLDS["pace"], backend_of(small, "torch", 2)), []
    simulation.observers.append(lambda event: log.append(as_dict(event)))
    others, times = len(mp.active_children()), 0
    while not simulation.run(UPDATES, stop=after(12)):
        assert len(mp.active_children()) == others
        times += 1
    assert times > 1
    assert_same(Run(simulation.fingerprint, simulation.history, log, models_of(simulation)), whole)


# -- what is trained, and how often -------------------------------------------------------------


class Eager:
    """Stands for so many workers that every job is begun, and done, the moment it is announced."""

    workers = 100

    def __init__(self, solver: AutogradSolver) -> None:
        self.solver = solver
        self.jobs: list[Job] = []
        self.answers: list[tuple[int, Any]] = []

    def train(self, worker: int, job: Job) -> None:
        self.jobs.append(job)
        self.answers.append((worker, self.solver.carry_out(job)))

    def evaluate(self, worker: int, exam: Exam) -> None:
        self.answers.append((worker, self.solver.evaluate(exam)))

    def receive(self) -> tuple[int, Any]:
        return self.answers.pop(0)

    def peak_memory(self) -> float:
        return 0.0

    def close(self) -> None:
        pass


def eager_run(fed: Federation, name: str) -> tuple[Run, list[Job]]:
    """The run, and the jobs that were trained for it."""
    solver = AutogradSolver(module(), fed, 0)
    pools: list[Eager] = []

    def start() -> Eager:
        pools.append(Eager(solver))
        return pools[-1]

    run = whole_run(fed, WORLDS[name], Executor(solver, start))
    [pool] = pools
    return run, [job for job in pool.jobs if job.stream[0] == "client"]


def of_kind(log: Sequence[dict], kind: str) -> list[dict]:
    return [event for event in log if event["event"] == kind]


def beginnings(log: Sequence[dict]) -> dict[int, int]:
    """Of each dispatch, and each multicast that took over: the dispatch that began the flight."""
    first: dict[int, int] = {}
    for event in log:
        if event["event"] == "dispatch":
            first[event["dispatch"]] = event["dispatch"]
        elif event["event"] == "restart":
            first[event["dispatch"]] = first[event["replaces"]]
    return first


@pytest.mark.parametrize("name", ["pace", "pace, all refreshed", "pace, slow network"])
def test_a_multicast_makes_its_clients_job_be_done_again_and_no_other(small, name):
    run, jobs = eager_run(small, name)
    assert_same(run, serial_run(small, name))
    dispatches, restarts = of_kind(run.log, "dispatch"), of_kind(run.log, "restart")
    assert len(restarts) >= 3
    first = beginnings(run.log)
    wanted = [
        (event["client"], first[event["dispatch"]], event.get("step", 0))
        for event in run.log
        if event["event"] in ("dispatch", "restart")
    ]
    found = [(job.client, job.stream[3], job.first_step) for job in jobs]
    assert found == wanted
    assert len(found) == len(dispatches) + len(restarts)
    assert run.wasted == len(restarts)


def test_urgent_requests_make_a_job_be_done_again_only_if_they_shorten_it(small):
    run, jobs = eager_run(small, "restless")
    assert_same(run, serial_run(small, "restless"))
    shortened = [job for job in jobs if job.last_step is not None]
    assert shortened
    restarts = of_kind(run.log, "restart")
    stops = len(jobs) - len(of_kind(run.log, "dispatch")) - len(restarts)
    assert 0 < stops <= len(of_kind(run.log, "urgent"))
    assert run.wasted == len(restarts) + stops


@pytest.mark.parametrize("name", ["pace, losses", "pace, some leave", "fedavg, losses"])
def test_what_is_certain_to_be_lost_is_not_trained(small, name):
    run, jobs = eager_run(small, name)
    assert_same(run, serial_run(small, name))
    trained = Counter(job.stream[3] for job in jobs)
    first = beginnings(run.log)
    restarts = Counter(first[event["dispatch"]] for event in of_kind(run.log, "restart"))
    for number, times in trained.items():
        assert times == 1 + restarts[number]
    dropped = [first[event["dispatch"]] for event in of_kind(run.log, "drop")]
    assert dropped
    assert not any(trained[number] for number in dropped)
    assert all(trained[first[event["dispatch"]]] for event in of_kind(run.log, "upload"))
    assert run.wasted == sum(restarts[number] for number in trained)


def test_workers_train_ahead_in_the_order_in_which_updates_are_due(small):
    """With one place only, what is begun next is what arrives next."""

    class Single(Eager):
        workers = 1

    solver = AutogradSolver(module(), small, 0)
    pools: list[Single] = []

    def start() -> Single:
        pools.append(Single(solver))
        return pools[-1]

    world = WORLDS["fedavg"]
    simulation, log = simulator(small, world, Executor(solver, start), adapt_epochs=0), []
    simulation.observers.append(lambda event: log.append(as_dict(event)))
    simulation.run(30)
    uploads = [event["dispatch"] for event in of_kind(log, "upload")]
    begun = [job.stream[3] for job in pools[0].jobs]
    assert sorted(begun) == sorted(set(begun))
    assert simulation.backend.wasted == 0
    # each cohort of three: the first two are begun at once, the third when there is a place
    assert {frozenset(begun[k : k + 3]) for k in range(0, 30, 3)} == {
        frozenset(uploads[k : k + 3]) for k in range(0, 30, 3)
    }


# -- evaluation ---------------------------------------------------------------------------------


class Watched(Executor):
    """Remembers which clients were looked at."""

    def __init__(self, fed: Federation) -> None:
        super().__init__(AutogradSolver(module(), fed, 0))
        self.looked: list[list[int]] = []

    def evaluate(self, exams) -> list[list[Score]]:
        exams = list(exams)
        self.looked.append([client for exam in exams for client in exam.clients])
        return super().evaluate(exams)


def test_only_clients_whose_model_has_changed_are_evaluated(small):
    backend = Watched(small)
    world = WORLDS["standalone"]
    simulation = simulator(small, world, backend, adapt_epochs=0, eval_every=3)
    log: list[dict] = []
    simulation.observers.append(lambda event: log.append(as_dict(event)))
    simulation.run(30)
    since: set[int] = set(range(8))
    expected = []
    for event in log:
        if event["event"] == "upload":
            since.add(event["client"])
        elif event["event"] == "evaluate":
            expected.append(sorted(since))
            since.clear()
    assert backend.looked == expected
    assert len(expected) == 11
    assert min(len(clients) for clients in expected) < 3  # some came twice


def test_a_single_model_is_evaluated_once_a_version(small):
    backend = Watched(small)
    simulation = simulator(small, WORLDS["fedbuff"], backend, adapt_epochs=0, eval_every=1)
    simulation.run(31)
    assert len(simulation.history) == 32
    assert backend.looked == [list(range(8))] * (1 + simulation.server.version)
    assert simulation.server.version == 10
    assert len({row["loss"] for row in simulation.history}) == 11


@pytest.mark.parametrize(
    "name", [name for name in STRATEGIES if STRATEGIES[name].engine == "server"]
)
def test_scores_that_are_remembered_are_those_of_the_models_as_they_are(small, name):
    world = World(lambda: STRATEGIES.create(name), set(), {"devices": SPEEDS, "concurrency": 4})
    simulation = simulator(
        small, world, backend_of(small, "torch"), adapt_epochs=0, eval_every=1, task=TASK
    )
    fresh, seen = AutogradSolver(module(), small, 0), []

    def compare(event: Event) -> None:
        if isinstance(event, Evaluate):
            scores = []
            for client in range(8):
                every = simulation.strategy.task(client).client_steps
                steps = tuple(step for step in every if type(step).use is ClientStep.use)
                exam = Exam(simulation.in_use(client), [client], None, steps)
                scores += fresh.evaluate(exam)
            row = simulation.history[-1]
            assert row | over_clients(scores, simulation.problem) == row
            seen.append(event.loss)

    simulation.observers.append(compare)
    simulation.run(60)
    assert len(set(seen)) > 2


def test_a_run_that_goes_on_from_a_checkpoint_does_not_trust_old_scores(small, tmp_path):
    world = WORLDS["standalone"]
    first = simulator(small, world, Watched(small), adapt_epochs=0, eval_every=1)
    first.run(10)
    save_state(tmp_path / "state", first.state_dict())
    second = simulator(small, world, Watched(small), adapt_epochs=0, eval_every=1)
    second.run(3)  # has scores of its own by now
    second.load_state_dict(load_state(tmp_path / "state"))
    second.run(14)
    first.run(14)
    assert first.fingerprint == second.fingerprint
    assert first.history == second.history
