"""A whole peer: what it fuses and when, when it stops, what it counts, what it saves."""

import pytest
import torch
from explorer import ALWAYS

from polytempo import PolytempoError
from polytempo.nodes import DECISIONS, Identity, Pairing, Snapshot, Token
from polytempo.nodes.protocol import (
    Announce,
    AnswerExchange,
    Appeared,
    Claim,
    ClaimAnswered,
    Claimed,
    Discarded,
    Exchange,
    ExchangeAnswered,
    Exchanged,
    Idle,
    Paired,
    Pending,
    RoundEnded,
    Started,
    Stop,
    Train,
    Vanished,
)
from polytempo.storage import load_state, save_state
from still import still_node

BOB = Identity("bob", 1)
TOKEN = Token("ann", 1, 1)


def node(name="ann", decision=ALWAYS, incarnation=1, **options):
    """At most 40 steps, in rounds of 5."""
    pairing = Pairing(name, incarnation, decision, peers=2)
    return still_node(pairing, torch.zeros(2), **options)


def end_round(one, steps=5):
    one.learner.params = one.learner.params + steps
    one.learner.iteration += steps
    return one.handle(RoundEnded())


def kinds(actions):
    return [type(action) for action in actions]


def theirs(progress=0.5):
    return Snapshot(torch.full((2,), 100.0), progress, 20)


def take_in(owner, snapshot=None):
    """Let bob claim and exchange; the owner must be pending."""
    owner.handle(Claimed(BOB, owner.phase.token))
    return owner.handle(Exchanged(BOB, owner.phase.token, snapshot or theirs()))


def test_training_goes_on_until_the_target_and_the_last_round_may_be_shorter():
    one = node(decision=DECISIONS.create("never"), target=12)
    assert one.handle(Started()) == [Train(5)]
    assert [end_round(one, steps) for steps in (5, 5, 2)] == [[Train(5)], [Train(2)], []]
    assert one.complete and one.stopped


def test_what_comes_in_is_fused_at_the_rounds_end_into_the_weights_of_that_moment():
    one = node()
    assert end_round(one) == [Announce(TOKEN), Train(5)]
    assert kinds(take_in(one, theirs(progress=0.375))) == [Paired, AnswerExchange]
    assert torch.equal(one.learner.params, torch.full((2,), 5.0))
    fused, *rest = end_round(one)
    assert kinds(rest) == [Announce, Train]
    assert fused.weight == 0.75  # Eq. 3: ours was 5 / 40 when we told it
    assert torch.equal(fused.before, torch.full((2,), 10.0))
    assert torch.equal(one.learner.params, torch.full((2,), 0.25 * 10 + 0.75 * 100))
    assert end_round(one)[0] != fused and one.counts.fusions == 1


def test_a_peer_that_has_done_its_last_step_fuses_no_more():
    """Neither what came in during its last round nor what comes later: nobody would train on it."""
    waiting, granted, claiming, exchanging = (node(target=10) for _ in range(4))
    for one in (waiting, granted):
        end_round(one)
    for one in (claiming, exchanging):
        one.handle(Appeared(Token("aaa", 1, 1)))
        assert kinds(end_round(one)) == [Claim, Train]
    take_in(waiting)
    granted.handle(Claimed(BOB, TOKEN))
    (sent,) = exchanging.handle(ClaimAnswered(Token("aaa", 1, 1), True))
    assert isinstance(sent, Exchange)

    trained = torch.full((2,), 10.0)
    assert kinds(end_round(waiting)) == [Discarded]
    assert end_round(granted) == end_round(claiming) == end_round(exchanging) == []
    # The partners get what they were promised, with the last model:
    *_, answer, discarded = granted.handle(Exchanged(BOB, TOKEN, theirs()))
    assert torch.equal(answer.snapshot.params, trained) and answer.snapshot.progress == 1
    assert isinstance(discarded, Discarded)
    (offer,) = claiming.handle(ClaimAnswered(Token("aaa", 1, 1), True))
    assert isinstance(offer, Exchange)
    for one in (claiming, exchanging):
        answered = one.handle(ExchangeAnswered(Token("aaa", 1, 1), theirs()))
        assert kinds(answered) == [Paired, Discarded]
    for one in (waiting, granted, claiming, exchanging):
        assert one.phase == Idle() and one.counts.fusions == 0 and one.inbox == []
        assert torch.equal(one.learner.params, trained)


