"""Workers that are processes of this machine.

They are forked, so they have the federation, the module and the solver without any copy: nothing is
sent to them but what a job holds. Its model travels through a row of shared memory, in which the
result replaces it; other vectors, which few jobs and few results have, go through the pipe. A
worker has a thread that takes requests out of the pipe at any time, so both ends can send as much
as they like at once.

A forked process inherits its parent's Python signal handlers, which may do anything: if one raises,
the child would continue with the parent's program. So signals are blocked around the fork, until
the child has reset all handlers to the system's defaults. It also inherits the parent's garbage,
which only the parent may collect: a finalizer can wait for a thread, and threads are not forked. So
nothing is collected around the fork, until the child has put aside all that it inherited.
"""

from __future__ import annotations

import gc
import mmap
import multiprocessing as mp
import os
import pickle
import signal
import threading
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from multiprocessing.connection import Connection, wait
from queue import SimpleQueue
from typing import Any, NoReturn

import torch
from torch import Tensor

from polytempo.core.errors import PolytempoError
from polytempo.training.executors.executor import AHEAD
from polytempo.training.executors.transport import dumps
from polytempo.training.footprint import peak_memory, private_memory
from polytempo.training.jobs import Exam, Job, Outcome
from polytempo.training.solvers.autograd import Solver

_NOTHING = torch.empty(0)
_LOOK = 1.0  # seconds after which one who waits for workers looks whether they are alive
_FORKING = threading.Lock()
_GRACE = 5.0  # seconds that a worker has to end, before it is killed


class Processes:
    """A pool of forked workers, each with one thread."""

    def __init__(self, solver: Solver, workers: int) -> None:
        if "fork" not in mp.get_all_start_methods():
            raise PolytempoError(
                "worker processes need a system that can fork; use --backend serial or ray"
            )
        self.workers = workers
        self._size = solver.layout.size
        dtype = solver.layout.vector.dtype
        stride = -(-self._size // 16) * 16  # rows aligned alike: same sums, bit for bit
        shared = mmap.mmap(-1, max(1, workers * AHEAD * stride * dtype.itemsize))
        rows = torch.frombuffer(shared, dtype=dtype).view(workers, AHEAD, stride)
        self._rows = rows[..., : self._size]
        self._sent = [0] * workers
        self._pipes: list[Connection] = []
        self._processes = []
        context = mp.get_context("fork")
        for worker in range(workers):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=_serve,
                args=(solver, theirs, self._rows[worker], [*self._pipes, ours]),
                name=f"polytempo worker {worker}",
                daemon=True,
            )
            with _nothing_in_between():
                process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)

    def train(self, worker: int, job: Job) -> None:
        place = self._place(worker, job.params)
        self._send(worker, ("train", place, dumps(replace(job, params=_NOTHING))))

    def evaluate(self, worker: int, exam: Exam) -> None:
        place = self._place(worker, exam.params)
        self._send(worker, ("evaluate", place, dumps(exam._replace(params=_NOTHING))))

    def receive(self) -> tuple[int, Any]:
        while not (ready := wait(self._pipes, _LOOK)):
            self._look()
        assert isinstance(ready[0], Connection)
        worker = self._pipes.index(ready[0])
        place, answer = self._answer(worker)
        if not isinstance(answer, bytes):
            return worker, answer
        packed, extras, memory = pickle.loads(answer)
        upload = self._rows[worker, place].clone() if packed is None else packed
        return worker, Outcome(upload, extras, memory)

    def peak_memory(self) -> float:
        for worker in range(self.workers):
            self._send(worker, ("memory", 0, None))
        return float(sum(self._answer(worker)[1] for worker in range(self.workers)))

    def close(self) -> None:
        for process in self._processes:
            process.terminate()  # perhaps in the middle of something that nobody waits for
        for pipe in self._pipes:
            pipe.close()
        for process in self._processes:
            process.join(_GRACE)
            if process.is_alive():  # stopped by somebody, say
                process.kill()
                process.join(_GRACE)

    def _place(self, worker: int, params: Tensor) -> int:
        """Where the model of the next request is now: requests are answered in order, and there are
        never more than `AHEAD`."""
        self._sent[worker] += 1
        place = self._sent[worker] % AHEAD
        self._rows[worker, place].copy_(params)
        return place

    def _send(self, worker: int, request: Any) -> None:
        try:
            self._pipes[worker].send(request)
        except OSError:
            self._died(worker)

    def _answer(self, worker: int) -> tuple[int, Any]:
        pipe = self._pipes[worker]
        try:
            while not pipe.poll(_LOOK):
                self._look()
            place, answer = pipe.recv()
        except (EOFError, OSError):  # the latter within a message
            self._died(worker)
        return place, answer

    def _look(self) -> None:
        """A worker that is dead is noticed even if somebody else holds its end of the pipe."""
        for worker, (pipe, process) in enumerate(zip(self._pipes, self._processes, strict=True)):
            if not process.is_alive() and not pipe.poll():
                self._died(worker)

    def _died(self, worker: int) -> NoReturn:
        process = self._processes[worker]
        process.join(_GRACE)
        code = process.exitcode
        how = f"exit code {code}"
        if code is not None and code < 0:
            how = f"signal {signal.Signals(-code).name}"
        self.close()
        raise PolytempoError(
            f"worker process {worker} died ({how}): out of memory, or killed; "
            "try fewer --workers, or --backend serial"
        )


