"""Masks: what is dropped, and as bits."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from polytempo.core.masks import largest, pack, unpack


def test_the_smallest_go_and_among_equals_the_first():
    vector = torch.tensor([0.5, -0.1, 0.1, -3.0, 0.1, 0.0])
    assert largest(vector, 0.5).tolist() == [True, False, False, True, True, False]
    assert largest(vector, 0.0).all()
    assert largest(vector, 0.49).sum() == 4  # rounded down: two of six go


@given(st.lists(st.booleans(), min_size=1, max_size=40))
def test_bits_are_the_mask(bits):
    mask = torch.tensor(bits)
    packed = pack(mask)
    assert packed.dtype == torch.uint8 and packed.shape == (1, (len(bits) + 7) // 8)
    assert torch.equal(unpack(packed, len(bits)), mask)
