"""Clients in training, and what is on its way to them; as objects, and as checkpoints hold them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from polytempo.core.strategy import State
from polytempo.core.task import TASKS
from polytempo.training.jobs import Job, Swap


@dataclass
class Flight:
    """A client in training."""

    first: int  # the dispatch that started it
    number: int  # the dispatch whose model it trains (a multicast may have taken over)
    job: Job
    begin: float  # training begins, after the download
    seconds: float  # of training
    upload: float  # seconds of the upload
    lost: bool = False
    ticket: int = -1  # counter of its arrival event; an older one in the queue is void
    seen: float | None = None  # the sum of the model that it was sent, if that is watched

    def progress(self, time: float) -> float:
        """The share of its training that the client has done by then."""
        return max(0.0, (time - self.begin) / self.seconds)


def flight_state(flight: Flight) -> State:
    job = flight.job
    return {
        "first": flight.first,
        "number": flight.number,
        "begin": flight.begin,
        "seconds": flight.seconds,
        "upload": flight.upload,
        "lost": flight.lost,
        "ticket": flight.ticket,
        "client": job.client,
        "params": job.params,
        "task": TASKS.describe(job.task),
        "stream": list(job.stream),
        "first_step": job.first_step,
        "last_step": job.last_step,
        "vectors": dict(job.vectors),
        "memory": dict(job.memory),
        "swaps": [[s.step, s.params, dict(s.vectors), s.lr] for s in job.swaps],
    }


def read_flight(found: dict[str, Any]) -> Flight:
    job = Job(
        found["client"],
        found["params"],
        TASKS.create(found["task"]),
        tuple(found["stream"]),
        found["first_step"],
        found["last_step"],
        found["vectors"],
        found["memory"],
        tuple(Swap(*swap) for swap in found["swaps"]),
    )
    return Flight(
        found["first"],
        found["number"],
        job,
        found["begin"],
        found["seconds"],
        found["upload"],
        found["lost"],
        found["ticket"],
    )
