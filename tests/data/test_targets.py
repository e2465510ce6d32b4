"""Targets other than labels: what is guessed, what is refused, and who holds what."""

from pathlib import Path

import numpy as np
import pytest
import torch

from polytempo.core.errors import PolytempoError
from polytempo.core.rng import rng
from polytempo.data import Federation
from polytempo.data.targets import strata

N = 40
X = rng(0, "x").standard_normal((N, 3))
TOKENS = rng(0, "tokens").integers(1, 9, (N, 6))
PRESENT = (rng(0, "present").random((N, 4)) < 0.4).astype(int)
NUMBERS = rng(0, "numbers").standard_normal((N, 2))
FOLLOWING = np.roll(TOKENS, -1, axis=1)

KINDS = {
    "classification": (X, np.arange(N) % 3, 3, torch.int64),
    "multilabel": (X, PRESENT, 4, torch.float32),
    "regression": (X, NUMBERS[:, 0], 1, torch.float32),
    "next-token": (TOKENS, FOLLOWING, 9, torch.int64),
}


@pytest.mark.parametrize("form", [np.asarray, torch.as_tensor, np.ndarray.tolist])
@pytest.mark.parametrize("problem", KINDS)
def test_the_problem_is_guessed_where_targets_leave_no_doubt(problem, form) -> None:
    x, y, outputs, dtype = KINDS[problem]
    fed = Federation.from_pool(x, form(y), clients=2)
    assert (fed.problem, fed.outputs, fed.y.dtype) == (problem, outputs, dtype)
    assert torch.equal(fed.y.double().sum(0), torch.as_tensor(y).to(dtype).double().sum(0))
    assert fed.description.startswith(
        "own, 2" if problem == "classification" else f"own, {problem}"
    )


