"""The benchmark measures what it says it measures."""

import functools
import json

import numpy as np
import pytest
import torch
from torch import nn
from typer.testing import CliRunner

import polytempo.bench.scale as scale
import polytempo.bench.suite as suite
import polytempo.strategies.casa as casa
from polytempo import Federation
from polytempo.bench.cases import CASES, CLIENTS
from polytempo.bench.clusters import growth, measure_clusters
from polytempo.bench.machine import gemm_gflops, reading
from polytempo.bench.plain import STALENESS, PlainLoop
from polytempo.bench.scale import measure_scale
from polytempo.bench.server import measure_server
from polytempo.bench.training import STRATEGIES_AND_LOOPS, measure_training
from polytempo.cli import app
from polytempo.core.messages import Staleness, Update
from polytempo.core.strategy import Context
from polytempo.core.task import Task
from polytempo.models import Inputs, build
from polytempo.strategies import STRATEGIES
from polytempo.strategies.splitting import stays_whole
from polytempo.training import AutogradSolver, Exam
from solving import HAS_COMPILER


@pytest.fixture(scope="module")
def federation():
    return Federation.load("synthetic:features=12,samples=40", clients=6)


@pytest.mark.parametrize("name", STRATEGIES_AND_LOOPS)
def test_the_plain_server_does_the_arithmetic_of_our_strategy(federation, name):
    """Two codes that share nothing but the projection fold the same uploads alike."""
    spec, loop = STRATEGIES_AND_LOOPS[name]
    plain = loop(nn.Linear(12, 10), federation, lr=0.1)
    ours = STRATEGIES.create(spec)
    ours.setup(Context(plain.initial, federation.samples, Task(), 0))
    draws = np.random.default_rng(0)
    for number in range(40):
        client = int(draws.integers(6))
        theta = plain.initial + torch.from_numpy(draws.standard_normal(130)).float()
        plain.fold(client, theta)
        ours.fold(Update(client, number, theta, 1), Staleness(STALENESS, STALENESS))
    for client in range(6):
        model = ours.model_for(client)
        torch.testing.assert_close(plain.moved[client] + plain.initial, model, rtol=1e-4, atol=1e-5)
    if name == "pace":
        np.testing.assert_allclose(ours.collaboration(), plain.weights, atol=1e-6)


@pytest.mark.parametrize("name", CASES)
def test_both_sides_train_the_same_network_on_the_same_data(name):
    case = CASES[name]
    federation = case.federation()
    assert federation.clients == CLIENTS
    assert 300 <= min(federation.samples) <= max(federation.samples) <= 450
    inputs = Inputs(federation.shape, federation.classes, federation.vocabulary)
    ours, theirs = build(case.model, inputs, 0), case.plain()
    assert [p.shape for p in ours.parameters()] == [p.shape for p in theirs.parameters()]
    with torch.no_grad():
        for mine, other in zip(ours.parameters(), theirs.parameters(), strict=True):
            mine.copy_(other)
        x = federation.prepare(federation.x[:8])
        torch.testing.assert_close(ours.eval()(x), theirs.eval()(x), rtol=1e-4, atol=1e-5)


def test_plain_training_descends_as_ours_does(federation):
    """The orders of the samples differ, the loss that is reached hardly."""
    torch.manual_seed(0)
    plain = PlainLoop(nn.Linear(12, 10), federation, lr=0.05)
    trainer = AutogradSolver(nn.Linear(12, 10), federation, 0)
    before = trainer.evaluate(Exam(plain.initial, [0]))[0].sums["loss"]
    after = trainer.evaluate(Exam(plain.train(0), [0]))[0].sums["loss"]
    assert after < 0.8 * before


