import numpy as np
import pytest
import torch

from polytempo.core.errors import PolytempoError
from polytempo.data import Federation


def of_group(fed: Federation, group: int, parts: tuple[slice, ...]) -> tuple:
    members = np.flatnonzero(fed.groups == group)
    x = torch.cat([fed.x[parts[m]] for m in members])
    y = torch.cat([fed.y[parts[m]] for m in members])
    return x.numpy(), y.numpy()


@pytest.mark.parametrize("kind", ["labels", "rotation", "permutation"])
def test_a_linear_model_learns_a_group_but_not_another(kind: str) -> None:
    from sklearn.linear_model import LogisticRegression

    fed = Federation.load(f"synthetic:kind={kind}", seed=1)
    model = LogisticRegression(max_iter=300).fit(*of_group(fed, 0, fed.train))
    assert model.score(*of_group(fed, 0, fed.test)) > 0.9
    assert model.score(*of_group(fed, 1, fed.test)) < 0.4


@pytest.mark.parametrize("kind", ["labels", "rotation", "permutation"])
def test_groups_can_be_recovered_from_what_clients_learn(kind: str) -> None:
    """The first gradient of softmax regression is more alike within groups than between them."""
    fed = Federation.load(f"synthetic:kind={kind}", clients=40, seed=3)
    learnt = []
    for part in fed.train:
        x, y = fed.x[part].double().numpy(), fed.y[part].numpy()
        wrong = np.full((len(y), fed.classes), 1 / fed.classes)
        wrong[np.arange(len(y)), y] -= 1
        gradient = (wrong.T @ x / len(y)).ravel()
        learnt.append(gradient / np.linalg.norm(gradient))
    alike = np.stack(learnt) @ np.stack(learnt).T
    together = fed.groups[:, None] == fed.groups
    assert sorted(np.bincount(fed.groups)) == [10] * 4
    assert alike[together].min() > alike[~together].max()


def test_groups_are_even_and_not_in_order_of_clients() -> None:
    fed = Federation.load("synthetic:groups=3", clients=11)
    assert sorted(np.bincount(fed.groups)) == [3, 4, 4]
    assert not np.array_equal(fed.groups, np.sort(fed.groups))


def test_label_groups_are_disjoint_and_together_complete() -> None:
    fed = Federation.load({"name": "synthetic", "groups": 4, "classes": 10})
    held = [set(of_group(fed, g, fed.train)[1]) for g in range(4)]
    assert set.union(*held) == set(range(10)) and sum(map(len, held)) == 10
    assert fed.description == "synthetic(groups=4, classes=10), 20 clients, natural"


def test_noise_grows_from_group_to_group() -> None:
    fed = Federation.load("synthetic:kind=noise,noise=2,features=8,samples=400,groups=3", clients=6)
    spread = []
    for group in range(3):
        x, y = of_group(fed, group, fed.train)
        spread.append(np.mean([x[y == label].std(axis=0).mean() for label in range(10)]))
    assert np.allclose(spread, [1.0, 3.0, 5.0], rtol=0.1)


def test_permuted_groups_disagree_about_every_class() -> None:
    fed = Federation.load("synthetic:kind=permutation,noise=0,features=4,classes=5,groups=5")
    meaning = []
    for group in range(5):
        x, y = of_group(fed, group, fed.train)
        meaning.append({tuple(row): label for row, label in zip(x, y, strict=True)})
    for prototype in meaning[0]:
        assert len({of[prototype] for of in meaning}) == 5


def test_rotation_keeps_distances() -> None:
    fed = Federation.load("synthetic:kind=rotation,noise=0,features=4,classes=3,groups=2")
    means = []
    for group in range(2):
        x, y = of_group(fed, group, fed.train)
        means.append(np.stack([x[y == label][0] for label in range(3)]))
    assert np.allclose(means[0] @ means[0].T, means[1] @ means[1].T, atol=1e-4)
    assert not np.allclose(means[0], means[1], atol=0.1)


def test_sizes_follow_skew() -> None:
    even = Federation.load("synthetic:skew=0,samples=40")
    assert (even.label_counts().sum(axis=1) == 40).all()
    skewed = Federation.load("synthetic:skew=1,samples=40", clients=300)
    sizes = skewed.label_counts().sum(axis=1)
    assert sizes.mean() == pytest.approx(40, rel=0.2)
    assert np.log(sizes).std() == pytest.approx(1.0, rel=0.2)


def test_mixed_clients_have_no_true_group() -> None:
    assert Federation.load("synthetic", partition="iid").groups is None


def test_wrong_options_are_explained() -> None:
    with pytest.raises(PolytempoError, match="groups=4 for 3 clients"):
        Federation.load("synthetic", clients=3)
    with pytest.raises(PolytempoError, match="raise classes or lower groups"):
        Federation.load("synthetic:groups=5,classes=4")
    with pytest.raises(PolytempoError, match="kind"):
        Federation.load("synthetic:kind=colour")
    with pytest.raises(PolytempoError, match="did you mean 'groups'"):
        Federation.load("synthetic:group=5")
