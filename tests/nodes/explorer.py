"""Every history of a few peers, up to a bound: the shipping state machine under all interleavings.

A world is some `Pairing` machines and the messages between them. From each world follow all events
that could happen next: any message may be delivered, in any order; a local round may end; and, as
often as the `Budget` allows, a peer may crash, restart or leave, a message may be lost, a question
may time out although its answer is on its way. All worlds are visited, breadth first, each once.

Peers are deterministic, so what an event does to a peer in a given state is computed once, on a
copy of a real `Pairing`, and then looked up. Nothing of the machine is modelled here. What is
modelled is its driver: presence reaches all who live, a token vanishes with its owner, a question
to a dead peer remains without an answer. Timers may run out at any moment, as if clocks ran at
wildly different speeds; only withdrawals and deaths are never lost, for presence is a standing
state that is observed, and observed late at worst.

Safety is checked at each event. A world is *quiet* when nothing is under way: no message, no timer,
no question without an answer. What must hold in the end is checked in all quiet worlds. Since the
steps that lead there form no cycle (checked too), each history that is left alone ends in one.
"""

from __future__ import annotations

import copy
from array import array
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import torch
from rich.console import Console

from polytempo.nodes import DECISIONS, Identity, Pairing, Snapshot
from polytempo.nodes.protocol import (
    Announce,
    AnswerClaim,
    AnswerExchange,
    Appeared,
    Boundary,
    Claim,
    ClaimAnswered,
    Claimed,
    Claiming,
    DeadlinePassed,
    Exchange,
    ExchangeAnswered,
    Exchanged,
    Exchanging,
    Gone,
    Granted,
    Idle,
    Paired,
    Pending,
    SetDeadline,
    Stop,
    Vanished,
    Withdraw,
)

NAMES = "abc"
IGNORED = {"decision", "rounds"}  # change nothing that follows
FINAL = (Appeared, Vanished, ClaimAnswered, ExchangeAnswered)
NEVER_LOST = (Vanished, Gone, DeadlinePassed)
SNAPSHOTS = {name: Snapshot(torch.zeros(1), 0.5, 1) for name in NAMES}
ALWAYS = DECISIONS.create("always")  # a round that ends without a decision changes nothing
Event = tuple[Any, ...]  # (whom it happens to, what)
Fact = tuple[Any, ...]  # ("granted", token, claimer) or ("fused", token, who, partner)


class Budget(NamedTuple):
    """How often each thing may still happen in one history."""

    decisions: int = 0  # local rounds that end with the decision to communicate
    renewals: int = 0  # local rounds that end while the peer has been pending for too long
    crashes: int = 0
    restarts: int = 0
    losses: int = 0  # announcements, questions or answers that never arrive
    timeouts: int = 0  # of questions that could still be answered
    stops: int = 0

    def spend(self, what: str) -> Budget:
        return self._replace(**{what: getattr(self, what) - 1})


class World(NamedTuple):
    """Sets are bit masks over what an `Index` has numbered: they are compared and hashed often."""

    peers: tuple[int, ...]  # states of peers; -1: dead
    present: tuple[int, ...]  # incarnations; negative: dead
    net: int  # set of events that are under way
    standing: int  # set of tokens
    facts: int  # set of facts
    left: Budget
    faulty: bool  # something was lost, or timed out although it could be answered


class Effect(NamedTuple):
    """What an event does to a peer and to the world around it."""

    state: int
    sent: int  # events, a set
    cancelled: int  # events, a set
    announced: int  # tokens, a set
    withdrawn: int  # tokens, a set
    facts: tuple[Fact, ...]


class Index:
    """Numbers for things, in the order in which they are met."""

    def __init__(self) -> None:
        self.things: list[Any] = []
        self._numbers: dict[Any, int] = {}

    def number(self, key: Any, thing: Any = None) -> int:
        if key not in self._numbers:
            self._numbers[key] = len(self.things)
            self.things.append(key if thing is None else thing)
        return self._numbers[key]

    def bit(self, key: Any) -> int:
        return 1 << self.number(key)

    def members(self, mask: int) -> Iterator[Any]:
        return (self.things[number] for number in numbers_in(mask))


def shipping(name: str, incarnation: int) -> Pairing:
    """The machine that ships. It renews its token at the first round that ends while it pends."""
    return Pairing(name, incarnation, ALWAYS, peers=len(NAMES), patience=1)


