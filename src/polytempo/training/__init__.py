"""Local training on a client's shard."""

from polytempo.training.executors.executor import Backend
from polytempo.training.factory import BackendName, SolverName, find_device, make_backend
from polytempo.training.jobs import PERSONAL, Exam, Job, Outcome
from polytempo.training.learner import Learner
from polytempo.training.memory import ClientMemory
from polytempo.training.problem import PROBLEMS, Metric, Problem, Score, merged, problem_for
from polytempo.training.session import Session
from polytempo.training.solvers.autograd import AutogradSolver, Solver

__all__ = [
    "PERSONAL",
    "PROBLEMS",
    "AutogradSolver",
    "Backend",
    "BackendName",
    "ClientMemory",
    "Exam",
    "Job",
    "Learner",
    "Metric",
    "Outcome",
    "Problem",
    "Score",
    "Session",
    "Solver",
    "SolverName",
    "find_device",
    "make_backend",
    "merged",
    "problem_for",
]
