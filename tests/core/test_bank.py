"""The bank against plain loops in float64."""

import copy
import math
import tracemalloc
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from polytempo.core import bank as module
from polytempo.core import precision
from polytempo.core import tiles as tiling
from polytempo.core.bank import PLAIN_STORAGE, ModelBank, Storage
from polytempo.core.errors import PolytempoError
from polytempo.core.rng import rng
from polytempo.core.tiles import WIDTH
from polytempo.native.sweep import compiled_sweep
from polytempo.storage import load_state, mapped, save_state

CLIENTS, SIZE = 5, 7
MEASURES = ["cosine", "inner", "l1", "l2"]
ORIGINS = ["zero", "initial"]


def draw(*name, size=SIZE) -> list[float]:
    return [float(x) for x in rng(0, "bank", *name).normal(size=size)]


INITIAL = draw("initial")


def poisoned(shape, dtype):
    """Memory in which whatever was not written shows: padding, and rows that nobody has."""
    return torch.full(shape, torch.nan if dtype.is_floating_point else 99, dtype=dtype)


KINDS = {  # precision of the vectors, storage, tolerance
    "double": (torch.float64, Storage(allocate=poisoned), 1e-10),
    "single": (torch.float32, Storage(allocate=poisoned), 2e-5),
    "mapped": (torch.float32, Storage(allocate=mapped()), 2e-5),
    "half": (torch.float32, Storage(bits=16, allocate=poisoned), 2e-2),
    "int8": (torch.float32, Storage(bits=8, allocate=poisoned), 0.3),
}
LARGE = {"kernel": compiled_sweep, "large": 0}
KINDS |= {
    f"large {kind}": (dtype, replace(storage, **LARGE), tolerance)
    for kind, (dtype, storage, tolerance) in KINDS.items()
}


def make_tiny(patch: pytest.MonkeyPatch, kind: str = "") -> None:
    """Banks made from now on have blocks of 2 rows, and tiles of 2 rows and 4 columns; 4 numbers
    share a scale (128 where that is compiled)."""
    columns = 128 if kind == "large int8" else 4
    patch.setattr(module, "BLOCK", 1)
    patch.setattr(module, "SMALL", 0)
    patch.setattr(tiling, "TILE", 2 * columns)
    patch.setattr(tiling, "WIDTH", columns)
    patch.setattr(precision, "GROUP", columns)


def bank(origin: str, dtype=torch.float64, storage=PLAIN_STORAGE) -> ModelBank:
    initial = torch.tensor(INITIAL, dtype=dtype)
    return ModelBank(CLIENTS, initial, initial if origin == "initial" else None, storage)


def stored_bits(made: ModelBank) -> list[bytes]:
    """What is stored for each client, displacement and all."""
    state = made.state_dict()
    rows = torch.cat(state["rows"])
    return [rows[slot].numpy().tobytes() for slot in state["slots"]]


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


WEIGHTS = st.lists(
    # few values, so that clients part late; none near 0: loops over whole models cannot see a
    # displacement of 1e-100
    st.one_of(st.sampled_from([0.0, 0.0, 0.25, 1.0]), st.floats(1e-3, 1)),
    min_size=CLIENTS,
    max_size=CLIENTS,
)
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("set"), st.integers(0, CLIENTS - 1)),
        st.tuples(st.just("mix"), WEIGHTS),
        st.tuples(st.sampled_from(MEASURES), st.none() | WEIGHTS),
        st.tuples(st.just("sum"), st.integers(0, 9)),
    ),
    min_size=1,
    max_size=12,
)


