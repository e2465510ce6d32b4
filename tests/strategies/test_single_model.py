"""FedAvg, FedProx, FedAsync, FedBuff and standalone against their formulas."""

import numpy as np
import pytest
import torch

from polytempo import Context, Server, Staleness, Task, Update
from polytempo.core.objective import Plain, Proximal
from polytempo.strategies import FedAsync, FedAvg, FedBuff, FedProx, Standalone

INITIAL = torch.tensor([1.0, -2.0, 0.5])


def ready(strategy, samples=(10, 30, 60)):
    strategy.setup(Context(INITIAL, samples, Task(), seed=0))
    return strategy


def update(client, values, samples=10):
    return Update(client, 0, torch.tensor(values), samples)


def stale(updates=0, versions=0):
    return Staleness(updates, versions)


def test_fedavg_is_the_sample_weighted_mean_of_the_cohort():
    strategy = ready(FedAvg())
    assert strategy.fold(update(0, [1.0, 0.0, 0.0], 10), stale()) is False
    assert strategy.fold(update(2, [0.0, 4.0, 8.0], 30), stale()) is False
    assert torch.equal(strategy.model_for(0), INITIAL)  # nothing is served before the end
    assert strategy.close_cohort() is True
    torch.testing.assert_close(strategy.model_for(1), torch.tensor([0.25, 3.0, 6.0]))
    strategy.fold(update(1, [2.0, 2.0, 2.0], 30), stale())
    strategy.close_cohort()  # the next cohort starts from nothing
    torch.testing.assert_close(strategy.model_for(1), torch.tensor([2.0, 2.0, 2.0]))


def test_fedavg_without_any_update_keeps_its_model():
    strategy = ready(FedAvg())
    assert strategy.close_cohort() is False
    assert torch.equal(strategy.model_for(0), INITIAL)


def test_fedprox_holds_clients_near_the_global_model():
    assert ready(FedProx(mu=0.3)).task(0).objective == Proximal(0.3, 2)
    assert ready(FedProx(mu=0.3, norm_power=1)).task(0).objective == Proximal(0.3, 1)
    assert ready(FedAvg()).task(0).objective == Plain()


@pytest.mark.parametrize(
    ("options", "tau", "weight"),
    [
        ({"weighting": "constant"}, 7, 1.0),
        ({"weighting": "polynomial"}, 0, 1.0),
        ({"weighting": "polynomial"}, 3, 0.5),  # (1 + 3)^-0.5
        ({"weighting": "polynomial", "a": 2.0}, 1, 0.25),
        ({"weighting": "hinge"}, 4, 1.0),
        ({"weighting": "hinge"}, 5, 1 / 11),
        ({"weighting": "hinge", "a": 1.0, "b": 4.0}, 5, 0.5),  # tau = b + 1: no jump to 0.1
        ({"weighting": "hinge", "a": 1.0, "b": 4.0}, 7, 0.25),
    ],
)
def test_fedasync_weights_by_staleness(options, tau, weight):
    strategy = ready(FedAsync(alpha=0.6, **options))
    strategy.fold(update(0, [0.0, 0.0, 0.0]), stale(updates=tau, versions=99))
    torch.testing.assert_close(strategy.model_for(1), (1 - 0.6 * weight) * INITIAL)


def test_fedasync_mixing_does_not_shrink_over_the_run():
    strategy = ready(FedAsync(alpha=0.5, weighting="polynomial"))
    for _ in range(2):
        strategy.fold(update(0, [0.0, 0.0, 0.0]), stale(updates=3))
    torch.testing.assert_close(strategy.model_for(0), 0.75 * 0.75 * INITIAL)


def test_fedasync_proximal_term():
    assert ready(FedAsync(rho=0.02)).task(0).objective == Proximal(0.02)
    assert ready(FedAsync(rho=0)).task(0).objective == Plain()


def test_fedbuff_divides_the_buffer_once():
    strategy = ready(FedBuff(buffer_size=2, server_lr=0.5, weighting="constant"))
    assert strategy.task(0).upload == "delta"
    assert strategy.fold(update(0, [1.0, 0.0, 0.0]), stale()) is False
    assert torch.equal(strategy.model_for(0), INITIAL)
    assert strategy.fold(update(1, [3.0, 2.0, 0.0]), stale()) is True
    torch.testing.assert_close(strategy.model_for(0), INITIAL + torch.tensor([1.0, 0.5, 0.0]))


def test_fedbuff_weighs_staleness_in_versions_and_empties_its_buffer():
    strategy = ready(FedBuff(buffer_size=1))
    strategy.fold(update(0, [4.0, 0.0, 0.0]), stale(updates=99, versions=3))
    torch.testing.assert_close(strategy.model_for(0), INITIAL + torch.tensor([2.0, 0.0, 0.0]))
    strategy.fold(update(0, [0.0, 1.0, 0.0]), stale(updates=99, versions=0))
    torch.testing.assert_close(strategy.model_for(0), INITIAL + torch.tensor([2.0, 1.0, 0.0]))


def test_standalone_clients_never_see_each_other():
    strategy = ready(Standalone())
    strategy.fold(update(1, [5.0, 5.0, 5.0]), stale())
    assert torch.equal(strategy.model_for(0), INITIAL)
    assert strategy.model_for(1).tolist() == [5.0, 5.0, 5.0]


def test_fedavg_through_the_server_waits_for_its_cohort_and_survives_losses():
    strategy = FedAvg()
    server = Server(strategy, Context(INITIAL, (10, 30, 60), Task(), 0), concurrency=3)
    started = server.join(range(3))
    by_client = {action.client: action.number for action in started}
    assert server.receive(Update(0, by_client[0], torch.zeros(3), 10)) == []
    assert server.version == 0
    assert server.lost(1) == []
    again = server.receive(Update(2, by_client[2], torch.full((3,), 7.0), 60))
    assert server.version == 1
    assert sorted(action.client for action in again) == [0, 1, 2]
    np.testing.assert_allclose(again[0].params.numpy(), [6.0] * 3, rtol=1e-6)
