import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from polytempo.core.errors import PolytempoError
from polytempo.core.rng import rng
from polytempo.data import Federation, partition


def blobs(samples: int, features: int = 3, classes: int = 4, seed: int = 0):
    random = rng(seed, "blobs")
    return random.standard_normal((samples, features)), random.integers(0, classes, samples)


def same(a: Federation, b: Federation) -> bool:
    return (
        (a.train, a.test) == (b.train, b.test) and torch.equal(a.x, b.x) and torch.equal(a.y, b.y)
    )


@settings(max_examples=25, deadline=None)
@given(st.integers(1, 12), st.integers(0, 100), st.floats(0.1, 0.6))
def test_shards_are_contiguous_and_hold_every_sample_once(clients, seed, fraction) -> None:
    y = rng(seed, "y").integers(0, 5, 240)
    x = np.stack([np.arange(240.0), y], axis=1)
    fed = Federation.from_pool(
        x, y, clients=clients, partition="iid", seed=seed, test_fraction=fraction
    )
    at = 0
    for train, test in zip(fed.train, fed.test, strict=True):
        assert train.start == at and train.stop == test.start and test.stop > test.start
        at = test.stop
    assert at == 240 and fed.clients == clients
    assert sorted(fed.x[:, 0].tolist()) == list(range(240))
    assert torch.equal(fed.x[:, 1].long(), fed.y), "a sample lost its label"
    assert fed.samples == [len(fed.y[part]) for part in fed.train]
    assert fed.x[fed.train[0]].data_ptr() == fed.x.data_ptr(), "a shard is a copy"


def test_the_seed_decides_everything() -> None:
    def load(seed: int) -> Federation:
        return Federation.load("digits", clients=5, shift="noise", seed=seed, limit=800)

    assert same(load(1), load(1))
    assert not same(load(1), load(2))


def test_defaults_are_balanced_dirichlet_for_twenty_and_natural_where_there_are_users() -> None:
    assert Federation.load("digits").description == (
        "digits, 20 clients, dirichlet(alpha=0.1, balanced)"
    )
    x, y = blobs(60)
    fed = Federation.from_pool(x, y, np.arange(60) % 7)
    assert fed.clients == 7 and fed.description == "own, 7 clients, natural"


def test_digits_are_normalised_pixels() -> None:
    fed = Federation.load("digits", clients=4, partition=partition.IID())
    assert fed.x.dtype == torch.uint8 and fed.shape == (1, 8, 8) and fed.classes == 10
    assert int(fed.x.max()) == 255
    ready = fed.prepare(fed.x)
    assert ready.dtype == torch.float32
    assert abs(ready.mean().item()) < 0.005 and abs(ready.std().item() - 1) < 0.005


def test_prepare_normalises_each_channel_and_leaves_the_rest_alone() -> None:
    x = rng(0).integers(0, 256, (90, 3, 4, 5), dtype=np.uint8)
    x[:, 1] //= 4
    x[:, 2] = 7
    fed = Federation.from_pool(x, np.arange(90) % 3, clients=2, partition="iid")
    train = torch.cat([fed.x[part] for part in fed.train])
    ready = fed.prepare(train)
    by_hand = train.numpy().astype(np.float64) / 255
    for channel in (0, 1):
        plane = by_hand[:, channel]
        expected = (plane - plane.mean()) / plane.std()
        assert np.allclose(ready[:, channel].numpy(), expected, atol=1e-5)
    assert torch.allclose(ready[:, 2], torch.zeros(()), atol=1e-6), "no deviation, no division by 0"
    assert torch.equal(fed.prepare(train[0]), ready[0])
    assert train.dtype == torch.uint8, "the input was changed"
    floats, tokens = torch.randn(2, 3), torch.arange(4)
    assert fed.prepare(floats) is floats and fed.prepare(tokens) is tokens


def test_label_counts_are_of_all_samples() -> None:
    x, y = blobs(100, classes=4)
    fed = Federation.from_pool(x, y, clients=3, partition="iid", classes=6)
    counts = fed.label_counts()
    assert counts.shape == (3, 6)
    assert counts.sum(axis=0).tolist() == np.bincount(y, minlength=6).tolist()
    assert counts[1].sum() == fed.test[1].stop - fed.train[1].start


def test_limit_is_a_random_subset() -> None:
    fed = Federation.load("digits", clients=4, partition="iid", limit=200)
    assert len(fed.y) == 200 and "200 samples" in fed.description
    assert len(np.unique(fed.y.numpy())) == 10
    assert len(Federation.load("digits", partition="iid", limit=10**6).y) == 1797
    with pytest.raises(PolytempoError, match="limit=0"):
        Federation.load("digits", limit=0)


def test_from_arrays_keeps_clients_as_they_come() -> None:
    parts = [blobs(n, seed=n) for n in (12, 30, 8)]
    fed = Federation.from_arrays(parts, seed=3)
    assert fed.clients == 3 and fed.x.dtype == torch.float32
    for (x, _), train, test in zip(parts, fed.train, fed.test, strict=True):
        held = fed.x[train.start : test.stop].numpy()
        assert np.allclose(np.sort(held, axis=0), np.sort(x.astype(np.float32), axis=0))
    tensors = [(torch.from_numpy(x), torch.from_numpy(y)) for x, y in parts]
    assert same(fed, Federation.from_arrays(tensors, seed=3))


