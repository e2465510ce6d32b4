"""The machine step by step, and many peers under events in any order."""

import pytest
import torch
from explorer import ALWAYS
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from polytempo import PolytempoError
from polytempo.nodes import DECISIONS, FUSIONS, Identity, Pairing, PeerNode, Snapshot, Token
from polytempo.nodes.protocol import (
    Announce,
    AnswerClaim,
    AnswerExchange,
    Appeared,
    Claim,
    ClaimAnswered,
    Claimed,
    Claiming,
    DeadlinePassed,
    Exchange,
    ExchangeAnswered,
    Exchanged,
    Exchanging,
    Fused,
    Gone,
    Granted,
    Idle,
    Paired,
    Pending,
    RoundEnded,
    SetDeadline,
    Train,
    Vanished,
    Withdraw,
)


def snapshot(iteration=1):
    return Snapshot(torch.tensor([float(iteration)]), iteration / 20, iteration)


def peer(name="a", **options):
    return Pairing(name, 1, options.pop("decision", ALWAYS), peers=3, **options)


def token(name, ticket=1, incarnation=1):
    return Token(name, incarnation, ticket)


def test_a_pairing_from_end_to_end():
    owner, claimer = peer("a", claim_timeout=3, exchange_timeout=20), peer("b")
    ours, theirs = snapshot(5), snapshot(10)
    assert owner.boundary(ours) == [Announce(token("a"))]
    assert claimer.appeared(token("a")) == []
    assert claimer.boundary(theirs) == [Claim(token("a"), 3.0)]
    assert owner.claimed(claimer.identity, token("a")) == [
        AnswerClaim(claimer.identity, token("a"), True),
        Withdraw(token("a")),
        SetDeadline(token("a"), 23),
    ]
    (exchange,) = claimer.claim_answered(token("a"), True)
    assert isinstance(exchange, Exchange) and exchange.snapshot is theirs
    taken, answer = owner.exchanged(claimer.identity, token("a"), exchange.snapshot)
    assert answer == AnswerExchange(claimer.identity, token("a"), ours)
    assert claimer.boundary(snapshot(15)) == []  # what was told counts, not what has become of it
    (also_taken,) = claimer.exchange_answered(token("a"), answer.snapshot)
    for side, partner, paired in ((owner, claimer, taken), (claimer, owner, also_taken)):
        told, received = (theirs, ours) if side is claimer else (ours, theirs)
        assert isinstance(paired, Paired)
        assert paired.fusion.own_progress == told.progress
        assert (paired.fusion.partner, paired.fusion.token) == (partner.identity, token("a"))
        assert paired.fusion.snapshot is received
        assert side.phase == Idle()


def test_a_pending_peer_draws_no_decision_and_hands_out_its_latest_snapshot():
    owner, latest = peer(), snapshot(2)
    owner.boundary(snapshot(1))
    assert owner.boundary(latest) == []
    owner.claimed(Identity("b", 1), token("a"))
    assert owner.boundary(latest) == []
    assert owner.exchanged(Identity("b", 1), token("a"), snapshot())[-1].snapshot is latest


def test_the_smallest_hint_is_claimed_first_and_then_the_next():
    claimer = peer("d")
    for name in "cab":
        claimer.appeared(token(name))
    assert claimer.boundary(snapshot()) == [Claim(token("a"), 3.0)]
    assert claimer.claim_answered(token("a"), False) == [Claim(token("b"), 3.0)]
    assert claimer.claim_answered(token("b"), None) == [Claim(token("c"), 3.0)]
    assert claimer.gone(Identity("c", 1)) == [Announce(token("d"))]


def test_the_larger_of_two_pending_peers_claims_the_smaller():
    larger, smaller = peer("b"), peer("a")
    larger.boundary(snapshot())
    smaller.boundary(snapshot())
    assert smaller.appeared(token("b")) == []
    assert larger.appeared(token("a")) == [Withdraw(token("b")), Claim(token("a"), 3.0)]


def test_a_peer_that_pends_too_long_seeks_anew():
    alone = peer("a", patience=3)
    assert alone.boundary(snapshot()) == [Announce(token("a"))]
    assert [alone.boundary(snapshot()) for _ in range(2)] == [[], []]
    assert alone.boundary(snapshot()) == [Withdraw(token("a")), Announce(token("a", 2))]
    alone.appeared(token("b"))
    actions = [alone.boundary(snapshot()) for _ in range(3)][-1]
    assert actions == [Withdraw(token("a", 2)), Claim(token("b"), 3.0)]


def test_a_restarted_claimer_is_somebody_else():
    owner = peer("a")
    owner.boundary(snapshot())
    owner.claimed(Identity("b", 1), token("a"))
    refusal = AnswerExchange(Identity("b", 2), token("a"), None)
    assert owner.exchanged(Identity("b", 2), token("a"), snapshot()) == [refusal]
    owner.gone(Identity("b", 0))
    assert owner.phase == Granted(Identity("b", 1), token("a"))
    owner.gone(Identity("b", 1))
    assert owner.phase == Idle()