@pytest.mark.parametrize("tiles", ["large", "tiny"])
@pytest.mark.parametrize("kind", [kind for kind in KINDS if "int8" not in kind])
@pytest.mark.parametrize("origin", ORIGINS)
@settings(max_examples=30, deadline=None)
@given(steps=STEPS)
def test_bank_equals_plain_loops_after_any_operations(origin, kind, tiles, steps):
    dtype, storage, tolerance = KINDS[kind]
    loops = Loops(origin)
    with pytest.MonkeyPatch.context() as patch:
        if tiles == "tiny":
            make_tiny(patch, kind)
        made = bank(origin, dtype, storage)
        for number, (what, how) in enumerate(steps):
            vector = draw("step", number)
            theta = torch.tensor(vector, dtype=dtype)
            if what == "set":
                made.set(how, theta)
                loops.rows[how] = vector
            elif what == "mix":
                made.mix(theta, np.array(how))
                loops.mix(vector, how)
            elif what == "sum":
                weights = rng(how, "weights").dirichlet(np.ones(CLIENTS) / 3)
                found, expected = made.weighted_sum(weights), loops.weighted_sum(weights)
                np.testing.assert_allclose(found, expected, tolerance, tolerance)
            else:
                found = made.sweep(theta, what, None if how is None else np.array(how))
                expected = loops.dissimilarity(vector, what)  # before anything is mixed
                np.testing.assert_allclose(found, expected, tolerance, tolerance, err_msg=what)
                if how is not None:
                    loops.mix(vector, how)
        agree(made, loops, draw("probe"), tolerance)


@pytest.mark.parametrize("large", [{}, LARGE])
@pytest.mark.parametrize("bits", [8, 16, 32])
@pytest.mark.parametrize("touched", [0.0, 0.1, 0.7, 1.0])
def test_tiles_of_the_real_size_cover_rows_and_columns(touched, bits, large):
    """A width that is no multiple of anything, in two columns of tiles and several rows of them."""
    clients, size = 30, WIDTH + 4567
    stream = rng(3, "real")
    common = stream.normal(size=size)
    dense = (common + stream.normal(size=(clients, size))).astype(np.float32)
    made = ModelBank(clients, torch.zeros(size), storage=Storage(bits, poisoned, **large))
    for client, row in enumerate(dense):
        made.set(client, torch.from_numpy(row))
    theta = (common + stream.normal(size=size)).astype(np.float32)
    weights = np.where(stream.random(clients) < touched, stream.random(clients), 0.0)
    dense, theta64 = dense.astype(np.float64), theta.astype(np.float64)
    tolerance = {8: 1e-2, 16: 3e-3, 32: 5e-6}[bits]
    for measure in MEASURES:
        found = made.sweep(torch.from_numpy(theta), measure, weights)
        gap = dense - theta64
        expected = {
            "cosine": -dense @ theta64 / np.linalg.norm(dense, axis=1) / np.linalg.norm(theta64),
            "inner": -dense @ theta64,
            "l1": np.abs(gap).sum(1),
            "l2": np.sqrt((gap**2).sum(1)),
        }[measure]
        if measure != "cosine":
            expected /= np.abs(expected).max()
        np.testing.assert_allclose(found, expected, atol=tolerance, err_msg=measure)
        dense += weights[:, None] * (theta64 - dense)
    found = np.stack([made.row(client).numpy() for client in range(clients)])
    each = 5 * 6 / 127 if bits == 8 else tolerance  # five times rounded, numbers up to 6
    np.testing.assert_allclose(found, dense, rtol=tolerance, atol=each)
    mean = rng(4, "mean").dirichlet(np.ones(clients))
    expected = mean @ found.astype(np.float64)
    np.testing.assert_allclose(made.weighted_sum(mean), expected, atol=5e-6)


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


@pytest.mark.parametrize("measure", MEASURES)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("weights", [[0.0, 0.3, 0.0, 1e-2, 0.0], [0.5, 0.5, 0.0, 0.3, 0.1]])
@pytest.mark.parametrize("shared", [False, True])
def test_rows_of_weight_zero_keep_every_bit(weights, kind, measure, shared):
    dtype, storage, _ = KINDS[kind]
    made = bank("zero", dtype, storage)
    row = torch.tensor(draw("row"), dtype=dtype)
    row[:2] = -0.0  # adding 0 times anything would lose the sign
    if shared:
        made.mix(row, np.ones(CLIENTS))
    else:
        for client in range(CLIENTS):
            made.set(client, row)
    before, seen = stored_bits(made), [made.row(client) for client in range(CLIENTS)]
    made.sweep(torch.tensor(draw("mixed in"), dtype=dtype), measure, np.array(weights))
    kept = [a == b for a, b in zip(before, stored_bits(made), strict=True)]
    assert kept == [weight == 0 for weight in weights]
    for client, weight in enumerate(weights):
        assert torch.equal(seen[client], made.row(client)) == (weight == 0)


