"""Training on a Ray cluster: two nodes, both on this machine, that talk over 127.0.0.1 alone."""

import pickle
import signal
import subprocess
import sys
import tempfile
from dataclasses import replace

import pytest
import torch
from torch import nn

from polytempo import Federation, PolytempoError, Proximal, Task, simulate
from polytempo.core.client_steps import Mask
from polytempo.core.layout import Parts
from polytempo.simulation import Simulator
from polytempo.strategies import PACE
from polytempo.training import PERSONAL, AutogradSolver, Job, make_executor
from solving import needs_compiler, upload_of

ray = pytest.importorskip("ray")

from ray.cluster_utils import Cluster  # noqa: E402

from polytempo.training.executors.ray_actors import RayPool, _Worker, processors  # noqa: E402

AT_HOME = Parts(["norm"], buffers="reset")
NODE = {
    "num_cpus": 1,
    "object_store_memory": 80 * 2**20,
    "node_ip_address": "127.0.0.1",
    "include_dashboard": False,
    "include_log_monitor": False,
    "no_monitor": True,
}


def two_nodes() -> Cluster:
    """On a busy machine a node may take longer to start than Ray has patience: then once more."""
    for attempt in range(3):
        nodes = Cluster()
        try:
            nodes.add_node(**NODE)
            nodes.add_node(**NODE)
            return nodes
        except Exception:
            nodes.shutdown()
            if attempt == 2:
                raise
    raise AssertionError


@pytest.fixture(scope="module")
def cluster():
    """In a folder of its own, so that two of them (for two processes that test) do not meet."""
    with tempfile.TemporaryDirectory(prefix="pt") as folder, pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_TMPDIR", folder)
        # Ray's name for: this machine is 127.0.0.1, not its address in the network
        patch.setenv("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")
        patch.setattr("ray._private.ray_constants.ENABLE_RAY_CLUSTER", False)
        nodes = two_nodes()
        try:
            patch.setenv("RAY_ADDRESS", nodes.address)
            yield nodes
        finally:
            ray.shutdown()
            nodes.shutdown()


@pytest.fixture(autouse=True)
def disconnected():
    """One test that fails should not make others fail, nor Ray's handler other tests."""
    terminate = signal.getsignal(signal.SIGTERM)
    yield
    ray.shutdown()
    signal.signal(signal.SIGTERM, terminate)


@pytest.fixture(scope="module")
def wide() -> Federation:
    """Models of it are too large for Ray to send them within its messages."""
    data = "synthetic:groups=2,kind=permutation,samples=24,features=200,classes=4"
    return Federation.load(data, clients=8, seed=1)


def own_model() -> nn.Module:
    """Of a class that no other process can import; with random numbers, and statistics."""

    class Unlucky(Exception):
        def __init__(self, what: str, where: int = 0) -> None:
            super().__init__(what)
            self.where = where

    class Own(nn.Module):
        error = Unlucky

        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.Sequential(
                nn.Linear(12, 40), nn.BatchNorm1d(40), nn.Dropout(0.2), nn.Linear(40, 4)
            )

        def forward(self, x):
            if bool(self.layers[0].weight.isnan().any()):
                raise self.error("no number", where=17)
            return self.layers(x)

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return Own()