def test_training_figures_fit_together(monkeypatch):
    monkeypatch.setattr("polytempo.bench.cases.CLIENTS", 12)
    found = measure_training("mlp", workers=2, repeats=2, arrivals=3)
    assert found["backend"].startswith("native on 2" if HAS_COMPILER else "torch on 2")
    assert found["parameters"] == 900 * 300 + 300 + 300 * 5 + 5
    assert list(found["ratios"]) == list(found["plain_ms"]) == ["1", "2"]
    for threads, ratios in found["ratios"].items():
        assert len(ratios) == 2 and min(ratios) <= found["ratio"][threads] <= max(ratios)
    products = 2 * (900 * 300 + 300 * 5) * 2 + 2 * 300 * 5  # no gradient for the inputs
    assert 300 * 5 * products <= 1e9 * found["gflop_per_update"] <= 450 * 5 * products
    parts = ("waiting_for_training_ms", "server_ms", "evaluation_ms")
    assert 0 < sum(found[part] for part in parts) <= 1.2 * found["ours_ms"]


def test_server_figures_fit_together():
    found = measure_server(30, 2_000, 20, "half", repeats=3)
    assert (found["clients"], found["uploads"], found["bank"]) == (30, 20, "half")
    for way in ("torch_ms", "compiled_ms"):
        assert list(found[way]) == ["1", "2"] and min(found[way].values()) > 0
    assert found["read_ms"] > 0 and found["peak_mb"] > 0
    assert 1 / 30 <= found["touched"] <= 1  # at least the client itself


def test_reading_more_takes_longer_and_beyond_the_most_in_proportion():
    assert reading(2**24) > reading(2**16)
    assert reading(2**26, most=2**16) > 100 * reading(2**16, most=2**16)
    assert gemm_gflops(64) > 0


def test_scale_runs_the_command_in_a_process_of_its_own(monkeypatch):
    found = measure_scale(20, workers=1, updates=5)
    assert found["clients"] == 20 and found["updates"] == 5
    assert found["parameters"] == 32 * 1440 + 1440 + 1440 * 10 + 10
    assert found["peak_mb"] > 100
    monkeypatch.setattr(scale.sys, "executable", "/bin/false")
    with pytest.raises(RuntimeError, match="polytempo run"):
        measure_scale(20, workers=1, updates=5)


def test_the_command_prints_tables_and_writes_json(monkeypatch, tmp_path):
    monkeypatch.setattr(suite, "SIZES", ((10, 500, 10),))
    monkeypatch.setattr(suite, "BANKS", ["int8"])
    monkeypatch.setattr(suite, "BOOKS", ((50, 5, 30),))
    monkeypatch.setattr(suite, "CLIENTS", (20,))
    monkeypatch.setattr(suite, "measure_scale", functools.partial(measure_scale, updates=3))
    file = tmp_path / "bench.json"
    done = CliRunner().invoke(app, ["bench", "server", "scale", "--out", str(file)])
    assert done.exit_code == 0, done.output
    assert "10 x 500, int8" in done.output and "GFLOP/s" in done.output and "MB" in done.output
    found = json.loads(file.read_text())
    assert [row["clients"] for row in found["server"] + found["scale"]] == [10, 20]
    [books] = found["bookkeeping"]
    assert (books["clients"], books["concurrency"], books["arrivals"]) == (50, 5, 30)
    assert 0 < books["arrival_us"] <= books["slowest_us"] and books["peak_mb"] >= 0
    assert "50 clients, concurrency 5" in done.output
    assert found["training"] == [] and found["machine"]["gemm_gflops"] > 0


def test_a_wrong_part_or_folder_is_said_at_once(tmp_path):
    wrong = CliRunner().invoke(app, ["bench", "lennet"])
    assert "lennet" in str(wrong.exception) and "'lenet'" in str(wrong.exception)
    nowhere = CliRunner().invoke(app, ["bench", "--out", str(tmp_path / "no" / "x.json")])
    assert "there is no folder" in str(nowhere.exception)


def test_casas_step_is_measured_at_its_most_expensive(monkeypatch):
    calls = []

    def counting(alike, needed):
        calls.append(len(alike))
        return stays_whole(alike, needed)

    monkeypatch.setattr(casa, "stays_whole", counting)
    row = measure_clusters(12, 30, repeats=3)
    assert calls == [12] * 4  # on every arrival, of the whole cluster
    assert row["fold_ms"] > 0 and row["spectrum_ms"] > 0


def test_growth_is_the_exponent():
    rows = [{"clients": n, "fold_ms": 3e-4 * n**1.7} for n in (100, 400)]
    assert growth(rows) == pytest.approx(1.7)
