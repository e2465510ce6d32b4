"""Federated training of adapters over a frozen transformer: in the simulator and deployed."""

import json

import numpy as np
import pytest
import torch
from safetensors import safe_open
from torch.nn import functional

from fleets import run_fleet
from polytempo import Federation, PolytempoError, simulate
from polytempo.core.layout import Layout, Parts
from polytempo.core.optimizer import AdamW
from polytempo.core.task import Task
from polytempo.experiments.config import make_config
from polytempo.experiments.fleet_plan import make_node, undertaking
from polytempo.experiments.fleet_settings import alone, for_fleet, known
from polytempo.experiments.fleet_trainer import SolverTrainer
from polytempo.experiments.world import make_simulator
from polytempo.models import Inputs, build, tokenizer, trained_parts
from polytempo.training import AutogradSolver, Job, problem_for
from tiny_bert import WORDS, needs_transformers, text_federation, texts, write_bert

pytestmark = needs_transformers
LORA = "lora:r=2,alpha=4"
ADAPTERS = 2 * 2 * (2 * 32 + 32 * 2) + 32 * 4 + 4  # layers, query and value, A and B; head
QUICK = {
    "strategy": "fedavg",
    "trainable": LORA,
    "optimizer": "adamw",
    "lr": 1e-2,
    "epochs": 1,
    "batch_size": 8,
    "concurrency": 2,
    "updates": 6,
    "eval_every": 3,
    "adapt_epochs": 0,
    "backend": "serial",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_bert(tmp_path_factory.mktemp("bert"))


@pytest.fixture
def model(folder):
    return f"hf:{folder}"


@pytest.fixture
def federation(model):
    return text_federation(model)


def simulator_of(model, federation, **settings):
    config = make_config({**QUICK, **settings})
    return make_simulator(config, federation, model)


def frozen_numbers(module):
    return {n: p.detach().clone() for n, p in module.named_parameters() if not p.requires_grad}


# -- the arithmetic -------------------------------------------------------------------------------


@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
def test_local_training_is_that_of_plain_torch_and_peft(folder, model, federation, optimizer):
    """Our session against a loop of torch's own optimizer over a model that peft itself has made,
    in evaluation mode, for dropout draws from a stream of ours."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForSequenceClassification

    module = build(model, Inputs.of(federation), 0, LORA)
    for part in module.modules():
        if isinstance(part, torch.nn.Dropout):
            part.p = 0.0
    solver = AutogradSolver(module, federation, 0, Parts(trained=trained_parts(LORA)))
    for layer in module.network.bert.encoder.layer:  # dropout inside of attention, too
        layer.attention.self.dropout_prob = 0.0
    module.network.config.attention_probs_dropout_prob = 0.0
    task = Task(epochs=2, batch_size=8, lr=5e-3)
    if optimizer == "adamw":
        task = Task(epochs=2, batch_size=8, lr=5e-3, optimizer=AdamW(weight_decay=0.1))
    job = Job(1, solver.layout.read(), task, ("client", 1, "dispatch", 0))
    session = solver.begin(job)
    order = [session.rows(step) for step in range(session.last)]
    session.advance()
    ours = solver.layout.state(session.finish().upload)

    zero = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    plain = AutoModelForSequenceClassification.from_pretrained(folder, num_labels=4, **zero)
    config = LoraConfig(r=2, lora_alpha=4, target_modules=["query", "value"], task_type="SEQ_CLS")
    theirs = get_peft_model(plain, config)
    begin = {}  # by what their names have in common
    first = build(model, Inputs.of(federation), 0, LORA)
    for name, value in first.named_parameters():
        begin[name.removeprefix("network.")] = value.detach()
    kept = {}
    for name, parameter in theirs.named_parameters():
        if parameter.requires_grad:
            short = name.removeprefix("base_model.model.").replace("modules_to_save.default.", "")
            kept[short] = parameter
            parameter.data.copy_(begin[short])
    assert sum(p.numel() for p in kept.values()) == ADAPTERS
    step = torch.optim.SGD(kept.values(), lr=5e-3, momentum=0.9, weight_decay=1e-4)
    if optimizer == "adamw":
        step = torch.optim.AdamW(kept.values(), lr=5e-3, weight_decay=0.1)
    x, y = (part[federation.train[1]] for part in (federation.x, federation.y))
    theirs.train()
    for rows in order:
        given = {"input_ids": (x[rows] - 1).clamp(0), "attention_mask": (x[rows] != 0).long()}
        step.zero_grad()
        functional.cross_entropy(theirs(**given).logits, y[rows]).backward()
        step.step()
    for name, parameter in kept.items():
        found = ours[f"network.{name}"]
        moved = (found - begin[name]).abs().max()
        assert moved > 1e-5, f"{name} has been trained"
        assert torch.allclose(found, parameter.detach(), atol=0.01 * float(moved)), name


def test_fedavg_averages_what_clients_have_trained(model, federation):
    """One cohort of two clients: the mean of their adapters, by their samples."""
    simulator = simulator_of(model, federation, updates=2, concurrency=2)
    simulator.run(2)
    solver = AutogradSolver(
        build(model, Inputs.of(federation), 0, LORA), federation, 0, simulator.backend.solver.parts
    )
    task = make_config(QUICK).task()
    begin = solver.layout.read()
    sent = _dispatched(model, federation)
    uploads = [solver.carry_out(Job(c, begin, task, ("client", c, "dispatch", n))) for c, n in sent]
    weights = torch.tensor([float(federation.samples[client]) for client, _ in sent])
    mean = sum(w * found.upload for w, found in zip(weights / weights.sum(), uploads, strict=True))
    assert torch.allclose(simulator.strategy.model_for(0), mean, atol=1e-6)
    assert not torch.allclose(mean, begin, atol=1e-3)


def _dispatched(model, federation):
    simulator = simulator_of(model, federation, updates=2, concurrency=2)
    found = []

    def observe(event):
        if type(event).__name__ == "Dispatch":
            found.append((event.client, event.dispatch))

    simulator.observers.append(observe)
    simulator.run(2)
    return found[:2]


# -- what is frozen -------------------------------------------------------------------------------


@pytest.mark.parametrize("strategy", ["fedavg", "pace", "fedper", "ditto", "fedsac", "ace", "p2p"])
def test_frozen_numbers_stay_and_never_travel(model, federation, strategy):
    own = {"optimizer": "sgd"} if strategy == "ace" else {}
    given = QUICK | own
    if strategy == "p2p":
        given = {name: given[name] for name in ("trainable", "optimizer", "backend", "updates")}
    config = make_config({**given, "strategy": strategy})
    simulator = make_simulator(config, federation, model)
    module = simulator.layout.module
    before = frozen_numbers(module)
    assert sum(value.numel() for value in before.values()) > 10_000
    simulator.run(6)
    after = frozen_numbers(module)
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    personal = 32 * 4 + 4 if strategy == "fedper" else 0
    assert simulator.layout.size == ADAPTERS - personal


def test_a_message_has_the_size_of_the_adapters(model, federation, tmp_path):
    simulate(federation, model=model, out=tmp_path / "run", **QUICK)
    found = json.loads((tmp_path / "run" / "result.json").read_text())
    sent = found["messages"]
    assert found["parameters"] == ADAPTERS and sent["upload"] == 6
    for kind in ("upload", "dispatch"):
        assert sent[f"{kind}_bytes"] == sent[kind] * ADAPTERS * 4
    with safe_open(tmp_path / "run" / "checkpoint.safetensors", "pt") as kept:
        sizes = [kept.get_tensor(name).numel() for name in kept.keys()]  # noqa: SIM118
    assert sum(sizes) < 10_000, "the checkpoint has no backbone, which has 20,000 numbers"


def test_the_model_of_a_client_is_whole(model, federation):
    result = simulate(federation, model=model, **QUICK)
    fresh = build(model, Inputs.of(federation), 5, LORA).eval()
    fresh.load_state_dict(result.model(client=0))
    ours = result.simulator.layout.module.eval()
    assert torch.equal(fresh(federation.x[:4]), ours(federation.x[:4]))


def test_adapters_learn(model):
    federation = text_federation(model, clients=2, count=120)
    settings = QUICK | {"updates": 8, "epochs": 3, "eval_every": 8, "lr": 0.03}
    result = simulate(federation, model=f"{model}:pooling=mean", **settings)
    assert result.accuracy > 0.5, "guessing is 25%"


# -- runs -----------------------------------------------------------------------------------------


def test_workers_change_nothing(model, federation):
    serial = simulate(federation, model=model, **QUICK)
    settings = QUICK | {"backend": "processes", "workers": 2}
    assert simulate(federation, model=model, **settings).fingerprint == serial.fingerprint


def test_a_resumed_run_is_the_run_that_was_never_stopped(model, federation, tmp_path, folder):
    settings = QUICK | {"keep_optimizer": True, "strategy": "fedbuff:buffer_size=2"}
    whole = simulate(federation, model=model, out=tmp_path / "whole", **settings)
    part = settings | {"updates": 3}
    simulate(federation, model=model, out=tmp_path / "part", **part)
    resumed = simulate(federation, model=model, out=tmp_path / "part", resume=True, **settings)
    assert resumed.fingerprint == whole.fingerprint
    one, other = whole.model(client=0), resumed.model(client=0)
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_another_backbone_does_not_resume_a_run(federation, model, tmp_path):
    mine = write_bert(tmp_path / "bert")
    simulate(federation, model=f"hf:{mine}", out=tmp_path / "run", **QUICK | {"updates": 2})
    write_bert(mine, seed=1)
    with pytest.raises(PolytempoError, match="another frozen part"):
        simulate(federation, model=f"hf:{mine}", out=tmp_path / "run", resume=True, **QUICK)


# -- deployed -------------------------------------------------------------------------------------


@pytest.fixture
def data(tmp_path):
    """A file of texts, of which 128 tokens are kept."""
    x, y = texts()
    np.savez(tmp_path / "texts.npz", X=np.array(x), y=y)
    return str(tmp_path / "texts.npz")


FLEET = {"partition": "iid", "clients": 2, "updates": 4, "eval_every": 2, "adapt_epochs": 0}


def test_a_fleet_trains_adapters(model, data, tmp_path):
    settings = {"data": data, "model": model, "trainable": LORA, "strategy": "fedasync"}
    outcome = run_fleet(tmp_path / "fleet", own_model=True, **FLEET, **settings)
    assert not outcome.failed and outcome.result.summary["complete"]
    assert outcome.result.summary["parameters"] == ADAPTERS
    with safe_open(tmp_path / "fleet" / "client-0" / "model.safetensors", "pt") as kept:
        names = set(kept.keys())
    assert names and all("lora" in name or "classifier" in name for name in names)


def welcomed(server_model, client_model, data, trainable=LORA):
    """A client with this model, told of the run of a server with that one."""
    config = make_config({**FLEET, "data": data, "model": server_model, "trainable": trainable})
    strategy = for_fleet(config)
    complete, samples = known(config, strategy)
    run = make_node(undertaking(complete, samples, strategy)).plan.run
    x, y = texts()
    read_by = tokenizer(client_model)
    mine = Federation.from_pool(x, y, clients=2, partition="iid", tokenizer=read_by)
    trainer = SolverTrainer(alone(mine, 0), problem_for(mine), model=client_model)
    trainer.welcome(run)
    return trainer


def test_a_client_with_another_backbone_is_refused(model, data, tmp_path):
    folders = {name: tmp_path / name for name in ("same", "other", "words")}
    write_bert(folders["same"])
    write_bert(folders["other"], seed=1)
    write_bert(folders["words"], words=WORDS[::-1])
    same, other, words = (f"hf:{folder}" for folder in folders.values())
    assert welcomed(model, same, data).solver is not None
    with pytest.raises(PolytempoError, match=r"frozen part .* other weights"):
        welcomed(model, other, data)
    with pytest.raises(PolytempoError, match="made tokens by the tokenizer"):
        welcomed(model, words, data)


def test_layouts_with_other_frozen_numbers_are_told_apart(model, federation, tmp_path):
    inputs = Inputs.of(federation)
    other = write_bert(tmp_path, seed=1)
    parts = Parts(trained=trained_parts("head"))
    one, same, apart = (Layout(build(m, inputs, 0), parts) for m in (model, model, f"hf:{other}"))
    assert one.digest == same.digest != apart.digest
    assert Layout(build(model, inputs, 0)).digest == Layout(build(f"hf:{other}", inputs, 0)).digest