def test_from_arrays_uses_a_test_split_as_given() -> None:
    (x, y), (x_test, y_test) = blobs(20), blobs(5, seed=1)
    fed = Federation.from_arrays([(x, y, x_test, y_test), (x, y)])
    assert fed.samples[0] == 20
    assert np.allclose(fed.x[fed.test[0]].numpy(), x_test.astype(np.float32))
    assert fed.y[fed.test[0]].tolist() == y_test.tolist()
    assert fed.samples[1] < 20


def test_images_come_in_three_forms() -> None:
    y = np.arange(8) % 2
    pixels = rng(0).integers(0, 256, (8, 6, 5, 3), dtype=np.uint8)
    last = Federation.from_arrays([(pixels, y)])
    first = Federation.from_arrays([(pixels.transpose(0, 3, 1, 2), y)])
    assert last.shape == (3, 6, 5) and same(last, first)
    grey = Federation.from_arrays([(pixels[..., 0], y)])
    assert grey.shape == (1, 6, 5) and torch.equal(grey.x[:, 0], first.x[:, 0])


def test_integers_are_tokens() -> None:
    fed = Federation.from_arrays([(np.array([[1, 5], [2, 0], [3, 3]]), [0, 1, 0])])
    assert fed.x.dtype == torch.int64 and fed.vocabulary == 6 and fed.mean is None


BAD = [
    ([], "no clients"),
    ([(np.zeros((3, 2)), [0, 1])], r"client 0: y has shape \(2,\), expected \(3,\)"),
    ([(np.zeros((2, 2)), [0, 1]), (np.zeros((0, 2)), [])], "client 1: there are no samples"),
    ([(np.full((2, 2), np.nan), [0, 1])], "client 0: X holds 4 values that are NaN"),
    ([(np.array([[0.0], [np.inf]]), [0, 1])], "the first in sample 1"),
    ([(np.zeros((2, 2)), [0, -1])], "label -1 is out of range, expected 0 to 2"),
    ([(np.zeros((2, 2)), [0, 3])], "label 3 is out of range"),
    ([(np.zeros((2, 2)), [0.5, 1])], "must be whole numbers"),
    ([(np.zeros(2), [0, 1])], r"reshape\(-1, 1\)"),
    ([(np.zeros((2, 2)), [0, 1]), (np.zeros((2, 3)), [0, 1])], r"client 1: .*\(3,\).*client 0"),
    ([(np.zeros((2, 2)), [0, 1]), (np.zeros((2, 2), int), [0, 1])], "client 1: samples are int64"),
    ([(np.array([[-1, 2]]), [0])], "not a table of tokens"),
    ([(np.zeros((2, 2), complex), [0, 1])], "complex128"),
    ([([[1.0], [1.0, 2.0]], [0, 1])], "not of one shape"),
    ([(np.zeros((2, 2)), [0, 1], np.zeros((1, 2)))], "got 3 things"),
    ([(np.zeros((2, 2)), [0, 1], np.zeros((1, 2)), [5])], "client 0, test: label 5"),
]


@pytest.mark.parametrize(("clients", "message"), BAD)
def test_from_arrays_says_what_is_wrong_and_with_whom(clients, message: str) -> None:
    with pytest.raises(PolytempoError, match=message) as caught:
        Federation.from_arrays(clients, classes=3)
    assert "\n" not in str(caught.value)


def test_from_pool_wants_one_user_per_sample() -> None:
    x, y = blobs(10)
    with pytest.raises(PolytempoError, match=r"users has shape \(9,\), expected \(10,\)"):
        Federation.from_pool(x, y, np.arange(9))


def test_label_names_are_numbered() -> None:
    fed = Federation.from_pool(np.zeros((6, 1)), ["cat", "ant", "bee"] * 2, clients=1)
    assert sorted(fed.y.tolist()) == [0, 0, 1, 1, 2, 2] and fed.classes == 3


def test_a_partition_of_the_users_own_is_checked() -> None:
    class Twice:
        def __call__(self, y, clients, rng, users=None):
            return partition.Assignment([np.arange(3), np.arange(2, 5)])

    with pytest.raises(PolytempoError, match="with distinct positions below 10"):
        Federation.from_pool(*blobs(10), clients=2, partition=Twice())


def test_folder_has_one_client_per_file_in_order_of_number(tmp_path: Path) -> None:
    for number in (10, 2, 1):
        x, y = blobs(8 + number)
        given = {"X_test": x[:3], "y_test": y[:3]} if number == 2 else {}
        np.savez(tmp_path / f"client{number}.npz", X=x, y=y, **given)
    fed = Federation.from_npz(tmp_path)
    totals = [test.stop - train.start for train, test in zip(fed.train, fed.test, strict=True)]
    assert totals == [9, 13, 18] and fed.samples[1] == 10
    assert same(fed, Federation.load(str(tmp_path)))
    assert fed.description == f"{tmp_path.name}, 3 clients, natural"
    assert Federation.load(tmp_path, clients=2).clients == 2


