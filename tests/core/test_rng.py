"""Random numbers by name, not by order."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import kstest

from polytempo.core.rng import rng, stream_seed


def test_streams_are_what_they_were_in_earlier_versions():
    """A change here changes every published run: it needs a word in the CHANGELOG."""
    assert stream_seed(0) == 144831499309457368979394674105665208338
    assert stream_seed(7, "client", 3, "dispatch", 17) == 35847872700920612458486821356258542077
    drawn = rng(7, "client", 3, "dispatch", 17).integers(0, 10**9, 3)
    assert drawn.tolist() == [169080286, 712636256, 212487345]
    assert rng(0, "devices").random(2) == pytest.approx([0.23238141, 0.64520249], abs=1e-8)


def test_every_name_has_a_stream_of_its_own():
    names = [
        (),
        (1,),
        ("1",),
        (0,),
        ("0",),
        ("",),
        ("", ""),
        ("client", 1),
        ("client1",),
        ("client", "1"),
        ("client", 11),
        ("client", 1, 1),
        (1, "client"),
        ("client:1",),
        ("int:1",),
        ("str:1",),
        (-1,),
        ("a", "bc"),
        ("ab", "c"),
    ]
    seeds = [stream_seed(seed, *name) for seed in (0, 1, 11) for name in names]
    assert len(set(seeds)) == len(seeds)


def test_the_seed_is_not_confused_with_the_name():
    assert stream_seed(1, 2) != stream_seed(2, 1)
    assert stream_seed(12) != stream_seed(1, 2)


def test_a_stream_does_not_depend_on_what_was_drawn_before():
    expected = rng(4, "b").random(5)
    rng(4, "a").random(1000)
    np.random.default_rng(0).random(10)
    assert np.array_equal(rng(4, "b").random(5), expected)


def test_neighbouring_streams_are_uniform_together_and_uncorrelated():
    first = np.array([rng(0, "client", i).random() for i in range(2000)])
    assert kstest(first, "uniform").pvalue > 1e-3
    streams = [rng(0, "client", i).random(1000) for i in range(6)]
    for a, b in itertools.combinations(streams, 2):
        assert abs(np.corrcoef(a, b)[0, 1]) < 4.5 / np.sqrt(1000)


@given(seed=st.integers(0, 2**40), name=st.lists(st.integers() | st.text(), max_size=4))
def test_a_stream_is_numpys_usual_generator_with_that_seed(seed, name):
    assert rng(seed, *name).bit_generator.state == np.random.PCG64(stream_seed(seed, *name)).state


def test_a_seed_with_leading_zeros_is_taken_apart_as_numpy_does(monkeypatch):
    """One stream in four thousand million has them."""
    for size in range(17):
        digest = bytes(range(1, size + 1)) + bytes(16 - size)
        monkeypatch.setattr("polytempo.core.rng._digest", lambda seed, name: digest)  # noqa: B023
        assert rng(0).bit_generator.state == np.random.PCG64(stream_seed(0)).state
