"""Local training on a client's shard."""

from polytempo.training.executors.executor import Backend
from polytempo.training.factory import BackendName, SolverName, find_device, make_backend
from polytempo.training.jobs import PERSONAL, Exam, Job, Outcome, Score
from polytempo.training.learner import Learner, Schedule
from polytempo.training.memory import ClientMemory
from polytempo.training.session import Session
from polytempo.training.solvers.autograd import AutogradSolver, Solver

__all__ = [
    "PERSONAL",
    "AutogradSolver",
    "Backend",
    "BackendName",
    "ClientMemory",
    "Exam",
    "Job",
    "Learner",
    "Outcome",
    "Schedule",
    "Score",
    "Session",
    "Solver",
    "SolverName",
    "find_device",
    "make_backend",
]