@settings(max_examples=60)
@given(
    clients=st.integers(1, 40),
    size=st.integers(1, 300),
    dtype=st.sampled_from([torch.float32, torch.float64]),
    measure=st.sampled_from(["cosine", "inner"]),
    seed=st.integers(0, 10**6),
)
def test_a_small_bank_is_worked_on_in_one_piece_to_the_same_bits(
    clients, size, dtype, measure, seed
):
    """Runs of small models are what they were before there was a shorter way."""
    stream = rng(seed, "bank", "small")
    whole, tiled = (ModelBank(clients, torch.ones(size, dtype=dtype)) for _ in range(2))
    for _ in range(6):
        vector = torch.from_numpy(stream.normal(size=size)).to(dtype)
        weights = stream.uniform(size=clients) * (stream.uniform(size=clients) < 0.6)
        client, found = int(stream.integers(clients)), []
        for made, small in ((whole, module.SMALL), (tiled, 0)):
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(module, "SMALL", small)
                made.set(client, vector)
                found.append(made.sweep(vector, measure, weights))
        assert found[0].tobytes() == found[1].tobytes()
        assert stored_bits(whole) == stored_bits(tiled)


def test_what_is_mixed_in_reaches_no_row_of_weight_zero():
    made = bank("zero")
    made.mix(torch.full((SIZE,), torch.inf, dtype=torch.float64), np.array([0, 0.5, 0, 0, 0]))
    assert not torch.isfinite(made.row(1)).any()
    assert all(made.row(client).tolist() == INITIAL for client in (0, 2, 3, 4))


@pytest.mark.parametrize("kind", ["double", "single", "mapped", "large single"])
def test_rows_without_weight_are_left_out_of_a_sum_even_if_infinite(kind):
    dtype, storage, _ = KINDS[kind]
    made = bank("zero", dtype, storage)
    for client in range(CLIENTS):
        made.set(client, torch.full((SIZE,), float(client), dtype=dtype))
    made.set(2, torch.full((SIZE,), torch.inf, dtype=dtype))
    assert made.weighted_sum(np.array([0, 0.5, 0, 0.5, 0])).tolist() == [2.0] * SIZE


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


# -- rows that clients share ---------------------------------------------------------------------


def distinct(made: ModelBank) -> int:
    return sum(len(rows) for rows in made.state_dict()["rows"])


def test_clients_share_a_row_until_they_are_treated_differently():
    made = bank("zero")
    one = torch.ones(SIZE, dtype=torch.float64)
    assert distinct(made) == 1
    made.mix(one, np.full(CLIENTS, 0.5))
    made.dissimilarity(one, "cosine")
    assert distinct(made) == 1
    made.set(2, one)  # a row of its own
    made.set(2, 2 * one)  # which is used again
    assert distinct(made) == 2
    made.mix(one, np.array([0.1, 0.0, 0.3, 0.1, 0.0]))  # 0 and 3 part from 1 and 4
    assert distinct(made) == 3
    made.mix(one, np.array([0.0, 0.0, 0.3, 0.2, 0.2]))
    assert distinct(made) == 5
    made.set(0, one)
    assert distinct(made) == 5


def test_many_clients_take_the_memory_of_the_few_that_differ():
    shapes = []

    def counting(shape, dtype):
        shapes.append(shape)
        return torch.empty(shape, dtype=dtype)

    clients, size = 100_000, 62_006
    made = ModelBank(clients, torch.zeros(size), storage=Storage(allocate=counting))
    for client in (5, 77_777, 99_999):
        theta = torch.from_numpy(rng(client, "many").normal(size=size)).float()
        made.set(client, theta)
        weights = np.full(clients, 0.5)
        weights[[5, 77_777, 99_999]] = 0.0
        made.sweep(theta, "cosine", weights)
    assert distinct(made) == 4
    [(rows, stride)] = shapes  # one block, in which rows begin at multiples of 64 bytes
    assert rows * stride * 4 <= 2**26 and size <= stride < size + 16 and stride % 16 == 0


def test_setting_a_row_touches_nothing_of_the_size_of_the_federation():
    """Neither everybody's number of a row, nor what is known of every row."""
    made, size = ModelBank(200_000, torch.zeros(3)), 3
    for client in range(20_000):
        made.set(client, torch.full((size,), 1.0))
    tracemalloc.start()
    try:
        for client in (7, 20_000, 199_999):  # with a row of its own, and without
            made.set(client, torch.full((size,), 2.0))
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert distinct(made) == 20_003
    assert peak < 20_000  # bytes: one byte per row would be more


