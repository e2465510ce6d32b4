"""One suite holds every registered strategy to the same contract."""

import dataclasses
import inspect
import json
import re
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

from polytempo import Context, PolytempoError, Server, Task, Update
from polytempo.core.attacks import Replay
from polytempo.core.bank import PLAIN_STORAGE, ModelBank, Storage
from polytempo.core.compression import TopK
from polytempo.core.defences import Norm, Trimmed
from polytempo.core.events import as_dict
from polytempo.core.messages import Dispatch
from polytempo.core.optimizer import Adam
from polytempo.core.privacy import Gaussian
from polytempo.core.registry import default_of
from polytempo.core.strategy import Strategy
from polytempo.simulation import Simulator
from polytempo.simulation.devices import TwoSpeed
from polytempo.storage import load_state, mapped, save_state
from polytempo.strategies import STRATEGIES, FedAvg

SAMPLES = [12, 30, 7, 21, 16, 9]
INITIAL = torch.linspace(-1, 1, 10)


NAMES = [name for name in STRATEGIES if STRATEGIES[name].engine == "server"]


@pytest.fixture(params=NAMES)
def name(request):
    return request.param


def server_for(strategy, storage=PLAIN_STORAGE) -> tuple[Server, dict[int, Dispatch]]:
    context = Context(INITIAL.clone(), SAMPLES, Task(), seed=3, storage=storage)
    concurrency = len(SAMPLES) if strategy.all_train else 3
    server = Server(strategy, context, concurrency=concurrency)
    return server, {action.client: action for action in server.join(range(len(SAMPLES)))}


def answer(server, training, step):
    """The oldest dispatch is answered with something that depends on the step alone."""
    client = min(training, key=lambda c: training[c].number)
    dispatch = training.pop(client)
    noise = torch.from_numpy(np.random.default_rng(step).normal(size=10)).float()
    base = torch.zeros(10) if dispatch.task.upload != "model" else dispatch.params
    beside = {
        "basis": torch.eye(dispatch.task.extras.get("basis", 0), 6),
        "choice": torch.tensor([[client % 2]]),  # of two models or more
        "gap.losses": torch.tensor([[2.0, 1.5]]),
        "line.losses": torch.tensor([[-1.0, -2, -1, 0]]),
        "mask": torch.tensor([[0b10110111, 0b01000000]], dtype=torch.uint8),
        "variate": 0.1 * noise[None],
    }
    extras = {key: beside[key] for key in dispatch.task.extras}
    update = Update(client, dispatch.number, base + 0.1 * noise, SAMPLES[client], extras)
    actions = server.receive(update)
    for action in actions:
        if isinstance(action, Dispatch):
            training[action.client] = action
    return actions


def after(name, steps):
    """The strategy, when it has got so many updates."""
    server, training = server_for(STRATEGIES.create(name))
    for step in range(steps):
        answer(server, training, step)
    return server.strategy


SINGLE = {name for name in NAMES if STRATEGIES[name].single_model}
REVISED = {name for name in NAMES if after(name, 1).revision(0) is not None}
CLUSTERED = {name for name in NAMES if after(name, 1).clusters() is not None}
GRAPHS = {name for name in NAMES if after(name, 20).collaboration() is not None}
ALIKE = {name for name in NAMES if after(name, 40).similarity() is not None}


def only(names):
    """The test is about strategies that can do something, which some of them must."""
    assert names
    return pytest.mark.parametrize("name", sorted(names))


def test_what_strategies_can_do_is_what_they_are():
    """Who is left out of a test below is left out by right: models of one's own come with a
    revision, and either from a graph or from a cluster, unless nobody hears of others."""
    assert set(NAMES) - SINGLE <= REVISED
    assert not SINGLE & (CLUSTERED | GRAPHS)
    assert set(NAMES) - {"standalone"} == SINGLE | CLUSTERED | GRAPHS
    assert {"pace", "fedamp", "pfedgraph-async", "fedsac"} <= GRAPHS
    assert {"cfl", "icfl-async", "ifca", "casa"} <= CLUSTERED
    assert {"cfl", "icfl-async", "casa"} <= ALIKE


