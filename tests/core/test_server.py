"""The server's promises: counters, concurrency, refill, refusals, multicast, checkpoints."""

from collections import Counter, deque
from copy import deepcopy
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from scipy.stats import chisquare

from polytempo.core.client_steps import Basis
from polytempo.core.clients import BLOCK, ClientSet
from polytempo.core.errors import PolytempoError, Refused
from polytempo.core.messages import Dispatch, Staleness, Stop, Update
from polytempo.core.rng import rng
from polytempo.core.server import Server
from polytempo.core.strategy import STRATEGIES, Context, Strategy
from polytempo.core.task import Task
from polytempo.storage import load_state, save_state

SIZE = 4


class Probe(Strategy):
    """Serves a new model with every k-th update, and remembers what it was told.

    The test says whom to multicast to (`pushes`) and to stop (`stops`) at the next occasion.
    """

    state: ClassVar[tuple[str, ...]] = ("model", "folded", "cohorts")
    every: int = 1

    def setup(self, context: Context) -> None:
        super().setup(context)
        self.model = context.initial
        self.folded = 0
        self.seen: list[tuple[int, int, Staleness]] = []
        self.cohort: list[int] = []
        self.cohorts: list[list[int]] = []  # who had been folded, at each close
        self.pushes: set[int] = set()
        self.stops: set[int] = set()

    def model_for(self, client: int) -> torch.Tensor:
        return self.model + client

    def reply_to(self, client: int) -> torch.Tensor:
        return self.model + client + 0.5

    def fold(self, update: Update, staleness: Staleness) -> bool:
        self.seen.append((update.client, update.number, staleness))
        self.cohort.append(update.client)
        self.model = self.model / 2 + update.vector
        self.folded += 1
        return self.folded % self.every == 0

    def close_cohort(self) -> bool:
        self.cohorts.append(self.cohort)
        self.cohort = []
        return bool(self.cohorts[-1])

    def refresh(self, in_flight):
        self.in_flight = list(in_flight)
        chosen = [flight.client for flight in in_flight if flight.client in self.pushes]
        self.pushes = set()
        return chosen

    def urgent(self, in_flight):
        chosen = [flight.client for flight in in_flight if flight.client in self.stops]
        self.stops = set()
        return chosen


def context(clients: int, seed: int = 0) -> Context:
    initial = torch.arange(1, SIZE + 1, dtype=torch.float32)
    return Context(initial, list(range(10, 10 + clients)), Task(), seed)


def begin(clients, strategy=None, *, seed=0, **settings) -> tuple[Server, dict[int, Dispatch]]:
    """A server that everybody has joined, and what each client was sent."""
    server = Server(strategy or Probe(), context(clients, seed), **settings)
    return server, {sent.client: sent for sent in server.join(range(clients))}


def answer(sent: Dispatch, value: float = 1.0, **changes: Any) -> Update:
    given = {"vector": torch.full((SIZE,), value), "samples": 10} | changes
    return Update(sent.client, sent.number, **given)


def same(a: Any, b: Any) -> bool:
    """Equal to the bit, wherever in a state."""
    if isinstance(a, torch.Tensor | np.ndarray):
        return type(a) is type(b) and a.dtype == b.dtype and bool((a == b).all())
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
    return bool(a == b)


def same_actions(a: list, b: list) -> bool:
    return len(a) == len(b) and all(
        type(x) is type(y) and same(vars(x), vars(y)) for x, y in zip(a, b, strict=True)
    )


# -- counters --------------------------------------------------------------------------------------


def test_staleness_counts_the_updates_folded_in_between_own_excluded():
    server, sent = begin(3, refill="same")
    told = server.strategy.seen
    [first] = server.receive(answer(sent[0]))  # 0: nobody was folded since
    server.receive(answer(sent[1]))  # 1: client 0
    server.receive(answer(sent[2]))  # 2: clients 0 and 1
    [second] = server.receive(answer(first))  # sent after the first: clients 1 and 2
    server.receive(answer(second))  # back at once
    assert [stale.updates for _, _, stale in told] == [0, 1, 2, 2, 0]
    assert [stale.versions for _, _, stale in told] == [0, 1, 2, 2, 0]
    assert server.updates == server.version == 5


def test_versions_differ_from_rounds_when_only_every_third_update_is_served():
    server, sent = begin(2, Probe(every=3), refill="same")
    mine = sent[0]
    for _ in range(4):  # client 0 comes and goes while client 1 trains
        [mine] = server.receive(answer(mine))
    assert (server.updates, server.version) == (4, 1)
    [theirs] = server.receive(answer(sent[1]))
    server.receive(answer(theirs))  # the sixth: version 2
    assert (server.updates, server.version) == (6, 2)
    server.receive(answer(mine))  # sent after 4 updates, version 1
    told = [(client, stale.updates, stale.versions) for client, _, stale in server.strategy.seen]
    assert told == [(0, 0, 0)] * 4 + [(1, 4, 1), (1, 0, 0), (0, 2, 1)]


