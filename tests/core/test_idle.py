"""The set of idle clients: the same as a sorted list, found without sorting."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from polytempo.core.idle import BLOCK, IdleClients

CLIENTS = 2 * BLOCK + 10
IDS = st.sampled_from([0, 1, 2, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK - 1, 2 * BLOCK, CLIENTS - 1])
CHANGES = st.tuples(st.booleans(), IDS)


@given(first=st.sets(IDS), more=st.sets(IDS), changes=st.lists(CHANGES, max_size=40))
def test_ranks_are_places_in_the_sorted_list(first, more, changes):
    idle, expected = IdleClients(CLIENTS), first | more
    for clients in (first, more):
        idle.add_all(clients)
    assert len(idle) == len(expected)
    for there, client in changes:
        (idle.add if there else idle.discard)(client)
        (expected.add if there else expected.discard)(client)
        assert len(idle) == len(expected) and (client in idle) == there
    in_order = sorted(expected)
    assert list(idle) == in_order
    assert [idle.at(np.array([rank])) for rank in range(len(idle))] == [[one] for one in in_order]
    backwards = np.arange(len(idle))[::-1]
    assert idle.at(backwards) == in_order[::-1]