def test_an_exchange_ends_with_its_answer_and_not_with_the_owners_death():
    """The news of an orderly leave may overtake the last model; silence is reported in any case."""
    for answer, then in ((snapshot(7), Idle()), (None, Pending(token("b")))):
        claimer = peer("b")
        claimer.appeared(token("a"))
        claimer.boundary(snapshot())
        claimer.claim_answered(token("a"), True)
        assert claimer.gone(Identity("a", 1)) == [] and claimer.hints == {}
        assert claimer.phase == Exchanging(token("a"), snapshot().progress)
        actions = claimer.exchange_answered(token("a"), answer)
        assert [type(action) for action in actions] == [Paired if answer else Announce]
        assert claimer.phase == then


def test_old_news_of_a_peer_is_known_to_be_old():
    watcher = peer("z")
    watcher.appeared(token("a", ticket=5, incarnation=1))
    watcher.appeared(token("a", ticket=1, incarnation=2))
    watcher.appeared(token("a", ticket=6, incarnation=1))
    watcher.vanished(token("a", ticket=5, incarnation=1))
    assert watcher.hints == {"a": token("a", ticket=1, incarnation=2)}
    watcher.vanished(token("a", ticket=2, incarnation=2))
    watcher.appeared(token("a", ticket=2, incarnation=2))
    assert watcher.hints == {}


def test_a_peer_that_stops_finishes_its_pairing_and_starts_no_other():
    pending, claiming, granted = peer("a"), peer("b"), peer("c")
    for one in (pending, granted):
        one.boundary(snapshot())
    claiming.appeared(token("a"))
    claiming.appeared(token("c"))
    claiming.boundary(snapshot())
    granted.claimed(Identity("z", 1), token("c"))
    assert pending.stop() == [Withdraw(token("a"))] and pending.phase == Idle()
    assert claiming.stop() == [] and claiming.phase == Claiming(token("a"))
    assert claiming.claim_answered(token("a"), False) == [] and claiming.phase == Idle()
    assert granted.stop() == []
    assert granted.exchanged(Identity("z", 1), token("c"), snapshot())[-1].snapshot is not None
    assert [one.boundary(snapshot()) for one in (pending, claiming, granted)] == [[], [], []]


def test_decisions_depend_on_seed_peer_and_iteration_alone():
    def decisions(name, seed):
        found = []
        for iteration in range(40):
            one = peer(name, seed=seed, decision=DECISIONS.create("uniform:rate=1.5"))
            one.boundary(snapshot(iteration))
            found.append(isinstance(one.phase, Pending))
        return found

    assert decisions("a", 1) == decisions("a", 1)
    assert len({tuple(decisions(n, s)) for n in "ab" for s in (1, 2)}) == 4


@pytest.mark.parametrize(
    "wrong", [{"claim_timeout": 0}, {"exchange_timeout": float("inf")}, {"patience": 0}]
)
def test_bad_settings_are_refused(wrong):
    with pytest.raises(PolytempoError, match=next(iter(wrong))):
        peer(**wrong)


class Marks:
    """A learner whose local steps and fusions leave marks: 1 a step, 1000 a fusion."""

    def __init__(self):
        self.params, self.iteration, self.fused = torch.zeros(()), 0, 0

    def step(self):
        self.params, self.iteration = self.params + 1, self.iteration + 1

    def fuse(self, params):
        self.params, self.fused = self.params + 1000, self.fused + 1


