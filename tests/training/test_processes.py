"""Worker processes: the same bits, no copies, and nobody left behind."""

from __future__ import annotations

import contextlib
import gc
import multiprocessing as mp
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn

from polytempo import Federation, PolytempoError, Pull, Task
from polytempo.core.client_steps import Choose, Mask
from polytempo.core.objective import Drift
from polytempo.training import AutogradSolver, Exam, Executor, Job, Outcome, Score, Solver
from polytempo.training.executors import processes
from polytempo.training.executors.processes import Processes
from polytempo.training.solvers.native.solver import NativeSolver
from solving import NATIVE, upload_of

pytestmark = pytest.mark.skipif(
    "fork" not in mp.get_all_start_methods() or not Path("/proc").is_dir(),
    reason="needs fork and /proc",
)
SEED = 5
TASK = Task(epochs=1, batch_size=4, lr=0.05)


@pytest.fixture(autouse=True)
def nobody_is_left() -> Iterator[None]:
    """Every test here ends with as many children as it began with."""
    before = {process.pid for process in mp.active_children()}
    yield
    assert {process.pid for process in mp.active_children()} == before


def on_workers(solver: Solver, workers: int) -> Executor:
    return Executor(solver, lambda: Processes(solver, workers))


def children() -> list[mp.Process]:
    return sorted(mp.active_children(), key=lambda process: process.name)