@pytest.mark.parametrize("restored", [False, True])
def test_the_last_of_those_who_shared_a_row_keeps_it(restored):
    made, one = bank("zero"), torch.ones(SIZE, dtype=torch.float64)
    made.mix(one, np.array([0.5, 0.5, 0.5, 0.2, 0.2]))
    if restored:
        state, made = made.state_dict(), bank("zero")
        made.load_state_dict(state)
    for client in (0, 1, 2):
        made.set(client, (client + 2) * one)
    assert distinct(made) == 4
    made.set(3, 5 * one)
    assert distinct(made) == 5
    made.set(4, 6 * one)
    assert distinct(made) == CLIENTS
    assert [float(made.row(client)[0]) for client in range(CLIENTS)] == [2, 3, 4, 5, 6]


def test_blocks_come_when_they_are_needed_and_stay_where_they_are():
    blocks = []

    def keeping(shape, dtype):
        blocks.append(torch.empty(shape, dtype=dtype))
        return blocks[-1]

    with pytest.MonkeyPatch.context() as patch:
        make_tiny(patch)
        made = bank("zero", storage=Storage(allocate=keeping))
        sizes = [len(blocks)]
        for client in range(CLIENTS):
            made.set(client, torch.full((SIZE,), float(client), dtype=torch.float64))
            sizes.append(len(blocks))
    assert sizes == [1, 1, 2, 2, 3, 3]  # two rows each; the last client keeps the common row
    held = {tuple(row.tolist()) for block in blocks for row in block[:, :SIZE]}
    assert {(float(client),) * SIZE for client in range(CLIENTS)} <= held


# -- norms ---------------------------------------------------------------------------------------


def cosines_from_rows(made: ModelBank, probe: torch.Tensor) -> list[float]:
    rows = [(made.row(c).double() - made.origin.double()).numpy() for c in range(len(made))]
    other = (probe.double() - made.origin.double()).numpy()
    return [-row @ other / np.linalg.norm(row) / np.linalg.norm(other) for row in rows]


@pytest.mark.parametrize("large", [{}, LARGE])
@pytest.mark.parametrize("bits", [8, 16, 32])
def test_norms_stay_right_after_ten_thousand_mixes(bits, large):
    stream = rng(5, "mixes")
    made = ModelBank(CLIENTS, torch.zeros(200), storage=Storage(bits, **large))
    weights = 10.0 ** stream.uniform(-4, 0, size=(10_000, CLIENTS))
    common = torch.from_numpy(stream.normal(size=200)).float()
    for step in weights:
        made.mix(common + torch.from_numpy(stream.normal(size=200)).float(), step)
    probe = made.weighted_sum(np.full(CLIENTS, 1 / CLIENTS))
    found = made.dissimilarity(probe, "cosine")
    np.testing.assert_allclose(found, cosines_from_rows(made, probe), atol=1e-5)


def test_norms_in_half_precision_follow_what_is_stored_and_not_what_was_lost():
    made = ModelBank(2, torch.ones(64), storage=Storage(bits=16))
    theta = torch.full((64,), 2.0)
    theta[::2] = 1.0
    for _ in range(2000):
        made.mix(theta, np.array([1e-4, 0.0]))  # each time less than half a unit in the last place
    assert torch.equal(made.row(0), torch.ones(64))
    found = made.dissimilarity(theta, "cosine")
    np.testing.assert_allclose(found, cosines_from_rows(made, theta), atol=1e-6)


@pytest.mark.parametrize("size", [WIDTH - 1, 5_000_000])
def test_norms_of_large_models_keep_their_digits(size):
    made = ModelBank(1, torch.zeros(1).expand(size))
    theta = torch.from_numpy(rng(6, "large").normal(size=size)).float()
    made.set(0, theta)
    assert made.state_dict()["squares"][0] == pytest.approx(
        float(theta.double().square().sum()), 2e-6
    )


# -- revisions -----------------------------------------------------------------------------------


