"""Past models by version: what clients in training hold is there, and nothing else."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from polytempo.storage import load_state, save_state
from polytempo.strategies.history import History, cosine


def vector(version):
    return torch.tensor([float(version), -1.0])


def filled(versions, ages=()) -> History:
    """So many versions, of which clients 0, 1, ... hold those of these ages."""
    history = History(vector(0))
    for version in range(versions + 1):
        if version:
            history.add(vector(version))
        for client, age in enumerate(ages):
            if versions - age == version:
                history.hold(client)
    return history


def test_versions_are_counted_back_from_the_current_one():
    history = filled(4, range(5))
    assert history.version == 4
    assert history.current is history.ago(0)
    assert [history.ago(tau)[0] for tau in range(5)] == [4, 3, 2, 1, 0]


@given(st.integers(0, 12), st.data())
def test_what_is_held_stays_and_the_rest_goes(versions, data):
    ages = data.draw(st.lists(st.integers(0, versions), max_size=6))
    history = filled(versions, ages)
    gone = data.draw(st.sets(st.sampled_from(range(len(ages))))) if ages else set()
    for client in gone:
        history.release(client)
        history.release(client)  # a second time: it holds nothing any more
    held = {0, *(age for client, age in enumerate(ages) if client not in gone)}
    assert len(history) == len(held)  # two clients with one version: kept once
    for tau in range(versions + 1):
        if tau in held:
            assert torch.equal(history.ago(tau), vector(versions - tau))
        else:
            with pytest.raises(KeyError):
                history.ago(tau)


def test_whoever_starts_after_the_others_are_gone_finds_its_version():
    history = filled(3)
    history.hold(0)
    history.add(vector(4))
    assert torch.equal(history.ago(1), vector(3))


def test_who_is_sent_a_newer_version_holds_that_one_alone():
    history = filled(3, [2])
    history.hold(0)
    assert len(history) == 1 and torch.equal(history.current, vector(3))
    history.add(vector(4))
    assert torch.equal(history.ago(1), vector(3))


def test_it_survives_the_disk(tmp_path):
    history = filled(5, [2, 4])
    save_state(tmp_path / "state", history.state_dict())
    again = History(vector(0))
    again.load_state_dict(load_state(tmp_path / "state"))
    assert (again.version, len(again)) == (5, 3)
    assert [again.ago(tau)[0] for tau in (0, 2, 4)] == [5, 3, 1]
    again.release(1)
    assert len(again) == 2  # it knows who holds what


@pytest.mark.parametrize(
    ("a", "b", "expected"),
    [
        ([3.0, 4.0], [6.0, 8.0], 1.0),
        ([3.0, 4.0], [-3.0, -4.0], -1.0),
        ([1.0, 0.0], [0.0, -7.0], 0.0),
        ([1.0, 1.0], [5.0, 0.0], 0.5**0.5),
        ([0.0, 0.0], [5.0, 0.0], 0.0),
    ],
)
def test_cosine(a, b, expected):
    assert cosine(torch.tensor(a), torch.tensor(b)) == pytest.approx(expected)
    assert abs(cosine(torch.tensor(a), torch.tensor(b))) <= 1
