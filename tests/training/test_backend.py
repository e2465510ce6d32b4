"""Every job gets its own result, whatever is begun, forgotten, interrupted or asked for when.

No model is trained here: jobs, workers and solver are stand-ins that know what they were asked for.
"""

from __future__ import annotations

import gc
import itertools
import math
import random
import weakref
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from polytempo.training import Exam, Executor, Job, Outcome
from polytempo.training.executors.executor import AHEAD

numbers = itertools.count()


def new_job() -> Job:
    return Job(client=0, params=None, task=None, stream=(next(numbers),))


def upload_of(job: Job) -> tuple:
    return ("upload", job.stream)


def score_of(model: object, client: int, personal: object = None) -> tuple:
    return ("score", model, client, personal)


class Solver:
    def __init__(self) -> None:
        self.trained: list[tuple] = []  # the streams of all jobs
        self.fails: BaseException | None = None

    def carry_out(self, job: Job) -> Outcome:
        self.trained.append(job.stream)
        if self.fails is not None:
            error, self.fails = self.fails, None
            raise error
        return Outcome(upload_of(job), {}, {})

    def evaluate(self, exam: Exam) -> list[Any]:
        own = exam.memories or [None] * len(exam.clients)
        return [score_of(exam.params, *pair) for pair in zip(exam.clients, own, strict=True)]


class Pool:
    """Workers that answer in any order that `choose` likes, each in the order of its requests."""

    def __init__(
        self, solver: Solver, workers: int, choose: Callable[[list[int]], int] = min
    ) -> None:
        self.solver, self.workers, self.choose = solver, workers, choose
        self.asked: list[list[Job | Exam]] = [[] for _ in range(workers)]
        self.log: list[tuple[int, Job | Exam]] = []
        self.fails: Exception | None = None
        self.memory, self.closed = 7.0, False
        self.answered: Callable[[Job], None] = lambda job: None

    def train(self, worker: int, job: Job) -> None:
        assert isinstance(job, Job)
        self._ask(worker, job, replace(job, params=None))  # the model itself is not kept here

    def evaluate(self, worker: int, exam: Exam) -> None:
        assert isinstance(exam, Exam)
        self._ask(worker, exam, exam)

    def _ask(self, worker: int, what: Job | Exam, noted: Job | Exam) -> None:
        assert not self.closed
        assert len(self.asked[worker]) < AHEAD
        self.asked[worker].append(what)
        self.log.append((worker, noted))

    def receive(self) -> tuple[int, Any]:
        assert not self.closed
        busy = [worker for worker in range(self.workers) if self.asked[worker]]
        assert busy, "nobody would ever answer"
        worker = self.choose(busy)
        what = self.asked[worker].pop(0)
        if self.fails is not None:  # the answer of this worker is an error
            error, self.fails = self.fails, None
            return worker, error
        if isinstance(what, Job):
            self.answered(what)
            return worker, Outcome(upload_of(what), {}, {})
        return worker, self.solver.evaluate(what)

    def peak_memory(self) -> float:
        assert not any(self.asked)
        return self.memory

    def close(self) -> None:
        self.closed = True

    def under_way(self) -> list[Job]:
        return [what for what in itertools.chain(*self.asked) if isinstance(what, Job)]

    def trained(self) -> list[tuple]:
        """The streams of all jobs, in the order in which they were asked for."""
        return [what.stream for _, what in self.log if isinstance(what, Job)]


class Workshop:
    """A backend, and the pools that it has started."""

    def __init__(self, workers: int = 0, choose=min) -> None:
        self.solver = Solver()
        self.pools: list[Pool] = []
        self.workers, self.choose = workers, choose
        self.backend = Executor(self.solver, self._start if workers else None)

    def _start(self) -> Pool:
        self.pools.append(Pool(self.solver, self.workers, self.choose))
        return self.pools[-1]

    @property
    def pool(self) -> Pool:
        return self.pools[-1]


# -- any schedule against a trivial model -------------------------------------------------------


