"""Workers that are Ray actors: on this machine, or on the machines of a Ray cluster.

Every actor makes a solver of its own. The federation goes into Ray's object store once, and the
actors of a machine share the copy there; models and uploads travel as bytes. On machines of one
kind the numbers are, bit for bit, those of training in this process.
"""

from __future__ import annotations

import copy
import logging
import os
import pickle
import re
import signal
import threading
import warnings
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import Any

import torch
from torch import Tensor, nn

from polytempo.core.errors import PolytempoError
from polytempo.core.layout import Parts
from polytempo.data import Federation
from polytempo.training.executors.transport import dumps, reduced
from polytempo.training.footprint import peak_memory
from polytempo.training.jobs import Exam, Job
from polytempo.training.problem import Problem, Score
from polytempo.training.solvers.autograd import AutogradSolver, Solver

os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # Ray is to report nothing to its makers
os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")  # nor to warn of its future
try:
    import ray
    from ray import cloudpickle, exceptions
    from ray.util.placement_group import placement_group, remove_placement_group
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy
except ImportError as error:
    raise PolytempoError('backend ray needs Ray: pip install "polytempo[ray]"') from error

_PATIENCE = 15.0  # seconds: CPUs that were freed a moment ago may still be counted as taken
_START = 300.0  # seconds that workers may need to begin: they import torch, and get the data
_LOST = (
    *(exceptions.RayActorError, exceptions.ObjectLostError, exceptions.NodeDiedError),
    *(exceptions.LocalRayletDiedError, exceptions.OutOfMemoryError),
)
_ours = False  # whether Ray was started, or connected to, by us: then the last pool ends that
_open: set[RayPool] = set()


class RayPool:
    """A pool of Ray actors, each with one CPU and one thread."""

    def __init__(self, solver: Solver, workers: int) -> None:
        assert isinstance(solver, AutogradSolver)  # an actor can make its own
        total = processors()
        _open.add(self)
        self.workers = workers
        self._asked: list[deque[Any]] = [deque() for _ in range(workers)]  # oldest first
        # All CPUs or none; on few machines, since each has to have the data.
        self._places = placement_group([{"CPU": 1}] * workers, strategy="PACK")
        try:
            if workers > total or not self._places.wait(_PATIENCE):
                raise PolytempoError(
                    f"backend ray: {workers} workers need a CPU each, but the cluster has {total}, "
                    f"of which {_cpus(ray.available_resources)} are free; ask for fewer --workers"
                )
            place = PlacementGroupSchedulingStrategy(self._places)
            make = ray.remote(num_cpus=1, scheduling_strategy=place)(_Worker).remote
            self._actors: list[Any] = [make() for _ in range(workers)]
            self._shared = ray.put(_copied(solver)), ray.put(_arrays(solver.federation))
            for worker in range(workers):
                settings = solver.seed, solver.parts, solver.problem
                self._ask(worker, "start", type(solver), *self._shared, *settings)
            answers = [self._answer(worker, _START) for worker in range(workers)]
            for answer in answers:
                if isinstance(answer, Exception):
                    raise answer
            self.nodes: list[str] = answers
        except (ImportError, exceptions.RaySystemError) as error:
            self.close()
            raise PolytempoError(
                f"a Ray worker could not start ({str(error).splitlines()[-1]}); all modules "
                "imported here must be installed on every machine of the cluster"
            ) from error
        except BaseException:
            self.close()
            raise

    def train(self, worker: int, job: Job) -> None:
        self._ask(worker, "train", dumps(job, _ByValue))

    def evaluate(self, worker: int, exam: Exam) -> None:
        self._ask(worker, "evaluate", dumps(exam))

    def receive(self) -> tuple[int, Any]:
        oldest = {asked[0]: worker for worker, asked in enumerate(self._asked) if asked}
        [first], _ = ray.wait(list(oldest))
        answer = self._answer(oldest[first])
        return oldest[first], pickle.loads(answer) if isinstance(answer, bytes) else answer

    def peak_memory(self) -> float:
        for worker in range(self.workers):
            self._ask(worker, "memory")
        return float(sum(self._answer(worker) for worker in range(self.workers)))

    def close(self) -> None:
        global _ours
        if self in _open and ray.is_initialized():
            remove_placement_group(self._places)  # and with it the actors
        _open.discard(self)
        if _ours and not _open:
            _ours = False
            ray.shutdown()

    def _ask(self, worker: int, method: str, *details: Any) -> None:
        self._asked[worker].append(getattr(self._actors[worker], method).remote(*details))

    def _answer(self, worker: int, seconds: float | None = None) -> Any:
        """Wait for the oldest answer of this worker: what it found, or what went wrong there."""
        try:
            return ray.get(self._asked[worker].popleft(), timeout=seconds)
        except exceptions.GetTimeoutError as error:
            raise PolytempoError(
                f"Ray worker {worker} did not start within {seconds:g} seconds; see `ray status` "
                "and Ray's logs, or use --backend processes"
            ) from error
        except exceptions.RayTaskError as error:
            trace = re.sub(r"\x1b\[\d*m", "", str(error))  # Ray paints it
            error.cause.add_note(f"on Ray worker {worker}:\n{trace}")
            return error.cause
        except _LOST as error:
            self.close()
            raise PolytempoError(
                f"Ray worker {worker} died ({type(error).__name__}): out of memory, killed, or its "
                "machine is lost; try fewer --workers; --resume continues from the last checkpoint"
            ) from error


