"""The machine step by step, and many peers under events in any order."""

from dataclasses import dataclass

import pytest
import torch
from explorer import ALWAYS
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from polytempo import PolytempoError
from polytempo.nodes import (
    DECISIONS,
    Announce,
    Claim,
    Claiming,
    Exchange,
    Exchanging,
    Granted,
    Identity,
    Idle,
    Peer,
    Pending,
    SetDeadline,
    Snapshot,
    Token,
    Withdraw,
)


def snapshot(iteration=1):
    return Snapshot(torch.tensor([float(iteration)]), iteration / 20, iteration)


def peer(name="a", **options):
    return Peer(name, 1, options.pop("decision", ALWAYS), peers=3, **options)


def token(name, ticket=1, incarnation=1):
    return Token(name, incarnation, ticket)


def test_a_pairing_from_end_to_end():
    owner, claimer = peer("a", claim_timeout=3, exchange_timeout=20), peer("b")
    ours, theirs = snapshot(5), snapshot(10)
    assert owner.boundary(ours) == [Announce(token("a"))]
    assert claimer.appeared(token("a")) == []
    assert claimer.boundary(theirs) == [Claim(token("a"), 3.0)]
    assert owner.claimed(claimer.identity, token("a")) == (
        True,
        [Withdraw(token("a")), SetDeadline(token("a"), 23)],
    )
    (exchange,) = claimer.claim_answered(token("a"), True)
    assert isinstance(exchange, Exchange) and exchange.snapshot is theirs
    reply, actions = owner.exchanged(claimer.identity, token("a"), exchange.snapshot)
    assert reply is ours and actions == []
    assert claimer.boundary(snapshot(15)) == []  # what was told counts, not what has become of it
    assert claimer.exchange_answered(token("a"), reply) == []
    for side, partner, received in ((owner, claimer, theirs), (claimer, owner, ours)):
        (fusion,) = side.take_fusions()
        told = theirs if side is claimer else ours
        assert fusion.own_progress == told.progress
        assert (fusion.partner, fusion.token) == (partner.identity, token("a"))
        assert fusion.snapshot is received
        assert side.take_fusions() == []
        assert side.phase == Idle()
        assert side.model_messages == 1
    assert (owner.announcements, claimer.announcements) == (2, 0)


def test_a_pending_peer_draws_no_decision_and_hands_out_its_latest_snapshot():
    owner, latest = peer(), snapshot(2)
    owner.boundary(snapshot(1))
    assert owner.boundary(latest) == []
    owner.claimed(Identity("b", 1), token("a"))
    assert owner.boundary(latest) == []
    assert owner.exchanged(Identity("b", 1), token("a"), snapshot())[0] is latest


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
    assert owner.exchanged(Identity("b", 2), token("a"), snapshot()) == (None, [])
    owner.gone(Identity("b", 0))
    assert owner.phase == Granted(Identity("b", 1), token("a"))
    owner.gone(Identity("b", 1))
    assert owner.phase == Idle()


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
    assert granted.exchanged(Identity("z", 1), token("c"), snapshot())[0] is not None
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


@dataclass
class Host:
    """A peer with its training loop: every local step and every fusion leaves a mark."""

    peer: Peer
    steps: int = 0
    weights: float = 0.0  # the local steps, plus 1000 for each fusion
    fused: int = 0

    def train(self):
        self.steps += 1
        self.weights += 1
        for _ in self.peer.take_fusions():
            self.fused += 1
            self.weights += 1000
        return self.peer.boundary(Snapshot(torch.tensor(self.weights), 0.5, self.steps))


