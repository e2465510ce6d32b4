"""Local training on a client's shard."""

from polytempo.local.backend import Backend, Serial
from polytempo.local.training import Job, Score, Trainer

__all__ = ["Backend", "Job", "Score", "Serial", "Trainer"]