@pytest.mark.parametrize("concurrency", [1, 3, 7])
def test_first_in_first_out_makes_everybody_stale_by_slots_minus_one(concurrency):
    server = Server(Probe(), context(7), concurrency=concurrency)
    queue = deque(server.join(range(7)))
    for _ in range(40):
        queue.extend(server.receive(answer(queue.popleft())))
    updates = [stale.updates for _, _, stale in server.strategy.seen]
    assert updates[:concurrency] == list(range(concurrency))
    assert updates[concurrency:] == [concurrency - 1] * (40 - concurrency)


def test_in_flight_is_told_most_stale_first_by_what_was_sent_last():
    server, sent = begin(4, refill="same")
    server.strategy.pushes = {2}
    server.receive(answer(sent[3]))  # client 2 is refreshed after update 1, client 3 answered
    server.receive(answer(sent[0]))
    # told before anything is sent: client 0 has just reported and is not among them
    told = [(flight.client, flight.staleness.updates) for flight in server.strategy.in_flight]
    assert told == [(1, 2), (2, 1), (3, 1)]
    now = server.in_flight()
    assert [(f.client, f.staleness.updates) for f in now] == [*told, (0, 0)]
    assert [f.client for f in now] == [1, 2, 3, 0] and len(now) == 4  # as often as one likes


class Witness(Probe):
    """Writes down what it is told, in order, and how many clients in training it was shown."""

    def setup(self, context: Context) -> None:
        super().setup(context)
        self.told: list[tuple] = []

    def fold(self, update: Update, staleness: Staleness) -> bool:
        self.told.append(("fold", update.client))
        return super().fold(update, staleness)

    def training(self, in_flight) -> None:
        self.told.append(("training", [flight.client for flight in in_flight]))

    def dispatched(self, dispatch: Dispatch) -> None:
        self.told.append(("dispatched", dispatch.client, dispatch.number, dispatch.preempt))


def test_a_strategy_is_told_of_every_dispatch_and_of_who_trains_before_the_refill():
    server = Server(Witness(), context(3), refill="same")
    sent = {action.client: action for action in server.join(range(3))}
    told = server.strategy.told
    assert told == [("dispatched", new.client, new.number, False) for new in sent.values()]
    told.clear()
    server.strategy.pushes = {1}
    server.receive(answer(sent[0]))
    assert list(sent) != sorted(sent)
    assert told == [
        ("fold", 0),
        ("training", [1, 2]),  # those of equal staleness by their ids, however they were sent
        ("dispatched", 1, 3, True),
        ("dispatched", 0, 4, False),
    ]
    told.clear()
    server.lost(2)
    server.leave(1)
    assert told == [
        ("training", [1, 0]),  # 1 was sent a multicast before 0 was answered
        ("dispatched", 2, 5, False),
        ("training", [0, 2]),
    ]


def test_an_update_is_held_to_the_task_of_its_dispatch_not_of_now():
    class Changing(Probe):
        """Asks for a basis from the second update on."""

        def task(self, client: int) -> Task:
            return Task(client_steps=(Basis(2),) if self.folded else ())

    server, sent = begin(2, Changing(), refill="same")
    [asked] = server.receive(answer(sent[0]))
    server.receive(answer(sent[1]))  # was not asked for one, though it would be now
    with pytest.raises(Refused, match=r"expected \['basis'\]"):
        server.receive(answer(asked))
    server.receive(answer(asked, extras={"basis": torch.eye(2, SIZE)}))


def test_the_work_of_an_arrival_does_not_grow_with_the_slots():
    """Counted, not timed: who is in training is looked at only as far as a strategy looks, and
    what the server remembers does not grow with the dispatches."""

    class First(Probe):
        def training(self, in_flight) -> None:
            assert len(in_flight) == 99
            next(iter(in_flight))

    looks = []
    server, sent = begin(120, First(), concurrency=100)
    whole = server._age
    server._age = lambda sent: looks.append(sent) or whole(sent)
    waiting, sizes = deque(sent.values()), set()
    for _ in range(300):
        looks.clear()
        server.strategy.refresh = server.strategy.urgent = lambda in_flight: ()
        [new] = server.receive(answer(waiting.popleft()))
        assert len(looks) == 2  # the update's own age, and that of the first
        waiting.append(new)
        state = server.state_dict()
        sizes.add(sum(len(value) for key, value in state.items() if isinstance(value, list)))
    assert len(sizes) == 1
    assert set(server.idle) == set(server.members) - server.open.keys() and len(server.idle) == 20


@pytest.mark.parametrize("hook", ["fold", "close_cohort"])
def test_a_hook_that_does_not_say_whether_something_changed_is_named(hook):
    class Silent(Probe):
        pass

    setattr(Silent, hook, lambda self, *given: None)
    server, sent = begin(3, Silent(), concurrency=1, refill="cohort")
    with pytest.raises(PolytempoError, match=f"{hook} returned None; return True if"):
        server.receive(answer(next(iter(sent.values()))))


