"""A client of a fleet, by hand: a history for each promise. `test_bad_network.py` has others."""

import pytest
import torch

from polytempo.core.errors import PolytempoError
from polytempo.core.messages import Dispatch
from polytempo.core.task import Task
from polytempo.nodes.client import ClientNode
from polytempo.nodes.star import (
    PROTOCOL,
    Abandon,
    Acknowledge,
    Assess,
    Begin,
    Decline,
    End,
    Examine,
    Finished,
    Hello,
    Hurry,
    Save,
    Say,
    Scores,
    Shorten,
    Swap,
    Swapped,
    Welcome,
    Work,
)
from polytempo.storage import restored

WELCOME = Welcome(3, {"id": "x", "seed": 7})
VECTOR = torch.tensor([1.0, 2.0])


def client():
    return ClientNode("layout", "digits", 7, 5)


def connected(node=None):
    node = client() if node is None else node
    node.connected()
    node.received(WELCOME)
    return node


def work(number, preempt=False):
    return Work(Dispatch(3, number, torch.ones(2), Task(), preempt))


def trained(node, number, remembered=1.0, vector=VECTOR):
    memory = {"head": torch.tensor([remembered])}
    return node.trained(number, vector, {}, memory, 2.5)


def training(number=4):
    node = connected()
    node.received(work(number))
    return node


def offering(number=4):
    node = training(number)
    trained(node, number)
    return node


def again(node):
    """The process is killed; another one continues from what was saved."""
    other = client()
    other.load_state_dict(restored(node.state_dict()))
    return other


# -- the connection --------------------------------------------------------------------------------


def test_hello_says_what_it_holds():
    assert client().connected() == [Say(Hello(PROTOCOL, "layout", "digits", 7, 5, None, None))]
    assert training().connected() == [Say(Hello(PROTOCOL, "layout", "digits", 7, 5, 4, None))]
    assert offering().connected() == [Say(Hello(PROTOCOL, "layout", "digits", 7, 5, None, 4))]


def test_what_is_offered_follows_every_welcome():
    node = offering()
    node.connected()
    [said] = node.received(WELCOME)
    assert said.message is node.pending
    node.connected()
    assert node.received(WELCOME) == [said]


def test_an_update_that_is_ready_before_the_welcome_waits_for_it():
    node = training()
    node.connected()
    assert trained(node, 4) == [Save()]
    assert node.received(WELCOME) == [Say(node.pending)]


def test_the_welcome_gives_the_client_its_number_and_the_run():
    node = connected()
    assert (node.client, node.run["seed"]) == (3, 7)


def test_a_client_belongs_to_one_run_even_after_a_restart():
    node = again(offering())
    node.connected()
    with pytest.raises(PolytempoError, match="belongs to run x, and the server conducts run y"):
        node.received(Welcome(3, {"id": "y"}))
    assert node.pending is not None


# -- training and offering -------------------------------------------------------------------------


def test_an_update_is_saved_before_it_is_offered():
    node = training()
    assert trained(node, 4) == [Save(), Say(node.pending)]
    assert (node.pending.number, node.pending.samples, node.pending.seconds) == (4, 7, 2.5)
    assert node.training is None


def test_a_client_remembers_once_its_update_is_acknowledged():
    node = offering()
    assert node.memory == {}
    assert node.received(Acknowledge(4)) == [Save()]
    assert node.memory["head"].item() == 1.0
    assert (node.pending, node.kept, node.acknowledged) == (None, {}, 1)
    assert node.received(Acknowledge(4)) == []  # said again


def test_what_is_declined_leaves_no_trace():
    node = offering()
    node.received(Acknowledge(4))
    node.received(work(5))
    trained(node, 5, remembered=2.0)
    assert node.received(Decline(5, "it came too late")) == [Save()]
    assert node.memory["head"].item() == 1.0
    assert node.pending is None


def test_a_training_that_is_declined_is_abandoned_and_nothing_comes_of_it():
    node = training()
    assert node.received(Decline(4, "it took too long")) == [Abandon()]
    assert trained(node, 4) == []
    assert node.pending is None


@pytest.mark.parametrize("number", [3, 5])
def test_what_is_said_of_other_numbers_changes_nothing(number):
    for node in (connected(), training(), offering()):
        before = (node.training, node.pending)
        assert node.received(Acknowledge(number)) == []
        assert node.received(Decline(number, "")) == []
        assert (node.training, node.pending) == before


def test_work_that_is_declined_before_it_arrives_is_not_begun():
    node = connected()
    node.received(Decline(4, "it took too long"))
    assert node.received(work(4)) == []
    assert len(node.received(work(5))) == 1
    node = connected()
    node.received(Decline(4, "the run is over"))
    connected(node)  # to a server whose run was extended
    assert len(node.received(work(4))) == 1


