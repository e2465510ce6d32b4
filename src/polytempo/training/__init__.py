"""Local training on a client's shard."""

from polytempo.training.executors.executor import Backend
from polytempo.training.factory import BackendName, make_backend
from polytempo.training.learner import Learner, Schedule
from polytempo.training.problem import PROBLEMS, Metric, Problem, problem_for
from polytempo.training.solvers.autograd import AutogradSolver, Job, Outcome, Score, Solver

__all__ = [
    "PROBLEMS",
    "AutogradSolver",
    "Backend",
    "BackendName",
    "Job",
    "Learner",
    "Metric",
    "Outcome",
    "Problem",
    "Schedule",
    "Score",
    "Solver",
    "make_backend",
    "problem_for",
]
