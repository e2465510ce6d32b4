"""Two and more peers on the loopback interface, driven event by event."""

import threading
import time

import pytest
import torch
from nearby import wait_until

from polytempo.core.errors import PolytempoError
from polytempo.network.wire import Wire
from polytempo.nodes import Token
from polytempo.nodes.protocol import Appeared, Exchanging, Granted, Idle, Pending


def of(link, kind):
    return [what for event, what in link.events if event == kind]


def test_two_peers_pair_exchange_and_both_fuse(place, vector, end_round):
    ann, bob = place.enter("ann"), place.enter("bob")
    assert ann.wait_for(1, 30, lambda: False) and bob.wait_for(1, 30, lambda: False)
    end_round(ann, vector(1), 10)
    wait_until(lambda: "ann" in bob.node.pairing.hints)
    end_round(bob, vector(2), 30)
    for link in (ann, bob):
        wait_until(lambda link=link: link.node.phase == Idle() and link.node.inbox)
        assert link.node.counts.models == 1
    (from_bob,), (from_ann,) = ann.node.inbox, bob.node.inbox
    assert (from_bob.own_progress, from_ann.own_progress) == (0.25, 0.75)  # as told the other
    assert from_bob.token == from_ann.token == Token("ann", 1, 1)
    assert (from_bob.partner, from_ann.partner) == (("bob", 1), ("ann", 1))
    assert (from_bob.snapshot.progress, from_bob.snapshot.iteration) == (0.75, 30)
    assert torch.equal(from_bob.snapshot.params, vector(2))
    assert torch.equal(from_ann.snapshot.params, vector(1))
    # Eq. 3 by hand: ann has a quarter of the sum of progress, bob three quarters; local steps
    # that were made meanwhile (here: plus one) stay.
    end_round(ann, vector(1) + 1, 15)
    torch.testing.assert_close(ann.node.learner.params, 0.25 * (vector(1) + 1) + 0.75 * vector(2))
    assert [what["partner"] for what in of(ann, "fused")] == [["bob", 1]]
    assert [what["side"] for what in of(ann, "paired")] == ["owner"]
    assert [what["side"] for what in of(bob, "paired")] == ["claimer"]
    assert ann.node.pairing.hints == {} and of(ann, "refused") == of(bob, "refused") == []


def test_a_latecomer_sees_who_is_pending_and_who_lives(place, vector, end_round):
    ann = place.enter("ann")
    end_round(ann, vector(1))
    late = place.enter("late")
    wait_until(lambda: late.node.pairing.hints == {"ann": Token("ann", 1, 1)})
    wait_until(lambda: late.present == {"ann": 1})


def test_a_seed_may_come_later_than_those_who_call_it(place):
    early = place.enter("early", connect=1)
    place.enter("seed", connect=1)
    wait_until(lambda: early.present == {"seed": 1})


def test_gossip_brings_peers_together_that_know_a_third_only(place):
    first, second, third = (place.enter(name) for name in ("first", "second", "third"))
    for link in (first, second, third):
        wait_until(lambda link=link: len(link.present) == 2)
    assert second.present == {"first": 1, "third": 1}


def test_one_of_two_claimers_is_granted(place, vector, end_round):
    """Both claim the same ticket at once; the other one becomes pending."""
    owner, *others = (place.enter(name) for name in ("a", "b", "c"))
    end_round(owner, vector(0))
    for link in others:
        wait_until(lambda link=link: "a" in link.node.pairing.hints)
    for link in others:
        end_round(link, vector(1))
    wait_until(lambda: len(of(owner, "paired")) == 1)
    phases = lambda: sorted(type(link.node.phase).__name__ for link in others)  # noqa: E731
    wait_until(lambda: phases() == ["Idle", "Pending"])
    assert len(of(owner, "granted")) == 1
    assert [link.node.counts.models for link in (owner, *others)].count(1) == 2