def test_newer_work_takes_the_place_of_a_training():
    node = training()
    [begin] = node.received(work(6))
    assert (type(begin), begin.dispatch.number) == (Begin, 6)
    assert trained(node, 4) == []
    assert trained(node, 6) == [Save(), Say(node.pending)]


def test_newer_work_takes_the_place_of_an_update_that_nobody_wants():
    node = offering()
    save, begin = node.received(work(6))
    assert (save, type(begin)) == (Save(), Begin)
    assert (node.pending, node.kept, node.memory) == (None, {}, {})


# -- multicasts and requests to hurry --------------------------------------------------------------


def test_a_multicast_is_swapped_in_and_the_update_answers_it():
    node = training()
    [swap] = node.received(work(6, preempt=True))
    assert (type(swap), swap.dispatch.number) == (Swap, 6)
    assert node.training == 4  # until it is there
    assert node.swapped(6, 4, step=17) == [Say(Swapped(6, 4, 17))]
    assert node.training == 6
    assert trained(node, 4) == []
    trained(node, 6)
    assert node.pending.number == 6


def test_a_multicast_that_came_too_late_for_the_training_is_missed():
    node = training()
    node.received(work(6, preempt=True))
    assert node.swapped(6, 4, step=None) == [Say(Swapped(6, 4, None))]
    trained(node, 4)
    assert node.pending.number == 4


def test_a_multicast_to_one_that_offers_is_missed():
    node = offering()
    assert node.received(work(6, preempt=True)) == [Say(Swapped(6, 4, None))]
    assert node.pending.number == 4


def test_a_multicast_to_one_with_nothing_to_do_is_missed_and_may_come_again_as_work():
    node = connected()
    assert node.received(work(6, preempt=True)) == [Say(Swapped(6, 6, None))]
    assert node.training is None
    [begin] = node.received(work(6))
    assert (type(begin), begin.dispatch.number) == (Begin, 6)
    assert node.received(work(6)) == []  # again


def test_a_multicast_that_is_sent_again_is_swapped_in_once():
    node = training()
    assert len(node.received(work(6, preempt=True))) == 1
    node.connected()
    node.received(WELCOME)
    assert node.received(work(6, preempt=True)) == []  # not yet swapped in
    node.swapped(6, 4, step=17)
    assert node.received(work(6, preempt=True)) == []
    assert len(node.received(work(7, preempt=True))) == 1


def test_a_request_to_hurry_shortens_the_training_it_is_about():
    node = training()
    assert node.received(Hurry(4)) == [Shorten()]
    assert node.received(Hurry(5)) == [Shorten()]  # a multicast that is not here yet
    assert node.received(Hurry(3)) == []
    assert connected().received(Hurry(4)) == []
    assert offering().received(Hurry(4)) == []


def test_a_request_to_hurry_may_overtake_the_work():
    node = connected()
    node.received(Hurry(4))
    assert [type(action) for action in node.received(work(4))] == [Begin, Shorten]
    assert [type(action) for action in node.received(work(5))] == [Begin]


# -- exams and the end -----------------------------------------------------------------------------


def test_an_exam_disturbs_nothing():
    for node in (connected(), training(), offering()):
        before = (node.training, node.pending)
        examine = Examine(2, torch.ones(2))
        assert node.received(examine) == [Assess(examine)]
        assert node.tested(2, {"correct": 3.0}, None) == [Say(Scores(2, {"correct": 3.0}, None))]
        assert (node.training, node.pending) == before


def test_the_end_of_the_run_ends_the_training_and_keeps_the_update():
    assert connected().received(Finished("over")) == [End("over")]
    node = training()
    assert node.received(Finished("over")) == [Abandon(), End("over")]
    assert trained(node, 4) == []
    node = offering()
    assert node.received(Finished("over")) == [End("over")]
    assert again(node).pending.number == 4


# -- what lasts ------------------------------------------------------------------------------------


def test_a_client_that_is_killed_while_it_offers_offers_the_same_again():
    node = again(offering())
    assert node.connected()[0].message.offering == 4
    [said] = node.received(WELCOME)
    assert torch.equal(said.message.vector, VECTOR)
    assert said.message.seconds == 2.5
    node.received(Acknowledge(4))
    assert node.memory["head"].item() == 1.0


def test_a_client_that_is_killed_in_training_has_lost_it():
    node = offering()
    node.received(Acknowledge(4))
    node.received(work(5))
    node = again(node)
    assert node.connected()[0].message == Hello(PROTOCOL, "layout", "digits", 7, 5, None, None)
    assert node.memory["head"].item() == 1.0
    assert node.client == 3