def test_jobs_travel_with_all_that_they_bring_and_outcomes_with_all_that_they_have(small):
    """What the pool asks a worker for, and what the worker makes of it; without a cluster."""
    solver = AutogradSolver(own_model(), small, 3, AT_HOME)
    start, own = solver.layout.read(), solver.layout.initial_personal
    task = Task(epochs=1, objective=Proximal(0.5), keep_optimizer=True, client_steps=(Mask(0.2),))
    jobs = [
        Job(client, start, task, ("client", client), memory={PERSONAL: own + client})
        for client in range(3)
    ]
    jobs[1] = replace(jobs[1], vectors={"anchor": start + 1})
    asked = []
    pool = RayPool.__new__(RayPool)
    pool._ask = lambda worker, method, *details: asked.append((worker, method, details))
    worker = _Worker()
    worker.solver = solver
    for job in jobs:
        pool.train(7, job)
        number, method, details = asked.pop()
        assert (number, method) == (7, "train")
        upload, extras, memory = pickle.loads(worker.train(*details))
        expected = solver.carry_out(job)
        assert torch.equal(upload, expected.upload)
        assert torch.equal(extras["mask"], expected.extras["mask"])
        assert memory.keys() == {PERSONAL, "optimizer.momentum"}
        assert all(torch.equal(memory[name], expected.memory[name]) for name in memory)
        without = upload_of(solver, replace(job, vectors={}))
        assert torch.equal(upload, without) == (not job.vectors)


def assert_same(found: Simulator, expected: Simulator) -> None:
    assert found.messages["multicast"] > 0
    assert found.fingerprint == expected.fingerprint
    assert found.history == expected.history
    for client in range(expected.federation.clients):
        assert torch.equal(found.strategy.model_for(client), expected.strategy.model_for(client))


@needs_compiler
def test_a_native_run_is_the_same_as_in_this_process(cluster, wide):
    def run(**settings):
        settings |= {"strategy": PACE(omega=4), "updates": 40, "epochs": 2, "batch_size": 8}
        return simulate(wide, model="mlp:hidden=150", adapt_epochs=1, **settings)

    expected = run(solver="native", backend="serial")
    terminate = signal.getsignal(signal.SIGTERM)
    found = run(backend="ray")  # as many workers as CPUs
    assert found.summary["backend"] == "native on 2 Ray workers"
    assert 4 * found.summary["parameters"] > 100 * 1024
    assert_same(found.simulator, expected.simulator)
    assert found.summary["peak_rss_mb"] > expected.summary["peak_rss_mb"] + 100
    assert signal.getsignal(signal.SIGTERM) is terminate
    assert not ray.is_initialized()  # as before


def test_workers_on_two_nodes_what_they_find_their_errors_and_their_end(cluster, small):
    """All on one pool, which takes seconds to start."""
    task = Task(epochs=2, batch_size=8)

    def simulated(backend):
        options = {"task": task, "adapt_epochs": 1, "seed": 3, "backend": backend}
        simulator = Simulator(small, backend.solver.layout.module, PACE(omega=4), **options)
        simulator.run(40)
        return simulator

    ray.init(logging_level="ERROR", log_to_driver=False)
    alone = make_executor(own_model(), small, 3, AT_HOME, name="serial")
    backend = make_executor(own_model(), small, 3, AT_HOME, name="ray", workers=2)
    space = backend.solver.layout
    start, memory = space.read(), {PERSONAL: space.initial_personal}
    jobs = [Job(client, start, task, ("client", client), memory=memory) for client in range(4)]
    for job in jobs:
        upload_of(backend.solver, job)  # moves the statistics, which no worker may see
    space.vector.copy_(space.join(start, space.initial_personal))
    with (
        pytest.raises(PolytempoError, match=r"^Ray worker 1 died \(.*try fewer --w") as died,
        backend,
    ):
        pool = backend.pool
        assert isinstance(pool, RayPool)
        assert set(pool.nodes) == {node["NodeID"] for node in ray.nodes()}
        assert len(set(pool.nodes)) == 2
        assert_same(simulated(backend), simulated(alone))

        for worker in (0, 1):  # each answers in the order of what it was asked
            pool.train(worker, jobs[2 * worker])
            pool.train(worker, jobs[2 * worker + 1])
        answers = {0: [], 1: []}
        for _ in range(4):
            worker, outcome = pool.receive()
            answers[worker].append(outcome.upload)
        expected = [upload_of(alone.solver, job) for job in jobs]
        assert all(map(torch.equal, answers[0] + answers[1], expected))

        with pytest.raises(backend.solver.layout.module.error) as caught:
            backend.train(replace(jobs[0], params=start * torch.nan))
        assert (str(caught.value), caught.value.where) == ("no number", 17)
        [note] = caught.value.__notes__
        assert note.startswith("on Ray worker ")
        assert 'raise self.error("no number", where=17)' in note

        ray.kill(pool._actors[1])
        for _ in range(10_000):  # it may still answer for a moment
            pool.train(1, jobs[0])
            pool.receive()
    assert "\n" not in str(died.value)
    assert ray.is_initialized()  # as before