def test_single_file_is_pooled_or_divided_by_user(tmp_path: Path) -> None:
    x, y = blobs(100)
    np.savez(tmp_path / "pooled.npz", X=x, y=y)
    fed = Federation.load(tmp_path / "pooled.npz", clients=4, partition="iid")
    assert fed.clients == 4 and fed.name == "pooled"
    np.savez(tmp_path / "users.npz", X=x, y=y, user=np.arange(100) % 3)
    assert Federation.load(str(tmp_path / "users.npz")).clients == 3


def test_files_that_do_not_fit_are_explained(tmp_path: Path) -> None:
    x, y = blobs(6)

    def refused(message: str, **arrays) -> None:
        np.savez(tmp_path / "bad.npz", **arrays)
        with pytest.raises(PolytempoError, match=message):
            Federation.from_npz(tmp_path / "bad.npz")

    refused("lacks y, has X, labels", X=x, labels=y)
    refused(r"users has shape \(2,\)", X=x, y=y, user=[0, 1])
    refused("X_test is for files of one client", X=x, y=y, X_test=x, y_test=y)
    refused("cannot be read", X=np.array([{}, {}], dtype=object), y=[0, 1])
    np.savez(tmp_path / "bad.npz", X=x, y=y, X_test=x)
    with pytest.raises(PolytempoError, match="only one of X_test and y_test"):
        Federation.from_npz(tmp_path)
    (tmp_path / "bad.npz").write_bytes(b"PK no archive")
    with pytest.raises(PolytempoError, match=r"bad\.npz cannot be read"):
        Federation.from_npz(tmp_path / "bad.npz")
    with pytest.raises(PolytempoError, match="no such file or folder"):
        Federation.load(str(tmp_path / "absent.npz"))
    (tmp_path / "empty").mkdir()
    with pytest.raises(PolytempoError, match=r"holds no \.npz file"):
        Federation.load(str(tmp_path / "empty"))


def test_import_is_light() -> None:
    heavy = "{'PIL', 'sklearn', 'datasets', 'scipy', 'matplotlib'} & set(sys.modules)"
    command = f"import sys, polytempo.data; assert not {heavy}, {heavy}"
    done = subprocess.run([sys.executable, "-c", command], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


# -- what a review found --------------------------------------------------------------------------


def some(count: int = 8) -> np.ndarray:
    return np.random.default_rng(0).normal(size=(count, 3)).astype(np.float32)


@pytest.mark.parametrize("kind", [list, lambda y: np.array(y, dtype=object), np.array])
def test_names_are_numbered_alike_for_all_clients_and_parts(kind):
    first, second = kind(["cat", "dog"] * 4), kind(["dog", "fish"] * 4)
    test = kind(["fish", "fish", "cat", "dog"] * 2)
    fed = Federation.from_arrays([(some(), first, some(), test), (some(), second)])
    assert fed.classes == 3
    assert fed.y[fed.train[0]].tolist() == [0, 1] * 4
    assert fed.y[fed.test[0]].tolist() == [2, 2, 0, 1] * 2
    assert set(fed.y[fed.train[1]].tolist()) == {1, 2}


def test_names_beside_numbers_are_refused():
    with pytest.raises(PolytempoError, match="names"):
        Federation.from_arrays([(some(), ["a", "b"] * 4), (some(), [0, 1] * 4)])


def test_clients_may_come_from_a_generator_but_not_as_something_else():
    fed = Federation.from_arrays((some(), [0, 1] * 4) for _ in range(3))
    assert fed.clients == 3
    with pytest.raises(PolytempoError, match="client 0: expected"):
        Federation.from_arrays([{"X": some(), "y": [0, 1] * 4}])


def test_labels_that_are_not_numbered_from_zero_are_refused():
    with pytest.raises(PolytempoError, match="renumber"):
        Federation.from_arrays([(some(), [0, 3_000_000] * 4)])
    assert Federation.from_arrays([(some(), [0, 900] * 4)]).classes == 901


def test_large_integers_are_not_taken_for_tokens():
    table = np.array([[5, 900_000], [7, 100]] * 4)
    with pytest.raises(PolytempoError, match="float32"):
        Federation.from_arrays([(table, [0, 1] * 4)])


@pytest.mark.parametrize("users", [["a", None] * 4, [0.0, np.nan] * 4])
def test_missing_users_are_named(users):
    with pytest.raises(PolytempoError, match="user of every sample"):
        Federation.from_pool(some(), [0, 1] * 4, users)


def test_the_digest_tells_data_and_division_apart():
    pairs = [(some(), [0, 1] * 4), (some(), [1, 0] * 4)]
    one = Federation.from_arrays(pairs, seed=0)
    assert one.digest == Federation.from_arrays(pairs, seed=0).digest
    assert one.digest != Federation.from_arrays(pairs, seed=1).digest
    pairs[0][0][0, 0] += 1
    assert one.digest != Federation.from_arrays(pairs, seed=0).digest