class Explorer:
    """Explores from `count` idle peers; `make(name, incarnation)` makes a peer. Without `presence`
    nobody hears of deaths, as in the scheme of the paper. With `shortcut` a message that can
    have no effect any more is delivered at once: fewer worlds, the same behaviour."""

    def __init__(
        self,
        make: Callable[[str, int], Any],
        count: int,
        budget: Budget,
        presence: bool = True,
        shortcut: bool = False,
    ) -> None:
        self.make = make
        self.shortcut = shortcut
        self.presence = presence
        self.states_of_peers, self.events, self.tokens, self.known_facts = (
            Index(),
            Index(),
            Index(),
            Index(),
        )
        self._effects: dict[Any, Effect] = {}
        self._questions: dict[int, tuple[int, int] | None] = {}
        self.violations: Counter[str] = Counter()
        self.examples: dict[str, list[str]] = {}  # of each kind, one shortest history
        self.worlds = self.transitions = self.quiet = 0
        self.exhaustive = True
        self._found: list[str] = []  # violations of the event at hand
        start = tuple(self.number(make(name, 1)) for name in NAMES[:count])
        self.first = World(start, (1,) * count, 0, 0, 0, budget, False)

    # -- one peer -------------------------------------------------------------------------------

    def number(self, peer: Any) -> int:
        """The number of this state. Whatever a peer holds counts, unless it is in `IGNORED`."""
        key = tuple(
            tuple(sorted(value.items())) if isinstance(value, dict) else value
            for name, value in vars(peer).items()
            if name not in IGNORED
        )
        return self.states_of_peers.number(key, peer)

    def peer(self, world: World, place: int) -> Any:
        return self.states_of_peers.things[world.peers[place]]

    def effect(self, state: int, event: int, present: tuple[int, ...]) -> Effect:
        """Let the event happen to a copy of the peer in that state, or recall what it did."""
        key = (state, event, present)
        if key in self._effects:
            return self._effects[key]
        me, happens = self.events.things[event]
        peer = copy.copy(self.states_of_peers.things[state])
        for field, value in vars(peer).items():
            if isinstance(value, dict):
                setattr(peer, field, value.copy())
        before = peer.phase
        sent: list[Event] = []  # in order, for worlds are counted the same each time
        announced = withdrawn = cancelled = 0
        facts: list[Fact] = []
        for action in peer.handle(happens):
            match action:
                case Announce(token):
                    announced |= self.tokens.bit(token)
                    sent += self.tell(present, Appeared(token), me)
                case Withdraw(token):
                    withdrawn |= self.tokens.bit(token)
                    sent += self.tell(present, Vanished(token), me)
                case Claim(token):
                    sent.append((token.owner, Claimed(me, token)))
                case AnswerClaim(to, token, granted):
                    sent.append((to, ClaimAnswered(token, granted)))
                    facts += [("granted", token, to)] if granted else []
                case Exchange(token, snapshot):
                    facts.append(("granted", token, me))
                    sent.append((token.owner, Exchanged(me, token, snapshot)))
                case AnswerExchange(to, token, answer):
                    sent.append((to, ExchangeAnswered(token, answer)))
                case Paired(fusion):
                    facts.append(("fused", fusion.token, me, fusion.partner))
                case SetDeadline(token):
                    sent.append((me, DeadlinePassed(token)))
        if isinstance(before, Granted) and peer.phase != before:
            cancelled = self.events.bit((me, DeadlinePassed(before.token)))
        mask = self.mask(e for e in sent if place_of(e[0], present) is not None)
        self._effects[key] = effect = Effect(
            self.number(peer), mask, cancelled, announced, withdrawn, tuple(facts)
        )
        return effect

    def tell(self, present: tuple[int, ...], what: Any, besides: Identity) -> list[Event]:
        everybody = (Identity(NAMES[i], number) for i, number in enumerate(present) if number > 0)
        return [(who, what) for who in everybody if who != besides]

    def mask(self, events: Iterable[Event]) -> int:
        found = 0
        for event in events:
            found |= self.events.bit(event)
        return found

    # -- one event ------------------------------------------------------------------------------

    def act(self, world: World, place: int, event: int) -> World:
        """An event happens to a peer that lives, and its actions take effect."""
        effect = self.effect(world.peers[place], event, world.present)
        facts = world.facts
        for fact in effect.facts:
            self.check(fact, list(self.known_facts.members(facts)))
            facts |= self.known_facts.bit(fact)
        return World(
            changed(world.peers, place, effect.state),
            world.present,
            (world.net | effect.sent) & ~effect.cancelled,
            (world.standing | effect.announced) & ~effect.withdrawn,
            facts,
            world.left,
            world.faulty,
        )

    def check(self, fact: Fact, facts: list[Fact]) -> None:
        """What each event must keep to, given what was before."""
        kind, token, who, *partner = fact
        if kind == "granted":
            if any(other[:2] == (kind, token) and other[2] != who for other in facts):
                self._found.append("two claimers for one ticket")
            return
        if any(other[:3] == fact[:3] for other in facts):
            self._found.append("a side fused twice for one ticket")
        claimer = partner[0] if who == token.owner else who
        if token.owner not in (who, *partner) or ("granted", token, claimer) not in facts:
            self._found.append("a fusion outside of the pair")
        if who == claimer and ("fused", token, token.owner, who) not in facts:
            self._found.append("a claimer fused without its owner")

    def die(self, world: World, place: int) -> World:
        me = Identity(NAMES[place], world.present[place])
        present = changed(world.present, place, -world.present[place])
        standing, news = world.standing, []
        if self.presence:
            news = self.tell(present, Gone(me), me)
            for token in self.tokens.members(world.standing):
                if token.owner == me:
                    standing &= ~self.tokens.bit(token)
                    news += self.tell(present, Vanished(token), me)
        net = self.mask(e for e in self.events.members(world.net) if e[0] != me) | self.mask(news)
        peers = changed(world.peers, place, -1)
        return world._replace(peers=peers, present=present, net=net, standing=standing)

    def restart(self, world: World, place: int) -> World:
        me = Identity(NAMES[place], 1 - world.present[place])
        net = world.net
        for token in self.tokens.members(world.standing):  # a latecomer sees those that stand
            net |= self.events.bit((me, Appeared(token)))
        return world._replace(
            peers=changed(world.peers, place, self.number(self.make(*me))),
            present=changed(world.present, place, me.incarnation),
            net=net,
        )

    # -- what can happen next -------------------------------------------------------------------

    def living(self, world: World) -> list[Identity]:
        return [Identity(NAMES[i], number) for i, number in enumerate(world.present) if number > 0]

    def progress(self, world: World) -> Iterator[tuple[Event, World]]:
        """What happens if the world is left alone."""
        for number in numbers_in(world.net):
            event = self.events.things[number]
            rest = world._replace(net=world.net & ~(1 << number))
            yield event, self.act(rest, NAMES.index(event[0].peer), number)
        for place, silence, answerable in self.questions(world):
            if not answerable:
                yield self.events.things[silence], self.act(world, place, silence)

    def questions(self, world: World) -> Iterator[tuple[int, int, bool]]:
        """For each peer that has asked: its place, what happens if no answer comes, and whether
        one still can, because the question or the answer is under way."""
        for place, state in enumerate(world.peers):
            if state < 0:
                continue
            if state not in self._questions:
                self._questions[state] = self.question(self.states_of_peers.things[state])
            if (question := self._questions[state]) is not None:
                yield place, question[0], bool(question[1] & world.net)

    def question(self, peer: Any) -> tuple[int, int] | None:
        me = peer.identity
        answer: Any
        match peer.phase:
            case Claiming(token):
                answer, replies = ClaimAnswered, (True, False)
                question: Any = Claimed(me, token)
            case Exchanging(token, _):
                answer, replies = ExchangeAnswered, (SNAPSHOTS[token.peer], None)
                question = Exchanged(me, token, SNAPSHOTS[me.peer])
            case _:
                return None
        answers = [(me, answer(token, reply)) for reply in replies]
        under_way = sum(self.events.bit(event) for event in ((token.owner, question), *answers))
        return self.events.number((me, answer(token, None))), under_way

    def interference(self, world: World) -> Iterator[tuple[Event, World]]:
        """Decisions and faults, as far as the budget goes."""
        left = world.left
        for me in self.living(world):
            place = NAMES.index(me.peer)
            peer = self.peer(world, place)
            for phase, what in ((Idle, "decisions"), (Pending, "renewals")):
                if isinstance(peer.phase, phase) and getattr(left, what):
                    then = world._replace(left=left.spend(what))
                    yield ("boundary", me), self.round_ends(then, place)
            if left.stops and not peer.stopped:
                then = world._replace(left=left.spend("stops"))
                yield ("stop", me), self.act(then, place, self.events.number((me, Stop())))
            if peer.stopped and isinstance(peer.phase, Idle):
                yield ("leaves", me), self.die(world, place)
            elif left.crashes:
                then = world._replace(left=left.spend("crashes"))
                yield ("crashes", me), self.die(then, place)
        if left.restarts:
            for place, number in enumerate(world.present):
                if number < 0:
                    then = world._replace(left=left.spend("restarts"))
                    yield ("restarts", NAMES[place]), self.restart(then, place)
        if left.losses:
            spent = world._replace(left=left.spend("losses"), faulty=True)
            for event in self.events.members(world.net):
                if not isinstance(event[1], NEVER_LOST):
                    net = world.net & ~self.events.bit(event)
                    yield ("lost", *event), spent._replace(net=net)
        if left.timeouts:
            spent = world._replace(left=left.spend("timeouts"), faulty=True)
            for place, silence, answerable in self.questions(world):
                if answerable:
                    event = ("early", *self.events.things[silence])
                    yield event, self.act(spent, place, silence)

    def round_ends(self, world: World, place: int) -> World:
        me = Identity(NAMES[place], world.present[place])
        event = self.events.number((me, Boundary(SNAPSHOTS[me.peer])))
        return self.act(world, place, event)

    def dead_letter(self, world: World) -> tuple[Event, World] | None:
        """A message that changes nothing at its recipient, and never will: news of a token that is
        older than what is known, or an answer that is waited for no more."""
        for number in numbers_in(world.net):
            event = self.events.things[number]
            place = NAMES.index(event[0].peer)
            if isinstance(event[1], FINAL):
                rest = world._replace(net=world.net & ~(1 << number))
                if self.act(rest, place, number) == rest:
                    return event, rest
        return None

    # -- what must hold when all is quiet -------------------------------------------------------

    def judge(self, world: World) -> list[str]:
        """What is wrong with a quiet world. After a fault two peers may both be pending, or not
        know of each other; then it must be put right by their next local rounds."""
        wrong = self.flaws(world)
        if not wrong or not world.faulty:
            return wrong
        for me in self.living(world):
            if isinstance(self.peer(world, NAMES.index(me.peer)).phase, Pending):
                world = self.round_ends(world, NAMES.index(me.peer))
                while (follower := self.follower(world)) is not None:
                    world = follower
        return self.flaws(world)

    def follower(self, world: World) -> World | None:
        return next((then for _, then in self.progress(world) if then != world), None)

    def flaws(self, world: World) -> list[str]:
        living = self.living(world)
        peers = [self.peer(world, NAMES.index(me.peer)) for me in living]
        tokens = {peer.phase.token for peer in peers if isinstance(peer.phase, Pending)}
        wrong = set()
        if any(isinstance(peer.phase, Claiming | Granted | Exchanging) for peer in peers):
            wrong.add("a peer waits for ever")
        if len(tokens) > 1:
            wrong.add("two pending when all is quiet")
        if self.presence and tokens != set(self.tokens.members(world.standing)):
            wrong.add("the tokens that stand are not those of the pending peers")
        for peer in peers:
            for token in peer.hints.values():
                if token.owner not in living:
                    wrong.add("a dead peer is not forgotten")
                elif token not in tokens:
                    wrong.add("a stale hint when all is quiet")
            if not tokens <= {*peer.hints.values(), getattr(peer.phase, "token", None)}:
                wrong.add("a pending peer that somebody does not know")
        return sorted(wrong)

    # -- the search -----------------------------------------------------------------------------

    def run(self, limit: int = 10_000_000) -> Explorer:
        """Visit all worlds, at most `limit` of them."""
        numbers = {self.first: 0}
        came_from: list[tuple[int, Event]] = [(0, ())]
        sources, targets = array("I"), array("I")  # the steps of progress
        queue = deque([self.first])

        def note(number: int, label: Event, kinds: list[str]) -> None:
            for kind in kinds:
                self.violations[kind] += 1
                if kind not in self.examples:
                    history, at = [label], number
                    while at:
                        at, before = came_from[at]
                        history.insert(0, before)
                    self.examples[kind] = [str(event) for event in history]

        while queue:
            world = queue.popleft()
            number = numbers[world]
            moved = False
            dead_letter = self.dead_letter(world) if self.shortcut else None
            if dead_letter is None:
                followers = ((True, self.progress(world)), (False, self.interference(world)))
            else:
                followers = ((True, iter([dead_letter])), (False, iter(())))
            for alone, events in followers:
                for label, then in events:
                    note(number, label, self._found)
                    self._found = []
                    self.transitions += 1
                    if then == world:
                        continue
                    moved |= alone
                    if then not in numbers:
                        if len(numbers) >= limit:
                            self.exhaustive = False
                            continue
                        numbers[then] = len(numbers)
                        came_from.append((number, label))
                        queue.append(then)
                    if alone:
                        sources.append(number)
                        targets.append(numbers[then])
            if not moved:
                self.quiet += 1
                note(number, ("quiet",), self.judge(world) + self._found)
                self._found = []
        self.worlds = len(numbers)
        if cyclic(sources, targets, self.worlds):
            self.violations["a history that never becomes quiet"] += 1
        return self