SCRIPT = """
from dataclasses import replace

from polytempo import Federation
from polytempo.core.objective import Objective
from polytempo.models import Inputs, build
from polytempo.simulation import Simulator
from polytempo.strategies import FedAvg
from polytempo.training import make_executor
from polytempo.training.problem import Classification


class Decay(Objective):
    def add_gradient(self, theta, anchor, grad):
        grad.add_(theta, alpha=0.5)


class Twice(Classification):
    def loss(self, outputs, targets, reduction="mean"):
        return 2 * super().loss(outputs, targets, reduction)


class Mine(FedAvg):
    def task(self, client):
        return replace(super().task(client), objective=Decay())


data = "synthetic:groups=2,kind=permutation,samples=24,features=12,classes=4"
federation = Federation.load(data, clients=4, seed=1)
for backend in ("serial", "ray"):
    module = build("linear", Inputs((12,), 4), seed=1)
    executor = make_executor(module, federation, 0, problem=Twice(), name=backend)
    simulator = Simulator(federation, module, Mine(), backend=executor)
    simulator.run(8)
    print(backend, simulator.fingerprint)
"""


def test_what_a_script_defines_itself_reaches_the_workers(cluster, tmp_path):
    """No worker can import it: `__main__` is another module there."""
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    done = subprocess.run(
        [sys.executable, script], capture_output=True, text=True, timeout=200, check=False
    )
    assert done.returncode == 0, done.stderr
    lines = dict(line.split() for line in done.stdout.splitlines())
    assert lines.keys() == {"serial", "ray"} and lines["serial"] == lines["ray"]


def test_more_workers_than_processors(cluster, small):
    backend = make_executor(own_model(), small, 0, name="ray", workers=3)
    with pytest.raises(PolytempoError, match="3 workers need a CPU each, but the cluster has 2"):
        backend.__enter__()
    assert not ray.is_initialized()


def test_processors_that_others_use(cluster, small, monkeypatch):
    monkeypatch.setattr("polytempo.training.executors.ray_actors._PATIENCE", 1.0)
    assert processors() == 2
    busy = ray.util.placement_group([{"CPU": 1}])
    assert busy.wait(30)
    with pytest.raises(PolytempoError, match=r"2 workers .* has 2, of which 1 are free"):
        RayPool(AutogradSolver(own_model(), small, 0), 2)
    assert not ray.is_initialized()


def test_workers_that_never_begin(cluster, small, monkeypatch):
    monkeypatch.setattr("polytempo.training.executors.ray_actors._START", 0.01)
    with pytest.raises(PolytempoError, match=r"Ray worker 0 did not start within 0\.01 seconds"):
        RayPool(AutogradSolver(own_model(), small, 0), 1)
    assert not ray.is_initialized()


def test_a_cluster_that_is_not_there(small, monkeypatch):
    monkeypatch.setenv("RAY_ADDRESS", "nonsense")
    with pytest.raises(PolytempoError, match="RAY_ADDRESS, which is nonsense"):
        make_executor(own_model(), small, 0, name="ray")


def test_without_ray(small, monkeypatch):
    monkeypatch.delitem(sys.modules, "polytempo.training.executors.ray_actors")
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(
        PolytempoError, match=r'^backend ray needs Ray: pip install "polytempo\[ray'
    ):
        make_executor(own_model(), small, 0, name="ray")
