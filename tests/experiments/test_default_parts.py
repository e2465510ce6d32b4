"""Strategies that keep a part of the model with their clients unless a run names another."""

import pytest
import torch
from torch import nn

from polytempo import PolytempoError, simulate
from polytempo.core.layout import Parts
from polytempo.experiments.config import make_config
from polytempo.strategies import STRATEGIES

SETTINGS = {"epochs": 1, "batch_size": 8, "lr": 0.05, "adapt_epochs": 0, "backend": "serial"}
SETTINGS |= {"updates": 12, "concurrency": 4}


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(12, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 4))


@pytest.mark.parametrize(
    ("name", "part", "shared"),
    [
        ("fedper", "head", 78 + 24),
        ("lg-fedavg", "body", 28),
        ("fedbn", "norm", 78 + 28),
    ],
)
def test_an_alias_is_fedavg_or_fedbuff_with_that_part_at_home(small, name, part, shared):
    for alias, base in ((name, "fedavg"), (f"{name}-async", "fedbuff")):
        short = simulate(small, model=network, strategy=alias, **SETTINGS)
        long = simulate(small, model=network, strategy=base, personal=part, **SETTINGS)
        assert short.summary["parameters"] == long.summary["parameters"] == shared
        assert short.fingerprint == long.fingerprint and short.history == long.history
        for key, value in short.model(3).items():
            assert torch.equal(value, long.model(3)[key])


def test_a_run_may_name_another_part(small):
    other = simulate(small, model=network, strategy="fedrep", personal="norm", **SETTINGS)
    assert other.summary["parameters"] == 78 + 28
    config = make_config({"strategy": "fedper", "personal": "norm, head", "freeze": "0.*"})
    assert config.parts() == Parts(["norm", "head"], ["0.*"])
    assert make_config({"strategy": "fedper"}).parts() == Parts(["head"], [])
    assert make_config({"strategy": "fedavg"}).parts() == Parts([], [])


def test_a_part_that_is_not_there_is_an_error_that_says_who_wants_it(small):
    with pytest.raises(PolytempoError, match=r"^fedbn needs a model .* norm: .* no normalisation"):
        simulate(small, model="mlp", strategy="fedbn", **SETTINGS)
    with pytest.raises(PolytempoError, match=r"^fedper needs .* head: .* leaves nothing to share"):
        simulate(small, model="linear", strategy="fedper", **SETTINGS)
    with pytest.raises(PolytempoError, match=r"^--personal norm: .* has no normalisation"):
        simulate(small, model="mlp", strategy="fedbn", personal="norm", **SETTINGS)
    with pytest.raises(PolytempoError, match=r"^fedrep keeps a part of the model .* --personal"):
        simulate(small, model="mlp", strategy="fedrep", personal="", **SETTINGS)


def test_what_a_client_is_given_is_what_it_uses(small):
    """`result.model` of Ditto is the client's own model."""
    result = simulate(small, model=network, strategy="ditto", **SETTINGS)
    own = result.simulator.memory.vector("own model", 2)
    flat = torch.cat([result.model(2)[key].flatten() for key in ("0.weight", "0.bias")])
    assert torch.equal(flat, own[:78])
    assert not torch.equal(flat, result.simulator.strategy.model_for(2)[:78])


def test_defaults_are_parts_that_layouts_know():
    for name in STRATEGIES:
        assert set(STRATEGIES[name].personal) <= {"head", "body", "norm"}
