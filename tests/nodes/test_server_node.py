"""The server of a fleet, by hand: a history for each promise. `test_bad_network.py` has others."""

import math

import pytest
import torch

import polytempo.strategies  # noqa: F401
from polytempo.core import events
from polytempo.core.server import MOST_SAMPLES, Server
from polytempo.core.strategy import STRATEGIES, Context
from polytempo.core.task import Task
from polytempo.nodes.deadlines import PAST
from polytempo.nodes.plan import MOST_AT_FIRST, MOST_DOUBLINGS, FleetPlan, Patience
from polytempo.nodes.server import ServerNode
from polytempo.nodes.star import (
    PROTOCOL,
    Acknowledge,
    Away,
    Closed,
    Decline,
    Drop,
    Enrolled,
    Examine,
    Finished,
    GivenUp,
    Hello,
    Hurry,
    Joined,
    Left,
    Offered,
    Report,
    Scores,
    Send,
    Swapped,
    Upload,
    Welcome,
    Work,
    Write,
)
from polytempo.storage import restored

SUMS = {"samples": 5.0, "correct": 4.0}


class Fleet:
    """A node and a driver that writes and applies at once, unless it is told to `hold`."""

    def __init__(self, clients=3, *, strategy="fedasync", concurrency=None, refill=None, **plan):
        self.clients, self.concurrency, self.refill = clients, concurrency, refill
        self.strategy = {"name": strategy} if isinstance(strategy, str) else strategy
        given = {"updates": 100, "eval_every": 1_000, "patience": Patience(4.0, 10.0, 60.0)}
        self.plan = {**given, **plan}
        self.now = 0.0
        self.connected = set()
        self.log, self.said, self.held, self.holding = [], [], [], False
        self.node = self.new()
        self.do(self.node.started(0.0))

    def new(self, **changes):
        samples = [1] * self.clients
        context = Context(torch.ones(2), samples, Task(), 0)
        server = Server(
            STRATEGIES.create(self.strategy),
            context,
            concurrency=self.concurrency,
            refill=self.refill,
        )
        figures = frozenset(SUMS)
        plan = FleetPlan("layout", "digits", {"id": "x"}, figures=figures, **self.plan | changes)
        return ServerNode(server, samples, plan)

    def do(self, actions):
        for action in actions:
            if isinstance(action, Write):
                self.held.append(action.record)
                if not self.holding:
                    self.release()
            elif not isinstance(action, Send) or action.name in self.connected:
                self.said.append(action)

    def release(self):
        """What was held is safe: apply it."""
        self.holding = False
        while self.held:
            record = self.held.pop(0)
            self.log.append(record)
            self.do(self.node.apply(record))

    def hold(self):
        self.holding = True

    def connect(self, name, **held):
        self.connected.add(name)
        self.do(self.node.connected(name, hello(**held), self.now))
        return self.told(name)

    def disconnect(self, name):
        self.connected.discard(name)
        self.told(name)  # or lost
        self.do(self.node.disconnected(name, self.now))

    def says(self, name, message):
        self.do(self.node.received(name, message, self.now))
        return self.told(name)

    def offers(self, name, number, value=0.5, **changes):
        return self.says(name, upload(number, value, **changes))

    def tick(self, now):
        self.now = now
        self.do(self.node.tick(now))

    def told(self, name):
        """What that client was told since the last time."""
        found = [a for a in self.said if isinstance(a, Send | Drop) and a.name == name]
        self.said = [a for a in self.said if a not in found]
        return [a.message if isinstance(a, Send) else a for a in found]

    def restart(self, hold=False, **changes):
        """Killed, and started again, with other settings perhaps."""
        self.plan |= changes
        self.held, self.holding = [], False
        self.said, self.connected = [], set()
        self.node = self.new()
        for record in self.log:
            self.node.apply(record)
        self.holding = hold
        self.do(self.node.started(self.now))

    def training(self):
        return {self.node.roster[c]: sent[-1].number for c, sent in self.node.server.open.items()}


def hello(training=None, offering=None, **changes):
    given = {"protocol": PROTOCOL, "model": "layout", "problem": "digits", "samples": 7}
    return Hello(**{**given, "tested": 5, "training": training, "offering": offering} | changes)


def upload(number, value=0.5, **changes):
    return Upload(number, torch.full((2,), value), **{"samples": 7, "seconds": 1.0} | changes)


def works(messages):
    """(number, preempt) of what it was sent to train."""
    return [(m.dispatch.number, m.dispatch.preempt) for m in messages if isinstance(m, Work)]


def kinds(messages):
    return [type(message) for message in messages]


def reported(fleet, kind):
    return [a.event for a in fleet.said if isinstance(a, Report) and isinstance(a.event, kind)]


# -- who takes part --------------------------------------------------------------------------------


def test_a_client_is_told_of_nothing_before_it_is_written_down():
    fleet = Fleet()
    fleet.hold()
    assert fleet.connect("a") == []
    [record] = fleet.held
    assert record == Enrolled(0.0, "a", 7, 5)
    fleet.release()
    assert kinds(fleet.told("a")) == [Welcome, Work]


