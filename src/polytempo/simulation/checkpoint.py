"""A simulation as explicit state: stop it between two events, go on later, lose no bit."""

from __future__ import annotations

from collections import Counter
from typing import Any

from pydantic import TypeAdapter

from polytempo.core.errors import PolytempoError
from polytempo.core.messages import Dispatch
from polytempo.core.strategy import State
from polytempo.core.task import Task
from polytempo.nodes import (
    Claiming,
    Exchanging,
    Fusion,
    Granted,
    Identity,
    Idle,
    Peer,
    Pending,
    Snapshot,
    Token,
)
from polytempo.simulation.engine import Engine
from polytempo.simulation.peers import PeerSimulator, Post
from polytempo.simulation.simulator import Flight, Simulator
from polytempo.training import Job

FORMAT = 5
_TASKS = TypeAdapter(Task)


def snapshot(engine: Engine) -> State:
    """All that the rest of the run depends on, what is under way included; as it is, so save or
    copy it before the engine goes on."""
    state = {
        "format": FORMAT,
        "data": engine.federation.digest,
        "time": engine.time,
        "queue": engine.queue,
        "counter": engine.counter,
        "started": engine.started,
        "history": engine.history,
        "messages": dict(engine.messages),
        "bytes": dict(engine.bytes),
        "staleness": [list(pair) for pair in engine.staleness.items()],
        "wall": dict(engine.wall),
        "events": engine.events,
        "fingerprint": engine.fingerprint,
    }
    if isinstance(engine, PeerSimulator):
        return state | _peers_state(engine)
    assert isinstance(engine, Simulator)
    return state | {
        "server": engine.server.state_dict(),
        "flights": [_flight_state(flight) for flight in engine.flights.values()],
        "transit": [_dispatch_state(dispatch) for dispatch in engine.transit.values()],
        "diagnosis": engine.diagnosis.save() if engine.diagnosis else None,
        "clusters": engine.clusters.save(),
    }


def restore(engine: Engine, state: State) -> None:
    """Make a newly built engine of the same settings continue from `state`, which it takes
    over."""
    if state.get("format") != FORMAT:
        raise PolytempoError(
            f"the checkpoint has format {state.get('format')}, this version reads {FORMAT}; "
            "start the run anew"
        )
    if state["data"] != engine.federation.digest:
        raise PolytempoError(
            f"the checkpoint was made on other data than {engine.federation.description} now "
            "is; bring the old files back, or start the run anew"
        )
    if isinstance(engine, PeerSimulator):
        _restore_peers(engine, state)
    engine.time, engine.counter = state["time"], state["counter"]
    engine.queue = [tuple(item) for item in state["queue"]]
    engine.started = state["started"]
    engine.history = list(state["history"])
    engine.messages = Counter(state["messages"])
    engine.bytes = Counter(state["bytes"])
    engine.staleness = Counter(dict(state["staleness"]))
    engine.wall = dict(state["wall"])
    engine.events, engine.fingerprint = state["events"], state["fingerprint"]
    if isinstance(engine, Simulator):
        _restore_server(engine, state)


# -- a server and its clients -------------------------------------------------------------------


def _restore_server(simulator: Simulator, state: State) -> None:
    simulator.server.load_state_dict(state["server"])
    flights = [_flight(found) for found in state["flights"]]
    simulator.flights = {flight.job.client: flight for flight in flights}
    simulator.transit = {found["number"]: _dispatch(found) for found in state["transit"]}
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


# -- peers --------------------------------------------------------------------------------------

COUNTS = ("incarnations", "answers", "local_rounds", "pairings", "each", "effects")
_KINDS: dict[str, Any] = {
    kind.__name__: kind
    for kind in (
        *(Identity, Token, Snapshot, Fusion, Post),
        *(Idle, Pending, Claiming, Granted, Exchanging),
    )
}


def _peers_state(engine: PeerSimulator) -> State:
    return {
        "target": engine.learners[0].schedule.target,
        "learners": [learner.state_dict() for learner in engine.learners],
        "machines": {str(c): _spell(_memory(each)) for c, each in engine.machines.items()},
        "posts": {str(number): _spell(post) for number, post in engine.posts.items()},
        "training": {str(client): ticket for client, ticket in engine.training.items()},
        "lost": sorted(engine.lost),
        **{name: getattr(engine, name) for name in COUNTS},
        "checker": vars(engine.checker) if engine.checker else None,
    }


def _restore_peers(engine: PeerSimulator, state: State) -> None:
    target = engine.learners[0].schedule.target
    if state["target"] != target:
        raise PolytempoError(
            f"the peers were on their way to {state['target']} iterations, with the learning rates "
            f"that belong to it, and not to {target}; leave --rounds as it was, or start anew"
        )
    for client, (learner, saved) in enumerate(zip(engine.learners, state["learners"], strict=True)):
        learner.load_state_dict(saved)
        engine.strategy.models[client] = learner.params
    engine.incarnations = state["incarnations"]
    for client, memory in state["machines"].items():
        engine.machines[int(client)] = machine = engine.machine(int(client))
        vars(machine).update(_read(memory))
    engine.posts = {int(number): _read(post) for number, post in state["posts"].items()}
    engine.training = {int(client): ticket for client, ticket in state["training"].items()}
    engine.lost = set(state["lost"])
    for name in COUNTS:
        setattr(engine, name, state[name])
    if engine.checker and state["checker"]:
        vars(engine.checker).update(state["checker"])


def _memory(machine: Peer) -> State:
    """What a machine remembers: all but its options."""
    return {key: value for key, value in vars(machine).items() if key != "decision"}


def _spell(value: Any) -> Any:
    """Phases, tokens, snapshots and the like as tables that name their kind."""
    kind = type(value).__name__
    if kind in _KINDS:
        parts = getattr(value, "_asdict", lambda: vars(value))()
        return {kind: {key: _spell(part) for key, part in parts.items()}}
    if isinstance(value, dict):
        return {"dict": {key: _spell(part) for key, part in value.items()}}
    return [_spell(part) for part in value] if isinstance(value, list | tuple) else value


def _read(value: Any) -> Any:
    if isinstance(value, dict):
        [(kind, parts)] = value.items()
        return _KINDS.get(kind, dict)(**{key: _read(part) for key, part in parts.items()})
    return [_read(part) for part in value] if isinstance(value, list) else value