def test_a_lost_update_changes_neither_round_nor_version():
    server, _ = begin(4, concurrency=2)
    client = next(iter(server.open))
    server.lost(client)
    assert (server.updates, server.version) == (0, 0)
    assert len(server.open) == 2
    assert server.strategy.seen == []


def test_the_strategy_is_told_what_is_lost_and_who_has_left():
    server, _ = begin(4, concurrency=2)
    told: list[tuple[str, int]] = []
    server.strategy.lost = lambda client: told.append(("lost", client))
    server.strategy.left = lambda client: told.append(("left", client))
    first, second = server.open
    idle = next(client for client in range(4) if client not in server.open)
    server.away(first)  # what it trains may come
    server.lost(first)
    server.leave(second)
    server.leave(idle)
    assert told == [("lost", first), ("left", second), ("left", idle)]


# -- concurrency and refill ----------------------------------------------------------------------


@pytest.mark.parametrize("concurrency", [0, -1, 6])
def test_slots_out_of_range_are_an_error_that_names_them(concurrency):
    with pytest.raises(PolytempoError, match=rf"between 1 and .* 5; got {concurrency}$"):
        Server(Probe(), context(5), concurrency=concurrency)


def test_slots_default_to_everybody_and_refill_to_the_strategys():
    server, sent = begin(5)
    assert set(sent) == set(range(5)) and server.concurrency == 5
    assert server.refill == "idle"
    assert Server(STRATEGIES.create("fedavg"), context(5)).refill == "cohort"
    assert Server(STRATEGIES.create("fedavg"), context(5), refill="same").refill == "same"


@pytest.mark.parametrize("wrong", [-1, 5])
def test_a_client_that_does_not_exist_cannot_join(wrong):
    server = Server(Probe(), context(5))
    with pytest.raises(PolytempoError, match=f"client {wrong} cannot join.* 0 to 4"):
        server.join([wrong])
    assert not set(server.members) and server.open == {}


def test_a_join_that_fails_leaves_no_trace():
    server = Server(Probe(), context(5))
    before = deepcopy(server.state_dict())
    with pytest.raises(PolytempoError):
        server.join([0, 1, 99])
    assert same(server.state_dict(), before)


def test_idle_refill_is_uniform_over_all_clients_not_in_training():
    clients, concurrency, refills = 6, 3, 1500
    server, sent = begin(clients, concurrency=concurrency, seed=3)
    order = rng(0, "test")
    position, again = Counter(), 0
    for _ in range(refills):
        client = int(order.choice(sorted(server.open)))
        idle = sorted(set(range(clients)) - set(server.open) | {client})
        [new] = server.receive(answer(sent[client]))
        sent[new.client] = new
        position[idle.index(new.client)] += 1  # fails for a client that was in training
        again += new.client == client
    assert chisquare([position[i] for i in range(clients - concurrency + 1)]).pvalue > 1e-3
    share = again / refills  # the sender itself is as likely as anybody
    assert abs(share - 1 / 4) < 4 * np.sqrt(1 / 4 * 3 / 4 / refills)


@pytest.mark.parametrize(
    ("clients", "concurrency"), [(40, 30), (3000, 2990), (3000, 3000), (3000, 5)]
)
def test_who_is_started_is_drawn_by_name_whatever_happened_before(clients, concurrency):
    """The seed, the number of the dispatch and who is idle say who: among many, one of a few that
    are tried, or else one of a sorted list."""
    server, sent = begin(clients, concurrency=concurrency, seed=5)
    order = rng(0, "test")
    for _ in range(200):
        client = list(server.open)[int(order.integers(concurrency))]
        idle = sorted({*range(clients)} - {*server.open} | {client})
        stream = rng(5, "server", "refill", server.dispatches)
        tried = stream.integers(clients, size=32) if clients > 1000 else ()
        hit = [int(one) for one in tried if one in idle]
        expected = hit[0] if hit else stream.choice(idle, size=1, replace=False)[0]
        [new] = server.receive(answer(sent[client]))
        sent[new.client] = new
        assert new.client == expected
        assert len(server.idle) == len(idle) - 1


@pytest.mark.parametrize("concurrency", [10, 4900, 4990, 5000])
def test_a_refill_lists_no_clients(concurrency, monkeypatch):
    """Counted, not timed: of the idle ones, a block is looked at, and no more."""
    server, sent = begin(5000, concurrency=concurrency)
    looked, whole = [], np.flatnonzero
    monkeypatch.setattr(np, "flatnonzero", lambda marks: looked.append(len(marks)) or whole(marks))
    monkeypatch.setattr(ClientSet, "__iter__", None)
    for client in list(sent)[:10]:
        server.receive(answer(sent[client]))
        server.leave(client)
        server.join([client])
    assert all(size <= BLOCK for size in looked)
    assert bool(looked) == (concurrency > 10)  # otherwise the first tries succeed