def test_numbers_are_given_in_the_order_of_enrolment_and_kept():
    fleet = Fleet()
    names = [fleet.connect(name)[0].client for name in ("b", "a", "c")]
    assert names == [0, 1, 2]
    fleet.disconnect("a")
    assert fleet.connect("a")[0] == Welcome(1, {"id": "x"})
    assert fleet.node.samples == [7, 7, 7]
    assert fleet.node.server.context.samples is fleet.node.samples


@pytest.mark.parametrize(
    ("wrong", "reason"),
    [
        ({"protocol": PROTOCOL + 1}, f"protocol {PROTOCOL + 1}, the server {PROTOCOL}"),
        ({"model": "other"}, "layout other, the server one with layout"),
        ({"problem": "letters"}, "learns letters, the server digits"),
        ({"samples": 0}, "0 training and 5 test samples"),
        ({"tested": -1}, "-1 test samples"),
        ({"samples": MOST_SAMPLES + 1}, "at most 1,000,000,000"),
    ],
)
def test_a_client_that_does_not_fit_hears_what_differs(wrong, reason):
    fleet = Fleet()
    [drop] = fleet.connect("a", **wrong)
    assert isinstance(drop, Drop)
    assert reason in drop.reason
    assert fleet.node.names == {}
    assert "a" not in fleet.node.here


def test_a_client_without_a_model_takes_the_servers():
    assert kinds(Fleet().connect("a", model="")) == [Welcome, Work]


def test_one_more_than_there_is_room_for_is_refused_even_while_others_enrol():
    fleet = Fleet(clients=2)
    fleet.hold()
    fleet.connect("a")
    fleet.connect("b")
    [drop] = fleet.connect("c")
    assert "room for 2 clients" in drop.reason
    assert fleet.connect("b") == []  # it is one of the two
    fleet.release()
    assert [type(m) for name in "ab" for m in fleet.told(name)].count(Welcome) == 2


def test_a_known_client_that_no_longer_fits_is_away():
    fleet = Fleet()
    fleet.connect("a")
    assert isinstance(fleet.connect("a", model="other")[0], Drop)
    assert 0 not in fleet.node.server.members
    assert isinstance(fleet.log[-1], Away)


def test_who_leaves_and_returns_while_it_enrols_is_not_away():
    fleet = Fleet()
    fleet.hold()
    fleet.connect("a")
    fleet.disconnect("a")
    fleet.connect("a")
    fleet.release()
    assert [type(record) for record in fleet.log[1:]] == [Enrolled, Away, Joined]
    assert 0 in fleet.node.server.members


def test_a_client_that_connects_again_before_its_departure_was_applied_is_there():
    fleet = Fleet()
    fleet.connect("a")
    fleet.hold()
    fleet.disconnect("a")
    fleet.connect("a")
    fleet.release()
    assert 0 in fleet.node.server.members


def test_the_end_of_a_connection_that_was_never_accepted_is_nothing():
    fleet = Fleet()
    fleet.connect("a", model="other")
    written = len(fleet.log)
    fleet.disconnect("a")
    fleet.disconnect("stranger")
    assert len(fleet.log) == written


@pytest.mark.parametrize("message", [upload(0), Swapped(0, 0, 1), Scores(0, SUMS)])
def test_who_has_not_said_hello_is_dropped(message):
    fleet = Fleet()
    assert kinds(fleet.says("a", message)) == [Drop]
    fleet.connect("a")
    fleet.disconnect("a")
    assert kinds(fleet.says("a", message)) == [Drop]


def test_hello_twice_is_an_error():
    fleet = Fleet()
    fleet.connect("a")
    assert "hello twice" in fleet.says("a", hello())[0].reason


# -- updates ---------------------------------------------------------------------------------------


def test_an_update_is_acknowledged_when_it_is_written_down_and_folded_once():
    fleet = Fleet(clients=1)
    fleet.connect("a")
    fleet.hold()
    assert fleet.offers("a", 0) == []
    assert fleet.offers("a", 0) == []  # again, and it is written down again
    before = fleet.node.server.strategy.model
    fleet.release()
    assert fleet.node.updates == 1
    told = fleet.told("a")
    assert [m for m in told if isinstance(m, Acknowledge)] == [Acknowledge(0)] * 2
    assert works(told) == [(1, False)]
    assert not torch.equal(before, fleet.node.server.strategy.model)
    assert fleet.offers("a", 0) == [Acknowledge(0)]  # and again, later: not written down
    assert sum(isinstance(record, Offered) for record in fleet.log) == 2


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"value": math.nan}, "NaN or infinite"),
        ({"vector": torch.ones(3)}, "3"),
        ({"samples": 0}, "claims 0 samples"),
        ({"samples": MOST_SAMPLES + 1}, "at most 1,000,000,000"),
        ({"extras": {"mask": torch.ones(1, 1)}}, "extras ['mask']"),
    ],
)
def test_a_bad_update_costs_its_client_the_slot_and_takes_no_room_on_disk(changes, reason):
    fleet = Fleet(clients=1)
    fleet.connect("a")
    vector = changes.pop("vector", torch.full((2,), changes.pop("value", 0.5)))
    told = fleet.says("a", Upload(0, vector, **{"samples": 7} | changes))
    assert isinstance(fleet.log[-1], GivenUp)
    assert kinds(told) == [Decline, Work]
    assert told[0].number == 0
    assert reason in told[0].reason
    assert fleet.node.updates == 0
    assert fleet.node.deadlines.missed == {}  # it was in time


