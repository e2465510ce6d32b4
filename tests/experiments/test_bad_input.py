"""Mistakes of the user's: one line that says what to do, and nothing is harmed."""

import json
import re
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import polytempo as pt
from polytempo.experiments.config import make_config, read_config
from polytempo.experiments.result_folder import read_result

TINY = ("--clients", 6, "--limit", 120, "--model", "linear", "--epochs", 1, "--events")

OWN = '''
from typing import ClassVar

import torch

from polytempo import STRATEGIES, Context, Staleness, Strategy, Update


class Mine(Strategy):
    """Mixes every update into one model; spoils it with the `poison`-th."""

    mixing: float = 0.5
    poison: int = -1
    state: ClassVar = ("model", "count")

    def setup(self, context: Context) -> None:
        super().setup(context)
        self.model, self.count = context.initial, 0

    def model_for(self, client: int) -> torch.Tensor:
        return self.model

    def fold(self, update: Update, staleness: Staleness) -> bool:
        self.count += 1
        self.model = torch.lerp(self.model, update.vector, self.mixing)
        if self.count == self.poison:
            self.model = self.model * float("nan")
        return True


@STRATEGIES.register("my-registered")
class Registered(Mine):
    """The same under a name."""


class Stranger:
    """No strategy at all."""


def network() -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 10))
'''


@pytest.fixture
def own(tmp_path, monkeypatch):
    """A module of the user's own, importable in this test alone."""
    folder = tmp_path / "code"
    folder.mkdir()
    (folder / "own_strategies.py").write_text(OWN)
    monkeypatch.syspath_prepend(folder)
    yield "own_strategies"
    forget()


def forget() -> None:
    """As if in a new process."""
    sys.modules.pop("own_strategies", None)
    pt.STRATEGIES._known.pop("my-registered", None)


def summary(folder: Path) -> dict:
    return json.loads((folder / "result.json").read_text())


# -- data -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--data", "digit"), ["digit", "did you mean 'digits'"]),
        (("--data", "nonsense"), ["nonsense", "digits", "synthetic"]),
        (("--data", "synthetic:group=3"), ["group", "groups"]),
        (("--data", "mnist"), ["mnist.npz", "POLYTEMPO_DATA", "--data-dir"]),
        (("--data", "cifar10"), ["cifar10_train.npz", "POLYTEMPO_DATA", "--data-dir"]),
        (("--data", "mnist", "--data-dir", "/nowhere"), ["mnist.npz", "/nowhere", "--data-dir"]),
        (("--data", "mine.npz"), ["mine.npz", "no such file"]),
        (("--data", "./mine"), ["mine", "no such file or folder"]),
        (("--clients", 5000), ["5000", "1797"]),
        (("--limit", 5, "--clients", 6), ["6", "5"]),
        (("--limit", 5), ["20", "5"]),
        (("--clients", 4, "--concurrency", 9), ["concurrency", "4", "9"]),
        (("--partition", "natural"), ["natural", "users"]),
        (("--model", "lenet"), ["lenet", "16x16", "(1, 8, 8)", "mlp"]),
        (("--model", "textcnn"), ["textcnn"]),
        (("--dropout", "trace:path=/nowhere.csv"), ["/nowhere.csv"]),
        (("--dropout", "leave"), ["leave", "at"]),
        (("--network", "uniform"), ["uniform", "low"]),
    ],
)
def test_what_cannot_be_run_is_one_line_and_no_folder(arguments, words, polytempo, tmp_path):
    for command in (["run"], ["compare", "fedavg"]):
        error = polytempo(*command, *arguments, "--out", tmp_path / "out").error
        assert all(str(word) in error for word in words), error
        assert not re.search(r"\bpydantic|ArgsKwargs|Error\b", error), error
    assert not (tmp_path / "out" / "config.toml").exists()
    assert list(tmp_path.rglob("*.toml")) == []


def test_a_folder_from_the_environment_is_named(polytempo, tmp_path, monkeypatch):
    monkeypatch.setenv("POLYTEMPO_DATA", str(tmp_path))
    error = polytempo("run", "--data", "uci_har", "--out", tmp_path / "out").error
    assert str(tmp_path) in error
    assert "uci_har.npz" in error