def test_who_leaves_is_forgotten_and_comes_back_as_somebody_else(place, vector, end_round):
    ann, bob = place.enter("ann"), place.enter("bob")
    end_round(bob, vector(1))
    wait_until(lambda: ann.node.pairing.hints == {"bob": Token("bob", 1, 1)})
    place.leave(bob)
    wait_until(lambda: ann.present == {} and ann.node.pairing.hints == {})
    place.enter("bob", incarnation=2)
    wait_until(lambda: ann.present == {"bob": 2})
    assert [what["who"] for what in of(ann, "left")] == [["bob", 1]]


def test_a_grant_ends_with_the_life_of_its_claimer(place, vector, end_round):
    owner, claimer = place.enter("a"), place.enter("b", "never")
    end_round(owner, vector(0))
    wait_until(lambda: "a" in claimer.node.pairing.hints)
    claimer._query(Token("a", 1, 1), None, 3.0, lambda token, replies: None)
    wait_until(lambda: owner.node.phase == Granted(("b", 1), Token("a", 1, 1)))
    place.leave(claimer)
    wait_until(lambda: owner.node.phase == Idle())
    assert owner.node.inbox == []


def test_a_grant_ends_with_its_deadline(place, vector, end_round):
    owner = place.enter("a", claim_timeout=0.1, exchange_timeout=0.1)
    silent = place.enter("b", "never")
    end_round(owner, vector(0))
    wait_until(lambda: "a" in silent.node.pairing.hints)
    silent._query(Token("a", 1, 1), None, 3.0, lambda token, replies: None)
    wait_until(lambda: len(of(owner, "granted")) == 1)
    wait_until(lambda: owner.node.phase == Idle())
    assert silent.present == {"a": 1}  # and yet both live


def test_an_answer_counts_that_comes_after_its_sender_has_left(place, vector, end_round):
    """The news of an orderly leave may overtake the last model."""
    owner, claimer = place.enter("a"), place.enter("b")
    answers = hold_answers(owner)
    exchange(owner, claimer, vector, end_round)
    wait_until(lambda: answers)
    owner._declared.pop().undeclare()  # its presence
    wait_until(lambda: of(claimer, "left"))
    assert isinstance(claimer.node.phase, Exchanging)
    answers[0]()
    wait_until(lambda: len(claimer.node.inbox) == 1)


def test_an_exchange_ends_with_the_life_of_the_owner(place, vector, end_round):
    """It does not wait for the time-out."""
    owner, claimer = place.enter("a"), place.enter("b", exchange_timeout=10_000)
    answers = hold_answers(owner)
    exchange(owner, claimer, vector, end_round)
    wait_until(lambda: answers)
    place.leave(owner)
    wait_until(lambda: isinstance(claimer.node.phase, Pending))
    assert claimer.node.inbox == []


def test_a_failed_exchange_counts_and_a_spent_budget_begins_no_other(place, vector, end_round):
    owner, claimer = place.enter("a"), place.enter("b", exchange_timeout=10_000, budget=1)
    answers = hold_answers(owner)
    exchange(owner, claimer, vector, end_round)
    wait_until(lambda: answers)
    place.leave(owner)
    wait_until(lambda: not isinstance(claimer.node.phase, Exchanging))
    assert claimer.node.phase == Idle() and claimer.node.counts.models == 1


def test_what_is_far_too_large_is_not_even_put_together(place, vector, end_round):
    ann, eve = place.enter("ann"), place.enter("eve", "never")
    wait_until(lambda: eve.present and ann.present)
    flood = bytes(8 * 2**20)
    replies = eve._session.get(eve.wire.key("exchange", "ann", 1), payload=flood, timeout=3)
    said = [reply.err.payload.to_bytes() for reply in replies]  # by eve's own side
    assert said in ([], [b"Timeout"]) and of(ann, "refused") == []


def test_who_cannot_enter_leaves_nothing_behind(place, monkeypatch):
    before = {*threading.enumerate()}
    monkeypatch.setattr(Wire, "key", broken_key)
    with pytest.raises(ZeroDivisionError):
        place.enter("ann")
    wait_until(lambda: {*threading.enumerate()} <= before)