def test_an_update_that_the_strategy_refuses_costs_the_slot_too():
    fleet = Fleet(clients=1, strategy="casa+")
    fleet.connect("a")
    mask = torch.zeros(1, 9, dtype=torch.uint8)  # one byte would do
    told = fleet.offers("a", 0, extras={"mask": mask})
    assert isinstance(fleet.log[-1], Offered)
    assert kinds(told) == [Decline, Work]
    assert "mask" in told[0].reason
    assert fleet.node.updates == 0


def test_an_update_that_answers_nothing_is_declined():
    fleet = Fleet(clients=2)
    fleet.connect("a")
    fleet.connect("b")
    written = len(fleet.log)
    assert kinds(fleet.offers("a", 1)) == [Decline]  # that was b's
    assert kinds(fleet.offers("a", 99)) == [Decline]
    assert len(fleet.log) == written
    assert fleet.training() == {"a": 0, "b": 1}


def test_two_updates_in_one_group_are_folded_in_their_order():
    fleet = Fleet(clients=2)
    fleet.connect("a")
    fleet.connect("b")
    fleet.hold()
    fleet.offers("b", 1)
    fleet.offers("a", 0)
    fleet.release()
    folded = [(event.client, event.staleness) for event in reported(fleet, events.Upload)]
    assert folded == [(1, 0), (0, 1)]
    assert fleet.node.staleness == {0: 1, 1: 1}


# -- who comes back --------------------------------------------------------------------------------


def test_who_comes_back_without_its_work_is_sent_it_again():
    fleet = Fleet(clients=1)
    [_, work] = fleet.connect("a")
    fleet.disconnect("a")
    [_, again] = fleet.connect("a")
    assert works([again]) == [(0, False)]
    assert torch.equal(again.dispatch.params, work.dispatch.params)


def test_who_comes_back_in_training_is_left_alone():
    fleet = Fleet(clients=1)
    fleet.connect("a")
    fleet.disconnect("a")
    assert kinds(fleet.connect("a", training=0)) == [Welcome]


def test_who_comes_back_with_an_update_that_is_open_is_left_to_offer_it():
    fleet = Fleet(clients=1)
    fleet.connect("a")
    fleet.disconnect("a")
    assert kinds(fleet.connect("a", offering=0)) == [Welcome]
    assert kinds(fleet.offers("a", 0)) == [Acknowledge, Work]


def test_who_comes_back_with_an_update_that_was_folded_hears_so_before_anything_else():
    fleet = Fleet(clients=1)
    fleet.connect("a")
    fleet.offers("a", 0)
    fleet.disconnect("a")
    told = fleet.connect("a", offering=0)
    assert kinds(told) == [Welcome, Acknowledge, Work]
    assert works(told) == [(1, False)]


def test_who_comes_back_too_late_hears_so():
    fleet = Fleet(clients=2, concurrency=1)
    fleet.connect("a")
    fleet.disconnect("a")
    fleet.connect("b")
    fleet.tick(61.0)  # nobody has finished anything: `first`
    assert fleet.training() == {"b": 1}
    assert kinds(fleet.connect("a", training=0)) == [Welcome, Decline]
    fleet.disconnect("a")
    assert kinds(fleet.connect("a", offering=0)) == [Welcome, Decline]


def test_who_was_given_up_and_sent_something_else_meanwhile_gets_that():
    fleet = Fleet(clients=1)
    fleet.connect("a")
    fleet.tick(61.0)
    told = fleet.told("a")
    assert kinds(told) == [Decline, Work]
    fleet.disconnect("a")
    told = fleet.connect("a", training=0)
    assert works(told) == [(1, False)]


def pushed(fleet):
    """Client a is in training, and was sent a multicast that it did not get."""
    for name in "ab":
        fleet.connect(name)
    fleet.offers("b", 1)
    assert works(fleet.told("a")) == [(2, True)]
    fleet.disconnect("a")


def test_a_multicast_that_was_lost_is_sent_again_to_who_still_trains():
    fleet = Fleet(clients=2, strategy={"name": "pace", "omega": 0.5})
    pushed(fleet)
    assert works(fleet.connect("a", training=0)) == [(2, True)]
    fleet.disconnect("a")
    assert works(fleet.connect("a", training=2)) == []  # it had come in time
    fleet.disconnect("a")
    assert works(fleet.connect("a")) == [(2, False)]  # restarted: that is where it begins
    fleet.disconnect("a")
    assert works(fleet.connect("a", offering=0)) == []  # finished before it came