class Schedules(RuleBasedStateMachine):
    """The trivial model: a job's upload follows from the job. What may be trained how often, and
    what counts as wasted, follows from what solver and workers were asked for."""

    known = Bundle("known")

    @initialize(workers=st.integers(0, 3), seed=st.integers(0, 2**16))
    def build(self, workers, seed):
        chooser = random.Random(seed)
        self.shop = Workshop(workers, chooser.choice)
        self.backend = self.shop.backend
        self.announced: dict[tuple, Job] = {}  # by stream
        self.reasons: Counter[tuple] = Counter()  # to train a job once more
        self.settled: Counter[tuple] = Counter()  # trainings whose result is not there any more
        self.depth = 0

    def times(self) -> Counter[tuple]:
        """How often each job was begun."""
        there = itertools.chain(*(pool.trained() for pool in self.shop.pools))
        return Counter([*self.shop.solver.trained, *there])

    def under_way(self) -> list[tuple]:
        return [job.stream for job in self.shop.pool.under_way()] if self.depth_of_pool() else []

    def depth_of_pool(self) -> int:
        return self.depth if self.shop.workers else 0

    def answered(self, job: Job) -> None:
        if job.stream not in self.announced:
            self.settled[job.stream] += 1

    @rule(target=known, due=st.floats(0, 10) | st.just(math.inf))
    def announce(self, due):
        job = new_job()
        self.announced[job.stream] = job
        self.backend.expect(job, due)
        if self.depth_of_pool() and not all(self.shop.pool.asked):
            assert self.times()[job.stream]  # nobody is idle while a job waits
        return job

    @rule(job=known, due=st.floats(0, 10))
    def announce_again(self, job, due):
        """For the second time (nothing happens), or after it was forgotten or handed out."""
        if job.stream not in self.announced:
            self.reasons[job.stream] += 1
        self.announced[job.stream] = job
        self.backend.expect(job, due)

    @rule(job=known)
    def forget(self, job):
        stream = job.stream
        begun = stream in self.announced and self.times()[stream] > self.settled[stream]
        before = self.backend.wasted
        self.announced.pop(stream, None)
        self.backend.forget(job)
        assert self.backend.wasted == before + begun
        if stream not in self.under_way():
            self.settled[stream] = self.times()[stream]

    @rule(job=known)
    def train(self, job):
        if job.stream not in self.announced:
            self.reasons[job.stream] += 1
        self.announced[job.stream] = job
        assert self.backend.train(job) == upload_of(job)
        del self.announced[job.stream]
        self.settled[job.stream] = self.times()[job.stream]

    @rule()
    def train_unannounced(self):
        job = new_job()
        assert self.backend.train(job) == upload_of(job)
        assert self.times()[job.stream] == 1

    @rule(sizes=st.lists(st.integers(0, 9), max_size=6))
    def evaluate(self, sizes):
        exams = [Exam(f"model {k}", list(range(k, k + size))) for k, size in enumerate(sizes)]
        found = self.backend.evaluate(iter(exams))
        assert found == [self.shop.solver.evaluate(exam) for exam in exams]

    @rule()
    def enter(self):
        started = len(self.shop.pools)
        self.backend.__enter__()
        self.depth += 1
        new = len(self.shop.pools) - started
        assert new == (self.shop.workers > 0 and self.depth == 1)
        if new:
            self.shop.pool.answered = self.answered

    @precondition(lambda self: self.depth)
    @rule()
    def leave(self):
        lost = self.under_way() if self.depth == 1 else []
        self.backend.__exit__(None, None, None)
        self.depth -= 1
        assert all(pool.closed for pool in self.shop.pools) == (not self.depth_of_pool())
        self.reasons.update(lost)
        self.settled.update(lost)

    @rule()
    def drain(self):
        before = self.times()
        self.backend.drain()
        assert not self.under_way()
        assert self.times() == before

    @invariant()
    def nothing_is_trained_twice_without_reason(self):
        for stream, times in self.times().items():
            assert times <= 1 + self.reasons[stream]

    def teardown(self):
        for job in getattr(self, "announced", {}).values():
            assert self.backend.train(job) == upload_of(job)


TestSchedules = Schedules.TestCase
TestSchedules.settings = settings(max_examples=100, stateful_step_count=40)


# -- what is begun when -------------------------------------------------------------------------