def test_a_damaged_file_of_the_users_own_is_named(polytempo, tmp_path):
    file = tmp_path / "mine.npz"
    file.write_bytes(b"no archive")
    assert "mine.npz" in polytempo("run", "--data", file, "--out", tmp_path / "out").error
    np.savez(file, X=np.zeros((40, 3), dtype=np.float32))
    error = polytempo("run", "--data", file, "--out", tmp_path / "out").error
    assert "lacks y" in error
    X = np.full((40, 3), np.nan, dtype=np.float32)
    np.savez(file, X=X, y=np.arange(40) % 2)
    assert "NaN" in polytempo("run", "--data", file, "--out", tmp_path / "out").error


@pytest.mark.parametrize(("samples", "clients"), [(5, 3), (6, 6)])
def test_clients_without_test_samples_make_no_nan(samples, clients, polytempo, tmp_path):
    """A client with one sample only trains on it: nothing is left to test it on."""
    arguments = ("--limit", samples, "--clients", clients, "--partition", "iid", "--updates", 3)
    outcome = polytempo("run", *arguments, "--out", tmp_path / "run", "--json")
    if outcome.code == 2:  # to refuse would be as good
        assert "sample" in outcome.error
    else:
        assert 0 <= outcome.json["accuracy"] <= 1


# -- folders --------------------------------------------------------------------------------------


@pytest.mark.parametrize("command", [["run"], ["compare", "fedavg"]])
def test_a_file_cannot_be_the_folder_of_a_run(command, polytempo, tmp_path):
    (tmp_path / "file").write_text("precious")
    error = polytempo(*command, *TINY, "--updates", 3, "--out", tmp_path / "file").error
    assert str(tmp_path / "file") in error
    assert (tmp_path / "file").read_text() == "precious"


def test_a_folder_that_cannot_be_made_is_one_line(polytempo):
    assert "/proc/mine" in polytempo("run", *TINY, "--updates", 3, "--out", "/proc/mine").error


# -- a strategy of the user's own -----------------------------------------------------------------


def test_a_strategy_of_the_users_own_runs_and_resumes(own, polytempo, tmp_path):
    name = f"{own}:Mine:mixing=0.25"
    arguments = ("run", *TINY, "--strategy", name)
    assert polytempo(*arguments, "--updates", 30, "-o", tmp_path / "whole").code == 0
    assert polytempo(*arguments, "--updates", 10, "--eval-every", 1, "-o", tmp_path / "a").code == 0
    config = read_config(tmp_path / "whole" / "config.toml")
    assert config["strategy"] == {"name": f"{own}:Mine", "mixing": 0.25, "poison": -1}
    assert summary(tmp_path / "whole")["strategy"] == f"{own}:Mine"
    forget()
    assert polytempo("run", "--resume", tmp_path / "a", "--updates", 30).code == 0
    assert summary(tmp_path / "a")["fingerprint"] == summary(tmp_path / "whole")["fingerprint"]


def test_a_registered_strategy_of_the_users_own_resumes_in_a_new_process(own, polytempo, tmp_path):
    name = f"{own}:Registered"
    assert (
        polytempo("run", *TINY, "--strategy", name, "--updates", 5, "-o", tmp_path / "a").code == 0
    )
    forget()
    assert polytempo("run", "--resume", tmp_path / "a", "--updates", 9).code == 0
    forget()
    config = tmp_path / "a" / "config.toml"
    assert polytempo("run", "-c", config, "-o", tmp_path / "b").code == 0


def test_a_strategy_of_the_users_own_can_be_compared(own, polytempo, tmp_path):
    tiny = (*TINY, "--updates", 6, "-o", tmp_path / "out", "--json")
    outcome = polytempo("compare", f"{own}:Mine", f"{own}:Mine:mixing=0.1", "fedavg", *tiny)
    assert len({found["fingerprint"] for found in outcome.json}) == 3


def test_a_network_of_the_users_own_is_named_by_its_module(own, polytempo, tmp_path):
    arguments = ("--clients", 6, "--limit", 120, "--updates", 4, "--model", f"{own}:network")
    assert polytempo("run", *arguments, "-o", tmp_path / "a").code == 0
    assert summary(tmp_path / "a")["parameters"] == 650
    forget()
    assert polytempo("run", "--resume", tmp_path / "a", "--updates", 6).code == 0


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("nowhere_to_be_found:Mine", ["nowhere_to_be_found", "PYTHONPATH"]),
        ("own_strategies:Yours", ["own_strategies", "Yours"]),
        ("own_strategies:Mine:mixxing=1", ["mixxing", "mixing"]),
        ("own_strategies:Mine:mixing=much", ["mixing", "much"]),
        ("own_strategies:Stranger", ["Stranger"]),
    ],
)
def test_a_wrong_class_of_the_users_own_is_one_line(own, name, words, polytempo, tmp_path):
    error = polytempo("run", *TINY, "--strategy", name, "-o", tmp_path / "out").error
    assert all(word in error for word in words), error
    assert not (tmp_path / "out").exists()


