"""The bank against plain loops in float64."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from polytempo.core.bank import ModelBank
from polytempo.core.rng import rng
from polytempo.storage import load_state, save_state

CLIENTS, SIZE = 5, 7
MEASURES = ["cosine", "inner", "l1", "l2"]
ORIGINS = ["zero", "initial"]


def draw(*name, size=SIZE) -> list[float]:
    return [float(x) for x in rng(0, "bank", *name).normal(size=size)]


INITIAL = draw("initial")


def bank(origin: str, dtype=torch.float64) -> ModelBank:
    initial = torch.tensor(INITIAL, dtype=dtype)
    return ModelBank(CLIENTS, initial, initial if origin == "initial" else None)


class Loops:
    """The same, as a list of lists of Python floats."""

    def __init__(self, origin: str) -> None:
        self.origin = INITIAL if origin == "initial" else [0.0] * SIZE
        self.rows = [list(INITIAL) for _ in range(CLIENTS)]

    def mix(self, vector, weights):
        for row, w in zip(self.rows, weights, strict=True):
            for k in range(SIZE):
                row[k] = w * vector[k] + (1 - w) * row[k]

    def weighted_sum(self, weights):
        return [
            math.fsum(w * row[k] for w, row in zip(weights, self.rows, strict=True))
            for k in range(SIZE)
        ]

    def dissimilarity(self, vector, measure):
        def moved(v):
            return [x - o for x, o in zip(v, self.origin, strict=True)]

        def dot(a, b):
            return math.fsum(x * y for x, y in zip(a, b, strict=True))

        v = moved(vector)
        rows = [moved(row) for row in self.rows]
        if measure == "cosine":
            sizes = [math.sqrt(dot(row, row) * dot(v, v)) for row in rows]
            return [
                -dot(row, v) / size if size > 0 else 0.0
                for row, size in zip(rows, sizes, strict=True)
            ]
        if measure == "inner":
            raw = [-dot(row, v) for row in rows]
        elif measure == "l1":
            raw = [sum(abs(x - y) for x, y in zip(row, v, strict=True)) for row in rows]
        else:
            raw = [math.dist(row, v) for row in rows]
        largest = max(abs(value) for value in raw)
        return [value / largest if largest > 0 else 0.0 for value in raw]


def agree(made: ModelBank, loops: Loops, probe: list[float], tolerance: float) -> None:
    dtype = made.origin.dtype
    for client in range(CLIENTS):
        np.testing.assert_allclose(made.row(client), loops.rows[client], tolerance, tolerance)
    for measure in MEASURES:
        found = made.dissimilarity(torch.tensor(probe, dtype=dtype), measure)
        assert found.dtype == np.float64 and found.shape == (CLIENTS,)
        expected = loops.dissimilarity(probe, measure)
        np.testing.assert_allclose(found, expected, tolerance, tolerance, err_msg=measure)


@st.composite
def operations(draw_: st.DrawFn) -> list[tuple]:
    # no weights near 0: loops over whole models cannot see a displacement of 1e-100
    weight = st.one_of(st.just(0.0), st.just(1.0), st.floats(1e-3, 1))
    weights = st.lists(weight, min_size=CLIENTS, max_size=CLIENTS)
    setting = st.tuples(st.just("set"), st.integers(0, CLIENTS - 1))
    mixing = st.tuples(st.just("mix"), weights)
    return draw_(st.lists(st.one_of(setting, mixing), min_size=1, max_size=12))


@pytest.mark.parametrize("origin", ORIGINS)
@settings(max_examples=40, deadline=None)
@given(steps=operations())
def test_bank_equals_plain_loops_after_any_operations(origin, steps):
    made, loops = bank(origin), Loops(origin)
    for number, (what, how) in enumerate(steps):
        vector = draw("step", number)
        if what == "set":
            made.set(how, torch.tensor(vector, dtype=torch.float64))
            loops.rows[how] = vector
        else:
            made.mix(torch.tensor(vector, dtype=torch.float64), np.array(how))
            loops.mix(vector, how)
    agree(made, loops, draw("probe"), 1e-10)
    weights = rng(0, "weights").dirichlet(np.ones(CLIENTS))
    found = made.weighted_sum(weights)
    np.testing.assert_allclose(found, loops.weighted_sum(weights), 1e-11, 1e-11)


@pytest.mark.parametrize("origin", ORIGINS)
def test_cached_norms_stay_right_over_a_long_run_in_single_precision(origin):
    made, loops = bank(origin, torch.float32), Loops(origin)
    stream = rng(1, "long")
    for step in range(400):
        vector = draw("long", step)
        single = torch.tensor(vector)
        if step % 7 == 0:
            client = int(stream.integers(CLIENTS))
            made.set(client, single)
            loops.rows[client] = vector
        else:
            weights = stream.random(CLIENTS) * (stream.random(CLIENTS) < 0.6)
            made.mix(single, weights)
            loops.mix(vector, weights)
        if step % 40 == 39:
            agree(made, loops, draw("probe", step), 3e-6)


@pytest.mark.parametrize("origin", ORIGINS)
def test_everybody_starts_as_the_initial_model(origin):
    made = bank(origin)
    assert len(made) == CLIENTS
    for client in range(CLIENTS):
        np.testing.assert_allclose(made.row(client), INITIAL, rtol=1e-15)


@pytest.mark.parametrize("origin", ORIGINS)
def test_rows_of_weight_zero_keep_every_bit(origin):
    made = bank(origin, torch.float32)
    for client in range(CLIENTS):
        made.set(client, torch.tensor(draw("row", client)))
    before = [made.row(client).numpy().tobytes() for client in range(CLIENTS)]
    stored = made.state_dict()["rows"].clone().numpy()
    made.mix(torch.tensor(draw("mixed in")), np.array([0.0, 0.3, 0.0, 1e-3, 0.0]))
    after = [made.row(client).numpy().tobytes() for client in range(CLIENTS)]
    assert [a == b for a, b in zip(before, after, strict=True)] == [True, False, True, False, True]
    kept = made.state_dict()["rows"].numpy()
    for client in (0, 2, 4):
        assert kept[client].tobytes() == stored[client].tobytes()


def test_rows_of_weight_zero_are_not_even_read():
    made = bank("zero")
    made.mix(torch.full((SIZE,), torch.inf, dtype=torch.float64), np.array([0, 0.5, 0, 0, 0]))
    assert not torch.isfinite(made.row(1)).any()
    assert all(made.row(client).tolist() == INITIAL for client in (0, 2, 3, 4))


def test_mixing_with_weight_one_replaces_and_a_tiny_weight_moves_a_little():
    made = bank("zero")
    vector = torch.tensor(draw("v"), dtype=torch.float64)
    made.mix(vector, np.array([1.0, 1e-6, 0, 0, 0]))
    np.testing.assert_allclose(made.row(0), vector, rtol=1e-14)
    moved = made.row(1) - made.row(2)
    np.testing.assert_allclose(moved, 1e-6 * (vector - made.row(2)), rtol=1e-8)


@pytest.mark.parametrize("origin", ORIGINS)
def test_bank_shares_no_memory_with_what_goes_in_or_comes_out(origin):
    initial = torch.tensor(INITIAL, dtype=torch.float64)
    made = ModelBank(CLIENTS, initial, initial if origin == "initial" else None)
    vector = torch.ones(SIZE, dtype=torch.float64)
    made.set(2, vector)
    before = made.row(2)
    initial.fill_(9)
    vector.fill_(9)
    out = made.row(2)
    out.fill_(9)
    np.testing.assert_allclose(made.row(2), np.ones(SIZE), rtol=1e-14)
    np.testing.assert_allclose(made.row(0), INITIAL, rtol=1e-14)
    made.set(2, vector)  # a model handed out earlier stays as it was
    np.testing.assert_allclose(before, np.ones(SIZE), rtol=1e-14)


def hand_made(origin: torch.Tensor | None = None) -> ModelBank:
    """Rows (3, 4), (0, 0), (-4, 3), seen from the origin."""
    shift = torch.zeros(2, dtype=torch.float64) if origin is None else origin
    made = ModelBank(3, torch.zeros(2, dtype=torch.float64), origin)
    for client, row in enumerate([(3.0, 4.0), (0.0, 0.0), (-4.0, 3.0)]):
        made.set(client, torch.tensor(row, dtype=torch.float64) + shift)
    return made


@pytest.mark.parametrize("shift", [None, (10.0, -2.0)])
@pytest.mark.parametrize(
    ("measure", "expected"),
    [
        ("cosine", [-1.0, 0.0, 0.0]),
        ("inner", [-1.0, 0.0, 0.0]),
        ("l1", [7 / 15, 14 / 15, 15 / 15]),  # |3|+|4|, |6|+|8|, |10|+|5|
        ("l2", [5 / math.sqrt(125), 10 / math.sqrt(125), 1.0]),
    ],
)
def test_measures_by_hand(measure, expected, shift):
    origin = None if shift is None else torch.tensor(shift, dtype=torch.float64)
    vector = torch.tensor([6.0, 8.0], dtype=torch.float64)
    if origin is not None:
        vector = vector + origin
    found = hand_made(origin).dissimilarity(vector, measure)
    np.testing.assert_allclose(found, expected, atol=1e-12)


@pytest.mark.parametrize(
    ("measure", "expected"),
    [("cosine", [0, 0, 0]), ("inner", [0, 0, 0]), ("l1", [1, 0, 1]), ("l2", [1, 0, 1])],
)
def test_the_zero_vector_has_no_direction_but_a_distance(measure, expected):
    found = hand_made().dissimilarity(torch.zeros(2, dtype=torch.float64), measure)
    np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("measure", MEASURES)
def test_a_bank_that_nobody_has_changed_compares_without_nan(measure):
    made = bank("initial", torch.float32)  # every displacement is zero
    found = made.dissimilarity(torch.tensor(INITIAL), measure)
    np.testing.assert_array_equal(found, np.zeros(CLIENTS))


@settings(max_examples=60, deadline=None)
@given(scale=st.floats(1e-6, 1e6), seed=st.integers(0, 10**6), measure=st.sampled_from(MEASURES))
def test_measures_stay_on_their_documented_scale_whatever_the_size_of_the_models(
    scale, seed, measure
):
    made = ModelBank(CLIENTS, torch.zeros(SIZE))
    rows = rng(seed, "rows").normal(size=(CLIENTS, SIZE)) * scale
    for client, row in enumerate(rows):
        made.set(client, torch.tensor(row, dtype=torch.float32))
    found = made.dissimilarity(made.row(0), measure)
    low = -1 if measure in ("cosine", "inner") else 0
    assert found.min() >= low - 1e-6 and found.max() <= 1 + 1e-6
    if measure == "cosine":
        assert found[0] == pytest.approx(-1, abs=1e-6)
    elif measure == "inner":
        assert np.abs(found).max() == pytest.approx(1)
    else:
        assert found[0] == 0 and found.max() == 1


@pytest.mark.parametrize("origin", ORIGINS)
def test_bank_continues_from_its_state_to_the_bit(origin, tmp_path):
    made = bank(origin, torch.float32)
    made.set(1, torch.tensor(draw("one")))
    made.mix(torch.tensor(draw("two")), np.array([0.1, 0.2, 0.3, 0.0, 1.0]))
    save_state(tmp_path / "bank", made.state_dict())
    resumed = ModelBank(CLIENTS, torch.zeros(SIZE), torch.ones(SIZE))
    resumed.load_state_dict(load_state(tmp_path / "bank"))
    probe = torch.tensor(draw("probe"))
    for each in (made, resumed):
        each.mix(torch.tensor(draw("three")), np.array([0.5, 0.0, 0.3, 0.9, 0.7]))
        each.set(3, torch.tensor(draw("four")))
    for client in range(CLIENTS):
        assert torch.equal(made.row(client), resumed.row(client))
    for measure in MEASURES:
        np.testing.assert_array_equal(
            made.dissimilarity(probe, measure), resumed.dissimilarity(probe, measure)
        )
