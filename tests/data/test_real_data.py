"""The real files, where they are at hand."""

from pathlib import Path

import numpy as np
import pytest
import torch

from polytempo.data import Federation


@pytest.fixture(autouse=True)
def own_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("POLYTEMPO_CACHE", str(tmp_path))


def need(folder: Path, *files: str) -> None:
    if lacking := [file for file in files if not (folder / file).is_file()]:
        pytest.skip(f"no {', '.join(lacking)} in the data folder")


def test_motion_data_has_thirty_people(real_data: Path) -> None:
    need(real_data, "uci_har.npz")
    fed = Federation.load("uci_har", data_dir=real_data)
    assert fed.clients == 30 and fed.shape == (9, 128) and fed.classes == 6
    assert len(fed.y) == 10_299 and fed.x.dtype == torch.float32
    assert bool(torch.isfinite(fed.x).all())
    tests = np.array([part.stop - part.start for part in fed.test])
    assert np.allclose(tests / fed.label_counts().sum(axis=1), 0.25, atol=0.05)
    for trained, tested in zip(fed.train, fed.test, strict=True):
        halves = [
            {half.numpy().tobytes() for window in fed.x[part] for half in window.split(64, 1)}
            for part in (trained, tested)
        ]
        assert halves[0].isdisjoint(halves[1])


def test_wrist_motion_has_fifty_one_people(real_data: Path) -> None:
    need(real_data, "wisdm_watch.npz")
    fed = Federation.load("wisdm", data_dir=real_data)
    assert fed.clients == 51 and fed.shape == (3, 200) and fed.classes == 6
    assert len(fed.y) == 6_200 and sum(part.stop - part.start for part in fed.test) == 930
    assert 0.5 < float(fed.x.std()) < 2


def test_cifar100_fine_and_coarse(real_data: Path) -> None:
    need(real_data, "cifar100_train.npz", "cifar100_test.npz")
    fine = Federation.load("cifar100", data_dir=real_data, clients=10)
    assert fine.classes == 100 and fine.label_counts().sum(axis=0).tolist() == [600] * 100
    coarse = Federation.load("cifar100:coarse=true", data_dir=real_data, clients=10)
    assert coarse.classes == 20 and coarse.label_counts().sum(axis=0).tolist() == [3_000] * 20
    ready = fine.prepare(fine.x[::10])
    assert bool((ready.mean((0, 2, 3)).abs() < 0.05).all())


def test_cifar_of_the_reproductions(real_data: Path) -> None:
    need(real_data, "cifar10_train.npz", "cifar10_test.npz")
    spec = {"name": "dirichlet", "alpha": 0.1, "balanced": True}
    fed = Federation.load("cifar10", data_dir=real_data, clients=100, partition=spec)
    counts = fed.label_counts()
    assert fed.x.shape == (60_000, 3, 32, 32)
    assert counts.sum(axis=0).tolist() == [6_000] * 10
    assert counts.sum(axis=1).min() >= 40
    ready = fed.prepare(fed.x[::10])
    assert ready.mean(dim=(0, 2, 3)).abs().max() < 0.02
    assert (ready.std(dim=(0, 2, 3)) - 1).abs().max() < 0.02
    assert fed.description == "cifar10, 100 clients, dirichlet(alpha=0.1, balanced)"


def test_mnist_looks_like_digits(real_data: Path) -> None:
    need(real_data, "mnist.npz")
    fed = Federation.load("mnist", data_dir=real_data, clients=10, partition="iid", limit=3_000)
    assert fed.shape == (1, 28, 28)
    ready = fed.prepare(fed.x)
    assert abs(ready.mean().item()) < 0.03 and abs(ready.std().item() - 1) < 0.03
    # Nearest mean of each class: if labels and images were out of step, this would be chance.
    train = torch.cat([torch.arange(part.start, part.stop) for part in fed.train])
    test = torch.cat([torch.arange(part.start, part.stop) for part in fed.test])
    means = torch.stack([ready[train][fed.y[train] == label].mean(dim=0) for label in range(10)])
    guess = torch.cdist(ready[test].flatten(1), means.flatten(1)).argmin(dim=1)
    assert (guess == fed.y[test]).float().mean() > 0.7


def test_emnist_masks_balance_the_classes(real_data: Path) -> None:
    need(real_data, "emnist47.npz")
    fed = Federation.load("emnist:balanced=true", data_dir=real_data, clients=10, partition="iid")
    assert fed.label_counts().sum(axis=0).tolist() == [910] * 47
    ready = fed.prepare(fed.x)
    assert abs(ready.mean().item()) < 0.03 and abs(ready.std().item() - 1) < 0.03


@pytest.mark.parametrize(
    ("name", "file", "length", "classes"),
    [
        ("agnews", "agnews_partial.json.xz", 64, 4),
        ("newsgroups20", "newsgroups20.json.xz", 200, 20),
    ],
)
def test_news_become_tokens(
    real_data: Path, name: str, file: str, length: int, classes: int
) -> None:
    need(real_data, file)
    fed = Federation.load(name, data_dir=real_data, clients=4, partition="iid", limit=2_000)
    assert fed.shape == (length,) and fed.classes == classes
    assert fed.vocabulary is not None and 5_000 < fed.vocabulary <= 32_000
    unknown = (fed.x == 1).float().mean() / (fed.x > 0).float().mean()
    assert 0 < unknown < 0.1


def test_shakespeares_roles_speak_and_are_continued(real_data: Path) -> None:
    need(real_data, "shakespeare_roles.json.xz")
    fed = Federation.load("shakespeare", data_dir=real_data)
    assert (fed.problem, fed.clients, fed.shape) == ("next-token", 634, (80,))
    assert fed.outputs == fed.vocabulary == 77 and len(fed.y) == 51_354
    later = fed.x[:, 1:] != 0
    assert torch.equal(fed.x[:, 1:][later], fed.y[:, :-1][later])
    tests = sum(part.stop - part.start for part in fed.test) / len(fed.y)
    assert 0.09 < tests < 0.13, "the test parts of the file are used"
    counts = torch.bincount(fed.y.flatten(), minlength=77)[1:]
    assert int(counts.argmax()) == 1, "the blank is the commonest character"
    few = Federation.load("shakespeare:length=20", data_dir=real_data, clients=5)
    assert few.clients == 5 and few.shape == (20,)


def test_digits_by_their_writers(real_data: Path) -> None:
    need(real_data, "mnist.npz", "mnist_writers.npz")
    fed = Federation.load("mnist_writers", data_dir=real_data)
    assert fed.clients == 539 and len(fed.y) == 60_000 and fed.groups is not None
    sizes = fed.label_counts().sum(axis=1)
    assert (sizes.min(), sizes.max()) == (19, 131)
    assert 0.3 < fed.groups.mean() < 0.7, "employees and pupils"
    many = Federation.load("mnist_writers", data_dir=real_data, partition="natural:min_size=100")
    assert 0 < many.clients < 539 and many.label_counts().sum(axis=1).min() >= 100


def test_hearts_of_four_hospitals(real_data: Path) -> None:
    need(real_data, "heart_disease4.npz")
    fed = Federation.load("heart_disease", data_dir=real_data)
    assert (fed.clients, fed.shape, fed.classes, len(fed.y)) == (4, (13,), 2, 920)
    assert bool(torch.isfinite(fed.x).all())
    assert sum(part.stop - part.start for part in fed.test) == 230
    assert sorted(fed.label_counts().sum(axis=1)) == [123, 200, 294, 303]