def test_a_multicast_that_took_the_place_of_what_it_was_to_replace_is_sent_again_as_work():
    fleet = Fleet(clients=2, strategy={"name": "pace", "omega": 0.5})
    pushed(fleet)
    fleet.connect("a", training=0)
    for held in (2, 99):  # nothing, or something that is not open
        assert works(fleet.says("a", Swapped(2, held, None))) == [(2, False)]
    assert fleet.says("a", Swapped(0, 0, None)) == []  # a newer one is on its way
    fleet.offers("a", 0)
    assert fleet.says("a", Swapped(2, 2, None)) == []  # that training is over


def test_a_multicast_that_crosses_the_update_makes_it_no_fresher():
    fleet = Fleet(clients=2, strategy={"name": "pace", "omega": 0.5})
    pushed(fleet)
    fleet.connect("a", offering=0)
    fleet.offers("a", 0)
    assert [e.staleness for e in reported(fleet, events.Upload) if e.client == 0] == [1]


def test_what_became_of_a_multicast_is_reported():
    fleet = Fleet(clients=2, strategy={"name": "pace", "omega": 0.5})
    pushed(fleet)
    fleet.connect("a", training=0)
    fleet.says("a", Swapped(2, 0, 17))
    [restart] = reported(fleet, events.Restart)
    assert (restart.dispatch, restart.replaces, restart.step) == (2, 0, 17)
    fleet.says("a", Swapped(2, 0, None))
    assert len(reported(fleet, events.Missed)) == 1
    written = len(fleet.log)
    fleet.says("a", Swapped(1, 0, 3))  # that is b's
    assert len(fleet.log) == written


def test_a_request_to_hurry_that_was_lost_is_said_again():
    fleet = Fleet(clients=2, strategy={"name": "port", "bound": 1, "buffer_size": 1})
    for name in "ab":
        fleet.connect(name)
    for number in (1, 2):
        fleet.offers("b", number)
    assert kinds(fleet.told("a")) == [Hurry]
    fleet.disconnect("a")
    assert fleet.connect("a", training=0)[-1] == Hurry(0)
    fleet.disconnect("a")
    assert kinds(fleet.connect("a")) == [Welcome, Work, Hurry]
    fleet.disconnect("a")
    assert kinds(fleet.connect("a", offering=0)) == [Welcome]
    fleet.offers("a", 0)
    fleet.disconnect("a")
    assert kinds(fleet.connect("a")) == [Welcome, Work]  # a new one, which takes its time


# -- deadlines -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("own", "longest", "missed", "seconds"),
    [
        ([], 0.0, 0, 600.0),  # nobody has finished anything
        ([], 20.0, 0, 80.0),  # somebody has
        ([10.0, 30.0, 20.0], 500.0, 0, 120.0),  # its own past counts
        ([1.0], 500.0, 0, 30.0),  # at least so long
        ([10.0], 10.0, 2, 160.0),
        ([], 0.0, 1, 1_200.0),
        ([10.0], 10.0, 10_000, 40.0 * 2**MOST_DOUBLINGS),
        ([], 0.0, 10_000, 600.0 * 2**MOST_AT_FIRST),
    ],
)
def test_patience(own, longest, missed, seconds):
    assert Patience().seconds(own, longest, missed) == seconds


def test_infinite_patience_is_infinite_whatever_happened():
    for own, longest in (([], 0.0), ([], 5.0), ([0.0], 0.0), ([7.0], 9.0)):
        assert Patience(factor=math.inf).seconds(own, longest) == math.inf


def test_deadlines_follow_the_last_trainings_of_the_client_itself():
    fleet = Fleet(clients=1)
    fleet.connect("a")
    for number, seconds in enumerate([50.0, *[20.0] * PAST]):
        fleet.now += seconds
        fleet.offers("a", number)
        assert fleet.node.deadlines.seconds(0) == (200.0 if number < PAST else 80.0)
    assert len(fleet.node.deadlines.past[0]) == PAST


def test_who_takes_too_long_loses_its_slot_and_may_have_another():
    fleet = Fleet(clients=2, concurrency=1)
    fleet.connect("a")
    fleet.connect("b")
    fleet.now = 5.0
    fleet.offers("a", 0)
    [(slow, number)] = fleet.training().items()
    fleet.tick(25.0)  # 4 x 5 seconds
    assert fleet.training() == {slow: number}
    fleet.tick(25.1)
    assert fleet.training() != {slow: number}
    assert Decline(number, "it took too long; a fresh model may follow") in fleet.told(slow)
    assert kinds(fleet.offers(slow, number)) == [Decline]
    assert fleet.node.updates == 1


def test_a_client_that_has_become_slow_is_given_twice_the_time_each_time():
    fleet = Fleet(clients=1)
    fleet.connect("a")
    waits = []
    for _ in range(3):
        begun = fleet.now
        number = fleet.training()["a"]
        while fleet.training()["a"] == number:
            fleet.tick(fleet.now + 1.0)
        waits.append(fleet.now - begun)
    assert waits == [61.0, 121.0, 241.0]
    fleet.offers("a", fleet.training()["a"])
    assert fleet.node.deadlines.missed == {}


