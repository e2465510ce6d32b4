"""Made-up regression, multi-label and text: groups disagree, and what is best is known."""

import numpy as np
import pytest
import torch

from polytempo.core.errors import PolytempoError
from polytempo.data import Federation
from polytempo.data.shakespeare import windows

NAMES = ["synthetic-regression", "synthetic-multilabel", "synthetic-text"]


def of_group(fed: Federation, group: int, parts: tuple[slice, ...]) -> tuple:
    members = np.flatnonzero(fed.groups == group)
    x = torch.cat([fed.x[parts[m]] for m in members])
    y = torch.cat([fed.y[parts[m]] for m in members])
    return x.numpy(), y.numpy()


@pytest.mark.parametrize("name", NAMES)
def test_the_seed_decides_and_groups_are_even(name) -> None:
    one, again, other = (Federation.load(name, clients=8, seed=seed) for seed in (1, 1, 2))
    assert one.digest == again.digest != other.digest
    assert np.bincount(one.groups).tolist() == [2, 2, 2, 2]
    assert one.partition == {"name": "natural"}
    with pytest.raises(PolytempoError, match=f"{name}: groups=4 for 3 clients"):
        Federation.load(name, clients=3)


@pytest.mark.parametrize("outputs", [1, 2])
def test_a_group_is_linear_up_to_the_noise_and_another_group_differs(outputs) -> None:
    from sklearn.linear_model import LinearRegression

    fed = Federation.load(f"synthetic-regression:noise=0.2,outputs={outputs}", seed=1)
    assert (fed.problem, fed.outputs) == ("regression", outputs)
    model = LinearRegression().fit(*of_group(fed, 0, fed.train))
    x, y = of_group(fed, 0, fed.test)
    assert np.mean((model.predict(x) - y) ** 2) == pytest.approx(0.04, rel=0.35)
    assert model.score(*of_group(fed, 1, fed.test)) < 0.5


def test_the_labels_of_a_group_can_be_learned_and_another_group_differs() -> None:
    from sklearn.linear_model import LogisticRegression
    from sklearn.metrics import f1_score
    from sklearn.multioutput import MultiOutputClassifier

    fed = Federation.load("synthetic-multilabel", seed=1)
    assert (fed.problem, fed.outputs) == ("multilabel", 8)
    assert 0.2 < float(fed.y.mean()) < 0.4
    model = MultiOutputClassifier(LogisticRegression()).fit(*of_group(fed, 0, fed.train))
    own, other = (
        f1_score(y, model.predict(x), average="micro")
        for x, y in (of_group(fed, group, fed.test) for group in (0, 1))
    )
    assert own > 0.8 and other < 0.5
    with pytest.raises(PolytempoError, match="groups=9 and labels=8"):
        Federation.load("synthetic-multilabel:groups=9", clients=20)


def test_what_follows_a_token_is_the_chain_of_the_group() -> None:
    fed = Federation.load("synthetic-text:tokens=5,samples=300,groups=2,alpha=1", clients=4, seed=1)
    assert (fed.problem, fed.outputs, fed.vocabulary) == ("next-token", 6, 6)
    assert torch.equal(fed.x[:, 1:], fed.y[:, :-1]) and int(fed.x.min()) == 1
    chains = []
    for part in (fed.train, fed.test):
        for group in range(2):
            x, y = of_group(fed, group, part)
            counts = np.zeros((6, 6))
            np.add.at(counts, (x.ravel(), y.ravel()), 1)
            chains.append(counts[1:, 1:] / counts[1:, 1:].sum(axis=1, keepdims=True))
    assert np.abs(chains[0] - chains[2]).max() < 0.1 > np.abs(chains[1] - chains[3]).max()
    assert np.abs(chains[0] - chains[1]).max() > 0.3


def test_diabetes_is_standardised_and_in_hundreds() -> None:
    fed = Federation.load("diabetes", clients=5)
    assert (fed.problem, fed.outputs, fed.shape, len(fed.y)) == ("regression", 1, (10,), 442)
    assert float(fed.x.mean(0).abs().max()) < 1e-5
    assert torch.allclose(fed.x.std(0), torch.ones(10), atol=0.01)
    assert float(fed.y.var()) == pytest.approx(0.594, abs=0.005)
    assert (float(fed.y.min()), float(fed.y.max())) == (0.25, pytest.approx(3.46))


@pytest.mark.parametrize("size", [2, 4, 5, 6, 9])
def test_windows_make_every_token_but_the_first_a_target_once(size) -> None:
    x, y = windows(np.arange(1, size + 1), 4)
    assert x.shape == y.shape == (-(-(size - 1) // 4), 4)
    assert y[y > 0].tolist() == list(range(2, size + 1))
    assert np.array_equal(x[y > 0] + 1, y[y > 0]) and not x[y == 0].any()