def test_the_first_clients_and_the_cohorts_are_a_uniform_choice():
    clients, concurrency, cohorts = 6, 2, 600
    server, sent = begin(clients, concurrency=concurrency, refill="cohort", seed=1)
    picked = Counter(list(sent))
    first = Counter()
    for seed in range(cohorts):
        first.update(list(begin(clients, concurrency=concurrency, seed=seed)[1]))
        for client in list(server.open):
            actions = server.receive(answer(sent[client]))
        sent = {new.client: new for new in actions}
        picked.update(list(sent))
    # membership is drawn without replacement, so the statistic is (n - 1) / (n - k) too small
    for counts in (picked, first):
        found = chisquare([counts[client] for client in range(clients)]).statistic
        assert (
            found * (clients - 1) / (clients - concurrency) < 20.5
        )  # 5 degrees of freedom, p = 0.001


def test_same_refill_answers_the_sender_at_once_with_its_reply():
    server, sent = begin(5, concurrency=2, refill="same")
    started = set(sent)
    assert len(started) == 2
    for client in sorted(started) * 3:
        [new] = server.receive(answer(sent[client]))
        assert new.client == client and not new.preempt
        assert torch.equal(new.params, server.strategy.reply_to(client))
        sent[client] = new
    assert set(server.open) == started


def test_same_refill_gives_the_slot_of_a_client_that_left_to_another():
    server, sent = begin(5, concurrency=2, refill="same")
    gone, other = sent
    [new] = server.leave(gone)
    assert new.client not in (gone, other)
    assert torch.equal(new.params, server.strategy.model_for(new.client))
    [again] = server.lost(other)  # lost, but still here: started again, with its served model
    assert again.client == other
    assert torch.equal(again.params, server.strategy.model_for(other))


def test_idle_refill_hands_out_the_served_model_not_the_reply():
    server, sent = begin(1, refill="idle")
    [new] = server.receive(answer(sent[0]))
    assert torch.equal(new.params, server.strategy.model_for(0))


def test_cohort_starts_nobody_until_all_are_in():
    server, sent = begin(6, concurrency=3, refill="cohort")
    cohort = list(sent)
    assert len(cohort) == 3
    assert server.receive(answer(sent[cohort[0]])) == []
    assert server.join([cohort[0]]) == []  # nor does a client that comes back open the barrier
    assert server.lost(cohort[1]) == []
    assert server.strategy.cohorts == []
    actions = server.receive(answer(sent[cohort[2]]))
    assert len({new.client for new in actions}) == 3
    assert server.strategy.cohorts == [[cohort[0], cohort[2]]]  # closed once, without the lost one
    assert torch.equal(actions[0].params, server.strategy.model_for(actions[0].client))


def test_updates_of_one_cohort_have_no_stale_versions():
    server, sent = begin(4, STRATEGIES.create("fedavg"), concurrency=4)
    for client in range(4):
        assert server.staleness(client, sent[client].number) == Staleness(client, 0)
        server.receive(answer(sent[client], float(client)))
    assert (server.updates, server.version) == (4, 1)
    # mean of 0, 1, 2, 3, each of 10 samples
    assert torch.equal(server.strategy.model_for(0), torch.full((SIZE,), 1.5))


def test_a_cohort_that_is_lost_entirely_is_closed_once_and_followed_by_another():
    server, sent = begin(5, concurrency=2, refill="cohort")
    first, second = sent
    assert server.lost(first) == []
    actions = server.lost(second)
    assert server.strategy.cohorts == [[]]
    assert len(actions) == 2 and (server.updates, server.version) == (0, 0)


def test_a_cohort_that_leaves_is_closed_once_and_waits_for_somebody_to_join():
    server, sent = begin(2, refill="cohort")
    server.receive(answer(sent[0]))
    server.away(0)
    assert server.leave(1) == []
    assert server.strategy.cohorts == [[0]]
    assert server.leave(1) == [] and server.leave(0) == []
    [new] = server.join([1])
    assert new.client == 1 and server.strategy.cohorts == [[0]]


def test_a_client_that_is_away_is_not_started_until_it_joins_again():
    server, sent = begin(3, concurrency=1)
    [busy] = sent
    away, other = sorted({0, 1, 2} - {busy})
    server.away(away)
    server.away(busy)
    [new] = server.lost(busy)
    assert new.client == other
    for _ in range(10):
        [new] = server.receive(answer(new))
        assert new.client == other
    assert server.join([away, busy]) == []  # the slot is taken
    started = set()
    for _ in range(30):
        [new] = server.receive(answer(new))
        started.add(new.client)
    assert started == {0, 1, 2}