class ManyPeers(RuleBasedStateMachine):
    """Five peers on a network that reorders, loses, repeats news of presence, and on which
    questions time out; peers crash and restart."""

    NAMES = "abcde"

    def __init__(self):
        super().__init__()
        self.incarnations = dict.fromkeys(self.NAMES, 1)
        self.hosts = {name: self.start(name, 1) for name in self.NAMES}
        self.net = []
        self.standing = set()
        self.granted = {}
        self.fused = {}

    def start(self, name, incarnation):
        return Host(Peer(name, incarnation, ALWAYS, peers=5, patience=2))

    def alive(self, who):
        host = self.hosts.get(who.peer)
        return host if host and host.peer.identity == who else None

    def tell(self, event, about, besides):
        for name, host in self.hosts.items():
            if host and name != besides:
                self.net.append((event, host.peer.identity, about))

    def carry_out(self, host, actions):
        me = host.peer.identity
        for fusion in host.peer._inbox:
            key = (fusion.token, me)
            assert self.fused.setdefault(key, fusion) is fusion
            claimer = fusion.partner if me == fusion.token.owner else me
            assert self.granted[fusion.token] == claimer
            assert fusion.token.owner in (me, fusion.partner)
            if me == claimer:
                assert (fusion.token, fusion.token.owner) in self.fused
        for action in actions:
            match action:
                case Announce(token):
                    assert token not in self.standing
                    self.standing.add(token)
                    self.tell("appeared", token, me.peer)
                case Withdraw(token):
                    self.standing.remove(token)
                    self.tell("vanished", token, me.peer)
                case Claim(token):
                    self.net.append(("claimed", token.owner, me, token))
                case Exchange(token, snapshot):
                    self.net.append(("exchanged", token.owner, me, token, snapshot))
                case SetDeadline(token):
                    self.net.append(("deadline", me, token))

    def deliver(self, message):
        event, who, *arguments = message
        if (host := self.alive(who)) is None:
            return
        result = getattr(host.peer, event)(*arguments)
        reply, actions = result if isinstance(result, tuple) else (None, result)
        if event == "claimed":
            by, token = arguments
            if reply:
                assert self.granted.setdefault(token, by) == by
            self.net.append(("claim_answered", by, token, reply))
        elif event == "exchanged":
            self.net.append(("exchange_answered", *arguments[:2], reply))
        self.carry_out(host, actions)

    def silence(self, host):
        match host.peer.phase:
            case Claiming(token):
                self.deliver(("claim_answered", host.peer.identity, token, None))
            case Exchanging(token, _):
                self.deliver(("exchange_answered", host.peer.identity, token, None))

    @rule(name=st.sampled_from(NAMES))
    def a_round_ends(self, name):
        if host := self.hosts[name]:
            self.carry_out(host, host.train())

    @precondition(lambda self: self.net)
    @rule(data=st.data())
    def a_message_arrives(self, data):
        self.deliver(self.net.pop(data.draw(st.integers(0, len(self.net) - 1))))

    @precondition(lambda self: self.net)
    @rule(data=st.data())
    def a_message_is_lost(self, data):
        place = data.draw(st.integers(0, len(self.net) - 1))
        if self.net[place][0] not in ("vanished", "gone", "deadline"):
            self.net.pop(place)

    @rule(name=st.sampled_from(NAMES))
    def a_question_times_out(self, name):
        if host := self.hosts[name]:
            self.silence(host)

    @rule(name=st.sampled_from(NAMES))
    def a_peer_hears_again_what_stands(self, name):
        if host := self.hosts[name]:
            me = host.peer.identity
            self.net += [("appeared", me, t) for t in sorted(self.standing) if t.owner != me]

    @rule(name=st.sampled_from(NAMES))
    def a_peer_crashes_or_restarts(self, name):
        if host := self.hosts[name]:
            me, self.hosts[name] = host.peer.identity, None
            for token in [t for t in self.standing if t.owner == me]:
                self.standing.remove(token)
                self.tell("vanished", token, name)
            self.tell("gone", me, name)
        else:
            self.incarnations[name] += 1
            host = self.hosts[name] = self.start(name, self.incarnations[name])
            self.net += [("appeared", host.peer.identity, t) for t in sorted(self.standing)]

    @invariant()
    def local_steps_are_never_overwritten(self):
        for host in filter(None, self.hosts.values()):
            assert host.weights == host.steps + 1000 * host.fused

    def teardown(self):
        """Left alone, with rounds that end but no faults, nobody waits and one at most pends."""
        for _ in range(4):
            while self.net or any(self.waiting()):
                for message in self.net[:]:
                    self.net.remove(message)
                    self.deliver(message)
                if not self.net:
                    for host in self.waiting():
                        self.silence(host)
            pending = [h for h in self.living() if isinstance(h.peer.phase, Pending)]
            for host in pending:
                host.peer.patience = 1
                if isinstance(host.peer.phase, Pending) and len(pending) > 1:
                    self.carry_out(host, host.train())
        self.local_steps_are_never_overwritten()
        phases = [host.peer.phase for host in self.living()]
        assert all(isinstance(phase, Idle | Pending) for phase in phases)
        tokens = {phase.token for phase in phases if isinstance(phase, Pending)}
        assert len(tokens) <= 1
        assert self.standing == tokens
        assert all(set(host.peer.hints.values()) <= tokens for host in self.living())

    def living(self):
        return [host for host in self.hosts.values() if host]

    def waiting(self):
        return [h for h in self.living() if isinstance(h.peer.phase, Claiming | Exchanging)]


TestManyPeers = ManyPeers.TestCase
TestManyPeers.settings = settings(max_examples=30, stateful_step_count=50)
