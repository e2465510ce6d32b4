"""A simulation as explicit state: stop it between two events, go on later, lose no bit."""

from __future__ import annotations

from collections import Counter
from typing import Any

from pydantic import TypeAdapter

from polytempo.core.errors import PolytempoError
from polytempo.core.messages import Dispatch
from polytempo.core.strategy import State
from polytempo.core.task import Task
from polytempo.local import Job
from polytempo.simulation.simulator import Flight, Simulator

FORMAT = 4
_TASKS = TypeAdapter(Task)


def snapshot(simulator: Simulator) -> State:
    """All that the rest of the run depends on, clients in flight included; as it is, so save or
    copy it before the simulator goes on."""
    return {
        "format": FORMAT,
        "data": simulator.federation.digest,
        "server": simulator.server.state_dict(),
        "time": simulator.time,
        "queue": simulator.queue,
        "counter": simulator.counter,
        "started": simulator.started,
        "flights": [_flight_state(flight) for flight in simulator.flights.values()],
        "transit": [_dispatch_state(dispatch) for dispatch in simulator.transit.values()],
        "history": simulator.history,
        "messages": dict(simulator.messages),
        "bytes": dict(simulator.bytes),
        "staleness": [list(pair) for pair in simulator.staleness.items()],
        "wall": dict(simulator.wall),
        "events": simulator.events,
        "fingerprint": simulator.fingerprint,
        "diagnosis": simulator.diagnosis.save() if simulator.diagnosis else None,
        "clusters": simulator.clusters.save(),
    }


def restore(simulator: Simulator, state: State) -> None:
    """Make a newly built simulator of the same settings continue from `state`, which it takes
    over."""
    if state.get("format") != FORMAT:
        raise PolytempoError(
            f"the checkpoint has format {state.get('format')}, this version reads {FORMAT}; "
            "start the run anew"
        )
    if state["data"] != simulator.federation.digest:
        raise PolytempoError(
            f"the checkpoint was made on other data than {simulator.federation.description} now "
            "is; bring the old files back, or start the run anew"
        )
    simulator.server.load_state_dict(state["server"])
    simulator.time, simulator.counter = state["time"], state["counter"]
    simulator.queue = [tuple(item) for item in state["queue"]]
    simulator.started = state["started"]
    flights = [_flight(found) for found in state["flights"]]
    simulator.flights = {flight.job.client: flight for flight in flights}
    simulator.transit = {found["number"]: _dispatch(found) for found in state["transit"]}
    simulator.history = list(state["history"])
    simulator.messages = Counter(state["messages"])
    simulator.bytes = Counter(state["bytes"])
    simulator.staleness = Counter(dict(state["staleness"]))
    simulator.wall = dict(state["wall"])
    simulator.events, simulator.fingerprint = state["events"], state["fingerprint"]
    if simulator.diagnosis:
        simulator.diagnosis.load(state["diagnosis"])
    simulator.clusters.load(state["clusters"])
    if simulator.checker:
        _resume_checker(simulator)


def _resume_checker(simulator: Simulator) -> None:
    """Tell the invariant checker what is under way; from here on it counts for itself again."""
    checker, server = simulator.checker, simulator.server
    assert checker is not None
    checker.time, checker.number = simulator.time, simulator.events - 1
    checker.round, checker.version = server.round, server.version
    checker.training = {c: flight.number for c, flight in simulator.flights.items()}
    under_way = {flight.number for flight in simulator.flights.values()} | set(simulator.transit)
    for client, sent in server.open.items():
        for number, sent_round, sent_version in sent:
            if number in under_way:
                checker.open[number] = {
                    "client": client,
                    "round": sent_round,
                    "version": sent_version,
                }
    for number in set(simulator.transit) - set(checker.open):  # will be missed
        checker.open[number] = {"client": server.owners[number], "round": 0, "version": 0}
    checker.ended = set(range(len(server.owners))) - set(checker.open)


def _flight_state(flight: Flight) -> State:
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


def _flight(found: dict[str, Any]) -> Flight:
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


def _dispatch_state(dispatch: Dispatch) -> State:
    return {
        "client": dispatch.client,
        "number": dispatch.number,
        "params": dispatch.params,
        "anchor": dispatch.anchor,
        "task": _TASKS.dump_python(dispatch.task, mode="json"),
    }


def _dispatch(found: dict[str, Any]) -> Dispatch:
    task = _TASKS.validate_python(found["task"])
    return Dispatch(found["client"], found["number"], found["params"], task, True, found["anchor"])