@pytest.mark.parametrize("refill", ["idle", "same"])
def test_a_newcomer_needs_no_slot_and_the_number_in_training_falls_back(refill):
    server = Server(Probe(), context(8), concurrency=2, refill=refill)
    [first, second] = server.join(range(5))
    [third] = server.receive(answer(first))
    sent = server.join([5, 6])  # never seen before
    assert [new.client for new in sent] == [5, 6] and len(server.open) == 4
    assert server.receive(answer(second)) == []
    assert server.receive(answer(sent[0])) == [] and len(server.open) == 2
    [next_one] = server.receive(answer(third))  # from here on a slot is a slot
    assert len(server.open) == 2 and next_one.client != 6


def test_a_client_that_is_late_for_the_start_or_comes_back_waits_for_a_slot():
    server = Server(Probe(), context(4), concurrency=1)
    [sent] = server.join([0, 1])
    assert server.join([2]) == []  # nothing is folded yet: it is one of those who begin
    server.receive(answer(sent))
    server.away(2)
    assert server.join([2]) == []
    [new] = server.join([3])
    assert new.client == 3


def test_a_newcomer_takes_part_from_the_next_cohort_on():
    server = Server(Probe(), context(3), refill="cohort")
    sent = {new.client: new for new in server.join([0, 1])}
    server.receive(answer(sent[0]))
    assert server.join([2]) == []
    assert {new.client for new in server.receive(answer(sent[1]))} == {0, 1, 2}


def test_whom_the_server_knows_is_saved():
    server, sent = begin(3, concurrency=1)
    away = min({0, 1, 2} - set(sent))
    server.leave(away)
    again = Server(Probe(), context(3), concurrency=1)
    again.load_state_dict(deepcopy(server.state_dict()))
    [flight] = sent.values()
    for one in (server, again):
        one.receive(answer(flight))
        assert one.join([away]) == []  # no newcomer


def test_what_a_client_trained_before_it_went_away_still_counts():
    """`away`: "not started any more until it joins again; what it trains now may come"."""
    server, sent = begin(2, refill="same")
    server.away(0)
    assert server.receive(answer(sent[0])) == []  # folded, and not started again
    assert server.updates == 1 and set(server.open) == {1}


def test_same_seed_same_choices_another_seed_others():
    def choices(seed: int) -> list[int]:
        server, sent = begin(8, concurrency=3, seed=seed)
        found = list(sent)
        for _ in range(20):
            [new] = server.receive(answer(sent[min(server.open)]))
            sent[new.client] = new
            found.append(new.client)
        return found

    assert choices(5) == choices(5)
    assert choices(5) != choices(6)
    assert choices(5)[:3] != choices(6)[:3] or choices(5)[:3] != choices(7)[:3]


# -- refusals --------------------------------------------------------------------------------------


def spoiled(value: float, places: int = 1) -> torch.Tensor:
    vector = torch.ones(SIZE)
    vector[:places] = value
    return vector


# What is wrong with an update, and what the message must name. `sent` is the client's open
# dispatch, `other` that of another client, `old` one that this client has answered already.
BAD = {
    "nan": (lambda sent, **_: answer(sent, vector=spoiled(torch.nan)), "sent 1 values"),
    "all nan": (lambda sent, **_: answer(sent, vector=spoiled(torch.nan, 4)), "sent 4 values"),
    "infinite": (lambda sent, **_: answer(sent, vector=spoiled(torch.inf, 2)), "sent 2 values"),
    "minus infinite": (lambda sent, **_: answer(sent, vector=spoiled(-torch.inf)), "1 values"),
    "infinite and minus infinite": (
        lambda sent, **_: answer(sent, vector=spoiled(torch.inf, 2) - spoiled(torch.inf)),
        "2 values",
    ),
    "too large": (lambda sent, **_: answer(sent, 1e30), "values that are too large: .* diverged"),
    "one too large": (lambda sent, **_: answer(sent, vector=spoiled(-1e38)), "too large"),
    "almost too large": (lambda sent, **_: answer(sent, 3e18), "too large"),
    "too long": (lambda sent, **_: answer(sent, vector=torch.ones(5)), r"\[5\].*\[4\]"),
    "empty": (lambda sent, **_: answer(sent, vector=torch.ones(0)), r"\[0\].*\[4\]"),
    "a matrix": (lambda sent, **_: answer(sent, vector=torch.ones(1, 4)), r"\[1, 4\].*\[4\]"),
    "double": (
        lambda sent, **_: answer(sent, vector=torch.ones(4, dtype=torch.float64)),
        "float64.*float32",
    ),
    "integers": (
        lambda sent, **_: answer(sent, vector=torch.ones(4, dtype=torch.int64)),
        "int64.*float32",
    ),
    "never joined": (lambda sent, **_: Update(4, sent.number, torch.ones(4), 9), "client 4"),
    "no such client": (lambda sent, **_: Update(99, sent.number, torch.ones(4), 9), "client 99"),
    "never sent": (
        lambda sent, **_: Update(sent.client, 1000, torch.ones(4), 9),
        "dispatch 1000.*never sent",
    ),
    "negative number": (
        lambda sent, **_: Update(sent.client, -1, torch.ones(4), 9),
        "dispatch -1.*never sent",
    ),
    "of another client": (
        lambda sent, other, **_: Update(sent.client, other.number, torch.ones(4), 9),
        "is not open: .*another client",
    ),
    "twice": (lambda old, **_: answer(old), "is not open: this update came twice"),
    "no samples": (lambda sent, **_: answer(sent, samples=0), "claims 0 samples"),
    "negative samples": (lambda sent, **_: answer(sent, samples=-3), "claims -3 samples"),
}