@pytest.mark.parametrize("refill", ["same", "idle", "cohort"])
def test_a_client_that_never_answers_does_not_keep_its_slot_from_others(refill):
    fleet = Fleet(clients=2, concurrency=1, refill=refill)
    fleet.connect("a")
    fleet.connect("b")
    fleet.tick(61.0)  # a is there, and does nothing
    assert fleet.training() == {"b": 1}


def test_a_client_that_was_away_is_not_given_more_time_for_it():
    fleet = Fleet(clients=1)
    fleet.connect("a")
    fleet.disconnect("a")
    fleet.tick(61.0)
    assert fleet.training() == {}
    assert fleet.node.deadlines.missed == {}


@pytest.mark.parametrize("refill", ["same", "idle", "cohort"])
def test_the_slot_of_one_that_is_gone_goes_to_another_before_its_deadline(refill):
    fleet = Fleet(
        clients=2, concurrency=1, refill=refill, patience=Patience(first=600.0, away=20.0)
    )
    fleet.connect("a")
    fleet.now = 10.0
    fleet.disconnect("a")
    fleet.connect("b")
    fleet.tick(29.0)
    assert fleet.training() == {"a": 0}, "it may be back soon"
    fleet.tick(31.0)
    assert fleet.training() == {"b": 1}
    assert fleet.connect("a", training=0) == [
        Welcome(0, {"id": "x"}),
        Decline(0, "it took too long"),
    ]


def test_one_that_is_gone_keeps_its_slot_while_nobody_waits_for_it():
    fleet = Fleet(clients=2, concurrency=2, patience=Patience(first=600.0, away=20.0))
    fleet.connect("a")
    fleet.connect("b")
    fleet.disconnect("a")
    fleet.tick(599.0)
    assert fleet.training() == {"a": 0, "b": 1}
    forever = Fleet(clients=2, concurrency=1, patience=Patience(float("inf")))
    forever.connect("a")
    forever.disconnect("a")
    forever.connect("b")
    forever.tick(1e9)
    assert forever.training() == {"a": 0}


def test_who_is_back_before_it_is_given_up_for_being_gone_goes_on():
    fleet = Fleet(clients=2, concurrency=1, patience=Patience(first=600.0, away=20.0))
    fleet.connect("a")
    fleet.disconnect("a")
    fleet.connect("b")
    fleet.hold()
    fleet.connect("a", training=0)
    fleet.tick(30.0)  # by what is applied, it is still gone
    fleet.release()
    assert [r.away for r in fleet.log if isinstance(r, GivenUp)] == [True]
    assert fleet.training() == {"a": 0} and Decline not in kinds(fleet.told("a"))


def test_a_restart_gives_those_that_are_away_the_time_to_come_back():
    fleet = Fleet(clients=2, concurrency=1, patience=Patience(first=600.0, away=20.0))
    fleet.connect("a")
    fleet.disconnect("a")
    fleet.now = 100.0
    fleet.restart()
    fleet.connect("b")
    fleet.tick(119.0)
    assert fleet.training() == {"a": 0}
    fleet.tick(121.0)
    assert fleet.training() == {"b": 1}


# -- who is waited for in the beginning ------------------------------------------------------------


@pytest.mark.parametrize("strategy", ["fedasync", "fedavg"])
def test_nobody_trains_before_those_are_there_that_are_waited_for(strategy):
    fleet = Fleet(clients=4, concurrency=2, strategy=strategy, wait_for=3)
    for name in "ab":
        assert kinds(fleet.connect(name)) == [Welcome]
    fleet.disconnect("b")
    assert kinds(fleet.connect("c")) == [Welcome]
    assert fleet.training() == {} and fleet.node.gathering
    fleet.connect("b")
    assert len(fleet.training()) == 2 and not fleet.node.gathering
    chosen = min(fleet.training().items(), key=lambda pair: pair[1])
    for name in "abc":
        if name != chosen[0]:
            fleet.disconnect(name)
    fleet.offers(*chosen)
    assert fleet.node.updates == 1 and not fleet.node.gathering, "once begun, it goes on with fewer"


def test_whom_a_run_waits_for_is_written_down_and_may_change_with_a_restart():
    fleet = Fleet(clients=3, wait_for=3)
    fleet.connect("a")
    state = restored(fleet.node.state_dict())
    again = fleet.new(wait_for=1)  # what counts is what was written down
    again.load_state_dict(state)
    for record in (Joined(1.0, "a"), Enrolled(1.0, "b", 7, 5)):
        again.apply(record)
    assert not again.server.open and again.server.wait_for == 3
    fleet.restart(wait_for=2)
    fleet.connect("a")
    assert fleet.training() == {}
    fleet.connect("b")
    assert fleet.training().keys() == {"a", "b"}


