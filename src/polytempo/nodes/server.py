"""The server of a fleet: a `Server` with names, acknowledgements, deadlines and evaluations.

Theory of operation
-------------------
1. The node has no I/O. A driver tells it what happens (`connected`, `disconnected`, `received`,
   `tick`, `revoke`) with the time, and carries out the actions that it returns. Of each name it
   knows one connection, the newest: the driver tells it of no other, and so not of the end of one
   whose place a newer one has taken.
2. What must survive is a function of *records*, in order. Telling the node what happens changes
   nothing that lasts: it returns `Write(record)`. The driver writes records down, several at once
   if it likes, and only when they are safe hands each to `apply`, which changes the state and
   returns what to send. So nobody is told of anything that a crash could undo, and *state =
   checkpoint + the records after it*, bit for bit.
3. An update is known by the dispatch that it answers. Its client offers it until it is
   acknowledged; a repetition is acknowledged again, and folded once. `folded` holds, of each
   client, the last of its dispatches that was folded.
4. Whatever is on its way when a connection ends is lost. The node keeps what each client in
   training was sent last, and whether it was hurried; a client that comes back says what it holds,
   and hears all that it has missed, by what is applied by then. The rest follows as it is applied.
5. A client that is not connected is *away*: nobody sends it anything, and what it was training may
   still come. A client that takes longer than its deadline, or whose update is bad, loses its slot;
   what it then offers is declined, and it is free for a fresh model, after those that are idle.
   Deadlines follow the client's own past, and double while it is there and misses them: one that
   has become slow is not given up for ever. An update that comes after the last round stays with
   its client, unanswered: should the run be extended, it is offered again.
6. Evaluation is done by the clients, on their own data; what comes back is sums. An exam is a row
   of the history, to which scores are added as they come in. The run is closed once those that are
   there have answered the last one, or have been waited for long enough.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Concatenate, ParamSpec

from polytempo.core import events
from polytempo.core.errors import Refused
from polytempo.core.messages import (
    Action,
    Dispatch,
    Stop,
    Update,
    dispatch_state,
    read_dispatch,
)
from polytempo.core.server import MOST_SAMPLES, Server
from polytempo.core.strategy import State
from polytempo.nodes.star import (
    PROTOCOL,
    Acknowledge,
    AnyRecord,
    Away,
    Closed,
    Continued,
    Decline,
    Drop,
    Enrolled,
    Examine,
    Finished,
    FromClient,
    FromServer,
    GivenUp,
    Hello,
    Hurry,
    Joined,
    Left,
    Offered,
    Report,
    Scored,
    Scores,
    Send,
    ServerAction,
    Started,
    Sums,
    Swapped,
    Upload,
    Welcome,
    Work,
    Write,
)

P = ParamSpec("P")
OVER = "the run is over"
REVOKED = "it was revoked"
LATE = "it came too late, twice, or answers what this client was never sent"
PAST = 5  # trainings of a client by which its deadline is set
MOST_DOUBLINGS = 3  # of a deadline,
MOST_AT_FIRST = 16  # and as long as nobody has finished anything: all may be that slow


@dataclass(frozen=True)
class Patience:
    """How long a client in training is waited for: `factor` times the longest of its last trainings
    (before it has finished one, of anybody's; before anybody has, `first` seconds), at least
    `least` seconds; twice as long for each deadline that it has missed in a row while it was
    connected, up to eight times. `factor` infinite: forever."""

    factor: float = 4.0
    least: float = 30.0
    first: float = 600.0

    def seconds(self, own: Sequence[float], longest: float, missed: int = 0) -> float:
        """For a client whose last trainings took `own`, where the longest of all took `longest`
        (0: there is none)."""
        if math.isinf(self.factor):
            return math.inf
        past = max(own, default=longest)
        waited = max(self.least, self.factor * past if past > 0 else self.first)
        return waited * 2.0 ** min(missed, MOST_DOUBLINGS if longest > 0 else MOST_AT_FIRST)


@dataclass(frozen=True)
class FleetPlan:
    """What the server of a fleet is asked to do, beside the strategy.

    `model`, `problem`: what a client must train and learn; `run`: what else it is told.
    `rounds`: updates after which the run is over. `eval_every`: updates between two exams.
    `figures`: names of the sums that a score consists of. `closing`: seconds that the last exam may
    take.
    """

    model: str
    problem: str
    run: Mapping[str, Any]
    rounds: int
    eval_every: int
    figures: frozenset[str]
    adapt_epochs: int = 0
    adapt_always: bool = False
    patience: Patience = Patience()
    closing: float = 60.0


@dataclass
class Exam:
    """One evaluation of the fleet: when it was set, whom it was set, and what has come back."""

    number: int
    time: float
    round: int
    version: int
    sent: Mapping[str, int]  # messages so far, by kind
    asked: int
    adapt: bool
    handed: dict[int, Sums] = field(default_factory=dict)  # by client
    adapted: dict[int, Sums] = field(default_factory=dict)


class ServerNode:
    """The protocol around one `Server`.

    `samples` is the list that the strategy's context has: a client's entry is set when it enrols.
    """

    def __init__(self, server: Server, samples: list[int], plan: FleetPlan) -> None:
        if server.context.samples is not samples:
            raise ValueError("the context of the strategy must have this very list of samples")
        self.server, self.samples, self.plan = server, samples, plan
        self.rounds = 0  # the run has so many: see `Started`
        self.names: dict[str, int] = {}  # of those that have enrolled
        self.roster: list[str] = []  # their names, by number
        self.tested: list[int] = []  # test samples, by client
        self.folded: dict[int, int] = {}  # by client: its last dispatch that was folded
        self.outstanding: dict[int, Dispatch] = {}  # by client in training: what it was sent last
        self.since: dict[int, float] = {}  # by client in training: when it was started
        self.past: dict[int, list[float]] = {}  # by client: seconds of its last trainings
        self.longest = 0.0  # of all trainings
        self.missed: dict[int, int] = {}  # by client: deadlines in a row, while it was there
        self.hurried: set[int] = set()  # of those in training
        self.exams: list[Exam] = []
        self.closed = False
        self.applied = 0  # records
        self.events = 0
        self.time = 0.0  # of the last record
        self.up = 0.0  # when the server was started last
        self.messages = Counter(dispatch=0, upload=0, multicast=0, exam=0)
        self.bytes = Counter(self.messages)
        self.staleness: Counter[int] = Counter()
        self.trainings: Counter[int] = Counter()  # by client: each has one upload at most
        self.revoked: set[int] = set()
        # Not saved: who is connected now, and the names of those that are about to enrol.
        self.here: set[str] = set()
        self._enrolling: set[str] = set()

    # -- what is there -------------------------------------------------------------------------

    @property
    def round(self) -> int:
        return self.server.round

    @property
    def over(self) -> bool:
        """Whether all updates are folded; `closed` once the last exam is in, too."""
        return self.server.round >= self.rounds

    @property
    def _ending(self) -> bool:
        """The same, for what is told now: it counts after `Started`, which may extend the run."""
        return self.server.round >= self.plan.rounds

    # -- what happens: nothing that lasts is changed here ----------------------------------------

    def started(self, now: float) -> list[ServerAction]:
        """The server is up (again): nobody is connected yet."""
        self.here.clear()
        return [Write(Started(now, self.plan.rounds))]

    def connected(self, name: str, hello: Hello, now: float) -> list[ServerAction]:
        """A client says hello. One that does not fit is dropped, with what differs."""
        reason = self._misfit(name, hello)
        if reason is not None:
            return [Drop(name, reason), *self.disconnected(name, now)]
        client = self.names.get(name)
        if client is None and self.closed and self._ending:
            return [Send(name, Finished(OVER))]
        self.here.add(name)
        if client is None:
            if name in self._enrolling:  # the welcome will come; it may have been away meanwhile
                return [Write(Joined(now, name))]
            self._enrolling.add(name)
            return [Write(Enrolled(now, name, hello.samples, hello.tested))]
        return [
            Send(name, Welcome(client, self.plan.run)),
            *self._resume(name, client, hello),
            Write(Joined(now, name)),
        ]

    def _misfit(self, name: str, hello: Hello) -> str | None:
        plan = self.plan
        if hello.protocol != PROTOCOL:
            return f"it speaks protocol {hello.protocol}, the server {PROTOCOL}: update the older"
        if hello.model not in ("", plan.model):
            return (
                f"it trains a model with layout {hello.model}, the server one with {plan.model}: "
                "give both the same --model, --personal and --freeze, and data of the same shape"
            )
        if hello.problem != plan.problem:
            return f"it learns {hello.problem}, the server {plan.problem}: give both one --problem"
        if not (1 <= hello.samples <= MOST_SAMPLES and 0 <= hello.tested <= MOST_SAMPLES):
            return (
                f"it has {hello.samples} training and {hello.tested} test samples; expected at "
                f"least 1 to train on, and at most {MOST_SAMPLES:,} of either"
            )
        known = len(self.names) + len(self._enrolling)
        if known >= len(self.samples) and not self._knows(name):
            return f"the run has room for {len(self.samples)} clients, all of them known by now"
        return None

    def _knows(self, name: str) -> bool:
        return name in self.names or name in self._enrolling

    def _resume(self, name: str, client: int, hello: Hello) -> list[ServerAction]:
        """What a client that is back must hear, by what it holds."""
        said: list[ServerAction] = []
        numbers, offering = self._numbers(client), hello.offering
        if offering is not None and offering not in numbers:
            message: FromServer = Decline(offering, LATE)
            if self.folded.get(client) == offering:
                message = Acknowledge(offering)
            said.append(Send(name, message))
        if self.closed and self._ending:
            return [*said, Send(name, Finished(OVER))]
        latest = self.outstanding.get(client)
        if latest is None or self._ending:
            if hello.training is not None:
                said.append(Send(name, Decline(hello.training, "it took too long")))
        elif hello.training in numbers:
            if hello.training != latest.number:  # a multicast went astray
                said.append(Send(name, Work(latest)))
        elif offering not in numbers:  # else the update is about to come
            said.append(Send(name, Work(replace(latest, preempt=False))))
        if latest is not None and client in self.hurried and offering not in numbers:
            said.append(Send(name, Hurry(latest.number)))
        if self._ending and self.exams and self._awaited(client):
            said.append(self._question(client, self.exams[-1]))
        return said

    def _numbers(self, client: int) -> list[int]:
        """The dispatches that an update of this client may answer: the one that it began with, and
        the multicasts since."""
        return [sent.number for sent in self.server.open.get(client, ())]

    def disconnected(self, name: str, now: float) -> list[ServerAction]:
        """The connection is gone."""
        if name not in self.here:
            return []
        self.here.discard(name)
        return [Write(Away(now, name))]

    def revoke(self, name: str, now: float) -> list[ServerAction]:
        """The client is not welcome any more. (The driver lets it in no longer; if it is admitted
        again and comes back, it takes part as before.)"""
        self.here.discard(name)
        left = [Write(Left(now, name))] if self._knows(name) else []
        return [Drop(name, REVOKED), *left]

    def received(self, name: str, message: FromClient, now: float) -> list[ServerAction]:
        """A connected client says something other than hello."""
        client = self.names.get(name)
        if client is None or name not in self.here:
            return [Drop(name, "it must say hello first")]
        match message:
            case Upload():
                return self._offer(name, client, message, now)
            case Swapped():
                return self._hear_of(name, client, message, now)
            case Scores():
                return [Write(Scored(now, name, message))] if self._fits(client, message) else []
        return [Drop(name, "it said hello twice")]

    def _hear_of(self, name: str, client: int, swapped: Swapped, now: float) -> list[ServerAction]:
        """What has become of a multicast. One that was missed by a client that has not even begun
        that training took the place of the model to begin with: it is sent again as work."""
        numbers, number = self._numbers(client), swapped.number
        if number in numbers and swapped.replaces in numbers and swapped.replaces != number:
            return [Write(Continued(now, name, swapped))]
        latest = self.outstanding.get(client)
        if latest is None or latest.number != number or swapped.step is not None or self._ending:
            return []
        return [Send(name, Work(replace(latest, preempt=False)))]

    def _fits(self, client: int, scores: Scores) -> bool:
        """Whether these are the client's first scores of an exam, and say what scores should."""
        if not 0 <= scores.exam < len(self.exams) or client in self.exams[scores.exam].handed:
            return False
        found = [scores.handed, *([] if scores.adapted is None else [scores.adapted])]
        return all(
            sums.keys() == self.plan.figures and all(map(math.isfinite, sums.values()))
            for sums in found
        )

    def _offer(self, name: str, client: int, upload: Upload, now: float) -> list[ServerAction]:
        """An update: looked at before it is written, so that what is bad takes no room on disk."""
        if self.folded.get(client) == upload.number:
            return [Send(name, Acknowledge(upload.number))]
        numbers = self._numbers(client)
        if upload.number not in numbers:
            return [Send(name, Decline(upload.number, LATE))]
        if self._ending:  # should the run be extended, it is offered again
            return []
        try:
            self.server.check(_update(client, upload))
        except Refused as refusal:
            return [Write(GivenUp(now, name, numbers[0], str(refusal)))]
        return [Write(Offered(now, name, upload))]

    def tick(self, now: float) -> list[ServerAction]:
        """Time passes: who is waited for in vain? (Say so about once a second.)"""
        if self._ending:
            return [Write(Closed(now))] if not self.closed and self._examined(now) else []
        return [
            Write(GivenUp(now, self.roster[client], self._numbers(client)[0]))
            for client, since in self.since.items()
            if now - since > self.patience(client)
        ]

    def patience(self, client: int) -> float:
        """Seconds that this client may train before it is given up."""
        own, missed = self.past.get(client, ()), self.missed.get(client, 0)
        return self.plan.patience.seconds(own, self.longest, missed)

    def _examined(self, now: float) -> bool:
        """Whether the last exam is in, or was waited for long enough since the server is up."""
        if not self.exams:
            return True
        exam = self.exams[-1]
        if now > max(exam.time, self.up) + self.plan.closing:
            return True
        return len(exam.handed) >= exam.asked and not any(map(self._awaited, self.server.members))

    def _awaited(self, client: int) -> bool:
        """Whether this client could still answer the last exam."""
        return self.tested[client] > 0 and client not in self.exams[-1].handed

    # -- records: what changes the state ----------------------------------------------------------

    def apply(self, record: AnyRecord) -> list[ServerAction]:
        """Let it count. Records come in the order in which they were written; the same records give
        the same state, bit for bit."""
        self.applied += 1
        self.time = max(self.time, record.time)
        match record:
            case Started(rounds=rounds):
                return self._start(rounds)
            case Enrolled():
                return self._enrol(record)
            case Closed():
                return self._close()
        client = self.names[record.name]
        match record:
            case Joined():
                return self._join(client)
            case Away():
                return self._away(client)
            case Left():
                return self._leave(client)
            case GivenUp(number=number, reason=reason):
                return self._give_up(client, number, reason)
            case Offered(upload=upload):
                return self._fold(client, upload)
            case Continued(swapped=swapped):
                return self._continue(client, swapped)
            case Scored(scores=scores):
                return self._score(client, scores)

    def _start(self, rounds: int) -> list[ServerAction]:
        self.rounds, self.up = rounds, self.time
        self.closed = self.closed and self.over
        self.since = dict.fromkeys(self.since, self.time)  # the clients could do nothing meanwhile
        return [said for client in [*self.server.members] for said in self._away(client)]

    def _enrol(self, record: Enrolled) -> list[ServerAction]:
        self._enrolling.discard(record.name)
        if record.name in self.names:
            return []
        client = len(self.names)
        self.names[record.name] = client
        self.roster.append(record.name)
        self.samples[client] = record.samples
        self.server.strategy.enrolled(client)
        self.tested.append(record.tested)
        said = [Send(record.name, Welcome(client, self.plan.run)), *self._join(client)]
        return [*said, Send(record.name, Finished(OVER))] if self.closed else said

    def _join(self, client: int) -> list[ServerAction]:
        self.revoked.discard(client)  # it was admitted again, or it would not be here
        if client in self.server.members:
            return []
        new = client not in self.server.known
        actions = self.server.join([client])
        event = events.Join if new and self.server.round else events.Return
        return [self._report(event, client), *self._act(actions)]

    def _away(self, client: int) -> list[ServerAction]:
        if client not in self.server.members:
            return []
        self.server.away(client)
        return [self._report(events.Leave, client)]

    def _leave(self, client: int) -> list[ServerAction]:
        if client in self.revoked:
            return []
        self.revoked.add(client)
        name, said, version = self.roster[client], self._away(client), self.server.version
        # Should it be back by now, admitted again, it was sent what is lost here.
        said += [Send(name, Decline(number, REVOKED)) for number in self._numbers(client)]
        number = self._forget(client) if client in self.outstanding else None
        actions = self.server.leave(client)
        if number is not None:
            said.append(self._report(events.Drop, client, number))
        return [*said, *self._act(actions), *self._examine_if_due(version)]

    def _give_up(self, client: int, number: int, reason: str) -> list[ServerAction]:
        if number not in self._numbers(client):  # something came in meanwhile
            return []
        if not reason and client in self.server.members:
            self.missed[client] = self.missed.get(client, 0) + 1
        return self._lose(client, reason or "it took too long; a fresh model may follow")

    def _lose(self, client: int, reason: str) -> list[ServerAction]:
        """Nothing comes of what the client trains, or offers."""
        name, version = self.roster[client], self.server.version
        declined = [Send(name, Decline(number, reason)) for number in self._numbers(client)]
        number, there = self._forget(client), client in self.server.members
        self.server.away(client)  # whatever the refill: others come first
        actions = self.server.lost(client)
        if there:
            actions += self.server.join([client])
        return [
            self._report(events.Drop, client, number),
            *declined,
            *self._act(actions),
            *self._examine_if_due(version),
        ]

    def _fold(self, client: int, upload: Upload) -> list[ServerAction]:
        name, number, version = self.roster[client], upload.number, self.server.version
        if self.folded.get(client) == number:
            return [Send(name, Acknowledge(number))]
        if number not in self._numbers(client):
            return [Send(name, Decline(number, LATE))]
        if self.over:
            return []
        update, stale = _update(client, upload), self.server.staleness(client, number)
        try:
            actions = self.server.receive(update)
        except Refused as refusal:  # by the strategy, which alone knows
            return self._lose(client, str(refusal))
        self._note(client, self.time - self.since[client])
        self._forget(client)
        self.folded[client] = number
        self.staleness[stale.rounds] += 1
        self._count("upload", update.nbytes)
        return [
            self._report(events.Upload, client, number, stale.rounds, stale.versions),
            Send(name, Acknowledge(number)),
            *self._act(actions),
            *self._examine_if_due(version),
        ]

    def _note(self, client: int, seconds: float) -> None:
        self.longest = max(self.longest, seconds)
        self.past[client] = [*self.past.get(client, ()), seconds][-PAST:]
        self.missed.pop(client, None)

    def _forget(self, client: int) -> int:
        """The client's training is over: the number of what it was sent last."""
        del self.since[client]
        self.hurried.discard(client)
        return self.outstanding.pop(client).number

    def _continue(self, client: int, swapped: Swapped) -> list[ServerAction]:
        if client not in self.outstanding:
            return []
        if swapped.step is None:
            return [self._report(events.Missed, client, swapped.number)]
        return [
            self._report(events.Restart, client, swapped.number, swapped.replaces, swapped.step)
        ]

    # -- exams ------------------------------------------------------------------------------------

    def _examine_if_due(self, version: int) -> list[ServerAction]:
        """Exams come with updates; of a synchronous method, when the cohort is complete."""
        server, every = self.server, self.plan.eval_every
        last = self.exams[-1].round if self.exams else 0
        due = server.round // every > last // every or (self.over and last < server.round)
        if not due or (server.refill == "cohort" and server.version == version and not self.over):
            return []
        return self._examine()

    def _examine(self) -> list[ServerAction]:
        adapt = bool(self.plan.adapt_epochs) and (self.over or self.plan.adapt_always)
        server, asked = self.server, [c for c in self.server.members if self.tested[c]]
        exam = Exam(
            len(self.exams),
            self.time,
            server.round,
            server.version,
            dict(self.messages),
            len(asked),
            adapt,
        )
        self.exams.append(exam)
        said: list[ServerAction] = []
        for client in asked:
            said.append(self._question(client, exam))
            self._count("exam", self.server.context.initial.nbytes)
        return said

    def _question(self, client: int, exam: Exam) -> Send:
        epochs = self.plan.adapt_epochs if exam.adapt else 0
        model = self.server.strategy.serve(client)
        return Send(self.roster[client], Examine(exam.number, model, epochs))

    def _score(self, client: int, scores: Scores) -> list[ServerAction]:
        exam = self.exams[scores.exam]
        if client in exam.handed:
            return []
        exam.handed[client] = scores.handed
        if scores.adapted is not None:
            exam.adapted[client] = scores.adapted
        return []

    def _close(self) -> list[ServerAction]:
        if self.closed or not self.over:  # written down twice, or before the run was extended
            return []
        self.closed = True
        return [Send(name, Finished(OVER)) for name in self.names]

    # -- what the server asks for -----------------------------------------------------------------

    def _act(self, actions: Sequence[Action]) -> list[ServerAction]:
        said: list[ServerAction] = []
        for action in actions:
            client = action.client
            if isinstance(action, Stop):
                self.hurried.add(client)
                said.append(self._report(events.Urgent, client, action.number))
                message: FromServer = Hurry(action.number)
            else:
                kind = "multicast" if action.preempt else "dispatch"
                if not action.preempt:
                    self.since[client] = self.time
                    self.trainings[client] += 1
                self.outstanding[client] = action
                self._count(kind, action.nbytes)
                event = events.Multicast if action.preempt else events.Dispatch
                said.append(self._report(event, client, action.number))
                if self.over:  # nobody trains any more; should the run be extended, it is here
                    continue
                message = Work(action)
            said.append(Send(self.roster[client], message))
        return said

    def _count(self, kind: str, size: int) -> None:
        self.messages[kind] += 1
        self.bytes[kind] += size

    def _report(
        self,
        kind: Callable[Concatenate[int, float, int, int, P], events.Event],
        *fields: P.args,
        **named: P.kwargs,
    ) -> Report:
        server = self.server
        event = kind(self.events, self.time, server.round, server.version, *fields, **named)
        self.events += 1
        return Report(event)

    # -- checkpoints ------------------------------------------------------------------------------

    def state_dict(self) -> State:
        """All that `apply` depends on; as it is, so save it before the node continues."""
        return {
            "server": self.server.state_dict(),
            "rounds": self.rounds,
            "names": list(self.roster),
            "samples": list(self.samples),
            "tested": list(self.tested),
            "folded": [list(pair) for pair in self.folded.items()],
            "outstanding": [dispatch_state(dispatch) for dispatch in self.outstanding.values()],
            "since": [list(pair) for pair in self.since.items()],
            "past": [list(pair) for pair in self.past.items()],
            "longest": self.longest,
            "missed": [list(pair) for pair in self.missed.items()],
            "hurried": sorted(self.hurried),
            "exams": [_spelled_exam(exam) for exam in self.exams],
            "closed": self.closed,
            "applied": self.applied,
            "events": self.events,
            "time": self.time,
            "up": self.up,
            "messages": dict(self.messages),
            "bytes": dict(self.bytes),
            "staleness": [list(pair) for pair in self.staleness.items()],
            "trainings": [list(pair) for pair in self.trainings.items()],
            "revoked": sorted(self.revoked),
        }

    def load_state_dict(self, state: State) -> None:
        """Continue from `state`; the node is new, with the settings of the one that was saved."""
        self.samples[:] = state["samples"]
        self.server.load_state_dict(state["server"])
        self.rounds, self.roster = state["rounds"], list(state["names"])
        self.names = {name: client for client, name in enumerate(self.roster)}
        self.tested = list(state["tested"])
        self.folded = dict(state["folded"])
        dispatches = [read_dispatch(found) for found in state["outstanding"]]
        self.outstanding = {dispatch.client: dispatch for dispatch in dispatches}
        self.since = dict(state["since"])
        self.past = {client: list(found) for client, found in state["past"]}
        self.longest, self.closed, self.up = state["longest"], state["closed"], state["up"]
        self.missed, self.hurried = dict(state["missed"]), set(state["hurried"])
        self.exams = [_read_exam(found) for found in state["exams"]]
        self.applied, self.events, self.time = state["applied"], state["events"], state["time"]
        self.messages, self.bytes = Counter(state["messages"]), Counter(state["bytes"])
        self.staleness = Counter(dict(state["staleness"]))
        self.trainings = Counter(dict(state.get("trainings", ())))
        self.revoked = set(state["revoked"])


def _update(client: int, upload: Upload) -> Update:
    return Update(client, upload.number, upload.vector, upload.samples, upload.extras)


def _spelled_exam(exam: Exam) -> State:
    found = {name: getattr(exam, name) for name in Exam.__dataclass_fields__}
    for name in ("handed", "adapted"):
        found[name] = [[client, dict(sums)] for client, sums in found[name].items()]
    return found


def _read_exam(found: State) -> Exam:
    return Exam(**{**found, "handed": dict(found["handed"]), "adapted": dict(found["adapted"])})
