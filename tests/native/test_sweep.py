"""A pass over a bank as compiled code, and on threads, against float64 and against one thread."""

import multiprocessing as mp
import os
import platform
import threading
import time

import numpy as np
import pytest
import torch

from polytempo.core import bank as module
from polytempo.core.bank import ModelBank, Storage, no_kernel
from polytempo.core.precision import Exact, Half, Int8
from polytempo.core.rng import rng
from polytempo.experiments.config import RunConfig
from polytempo.native import sweep
from polytempo.native.sweep import compiled_sweep, on_threads
from solving import needs_compiler

FORMATS = {32: Exact(torch.float32), 16: Half(), 8: Int8()}
MEASURES = ["cosine", "l1", "l2"]
PARTS = range(100)  # enough for several threads
# within a vector, a group, two groups; several strips of sums; not a multiple of anything
SIZES = [1, 7, 128, 129, 300, 4096, 12_345]


@pytest.fixture(params=["this machine", "any"])
def kernel(request, monkeypatch):
    """Compiled for this machine, and for any machine of its kind."""
    if request.param == "any":
        if platform.machine() != "x86_64":
            pytest.skip("there is one kind of vectors only")
        monkeypatch.setenv("POLYTEMPO_CXXFLAGS", "-mno-avx -mno-fma -mno-f16c")
    compiled_sweep.cache_clear()
    found = compiled_sweep()
    if found is None:
        pytest.skip("there is no C++ compiler")
    yield found
    compiled_sweep.cache_clear()


def stored(values: torch.Tensor, bits: int, spare: int = 20) -> torch.Tensor:
    """Rows in that format, further apart than need be, with what is not theirs between them."""
    packed = FORMATS[bits].pack(values)
    room = torch.full((len(packed), packed.shape[1] + spare), 99, dtype=packed.dtype)
    if bits > 8:
        room[:] = torch.nan
    room[:, : packed.shape[1]] = packed
    return room[:, : packed.shape[1]]


def values_of(rows: torch.Tensor, bits: int, size: int) -> np.ndarray:
    """What the rows stand for."""
    room = torch.empty(len(rows), rows.shape[1], dtype=torch.float32)
    return FORMATS[bits].unpack(rows, room)[:, :size].double().numpy()


def drawn(*shape: int, name: str) -> torch.Tensor:
    return torch.from_numpy(rng(0, "sweep", name).normal(size=shape)).float()


@pytest.mark.parametrize("measure", MEASURES)
@pytest.mark.parametrize("bits", FORMATS)
@pytest.mark.parametrize("size", SIZES)
def test_products_distances_and_norms_are_those_of_float64(kernel, size, bits, measure):
    rows, vector = stored(drawn(11, size, name="rows"), bits), drawn(size, name="vector")
    shares = np.array([0, 0, 0, 0, 0, 0.3, 0, 1, 1e-3, 0, 0.6])
    before, v = values_of(rows, bits, size), vector.double().numpy()
    products, distances, squares = kernel(vector, measure)(rows, shares, 17)
    scale = np.linalg.norm(before, axis=1) * np.linalg.norm(v)
    np.testing.assert_array_less(np.abs(products - before @ v), 1e-6 * scale + 1e-12)
    gap = before - v
    far = {"cosine": 0 * scale, "l1": np.abs(gap).sum(1), "l2": (gap**2).sum(1)}[measure]
    np.testing.assert_allclose(distances, far, rtol=1e-6)
    after = values_of(rows, bits, size)
    norms = (after**2).sum(1) * (shares != 0) * (bits < 32)
    np.testing.assert_allclose(squares, norms, rtol=1e-6)


@pytest.mark.parametrize("bits", [16, 32])
@pytest.mark.parametrize("size", SIZES)
def test_rows_move_by_their_share_and_are_rounded_to_the_nearest(kernel, size, bits):
    values, vector = drawn(4, size, name="rows"), drawn(size, name="vector")
    rows, shares = stored(values, bits), np.array([0.3, 1.0, 0.0, 0.8])
    bare = rows._base.clone()
    before = values_of(rows, bits, size)
    kernel(vector, "cosine")(rows, shares, 0)
    exact = before + shares[:, None] * (vector.double().numpy() - before)
    unit = 2.0**-24 if bits == 32 else 2.0**-11
    found = values_of(rows, bits, size)
    largest = np.abs(before) + np.abs(vector.double().numpy())
    np.testing.assert_array_less(
        np.abs(found - exact), 1.01 * unit * np.abs(exact) + 3e-7 * largest
    )
    assert torch.equal(rows[1], FORMATS[bits].pack(vector))  # a share of 1 replaces
    assert torch.equal(rows[2], bare[2, :size])
    assert torch.equal(rows._base[:, size:].isnan(), bare[:, size:].isnan())


