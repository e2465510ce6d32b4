"""The simulator of peers: an engine that drives `Peer` machines on a virtual clock.

Theory of operation
-------------------
1. The queue of events is that of every engine. Four things can happen: a peer comes or goes
   (CHANGE), a message reaches a peer (DELIVER), a time-out passes (TIMEOUT), a local round ends
   (ROUND). At equal times they happen in this order, so that what one peer says at the end of its
   round is known to the next whose round ends at the same time.
2. A local round lasts as long as the device model says. It is trained when it ends: nobody looks at
   a model but at the end of a round. Then what has come in meanwhile is fused into the weights, and
   the machine is told, which may want to communicate. The next round begins at once.
3. What a machine wants is a message: an event for another machine, now (tokens, claims and their
   answers are a few bytes) or after the time that a model takes over the slower of the two links.
   Time-outs are events for the machine itself; those that have lost their meaning do not move the
   clock.
4. A peer that is away is dead to the others. When it comes back it has its weights, momentum and
   place in the schedule, begins its local round anew, and is a new incarnation.
5. Models sent are counted when they are sent: two for each pairing. No pairing is begun that the
   budget cannot pay; the run ends with the one that spends it, and what its two peers have then
   received and not yet fused is lost.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Unpack

from torch import Tensor, nn

from polytempo.core import events
from polytempo.core.errors import PolytempoError
from polytempo.core.rng import rng
from polytempo.core.strategy import State
from polytempo.data import Federation
from polytempo.nodes import (
    Action,
    Announce,
    Claim,
    Claiming,
    Exchange,
    Exchanging,
    Fusion,
    Granted,
    Identity,
    Idle,
    Peer,
    Pending,
    SetDeadline,
    Snapshot,
    Token,
)
from polytempo.simulation.checks import PeerChecker
from polytempo.simulation.each_peer import EachPeer
from polytempo.simulation.engine import Engine, World
from polytempo.strategies.p2p import P2P
from polytempo.training import PERSONAL, Exam, Learner, Schedule, Score

CHANGE, DELIVER, TIMEOUT, ROUND = 0, 1, 2, 3  # priorities at equal times
CLAIM_SECONDS, EXCHANGE_SECONDS = 3.0, 20.0  # time-outs; the second beside what a model takes


@dataclass(frozen=True)
class Post:
    """An event on its way to a machine: the name of its method, and what it is called with."""

    to: Identity
    event: str
    arguments: tuple[Any, ...]


COUNTS = ("incarnations", "answers", "local_rounds", "pairings", "each", "effects")
_KINDS: dict[str, Any] = {
    kind.__name__: kind
    for kind in (
        *(Identity, Token, Snapshot, Fusion, Post),
        *(Idle, Pending, Claiming, Granted, Exchanging),
    )
}


class PeerSimulator(Engine):
    """A run without a server. `rounds` are those of the whole run: with the strategy's options they
    say how many iterations each peer has."""

    strategy: P2P

    def __init__(
        self,
        federation: Federation,
        module: nn.Module,
        strategy: P2P,
        *,
        rounds: int,
        check: bool = False,
        **world: Unpack[World],
    ) -> None:
        super().__init__(federation, module, strategy, **world)
        clients, task = federation.clients, self.context.task
        strategy.setup(self.context)
        if not all(change.timed for change in self.changes):
            raise PolytempoError(
                "dropout leave:version=... and join:round=... count what a server does, and p2p "
                "has no server; say when with at=SECONDS"
            )
        self.slots, self.refill = clients, strategy.refill
        self.messages.update(exchange=0, claim=0, announce=0)
        self.bytes.update(exchange=0)
        schedule = Schedule(strategy.iterations(rounds), strategy.milestones, strategy.gamma)
        self.learners = [
            Learner(self.backend.solver, peer=client, task=task, schedule=schedule)
            for client in range(clients)
        ]
        self.nbytes = self.learners[0].params.nbytes
        self.machines: dict[int, Peer] = {}  # of the peers that are there
        self.incarnations = [0] * clients
        self.lost: set[int] = set()  # peers that will never be there again
        self.training: dict[int, int] = {}  # the ticket of the round that each peer is in
        self.posts: dict[int, Post] = {}  # on their way, by number
        self.answers = 0  # models that are still to be sent, in pairings under way
        self.local_rounds = self.pairings = 0
        self.each: list[dict[str, float]] = []  # a row for each peer and evaluation
        self.effects: list[list[float]] = [[] for _ in range(clients)]  # of fusions on accuracy
        if check:
            self.extend(PeerChecker())
        self.extend(EachPeer(self))

    @property
    def round(self) -> int:
        return self.local_rounds

    @property
    def version(self) -> int:
        return self.pairings

    def is_over(self) -> bool:
        """Whether the rounds are done; or no pairing can be paid any more, or everybody has reached
        the target, and no model is on its way."""
        spent = self.sent + self.answers + 2 > self.budget
        done = all(each.finished or each.peer in self.lost for each in self.learners)
        if self.round >= self.limit and not done:
            return True
        return (spent or done) and not any(
            isinstance(what, Snapshot) for post in self.posts.values() for what in post.arguments
        )

    # -- what happens --------------------------------------------------------------------------

    def _start(self) -> None:
        self._record()
        absent = set()
        for index, change in enumerate(self.changes):
            if change.time > 0:
                self._push(change.time, CHANGE, change.client, index, 0)
            elif change.available:
                absent.discard(change.client)
            else:
                absent.add(change.client)
                self.lost |= {change.client} if change.for_good else set()
        for client in range(self.federation.clients):
            if client not in absent:
                self._join(client)

    def _step(self) -> None:
        time, priority, counter, client, index, _ = heapq.heappop(self.queue)
        if priority == CHANGE:
            self.time = time
            self._change(index)
        elif priority == ROUND:
            if self.training.get(client) == counter:  # else the peer has left meanwhile
                self.time = time
                self._boundary(client)
        else:
            self._deliver(time, client, self.posts.pop(index))

    def _join(self, client: int) -> None:
        """The peer is there, for the first time or again; it sees the tokens that stand."""
        self.incarnations[client] += 1
        machine = self.machine(client)
        for other in self.machines.values():
            if isinstance(other.phase, Pending):
                self._post(machine.identity, "appeared", other.phase.token)
        self.machines[client] = machine
        if self.learners[client].finished:
            machine.stop()
        else:
            self._train(client)

    def machine(self, client: int) -> Peer:
        """A new machine for the peer's present incarnation."""
        slowest = self.nbytes / min(self.bandwidths)
        return Peer(
            str(client),
            self.incarnations[client],
            self.strategy.decision,
            peers=self.federation.clients,
            claim_timeout=CLAIM_SECONDS,
            exchange_timeout=EXCHANGE_SECONDS + 2 * slowest,
            seed=self.seed,
        )

    def _change(self, index: int) -> None:
        change = self.changes[index]
        client = change.client
        if change.available:
            if client not in self.machines:
                self._emit(events.Return, client)
                self._join(client)
            return
        self.lost |= {client} if change.for_good else set()
        if client in self.machines:
            self._emit(events.Leave, client)
            identity = self.machines.pop(client).identity
            self.training.pop(client, None)
            for other in self.machines.values():
                self._post(other.identity, "gone", identity)

    def _train(self, client: int) -> None:
        """The peer begins a local round."""
        learner = self.learners[client]
        steps = min(self.strategy.local_steps, learner.schedule.target - learner.iteration)
        work = replace(learner.task, steps=steps).work(self.federation.samples[client])
        name = (client, "iteration", learner.iteration)
        seconds = self.devices.seconds(self.factors[client], work, rng(self.seed, "device", *name))
        now = self.timeline.at(client, self.time)
        if now is not None and now.latency is not None:
            seconds = now.latency
        fate = self.dropout.fate(rng(self.seed, "fate", *name))
        if isinstance(fate, float):
            seconds *= fate
        self.training[client] = self._push(self.time + seconds, ROUND, client, 0, 0)

    def _boundary(self, client: int) -> None:
        """A local round ends."""
        learner, machine = self.learners[client], self.machines[client]
        with self._timed("training"):
            learner.steps(self.strategy.local_steps)
        self.local_rounds += 1
        self.strategy.models[client] = learner.params
        self._emit(events.Train, client, learner.iteration)
        self._fuse(client)
        stop = machine.stop() if learner.finished else []
        snapshot = Snapshot(learner.params, learner.progress, learner.iteration)
        self._act(client, [*stop, *machine.boundary(snapshot)])
        del self.training[client]
        if not learner.finished:
            self._train(client)
        if self.round // self.eval_every > self.history[-1]["round"] // self.eval_every:
            self._record()

    def _fuse(self, client: int) -> None:
        """Mix in what the peer has received."""
        learner, rule = self.learners[client], self.strategy.fusion
        with self._timed("server"):
            for fusion in self.machines[client].take_fusions():
                own = fusion.own_progress
                [weight] = rule.weights(own, [fusion.snapshot.progress])
                fused = rule.fuse(learner.params, [fusion.snapshot], own)
                if self.strategy.score_fusions:
                    before, after = self._score([client, client], [learner.params, fused])
                    self.effects[client].append((after.correct - before.correct) / after.total)
                learner.fuse(fused)
                self.strategy.models[client] = fused
                partner, ticket = int(fusion.partner.peer), _name(fusion.token)
                self._emit(events.Fuse, client, ticket, partner, weight)

    # -- messages ------------------------------------------------------------------------------

    def _act(self, client: int, actions: list[Action]) -> None:
        """Carry out what the client's machine wants."""
        me = self.machines[client].identity
        for action in actions:
            token, owner = action.token, action.token.owner
            match action:
                case SetDeadline(seconds=seconds):
                    self._time_out(me, seconds, "deadline", token)
                case Claim(timeout=timeout):
                    self.messages["claim"] += 1
                    self._emit(events.Claim, client, _name(token))
                    self._post(owner, "claimed", me, token)
                    self._time_out(me, timeout, "claim_answered", token, None)
                case Exchange(snapshot=snapshot, timeout=timeout):
                    self._exchange(client, token, snapshot)
                    self._time_out(me, timeout, "exchange_answered", token, None)
                case _:
                    appears = isinstance(action, Announce)
                    self.messages["announce"] += 1
                    kind = events.Announce if appears else events.Withdraw
                    self._emit(kind, client, _name(token))
                    for other in self.machines.values():
                        if other.identity != me:
                            self._post(other.identity, "appeared" if appears else "vanished", token)

    def _exchange(self, client: int, token: Token, snapshot: Snapshot) -> None:
        """The claimer sends its model, if the budget pays for an answer too."""
        if self.sent + self.answers + 2 > self.budget:
            return
        self.answers += 1
        self._send(client, token, snapshot)
        fate = self.dropout.fate(rng(self.seed, "fate", client, "exchange", self.messages["claim"]))
        me, after = self.machines[client].identity, self._seconds(client, int(token.peer))
        if fate == "lost":
            self.answers -= 1
        else:
            self._post(token.owner, "exchanged", me, token, snapshot, after=after)

    def _send(self, client: int, token: Token, snapshot: Snapshot) -> None:
        self._count("exchange", snapshot.params.nbytes)
        self._emit(events.Exchange, client, _name(token), snapshot.progress)

    def _deliver(self, time: float, client: int, post: Post) -> None:
        """An event reaches the machine that it is for, or nobody, if that is dead."""
        self.answers -= post.event == "exchanged"
        machine = self.machines.get(client)
        if machine is None or machine.identity != post.to:
            return
        before = machine.phase
        found = getattr(machine, post.event)(*post.arguments)
        if machine.phase == before and (post.event == "deadline" or None in post.arguments):
            return  # a time-out of something that is settled
        self.time = time
        if post.event == "claimed":
            granted, actions = found
            by, token = post.arguments
            if granted:
                self._emit(events.Grant, client, _name(token), int(by.peer))
            self._post(by, "claim_answered", token, granted)
        elif post.event == "exchanged":
            snapshot, actions = found
            by, token, _ = post.arguments
            after = 0.0
            if snapshot is not None:
                self.pairings += 1
                self._send(client, token, snapshot)
                after = self._seconds(client, int(by.peer))
            self._post(by, "exchange_answered", token, snapshot, after=after)
        else:
            actions = found
        self._act(client, actions)
        if client not in self.training:  # it has reached its target: any time is a boundary
            self._fuse(client)

    def _post(
        self, to: Identity, event: str, *what: Any, after: float = 0.0, priority: int = DELIVER
    ) -> None:
        number = self.counter + 1
        self.posts[number] = Post(to, event, what)
        self._push(self.time + after, priority, int(to.peer), number, 0)

    def _time_out(self, me: Identity, after: float, event: str, *what: Any) -> None:
        self._post(me, event, *what, after=after, priority=TIMEOUT)

    def _seconds(self, one: int, other: int) -> float:
        """How long a model takes from one to the other: the slower link decides."""
        return self.nbytes / min(self.bandwidths[one], self.bandwidths[other])

    # -- looking at it -------------------------------------------------------------------------

    def _evaluate(self, clients: Sequence[int]) -> list[Score]:
        scores = self._score(clients, self.strategy.models)
        for client, score in zip(clients, scores, strict=True):
            iteration = self.learners[client].iteration
            accuracy = score.correct / max(1, score.total)
            row = {"time": self.time, "peer": client, "iteration": iteration, "accuracy": accuracy}
            self.each.append(row)
        return scores

    def _score(self, clients: Sequence[int], models: Sequence[Tensor]) -> list[Score]:
        """The models of these clients, on their own test samples or on those of all."""
        everybody, common = range(self.federation.clients), self.strategy.common_test
        pairs = zip(clients, models, strict=True)
        found = self.backend.evaluate(
            self._exam_of(client, model, list(everybody) if common else [client])
            for client, model in pairs
        )
        return [
            Score(
                sum(score.correct for score in scores),
                sum(score.total for score in scores),
                sum(score.loss for score in scores),
            )
            for scores in found
        ]

    def _exam_of(self, client: int, model: Tensor, tested: list[int]) -> Exam:
        own = self.learners[client].memory.get(PERSONAL)
        return Exam(model, tested, None if own is None else [own] * len(tested))

    def peers(self) -> list[dict[str, Any]]:
        """Each peer as it stands: its speed, how far it has come, how good it is, and the mean
        effect that a fusion has had on its accuracy."""
        last = self.each[-self.federation.clients :]
        return [
            {
                "peer": client,
                "factor": self.factors[client],
                "iterations": learner.iteration,
                "accuracy": last[client]["accuracy"],
                "fusion_effect": sum(effects) / len(effects) if effects else None,
            }
            for client, (learner, effects) in enumerate(
                zip(self.learners, self.effects, strict=True)
            )
        ]

    # -- checkpoints ---------------------------------------------------------------------------

    def state_dict(self) -> State:
        return super().state_dict() | {
            "target": self.learners[0].schedule.target,
            "learners": [learner.state_dict() for learner in self.learners],
            "machines": {str(c): _spell(_memory(each)) for c, each in self.machines.items()},
            "posts": {str(number): _spell(post) for number, post in self.posts.items()},
            "training": {str(client): ticket for client, ticket in self.training.items()},
            "lost": sorted(self.lost),
            **{name: getattr(self, name) for name in COUNTS},
        }

    def load_state_dict(self, state: State) -> None:
        super().load_state_dict(state)
        target = self.learners[0].schedule.target
        if state["target"] != target:
            raise PolytempoError(
                f"the peers were on their way to {state['target']} iterations, with the learning "
                f"rates that belong to it, and not to {target}; leave --rounds as it was, or start "
                "anew"
            )
        for client, (learner, saved) in enumerate(
            zip(self.learners, state["learners"], strict=True)
        ):
            learner.load_state_dict(saved)
            self.strategy.models[client] = learner.params
        self.incarnations = state["incarnations"]
        for client, memory in state["machines"].items():
            self.machines[int(client)] = machine = self.machine(int(client))
            vars(machine).update(_read(memory))
        self.posts = {int(number): _read(post) for number, post in state["posts"].items()}
        self.training = {int(client): ticket for client, ticket in state["training"].items()}
        self.lost = set(state["lost"])
        for name in COUNTS:
            setattr(self, name, state[name])


def _name(token: Token) -> str:
    return f"{token.peer}.{token.incarnation}.{token.ticket}"


def _memory(machine: Peer) -> State:
    """What a machine remembers: all but its options."""
    return {key: value for key, value in vars(machine).items() if key != "decision"}


def _spell(value: Any) -> Any:
    """Phases, tokens, snapshots and the like as tables that name their kind."""
    kind = type(value).__name__
    if kind in _KINDS:
        parts = getattr(value, "_asdict", lambda: vars(value))()
        return {kind: {key: _spell(part) for key, part in parts.items()}}
    if isinstance(value, dict):
        return {"dict": {key: _spell(part) for key, part in value.items()}}
    return [_spell(part) for part in value] if isinstance(value, list | tuple) else value


def _read(value: Any) -> Any:
    if isinstance(value, dict):
        [(kind, parts)] = value.items()
        return _KINDS.get(kind, dict)(**{key: _read(part) for key, part in parts.items()})
    return [_read(part) for part in value] if isinstance(value, list) else value
