"""What clients remember."""

import pytest
import torch

from polytempo import PolytempoError
from polytempo.storage import load_state, save_state
from polytempo.training import ClientMemory


def test_it_begins_alike_for_all_and_then_is_everybodys_own():
    memory = ClientMemory(3, {"personal": torch.arange(4.0)})
    assert [memory.get(k)["personal"].tolist() for k in range(3)] == [[0, 1, 2, 3]] * 3
    memory.set(1, {"personal": torch.ones(4), "momentum": torch.full((2,), 5.0)})
    assert memory.get(1)["personal"].tolist() == [1, 1, 1, 1]
    assert memory.get(2)["personal"].tolist() == [0, 1, 2, 3]
    assert memory.vector("momentum", 1).tolist() == [5, 5]


def test_what_one_client_keeps_is_unknown_to_the_others():
    """A step that begins with `memory.get(name, ones)` finds nothing there, not zeros."""
    memory = ClientMemory(3, {"personal": torch.zeros(2)})
    memory.set(1, {"count": torch.ones(1)})
    assert [memory.get(k).keys() for k in range(3)] == [
        {"personal"},
        {"personal", "count"},
        {"personal"},
    ]
    for name, client in (("count", 2), ("nothing of the kind", 1)):
        with pytest.raises(PolytempoError, match=f"client {client} remembers no vector '{name}'"):
            memory.vector(name, client)


@pytest.mark.parametrize("shape", [(1,), (2,), (1, 3)])
def test_vectors_of_one_name_have_one_length(shape):
    """A single number would otherwise fill the whole row."""
    memory = ClientMemory(2, {})
    memory.set(0, {"own": torch.zeros(3)})
    with pytest.raises(PolytempoError, match=r"client 1 .*'own' with shape .* others with \[3\]"):
        memory.set(1, {"own": torch.zeros(shape)})
    assert memory.get(1) == {}


def test_what_goes_in_and_comes_out_is_a_copy():
    memory, own = ClientMemory(2, {}), torch.ones(3)
    memory.set(0, {"own": own})
    own.zero_()
    memory.get(0)["own"].fill_(7)
    memory.vector("own", 0).fill_(7)
    assert memory.get(0)["own"].tolist() == [1, 1, 1]


def test_clients_that_never_trained_take_no_memory():
    memory = ClientMemory(10_000, {"personal": torch.zeros(1_000)})
    memory.set(3, {"personal": torch.ones(1_000)})
    rows = memory.state_dict()["personal"]["bank"]["rows"]
    assert sum(len(run) for run in rows) == 2  # of 10,000


def test_the_revision_of_a_vector_changes_with_it_and_with_no_other():
    memory = ClientMemory(3, {"personal": torch.zeros(2)})
    before = [memory.revision("personal", k) for k in range(3)]
    memory.set(1, {"personal": torch.ones(2)})
    after = [memory.revision("personal", k) for k in range(3)]
    assert [a == b for a, b in zip(after, before, strict=True)] == [True, False, True]
    memory.set(1, {"momentum": torch.ones(2)})
    assert memory.revision("personal", 1) == after[1]
    assert memory.revision("nothing of the kind", 1) == 0


def test_it_comes_back_from_a_file(tmp_path):
    memory = ClientMemory(4, {"personal": torch.arange(3.0)})
    memory.set(2, {"personal": torch.ones(3), "count": torch.tensor([7.0])})
    save_state(tmp_path / "memory", memory.state_dict())
    again = ClientMemory(4, {"personal": torch.arange(3.0)})
    again.set(0, {"personal": torch.full((3,), 9.0)})  # what it held is replaced
    again.load_state_dict(load_state(tmp_path / "memory"))
    for client in range(4):
        found, expected = again.get(client), memory.get(client)
        assert found.keys() == expected.keys()
        assert found.keys() == ({"personal", "count"} if client == 2 else {"personal"})
        assert all(torch.equal(found[name], expected[name]) for name in found)
