"""All histories of two and three peers, up to a bound. `make explore` goes further."""

import pytest
from explorer import ALWAYS, CONTROL, Budget, Explorer, shipping
from naive import naive

from polytempo.nodes import Pairing
from polytempo.nodes.protocol import AnswerExchange, Granted, Idle, Pending

SMALL = [
    (2, Budget(decisions=3)),
    (2, Budget(decisions=2, renewals=1, losses=1)),
    (2, Budget(decisions=2, losses=1, timeouts=1)),
    (2, Budget(decisions=2, crashes=1, restarts=1, timeouts=1)),
    (2, Budget(decisions=2, stops=1, losses=1)),
    (3, Budget(decisions=2)),
]


@pytest.mark.parametrize(("count", "budget"), SMALL)
def test_no_history_breaks_an_invariant(count, budget):
    found = Explorer(shipping, count, budget, shortcut=True).run()
    assert found.exhaustive
    assert found.quiet > 1
    assert not found.violations, found.examples


def test_the_shortcut_leads_to_the_same_ends():
    budget = Budget(decisions=2, crashes=1, losses=1)
    full, short = (Explorer(shipping, 2, budget, shortcut=on).run() for on in (False, True))
    assert short.worlds < full.worlds
    assert short.quiet == full.quiet
    assert not full.violations


def test_the_replicated_slot_of_the_paper_breaks_nearly_all():
    found = Explorer(naive, 3, CONTROL, presence=False).run()
    assert found.exhaustive
    assert set(found.violations) == {
        "two claimers for one ticket",
        "a peer waits for ever",
        "two pending when all is quiet",
        "a stale hint when all is quiet",
        "a dead peer is not forgotten",
        "a pending peer that somebody does not know",
    }


class GrantsTwice(Pairing):
    def claimed(self, by, token):
        if isinstance(self.phase, Granted):
            self.phase = Pending(self.phase.token)
        return super().claimed(by, token)


class FusesTwice(Pairing):
    def exchanged(self, by, token, snapshot):
        actions = super().exchanged(by, token, snapshot)
        return [actions[0], *actions] if len(actions) > 1 else actions


class FusesUponSilence(Pairing):
    def exchange_answered(self, token, snapshot):
        return super().exchange_answered(token, snapshot or self._snapshot)


class TakesNoForYes(Pairing):
    def claim_answered(self, token, granted):
        return super().claim_answered(token, True)


class AnswersWithoutFusing(Pairing):
    def exchanged(self, by, token, snapshot):
        if self.phase != Granted(by, token):
            return [AnswerExchange(by, token, None)]
        self.phase = Idle()
        return [AnswerExchange(by, token, self._snapshot)]


class WaitsForTheDead(Pairing):
    def gone(self, who):
        return []

    def deadline(self, token):
        return []


class NeverYields(Pairing):
    def appeared(self, token):
        before, self.phase = self.phase, Idle()
        super().appeared(token)
        self.phase = before
        return []


class NeverRenews(Pairing):
    def boundary(self, snapshot):
        return [] if isinstance(self.phase, Pending) else super().boundary(snapshot)


class TrustsTheOrder(Pairing):
    """Takes an announcement that comes after its own withdrawal at its word."""

    def vanished(self, token):
        self._drop(token)
        return []


class WithdrawsNothing(Pairing):
    def claimed(self, by, token):
        answer, *others = super().claimed(by, token)
        return [answer, *others[1:]]


@pytest.mark.parametrize(
    ("broken", "count", "budget", "kind"),
    [
        (GrantsTwice, 3, Budget(decisions=3), "two claimers for one ticket"),
        (TakesNoForYes, 3, Budget(decisions=3), "two claimers for one ticket"),
        (FusesTwice, 2, Budget(decisions=2), "a side fused twice for one ticket"),
        (FusesUponSilence, 2, Budget(decisions=2, losses=1), "a claimer fused without its owner"),
        (AnswersWithoutFusing, 2, Budget(decisions=2), "a claimer fused without its owner"),
        (WaitsForTheDead, 2, Budget(decisions=2, crashes=1), "a peer waits for ever"),
        (NeverYields, 2, Budget(decisions=2), "two pending when all is quiet"),
        (NeverRenews, 2, Budget(decisions=2, losses=1), "two pending when all is quiet"),
        (TrustsTheOrder, 2, Budget(decisions=2), "a stale hint when all is quiet"),
        (WithdrawsNothing, 2, Budget(decisions=2), "a stale hint when all is quiet"),
    ],
)
def test_the_explorer_sees_a_machine_that_breaks_a_rule(broken, count, budget, kind):
    def make(name, incarnation):
        return broken(name, incarnation, ALWAYS, peers=count, patience=1)

    found = Explorer(make, count, budget, shortcut=True).run(limit=4_000)
    assert kind in found.violations, found.violations
    assert all("boundary" in history[0] for history in found.examples.values())