def ended(pid: int) -> bool:
    """Whether there is no such process, or only what is left of it until somebody looks."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return True


def wait_for(condition) -> bool:
    """Wait for it, for as long as the slowest machine may need."""
    for _ in range(2000):
        if condition():
            return True
        time.sleep(0.01)
    return False


def network(*layers: nn.Module) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(12, 9), *layers, nn.Linear(9, 4))


def some_jobs(solver: Solver, count: int, task: Task = TASK) -> list[Job]:
    """No two alike: other models, streams and steps."""
    start, jobs = solver.layout.read(), []
    for k in range(count):
        noise = torch.randn(len(start), generator=torch.Generator().manual_seed(k))
        other = replace(task, upload=("model", "delta", "gradient")[k // 8 % 3])
        params = start + 0.1 * noise.to(start.dtype)
        job = Job(k % 8, params, other, ("client", k % 8, "dispatch", k))
        if k % 2:  # some have an anchor of their own
            job = replace(job, vectors={"anchor": start + 0.1 * noise.roll(1).to(start.dtype)})
        jobs.append(job if other.upload == "gradient" else replace(job, first_step=k % 3))
    return jobs


# -- the same bits ------------------------------------------------------------------------------


@pytest.mark.parametrize("workers", [1, 2, 3])
@pytest.mark.parametrize("kind", ["plain", "double", NATIVE])
def test_uploads_and_scores_are_those_of_the_same_solver_in_this_process(small, kind, workers):
    """And there are more jobs than rows of shared memory: rows are used again."""
    module = network(nn.Tanh(), nn.Dropout(0.5))
    module = module.double() if kind == "double" else module
    solver = (NativeSolver if kind == "native" else AutogradSolver)(module, small, SEED)
    jobs = some_jobs(solver, 30, replace(TASK, objective=Pull(0.3)))
    exams = [Exam(job.params, list(range(job.client, 8))) for job in jobs[:20]]
    expected = [upload_of(solver, job) for job in jobs]
    scores = [solver.evaluate(exam) for exam in exams]
    with on_workers(solver, workers) as backend:
        for k, job in enumerate(jobs):
            backend.expect(job, -k)  # the last ones first
        found = [backend.train(job) for job in jobs[:10]]
        assert backend.evaluate(exams) == scores
        found += [backend.train(job) for job in jobs[10:]]
    for mine, theirs in zip(found, expected, strict=True):
        assert mine.dtype == theirs.dtype
        assert torch.equal(mine, theirs)


@pytest.mark.parametrize("kind", ["plain", NATIVE])
def test_anchors_reach_the_workers_and_no_job_sees_that_of_another(small, kind):
    """Rows that held an anchor are used again by jobs that have none, or another."""
    make = NativeSolver if kind == "native" else AutogradSolver
    solver = make(network(nn.ReLU()), small, SEED)
    start = solver.layout.read()
    task, jobs = replace(TASK, objective=Drift()), []
    for k in range(60):
        vectors = {} if k % 3 == 0 else {"anchor": torch.full_like(start, 0.01 * k)}
        jobs.append(Job(k % 8, start, task, ("client", k % 8, "dispatch", k), vectors=vectors))
    expected = [upload_of(solver, job) for job in jobs]
    with on_workers(solver, 2) as backend:
        for job in jobs:
            backend.expect(job)
        found = [backend.train(job) for job in jobs]
    assert all(map(torch.equal, found, expected))
    assert not torch.allclose(found[2], found[10])  # client 2, with another anchor each time


def test_a_run_may_go_on_in_this_process_and_on_new_workers(small):
    solver = AutogradSolver(network(nn.Tanh()), small, SEED)
    jobs = some_jobs(solver, 12)
    expected = [upload_of(solver, job) for job in jobs]
    backend, found = on_workers(solver, 2), []
    for job in jobs:
        backend.expect(job)
    for part in range(0, 12, 4):
        with backend:
            found += [backend.train(job) for job in jobs[part : part + 2]]
        assert not mp.active_children()
        found += [backend.train(job) for job in jobs[part + 2 : part + 4]]
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


class Probe:
    """A solver that reports on the process in which it works, and does as it is told."""

    def __init__(self) -> None:
        self.layout = SimpleNamespace(size=3, vector=torch.zeros(3, dtype=torch.float64))

    def carry_out(self, job: Job) -> Outcome:
        if job.stream == ("sleep",):
            time.sleep(20)
        if job.stream == ("leave",):
            os._exit(3)
        found = [torch.get_num_threads(), os.getpid(), job.client]
        return Outcome(torch.tensor(found, dtype=torch.float64), {}, {})

    def evaluate(self, exam: Exam) -> list[Score]:
        first = float(exam.params[0])
        return [Score({"client": client, "loss": first}) for client in exam.clients]


def probing(client: int = 0, stream: str = "") -> Job:
    return Job(client, torch.zeros(3, dtype=torch.float64), TASK, (stream,))


def test_workers_are_other_processes_with_one_thread_each():
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        with on_workers(Probe(), 2) as backend:
            jobs = [probing(k) for k in range(8)]
            for job in jobs:
                backend.expect(job)
            found = torch.stack([backend.train(job) for job in jobs])
            pids = {process.pid for process in children()}
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(threads)
    assert set(found[:, 0].tolist()) == {1}
    assert set(found[:, 1].tolist()) == pids
    assert len(pids) == 2
    assert found[:, 2].tolist() == list(range(8))


def test_answers_that_are_large_pass_the_pipes():
    """Larger than what a pipe holds."""
    model = torch.full((3,), 7.0, dtype=torch.float64)
    with on_workers(Probe(), 2) as backend:
        [scores] = backend.evaluate([Exam(model, list(range(40_000)))])
    assert scores == [Score({"client": client, "loss": 7.0}) for client in range(40_000)]


class Garbage:
    """In a circle, so that only the garbage collector finds it."""

    collected_in: list[int] = []  # noqa: RUF012 - of each process its own, once it is forked

    def __init__(self) -> None:
        self.circle = self

    def __del__(self) -> None:
        self.collected_in.append(os.getpid())


class Collects(Probe):
    """Makes garbage, collects all it can, and says how much that was."""

    def evaluate(self, exam: Exam) -> list[Score]:
        Garbage()
        gc.collect()
        return [Score({"collected": len(Garbage.collected_in), "automatic": gc.isenabled()})]


def test_garbage_of_the_parent_is_left_to_the_parent():
    """Finalizers may wait for threads, which a forked process does not have: a Zenoh session that
    was garbage in the parent hung a worker for ever."""
    gc.collect()
    Garbage.collected_in.clear()
    usual = gc.get_threshold()
    gc.set_threshold(10**9)  # only when told to
    try:
        Garbage()
        with on_workers(Collects(), 1) as backend:
            [[found]] = backend.evaluate([Exam(torch.zeros(3, dtype=torch.float64), [0])])
            assert gc.isenabled()
        assert found == Score({"collected": 1, "automatic": True})
        assert Garbage.collected_in == []
    finally:
        gc.set_threshold(*usual)
    gc.collect()
    assert Garbage.collected_in == [os.getpid()]


class Talks(Probe):
    """Sends back more than a pipe holds."""

    def carry_out(self, job: Job) -> Outcome:
        return Outcome(job.params, {"sum": job.vectors["models"].sum(0)}, {})


def test_large_answers_to_large_requests_pass_both_ways_at_once():
    """Or each end of a pipe would wait for the other to read."""
    models = [torch.full((3, 400_000), k + 1.0, dtype=torch.float64) for k in range(6)]
    with on_workers(Talks(), 1) as backend:
        jobs = [replace(probing(k), vectors={"models": models[k]}) for k in range(6)]
        for job in jobs:
            backend.expect(job)
            time.sleep(0.05)  # by now there is an answer under way
        for k, job in enumerate(jobs):
            row = backend.carry_out(job).extras["sum"]
            assert len(row) == 400_000
            assert set(row.tolist()) == {3.0 * (k + 1)}


def test_models_to_choose_from_and_a_mask_in_one_task(small):
    task = Task(epochs=1, client_steps=(Choose(2), Mask(0.1)))
    solver = AutogradSolver(nn.Linear(12, 4), small, 0)
    params = solver.layout.read()
    job = Job(0, params, task, ("a",), vectors={"candidate 1": params + 1})
    expected = Executor(solver).carry_out(job)
    with on_workers(solver, 1) as backend:
        found = backend.carry_out(job)
    assert torch.equal(found.upload, expected.upload)
    assert sorted(found.extras) == ["choice", "mask"]
    assert all(torch.equal(found.extras[key], value) for key, value in expected.extras.items())


# -- errors -------------------------------------------------------------------------------------


class Broken(ValueError):
    pass


class Awkward(Exception):
    """Cannot be sent as it is: what it is made from is not what it keeps."""

    def __init__(self, what: str, number: int) -> None:
        super().__init__(f"{what} {number}")


class Fails(nn.Module):
    """Fails in a sample that begins with a large number."""

    def __init__(self, error: Exception) -> None:
        super().__init__()
        self.inner, self.error = nn.Linear(12, 4), error

    def forward(self, x: Tensor) -> Tensor:
        if bool((x[:, 0] > 100).any()):
            raise self.error
        return self.inner(x)


def with_a_bad_client(fed: Federation) -> Federation:
    x = fed.x.clone()
    x[fed.train[3].start : fed.test[3].stop, 0] = 1000.0
    return replace(fed, x=x)


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("what", ["train", "evaluate"])
def test_an_error_in_the_module_reaches_the_caller_as_itself(small, workers, what):
    solver = AutogradSolver(Fails(Broken("sample 17 is odd")), with_a_bad_client(small), SEED)
    start = solver.layout.read()
    backend = on_workers(solver, workers)
    with pytest.raises(Broken, match="sample 17 is odd") as caught, backend:
        pids = [process.pid for process in children()]
        jobs = [Job(client, start, TASK, ("client", client)) for client in range(8)]
        for job in jobs:
            backend.expect(job)
        backend.train(jobs[0])
        if what == "train":
            for job in jobs[1:]:
                backend.train(job)
        else:
            backend.forget(jobs[3])
            backend.evaluate([Exam(start, list(range(8)))])
    notes = "\n".join(caught.value.__notes__)
    assert "in a worker process" in notes
    assert "in forward" in notes
    assert len(pids) == workers
    assert all(ended(pid) for pid in pids)


@pytest.mark.parametrize(
    "error", [Awkward("sample", 17), type("Local", (Exception,), {})("sample 17")]
)
def test_an_error_that_cannot_be_sent_is_told(small, error):
    solver = AutogradSolver(Fails(error), with_a_bad_client(small), SEED)
    with pytest.raises(RuntimeError, match="sample 17") as caught, on_workers(solver, 1) as backend:
        backend.train(Job(3, solver.layout.read(), TASK, ("client", 3)))
    assert type(error).__name__ in str(caught.value)
    assert "in forward" in str(caught.value)


def test_after_an_error_the_others_get_their_own_results(small):
    """Whoever catches it within the context can go on."""
    solver = AutogradSolver(Fails(Broken("odd")), with_a_bad_client(small), SEED)
    start = solver.layout.read()
    jobs = [Job(client, start, TASK, ("client", client)) for client in range(8)]
    good = [job for job in jobs if job.client != 3]
    expected = [upload_of(solver, job) for job in good]
    with on_workers(solver, 2) as backend:
        for job in jobs:
            backend.expect(job)
        with pytest.raises(Broken):
            backend.train(jobs[3])
        for job, upload in zip(good, expected, strict=True):
            assert torch.equal(backend.train(job), upload)


def assert_one_line(error: PolytempoError, *words: str) -> None:
    text = str(error)
    assert "\n" not in text
    for word in words:
        assert word in text


@pytest.mark.parametrize("workers", [1, 3])
def test_a_worker_that_is_killed_in_its_work_is_one_clear_line(workers):
    with pytest.raises(PolytempoError) as caught, on_workers(Probe(), workers) as backend:
        job = probing(stream="sleep")
        backend.expect(job)
        pids = [process.pid for process in children()]
        os.kill(pids[0], signal.SIGKILL)
        backend.train(job)
    assert_one_line(caught.value, "worker process 0", "SIGKILL", "--backend serial")
    assert all(ended(pid) for pid in pids)


def test_a_worker_that_is_killed_while_it_waits_is_noticed():
    with pytest.raises(PolytempoError) as caught, on_workers(Probe(), 2) as backend:
        victim = children()[1]
        os.kill(victim.pid, signal.SIGKILL)
        assert wait_for(lambda: ended(victim.pid))
        for k in range(2):  # one for each
            backend.expect(probing(k))
        backend.drain()  # at the latest: whoever was just forked may still hold an end of its pipe
    assert_one_line(caught.value, "worker process 1", "SIGKILL")


def test_a_worker_that_is_gone_is_noticed_at_the_end_of_a_run():
    with pytest.raises(PolytempoError) as caught, on_workers(Probe(), 2) as backend:
        victim = children()[0]
        os.kill(victim.pid, signal.SIGTERM)
        assert wait_for(lambda: ended(victim.pid))
        backend.drain()
    assert_one_line(caught.value, "worker process 0", "SIGTERM")


def test_a_worker_that_leaves_by_itself_is_reported_with_its_code():
    with pytest.raises(PolytempoError) as caught, on_workers(Probe(), 1) as backend:
        backend.train(probing(stream="leave"))
    assert_one_line(caught.value, "exit code 3")


def test_systems_that_cannot_fork_are_told_what_to_use(monkeypatch):
    monkeypatch.setattr(mp, "get_all_start_methods", lambda: ["spawn"])
    with pytest.raises(PolytempoError, match=r"--backend serial") as caught:
        on_workers(Probe(), 2).__enter__()
    assert_one_line(caught.value)


# -- nobody is left behind ----------------------------------------------------------------------


def test_busy_workers_are_stopped_whatever_the_parent_does_with_signals():
    """A command that finishes its round on SIGTERM must not pass that habit on."""
    before = signal.signal(signal.SIGTERM, lambda *_: None)
    try:
        with on_workers(Probe(), 2) as backend:
            for _ in range(4):
                backend.expect(probing(stream="sleep"))
            found = children()
            assert len(found) == 2
        assert [process.exitcode for process in found] == [-signal.SIGTERM] * 2
    finally:
        signal.signal(signal.SIGTERM, before)


CLOSED_AT_ONCE = """
import os, signal, sys, time
sys.path[:0] = sys.argv[1:]
from test_processes import Probe
from polytempo.training.executors.processes import Processes