@pytest.mark.parametrize("strategy", ["probe", "fedasync", "fedbuff:buffer_size=2", "pace"])
@pytest.mark.parametrize("wrong", BAD)
def test_a_refused_update_is_named_and_leaves_no_trace(wrong, strategy):
    make, message = BAD[wrong]

    def prepared() -> tuple[Server, Dispatch, Dispatch, Dispatch]:
        made = Probe() if strategy == "probe" else STRATEGIES.create(strategy)
        server = Server(made, context(5), refill="same")
        sent = {new.client: new for new in server.join([0, 1, 2])}
        [mine] = server.receive(answer(sent[0], 3.0))
        server.receive(answer(sent[1], 2.0))
        return server, mine, sent[2], sent[0]

    server, sent, other, old = prepared()
    twin, *_ = prepared()
    before = deepcopy(server.state_dict())
    update = make(sent=sent, other=other, old=old)
    with pytest.raises(Refused, match=message) as refusal:
        server.receive(update)
    assert f"client {update.client}" in str(refusal.value)
    assert "\n" not in str(refusal.value)
    assert same(server.state_dict(), before)
    # the good one is still accepted, and has the effect that it would have had
    assert same_actions(server.receive(answer(sent, 5.0)), twin.receive(answer(sent, 5.0)))
    assert server.updates == 3
    assert same(server.state_dict(), twin.state_dict())


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(
    "strategy",
    ["pace", "pace:graph.similarity=l2", "pfedgraph", "fedamp-async", "fedbuff:buffer_size=2"],
)
def test_what_is_not_refused_is_not_too_large_to_compute_with(strategy, dtype):
    """Squares of opposite vectors and of their difference are finite, and so are cosines."""
    most = (min(torch.finfo(dtype).max / 16, 1e150) / SIZE) ** 0.5
    initial = torch.ones(SIZE, dtype=dtype)
    server = Server(STRATEGIES.create(strategy), Context(initial, [1, 2, 3], Task(), 0))
    sent = {new.client: new for new in server.join(range(3))}
    for client, value in enumerate([0.99 * most, -0.99 * most, 0.99 * most]):
        vector = torch.full((SIZE,), value, dtype=dtype)
        actions = server.receive(Update(client, sent[client].number, vector, 1))
        for new in actions:
            assert torch.isfinite(new.params).all()
            sent[new.client] = new
    for client in range(3):
        assert torch.isfinite(server.strategy.model_for(client)).all()
    graph = server.strategy.collaboration()
    assert graph is None or graph[2, 0] > graph[2, 1] + 0.1  # alike, and opposite
    before, client = deepcopy(server.state_dict()), next(iter(server.open))
    vector = torch.full((SIZE,), 1.01 * most, dtype=dtype)
    with pytest.raises(Refused, match=f"client {client} sent values that are too large"):
        server.receive(Update(client, sent[client].number, vector, 1))
    assert same(server.state_dict(), before)


def test_an_update_that_comes_after_it_was_given_up_is_refused():
    server, sent = begin(2, refill="same")
    server.lost(0)
    with pytest.raises(Refused, match=f"dispatch {sent[0].number}, which is not open"):
        server.receive(answer(sent[0]))
    server.leave(1)
    with pytest.raises(Refused, match=r"client 1 .*must join first"):
        server.receive(answer(sent[1]))
    [again] = server.join([1])
    with pytest.raises(Refused, match="is not open: this update came twice"):
        server.receive(answer(sent[1]))
    server.receive(answer(again))
    assert server.updates == 1


# -- multicast and urgent requests -----------------------------------------------------------------


def crossing() -> tuple[Server, Dispatch, Dispatch]:
    """Client 2 was sent a model first and a multicast after update 1; there are 2 now."""
    server, sent = begin(3, refill="same")
    server.strategy.pushes = {2}
    multicast, reply = server.receive(answer(sent[0]))
    assert (multicast.client, multicast.preempt) == (2, True)
    assert (reply.client, reply.preempt) == (0, False)
    assert torch.equal(multicast.params, server.strategy.model_for(2))
    server.receive(answer(sent[1]))
    assert len(server.open) == 3
    return server, sent[2], multicast