def test_a_cohort_does_not_wait_for_ever_for_one_that_never_answered():
    fleet = Fleet(clients=3, strategy="fedavg", concurrency=3)
    for name in "abc":
        fleet.connect(name)
    fleet.offers("a", 0)  # the first was alone: a cohort of one
    cohort = fleet.training()
    assert len(cohort) == 3
    fleet.now = 3.0
    fleet.offers("a", cohort["a"])
    fleet.offers("b", cohort["b"])
    assert fleet.training() == {"c": cohort["c"]}
    fleet.tick(13.1)  # at least 10 seconds
    after = fleet.training()
    assert after.keys() == {"a", "b"}  # the next cohort
    fleet.offers("a", after["a"])
    fleet.offers("b", after["b"])
    assert len(fleet.training()) == 3  # c may try again


def test_a_cohort_of_which_everybody_has_gone_is_followed_by_whoever_comes():
    fleet = Fleet(clients=2, strategy="fedavg", concurrency=2)
    for name in "ab":
        fleet.connect(name)
    for name in "ab":
        fleet.disconnect(name)
    fleet.tick(61.0)
    assert fleet.training() == {}
    assert len(works(fleet.connect("b"))) == 1


def test_a_multicast_between_the_decision_to_give_up_and_its_record_saves_nobody():
    fleet = Fleet(clients=2, strategy={"name": "pace", "omega": 0.5})
    for name in "ab":
        fleet.connect(name)
    fleet.now = 60.5
    fleet.disconnect("a")
    fleet.hold()
    fleet.offers("b", 1)
    fleet.tick(61.0)  # when this is applied, a was sent a multicast
    fleet.release()
    assert "a" not in fleet.training()
    assert kinds(fleet.connect("a", training=0))[:2] == [Welcome, Decline]


def test_an_update_that_came_before_the_client_was_given_up_counts():
    fleet = Fleet(clients=1)
    fleet.connect("a")
    fleet.hold()
    fleet.now = 60.5
    fleet.offers("a", 0)
    fleet.tick(61.0)
    fleet.release()
    assert [type(record) for record in fleet.log[-2:]] == [Offered, GivenUp]
    assert fleet.node.updates == 1
    assert kinds(fleet.told("a")) == [Acknowledge, Work]


def test_time_that_the_server_was_down_does_not_count():
    fleet = Fleet(clients=1)
    fleet.connect("a")
    fleet.now = 1_000.0
    fleet.restart()
    fleet.tick(1_060.0)
    assert fleet.training() == {"a": 0}
    fleet.tick(1_060.1)
    assert fleet.training() == {}  # it is away


# -- revoked ---------------------------------------------------------------------------------------


def test_who_is_revoked_in_training_makes_room():
    fleet = Fleet(clients=2, concurrency=1)
    fleet.connect("a")
    fleet.connect("b")
    fleet.do(fleet.node.revoke("a", 1.0))
    assert Drop in kinds(fleet.told("a"))
    assert isinstance(fleet.log[-1], Left)
    assert fleet.training() == {"b": 1}
    assert len(reported(fleet, events.Drop)) == 1
    assert kinds(fleet.offers("a", 0)) == [Drop]
    assert fleet.node.revoked == {0}


def test_who_is_revoked_while_its_update_is_being_written_is_folded_and_gone():
    fleet = Fleet(clients=1)
    fleet.connect("a")
    fleet.hold()
    fleet.offers("a", 0)
    fleet.do(fleet.node.revoke("a", 1.0))
    fleet.release()
    assert fleet.node.updates == 1
    assert fleet.training() == {}


def test_who_is_back_before_its_revocation_was_applied_hears_what_it_lost():
    fleet = Fleet(clients=1)
    fleet.connect("a")
    fleet.hold()
    fleet.do(fleet.node.revoke("a", 1.0))
    fleet.told("a")
    assert works(fleet.connect("a")) == [(0, False)]  # it counts as in training still
    fleet.release()
    told = fleet.told("a")
    assert kinds(told) == [Decline, Work]
    assert (told[0].number, works(told)) == (0, [(1, False)])


def test_who_is_revoked_while_it_enrols_is_gone():
    fleet = Fleet()
    fleet.hold()
    fleet.connect("a")
    fleet.do(fleet.node.revoke("a", 1.0))
    fleet.release()
    assert fleet.training() == {}
    assert 0 not in fleet.node.server.members


def test_revoking_a_stranger_writes_nothing():
    fleet = Fleet()
    written = len(fleet.log)
    fleet.do(fleet.node.revoke("stranger", 1.0))
    assert len(fleet.log) == written


def test_who_is_admitted_again_takes_part_as_before():
    fleet = Fleet(clients=1)
    fleet.connect("a")
    fleet.offers("a", 0)
    fleet.do(fleet.node.revoke("a", 1.0))
    fleet.told("a")
    told = fleet.connect("a", training=1)
    assert kinds(told) == [Welcome, Decline, Work]
    assert told[0].client == 0
    assert fleet.node.revoked == set()
    assert kinds(fleet.offers("a", told[-1].dispatch.number)) == [Acknowledge, Work]


# -- exams, and the end ----------------------------------------------------------------------------


