"""A client of a fleet: it trains what it is sent, and offers what has come of it until somebody has
it safely.

Theory of operation
-------------------
1. The node has no I/O. A driver tells it what happens (`connected`, `received`, `trained`,
   `swapped`, `tested`), and carries out the actions that it returns, in their order.
2. A client does one of three things: nothing, training, or offering an update. What it remembers of
   earlier trainings (its own part of the model, the moments of its optimiser) is as it was before
   the training until the update is acknowledged: an update that is declined leaves no trace.
3. `Save` comes before the update is offered, so that one that the server has seen is never trained
   again with another outcome; and after it was acknowledged, before anything else is begun.
4. The newest work wins: a model to train that arrives during a training means that the server has
   given that training up. A multicast is swapped in at the next step; if there is no training it
   was missed. Then either that training is over, or the model that it was to begin with was never
   sent, because the multicast is newer: the server knows, and sends it again as work.
5. Messages on one connection come in order, but a small one may overtake a large one: a model or an
   update. So a request to hurry may come before the model that it is about; and if what is
   declined comes later, it is not begun.
6. What a client remembers and offers belongs to one run, that of the first welcome.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from torch import Tensor

from polytempo.core.errors import PolytempoError
from polytempo.core.messages import Dispatch
from polytempo.core.strategy import State
from polytempo.nodes.star import (
    PROTOCOL,
    Abandon,
    Acknowledge,
    Assess,
    Begin,
    ClientAction,
    Decline,
    End,
    Examine,
    Finished,
    FromServer,
    Hello,
    Hurry,
    Save,
    Say,
    Scores,
    Shorten,
    Sums,
    Swap,
    Swapped,
    Upload,
    Welcome,
    Work,
)

Memory = Mapping[str, Tensor]


class ClientNode:
    """The protocol around one client's training.

    `memory`: what the client remembers, as its next training finds it. `training`: the number of
    the dispatch that it trains. `pending`: the update that it offers, and `kept`: what it will
    remember once that is acknowledged.
    """

    def __init__(self, model: str, problem: str, samples: int, tested: int) -> None:
        self.model, self.problem = model, problem
        self.samples, self.test_samples = samples, tested
        self.client: int | None = None  # the number that the server has given it
        self.run: Mapping[str, Any] = {}
        self.memory: Memory = {}
        self.training: int | None = None
        self.pending: Upload | None = None
        self.kept: Memory = {}
        self.acknowledged = 0
        # Not saved: whether the server has answered the hello of this connection, and what was
        # declined since; the last multicast that was handed to this training; the last number that
        # was to hurry.
        self.welcomed = False
        self.declined = -1
        self.pushed: int | None = None
        self.hurried = -1

    # -- the connection ---------------------------------------------------------------------------

    def connected(self) -> list[ClientAction]:
        """There is a connection: say hello. What is offered follows the welcome."""
        self.welcomed, self.declined = False, -1
        offering = None if self.pending is None else self.pending.number
        hello = Hello(
            PROTOCOL,
            self.model,
            self.problem,
            self.samples,
            self.test_samples,
            self.training,
            offering,
        )
        return [Say(hello)]

    def received(self, message: FromServer) -> list[ClientAction]:
        """The server says something. `PolytempoError` if it conducts another run than the one that
        this client belongs to."""
        match message:
            case Welcome():
                return self._welcome(message)
            case Work(dispatch=dispatch):
                return self._work(dispatch)
            case Hurry(number=number):
                self.hurried = number
                training = self.training
                return [Shorten()] if training is not None and training <= number else []
            case Acknowledge(number=number):
                if self.pending is None or self.pending.number != number:
                    return []
                self.memory, self.pending, self.kept = self.kept, None, {}
                self.acknowledged += 1
                return [Save()]
            case Decline(number=number):
                return self._declined(number)
            case Examine():
                return [Assess(message)]
            case Finished(reason=reason):
                stop: list[ClientAction] = [] if self.training is None else [Abandon()]
                self.training = None
                return [*stop, End(reason)]

    def _welcome(self, welcome: Welcome) -> list[ClientAction]:
        ours, theirs = self.run.get("id"), welcome.run.get("id")
        if ours is not None and ours != theirs:
            raise PolytempoError(
                f"this client belongs to run {ours}, and the server conducts run {theirs}: connect "
                "to the other server, or give the client another folder (--out)"
            )
        self.welcomed = True
        self.client, self.run = welcome.client, welcome.run
        return [] if self.pending is None else [Say(self.pending)]

    def _work(self, dispatch: Dispatch) -> list[ClientAction]:
        number = dispatch.number
        if number <= self.declined:
            return []
        if dispatch.preempt:
            if number == self.pushed:  # said again on a new connection
                return []
            if self.training is None:
                held = number if self.pending is None else self.pending.number
                return [Say(Swapped(number, held, None))]
            self.pushed = number
            return [Swap(dispatch)]
        if number == self.training:  # it was sent again
            return []
        dropped: list[ClientAction] = []
        if self.pending is not None:  # the server does not want it, or it would not ask
            self.pending, self.kept = None, {}
            dropped.append(Save())
        self.training, self.pushed = number, None
        hurry = [Shorten()] if number <= self.hurried else []
        return [*dropped, Begin(replace(dispatch, preempt=False)), *hurry]

    def _declined(self, number: int) -> list[ClientAction]:
        self.declined = max(self.declined, number)
        if self.pending is not None and self.pending.number == number:
            self.pending, self.kept = None, {}
            return [Save()]
        if self.training == number:
            self.training = None
            return [Abandon()]
        return []

    # -- training ---------------------------------------------------------------------------------

    def swapped(self, number: int, replaces: int, step: int | None) -> list[ClientAction]:
        """A multicast was swapped in at that step, or (None) came too late for the training of
        dispatch `replaces`."""
        if step is not None and self.training == replaces:
            self.training = number
        return [Say(Swapped(number, replaces, step))]

    def trained(
        self, number: int, vector: Tensor, extras: Memory, memory: Memory, seconds: float
    ) -> list[ClientAction]:
        """The training of that dispatch has come to its end. (If it was abandoned meanwhile,
        nothing comes of it.)"""
        if self.training != number:
            return []
        self.training = None
        self.pending = Upload(number, vector, self.samples, extras, seconds)
        self.kept = memory
        return [Save(), *([Say(self.pending)] if self.welcomed else [])]  # else after the welcome

    def tested(self, exam: int, handed: Sums, adapted: Sums | None) -> list[ClientAction]:
        """The model of that exam was examined."""
        return [Say(Scores(exam, handed, adapted))]

    # -- what is saved ----------------------------------------------------------------------------

    def state_dict(self) -> State:
        """What outlives the process."""
        state: State = {
            "run": dict(self.run),
            "client": self.client,
            "memory": dict(self.memory),
            "pending": None,
        }
        if (pending := self.pending) is not None:
            state["pending"] = {
                "number": pending.number,
                "vector": pending.vector,
                "samples": pending.samples,
                "extras": dict(pending.extras),
                "seconds": pending.seconds,
                "kept": dict(self.kept),
            }
        return state

    def load_state_dict(self, state: State) -> None:
        """Continue from `state`: the training that was under way, if any, is lost."""
        self.run, self.client, self.memory = state["run"], state["client"], dict(state["memory"])
        self.training, self.pending, self.kept = None, None, {}
        if state["pending"] is not None:
            found = dict(state["pending"])
            self.kept = found.pop("kept")
            self.pending = Upload(**found)