@pytest.mark.parametrize(("which", "updates"), [("older", 2), ("newer", 1)])
def test_staleness_counts_from_the_dispatch_that_is_answered_and_both_are_closed(which, updates):
    server, older, newer = crossing()
    answered, left = (older, newer) if which == "older" else (newer, older)
    [reply] = server.receive(answer(answered))
    assert server.strategy.seen[-1] == (2, answered.number, Staleness(updates, updates))
    for closed in (left, answered):
        with pytest.raises(Refused, match=f"dispatch {closed.number}, which is not open"):
            server.receive(answer(closed))
    server.receive(answer(reply))
    assert server.strategy.seen[-1] == (2, reply.number, Staleness(0, 0))


def test_a_multicast_takes_no_slot_and_no_second_client():
    server, sent = begin(4, concurrency=2)
    reporting, training = sent
    server.strategy.pushes = {training, reporting}  # one of them has just reported
    multicast, new = server.receive(answer(sent[reporting]))
    assert (multicast.client, multicast.preempt) == (training, True)
    assert new.client != training and len(server.open) == 2


def test_an_urgent_request_names_what_the_client_trains_and_leaves_it_in_training():
    server, sent = begin(3, refill="same")
    server.strategy.stops = {1}
    stop, reply = server.receive(answer(sent[0]))
    assert stop == Stop(1, sent[1].number)
    assert reply.client == 0 and 1 in server.open
    server.strategy.pushes = server.strategy.stops = {1}
    multicast, stop, _ = server.receive(answer(reply))
    assert isinstance(multicast, Dispatch) and stop == Stop(1, multicast.number)
    server.receive(answer(multicast))
    assert server.strategy.seen[-1] == (1, multicast.number, Staleness(0, 0))


# -- checkpoints -----------------------------------------------------------------------------------


def traffic(server: Server, open_: dict[int, Dispatch], steps: range) -> list:
    """Updates, losses, clients that leave and return: the same for the same server."""
    log = []
    for step in steps:
        stream = rng(0, "traffic", step)
        client, what = int(stream.choice(sorted(server.open))), stream.random()
        if isinstance(server.strategy, Probe):
            server.strategy.pushes = {int(stream.integers(8))}
        if what < 0.7:
            vector = torch.from_numpy(stream.normal(size=SIZE).astype(np.float32))
            actions = server.receive(Update(client, open_[client].number, vector, 5))
        elif what < 0.85:
            actions = server.lost(client)
        else:
            actions = server.leave(client) + server.join([client])
        for action in actions:
            open_[action.client] = action
        log += actions
    return log


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("probe", {"refill": "idle", "concurrency": 3}),
        ("fedasync", {"refill": "idle", "concurrency": 3}),
        ("fedbuff:buffer_size=4", {"refill": "same"}),
        ("fedavg", {"concurrency": 3}),
        ("pfedgraph", {"concurrency": 3}),
        ("pace:omega=3", {"concurrency": 4}),
        ("pace:omega=3,reply=fresh", {"refill": "same"}),
        ("standalone", {}),
    ],
)
def test_a_server_continues_from_its_file_as_if_it_had_never_stopped(name, settings, tmp_path):
    def build() -> Server:
        made = Probe(every=2) if name == "probe" else STRATEGIES.create(name)
        return Server(made, context(8), **settings)

    server = build()
    open_ = {sent.client: sent for sent in server.join(range(8))}
    traffic(server, open_, range(25))
    save_state(tmp_path / "state", server.state_dict())
    resumed = build()
    resumed.load_state_dict(load_state(tmp_path / "state"))
    assert same(resumed.state_dict(), server.state_dict())
    kept = dict(open_)
    first = traffic(server, open_, range(25, 50))
    assert sum(isinstance(action, Dispatch) for action in first) >= 10
    assert same_actions(traffic(resumed, kept, range(25, 50)), first)
    assert same(resumed.state_dict(), server.state_dict())


# -- whatever happens ------------------------------------------------------------------------------