@pytest.mark.parametrize("problem", KINDS)
def test_every_way_in_takes_every_problem(problem, tmp_path: Path) -> None:
    x, y, outputs, _ = KINDS[problem]
    half = N // 2
    for number, part in enumerate((slice(None, half), slice(half, None))):
        np.savez(tmp_path / f"client{number}.npz", X=x[part], y=y[part])
    np.savez(tmp_path.with_suffix(".npz"), X=x, y=y, user=np.arange(N) // half)
    ways = [
        Federation.from_arrays([(x[:half], y[:half]), (x[half:], y[half:])]),
        Federation.from_arrays([(x[:half], y[:half], x[:9], y[:9]), (x[half:], y[half:])]),
        Federation.from_pool(x, y, np.arange(N) // half),
        Federation.from_npz(tmp_path),
        Federation.load(str(tmp_path)),
        Federation.load(str(tmp_path), problem=problem),
        Federation.from_npz(tmp_path.with_suffix(".npz")),
    ]
    for fed in ways:
        assert (fed.problem, fed.outputs, fed.clients) == (problem, outputs, 2)
    assert ways[0].digest == ways[2].digest == ways[3].digest == ways[4].digest == ways[6].digest
    assert ways[1].samples[0] == half
    # A sample keeps its target.
    both = {(tuple(a), str(b)) for a, b in zip(ways[0].x.tolist(), ways[0].y.tolist(), strict=True)}
    given = Federation.from_arrays([(x, y)])
    assert both == {
        (tuple(a), str(b)) for a, b in zip(given.x.tolist(), given.y.tolist(), strict=True)
    }


def test_one_client_with_fractions_makes_the_whole_a_regression() -> None:
    fed = Federation.from_arrays([(X, np.arange(N)), (X, NUMBERS[:, 0])])
    assert fed.problem == "regression" and fed.y.dtype == torch.float32


def test_whole_numbers_are_labels_unless_the_problem_says_otherwise() -> None:
    ages = np.arange(N) + 20.0
    assert Federation.from_pool(X, ages, clients=2, partition="iid").problem == "classification"
    fed = Federation.from_pool(X, ages, clients=2, problem="regression")
    assert fed.problem == "regression" and sorted(fed.y.tolist()) == ages.tolist()
    assert Federation.from_pool(X, ages[:, None], clients=2, problem="regression").y.shape == (N,)


def test_targets_of_a_regression_stay_as_they_are() -> None:
    y = (1000 + 50 * NUMBERS).astype(np.float32)
    fed = Federation.from_pool(X, y, clients=1, partition="iid")
    assert np.array_equal(np.sort(fed.y.numpy(), axis=0), np.sort(y, axis=0))


def test_what_torch_ignores_becomes_padding() -> None:
    y = FOLLOWING.copy()
    y[:, 4:] = -100
    fed = Federation.from_arrays([(TOKENS, y)])
    assert fed.problem == "next-token" and bool((fed.y[:, 4:] == 0).all())
    assert bool((fed.y[:, :4] > 0).all())


def test_the_vocabulary_covers_what_is_predicted_and_can_be_given() -> None:
    y = FOLLOWING.copy()
    y[0, 0] = 30
    fed = Federation.from_arrays([(TOKENS, y)])
    assert fed.vocabulary == fed.outputs == 31
    fed = Federation.from_arrays([(TOKENS, FOLLOWING)], classes=50)
    assert fed.vocabulary == fed.outputs == 50


def bad(problem: str | None, x, y, message: str, **options):
    return pytest.param(problem, x, y, options, message, id=message[:40])


@pytest.mark.parametrize(
    ("problem", "x", "y", "options", "message"),
    [
        bad("regresion", X, NUMBERS, "unknown problem 'regresion'.*'regression'"),
        bad(
            None, X, PRESENT + 1, r"y has shape \(40, 4\), expected \(40,\).* say problem=multilab"
        ),
        bad(None, TOKENS, TOKENS % 2, "say problem=multilabel, regression or next-token"),
        bad("multilabel", X, PRESENT[:, 0], r"\(40,\), but multilabel needs \[40, labels\]"),
        bad("multilabel", X, PRESENT[:9], r"\(9, 4\), but multilabel needs"),
        bad("multilabel", X, PRESENT, r"needs \[40, 5\], one column per label", classes=5),
        bad("multilabel", X, NUMBERS.round(), "multilabel needs 1 where a label is present"),
        bad("multilabel", X, ["a"] * N, "y has type <U1, but multilabel needs numbers"),
        bad("regression", X, NUMBERS[:7], r"\(7, 2\), but regression needs \(40,\) or \(40, outp"),
        bad("regression", X, NUMBERS, "classes=3, but the problem is regression", classes=3),
        bad("regression", X, np.full(N, 1e300), "1e[+]300, too large for float32; rescale"),
        bad(None, X, [0.5, np.nan] * (N // 2), "y holds 20 values .* the first in sample 1"),
        bad(None, X, [1.0, np.nan] * (N // 2), "labels must be whole numbers"),
        bad("regression", X, [[0.5], [0.5, 1]] * (N // 2), "y has type object, but regression"),
        bad(None, X, [[0.5], [0.5, 1]] * (N // 2), r"got type object starting with \[0.5\]"),
        bad("regression", X, ["a"] * N, "y has type <U1, but regression needs numbers"),
        bad("next-token", X, FOLLOWING, r"X to be integer tokens .*, got float32"),
        bad("next-token", ["to be or not"] * N, FOLLOWING, "got text; number the words"),
        bad("next-token", TOKENS, FOLLOWING[:, 1:], r"needs that of X, \(40, 6\).*s\[:, :-1\]"),
        bad("next-token", TOKENS, FOLLOWING - 3, "y holds -.*, expected tokens 0 to"),
        bad("next-token", TOKENS, FOLLOWING + 0.5, r"y holds .*\.5, expected tokens"),
        bad("next-token", TOKENS, FOLLOWING, "X holds 8, expected tokens 0 to 7", classes=8),
        bad("next-token", TOKENS, 0 * FOLLOWING, "all targets of sample 0 are padding"),
    ],
)
def test_wrong_targets_are_one_line_that_says_what_to_do(problem, x, y, options, message) -> None:
    with pytest.raises(PolytempoError, match=message) as caught:
        Federation.from_arrays([(x, y)], problem=problem, **options)
    assert "\n" not in str(caught.value)


def test_clients_need_targets_of_one_form() -> None:
    with pytest.raises(PolytempoError, match=r"client 1: targets are float32 of shape \(3,\)"):
        Federation.from_arrays([(X, PRESENT), (X, PRESENT[:, :3])])


def test_a_known_data_set_has_its_problem() -> None:
    assert Federation.load("diabetes", problem="regression").problem == "regression"
    with pytest.raises(PolytempoError, match="the targets of digits are for classification"):
        Federation.load("digits", problem="regression")


# -- partitions, splits and counts ----------------------------------------------------------------


def test_numbers_are_divided_by_tenths() -> None:
    y = rng(0, "skewed").standard_normal(1000) ** 3
    bins = strata(y, "regression")
    assert np.bincount(bins).tolist() == [100] * 10
    order = np.argsort(y)
    assert (np.diff(bins[order]) >= 0).all()
    assert strata(np.stack([y, -y], 1), "regression").tolist() == bins.tolist()
    for few, many in ((1.0, 2.0), (2.0, 1.0)):
        assert len(np.unique(strata(np.array([few] * 3 + [many] * 50), "regression"))) == 2


def test_several_labels_are_divided_by_the_first() -> None:
    y = np.array([[0, 1, 1], [1, 1, 0], [0, 0, 0], [0, 0, 1]])
    assert strata(y, "multilabel").tolist() == [1, 0, 3, 2]


def test_partitions_by_label_skew_the_numbers_that_clients_hold() -> None:
    y = rng(0, "y").standard_normal(600)
    x = np.stack([y, y], axis=1)
    groups = "label-groups:proportions=[0.5,0.5]"
    fed = Federation.from_pool(x, y, clients=6, partition=groups)
    low, high = (
        torch.cat([fed.y[fed.train[client]] for client in np.flatnonzero(fed.groups == group)])
        for group in range(2)
    )
    assert low.max() < high.min()
    for partition in ("dirichlet", "pathological", "iid", "quantity"):
        assert Federation.from_pool(x, y, clients=6, partition=partition).clients == 6


@pytest.mark.parametrize("partition", ["dirichlet", "pathological", "label-groups"])
def test_next_tokens_cannot_be_divided_by_label(partition) -> None:
    with pytest.raises(PolytempoError, match=f"partition {partition} goes by labels.*use iid or q"):
        Federation.from_pool(TOKENS, FOLLOWING, clients=4, partition=partition)
    with pytest.raises(PolytempoError, match="use natural, iid or quantity"):
        Federation.load("synthetic-text", clients=4, partition=partition)


def test_next_tokens_without_users_are_divided_at_random() -> None:
    assert Federation.from_pool(TOKENS, FOLLOWING, clients=4).partition == {"name": "iid"}


@pytest.mark.parametrize("problem", ["multilabel", "regression", "next-token"])
def test_a_plain_split_takes_its_share_where_there_are_no_labels(problem) -> None:
    x, y, *_ = KINDS[problem]
    fed = Federation.from_arrays([(x, y)], test_fraction=0.25)
    assert fed.samples == [30] and fed.test[0].stop - fed.test[0].start == 10


def test_labels_are_counted_only_where_there_are_some() -> None:
    fed = Federation.from_pool(X, PRESENT, clients=4)
    assert fed.labelled and fed.classes == 4
    counts = fed.label_counts()
    assert counts.shape == (4, 4) and counts.sum(axis=0).tolist() == PRESENT.sum(axis=0).tolist()
    fed = Federation.from_pool(X, NUMBERS, clients=4)
    assert not fed.labelled and fed.outputs == 2
    with pytest.raises(PolytempoError, match="own is for regression and has no labels to count"):
        fed.label_counts()
    with pytest.raises(PolytempoError, match="own has no labels: it is for regression, with 2 out"):
        _ = fed.classes


def test_the_digest_sees_the_last_bit_of_a_number() -> None:
    y = NUMBERS.astype(np.float32)
    other = y.copy()
    other[3, 1] = np.nextafter(other[3, 1], np.float32(9))
    one, two = (Federation.from_arrays([(X, given)]) for given in (y, other))
    assert one.digest != two.digest