def broken_key(wire, kind, *parts):
    return 1 / 0 if kind == "ticket" else f"polytempo/test/{kind}"


def hold_answers(owner):
    """Its models are not sent back before somebody says so."""
    held, send = [], owner._send_back
    owner._send_back = lambda *what: held.append(lambda: send(*what))
    return held


def exchange(owner, claimer, vector, end_round):
    end_round(owner, vector(0))
    wait_until(lambda: "a" in claimer.node.pairing.hints)
    end_round(claimer, vector(1))


def test_a_claim_that_nobody_answers_is_a_no(place, vector, end_round):
    """The hint is of a peer that is not there: no exception, no reply, and the next thing."""
    ann = place.enter("bob")
    ann.node.handle(Appeared(Token("ann", 1, 1)))
    end_round(ann, vector(0))
    wait_until(lambda: isinstance(ann.node.phase, Pending))
    assert ann.node.pairing.hints == {} and len(of(ann, "unanswered")) == 1


def test_leaving_ends_what_is_under_way(place, vector, end_round):
    ann = place.enter("ann")
    end_round(ann, vector(0))
    assert isinstance(ann.node.phase, Pending)
    ann.leave()
    assert ann.node.phase == Idle()
    assert of(ann, "phase") == [{"phase": "Pending"}, {"phase": "Idle"}]


def test_a_second_process_of_that_name_ends_the_first(place, vector, end_round):
    ann = place.enter("ann", incarnation=1)
    place.enter("ann", incarnation=2)
    with pytest.raises(PolytempoError, match="another process now runs as 'ann'"):
        wait_until(lambda: end_round(ann, vector(0)))


def test_a_ticket_of_that_name_does_not(place, vector, end_round):
    """Any process of the run can let one stand."""
    ann, eve = place.enter("ann"), place.enter("eve")
    foreign = eve._session.liveliness().declare_token(eve.wire.key("ticket", "ann", 2, 1))
    end_round(eve, vector(1))
    wait_until(lambda: "eve" in ann.node.pairing.hints)  # which came after it
    end_round(ann, vector(0))
    foreign.undeclare()


def test_a_link_ends_its_own_threads_and_waits_for_no_other(place, monkeypatch):
    """Somebody else's begins while the link is made, and goes on when it has left."""
    before, key = {*threading.enumerate()}, Wire.key
    ended = threading.Event()
    other = threading.Thread(target=ended.wait, args=(120,))

    def meanwhile(*parts):
        if other.ident is None:
            other.start()
        return key(*parts)

    monkeypatch.setattr(Wire, "key", meanwhile)
    place.leave(place.enter("ann"))
    assert {*threading.enumerate()} - before == {other}
    ended.set()
    other.join(60)
    assert not other.is_alive()


@pytest.mark.parametrize("thread", ["polytempo node", "polytempo sender 0", "1 of Zenoh's"])
def test_a_link_does_not_wait_for_ever_for_a_thread_that_hangs(place, monkeypatch, thread):
    monkeypatch.setattr("polytempo.network.link.END_SECONDS", 0.5)
    ann, freed = place.enter("ann", exchange_timeout=0.1), threading.Event()
    hang = {
        "polytempo node": lambda: ann._post(freed.wait, 60),
        "polytempo sender 0": lambda: [ann._send(freed.wait, 60) for _ in ann._senders],
        "1 of Zenoh's": lambda: ann._callback(print),  # declared to nobody: it never ends
    }
    hang[thread]()
    began = time.monotonic()
    place.leave(ann)
    assert time.monotonic() - began < 30
    [said] = of(ann, "stuck")
    assert thread in said["threads"]
    freed.set()
    own = ("polytempo node", "polytempo sender")
    wait_until(lambda: not any(t.name.startswith(own) for t in threading.enumerate()))