class Whatever(RuleBasedStateMachine):
    """Clients report, fail, leave, come and go in any order; the test keeps its own books."""

    @initialize(
        clients=st.integers(1, 6),
        less=st.integers(0, 5),
        refill=st.sampled_from(["idle", "same", "cohort"]),
        every=st.integers(1, 3),
        seed=st.integers(0, 1000),
    )
    def open_shop(self, clients, less, refill, every, seed):
        self.clients, self.concurrency = clients, max(1, clients - less)
        self.server = Server(
            Probe(every=every), context(clients, seed), concurrency=self.concurrency, refill=refill
        )
        self.sent: list[tuple[Dispatch, int, int]] = []  # with updates and version when it was sent
        self.training: dict[int, list[int]] = {}
        self.present: set[int] = set()
        self.known: set[int] = set()
        self.updates = self.version = self.since_close = self.closes = 0

    def pick(self, number: int) -> int:
        return sorted(self.training)[number % len(self.training)]

    def closes_cohort(self) -> None:
        if self.server.refill == "cohort" and not self.training:
            self.version += self.since_close > 0
            self.since_close = 0
            self.closes += 1

    def note(self, actions, new: frozenset[int] = frozenset()) -> None:
        """`new`: who joins for the first time, and needs no slot."""
        were_training = bool(self.training)
        for action in actions:
            assert action.number == len(self.sent)
            assert action.client in self.training if action.preempt else True
            if not action.preempt:
                assert action.client not in self.training
                assert action.client in self.present
                assert not (self.server.refill == "cohort" and were_training)
            self.training.setdefault(action.client, []).append(action.number)
            self.sent.append((action, self.updates, self.version))
            if not action.preempt and action.client not in new:
                assert len(self.training) <= self.concurrency
        assert new <= set(self.training)

    @rule(client=st.integers(0, 5))
    def join(self, client):
        self.join_all({client % self.clients})

    @rule()
    def join_everybody(self):
        self.join_all(set(range(self.clients)))

    def join_all(self, clients: set[int]) -> None:
        late = self.updates > 0 and self.server.refill != "cohort"
        new = frozenset(clients - self.known) if late else frozenset()
        self.present |= clients
        self.known |= clients
        self.note(self.server.join(clients), new)

    @precondition(lambda self: self.training)
    @rule(which=st.integers(0, 5), back=st.integers(0, 3), push=st.sets(st.integers(0, 5)))
    def report(self, which, back, push):
        client = self.pick(which)
        number = self.training[client][-1 - back % len(self.training[client])]
        sent, at_round, at_version = self.sent[number]
        expected = Staleness(self.updates - at_round, self.version - at_version)
        self.server.strategy.pushes = push
        actions = self.server.receive(answer(sent))
        assert self.server.strategy.seen[-1] == (client, number, expected)
        del self.training[client]
        self.updates += 1
        self.since_close += 1
        self.version += self.updates % self.server.strategy.every == 0
        self.closes_cohort()
        pushed = {action.client for action in actions if action.preempt}
        assert pushed == push & set(self.training)
        if len(self.training) >= self.concurrency:  # of newcomers
            assert not [a for a in actions if not a.preempt]
        elif self.server.refill == "same" and client in self.present:
            assert [a.client for a in actions if not a.preempt] == [client]
        self.note(actions)

    @precondition(lambda self: self.training)
    @rule(which=st.integers(0, 5))
    def lose(self, which):
        client = self.pick(which)
        actions = self.server.lost(client)
        del self.training[client]
        self.closes_cohort()
        self.note(actions)

    @rule(client=st.integers(0, 5))
    def leave(self, client):
        client %= self.clients
        self.present.discard(client)
        actions = self.server.leave(client)
        if self.training.pop(client, None):
            self.closes_cohort()
        self.note(actions)

    @rule(client=st.integers(0, 5))
    def away(self, client):
        client %= self.clients
        self.present.discard(client)
        self.server.away(client)

    @precondition(lambda self: self.sent)
    @rule(which=st.integers(0, 100))
    def report_what_is_closed(self, which):
        sent, *_ = self.sent[which % len(self.sent)]
        if sent.number in self.training.get(sent.client, []):
            return
        before = deepcopy(self.server.state_dict())
        with pytest.raises(Refused):
            self.server.receive(answer(sent))
        assert same(self.server.state_dict(), before)

    @invariant()
    def the_books_agree(self):
        if not hasattr(self, "server"):
            return
        found = {client: [o.number for o in sent] for client, sent in self.server.open.items()}
        assert found == self.training
        for sent in self.server.open.values():
            for number, at_round, at_version, *_ in sent:
                assert self.sent[number][1:] == (at_round, at_version)
        assert (self.server.updates, self.server.version) == (self.updates, self.version)
        assert len(self.server.strategy.cohorts) == self.closes
        assert set(self.server.members) == self.present

    @invariant()
    def those_in_training_are_in_order(self):
        if not hasattr(self, "server"):
            return
        found = [(-f.staleness.updates, f.client) for f in self.server.in_flight()]
        since = {client: self.sent[numbers[-1]][1] for client, numbers in self.training.items()}
        assert sorted(found) == sorted((at - self.updates, client) for client, at in since.items())
        settled = [(stale, client) for stale, client in found if stale]
        assert settled == sorted(settled) == found[: len(settled)]

    @invariant()
    def slots_are_not_wasted(self):
        if not hasattr(self, "server"):
            return
        waiting = self.present - set(self.training)
        if waiting:
            busy = self.training if self.server.refill == "cohort" else None
            assert busy or len(self.training) >= self.concurrency


Whatever.TestCase.settings = settings(max_examples=60, stateful_step_count=25, deadline=None)
TestWhateverHappens = Whatever.TestCase
