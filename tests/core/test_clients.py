"""A set of clients: the same as a sorted list, found without sorting."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from polytempo.core.clients import BLOCK, ClientSet

CLIENTS = 2 * BLOCK + 10
IDS = st.sampled_from([0, 1, 2, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK - 1, 2 * BLOCK, CLIENTS - 1])
CHANGES = st.tuples(st.booleans(), IDS)


@given(first=st.sets(IDS), more=st.sets(IDS), changes=st.lists(CHANGES, max_size=40))
def test_ranks_are_places_in_the_sorted_list(first, more, changes):
    some, expected = ClientSet(CLIENTS), first | more
    for clients in (first, more):
        some.add_all(np.array(list(clients), dtype=np.int64))
    assert len(some) == len(expected)
    for there, client in changes:
        (some.add if there else some.discard)(client)
        (expected.add if there else expected.discard)(client)
        assert len(some) == len(expected) and (client in some) == there
    assert all(nobody not in some for nobody in (-1, -CLIENTS, 3 * BLOCK - 1, 3 * BLOCK, 10**9))
    in_order = sorted(expected)
    assert list(some) == in_order
    assert [some.at(np.array([rank])) for rank in range(len(some))] == [[one] for one in in_order]
    backwards = np.arange(len(some))[::-1]
    assert some.at(backwards) == in_order[::-1]