def test_a_revision_is_new_when_the_row_is_and_only_then():
    made = bank("zero")
    one = torch.ones(SIZE, dtype=torch.float64)

    def revisions():
        return [made.revision(client) for client in range(CLIENTS)]

    def changed(action):
        before = revisions()
        action()
        return [c for c in range(CLIENTS) if revisions()[c] != before[c]]

    assert changed(lambda: made.set(1, one)) == [1]
    assert changed(lambda: made.set(1, one)) == [1]
    assert changed(lambda: made.mix(one, np.array([0.5, 0, 0.5, 0, 0.5]))) == [0, 2, 4]
    assert changed(lambda: made.sweep(one, "l1", np.array([0, 0, 0.5, 0.1, 0]))) == [2, 3]
    assert changed(lambda: made.mix(one, np.zeros(CLIENTS))) == []
    assert changed(lambda: made.dissimilarity(one, "cosine")) == []
    assert changed(lambda: made.weighted_sum(np.full(CLIENTS, 0.2))) == []
    state = copy.deepcopy(made.state_dict())
    assert changed(lambda: made.load_state_dict(state)) == list(range(CLIENTS))
    assert "revisions" not in state


@settings(max_examples=40, deadline=None)
@given(steps=STEPS)
def test_one_revision_never_stands_for_two_rows(steps):
    made, seen, saved = bank("initial"), {}, []
    for number, (what, how) in enumerate(steps):
        vector = torch.tensor(draw("step", number), dtype=torch.float64)
        if what == "set":
            made.set(how, vector)
        elif what == "sum":  # here: go back to an earlier state, or save one
            saved.append(copy.deepcopy(made.state_dict()))
            made.load_state_dict(saved[how % len(saved)])
        else:
            made.mix(vector, np.zeros(CLIENTS) if how is None else np.array(how))
        for client in range(CLIENTS):
            bits = made.row(client).numpy().tobytes()
            assert seen.setdefault((client, made.revision(client)), bits) == bits


# -- state ---------------------------------------------------------------------------------------


def lived_in(origin: str, kind: str) -> ModelBank:
    """A bank in which some clients share a row and some do not."""
    dtype, storage, _ = KINDS[kind]
    made = bank(origin, dtype, storage)
    made.set(1, torch.tensor(draw("one"), dtype=dtype))
    made.mix(torch.tensor(draw("two"), dtype=dtype), np.array([0.1, 0.2, 0.1, 0.0, 1.0]))
    return made


def go_on(made: ModelBank) -> list[np.ndarray]:
    """Everything that can be seen of a bank after some more operations."""
    dtype, found = made.origin.dtype, []
    for measure in MEASURES:
        theta = torch.tensor(draw("go on", MEASURES.index(measure)), dtype=dtype)
        found.append(made.sweep(theta, measure, np.array([0.5, 0.0, 0.5, 0.9, 0.7])))
        made.set(3, theta)
    found.append(made.weighted_sum(np.array([0.1, 0.2, 0.3, 0.4, 0.0])).numpy())
    return found + [made.row(client).numpy() for client in range(CLIENTS)]