def test_a_second_run_has_the_task_of_its_own(name):
    """Nothing of the first is left in an object that is used again."""
    strategy = STRATEGIES.create(name)
    for rate, batch in ((0.1, 4), (0.3, 8)):
        task = Task(lr=rate, batch_size=batch)
        strategy.setup(Context(INITIAL.clone(), SAMPLES, task, seed=3))
        for client in range(len(SAMPLES)):
            assert (strategy.task(client).lr, strategy.task(client).batch_size) == (rate, batch)


def models(server):
    return [server.strategy.model_for(client).clone() for client in range(len(SAMPLES))]


def test_it_says_what_it_is(name):
    cls = STRATEGIES[name]
    assert cls.name == name
    assert cls.family and cls.paper
    assert len((inspect.getdoc(cls) or "").splitlines()[0]) > 20
    for field in dataclasses.fields(cls):  # everything has a default: the bare name works
        assert default_of(cls, field.name) is not dataclasses.MISSING
        assert field.name.replace("_", "").isalnum()
    table = STRATEGIES.describe(STRATEGIES.create(name))
    assert json.loads(json.dumps(table)) == table
    assert STRATEGIES.describe(STRATEGIES.create(table)) == table


def test_unknown_options_are_refused(name):
    with pytest.raises(Exception, match="no_such_option"):
        STRATEGIES.create(f"{name}:no_such_option=1")


def test_everybody_starts_from_the_initial_model(name):
    server, training = server_for(STRATEGIES.create(name))
    for dispatch in training.values():
        assert torch.equal(dispatch.params, INITIAL)
    assert all(torch.equal(model, INITIAL) for model in models(server))


def test_models_change_stay_finite_and_are_never_modified_in_place(name):
    server, training = server_for(STRATEGIES.create(name))
    handed = []
    for step in range(40):
        handed += [(action.params, action.params.clone()) for action in training.values()]
        answer(server, training, step)
    assert all(torch.equal(now, then) for now, then in handed)
    final = models(server)
    assert all(torch.isfinite(model).all() for model in final)
    assert any(not torch.equal(model, INITIAL) for model in final)
    assert server.updates == 40
    assert 0 < server.version <= 40
    assert torch.equal(INITIAL, torch.linspace(-1, 1, 10))


@only(REVISED)
def test_a_revision_stands_for_one_model(name):
    server, training = server_for(STRATEGIES.create(name))
    strategy, seen = server.strategy, {}
    for step in range(30):
        for client, model in enumerate(models(server)):
            revision = strategy.revision(client)
            assert torch.equal(seen.setdefault((client, revision), model), model)
        answer(server, training, step)


@pytest.mark.parametrize(
    ("storage", "tolerance"),
    [(Storage(allocate=mapped()), 0.0), (Storage(bits=16), 2e-2), (Storage(bits=8), 5e-2)],
    ids=["mapped", "half", "int8"],
)
def test_models_are_kept_as_the_context_says(name, storage, tolerance):
    asked = []

    def spying(shape, dtype):
        asked.append(dtype)
        return storage.allocate(shape, dtype)

    plain, training = server_for(STRATEGIES.create(name))
    other, others = server_for(STRATEGIES.create(name), replace(storage, allocate=spying))
    for step in range(12):
        answer(plain, training, step)
        answer(other, others, step)
    kept = {32: torch.float32, 16: torch.float16, 8: torch.int8}[storage.bits]
    if name.endswith("-8bit"):
        kept = torch.int8
    banks = [value for value in vars(plain.strategy).values() if isinstance(value, ModelBank)]
    clustered = plain.strategy.clusters() is not None  # few models, kept as they are
    assert banks or plain.strategy.single_model or clustered
    assert asked == [kept] * len(banks)
    for ours, theirs in zip(models(other), models(plain), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=tolerance)


@only(set(NAMES) - CLUSTERED)
def test_single_model_is_one_object_for_all(name):
    strategy = after(name, 12)
    handed = [strategy.model_for(client) for client in range(len(SAMPLES))]
    assert all(model is handed[0] for model in handed) == strategy.single_model