class ManyPeers(RuleBasedStateMachine):
    """Five peers on a network that reorders, loses, repeats news of presence, and on which
    questions time out; peers crash and restart."""

    NAMES = "abcde"

    def __init__(self):
        super().__init__()
        self.incarnations = dict.fromkeys(self.NAMES, 1)
        self.nodes = {name: self.start(name, 1) for name in self.NAMES}
        self.net = []
        self.standing = set()
        self.granted = {}
        self.paired = {}

    def start(self, name, incarnation):
        pairing = Pairing(name, incarnation, ALWAYS, peers=5, patience=2)
        fusion = FUSIONS.create("naive")
        return PeerNode(pairing, Marks(), fusion, target=10**6, local_steps=1)

    def alive(self, who):
        node = self.nodes.get(who.peer)
        return node if node and node.identity == who else None

    def tell(self, event, besides):
        for name, node in self.nodes.items():
            if node and name != besides:
                self.net.append((node.identity, event))

    def carry_out(self, node, actions):
        me = node.identity
        for action in actions:
            match action:
                case Announce(token):
                    assert token not in self.standing
                    self.standing.add(token)
                    self.tell(Appeared(token), me.peer)
                case Withdraw(token):
                    self.standing.remove(token)
                    self.tell(Vanished(token), me.peer)
                case Claim(token):
                    self.net.append((token.owner, Claimed(me, token)))
                case AnswerClaim(to, token, granted):
                    if granted:
                        assert self.granted.setdefault(token, to) == to
                    self.net.append((to, ClaimAnswered(token, granted)))
                case Exchange(token, snapshot):
                    self.net.append((token.owner, Exchanged(me, token, snapshot)))
                case AnswerExchange(to, token, snapshot):
                    self.net.append((to, ExchangeAnswered(token, snapshot)))
                case SetDeadline(token):
                    self.net.append((me, DeadlinePassed(token)))
                case Paired(fusion):
                    assert self.paired.setdefault((fusion.token, me), fusion) is fusion
                    claimer = fusion.partner if me == fusion.token.owner else me
                    assert self.granted[fusion.token] == claimer
                    assert fusion.token.owner in (me, fusion.partner)
                    if me == claimer:
                        assert (fusion.token, fusion.token.owner) in self.paired
                case Fused(fusion):
                    assert self.paired[fusion.token, me] is fusion
                case other:
                    assert other == Train(1)

    def deliver(self, who, event):
        if node := self.alive(who):
            self.carry_out(node, node.handle(event))

    def silence(self, node):
        match node.phase:
            case Claiming(token):
                self.deliver(node.identity, ClaimAnswered(token, None))
            case Exchanging(token, _):
                self.deliver(node.identity, ExchangeAnswered(token, None))

    def train(self, node):
        node.learner.step()
        self.carry_out(node, node.handle(RoundEnded()))

    @rule(name=st.sampled_from(NAMES))
    def a_round_ends(self, name):
        if node := self.nodes[name]:
            self.train(node)

    @precondition(lambda self: self.net)
    @rule(data=st.data())
    def a_message_arrives(self, data):
        self.deliver(*self.net.pop(data.draw(st.integers(0, len(self.net) - 1))))

    @precondition(lambda self: self.net)
    @rule(data=st.data())
    def a_message_is_lost(self, data):
        place = data.draw(st.integers(0, len(self.net) - 1))
        if not isinstance(self.net[place][1], Vanished | Gone | DeadlinePassed):
            self.net.pop(place)

    @rule(name=st.sampled_from(NAMES))
    def a_question_times_out(self, name):
        if node := self.nodes[name]:
            self.silence(node)

    @rule(name=st.sampled_from(NAMES))
    def a_peer_hears_again_what_stands(self, name):
        if node := self.nodes[name]:
            me = node.identity
            self.net += [(me, Appeared(t)) for t in sorted(self.standing) if t.owner != me]

    @rule(name=st.sampled_from(NAMES))
    def a_peer_crashes_or_restarts(self, name):
        if node := self.nodes[name]:
            me, self.nodes[name] = node.identity, None
            for token in [t for t in self.standing if t.owner == me]:
                self.standing.remove(token)
                self.tell(Vanished(token), name)
            self.tell(Gone(me), name)
        else:
            self.incarnations[name] += 1
            node = self.nodes[name] = self.start(name, self.incarnations[name])
            self.net += [(node.identity, Appeared(t)) for t in sorted(self.standing)]

    @invariant()
    def local_steps_are_never_overwritten(self):
        for node in self.living():
            marks = node.learner
            assert marks.params == marks.iteration + 1000 * marks.fused
            assert marks.fused == node.counts.fusions

    def teardown(self):
        """Left alone, with rounds that end but no faults, nobody waits and one at most pends."""
        for _ in range(4):
            while self.net or any(self.waiting()):
                for message in self.net[:]:
                    self.net.remove(message)
                    self.deliver(*message)
                if not self.net:
                    for node in self.waiting():
                        self.silence(node)
            pending = [node for node in self.living() if isinstance(node.phase, Pending)]
            for node in pending:
                node.pairing.patience = 1
                if isinstance(node.phase, Pending) and len(pending) > 1:
                    self.train(node)
        self.local_steps_are_never_overwritten()
        phases = [node.phase for node in self.living()]
        assert all(isinstance(phase, Idle | Pending) for phase in phases)
        tokens = {phase.token for phase in phases if isinstance(phase, Pending)}
        assert len(tokens) <= 1
        assert self.standing == tokens
        assert all(set(node.pairing.hints.values()) <= tokens for node in self.living())

    def living(self):
        return [node for node in self.nodes.values() if node]

    def waiting(self):
        return [node for node in self.living() if isinstance(node.phase, Claiming | Exchanging)]


TestManyPeers = ManyPeers.TestCase
TestManyPeers.settings = settings(max_examples=30, stateful_step_count=50)