@pytest.mark.parametrize("tiles", ["large", "tiny"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("origin", ORIGINS)
def test_bank_continues_from_its_state_to_the_bit(origin, kind, tiles, tmp_path):
    with pytest.MonkeyPatch.context() as patch:
        if tiles == "tiny":
            make_tiny(patch, kind)
        made = lived_in(origin, kind)
        save_state(tmp_path / "bank", made.state_dict())
        dtype, storage, _ = KINDS[kind]
        resumed = ModelBank(
            CLIENTS, torch.zeros(SIZE, dtype=dtype), torch.ones(SIZE, dtype=dtype), storage
        )
        resumed.set(4, torch.ones(SIZE, dtype=dtype))  # of which nothing is left
    resumed.load_state_dict(load_state(tmp_path / "bank"))
    assert distinct(resumed) == distinct(made) == 4
    for ours, theirs in zip(go_on(resumed), go_on(made), strict=True):
        np.testing.assert_array_equal(ours, theirs)


@pytest.mark.parametrize("into", ["single", "mapped", "half", "int8"])
@pytest.mark.parametrize("out_of", ["single", "mapped", "half", "int8"])
def test_a_state_can_be_continued_in_another_storage(out_of, into, tmp_path):
    made = lived_in("initial", out_of)
    save_state(tmp_path / "bank", made.state_dict())
    resumed = bank("zero", torch.float32, KINDS[into][1])
    resumed.load_state_dict(load_state(tmp_path / "bank"))
    tolerance = 5e-3 if "half" in (out_of, into) else 0
    if "int8" in (out_of, into):
        tolerance = 0.15 if out_of != into else 0
    for ours, theirs in zip(go_on(resumed), go_on(made), strict=True):
        np.testing.assert_allclose(ours, theirs, tolerance, tolerance)


def test_the_state_holds_each_distinct_row_once():
    state = ModelBank(1000, torch.zeros(SIZE)).state_dict()
    assert sum(len(rows) for rows in state["rows"]) == len(state["squares"]) == 1


@pytest.mark.parametrize(("clients", "size"), [(CLIENTS + 1, SIZE), (CLIENTS, SIZE - 1)])
def test_a_state_of_another_size_is_refused(clients, size):
    state = ModelBank(clients, torch.zeros(size)).state_dict()
    with pytest.raises(PolytempoError, match=f"{clients} clients with {size} parameters"):
        bank("zero", torch.float32).load_state_dict(state)


def test_a_state_that_lacks_rows_is_refused():
    state = lived_in("zero", "single").state_dict()
    state["rows"] = [state["rows"][0][:-1]]
    with pytest.raises(ValueError):
        bank("zero", torch.float32).load_state_dict(state)


def test_what_half_precision_cannot_hold_is_refused_and_the_old_row_stays():
    made = ModelBank(2, torch.zeros(3), storage=Storage(bits=16))
    made.set(0, torch.ones(3))
    with pytest.raises(PolytempoError, match="65504"):
        made.set(0, torch.tensor([1.0, 7e4, 1.0]))
    assert made.row(0).tolist() == [1.0, 1.0, 1.0]


def test_half_precision_is_what_it_says():
    row = torch.tensor(draw("half", size=1000)) * torch.logspace(-4, 4, 1000)
    made = ModelBank(1, torch.zeros(1000), storage=Storage(bits=16))
    made.set(0, row)
    assert made.row(0).dtype == torch.float32
    np.testing.assert_allclose(made.row(0), row, rtol=4.9e-4, atol=3e-8)
    assert not torch.equal(made.row(0), row)


# -- eight bits ------------------------------------------------------------------------------------


def scales_of(values: np.ndarray, group: int) -> np.ndarray:
    """Of each number: the largest of its group, divided by 127."""
    padded = np.zeros(-(-len(values) // group) * group)
    padded[: len(values)] = np.abs(values)
    largest = padded.reshape(-1, group).max(1)
    return np.repeat(largest / 127, group)[: len(values)]


def near(made: ModelBank, client: int, expected: list[float], group: int) -> None:
    """Each number is one of the two multiples of the scale beside it."""
    shift = made.origin.double().numpy()
    wanted = np.array(expected) - shift
    found = made.row(client).double().numpy() - shift
    off = np.abs(found - wanted)
    assert (off <= scales_of(wanted, group) * (1 + 1e-4) + 1e-5).all()


@pytest.mark.parametrize("tiles", ["large", "tiny"])
@pytest.mark.parametrize("origin", ORIGINS)
@settings(max_examples=30, deadline=None)
@given(steps=STEPS)
def test_eight_bits_round_what_is_written_once_and_measure_what_is_kept(origin, tiles, steps):
    """Step by step, for errors would add up: the loops go on from the rows that are kept."""
    loops, group = Loops(origin), 4 if tiles == "tiny" else 128
    with pytest.MonkeyPatch.context() as patch:
        if tiles == "tiny":
            make_tiny(patch)
        made = bank(origin, torch.float32, Storage(8, poisoned))
        loops.origin = made.origin.double().tolist()
        for number, (what, how) in enumerate(steps):
            loops.rows = [made.row(client).double().tolist() for client in range(CLIENTS)]
            vector = torch.tensor(draw("step", number)).tolist()  # float32 numbers
            if what == "set":
                made.set(how, torch.tensor(vector))
                loops.rows[how] = vector
            elif what == "sum":
                weights = rng(how, "weights").dirichlet(np.ones(CLIENTS) / 3)
                found, expected = made.weighted_sum(weights), loops.weighted_sum(weights)
                np.testing.assert_allclose(found, expected, 2e-5, 2e-5)
            else:
                measure = "cosine" if what == "mix" else what
                found = made.sweep(
                    torch.tensor(vector), measure, None if how is None else np.array(how)
                )
                expected = loops.dissimilarity(vector, measure)
                np.testing.assert_allclose(found, expected, 2e-4, 2e-4, err_msg=measure)
                if how is not None:
                    loops.mix(vector, how)
            for client in range(CLIENTS):
                near(made, client, loops.rows[client], group)


def test_eight_bits_take_a_quarter_of_the_memory():
    taken = {}
    for bits in (8, 32):
        blocks = []

        def counting(shape, dtype, blocks=blocks):
            blocks.append(torch.empty(shape, dtype=dtype))
            return blocks[-1]

        made = ModelBank(30, torch.zeros(62_006), storage=Storage(bits, counting))
        for client in range(30):
            made.set(client, torch.full((62_006,), float(client)))
        state = made.state_dict()
        taken[bits] = sum(block.nbytes for block in blocks), sum(r.nbytes for r in state["rows"])
    allocated, saved = (a / b for a, b in zip(taken[8], taken[32], strict=True))
    assert 0.25 < allocated <= 0.27
    assert 0.25 < saved <= 0.27


def test_rounding_to_eight_bits_is_right_on_average():
    """The mean of many roundings lies within 5 of its standard deviations, which follow from the
    chance to be rounded up: p (1 - p) scale^2. All the 300 squared deviations together follow a
    chi-squared distribution, whose mean and variance are known too."""
    times, size = 4000, 300
    values = rng(1, "unbiased").normal(size=size) * np.logspace(-6, 3, size)
    made = ModelBank(1, torch.zeros(size), storage=Storage(8, seed=5))
    total, vector = np.zeros(size), torch.from_numpy(values).float()
    for _ in range(times):
        made.set(0, vector)
        total += made.row(0).double().numpy()
    exact = vector.double().numpy()
    scales = scales_of(exact, 128).astype(np.float32).astype(np.float64)
    up = exact / scales - np.floor(exact / scales)
    deviation = scales * np.sqrt(up * (1 - up) / times)
    sure = up * (1 - up) * times < 10  # too rare for the normal distribution: bounded alone
    z = (total / times - exact)[~sure] / deviation[~sure]
    assert len(z) > 150 and np.abs(z).max() < 5
    assert abs((z**2).sum() - len(z)) < 5 * np.sqrt(2 * len(z))
    assert (np.abs(total / times - exact)[sure] < scales[sure] * 30 / times).all()


def test_rounding_is_named_by_the_seed_and_the_number_of_the_change():
    vector = torch.tensor(draw("rounded", size=500))

    def rounded(seed, times):
        made = ModelBank(1, torch.zeros(500), storage=Storage(8, seed=seed))
        for _ in range(times):
            made.set(0, vector)
        return made.row(0)

    assert torch.equal(rounded(3, 2), rounded(3, 2))
    assert not torch.equal(rounded(3, 2), rounded(4, 2))
    assert not torch.equal(rounded(3, 2), rounded(3, 3))


def test_the_extremes_of_eight_bits():
    made = ModelBank(2, torch.zeros(200), storage=Storage(8, poisoned))
    assert not made.row(0).any()  # zeros stay zeros, without a scale
    vector = torch.zeros(200)
    vector[3], vector[150] = -2.54, 1e18
    made.set(1, vector)
    kept = made.row(1)  # the largest of each group is kept as it is, and every zero
    torch.testing.assert_close(kept, vector, rtol=1e-6, atol=0)
    with pytest.raises(PolytempoError, match="8 bits"):
        made.set(1, torch.full((200,), 1e30))
    assert torch.equal(made.row(1), kept)
    tiny = torch.full((200,), 1e-44)  # below what a scale can express
    made.set(0, tiny)
    assert torch.isfinite(made.row(0)).all() and made.row(0).abs().max() <= 2e-43


def test_a_checkpoint_without_a_count_of_draws_is_read():
    state = lived_in("zero", "single").state_dict()
    del state["draws"]  # as they were before there were eight bits
    resumed = bank("zero", torch.float32)
    resumed.load_state_dict(state)
    assert torch.equal(resumed.row(1), lived_in("zero", "single").row(1))