def cyclic(sources: array[int], targets: array[int], count: int) -> bool:
    """Whether a directed graph has a cycle: take away nodes that nothing leads to while there are
    any."""
    leading = array("I", bytes(4 * count))
    first = array("I", bytes(4 * (count + 1)))
    for source, target in zip(sources, targets, strict=True):
        leading[target] += 1
        first[source + 1] += 1
    for number in range(count):
        first[number + 1] += first[number]
    # `progress` is followed world by world in the order of their numbers, so sources are sorted
    free = [number for number in range(count) if not leading[number]]
    taken = 0
    while free:
        number = free.pop()
        taken += 1
        for target in targets[first[number] : first[number + 1]]:
            leading[target] -= 1
            if not leading[target]:
                free.append(target)
    return taken < count


def numbers_in(mask: int) -> Iterator[int]:
    while mask:
        lowest = mask & -mask
        yield lowest.bit_length() - 1
        mask ^= lowest


def place_of(who: Identity, present: tuple[int, ...]) -> int | None:
    """Where this peer is, if it lives."""
    place = NAMES.index(who.peer)
    return place if present[place] == who.incarnation else None


def changed(row: tuple[int, ...], place: int, value: int) -> tuple[int, ...]:
    return (*row[:place], value, *row[place + 1 :])


