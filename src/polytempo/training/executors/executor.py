"""How local training is executed: behind one interface, so that nobody else needs to know.

The engine announces every training as soon as it is certain (`expect`), takes the announcement back
if a multicast changes it (`forget`), and asks for the result when the update is due (`carry_out`).
In between, the backend is free to train ahead: on worker processes, or several clients at once.
What comes out of a job depends on that job alone, so none of this shows in the results.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

from torch import Tensor

from polytempo.training.jobs import Exam, Job, Outcome
from polytempo.training.problem import Score
from polytempo.training.solvers.autograd import Solver

AHEAD = 2  # requests that a worker has at a time: it works on the second while we fold the first


class Workers(Protocol):
    """Workers that have a solver each. Requests to one worker are answered in their order."""

    workers: int

    def train(self, worker: int, jobs: Sequence[Job]) -> None:
        """Ask for these jobs, which are of one kind."""
        ...

    def evaluate(self, worker: int, exams: Sequence[Exam]) -> None: ...

    def receive(self) -> tuple[int, list[Any] | Exception]:
        """Wait for an answer: the worker, and its outcomes or lists of scores, or what went wrong
        there."""
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
        # what each worker has been asked for and not answered yet: jobs, or numbers of evaluations
        self._asked: list[deque[list[Job] | list[int]]] = []
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
        return self.solver.group * (self.pool.workers * AHEAD if self.pool else 1)

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
        self._announced[id(job)] = job
        if id(job) not in self._begun:
            self._queue(job, -math.inf)
        while id(job) not in self._done:
            if self.pool is None:
                group = self._next_group(self.solver.group)
                try:
                    self._finish(group, self.solver.carry_out(group))
                except BaseException:
                    self._give_up(group)
                    raise
            else:
                self._feed()
                self._receive()
        del self._announced[id(job)], self._begun[id(job)]
        return self._done.pop(id(job))

    def evaluate(self, exams: Iterable[Exam]) -> list[list[Score]]:
        """Each model on the test splits of the clients named with it. On workers, this goes
        before all training that they have not been asked for yet."""
        if self.pool is None:
            return [self.solver.evaluate(exam) for exam in exams]
        numbers: list[list[int]] = []  # of the parts that an exam is split in
        together: list[tuple[int, Exam]] = []
        for exam in exams:
            size = math.ceil(len(exam.clients) / (self.pool.workers * AHEAD))
            numbers.append([])
            for begin in range(0, len(exam.clients), max(1, size)):
                numbers[-1].append(next(self._counter))
                part = slice(begin, begin + size)
                own = None if exam.personal is None else exam.personal[part]
                together.append((numbers[-1][-1], Exam(exam.params, exam.clients[part], own)))
                if len(together) == self.solver.group:
                    self._ask_scores(together)
                    together = []
        if together:
            self._ask_scores(together)
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
            # leave something for the other places that are free
            places = sum(AHEAD - len(asked) for asked in self._asked)
            group = self._next_group(min(self.solver.group, -(-len(self._waiting) // places)))
            if not group:
                return
            self._asked[free].append(group)
            self.pool.train(free, group)

    def _ask_scores(self, exams: Sequence[tuple[int, Exam]]) -> None:
        assert self.pool is not None
        while (free := self._free_worker()) is None:
            self._receive()
        self._asked[free].append([number for number, _ in exams])
        self.pool.evaluate(free, [exam for _, exam in exams])

    def _free_worker(self) -> int | None:
        least = min(range(len(self._asked)), key=lambda worker: len(self._asked[worker]))
        return least if len(self._asked[least]) < AHEAD else None

    def _receive(self) -> None:
        assert self.pool is not None
        worker, answers = self.pool.receive()
        asked = self._asked[worker].popleft()
        if isinstance(answers, Exception):
            self._give_up(asked)
            raise answers
        if isinstance(asked[0], Job):
            self._finish(asked, answers)
        else:
            self._scores.update(zip(asked, answers, strict=True))

    # -- jobs ----------------------------------------------------------------------------------

    def _queue(self, job: Job, due: float) -> None:
        if len(self._waiting) > 2 * len(self._announced):  # most of it is void
            self._waiting = [entry for entry in self._waiting if self._is_waiting(entry[-1])]
            heapq.heapify(self._waiting)
        heapq.heappush(self._waiting, (due, next(self._counter), id(job)))

    def _is_waiting(self, key: int) -> bool:
        return key in self._announced and key not in self._begun

    def _next_group(self, most: int) -> list[Job]:
        """The jobs that are due first, as many as can be done together."""
        group: list[Job] = []
        others: list[tuple[float, int, int]] = []
        while self._waiting and len(group) < most and len(others) < 2 * self.solver.group:
            entry = heapq.heappop(self._waiting)
            if not self._is_waiting(entry[-1]):
                continue
            job = self._announced[entry[-1]]
            if group and self.solver.kind(job) != self.solver.kind(group[0]):
                others.append(entry)
                continue
            group.append(job)
            self._begun[id(job)] = job
        for entry in others:
            heapq.heappush(self._waiting, entry)
        return group

    def _finish(self, group: Sequence[Job], outcomes: Sequence[Outcome]) -> None:
        for job, outcome in zip(group, outcomes, strict=True):
            if id(job) in self._announced:
                self._done[id(job)] = outcome
            else:
                del self._begun[id(job)]  # forgotten meanwhile

    def _give_up(self, group: Sequence[Job] | Sequence[int]) -> None:
        """Nothing came of this group; a job of it that is asked for again starts afresh."""
        for job in group:
            self._begun.pop(id(job), None)
