"""kNN-Per against scikit-learn's neighbours."""

import numpy as np
import pytest
import torch
from replay import simulated
from sklearn.neighbors import KNeighborsClassifier

from polytempo.strategies.knn_per import Neighbours


def parts(theta, x):
    """Features and probabilities of the network of `replay`."""
    z = np.maximum(x @ theta[:60].reshape(5, 12).T + theta[60:65], 0)
    scores = z @ theta[65:85].reshape(4, 5).T + theta[85:]
    p = np.exp(scores - scores.max(1, keepdims=True))
    return z, p / p.sum(1, keepdims=True)


@pytest.mark.parametrize("name", ["knn-per", "knn-per-async"])
def test_predictions_are_mixed_with_those_of_neighbours(small, name):
    # all samples are neighbours: which are nearest is below, for here features may be equal
    simulator, _ = simulated(small, f"{name}:k=1000,share=0.7,scale=0.5", eval_every=24)
    theta = simulator.strategy.model_for(0).numpy()
    x, y = small.x.double().numpy(), small.y.numpy()
    right, losses = [], []
    for client in range(8):
        train, test = small.train[client], small.test[client]
        count = train.stop - train.start
        found = KNeighborsClassifier(count, weights=lambda apart: np.exp(-apart / 0.5))
        found.fit(parts(theta, x[train])[0], y[train])
        z, model = parts(theta, x[test])
        neighbours = np.zeros((len(z), 4))
        neighbours[:, found.classes_] = found.predict_proba(z)
        mixed = 0.7 * neighbours + 0.3 * model
        right.append((mixed.argmax(1) == y[test]).mean())
        losses += (-np.log(mixed[np.arange(len(z)), y[test]])).tolist()
    row = simulator.history[-1]
    assert row["accuracy"] == pytest.approx(np.mean(right))
    assert row["loss"] == pytest.approx(np.mean(losses), rel=1e-6)  # over all samples


def test_what_is_trained_is_fedavgs(small):
    found, plain = (simulated(small, name)[0] for name in ("knn-per", "fedavg"))
    assert torch.equal(found.strategy.model_for(0), plain.strategy.model_for(0))
    assert found.time == plain.time
    alone = simulated(small, "knn-per:share=0")[0]
    for key in ("accuracy", "loss"):
        assert alone.history[-1][key] == pytest.approx(plain.history[-1][key], rel=1e-9)


def test_the_nearest_are_asked():
    draws = np.random.default_rng(0)
    where, labels = draws.normal(size=(40, 3)), draws.integers(4, size=40)
    features = draws.normal(size=(9, 3))
    found = KNeighborsClassifier(4, weights=lambda apart: np.exp(-apart / 2))
    expected = found.fit(where, labels).predict_proba(features)
    known = torch.from_numpy(where), torch.from_numpy(labels)
    step = Neighbours(k=4, share=1.0, scale=2.0)
    answer = step.answer(torch.zeros(9, 4).double(), torch.from_numpy(features), known)
    np.testing.assert_allclose(answer.exp().numpy(), expected, rtol=1e-9, atol=1e-11)


def test_fewer_samples_than_neighbours_are_all_asked():
    step = Neighbours(k=10, share=1.0)
    known = torch.tensor([[0.0], [3.0]]), torch.tensor([1, 0])
    found = step.answer(torch.zeros(1, 3), torch.tensor([[1.0]]), known).exp()
    near, far = np.exp(-1.0), np.exp(-2.0)
    expected = torch.tensor([[far / (near + far), near / (near + far), 0.0]]).float()
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-9)


def test_targets_that_are_no_labels_are_left_alone():
    outputs = torch.randn(4, 1)
    known = torch.randn(5, 2), torch.randn(5)
    assert Neighbours(k=2, share=0.5).answer(outputs, torch.randn(4, 2), known) is outputs