def test_exams_come_every_so_many_updates_to_those_who_are_there_and_have_test_data():
    fleet = Fleet(clients=3, eval_every=2)
    fleet.connect("a")
    fleet.connect("b", tested=0)
    fleet.connect("c")
    fleet.disconnect("c")
    assert kinds(fleet.offers("a", 0)) == [Acknowledge, Work]
    number = fleet.training()["a"]
    told = fleet.offers("a", number)
    assert kinds(told) == [Acknowledge, Work, Examine]
    assert told[-1].adapt_epochs == 0
    assert torch.equal(told[-1].params, fleet.node.server.strategy.serve(0))
    assert Examine not in kinds([*fleet.told("b"), *fleet.told("c")])
    [exam] = fleet.node.exams
    assert (exam.updates, exam.asked, exam.sent["upload"]) == (2, 1, 2)


def test_scores_are_taken_once_and_only_if_they_are_scores():
    fleet = Fleet(clients=1, eval_every=1)
    fleet.connect("a")
    fleet.offers("a", 0)
    written = len(fleet.log)
    for wrong in (
        Scores(7, SUMS),
        Scores(-1, SUMS),
        Scores(0, {"samples": 5.0}),
        Scores(0, SUMS | {"correct": math.nan}),
        Scores(0, SUMS, {"correct": 1.0}),
    ):
        fleet.says("a", wrong)
    assert len(fleet.log) == written
    fleet.says("a", Scores(0, SUMS, SUMS | {"correct": 5.0}))
    fleet.says("a", Scores(0, SUMS | {"correct": 0.0}))
    [exam] = fleet.node.exams
    assert exam.handed == {0: SUMS}
    assert exam.adapted == {0: SUMS | {"correct": 5.0}}


@pytest.mark.parametrize(("always", "epochs"), [(False, [0, 3]), (True, [3, 3])])
def test_adaptation_is_asked_for_in_the_end_or_always(always, epochs):
    fleet = Fleet(clients=1, eval_every=1, updates=2, adapt_epochs=3, adapt_always=always)
    fleet.connect("a")
    told = [*fleet.offers("a", 0), *fleet.offers("a", 1)]
    assert [m.adapt_epochs for m in told if isinstance(m, Examine)] == epochs


def test_a_synchronous_method_is_examined_when_its_cohort_is_complete():
    fleet = Fleet(clients=3, strategy="fedavg", concurrency=2, eval_every=1)
    for name in "abc":
        fleet.connect(name)
    fleet.offers("a", 0)
    updates = [exam.updates for exam in fleet.node.exams]
    assert updates == [1]
    (one, number), (other, last) = fleet.training().items()
    fleet.offers(one, number)
    assert len(fleet.node.exams) == 1
    fleet.offers(other, last)
    assert [exam.updates for exam in fleet.node.exams] == [1, 3]


def finished(fleet, *names):
    return all(kinds(fleet.told(name))[-1:] == [Finished] for name in names)


def test_the_run_is_closed_when_all_that_are_there_have_answered_the_last_exam():
    fleet = Fleet(clients=2, updates=1)
    fleet.connect("a")
    fleet.connect("b")
    told = fleet.offers("a", 0)
    assert kinds(told) == [Acknowledge, Examine]  # and nothing more to train
    fleet.says("a", Scores(0, SUMS))
    fleet.tick(1.0)
    assert not fleet.node.closed
    fleet.says("b", Scores(0, SUMS))
    fleet.tick(2.0)
    assert fleet.node.closed
    assert finished(fleet, "a", "b")
    written = len(fleet.log)
    fleet.tick(3.0)
    assert len(fleet.log) == written


def test_the_run_is_closed_without_those_who_do_not_answer_the_last_exam():
    fleet = Fleet(clients=1, updates=1, closing=60.0)
    fleet.connect("a")
    fleet.now = 5.0
    fleet.offers("a", 0)
    fleet.tick(65.0)
    assert not fleet.node.closed
    fleet.tick(65.1)
    assert fleet.node.closed


def test_who_comes_back_is_asked_the_last_exam_again():
    fleet = Fleet(clients=1, updates=1, adapt_epochs=2)
    fleet.connect("a")
    [_, asked] = fleet.offers("a", 0)
    fleet.now = 1_000.0
    fleet.restart()
    fleet.tick(1_001.0)
    assert not fleet.node.closed  # since it is up, it has not waited long
    [_, again] = fleet.connect("a")
    assert (again.exam, again.adapt_epochs) == (0, 2)
    assert torch.equal(again.params, asked.params)
    fleet.says("a", Scores(0, SUMS))
    assert kinds(fleet.connect("a")) == [Welcome]
    fleet.tick(1_002.0)
    assert fleet.node.closed


def test_who_comes_after_the_end_hears_so():
    fleet = Fleet(clients=3, updates=1)
    fleet.connect("a", tested=0)
    fleet.offers("a", 0)
    fleet.hold()
    fleet.tick(1.0)
    fleet.connect("b")  # written down after the end
    fleet.release()
    assert fleet.node.closed
    assert finished(fleet, "b")
    fleet.disconnect("a")
    assert kinds(fleet.connect("a", training=1)) == [Welcome, Finished]
    assert kinds(fleet.connect("c")) == [Finished]
    assert list(fleet.node.names) == ["a", "b"]


