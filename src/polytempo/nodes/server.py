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
5. A client that is not connected is *away*: it is sent nothing, and what it was training may still
   come; it keeps its slot from others for a short while only. A client that takes longer than its
   deadline (`deadlines.py`), or whose update is bad, loses its slot; what it then offers is
   declined, and it is free for a fresh model, after those that are idle. An update that comes after
   the last update stays with its client, unanswered: should the run be extended, it is offered
   again.
6. Evaluation is done by the clients (`exams.py`). The run is closed once those that are there have
   answered the last exam, or have been waited for long enough.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Concatenate, ParamSpec

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
from polytempo.core.strategy import State, copied
from polytempo.nodes.deadlines import Deadlines
from polytempo.nodes.exams import Exam, Exams
from polytempo.nodes.plan import FleetPlan
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
SLOW = "it took too long; a fresh model may follow"
GONE = "it was away too long; a fresh model may follow"


class ServerNode:
    """The protocol around one `Server`.

    `samples` is the list that the strategy's context has: a client's entry is set when it enrols.
    """

    def __init__(self, server: Server, samples: list[int], plan: FleetPlan) -> None:
        if server.context.samples is not samples:
            raise ValueError("the context of the strategy must have this very list of samples")
        self.server, self.samples, self.plan = server, samples, plan
        self.planned = 0  # updates that the run has: see `Started`
        self.names: dict[str, int] = {}  # of those that have enrolled
        self.roster: list[str] = []  # their names, by number
        self.folded: dict[int, int] = {}  # by client: its last dispatch that was folded
        self.outstanding: dict[int, Dispatch] = {}  # by client in training: what it was sent last
        self.deadlines = Deadlines(plan.patience)
        self.hurried: set[int] = set()  # of those in training
        self.exams = Exams(plan)
        self.closed = False
        self.applied = 0  # records
        self.events = 0
        self.time = 0.0  # of the last record
        self.up = 0.0  # when the server was started last
        self.messages = Counter(dispatch=0, upload=0, multicast=0, exam=0)
        self.bytes = Counter(self.messages)
        self.staleness: Counter[int] = Counter()
        self.shares: dict[int, tuple[int, int]] = {}  # by client: its updates, their staleness
        self.trainings: Counter[int] = Counter()  # by client: each has one upload at most
        self.revoked: set[int] = set()
        # Not saved: who is connected now, and the names of those that are about to enrol.
        self.here: set[str] = set()
        self._enrolling: set[str] = set()

    # -- what is there -------------------------------------------------------------------------

    @property
    def updates(self) -> int:
        return self.server.updates

    @property
    def over(self) -> bool:
        """Whether all updates are folded; `closed` once the last exam is in, too."""
        return self.server.updates >= self.planned

    @property
    def _ending(self) -> bool:
        """The same, for what is told now: it counts after `Started`, which may extend the run."""
        return self.server.updates >= self.plan.updates

    @property
    def gathering(self) -> bool:
        """Whether too few clients are there for the run to begin."""
        return not self.server.dispatches and len(self.server.members) < self.server.wait_for

    # -- what happens: nothing that lasts is changed here ----------------------------------------

    def started(self, now: float) -> list[ServerAction]:
        """The server is up (again): nobody is connected yet."""
        self.here.clear()
        return [Write(Started(now, self.plan.updates, self.plan.wait_for))]

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
        if self._ending and self.exams and self.exams.awaited(client):
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
                fits = self.exams.fits(client, message)
                return [Write(Scored(now, name, message))] if fits else []
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
        members, deadlines = self.server.members, self.deadlines
        if self._ending:
            complete = not self.closed and self.exams.complete(now, self.up, members)
            return [Write(Closed(now))] if complete else []
        late = dict.fromkeys(deadlines.late(now), False)
        if self.server.idle:  # others could have the slot of one that is gone
            absent = [client for client in deadlines.since if client not in members]
            late |= {client: True for client in absent if deadlines.gone(client, now)}
        return [
            Write(GivenUp(now, self.roster[client], self._numbers(client)[0], away=away))
            for client, away in late.items()
        ]

    # -- records: what changes the state ----------------------------------------------------------

    def apply(self, record: AnyRecord) -> list[ServerAction]:
        """Let it count. Records come in the order in which they were written; the same records give
        the same state, bit for bit."""
        self.applied += 1
        self.time = max(self.time, record.time)
        match record:
            case Started():
                return self._start(record)
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
            case GivenUp():
                return self._give_up(client, record)
            case Offered(upload=upload):
                return self._fold(client, upload)
            case Continued(swapped=swapped):
                return self._continue(client, swapped)
            case Scored(scores=scores):
                self.exams.add(client, scores)
                return []

    def _start(self, record: Started) -> list[ServerAction]:
        self.planned, self.up = record.updates, self.time
        self.server.wait_for = record.wait_for
        self.closed = self.closed and self.over
        self.deadlines.restart(self.time)
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
        self.exams.tested.append(record.tested)
        said = [Send(record.name, Welcome(client, self.plan.run)), *self._join(client)]
        return [*said, Send(record.name, Finished(OVER))] if self.closed else said

    def _join(self, client: int) -> list[ServerAction]:
        self.revoked.discard(client)  # it was admitted again, or it would not be here
        if client in self.server.members:
            return []
        new = client not in self.server.known
        actions = self.server.join([client])
        event = events.Join if new and self.server.updates else events.Return
        return [self._report(event, client), *self._act(actions)]

    def _away(self, client: int) -> list[ServerAction]:
        if client not in self.server.members:
            return []
        self.server.away(client)
        self.deadlines.away(client, self.time)
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

    def _give_up(self, client: int, record: GivenUp) -> list[ServerAction]:
        there = client in self.server.members
        if record.number not in self._numbers(client) or (record.away and there):
            return []  # something came in meanwhile, or it is back
        if there and not record.reason:
            self.deadlines.miss(client)
        return self._lose(client, record.reason or (GONE if record.away else SLOW))

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
        self.deadlines.folded(client, self.time)
        self._forget(client)
        self.folded[client] = number
        self.staleness[stale.updates] += 1
        updates, staleness = self.shares.get(client, (0, 0))
        self.shares[client] = updates + 1, staleness + stale.updates
        self._count("upload", update.nbytes)
        return [
            self._report(events.Upload, client, number, stale.updates, stale.versions),
            Send(name, Acknowledge(number)),
            *self._act(actions),
            *self._examine_if_due(version),
        ]

    def _forget(self, client: int) -> int:
        """The client's training is over: the number of what it was sent last."""
        self.deadlines.end(client)
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
        server = self.server
        complete = server.refill != "cohort" or server.version != version or self.over
        return self._examine() if complete and self.exams.due(server.updates, self.over) else []

    def _examine(self) -> list[ServerAction]:
        server, tested = self.server, self.exams.tested
        asked = [client for client in server.members if tested[client]]
        exam = self.exams.begin(
            self.time, server.updates, server.version, self.messages, len(asked), self.over
        )
        said: list[ServerAction] = []
        for client in asked:
            said.append(self._question(client, exam))
            self._count("exam", server.context.initial.nbytes)
        return said

    def _question(self, client: int, exam: Exam) -> Send:
        epochs = self.plan.adapt_epochs if exam.adapt else 0
        model = self.server.strategy.serve(client)
        return Send(self.roster[client], Examine(exam.number, model, epochs))

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
                    self.deadlines.begin(client, self.time)
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
        event = kind(self.events, self.time, server.updates, server.version, *fields, **named)
        self.events += 1
        return Report(event)

    # -- checkpoints ------------------------------------------------------------------------------

    def state_dict(self) -> State:
        """All that `apply` depends on; as it is, so save it before the node continues (or take a
        `snapshot`)."""
        return {
            "server": self.server.state_dict(),
            "planned": self.planned,
            "names": list(self.roster),
            "samples": list(self.samples),
            "wait_for": self.server.wait_for,
            "tested": list(self.exams.tested),
            "folded": [list(pair) for pair in self.folded.items()],
            "outstanding": [dispatch_state(dispatch) for dispatch in self.outstanding.values()],
            "deadlines": self.deadlines.state(),
            "hurried": sorted(self.hurried),
            "exams": self.exams.state(),
            "closed": self.closed,
            "applied": self.applied,
            "events": self.events,
            "time": self.time,
            "up": self.up,
            "messages": dict(self.messages),
            "bytes": dict(self.bytes),
            "staleness": [list(pair) for pair in self.staleness.items()],
            "shares": [[client, *share] for client, share in self.shares.items()],
            "trainings": [list(pair) for pair in self.trainings.items()],
            "revoked": sorted(self.revoked),
        }

    def snapshot(self) -> State:
        """The state as it is now, to be saved later, perhaps by another thread, while the node
        continues. What is copied is the strategy's: the rest was listed just now, and vectors that
        were sent are never modified in place."""
        state = self.state_dict()
        state["server"]["strategy"] = copied(state["server"]["strategy"])
        return state

    def load_state_dict(self, state: State) -> None:
        """Continue from `state`; the node is new, with the settings of the one that was saved."""
        self.samples[:] = state["samples"]
        self.server.load_state_dict(state["server"])
        self.planned, self.roster = state["planned"], list(state["names"])
        self.names = {name: client for client, name in enumerate(self.roster)}
        self.folded = dict(state["folded"])
        dispatches = [read_dispatch(found) for found in state["outstanding"]]
        self.outstanding = {dispatch.client: dispatch for dispatch in dispatches}
        self.server.wait_for = state["wait_for"]
        self.deadlines.load(state["deadlines"])
        self.exams.load(state["exams"], state["tested"])
        self.closed, self.up, self.hurried = state["closed"], state["up"], set(state["hurried"])
        self.applied, self.events, self.time = state["applied"], state["events"], state["time"]
        self.messages, self.bytes = Counter(state["messages"]), Counter(state["bytes"])
        self.staleness = Counter(dict(state["staleness"]))
        self.shares = {client: (count, stale) for client, count, stale in state.get("shares", ())}
        self.trainings = Counter(dict(state.get("trainings", ())))
        self.revoked = set(state["revoked"])


def _update(client: int, upload: Upload) -> Update:
    return Update(client, upload.number, upload.vector, upload.samples, upload.extras)