class _ByValue(cloudpickle.Pickler):
    """Classes of the user's script (`__main__`), which an actor cannot import, travel whole."""

    def reducer_override(self, thing: Any) -> Any:
        usual: Any = super()
        return reduced(thing) if type(thing) is Tensor else usual.reducer_override(thing)


class _Worker:
    """What an actor does: it answers requests, one after the other."""

    def start(
        self,
        kind: type[AutogradSolver],
        module: nn.Module,
        data: Mapping[str, Any],
        seed: int,
        parts: Parts,
        problem: Problem,
    ) -> str:
        """Returns which node of the cluster this is."""
        torch.set_num_threads(1)
        with warnings.catch_warnings():  # the store is read-only; nobody writes to the data
            warnings.filterwarnings("ignore", "The given NumPy array is not writable")
            shared = {name: torch.from_numpy(data[name]) for name in ("x", "y")}
        self.solver = kind(module, Federation(**{**data, **shared}), seed, parts, problem=problem)
        return str(ray.get_runtime_context().get_node_id())

    def train(self, job: bytes) -> bytes:
        return dumps(self.solver.carry_out(pickle.loads(job)))

    def evaluate(self, exam: bytes) -> list[Score]:
        return self.solver.evaluate(pickle.loads(exam))

    def memory(self) -> float:
        return peak_memory()


def _copied(solver: AutogradSolver) -> nn.Module:
    """The module, its buffers as they were at first, without the vector of all parameters."""
    layout = solver.layout
    layout.load_whole(layout.vector)
    clones = {id(buffer): buffer.clone() for buffer in layout.module.buffers()}
    return copy.deepcopy(layout.module, clones)  # which clones the parameters


def _arrays(federation: Federation) -> dict[str, Any]:
    arrays = {name: getattr(federation, name).contiguous().numpy() for name in ("x", "y")}
    return {field.name: getattr(federation, field.name) for field in fields(federation)} | arrays


def processors() -> int:
    """CPUs of the cluster: the one in use, or that of RAY_ADDRESS, or a new one on this machine."""
    global _ours
    if not ray.is_initialized():
        terminate = signal.getsignal(signal.SIGTERM)  # Ray takes this signal for itself
        try:
            ray.init(include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR)
        except (ConnectionError, RuntimeError, ValueError) as error:
            raise PolytempoError(
                f"backend ray: {' '.join(str(error).split())}; start Ray there, or check "
                f"RAY_ADDRESS, which is {os.environ.get('RAY_ADDRESS', 'not set')}"
            ) from error
        finally:
            if threading.current_thread() is threading.main_thread():
                signal.signal(signal.SIGTERM, terminate)
        _ours = True
        _open.clear()  # of an earlier connection
    return _cpus(ray.cluster_resources)


def _cpus(resources: Callable[[], Mapping[str, float]]) -> int:
    return int(resources().get("CPU", 0))
