"""Local training on a client's shard."""

from polytempo.training.executors.executor import Executor
from polytempo.training.factory import (
    BackendName,
    SolverName,
    find_device,
    make_executor,
    make_solver,
)
from polytempo.training.jobs import PERSONAL, Exam, Job, Outcome
from polytempo.training.learner import Learner
from polytempo.training.memory import ClientMemory
from polytempo.training.problem import PROBLEMS, Metric, Problem, Score, merged, problem_for
from polytempo.training.session import Session
from polytempo.training.solvers.autograd import AutogradSolver, Solver
from polytempo.training.trial import try_model

__all__ = [
    "PERSONAL",
    "PROBLEMS",
    "AutogradSolver",
    "BackendName",
    "ClientMemory",
    "Exam",
    "Executor",
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
    "make_executor",
    "make_solver",
    "merged",
    "problem_for",
    "try_model",
]