# -- training that goes wrong ---------------------------------------------------------------------


@pytest.mark.parametrize("strategy", ["pace", "fedavg", "fedasync", "standalone"])
def test_a_diverging_training_says_what_to_do(strategy, polytempo, tmp_path):
    given = ("--clients", 6, "--limit", 120, "--updates", 12, "--lr", 1e9, "--strategy", strategy)
    error = polytempo("run", *given, "-o", tmp_path / "run").error
    assert "NaN or infinite" in error
    assert "lower the learning rate" in error
    assert re.search(r"update \d+", error)
    assert not (tmp_path / "run" / "result.json").exists()


def test_a_strategy_that_spoils_its_model_harms_nothing_earlier(own, polytempo, tmp_path):
    arguments = ("run", *TINY, "--eval-every", 5, "--strategy", f"{own}:Mine:poison=20")
    folder = tmp_path / "run"
    assert polytempo(*arguments, "--updates", 10, "-o", folder).code == 0
    kept = {
        name: (folder / name).read_bytes() for name in ("checkpoint.safetensors", "result.json")
    }
    assert "NaN" in polytempo("run", "--resume", folder, "--updates", 60).error
    for name, content in kept.items():
        assert (folder / name).read_bytes() == content
    assert polytempo("run", "--resume", folder, "--updates", 15).code == 0
    assert polytempo(*arguments, "--updates", 15, "-o", tmp_path / "whole").code == 0
    log = (folder / "events.jsonl").read_bytes()
    assert log == (tmp_path / "whole" / "events.jsonl").read_bytes()


def test_a_comparison_that_diverges_keeps_what_is_finished(polytempo, own, tmp_path):
    tiny = (*TINY, "--updates", 30, "-o", tmp_path / "out")
    outcome = polytempo("compare", "fedavg", f"{own}:Mine:poison=3", *tiny)
    assert outcome.code == 2
    assert "NaN" in outcome.err
    assert "fedavg" in outcome.out
    assert summary(tmp_path / "out" / "fedavg" / "seed0")["complete"] is True


# -- Python ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def federation() -> pt.Federation:
    dirichlet = pt.partition.Dirichlet(0.1)
    return pt.Federation.load("digits", clients=6, partition=dirichlet, seed=0, limit=300)


def accuracy_of(module: nn.Module, federation: pt.Federation, client: int) -> float:
    rows = federation.test[client]
    module.eval()
    with torch.no_grad():
        logits = module(federation.prepare(federation.x[rows]))
    return float((logits.argmax(1) == federation.y[rows]).float().mean())


def network() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(144, 10)
    )


def test_the_example_of_the_design(federation, tmp_path):
    result = pt.simulate(federation, model="mlp", strategy=pt.strategies.PACE(), updates=20)
    assert 0.3 < result.accuracy <= 1
    assert result.accuracy_adapted > 0.5
    assert result.time_to(0.0) == 0.0
    assert result.time_to(1.1) is None
    half = result.time_to(result.summary["accuracy_best"])
    assert 0 < half <= result.summary["simulated_time"]
    result.plot(tmp_path / "pace.png")
    assert (tmp_path / "pace.png").read_bytes().startswith(b"\x89PNG")


def test_models_of_a_result_are_those_that_were_measured(federation):
    result = pt.simulate(federation, model=network, strategy="pace", updates=15, eval_every=5)
    measured = []
    for client in range(federation.clients):
        module = network()
        module.load_state_dict(result.model(client))
        measured.append(accuracy_of(module, federation, client))
    assert np.mean(measured) == pytest.approx(result.history[-1]["accuracy"])
    assert np.std(measured) == pytest.approx(result.summary["accuracy_std"])


def test_personal_models_differ_and_shared_ones_do_not(federation):
    personal = pt.simulate(federation, model="linear", strategy="pace", updates=15)
    shared = pt.simulate(federation, model="linear", strategy="fedavg", updates=15)
    [name, *_] = personal.model(0)
    assert not torch.equal(personal.model(0)[name], personal.model(1)[name])
    assert torch.equal(shared.model(0)[name], shared.model(1)[name])