def test_jobs_that_are_due_first_are_begun_first():
    shop = Workshop(workers=1)
    with shop.backend as backend:
        jobs = [new_job() for _ in range(12)]
        dues = [9, 3, 7, 1, 8, 2, 6, 2, 11, 5, 10, 4]
        for job, due in zip(jobs, dues, strict=True):
            backend.expect(job, due)
        first = [job.stream for job in jobs[:AHEAD]]  # nobody knew better then
        assert shop.pool.trained() == first
        backend.train(jobs[8])
        left = sorted(range(AHEAD, 12), key=lambda k: (dues[k], k))
        wanted = [jobs[8].stream, *(jobs[k].stream for k in left if k != 8)]
        begun = shop.pool.trained()[AHEAD:]
        assert begun == wanted[: len(begun)]
        for job in jobs[:8] + jobs[9:]:
            assert backend.train(job) == upload_of(job)


def test_what_is_asked_for_comes_before_what_is_announced():
    shop = Workshop(workers=1)
    with shop.backend as backend:
        jobs = [new_job() for _ in range(8)]
        for job in jobs:
            backend.expect(job, due=1.0)
        backend.train(jobs[-1])
        assert shop.pool.trained()[AHEAD] == jobs[-1].stream
        other = new_job()
        backend.train(other)  # never announced
        assert other.stream in shop.pool.trained()[: 2 * AHEAD + 2]


def test_announcing_a_job_again_does_nothing():
    shop = Workshop(workers=1)
    with shop.backend as backend:
        jobs = [new_job() for _ in range(AHEAD + 3)]
        for due, job in enumerate(jobs):
            backend.expect(job, due)
        backend.expect(jobs[-1], due=-1)
        assert backend.train(jobs[0]) == upload_of(jobs[0])
        backend.drain()
        for job in jobs[1:]:
            assert backend.train(job) == upload_of(job)
        assert shop.pool.trained() == [job.stream for job in jobs]


def test_in_this_process_nothing_is_begun_before_it_is_asked_for():
    shop = Workshop()
    jobs = [new_job() for _ in range(5)]
    for job in jobs:
        shop.backend.expect(job, 1.0)
    assert not shop.solver.trained
    shop.backend.train(jobs[3])
    assert shop.solver.trained == [jobs[3].stream]


def test_all_workers_get_something():
    """Nobody gets a second job before all have a first one."""
    shop = Workshop(workers=3)
    for _ in range(5):
        shop.backend.expect(new_job())
    with shop.backend:
        assert [len(asked) for asked in shop.pool.asked] == [2, 2, 1]


def test_jobs_announced_before_the_workers_are_there_are_begun_when_they_are():
    shop = Workshop(workers=2)
    jobs = [new_job() for _ in range(3)]
    for job in jobs:
        shop.backend.expect(job)
    with shop.backend as backend:
        assert sorted(shop.pool.trained()) == [job.stream for job in jobs]
        assert [backend.train(job) for job in jobs] == [upload_of(job) for job in jobs]
    assert not shop.solver.trained


@pytest.mark.parametrize(("workers", "width"), [(0, 1), (1, AHEAD), (3, 3 * AHEAD)])
def test_so_many_jobs_are_worth_announcing(workers, width):
    shop = Workshop(workers)
    assert shop.backend.width == 1
    with shop.backend as backend:
        assert backend.width == width


# -- forgetting ---------------------------------------------------------------------------------


def test_a_job_forgotten_before_it_is_begun_is_never_trained():
    shop = Workshop(workers=1)
    with shop.backend as backend:
        jobs = [new_job() for _ in range(6)]
        for job in jobs:
            backend.expect(job)
        backend.forget(jobs[4])
        for job in (jobs[k] for k in (0, 1, 2, 3, 5)):
            backend.train(job)
        backend.drain()
        assert jobs[4].stream not in shop.pool.trained()
        assert backend.wasted == 0


def test_a_job_forgotten_in_training_or_afterwards_is_wasted():
    shop = Workshop(workers=1)
    with shop.backend as backend:
        jobs = [new_job() for _ in range(3)]
        for job in jobs:
            backend.expect(job)
        backend.forget(jobs[0])
        assert backend.wasted == 1
        backend.train(jobs[2])  # by now the second one is done
        backend.forget(jobs[1])
        assert backend.wasted == 2
        backend.forget(jobs[1])
        backend.forget(jobs[2])
        backend.forget(new_job())
        assert backend.wasted == 2
        assert backend.train(jobs[0]) == upload_of(jobs[0])  # wanted after all: trained anew
        assert shop.pool.trained().count(jobs[0].stream) == 2


