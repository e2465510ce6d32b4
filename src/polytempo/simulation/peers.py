"""The simulator of peers: an engine that drives `PeerNode`s on a virtual clock.

Theory of operation
-------------------
1. The queue of events is that of every engine. Four things can happen: a peer comes or goes
   (CHANGE), a message reaches a peer (DELIVER), a time-out passes (TIMEOUT), a local round ends
   (ROUND). At equal times they happen in this order, so that what one peer says at the end of its
   round is known to the next whose round ends at the same time.
2. A local round lasts as long as the device model says. It is a job for the backend, as a client's
   training is, announced when it begins and carried out when it ends: nobody looks at a model but
   at the end of a round. Then the node is told, which fuses what has come in meanwhile, may want to
   communicate, and asks for the next round, which begins at once.
3. What a node wants is a message: an event for another node, now (tokens, claims and their answers
   are a few bytes) or after the time that a model takes over the slower of the two links. Time-outs
   are events for the node itself; those that have lost their meaning do not move the clock.
4. A peer that is away is dead to the others, and an exchange with it breaks off. When it comes back
   it has its weights, momentum and place in the schedule, restarts its local round, and is a new
   incarnation.
5. Models are counted when they are sent: two per pairing. No pairing is begun that the budget (of
   all peers together) cannot cover; the run ends with the one that spends it, and what its
   two peers have then received and not yet fused is lost, as it is for a peer at its target.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Unpack

from torch import Tensor, nn

from polytempo.core import events
from polytempo.core.errors import PolytempoError
from polytempo.core.rng import rng
from polytempo.core.strategy import State
from polytempo.data import Federation
from polytempo.nodes import Identity, Pairing, PeerNode, Snapshot, Token, protocol
from polytempo.simulation.checks import PeerChecker
from polytempo.simulation.each_peer import EachPeer
from polytempo.simulation.engine import Engine, World
from polytempo.simulation.post import Post, about, ticket_of
from polytempo.strategies.p2p import P2P
from polytempo.training import PERSONAL, Exam, Job, Learner, Score

CHANGE, DELIVER, TIMEOUT, ROUND = 0, 1, 2, 3  # priorities at equal times
CLAIM_SECONDS, EXCHANGE_SECONDS = 3.0, 20.0  # time-outs; the second on top of a model's own time


@dataclass(frozen=True)
class Round:
    """A local round under way."""

    ticket: int  # counter of the event that ends it
    end: float
    job: Job

    @property
    def steps(self) -> int:
        return (self.job.last_step or 0) - self.job.first_step


class PeerSimulator(Engine):
    """A run without a server. `updates` are those of the whole run: with the strategy's options
    they say how many iterations each peer has."""

    strategy: P2P

    def __init__(
        self,
        federation: Federation,
        module: nn.Module,
        strategy: P2P,
        *,
        updates: int,
        check: bool = False,
        **world: Unpack[World],
    ) -> None:
        super().__init__(federation, module, strategy, **world)
        clients = federation.clients
        strategy.setup(self.context)
        if not all(change.timed for change in self.changes) or self.dropout.quorum() > 1:
            raise PolytempoError(
                "dropout leave:version=..., join:updates=... and trace:wait_for=... are about a "
                "server, but p2p has no server; use at=SECONDS, and no wait_for"
            )
        self.concurrency, self.refill = clients, strategy.refill
        self.messages.update(exchange=0, claim=0, announce=0)
        self.bytes.update(exchange=0)
        self.target = strategy.iterations(updates)  # of each peer
        task = replace(self.context.task, schedule=strategy.schedule(self.target))
        self.learners = [Learner(self.backend.solver, client, task) for client in range(clients)]
        self.nbytes = self.learners[0].params.nbytes
        self.nodes: dict[int, PeerNode] = {}  # of the peers that are there
        self.incarnations = [0] * clients
        self.lost: set[int] = set()  # peers that will never be there again
        self.training: dict[int, Round] = {}  # the local round that each peer is in
        self.posts: dict[int, Post] = {}  # on their way, by number
        self.answers = 0  # models that are still to be sent, in pairings under way
        self.local_rounds = self.pairings = 0
        self.each = EachPeer(self)
        if check:
            self.extend(PeerChecker())
        self.extend(self.each)

    @property
    def updates(self) -> int:
        return self.local_rounds

    @property
    def version(self) -> int:
        return self.pairings

    def is_over(self) -> bool:
        """Whether the updates are done; or the budget covers no further pairing, or everybody has
        reached the target, and no model is on its way."""
        spent = self.sent + self.answers + 2 > self.budget
        done = all(
            learner.iteration >= self.target or client in self.lost
            for client, learner in enumerate(self.learners)
        )
        if self.updates >= self.limit and not done:
            return True
        return (spent or done) and not any(post.brings_model for post in self.posts.values())

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
        time, priority, counter, client, index, _ = self._pop()
        if priority == CHANGE:
            self.time = time
            self._change(index)
        elif priority == ROUND:
            if client in self.training and self.training[client].ticket == counter:
                self.time = time  # else the peer has left meanwhile
                self._round_ends(client)
        else:
            self._deliver(time, client, self.posts.pop(index))

    def _join(self, client: int) -> None:
        """The peer is there, for the first time or again; it sees the tokens that stand."""
        self.incarnations[client] += 1
        node = self._node(client)
        for other in self.nodes.values():
            if isinstance(other.phase, protocol.Pending):
                self._post(node.identity, protocol.Appeared(other.phase.token))
        self.nodes[client] = node
        self._act(client, node.handle(protocol.Started()))

    def _node(self, client: int) -> PeerNode:
        """A new node for the peer's present incarnation. The budget is the run's, not a peer's."""
        slowest = self.nbytes / min(self.bandwidths)
        pairing = Pairing(
            str(client),
            self.incarnations[client],
            self.strategy.decision,
            peers=self.federation.clients,
            claim_timeout=CLAIM_SECONDS,
            exchange_timeout=EXCHANGE_SECONDS + 2 * slowest,
            seed=self.seed,
        )
        return PeerNode(
            pairing,
            self.learners[client],
            self.strategy.fusion,
            target=self.target,
            local_steps=self.strategy.local_steps,
        )

    def _change(self, index: int) -> None:
        change = self.changes[index]
        client = change.client
        if change.available:
            if client not in self.nodes:
                new = self.incarnations[client] == 0
                self._emit(events.Join if new else events.Return, client)
                self._join(client)
            return
        self.lost |= {client} if change.for_good else set()
        if client in self.nodes:
            self._emit(events.Leave, client)
            identity = self.nodes.pop(client).identity
            if client in self.training:
                self.backend.forget(self.training.pop(client).job)
            for other in self.nodes.values():
                self._post(other.identity, protocol.Gone(identity))
                match other.phase:
                    case protocol.Exchanging(token) if token.owner == identity:
                        # the line is broken
                        self._post(other.identity, protocol.ExchangeAnswered(token, None))

    def _train(self, client: int, steps: int) -> None:
        """The peer begins a local round."""
        work = replace(self.context.task, steps=steps).work(self.federation.samples[client])
        name = (client, "iteration", self.learners[client].iteration)
        seconds = self.devices.seconds(self.factors[client], work, rng(self.seed, "device", *name))
        now = self.timeline.at(client, self.time)
        if now is not None and now.latency is not None:
            seconds = now.latency
        fate = self._fate(*name)
        if isinstance(fate, float):
            seconds *= fate
        end = self.time + seconds
        ticket = self._push(end, ROUND, client, 0, 0)
        self.training[client] = Round(ticket, end, self.learners[client].job(steps))
        self.backend.expect(self.training[client].job, end)

    def _go_on(self) -> None:
        for round_ in self.training.values():  # those of a checkpoint
            self.backend.expect(round_.job, round_.end)

    def _round_ends(self, client: int) -> None:
        learner = self.learners[client]
        with self._timed("training"):
            ended = self.training.pop(client)
            learner.take(self.backend.carry_out(ended.job), ended.steps)
        self.local_rounds += 1
        self._emit(events.Train, client, learner.iteration)
        with self._timed("server"):
            actions = self.nodes[client].handle(protocol.RoundEnded())
        self.strategy.models[client] = learner.params
        self._act(client, actions)
        if self.updates // self.eval_every > self.history[-1]["updates"] // self.eval_every:
            self._record()

    # -- messages ------------------------------------------------------------------------------

    def _deliver(self, time: float, client: int, post: Post) -> None:
        """An event reaches the node that it is for, or nobody, if that is dead."""
        self.answers -= isinstance(post.event, protocol.Exchanged)
        node = self.nodes.get(client)
        if node is None or node.identity != post.to:
            return
        before = node.phase
        actions = node.handle(post.event)
        if post.is_silence and node.phase == before:
            return  # of something that is settled
        self.time = time
        self._act(client, actions)

    def _act(self, client: int, actions: list[protocol.Action]) -> None:
        """Carry out what the client's node wants."""
        me = self.nodes[client].identity
        for action in actions:
            match action:
                case protocol.Announce(token):
                    self._tell_all(client, events.Announce, token, protocol.Appeared(token))
                case protocol.Withdraw(token):
                    self._tell_all(client, events.Withdraw, token, protocol.Vanished(token))
                case protocol.Claim(token, timeout):
                    self.messages["claim"] += 1
                    self._emit(events.Claim, client, ticket_of(token))
                    self._post(token.owner, protocol.Claimed(me, token))
                    self._time_out(me, timeout, protocol.ClaimAnswered(token, None))
                case protocol.AnswerClaim(to, token, granted):
                    if granted:
                        self._emit(events.Grant, client, ticket_of(token), int(to.peer))
                    self._post(to, protocol.ClaimAnswered(token, granted))
                case protocol.Exchange(token, snapshot, timeout):
                    self._exchange(client, token, snapshot)
                    self._time_out(me, timeout, protocol.ExchangeAnswered(token, None))
                case protocol.AnswerExchange(to, token, answer):
                    after = 0.0
                    if answer is not None:
                        self.pairings += 1
                        self._send(client, token, answer)
                        after = self._seconds(client, int(to.peer))
                    self._post(to, protocol.ExchangeAnswered(token, answer), after=after)
                case protocol.SetDeadline(token, seconds):
                    self._time_out(me, seconds, protocol.DeadlinePassed(token))
                case protocol.Train(steps):
                    self._train(client, steps)
                case protocol.Fused(fusion, weight, before, fused):
                    if self.strategy.score_fusions:
                        self.each.score_fusion(client, before, fused)
                    self._emit(events.Fuse, client, *about(fusion), weight)
                case protocol.Discarded(fusion):
                    self._emit(events.Discard, client, *about(fusion))
                case protocol.Paired():  # `Fused` or `Discarded` will tell
                    pass

    def _tell_all(
        self,
        client: int,
        kind: type[events.Announce | events.Withdraw],
        token: Token,
        event: protocol.Event,
    ) -> None:
        self.messages["announce"] += 1
        self._emit(kind, client, ticket_of(token))
        for other, node in self.nodes.items():
            if other != client:
                self._post(node.identity, event)

    def _exchange(self, client: int, token: Token, snapshot: Snapshot) -> None:
        """The claimer sends its model, if the budget pays for an answer too."""
        if self.sent + self.answers + 2 > self.budget:
            return
        self.answers += 1
        self._send(client, token, snapshot)
        if self._fate(client, "exchange", self.messages["claim"]) == "lost":
            self.answers -= 1
        else:
            event = protocol.Exchanged(self.nodes[client].identity, token, snapshot)
            self._post(token.owner, event, after=self._seconds(client, int(token.peer)))

    def _send(self, client: int, token: Token, snapshot: Snapshot) -> None:
        self._count("exchange", snapshot.params.nbytes)
        self._emit(events.Exchange, client, ticket_of(token), snapshot.progress)

    def _post(
        self, to: Identity, event: protocol.Event, *, after: float = 0.0, priority: int = DELIVER
    ) -> None:
        number = self.counter + 1
        self.posts[number] = Post(to, event)
        self._push(self.time + after, priority, int(to.peer), number, 0)

    def _time_out(self, me: Identity, after: float, event: protocol.Event) -> None:
        self._post(me, event, after=after, priority=TIMEOUT)

    def _seconds(self, one: int, other: int) -> float:
        """How long a model takes from one to the other: the slower link decides."""
        return self.nbytes / min(self.bandwidths[one], self.bandwidths[other])

    # -- checkpoints ---------------------------------------------------------------------------

    def state_dict(self) -> State:
        return super().state_dict() | {
            "target": self.target,
            "nodes": {str(client): node.state_dict() for client, node in self.nodes.items()},
            "away": {
                str(client): learner.state_dict()
                for client, learner in enumerate(self.learners)
                if client not in self.nodes
            },
            "posts": {str(number): post.state_dict() for number, post in self.posts.items()},
            "training": {
                str(client): [each.ticket, each.end, each.steps]
                for client, each in self.training.items()
            },
            "lost": sorted(self.lost),
            "incarnations": self.incarnations,
            "answers": self.answers,
            "local_rounds": self.local_rounds,
            "pairings": self.pairings,
        }

    def load_state_dict(self, state: State) -> None:
        """The peers must be on their way to the same target."""
        super().load_state_dict(state)
        if state["target"] != self.target:
            raise PolytempoError(
                f"the peers were on their way to {state['target']} iterations, on the matching "
                f"learning-rate schedule, not to {self.target}; leave --updates as it was, or "
                "start a new run"
            )
        self.incarnations = state["incarnations"]
        for client, saved in state["nodes"].items():
            self.nodes[int(client)] = node = self._node(int(client))
            node.load_state_dict(saved)
        for client, saved in state["away"].items():
            self.learners[int(client)].load_state_dict(saved)
        self.strategy.models = [learner.params for learner in self.learners]
        self.posts = {int(number): Post.from_state(post) for number, post in state["posts"].items()}
        self.training = {
            int(client): Round(ticket, end, self.learners[int(client)].job(steps))
            for client, (ticket, end, steps) in state["training"].items()
        }
        self.lost = set(state["lost"])
        self.answers, self.pairings = state["answers"], state["pairings"]
        self.local_rounds = state["local_rounds"]

    # -- looking at it -------------------------------------------------------------------------

    def _evaluate(self, clients: Sequence[int]) -> list[Score]:
        return self.score(clients, self.strategy.models)

    def score(self, clients: Sequence[int], models: Sequence[Tensor]) -> list[Score]:
        """The models of these clients, on their own test samples or on those of all."""
        pairs = zip(clients, models, strict=True)
        found = self.backend.evaluate(self._exam_of(client, model) for client, model in pairs)
        return [sum(scores, Score({})) for scores in found]

    def _exam_of(self, client: int, model: Tensor) -> Exam:
        common = self.strategy.common_test
        tested = list(range(self.federation.clients)) if common else [client]
        own = {PERSONAL: self.personal(client)} if self.layout.personal else {}
        return Exam(model, tested, [own] * len(tested))

    def personal(self, client: int) -> Tensor:
        return self.learners[client].memory[PERSONAL]
