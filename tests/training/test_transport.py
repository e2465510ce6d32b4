"""Tensors as bytes and back, between processes of one run."""

import pickle

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from polytempo import Task
from polytempo.core.client_steps import Choose, Mask
from polytempo.core.optimizer import AdamW
from polytempo.training import Job
from polytempo.training.executors.transport import dumps
from polytempo.training.jobs import Swap

DTYPES = [
    *(torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.bool, torch.uint8),
    *(torch.int8, torch.int16, torch.int32, torch.int64, torch.complex64),
]


def travel(thing):
    return pickle.loads(dumps(thing))


@given(
    dtype=st.sampled_from(DTYPES),
    shape=st.lists(st.integers(0, 4), max_size=3),
    seed=st.integers(0, 10**6),
)
def test_tensors_of_any_type_and_shape_come_back_as_they_were(dtype, shape, seed):
    draw = torch.Generator().manual_seed(seed)
    sent = (100 * torch.randn(shape, generator=draw)).to(dtype)
    found = travel(sent)
    assert found.dtype == dtype and found.shape == sent.shape
    assert torch.equal(found, sent)


@pytest.mark.parametrize("size", [1, 3, 17, 1001])
def test_they_stand_where_torch_puts_its_own(size):
    """Sums depend on the alignment, in their last bits."""
    for found in travel({str(k): torch.randn(size) for k in range(5)}).values():
        assert found.data_ptr() % 64 == 0


def test_what_is_a_view_travels_without_the_rest():
    whole = torch.randn(1_000, 1_000)
    for view in (whole[3], whole[:, 3], whole.T[:2], whole[::100, ::100]):
        data = dumps(view)
        assert len(data) < 4 * view.numel() + 1_000
        assert torch.equal(pickle.loads(data), view)


def test_special_values_keep_their_bits():
    sent = torch.tensor([torch.nan, torch.inf, -torch.inf, -0.0, 1e-45])
    assert torch.equal(travel(sent).view(torch.int32), sent.view(torch.int32))


def test_a_job_comes_back_with_all_that_it_brings():
    task = Task(optimizer=AdamW(beta1=0.5), client_steps=(Choose(2), Mask(0.25)))
    swap = Swap(3, torch.ones(4), {"anchor": torch.zeros(4)})
    sent = Job(
        *(7, torch.arange(4.0), task, ("client", 7), 1, 9),
        vectors={"candidate 1": torch.full((4,), 2.0)},
        memory={"personal": torch.full((2,), 3.0, dtype=torch.float64)},
        swaps=(swap,),
    )
    [found] = travel([sent])
    assert (found.client, found.task, found.stream) == (7, task, ("client", 7))
    assert (found.first_step, found.last_step, found.swaps[0].step) == (1, 9, 3)
    assert found.params.tolist() == [0, 1, 2, 3]
    assert found.vectors["candidate 1"].tolist() == [2] * 4
    assert found.memory["personal"].dtype == torch.float64
    assert found.swaps[0].vectors["anchor"].tolist() == [0] * 4