def _serve(solver: Solver, pipe: Connection, rows: Tensor, foreign: list[Connection]) -> None:
    """What a worker does: answer requests until the other end of the pipe is closed (`_take`)."""
    for number in signal.valid_signals():
        if callable(signal.getsignal(number)):  # the parent's
            signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # whatever a library has installed
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's business
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    gc.freeze()  # what was inherited is never collected here
    gc.enable()
    for end in foreign:  # inherited ends would keep pipes open that others have closed
        end.close()
    torch.set_num_threads(1)
    before = peak_memory(reset=True)
    requests: SimpleQueue[tuple[str, int, Any]] = SimpleQueue()
    threading.Thread(target=_take, args=(pipe, requests), daemon=True).start()
    while True:
        kind, place, details = requests.get()
        answer: Any = None
        try:
            if kind == "train":
                job = replace(pickle.loads(details), params=rows[place])
                upload, extras, memory = solver.carry_out(job)
                # as bytes: torch would send each tensor in a file of shared memory; and first of
                # all, for some may be views of the received model, which is now replaced
                row = rows[place]
                alike = upload.shape == row.shape and upload.dtype == row.dtype  # if not compressed
                answer = dumps((None if alike else upload, extras, memory))
                if alike:
                    row.copy_(upload)
            elif kind == "evaluate":
                answer = solver.evaluate(pickle.loads(details)._replace(params=rows[place]))
            else:
                answer = max(0.0, peak_memory() - before, private_memory())
        except Exception as caught:  # goes to the parent, which raises it
            answer = _portable(caught)
        try:
            pipe.send((place, answer))
        except BrokenPipeError:
            return  # nobody is waiting for it


def _take(pipe: Connection, requests: SimpleQueue[tuple[str, int, Any]]) -> None:
    """Take requests in as they come, so that the parent is never held up, though we may be sending
    it an answer; if it has gone, or closed the pipe, nobody is waiting for an answer."""
    while True:
        try:
            requests.put(pipe.recv())
        except (EOFError, OSError):
            os._exit(0)


@contextmanager
def _nothing_in_between() -> Iterator[None]:
    """A process forked within this context gets no signal, and collects no garbage, before it says
    so."""
    with _FORKING:  # one thread at a time knows whether there was a collector
        collects = gc.isenabled()
        before = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        gc.disable()
        try:
            yield
        finally:
            if collects:
                gc.enable()
            signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _portable(error: Exception) -> Exception:
    """The error with its traceback as a note, in a form that can be sent."""
    error.add_note("in a worker process:\n" + "".join(traceback.format_exception(error)))
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return RuntimeError(f"{type(error).__name__} {error}\n" + "\n".join(error.__notes__))
    return error


def cores() -> int:
    """Processors that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