@only(GRAPHS)
def test_collaboration_rows_are_distributions(name):
    graph = after(name, 20).collaboration()
    assert graph.shape == (len(SAMPLES), len(SAMPLES))
    assert (graph >= 0).all()
    assert graph.sum(1) == pytest.approx(1)


@only(CLUSTERED)
def test_clusters_are_numbers_and_share_a_model(name):
    server, training = server_for(STRATEGIES.create(name))
    for step in range(40):
        answer(server, training, step)
        clusters = server.strategy.clusters()
        assert clusters.shape == (len(SAMPLES),)
        assert clusters.min() >= -1
        for number in set(clusters.tolist()) - {-1}:
            first, *others = np.flatnonzero(clusters == number)
            model = server.strategy.model_for(int(first))
            assert all(torch.equal(server.strategy.model_for(int(c)), model) for c in others)


@only(ALIKE)
def test_similarities_are_symmetric_cosines(name):
    alike = after(name, 40).similarity()
    assert alike.shape == (len(SAMPLES), len(SAMPLES))
    np.testing.assert_array_equal(alike, alike.T)
    known = alike[~np.isnan(alike)]
    assert (np.abs(known) <= 1).all()
    assert len(known) > len(SAMPLES) or name == "casa-c"  # more than the diagonal


def bits(value):
    """A copy of whatever a strategy holds, to be compared bit for bit."""
    if isinstance(value, torch.Tensor | np.ndarray):
        return str(value.dtype), tuple(value.shape), np.asarray(value).tobytes()
    if isinstance(value, dict):
        return [(key, bits(part)) for key, part in value.items()]
    return [bits(part) for part in value] if isinstance(value, list | tuple) else repr(value)


EAGER = {  # they do hurry clients
    "port": "port:bound=1,buffer_size=1",
    "pace": "pace:omega=0.5",
    "echopfl": "echopfl:join=-1,broadcast=0.01",
}


def test_queries_are_pure(name):
    """Asked once, often or never: nothing changes, and the answers are the same."""
    server, training = server_for(STRATEGIES.create(EAGER.get(name, name)))
    strategy, said = server.strategy, set()

    def ask():
        in_flight = server.in_flight()
        clients = range(len(SAMPLES))
        each = ("model_for", "serve", "reply_to", "task", "vectors_for", "revision")
        found = {query: [getattr(strategy, query)(client) for client in clients] for query in each}
        for query in ("refresh", "urgent"):
            found[query] = list(getattr(strategy, query)(in_flight))
        for query in ("collaboration", "clusters", "similarity"):
            found[query] = getattr(strategy, query)()
        return found

    for step in range(30):
        before = bits(strategy.state_dict())
        first = ask()
        answers = bits(first)
        said |= {query for query in ("refresh", "urgent") if first[query]}
        assert bits(ask()) == answers and bits(ask()) == answers
        assert bits(strategy.state_dict()) == before
        answer(server, training, step)
    assert said == {"pace": {"refresh"}, "port": {"urgent"}}.get(name, said)


def test_queries_leave_no_trace_in_what_follows(name):
    """As one that is never asked."""
    asked, training = server_for(STRATEGIES.create(EAGER.get(name, name)))
    alone, others = server_for(STRATEGIES.create(EAGER.get(name, name)))
    for step in range(20):
        asked.strategy.refresh(asked.in_flight())
        asked.strategy.urgent(asked.in_flight())
        for client in range(len(SAMPLES)):
            asked.strategy.vectors_for(client)
            asked.strategy.serve(client)
            asked.strategy.task(client)
        assert bits(list(map(vars, answer(asked, training, step)))) == bits(
            list(map(vars, answer(alone, others, step)))
        )
    assert bits(asked.state_dict()) == bits(alone.state_dict())


