"""Clients in training, and what is on its way to them; as objects, and as checkpoints hold them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from pydantic import TypeAdapter

from polytempo.core.messages import Dispatch
from polytempo.core.strategy import State
from polytempo.core.task import Task
from polytempo.training import Job

_TASKS = TypeAdapter(Task)


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
        "task": _TASKS.dump_python(job.task, mode="json"),
        "stream": list(job.stream),
        "first_step": job.first_step,
        "last_step": job.last_step,
        "anchor": job.anchor,
    }


def read_flight(found: dict[str, Any]) -> Flight:
    job = Job(
        found["client"],
        found["params"],
        _TASKS.validate_python(found["task"]),
        tuple(found["stream"]),
        found["first_step"],
        found["last_step"],
        found["anchor"],
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


def dispatch_state(dispatch: Dispatch) -> State:
    return {
        "client": dispatch.client,
        "number": dispatch.number,
        "params": dispatch.params,
        "anchor": dispatch.anchor,
        "task": _TASKS.dump_python(dispatch.task, mode="json"),
    }


def read_dispatch(found: dict[str, Any]) -> Dispatch:
    task = _TASKS.validate_python(found["task"])
    return Dispatch(found["client"], found["number"], found["params"], task, True, found["anchor"])
