"""How local training is executed: behind one interface, so that nobody else needs to know.

The engine announces every training as soon as it is certain (`expect`), takes the announcement back
if a multicast changes it (`forget`), and asks for the result when the update is due (`carry_out`).
In between, workers are free to train ahead. What comes out of a job depends on that job alone, so
none of this shows in the results.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any, Protocol

from torch import Tensor

from polytempo.training.jobs import Exam, Job, Outcome
from polytempo.training.problem import Score
from polytempo.training.solvers.autograd import Solver

AHEAD = 2  # requests that a worker has at a time: it works on the second while we fold the first


class Workers(Protocol):
    """Workers that have a solver each. Requests to one worker are answered in their order."""

    workers: int

    def train(self, worker: int, job: Job) -> None: ...

    def evaluate(self, worker: int, exam: Exam) -> None: ...

    def receive(self) -> tuple[int, Any]:
        """Wait for an answer: the worker, and its outcome or list of scores, or the exception that
        was raised there."""
        ...

    def peak_memory(self) -> float:
        """Peak bytes of the workers, not counting what they share with this process."""
        ...

    def close(self) -> None: ...


class Executor:
    """Carries out trainings and evaluations: in this process, or, while it is entered as a context,
    on the pool of workers that `start` makes."""

    def __init__(
        self, solver: Solver, start: Callable[[], Workers] | None = None, name: str = "serial"
    ) -> None:
        self.solver, self.name = solver, name
        self.wasted = 0  # trainings begun ahead and then not needed
        self.worker_memory = 0.0  # peak bytes of the workers, not counting what they share
        self.pool: Workers | None = None
        self._start, self._entered = start, 0
        self._counter = itertools.count()
        # a heap of announced jobs, by identity; some entries are void, and one may have come to
        # mean another job, which is then begun too early: no harm
        self._waiting: list[tuple[float, int, int]] = []
        self._announced: dict[int, Job] = {}  # and not handed out yet, by identity
        self._begun: dict[int, Job] = {}
        self._done: dict[int, Outcome] = {}
        # what each worker has been asked for and not answered yet: a job, or an evaluation's number
        self._asked: list[deque[Job | int]] = []
        self._scores: dict[int, list[Score]] = {}

    def __enter__(self) -> Executor:
        """Start the workers: best before anything large is allocated, since they are forked."""
        self._entered += 1
        if self._start is not None and self.pool is None:
            self.pool = self._start()
            self._asked = [deque() for _ in range(self.pool.workers)]
            self._feed()
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        """Stop the workers; what they have not finished is trained when it is asked for."""
        self._entered -= 1
        if self._entered or self.pool is None:
            return
        pool, self.pool, self._asked = self.pool, None, []
        pool.close()
        self._begun = {key: job for key, job in self._begun.items() if key in self._done}
        left = [key for key in self._announced if key not in self._begun]
        self._waiting = [(0.0, next(self._counter), key) for key in left]

    @property
    def width(self) -> int:
        """How many jobs are worth announcing together."""
        return self.pool.workers * AHEAD if self.pool else 1

    def expect(self, job: Job, due: float = math.inf) -> None:
        """The result of this job will be asked for, at about that time."""
        if id(job) not in self._announced:
            self._announced[id(job)] = job
            self._queue(job, due)
            self._feed()

    def forget(self, job: Job) -> None:
        """It will not, after all."""
        if self._announced.pop(id(job), None) is not None and id(job) in self._begun:
            self.wasted += 1
            if self._done.pop(id(job), None) is not None:
                del self._begun[id(job)]

    def train(self, job: Job) -> Tensor:
        """The upload of this job alone."""
        return self.carry_out(job).upload

    def carry_out(self, job: Job) -> Outcome:
        """What comes of this job, announced or not."""
        key = id(job)
        if self.pool is None and key not in self._done:
            outcome = self.solver.carry_out(job)
            self._announced.pop(key, None)
            return outcome
        self._announced[key] = job
        if key not in self._begun:
            self._queue(job, -math.inf)
        while key not in self._done:
            self._feed()
            self._receive()
        del self._announced[key], self._begun[key]
        return self._done.pop(key)

    def evaluate(self, exams: Iterable[Exam]) -> list[list[Score]]:
        """Each model on the test splits of the clients named with it. On workers, this goes
        before all training that they have not been asked for yet."""
        if self.pool is None:
            return [self.solver.evaluate(exam) for exam in exams]
        numbers: list[list[int]] = []  # of the parts that an exam is split in
        for exam in exams:
            size = math.ceil(len(exam.clients) / (self.pool.workers * AHEAD))
            numbers.append([])
            for begin in range(0, len(exam.clients), max(1, size)):
                part = slice(begin, begin + size)
                some = exam._replace(
                    clients=exam.clients[part],
                    memories=None if exam.memories is None else exam.memories[part],
                )
                numbers[-1].append(self._ask_scores(some))
        self._feed()
        while not all(number in self._scores for parts in numbers for number in parts):
            self._receive()
            self._feed()
        return [[s for number in parts for s in self._scores.pop(number)] for parts in numbers]

    def drain(self) -> None:
        """Wait until no worker is busy; nothing new is begun meanwhile."""
        while any(self._asked):
            self._receive()
        if self.pool is not None:
            self.worker_memory = max(self.worker_memory, self.pool.peak_memory())

    # -- workers -------------------------------------------------------------------------------

    def _feed(self) -> None:
        """Give the workers what is needed first, up to `AHEAD` requests each."""
        while self.pool is not None and (free := self._free_worker()) is not None:
            job = self._next_job()
            if job is None:
                return
            self._asked[free].append(job)
            self.pool.train(free, job)

    def _ask_scores(self, exam: Exam) -> int:
        """Ask some worker; the number by which the scores are found."""
        assert self.pool is not None
        while (free := self._free_worker()) is None:
            self._receive()
        number = next(self._counter)
        self._asked[free].append(number)
        self.pool.evaluate(free, exam)
        return number

    def _free_worker(self) -> int | None:
        least = min(range(len(self._asked)), key=lambda worker: len(self._asked[worker]))
        return least if len(self._asked[least]) < AHEAD else None

    def _receive(self) -> None:
        assert self.pool is not None
        worker, answer = self.pool.receive()
        asked = self._asked[worker].popleft()
        if isinstance(answer, Exception):
            self._begun.pop(id(asked), None)  # a job that is asked for again starts afresh
            raise answer
        if not isinstance(asked, Job):
            self._scores[asked] = answer
        elif id(asked) in self._announced:
            self._done[id(asked)] = answer
        else:
            del self._begun[id(asked)]  # forgotten meanwhile

    # -- jobs ----------------------------------------------------------------------------------

    def _queue(self, job: Job, due: float) -> None:
        if len(self._waiting) > 2 * len(self._announced):  # most of it is void
            self._waiting = [entry for entry in self._waiting if self._is_waiting(entry[-1])]
            heapq.heapify(self._waiting)
        heapq.heappush(self._waiting, (due, next(self._counter), id(job)))

    def _is_waiting(self, key: int) -> bool:
        return key in self._announced and key not in self._begun

    def _next_job(self) -> Job | None:
        """The job that is due first; from now on it is begun."""
        while self._waiting:
            *_, key = heapq.heappop(self._waiting)
            if self._is_waiting(key):
                self._begun[key] = self._announced[key]
                return self._begun[key]
        return None