@pytest.mark.parametrize("stop", [1, 7, 20])
def test_state_survives_the_disk_at_any_moment(name, stop, tmp_path):
    server, training = server_for(STRATEGIES.create(name))
    for step in range(stop):
        answer(server, training, step)
    save_state(tmp_path / "state", server.state_dict())
    for step in range(stop, 30):
        answer(server, training, step)

    again, training = server_for(STRATEGIES.create(name))
    for step in range(stop):
        answer(again, training, step)  # only to have the same messages on the wire
    fresh, _ = server_for(STRATEGIES.create(name))
    fresh.load_state_dict(load_state(tmp_path / "state"))
    for step in range(stop, 30):
        answer(fresh, training, step)
    assert (fresh.updates, fresh.version) == (server.updates, server.version)
    for ours, theirs in zip(models(fresh), models(server), strict=True):
        assert torch.equal(ours, theirs)


# -- in the simulator -----------------------------------------------------------------------------


def simulator(name, small, seed=0, **options):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        module = nn.Sequential(nn.Flatten(), nn.Linear(12, 4))
    # thresholds that make multicasts and urgent requests happen in a small run
    eager = {"pace": "pace:omega=20", "echopfl": EAGER["echopfl"]}
    name = (eager | {"port": "port:bound=1,buffer_size=2"}).get(name, name)
    name += ":share=0.1" if name.startswith("knn-per") else ""  # neighbours need no training
    return Simulator(
        small,
        module,
        STRATEGIES.create(name),
        task=Task(epochs=2, batch_size=8, lr=0.05),
        devices=TwoSpeed(factor=9.0),
        eval_every=10,
        adapt_epochs=1,
        seed=seed,
        check=True,
        **options,
    )


def finish(simulation, updates=60):
    log = []
    simulation.observers.append(lambda event: log.append(as_dict(event)))
    simulation.run(updates)
    clients = range(simulation.federation.clients)
    final = torch.stack([simulation.strategy.model_for(client) for client in clients])
    return log, simulation.history, final, simulation.fingerprint


def same(a, b):
    return a[0] == b[0] and a[1] == b[1] and torch.equal(a[2], b[2]) and a[3] == b[3]


@pytest.fixture(scope="module")
def runs():
    """Of each strategy one run, done once."""
    return {}


@pytest.fixture
def whole(name, small, runs):
    if name not in runs:
        runs[name] = finish(simulator(name, small))
    return runs[name]


def test_same_seed_same_bits_and_another_seed_other_bits(name, small, whole):
    first = finish(simulator(name, small))
    assert same(first, whole)
    assert first[3] != finish(simulator(name, small, seed=1))[3]


@pytest.mark.parametrize("stop", [0, 3, 37])
def test_stopped_and_resumed_is_bit_identical(name, small, stop, whole, tmp_path):
    broken = simulator(name, small)
    log, steps = [], iter(range(10_000))
    broken.observers.append(lambda event: log.append(as_dict(event)))
    assert broken.run(60, stop=lambda: next(steps) == stop) is False
    save_state(tmp_path / "checkpoint", broken.state_dict())
    resumed = simulator(name, small)
    resumed.load_state_dict(load_state(tmp_path / "checkpoint"))
    rest = finish(resumed)
    assert same(whole, (log + rest[0], *rest[1:]))


def test_it_learns(name, small):
    history = finish(simulator(name, small), updates=200)[1]
    assert history[-1]["accuracy"] > history[0]["accuracy"] + 0.05
    assert 0 <= history[-1]["accuracy_worst10"] <= history[-1]["accuracy"] <= 1


# -- privacy, attacks, defences, compression: no strategy knows of them ---------------------------


TELLING = {  # clients upload more than a vector, and it is about their data
    name
    for name in NAMES
    if any(step.uploads and step.tells for step in after(name, 0).task(0).client_steps)
}


def noise(name, *options):
    return () if name in TELLING else (Gaussian(*options),)


def test_guards_that_leave_all_as_it_is_change_nothing(name, small, whole):
    """Nothing is clipped, no noise is added, all numbers are sent, nobody is cut down. What is
    uploaded is taken apart and put together again, which updates."""
    steps = (*noise(name, 1e9, 0.0), TopK(1.0))
    simulation = simulator(name, small, steps=steps, defence=Norm(1e9))
    log, _, final, _ = finish(simulation)
    told = [[e for e in each if e["event"] != "evaluate"] for each in (log, whole[0])]
    assert told[0] == told[1]
    torch.testing.assert_close(final, whole[2], rtol=0, atol=2e-4)
    if simulation.strategy.communicates:
        assert simulation.server.defence.uploads == 60