def test_a_job_announced_again_while_it_is_still_in_training_is_not_trained_twice():
    shop = Workshop(workers=1)
    with shop.backend as backend:
        job = new_job()
        backend.expect(job)
        backend.forget(job)
        backend.expect(job)
        assert backend.train(job) == upload_of(job)
        assert shop.pool.trained() == [job.stream]


# -- evaluation ---------------------------------------------------------------------------------


@pytest.mark.parametrize("workers", [1, 2, 3])
@pytest.mark.parametrize("clients", [1, 2, 7, 12, 50])
def test_the_clients_of_one_model_are_split_over_the_workers(workers, clients):
    shop = Workshop(workers, choose=max)
    with shop.backend as backend:
        [found] = backend.evaluate([Exam("m", list(range(clients)))])
        assert found == [score_of("m", client) for client in range(clients)]
        assert len({worker for worker, _ in shop.pool.log}) == min(workers, clients)
        parts = [exam.clients for _, exam in shop.pool.log]
        assert max(map(len, parts)) == math.ceil(clients / (workers * AHEAD))


def test_scores_come_in_the_order_of_the_models_however_they_are_answered():
    chooser = random.Random(1)
    shop = Workshop(workers=3, choose=chooser.choice)
    exams = [Exam(f"m{k}", list(range(k, 2 * k))) for k in range(9)]
    with shop.backend as backend:
        found = backend.evaluate(exams)
    assert found == [shop.solver.evaluate(exam) for exam in exams]


@pytest.mark.parametrize("workers", [0, 1, 3])
def test_every_client_is_tested_with_its_own_part(workers):
    """Also where the clients of one model are split over the workers."""
    shop = Workshop(workers, choose=max)
    own = [f"part {client}" for client in range(11)]
    with shop.backend as backend:
        [found] = backend.evaluate([Exam("m", list(range(11)), own)])
    assert found == [score_of("m", client, own[client]) for client in range(11)]


def test_evaluation_goes_before_the_training_that_was_not_asked_for():
    shop = Workshop(workers=1)
    with shop.backend as backend:
        jobs = [new_job() for _ in range(6)]
        for job in jobs:
            backend.expect(job)
        backend.evaluate([Exam("m", list(range(4)))])
        kinds = [type(what) for _, what in shop.pool.log]
        assert kinds[: AHEAD + 2] == [Job] * AHEAD + [Exam] * 2
        assert [backend.train(job) for job in jobs] == [upload_of(job) for job in jobs]


def test_models_are_made_only_when_a_worker_takes_them():
    """A model per client need not be in memory for all clients at once."""
    shop = Workshop(workers=2)

    def models():
        for k in range(60):
            assert len(shop.pool.log) == k  # all models before this one are with the workers
            assert sum(len(asked) for asked in shop.pool.asked) <= 2 * AHEAD
            yield Exam(f"m{k}", [k])

    with shop.backend as backend:
        assert backend.evaluate(models()) == [[score_of(f"m{k}", k)] for k in range(60)]


# -- workers come and go ------------------------------------------------------------------------


def test_what_workers_did_not_finish_is_trained_in_this_process():
    shop = Workshop(workers=2)
    with shop.backend as backend:
        jobs = [new_job() for _ in range(20)]
        for due, job in enumerate(jobs):
            backend.expect(job, due)
        backend.train(jobs[0])
        lost = {job.stream for job in shop.pool.under_way()}
        assert lost
    assert shop.pool.closed
    assert [backend.train(job) for job in jobs[1:]] == [upload_of(job) for job in jobs[1:]]
    here = set(shop.solver.trained)
    there = set(shop.pool.trained())
    assert here & there == lost
    assert here | there == {job.stream for job in jobs}


def test_results_that_are_there_survive_the_workers():
    shop = Workshop(workers=1)
    with shop.backend as backend:
        jobs = [new_job() for _ in range(2)]
        for job in jobs:
            backend.expect(job)
        backend.drain()
    assert [backend.train(job) for job in jobs] == [upload_of(job) for job in jobs]
    assert not shop.solver.trained


