"""Small fleets for tests: a server and its clients in threads, on the loopback interface; and what
the simulator's machinery would have made of the same records."""

import json
import queue
import socket
import threading
from dataclasses import dataclass, field
from pathlib import Path

from polytempo.experiments.config import make_config
from polytempo.experiments.fleet import Site, conduct, run_client
from polytempo.experiments.fleet_plan import make_node, recorded, undertaking
from polytempo.experiments.fleet_settings import for_fleet, known
from polytempo.experiments.world import load_federation
from polytempo.models import Inputs, build
from polytempo.network.fleet.store import history
from polytempo.nodes.star import Continued, Offered
from polytempo.training import PERSONAL, Job, make_solver

WAIT = 60  # seconds, on a busy machine
TINY = {
    "data": "synthetic:groups=2,kind=permutation,samples=24,features=12,classes=4",
    "clients": 4,
    "model": "linear",
    "solver": "torch",
    "updates": 24,
    "eval_every": 8,
    "adapt_epochs": 1,
    "batch_size": 4,
    "epochs": 2,
    "seed": 1,
}


@dataclass
class Outcome:
    """What has come of a fleet: results, and what everybody said."""

    folder: Path
    result: object = None
    clients: dict = field(default_factory=dict)
    said: list = field(default_factory=list)  # by the server
    heard: dict = field(default_factory=dict)  # by each client
    failed: list = field(default_factory=list)

    def events(self, kind):
        lines = (self.folder / "server" / "events.jsonl").read_text().splitlines()
        return [found for line in lines if (found := json.loads(line))["event"] == kind]

    def records(self, kind):
        return [record for record in history(self.folder / "server") if isinstance(record, kind)]


def run_fleet(
    folder,
    pauses=None,
    through=None,
    interrupted=None,
    stop_clients=None,
    until=None,
    own_model=False,
    wait_for=1,
    **settings,
):
    """A fleet from nothing to the end. `pauses`: of each client, after each step; `through`: makes
    an address of the server's, by which clients reach it; `until`: of so many updates, then both
    sides are interrupted; `own_model`: clients are given the model, too."""
    config = make_config({**TINY, **settings}, "test")
    strategy = for_fleet(config)
    complete, samples = known(config, strategy)
    outcome, address = Outcome(folder), queue.Queue()
    there, everybody = set(), threading.Event()  # nobody trains before all are there
    gone = stop_clients or threading.Event()

    def say(event):
        outcome.said.append(event)
        if event["event"] == "listening":
            address.put(event["address"])
        if until is not None and event.get("updates", 0) >= until:
            interrupted.set()
            gone.set()

    def server():
        try:
            outcome.result = conduct(
                undertaking(complete, samples, strategy),
                folder / "server",
                Site("127.0.0.1:0", wait_for=wait_for),
                say=say,
                interrupted=interrupted,
            )
        except BaseException as error:
            outcome.failed.append(error)
            address.put(None)

    def client(number, where):
        name = f"client-{number}"
        outcome.heard[name] = []

        def hear(event):
            outcome.heard[name].append(event)
            if event["event"] == "connected":
                there.add(name)
                if len(there) == complete.clients:
                    everybody.set()
            elif event["event"] == "begun":
                everybody.wait(WAIT)

        try:
            outcome.clients[name] = run_client(
                config,
                folder / name,
                where,
                name=name,
                client=number,
                own_model=own_model,
                pause=(pauses or {}).get(number, 0.0),
                say=hear,
                interrupted=gone,
            )
        except BaseException as error:
            outcome.failed.append(error)

    threads = [threading.Thread(target=server, daemon=True)]
    threads[0].start()
    where = address.get(timeout=WAIT)
    if where is not None:
        where = where if through is None else through(where)
        for number in range(complete.clients):
            threads.append(threading.Thread(target=client, args=(number, where), daemon=True))
            threads[-1].start()
    threads[0].join(WAIT)
    for thread in threads[1:]:
        thread.join(WAIT if outcome.result is not None else 0)
    gone.set()
    for thread in threads:
        thread.join(WAIT)
        assert not thread.is_alive(), "it does not end"
    assert not outcome.failed, outcome.failed
    return outcome


def trained_as_simulated(folder, federation=None):
    """Feed the records of a deployed fleet to a server, and let the simulator's solver train every
    dispatch, multicasts included: each update must be the recorded one, bit for bit. Returns how
    many were compared (one that came when the run was over counts here), and the server."""
    what = recorded(folder / "server")
    config = what.config
    federation = federation or load_federation(config)
    inputs = Inputs(federation.shape, federation.outputs, federation.vocabulary, federation.problem)
    module = build(config.model, inputs, config.seed)
    solver, *_ = make_solver(module, federation, config.seed, config.parts(), name="torch")
    node = make_node(what)
    jobs, numbers, memory, compared, multicasts = {}, {}, {}, 0, {}

    def begin(dispatch):
        client = dispatch.client
        own = {PERSONAL: solver.layout.initial_personal} if solver.layout.personal else {}
        jobs[client] = Job(
            int(node.roster[client].rpartition("-")[2]),
            dispatch.params,
            dispatch.task,
            ("client", client, "dispatch", dispatch.number),
            vectors=dispatch.vectors,
            memory=memory.get(client, own),
        )
        numbers[client] = dispatch.number

    def trains(client, number):
        """A multicast may take the place of a model that is still on its way: then the client has
        begun with it."""
        if numbers[client] != number:
            begin(multicasts[number])

    for record in history(folder / "server"):
        match record:
            case Offered(name=name, upload=upload):
                client = node.names[name]
                trains(client, upload.number)
                found = solver.carry_out(jobs[client])
                assert found.upload.equal(upload.vector), f"update {upload.number} differs"
                assert found.extras.keys() == upload.extras.keys()
                assert all(found.extras[k].equal(upload.extras[k]) for k in found.extras)
                memory[client] = found.memory
                compared += 1
            case Continued(name=name, swapped=swapped) if swapped.step is not None:
                client = node.names[name]
                trains(client, swapped.replaces)
                jobs[client] = jobs[client].swapped(swapped.step, multicasts[swapped.number])
                numbers[client] = swapped.number
        for action in node.apply(record):
            dispatch = getattr(getattr(action, "message", None), "dispatch", None)
            if dispatch is not None and dispatch.preempt:
                multicasts[dispatch.number] = dispatch
            elif dispatch is not None:
                begin(dispatch)
    return compared, node


class Tap:
    """A relay on the loopback interface that keeps all that passes."""

    def __init__(self, target):
        host, _, port = target.rpartition(":")
        self.target = host, int(port)
        self.up, self.down = bytearray(), bytearray()  # to the server, and from it
        self.listener = socket.create_server(("127.0.0.1", 0))
        threading.Thread(target=self._accept, daemon=True).start()

    @property
    def address(self):
        return f"127.0.0.1:{self.listener.getsockname()[1]}"

    def _accept(self):
        while True:
            try:
                inner, _ = self.listener.accept()
            except OSError:
                return
            outer = socket.create_connection(self.target)
            for source, sink, kept in ((inner, outer, self.up), (outer, inner, self.down)):
                threading.Thread(target=_relay, args=(source, sink, kept), daemon=True).start()


def _relay(source, sink, kept):
    try:
        while data := source.recv(65536):
            kept += data
            sink.sendall(data)
    except OSError:
        pass
    finally:
        for end in (source, sink):
            end.close()