class Escaped(Exception):
    pass

def handler(number, frame):
    raise Escaped

def slow_fork(fork=os.fork):
    pid = fork()
    if pid == 0:
        time.sleep(0.5)  # a child that is slow to begin
    return pid

signal.signal(signal.SIGTERM, handler)
os.fork = slow_fork
try:
    Processes(Probe(), 2).close()
    print("closed", flush=True)
except Escaped:
    print("a worker goes on with the program of its parent", flush=True)
    time.sleep(600)
"""


def test_workers_that_are_closed_at_once_do_not_run_the_parents_handler():
    """Ray installs such a handler. It used to raise in the worker, before anything there could
    catch it: the worker became a second pytest, and the first one waited for it for ever."""
    parent = subprocess.Popen(
        [sys.executable, "-c", CLOSED_AT_ONCE, *map(str, Path(__file__).parents[:2])],
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        said, _ = parent.communicate(timeout=60)
        assert said == "closed\n"
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(parent.pid, signal.SIGKILL)
        parent.wait(60)


def test_a_worker_that_was_stopped_is_killed_in_the_end(monkeypatch):
    monkeypatch.setattr(processes, "_GRACE", 0.5)
    with on_workers(Probe(), 1):
        [worker] = children()
        os.kill(worker.pid, signal.SIGSTOP)
    # some systems let the termination through that was sent before
    assert worker.exitcode in (-signal.SIGKILL, -signal.SIGTERM)


def test_a_dead_worker_is_noticed_though_its_pipe_is_held_open(monkeypatch):
    """By a process that was forked elsewhere and has inherited the other end."""
    monkeypatch.setattr(processes, "_LOOK", 0.1)
    held, pipe = [], mp.get_context("fork").Pipe

    def spying():
        ours, theirs = pipe()
        held.append(os.dup(theirs.fileno()))
        return ours, theirs

    monkeypatch.setattr(mp.get_context("fork"), "Pipe", spying, raising=False)
    try:
        with pytest.raises(PolytempoError) as caught, on_workers(Probe(), 1) as backend:
            job = probing(stream="sleep")
            backend.expect(job)
            os.kill(children()[0].pid, signal.SIGKILL)
            backend.train(job)
    finally:
        for end in held:
            os.close(end)
    assert len(held) == 1
    assert_one_line(caught.value, "worker process 0", "SIGKILL")


def test_workers_stop_when_an_error_leaves_the_context():
    with pytest.raises(ZeroDivisionError), on_workers(Probe(), 2) as backend:
        backend.expect(probing(stream="sleep"))
        pids = [process.pid for process in children()]
        raise ZeroDivisionError
    assert len(pids) == 2
    assert all(ended(pid) for pid in pids)


A_RUN = """
import signal, sys, time
signal.signal(signal.SIGINT, signal.default_int_handler)  # whatever was inherited
sys.path[:0] = sys.argv[1:]
from test_processes import Probe, on_workers, probing