@pytest.mark.parametrize("size", [1, 130, 12_345])
def test_rounding_to_8_bits_is_right_on_average_and_by_less_than_a_unit(kernel, size):
    values, vector = drawn(3, size, name="rows"), drawn(size, name="vector")
    first, shares = stored(values, 8), np.array([0.0, 0.4, 0.4])
    before = values_of(first, 8, size)
    exact = before + shares[:, None] * (vector.double().numpy() - before)
    padded = np.zeros((3, -(-size // 128) * 128))
    padded[:, :size] = np.abs(exact)
    unit = padded.reshape(3, -1, 128).max(2).repeat(128, 1)[:, :size] / 127
    errors = []
    for key in range(400):
        rows = first.clone()
        kernel(vector, "cosine")(rows, shares, 1000 * key)
        assert torch.equal(rows[0], first[0])
        errors.append((values_of(rows, 8, size) - exact)[1:] / unit[1:])
    errors = np.array(errors)
    assert np.abs(errors).max() <= 1 + 1e-4
    spread = 0.5 / np.sqrt(errors.size)  # of the mean of them, at most
    assert abs(errors.mean()) < 5 * spread + 1e-6
    # nor does it lean in any number by itself, nor are two rows or two passes rounded alike
    assert np.abs(errors.mean(0)).max() < 6 * 0.5 / 20
    if size > 1:
        apart = errors - errors.mean(0)
        for one, other in ((apart[:, 0], apart[:, 1]), (apart[1:, 0], apart[:-1, 0])):
            assert abs((one * other).mean()) < 5 * 0.25 / np.sqrt(one.size)


@pytest.mark.parametrize("bits", FORMATS)
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_a_diverged_upload_is_seen_in_what_it_is_mixed_into(kernel, bits, bad):
    vector = drawn(300, name="vector")
    vector[7] = bad
    rows = stored(drawn(2, 300, name="rows"), bits)
    products, _, squares = kernel(vector, "cosine")(rows, np.array([0.5, 0.0]), 0)
    after = values_of(rows, bits, 300)
    assert not np.isfinite(products).any()
    assert not np.isfinite(after[0, 7]) and np.isfinite(after[1]).all()
    assert not np.isfinite(squares[0]) or bits == 32


# -- threads -------------------------------------------------------------------------------------


def lived_in(storage: Storage) -> tuple[list[bytes], list[np.ndarray]]:
    """All that can be seen of a bank after some time."""
    stream, size = rng(1, "threads"), 700
    made = ModelBank(60, torch.zeros(size), storage=storage)
    seen = []
    for step in range(12):
        theta = torch.from_numpy(stream.normal(size=size)).float()
        weights = stream.random(60) * (stream.random(60) < (0.2 if step % 2 else 0.8))
        seen.append(made.sweep(theta, MEASURES[step % 3], weights))
        made.set(step, theta)
    rows = torch.cat(made.state_dict()["rows"])
    return [row.numpy().tobytes() for row in rows], [*seen, made.state_dict()["squares"]]


@pytest.mark.parametrize("load", [pytest.param(compiled_sweep, marks=needs_compiler), no_kernel])
@pytest.mark.parametrize("bits", FORMATS)
def test_the_number_of_threads_does_not_change_a_bit(monkeypatch, bits, load):
    monkeypatch.setattr(module, "SHARD", 5 * 700)  # a few rows at a time
    monkeypatch.setattr(sweep, "PAYS", 1)
    rows, seen = lived_in(Storage(bits, kernel=load, large=0))
    for count in (1, 2, 3, 7):
        others, more = lived_in(Storage(bits, kernel=load, spread=on_threads(count), large=0))
        assert others == rows
        for ours, theirs in zip(seen, more, strict=True):
            np.testing.assert_array_equal(ours, theirs)


@needs_compiler
@pytest.mark.parametrize("bits", FORMATS)
def test_compiled_rows_do_not_depend_on_how_they_are_divided(monkeypatch, bits):
    found = []
    for shard in (4, 5, 7, 1000):
        monkeypatch.setattr(module, "SHARD", shard * 700)
        found.append(lived_in(Storage(bits, kernel=compiled_sweep, large=0))[0])
    assert all(rows == found[0] for rows in found)


def test_every_part_is_worked_on_once_by_as_many_threads_as_asked_for():
    gate, done = threading.Barrier(3), []

    def work(parts):
        gate.wait(60)  # for two others
        done.extend(parts)

    on_threads(3)(work, range(100))
    assert sorted(done) == list(range(100))


def test_nobody_waits_for_a_thread_that_has_not_begun():
    busy, begun, done = threading.Event(), threading.Event(), []
    here = threading.get_ident()

    def occupy(parts):
        if threading.get_ident() != here:
            begun.set()
            busy.wait(60)

    spread = on_threads(2)
    blocked = threading.Thread(target=spread, args=(occupy, PARTS))
    blocked.start()  # this one and the thread of the pool are both waiting
    assert begun.wait(60)
    spread(done.extend, PARTS)
    assert done == list(PARTS) and not busy.is_set()
    busy.set()
    blocked.join(60)


def test_a_thread_that_has_begun_is_waited_for_even_after_an_error():
    begun, done = threading.Event(), []

    def work(parts):
        if threading.current_thread() is threading.main_thread():
            assert begun.wait(60)
            raise ValueError("here")
        begun.set()
        time.sleep(0.2)
        done.append(1)

    with pytest.raises(ValueError, match="here"):
        on_threads(2)(work, PARTS)
    assert done == [1]


def test_each_thread_has_enough_to_do():
    seen = []
    gate = threading.Barrier(2)  # a third would wait in vain
    on_threads(8)(lambda parts: seen.append(gate.wait(60)), range(3 * sweep.PAYS - 1))
    assert sorted(seen) == [0, 1]
    here = threading.get_ident()
    on_threads(8)(lambda parts: seen.append(threading.get_ident()), range(2 * sweep.PAYS - 1))
    on_threads(8)(lambda parts: seen.append(threading.get_ident()), [])
    assert seen[2:] == [here, here]


def test_an_error_on_a_thread_is_an_error_here():
    begun = threading.Event()

    def work(parts):
        if threading.current_thread() is not threading.main_thread():
            begun.set()
            raise ValueError("on a thread")
        assert begun.wait(60)

    with pytest.raises(ValueError, match="on a thread"):
        on_threads(2)(work, PARTS)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs a system that can fork")
def test_a_process_forked_after_a_pass_has_threads_of_its_own():
    spread, context = on_threads(2), mp.get_context("fork")

    def both(say):
        gate = threading.Barrier(2)
        spread(lambda parts: say(gate.wait(20)), PARTS)

    both(lambda which: None)
    ours, theirs = context.Pipe()
    child = context.Process(target=both, args=(theirs.send,), daemon=True)
    child.start()
    try:
        assert {ours.poll(30) and ours.recv() for _ in range(2)} == {0, 1}
    finally:
        child.kill()


# -- who takes which way -------------------------------------------------------------------------


def asked(large: int) -> int:
    """How often a bank of a million numbers asks for compiled code."""
    calls = []
    storage = Storage(kernel=lambda: calls.append(0), large=large)
    made = ModelBank(10, torch.zeros(100_000), storage=storage)
    for client in range(10):
        made.set(client, drawn(100_000, name=f"{client}"))
    made.dissimilarity(drawn(100_000, name="vector"), "cosine")
    return len(calls)


def test_small_banks_are_left_to_torch():
    assert asked(large=10**6) == 1 and asked(large=10**6 + 1) == 0


def test_without_a_compiler_torch_takes_over(monkeypatch):
    monkeypatch.setenv("POLYTEMPO_CXX", "no-such-compiler")
    compiled_sweep.cache_clear()
    assert compiled_sweep() is None
    without = lived_in(Storage(kernel=compiled_sweep, large=0))
    compiled_sweep.cache_clear()
    for ours, theirs in zip(without[1], lived_in(Storage())[1], strict=True):
        np.testing.assert_array_equal(ours, theirs)


@pytest.mark.parametrize("bank", ["memory", "half", "int8", "disk"])
def test_runs_use_what_there_is(bank):
    storage = RunConfig(bank=bank).storage()
    assert storage.kernel is compiled_sweep
    gate, seen = threading.Barrier(min(2, len(os.sched_getaffinity(0)))), []
    storage.spread(lambda parts: seen.append(gate.wait(60)), PARTS)
    assert len(seen) == gate.parties