ALL_SORTS = ("fedavg", "fedbuff", "pace", "descant", "ifca", "casa+", "ace", "scaffold-async")


@pytest.mark.parametrize("name", ALL_SORTS)
def test_guarded_runs_resume_bit_for_bit(name, small, tmp_path):
    options = {"steps": (*noise(name, 1.0, 0.05), TopK(0.3)), "attack": Replay(share=0.25)}

    def made():
        return simulator(name, small, defence=Trimmed(window=6), **options)

    unbroken, broken, steps = made(), made(), iter(range(10_000))
    whole, log = finish(unbroken, 30), []
    broken.observers.append(lambda event: log.append(as_dict(event)))
    assert broken.run(30, stop=lambda: next(steps) == 21) is False
    save_state(tmp_path / "checkpoint", broken.state_dict())
    resumed = made()
    resumed.load_state_dict(load_state(tmp_path / "checkpoint"))
    rest = finish(resumed, 30)
    assert same(whole, (log + rest[0], *rest[1:]))
    assert resumed.server.defence.changed > 0
    for told in {"attack", "defence", "privacy"} - ({"privacy"} if name in TELLING else set()):
        assert resumed.extensions[told].figures() == unbroken.extensions[told].figures()


@only(TELLING)
def test_what_would_leave_without_noise_is_refused(name, small):
    with pytest.raises(PolytempoError, match=f"^{re.escape(name)} .* to which no noise is added"):
        simulator(name, small, steps=(Gaussian(1.0, 1.0),))


# -- optimizers ------------------------------------------------------------------------------------


def served(spec: str | Strategy, **task) -> Server:
    context = Context(INITIAL.clone(), SAMPLES, Task(**task), seed=3)
    return Server(STRATEGIES.create(spec), context)


UPLOAD_GRADIENTS = {name for name in NAMES if served(name).strategy.task(0).upload == "gradient"}


@only(UPLOAD_GRADIENTS)
@pytest.mark.parametrize("optimizer", ["adam", "adamw"])
def test_where_a_gradient_is_uploaded_an_optimizer_that_could_not_act_is_refused(name, optimizer):
    message = f"^{name} has its clients upload a gradient.* use --optimizer sgd, not {optimizer}$"
    with pytest.raises(PolytempoError, match=message):
        served(name, optimizer=optimizer)
    served(name, keep_optimizer=True)  # a client's own part has moments to keep


@only(UPLOAD_GRADIENTS - {"fedsgd", "ace-incremental"})
def test_so_it_is_where_some_steps_of_plain_sgd_stand_for_gradients(name):
    with pytest.raises(PolytempoError, match=f"^{name} derives .* use --optimizer sgd, not adam$"):
        served(f"{name}:local_steps=3", optimizer="adam")
    served(f"{name}:local_steps=3", keep_optimizer=True)  # they have no momentum


SGD_ALONE = {"fedac", "scaffold", "scaffold-async", "per-fedavg", "per-fedavg-async"} & set(NAMES)


@only(SGD_ALONE)
def test_a_method_that_is_about_sgd_says_so(name):
    with pytest.raises(PolytempoError, match=f"^{name} .*use --optimizer sgd, not adam$"):
        served(name, optimizer="adam")


@only(set(NAMES) - UPLOAD_GRADIENTS - SGD_ALONE)
def test_where_clients_train_their_optimizer_is_the_one_that_was_asked_for(name):
    """Some see to more weight decay, and say so in an option."""
    strategy = served(name, optimizer="adam").strategy
    decay = max(Adam().weight_decay, getattr(strategy, "weight_decay", 0.0))
    assert strategy.task(0).optimizer == Adam(weight_decay=decay)


def test_the_rule_holds_for_a_users_own_strategy():
    class Own(FedAvg):
        def task(self, client):
            return replace(super().task(client), upload="gradient")

    with pytest.raises(PolytempoError, match=r"Own has its clients upload a gradient"):
        served(Own(), optimizer="adam")