def test_new_workers_go_on_with_what_the_old_ones_left():
    shop = Workshop(workers=2)
    jobs = [new_job() for _ in range(4)]
    for job in jobs:
        shop.backend.expect(job)
    for _ in range(3):
        with shop.backend as backend:
            assert sorted(shop.pool.trained()) == [job.stream for job in jobs]
        assert shop.pool.closed
    with backend:
        assert [backend.train(job) for job in jobs] == [upload_of(job) for job in jobs]
    assert len(shop.pools) == 4
    assert not shop.solver.trained


def test_only_the_outermost_context_stops_the_workers():
    shop = Workshop(workers=1)
    with shop.backend:
        with shop.backend as backend:
            backend.train(new_job())
        assert not shop.pool.closed
        backend.train(new_job())
    assert shop.pool.closed
    assert len(shop.pools) == 1


def test_workers_stop_when_an_error_leaves_the_context():
    shop = Workshop(workers=1)
    with pytest.raises(ZeroDivisionError), shop.backend as backend:
        backend.expect(new_job())
        raise ZeroDivisionError
    assert shop.pool.closed


def test_memory_is_the_most_that_workers_have_said():
    shop = Workshop(workers=1)
    with shop.backend as backend:
        for memory in (7.0, 3.0):
            shop.pool.memory = memory
            backend.drain()
        assert backend.worker_memory == 7.0


def test_draining_without_workers_does_nothing():
    shop = Workshop(workers=2)
    shop.backend.drain()
    with shop.backend as backend:
        backend.expect(new_job())
    backend.drain()  # the job was under way when the workers were stopped


# -- errors -------------------------------------------------------------------------------------


@pytest.mark.parametrize("error", [ValueError("bad"), KeyboardInterrupt()], ids=["error", "Ctrl-C"])
def test_after_an_error_in_this_process_the_same_job_can_be_asked_for_again(error):
    shop = Workshop()
    jobs = [new_job() for _ in range(3)]
    for job in jobs:
        shop.backend.expect(job)
    shop.solver.fails = error
    with pytest.raises(type(error)):
        shop.backend.train(jobs[0])
    assert [shop.backend.train(job) for job in jobs] == [upload_of(job) for job in jobs]


@pytest.mark.parametrize("workers", [1, 2])
def test_after_an_error_on_a_worker_no_result_is_taken_for_another(workers):
    """Within the context; whoever leaves it has new workers next time."""
    shop = Workshop(workers)
    with shop.backend as backend:
        jobs = [new_job() for _ in range(8)]
        for job in jobs:
            backend.expect(job)
        shop.pool.fails = ValueError("bad")
        with pytest.raises(ValueError, match="bad"):
            backend.train(jobs[3])
        assert [backend.train(job) for job in jobs] == [upload_of(job) for job in jobs]
        assert backend.evaluate([Exam("m", [1, 2])]) == [[score_of("m", 1), score_of("m", 2)]]


# -- nothing is kept ----------------------------------------------------------------------------


class Model:
    """Stands for the parameters of a job."""


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("fate", ["trained", "forgotten", "forgotten at once"])
def test_no_model_of_a_finished_job_is_kept(workers, fate):
    """Only few, at any time, of a run that never ends."""
    shop = Workshop(workers)
    models: list[weakref.ref] = []
    with shop.backend as backend:
        flights: list[Job] = []
        for k in range(200):
            model = Model()
            models.append(weakref.ref(model))
            job = Job(0, model, None, (next(numbers),))
            del model
            backend.expect(job, due=float(k))
            if fate == "forgotten at once" and k % 2:
                backend.forget(job)
            else:
                flights.append(job)
            del job
            if len(flights) == 5:
                oldest = flights.pop(0)
                if fate == "forgotten" and k % 2:
                    backend.forget(oldest)
                else:
                    assert backend.train(oldest) == upload_of(oldest)
                del oldest
        under_way = len(shop.pool.under_way()) if workers else 0
        alive = sum(model() is not None for model in models)
        assert alive <= len(flights) + under_way + 8
        while flights:
            backend.train(flights.pop())
        backend.drain()
        backend.train(new_job())
        gc.collect()
        assert not any(model() is not None for model in models)