@pytest.mark.parametrize("budget", [1, 2])
def test_a_spent_budget_ends_it_after_the_round_under_way(budget):
    one = node(budget=budget)
    for _ in range(budget):
        assert kinds(end_round(one))[-1] is Train
        last = take_in(one)
    assert kinds(last) == [Paired, AnswerExchange, Discarded]
    assert one.counts.models == budget and one.counts.fusions == budget - 1
    assert one.complete and one.stopped and end_round(one) == []


def test_a_model_sent_in_vain_counts_and_a_spent_budget_begins_no_other():
    one = node(budget=1)
    one.handle(Appeared(Token("aaa", 1, 1)))
    end_round(one)
    assert kinds(one.handle(ClaimAnswered(Token("aaa", 1, 1), True))) == [Exchange]
    assert one.handle(ExchangeAnswered(Token("aaa", 1, 1), None)) == [] and one.phase == Idle()


def test_who_was_told_to_stop_before_its_round_ended_fuses_nothing():
    one = node()
    end_round(one)
    take_in(one)
    assert kinds(one.handle(Stop())) == [Discarded]
    assert end_round(one) == [] and not one.complete
    assert one.handle(Started()) == []


def test_sent_models_and_announcements_are_counted():
    one = node()
    end_round(one)
    take_in(one)
    assert (one.counts.models, one.counts.announcements) == (1, 2)
    refused = one.handle(Exchanged(BOB, TOKEN, theirs()))
    assert refused == [AnswerExchange(BOB, TOKEN, None)] and one.counts.models == 1


def test_a_saved_node_goes_on_as_if_nothing_had_happened(tmp_path):
    """In every phase, with an inbox, with hints and with news that are known to be old."""

    def pending(one):
        end_round(one)

    def granted(one):
        end_round(one)
        one.handle(Claimed(BOB, TOKEN))

    def with_an_inbox(one):
        end_round(one)
        take_in(one)

    def claiming(one):
        one.handle(Vanished(Token("zoe", 1, 3)))
        one.handle(Appeared(Token("aaa", 1, 1)))
        end_round(one)

    def exchanging(one):
        claiming(one)
        one.handle(ClaimAnswered(Token("aaa", 1, 1), True))

    def follow(one):
        found = [*one.handle(Appeared(Token("zoe", 1, 2))), *one.handle(Claimed(BOB, TOKEN))]
        found += one.handle(Exchanged(BOB, TOKEN, snapshot))
        found += one.handle(ClaimAnswered(Token("aaa", 1, 1), True))
        found += one.handle(ExchangeAnswered(Token("aaa", 1, 1), snapshot))
        return [*found, *end_round(one), *end_round(one)]

    snapshot = theirs()
    for prepare in (pending, granted, with_an_inbox, claiming, exchanging):
        first, second = node(), node()
        prepare(first)
        save_state(tmp_path / "state", first.state_dict())
        second.load_state_dict(load_state(tmp_path / "state"))
        assert second.phase == first.phase and second.pairing.hints == first.pairing.hints
        assert second.counts == first.counts and len(second.inbox) == len(first.inbox)
        assert kinds(follow(first)) == kinds(follow(second))
        assert torch.equal(first.learner.params, second.learner.params)
        assert second.state_dict().keys() == first.state_dict().keys()
        assert second.counts == first.counts and second.pairing.hints == first.pairing.hints


def test_a_later_incarnation_resumes_what_was_learnt_and_nothing_that_was_said():
    first = node()
    end_round(first)
    take_in(first)
    end_round(first)
    second = node(incarnation=2)
    second.load_lasting_state(first.lasting_state())
    assert second.counts == first.counts and second.learner.iteration == 10
    assert isinstance(first.phase, Pending) and second.phase == Idle() and second.inbox == []
    with pytest.raises(PolytempoError, match="a later incarnation starts afresh"):
        second.load_state_dict(first.state_dict())