CONTROL = Budget(decisions=3, crashes=1)  # of the replicated slot
LARGE = [
    (2, Budget(decisions=4)),
    (2, Budget(decisions=3, crashes=1, restarts=1, losses=1)),
    (2, Budget(decisions=3, renewals=1, losses=1, timeouts=1)),
    (3, Budget(decisions=2, losses=1)),
    (3, Budget(decisions=2, timeouts=1)),
    (3, Budget(decisions=2, crashes=1)),
    (3, Budget(decisions=2, stops=1)),
    (3, Budget(decisions=2, crashes=1, restarts=1)),
    (3, Budget(decisions=3)),
]


def main() -> int:
    """Explore the large bounds and say what was found; the number of runs that found something. And
    the replicated slot, in which something must be found."""
    from naive import naive

    console, bad = Console(), 0

    def explored(explorer: Explorer, count: int, budget: Budget, what: str = "") -> Explorer:
        found = explorer.run()
        given = ", ".join(f"{name} {n}" for name, n in budget._asdict().items() if n)
        extent = "all of" if found.exhaustive else "the first"
        console.print(
            f"{what}{count} peers, {given}: {extent} {found.worlds:,} worlds, {found.quiet:,} "
            f"quiet, violations: {dict(found.violations) or 'none'}",
            soft_wrap=True,
        )
        return found

    for count, budget in LARGE:
        found = explored(Explorer(shipping, count, budget, shortcut=True), count, budget)
        for kind, history in found.examples.items():
            console.print(f"  {kind}:", *history, sep="\n    ")
        bad += bool(found.violations) or not found.exhaustive
    control = Explorer(naive, 3, CONTROL, presence=False)
    bad += not explored(control, 3, CONTROL, "the replicated slot of the paper: ").violations
    return bad


if __name__ == "__main__":
    raise SystemExit(main())
