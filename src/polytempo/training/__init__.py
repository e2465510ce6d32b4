"""Local training on a client's shard."""

from polytempo.training.executors.executor import Backend
from polytempo.training.factory import BackendName, make_backend
from polytempo.training.learner import Learner, Schedule
from polytempo.training.solvers.autograd import AutogradSolver, Job, Outcome, Score, Solver

__all__ = [
    "AutogradSolver",
    "Backend",
    "BackendName",
    "Job",
    "Learner",
    "Outcome",
    "Schedule",
    "Score",
    "Solver",
    "make_backend",
]
