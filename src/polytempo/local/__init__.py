"""Local training on a client's shard."""

from polytempo.local.backend import Backend
from polytempo.local.choice import BackendName, make_backend
from polytempo.local.learner import Learner, Schedule
from polytempo.local.training import Job, Outcome, Score, Solver, Trainer

__all__ = [
    "Backend",
    "BackendName",
    "Job",
    "Learner",
    "Outcome",
    "Schedule",
    "Score",
    "Solver",
    "Trainer",
    "make_backend",
]