def work(backend):
    jobs = [probing(k) for k in range(8)]
    for job in jobs:
        backend.expect(job)
    pids = {int(backend.train(job)[1]) for job in jobs}
    print(*sorted(pids), flush=True)

with on_workers(Probe(), 2) as backend:
    try:
        work(backend)
        time.sleep(60)
    except KeyboardInterrupt:
        work(backend)
    time.sleep(60)
"""


def next_line(process: subprocess.Popen) -> list[int]:
    """What it says next; an error if it says nothing for long."""
    ready, _, _ = select.select([process.stdout], [], [], 60)
    assert ready, "no answer"
    return [int(pid) for pid in process.stdout.readline().split()]


def test_workers_ignore_ctrl_c_and_end_by_themselves_when_their_parent_is_killed():
    parent = subprocess.Popen(
        [sys.executable, "-c", A_RUN, *map(str, Path(__file__).parents[:2])],
        stdout=subprocess.PIPE,
        start_new_session=True,
    )
    workers: list[int] = []
    try:
        workers += next_line(parent)
        assert len(workers) == 2
        os.killpg(parent.pid, signal.SIGINT)  # as a terminal does: to all of them
        assert next_line(parent) == workers
        assert not any(ended(pid) for pid in workers)
        parent.kill()
        assert parent.wait(60) == -signal.SIGKILL
        assert wait_for(lambda: all(ended(pid) for pid in workers))
    finally:
        parent.kill()
        parent.wait(60)
        parent.stdout.close()
        for pid in workers:
            if not ended(pid):
                os.kill(pid, signal.SIGKILL)


# -- memory -------------------------------------------------------------------------------------


def test_the_federation_is_not_copied():
    """200 MB of it, all of which is read by two workers."""
    samples, features, clients = 100_000, 500, 20
    size = samples // clients
    x = torch.empty(samples, features).fill_(0.5)
    assert x.nbytes == 200e6
    places = [slice(k * size, (k + 1) * size) for k in range(clients)]
    fed = Federation(
        name="large",
        x=x,
        y=torch.zeros(samples, dtype=torch.long),
        train=tuple(slice(place.start, place.start + 100) for place in places),
        test=tuple(places),
        outputs=2,
        groups=None,
        mean=None,
        std=None,
        vocabulary=None,
        description="large",
        partition={},
    )
    solver = AutogradSolver(nn.Linear(features, 2), fed, SEED)
    with on_workers(solver, 2) as backend:
        start = solver.layout.read()
        jobs = [Job(client, start, TASK, ("client", client)) for client in range(clients)]
        for job in jobs:
            backend.expect(job)
        for job in jobs:
            backend.train(job)
        backend.evaluate([Exam(start, list(range(clients)))])
        backend.drain()
        assert 0 < backend.worker_memory < 100e6


class Greedy(Probe):
    """Takes much memory for a moment."""

    def carry_out(self, job: Job) -> Outcome:
        taken = torch.ones(300_000_000 // 4)
        del taken
        return super().carry_out(job)


def test_memory_that_workers_had_for_a_moment_is_counted():
    with on_workers(Greedy(), 1) as backend:
        backend.train(probing())
        backend.drain()
        assert 300e6 <= backend.worker_memory < 400e6