def test_an_update_after_the_last_round_waits_for_an_extension_with_its_client():
    fleet = Fleet(clients=2, updates=1)
    for name in "ab":
        fleet.connect(name, tested=0)
    fleet.offers("a", 0)
    assert fleet.offers("b", 1) == []
    assert fleet.node.updates == 1
    fleet.tick(1.0)
    assert fleet.node.closed
    fleet.restart(updates=3)
    assert not fleet.node.closed
    assert kinds(fleet.connect("b", offering=1)) == [Welcome]
    assert kinds(fleet.offers("b", 1)) == [Acknowledge, Work]


def test_an_update_written_down_in_the_same_group_as_the_last_one_is_not_folded():
    fleet = Fleet(clients=2, updates=1)
    for name in "ab":
        fleet.connect(name)
    fleet.hold()
    fleet.offers("a", 0)
    fleet.offers("b", 1)
    fleet.release()
    assert fleet.node.updates == 1
    assert fleet.training().keys() == {"a", "b"}
    assert Acknowledge(1) not in fleet.told("b")


def test_an_extended_run_continues_with_what_was_chosen_at_its_end():
    fleet = Fleet(clients=1, updates=1)
    fleet.connect("a", tested=0)
    assert works(fleet.offers("a", 0)) == []  # chosen, and not sent
    fleet.tick(1.0)
    fleet.restart(updates=2)
    assert works(fleet.connect("a")) == [(1, False)]
    fleet.offers("a", 1)
    fleet.tick(2.0)
    assert fleet.node.closed
    assert fleet.node.messages["dispatch"] == 3


def test_a_client_that_is_quicker_than_the_record_of_an_extension_is_not_sent_away():
    fleet = Fleet(clients=1, updates=1)
    fleet.connect("a", tested=0)
    fleet.offers("a", 0)
    fleet.tick(1.0)
    fleet.restart(hold=True, updates=2)
    told = fleet.connect("a")
    assert kinds(told) == [Welcome, Work]
    fleet.tick(2.5)
    fleet.release()
    assert not fleet.node.closed


def test_a_record_of_the_end_that_an_extension_has_overtaken_does_not_count():
    fleet = Fleet(clients=1)
    fleet.node.apply(Closed(1.0))
    assert not fleet.node.closed


def test_a_run_that_was_shortened_is_closed():
    fleet = Fleet(clients=1)
    fleet.connect("a")
    fleet.offers("a", 0)
    fleet.restart(updates=1)
    fleet.tick(1.0)
    assert fleet.node.closed


# -- what lasts ------------------------------------------------------------------------------------


def test_telling_the_node_what_happens_changes_nothing_that_lasts():
    fleet = Fleet(clients=2, eval_every=1)
    fleet.connect("a")
    fleet.offers("a", 0)
    before = fleet.node.state_dict()
    fleet.hold()
    fleet.connect("b")
    fleet.offers("a", 1)
    fleet.offers("a", 99)
    fleet.says("a", Scores(0, SUMS))
    fleet.tick(1_000.0)
    fleet.do(fleet.node.revoke("b", 1.0))
    fleet.disconnect("a")
    assert same(before, fleet.node.state_dict())


@pytest.mark.parametrize(
    "strategy",
    [
        "fedasync",
        "fedavg",
        {"name": "pace", "omega": 0.5},
        {"name": "port", "bound": 1, "buffer_size": 1},
    ],
)
def test_a_node_continues_from_its_state_bit_for_bit(strategy):
    fleet = Fleet(clients=4, concurrency=3, strategy=strategy, eval_every=2)
    for name in "abc":
        fleet.connect(name)
    fleet.tick(61.0)  # all have missed a deadline
    for _ in range(7):
        fleet.now += 1.5
        name, number = next(iter(fleet.training().items()))
        fleet.offers(name, number, value=0.1 * number)
        fleet.says(name, Scores(len(fleet.node.exams) - 1, SUMS))
    fleet.disconnect("c")
    fleet.do(fleet.node.revoke("b", fleet.now))
    state = restored(fleet.node.state_dict())
    other = fleet.new()
    other.load_state_dict(state)
    assert same(fleet.node.state_dict(), other.state_dict())
    assert vars(other).keys() == vars(fleet.node).keys()
    written = len(fleet.log)
    fleet.connect("d")
    for _ in range(4):
        fleet.now += 1.5
        name, number = list(fleet.training().items())[-1]
        fleet.connect(name, training=number)
        fleet.offers(name, number)
    fleet.tick(1_000.0)
    for record in fleet.log[written:]:
        other.apply(record)
    assert same(fleet.node.state_dict(), other.state_dict())


def test_the_list_of_samples_must_be_that_of_the_strategy():
    fleet = Fleet()
    with pytest.raises(ValueError, match="this very list"):
        ServerNode(fleet.node.server, [1, 1, 1], fleet.node.plan)


def same(a, b):
    """Equal to the bit, wherever in a state."""
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    if hasattr(a, "tobytes"):
        return a.tobytes() == b.tobytes()
    return a == b