def test_a_federation_of_the_users_own_arrays():
    stream = np.random.default_rng(0)
    clients = []
    for flip in (0, 0, 1, 1):  # two groups with opposite labels
        x = stream.normal(size=(60, 5)).astype(np.float32)
        clients.append((x, (x[:, 0] > 0).astype(int) ^ flip))
    federation = pt.Federation.from_arrays(clients)
    settings = {"model": "linear", "updates": 60, "lr": 0.2, "adapt_epochs": 0}
    personal = pt.simulate(federation, strategy="pace:graph.gamma=20", **settings)
    shared = pt.simulate(federation, strategy="fedavg", **settings)
    assert personal.accuracy > 0.85
    assert shared.accuracy < 0.7
    assert personal.accuracy_adapted is None


def test_the_same_strategy_object_can_be_used_again(federation):
    strategy = pt.strategies.PACE()
    first = pt.simulate(federation, model="linear", strategy=strategy, updates=8)
    again = pt.simulate(federation, model="linear", strategy=strategy, updates=8)
    fresh = pt.simulate(federation, model="linear", strategy="pace", updates=8)
    assert first.summary["fingerprint"] == again.summary["fingerprint"]
    assert first.summary["fingerprint"] == fresh.summary["fingerprint"]


def test_python_and_the_command_do_the_same(federation, polytempo, tmp_path):
    dirichlet = "dirichlet:alpha=0.1"
    outcome = polytempo(
        *("run", "--clients", 6, "--limit", 300, "--partition", dirichlet, "--model", "linear"),
        *("--updates", 8, "-o", tmp_path / "run", "--json"),
    )
    result = pt.simulate(federation, model="linear", updates=8)
    assert result.summary["fingerprint"] == outcome.json["fingerprint"]


def test_a_result_can_be_read_back(federation, tmp_path):
    result = pt.simulate(federation, model="linear", updates=8, out=tmp_path / "run")
    read = read_result(tmp_path / "run")
    assert read.summary == result.summary
    assert read.history == result.history
    assert read.time_to(0.3) == result.time_to(0.3)
    with pytest.raises(pt.PolytempoError, match="no models"):
        read.model(0)


def test_the_folder_of_a_python_run_tells_the_truth(federation, polytempo, tmp_path):
    """Its configuration names the model that was run; resuming it goes on, or says why not."""
    pt.simulate(federation, model="linear", updates=8, out=tmp_path / "run")
    assert make_config(read_config(tmp_path / "run" / "config.toml")).model == "linear"
    before = (tmp_path / "run" / "result.json").read_bytes()
    outcome = polytempo("run", "--resume", tmp_path / "run", "--updates", 12)
    if outcome.code == 2:
        assert str(tmp_path / "run") in outcome.error
        assert (tmp_path / "run" / "result.json").read_bytes() == before
    else:
        whole = pt.simulate(federation, model="linear", updates=12, eval_every=1)
        assert summary(tmp_path / "run")["fingerprint"] == whole.summary["fingerprint"]


def test_a_run_in_which_nothing_arrived_has_no_accuracy_but_no_traceback(
    federation, polytempo, tmp_path
):
    result = pt.simulate(federation, model="linear", updates=5, until=1e-9)
    assert result.summary["arrivals"] == 0
    assert not result.accuracy or np.isnan(result.accuracy)
    given = (*TINY, "--updates", 5, "--until", 1e-9)
    assert polytempo("run", *given, "-o", tmp_path / "run").code == 0
    assert summary(tmp_path / "run")["accuracy"] is None
    assert polytempo("compare", "pace", "fedavg", *given, "-o", tmp_path / "compare").code == 0


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"learning_rate": 0.1}, "learning_rate"),
        ({"concurency": 3}, "did you mean 'concurrency'"),
        ({"rounds": 8}, "rounds is now called updates"),
        ({"slots": 3}, "slots is now called concurrency"),
        ({"updates": 0}, "updates = 0"),
        ({"strategy": "pacee"}, "did you mean 'pace'"),
        ({"strategy": "pace:graph.gama=1"}, "did you mean 'gamma'"),
        ({"model": "mpl"}, "did you mean 'mlp'"),
        ({"concurrency": 7}, "concurrency must be between 1 and the number of clients, 6"),
        ({"model": lambda: "none"}, "must make a torch.nn.Module"),
        ({"devices": "quick"}, "device model"),
        ({"clients": 3}, "clients"),  # decided when the federation was made
        ({"data": "synthetic"}, "data"),
    ],
)
def test_mistakes_in_python_are_one_line_too(settings, words, federation):
    with pytest.raises(pt.PolytempoError) as caught:
        pt.simulate(federation, **{"updates": 2, **settings})
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)
