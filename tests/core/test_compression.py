"""Compressed uploads: what is read is what was packed, but for what is kept for later."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as some
from hypothesis.extra import numpy as arrays

from polytempo.core.compression import COMPRESSIONS, RESIDUAL, Int8, TopK
from polytempo.core.errors import PolytempoError, Refused

TINY = float(np.finfo(np.float32).tiny)  # smaller numbers may count as 0
FLOATS = some.floats(-1e6, 1e6, width=32)
VECTORS = arrays.arrays(np.float32, some.integers(1, 40), elements=FLOATS).map(torch.from_numpy)
KINDS = some.one_of(
    some.builds(Int8, some.integers(1, 50)), some.builds(TopK, some.floats(0.01, 1.0))
)


class Leaving:
    def __init__(self):
        self.memory, self.extras = {}, {}


@given(VECTORS, some.integers(1, 50))
def test_int8_is_within_half_a_step_of_each_number(whole, block):
    step = Int8(block)
    vector, beside = step.pack(whole)
    read = step.unpack(vector, beside, len(whole), torch.float32).double().numpy()
    for begin in range(0, len(whole), block):
        exact = whole[begin : begin + block].double().numpy()
        unit = np.abs(exact).max() / 127
        assert np.abs(read[begin : begin + block] - exact).max() <= unit * (0.5 + 1e-4) + TINY


@given(VECTORS, some.floats(0.01, 1.0))
def test_topk_sends_the_largest_as_they_are(whole, share):
    step = TopK(share)
    vector, beside = step.pack(whole)
    read = step.unpack(vector, beside, len(whole), torch.float32)
    sent = beside["places"][0].long()
    assert len(vector) == max(1, np.ceil(share * len(whole)))
    assert torch.equal(read[sent], whole[sent])
    left = torch.ones(len(whole), dtype=torch.bool)
    left[sent] = False
    assert not read[left].any()
    if left.any():
        assert whole[left].abs().max() <= whole[sent].abs().min()


@given(VECTORS, KINDS)
def test_bytes_are_what_was_promised(whole, step):
    vector, beside = step.pack(whole)
    assert vector.nbytes + sum(v.nbytes for v in beside.values()) == step.nbytes(len(whole))
    assert {name: len(v) for name, v in beside.items()} == step.uploads


@given(some.lists(some.integers(-100, 100), min_size=30, max_size=30), KINDS)
def test_nothing_is_lost_for_good(numbers, step):
    """Over all uploads, what was read and what is kept add up to what was moved."""
    client, total = Leaving(), torch.zeros(5, dtype=torch.float64)
    uploads = torch.tensor(numbers, dtype=torch.float64).view(6, 5)
    for moved in uploads:
        vector = step.leaving(client, moved)
        total += step.unpack(vector, client.extras, 5, torch.float64)
    torch.testing.assert_close(total + client.memory[RESIDUAL], uploads.sum(0))


def test_an_upload_that_cannot_be_read_is_refused():
    whole = torch.linspace(-1, 1, 10)
    for step in (Int8(4), TopK(0.5)):
        vector, beside = step.pack(whole)
        [name] = beside
        extra = beside[name]
        worse = [
            (vector[:-1], extra),
            (vector.to(torch.float64), extra),
            (vector, extra[:, :-1]),
            (vector, extra.to(torch.float64)),
        ]
        if name == "places":
            worse += [(vector, extra + 6), (vector, extra - 3), (vector, extra.flip(1))]
        for found, more in worse:
            with pytest.raises(Refused):
                step.unpack(found, {name: more}, 10, torch.float32)


def test_training_that_diverged_does_not_become_finite():
    whole = torch.tensor([1.0, float("nan"), float("inf"), 2.0])
    _, beside = Int8(4).pack(whole)
    assert not beside["scales"].isfinite().all()
    assert not TopK(0.5).pack(whole)[0].isfinite().all()


def test_a_number_alone_is_the_share():
    assert COMPRESSIONS.create("topk:0.01") == TopK(0.01)
    assert COMPRESSIONS.create("int8:64") == Int8(64)
    for wrong in ("topk", "topk:2", "topk:shore=0.1", "zip"):
        with pytest.raises(PolytempoError):
            COMPRESSIONS.create(wrong)
