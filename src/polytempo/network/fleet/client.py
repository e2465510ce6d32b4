"""A client of a fleet on the network: a thin driver of `ClientNode` and of a `Trainer`.

Theory of operation
-------------------
1. Two threads: the line to the server (`line.py`), and the one that calls `run`, which trains. It
   trains in slices of a few steps and looks into its inbox between two slices, so that a model that
   is pushed, or a request to hurry, takes effect between two steps.
2. The network needs the interpreter for a moment now and then: a trainer that holds on to it (a
   long loop in plain Python within one step) delays what is pushed until the step is over.
3. What the node wants saved is on disk before anything else is done.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from queue import Empty
from typing import Any, Protocol

from torch import Tensor

from polytempo.core.errors import PolytempoError
from polytempo.core.messages import Dispatch
from polytempo.files import Claim
from polytempo.network.fleet.limits import Keepalive
from polytempo.network.fleet.line import Down, Final, Heard, Line, Ready
from polytempo.network.session import Certificates
from polytempo.nodes.client import ClientNode, Memory
from polytempo.nodes.star import (
    Abandon,
    Acknowledge,
    Assess,
    Begin,
    ClientAction,
    Decline,
    End,
    Examine,
    FromServer,
    Save,
    Say,
    Shorten,
    Sums,
    Swap,
    Welcome,
)
from polytempo.storage import load_state, save_state

STATE = "client.safetensors"
SLICE = 0.02  # seconds of training between two looks into the inbox, if a step takes no longer
NAP = 0.1
GIVE_UP = 3_600.0  # seconds without a server
DEFAULT_KEEPALIVE = Keepalive(5_000)  # a server that is gone is noticed within 15 s


class Unreachable(PolytempoError):
    """No server for too long."""


class Training(Protocol):
    """One local training under way."""

    def advance(self, steps: int) -> bool:
        """Take at most so many steps; whether the training has come to its end."""
        ...

    def swap(self, dispatch: Dispatch) -> int | None:
        """Continue from this model: the step from which on it is trained (None: too late)."""
        ...

    def shorten(self) -> None:
        """End with the epoch in progress."""
        ...

    def finish(self) -> tuple[Tensor, Memory, Memory]:
        """What is uploaded (vector, extras), and what the client will remember."""
        ...


class Trainer(Protocol):
    """What a client does with its own data. Only ever called from the thread of `run`."""

    def welcome(self, run: Mapping[str, Any]) -> None:
        """What the server says of the run, after each connection; `PolytempoError` if this trainer
        cannot take part."""
        ...

    def begin(self, dispatch: Dispatch, client: int, memory: Memory) -> Training:
        """Start to train; no step is taken yet."""
        ...

    def examine(self, examine: Examine, client: int, memory: Memory) -> tuple[Sums, Sums | None]:
        """Sums over the test data, as handed and (with `adapt_epochs`) adapted. It may come in the
        middle of a training."""
        ...

    def keep(self, params: Tensor, memory: Memory) -> None:
        """The model that the client is handed: keep it (`model.safetensors` in its folder)."""
        ...


class FleetClient:
    """`node` is new; what the folder holds of an earlier process is loaded into it by `run`.

    `name`: for a server without certificates. `watch` is told what happens, as a dictionary with
    the key "event". `pause`: seconds to sleep after each step (a slow device). `give_up_after`:
    seconds without a server after which it tries no longer; what it trains it finishes first.
    """

    def __init__(
        self,
        node: ClientNode,
        trainer: Trainer,
        folder: Path,
        connect: str,
        *,
        certificates: Certificates | None = None,
        name: str | None = None,
        watch: Callable[[dict[str, Any]], None] = lambda event: None,
        pause: float = 0.0,
        keepalive: Keepalive = DEFAULT_KEEPALIVE,
        give_up_after: float = GIVE_UP,
    ) -> None:
        self.node, self.trainer, self.folder, self.connect = node, trainer, folder, connect
        self._certificates, self._name = certificates, name
        self._watch, self._pause, self._keepalive = watch, pause, keepalive
        self._patience = give_up_after
        self._alone: float | None = 0.0  # since when there is no server; None: there is one
        self._training: Training | None = None
        self._began = self._resume = 0.0  # when the training began, when its next step may be taken
        self._steps = 1  # of a slice
        self._connection = 0
        self._ended: str | None = None

    def run(self, interrupted: threading.Event) -> str | None:
        """Until the run is over (why), or interrupted (None). It reconnects, and gives up after a
        while: `Unreachable`. A refusal by the server, or a wrong certificate, is a
        `PolytempoError`."""
        with Claim(self.folder):
            path = self.folder / STATE
            if path.exists():
                self.node.load_state_dict(load_state(path))
            self._alone = time.monotonic()
            self._line = Line(self.connect, self._certificates, self._name, self._keepalive)
            try:
                while self._ended is None and not interrupted.is_set():
                    self._step()
            finally:
                self._line.close()
        return self._ended

    def _step(self) -> None:
        """Deal with what has come, then train a little."""
        wait = NAP
        if self._training is not None:
            wait = min(NAP, max(0.0, self._resume - time.monotonic()))
        try:
            self._hear(
                self._line.inbox.get(timeout=wait) if wait else self._line.inbox.get_nowait()
            )
            while self._ended is None:
                self._hear(self._line.inbox.get_nowait())
        except Empty:
            pass
        if self._ended is None and self._training and time.monotonic() >= self._resume:
            self._train(self._training)

    # -- what comes from the network -----------------------------------------------------------

    def _hear(self, item: Ready | Heard | Down | Final) -> None:
        match item:
            case Ready(connection=connection):
                self._connection = connection
                self._act(self.node.connected())
            case Heard(connection=connection, message=message):
                if connection == self._connection:
                    self._alone = None
                    self._told(message)
            case Down(reason=reason):
                self._tell("disconnected", reason=reason)
                self._missed(reason)
            case Final(reason=reason):
                raise PolytempoError(f"the server {self.connect} refuses this client: {reason}")

    def _missed(self, reason: str) -> None:
        """An attempt has failed, or a connection has ended."""
        if self._alone is None:
            self._alone = time.monotonic()
        waited = time.monotonic() - self._alone
        if waited >= self._patience and self._training is None:
            kept = "" if self.node.pending is None else "; its last update is kept in its folder"
            raise Unreachable(
                f"no server at {self.connect} for {waited:.0f} s ({reason}): the run may be over, "
                f"or the server down{kept}. Once it is back, the same command resumes; to wait "
                "longer: --give-up-after SECONDS, or none"
            )

    def _told(self, message: FromServer) -> None:
        known = self.node.run
        actions = self.node.received(message)
        match message:
            case Welcome(client=client, run=run):
                self.trainer.welcome(run)
                if run != known:
                    self._save()  # from now on the folder belongs to this run
                self._tell("connected", client=client)
            case Acknowledge(number=number):
                self._tell("acknowledged", dispatch=number)
            case Decline(number=number, reason=reason):
                self._tell("declined", dispatch=number, reason=reason)
        self._act(actions)

    # -- what the node asks for ------------------------------------------------------------------

    def _act(self, actions: Sequence[ClientAction]) -> None:
        for action in actions:
            match action:
                case Say(message=message):
                    self._line.say(self._connection, [message])
                case Save():
                    self._save()
                case Begin(dispatch=dispatch):
                    self._begin(dispatch)
                case Swap(dispatch=dispatch):
                    self._swap(dispatch)
                case Shorten():
                    if self._training is not None:
                        self._training.shorten()
                        self._tell("hurried", dispatch=self.node.training)
                case Abandon():
                    self._training = None
                    self._tell("abandoned")
                case Assess(examine=examine):
                    self._examine(examine)
                case End(reason=reason):
                    self._tell("finished", reason=reason)
                    self._ended = reason

    def _save(self) -> None:
        save_state(self.folder / STATE, self.node.state_dict())

    @property
    def _client(self) -> int:
        assert self.node.client is not None, "work comes after the welcome"
        return self.node.client

    def _begin(self, dispatch: Dispatch) -> None:
        self._tell("begun", dispatch=dispatch.number)
        self._training = self.trainer.begin(dispatch, self._client, self.node.memory)
        self._began, self._resume, self._steps = time.monotonic(), 0.0, 1

    def _swap(self, dispatch: Dispatch) -> None:
        replaces = self.node.training
        assert replaces is not None, "the node swaps only in training"
        step = None if self._training is None else self._training.swap(dispatch)
        self._tell("swapped", dispatch=dispatch.number, replaces=replaces, step=step)
        self._act(self.node.swapped(dispatch.number, replaces, step))

    def _train(self, training: Training) -> None:
        begin = time.monotonic()
        finished = training.advance(1 if self._pause else self._steps)
        took = time.monotonic() - begin
        if self._pause:
            self._resume = begin + took + self._pause
        elif took < SLICE / 2:
            self._steps *= 2
        elif took > SLICE:
            self._steps = max(1, self._steps // 2)
        if finished:
            number = self.node.training
            assert number is not None, "the node knows of its training"
            vector, extras, memory = training.finish()
            self._training = None
            seconds = time.monotonic() - self._began
            self._tell("trained", dispatch=number, seconds=round(seconds, 4))
            self._act(self.node.trained(number, vector, extras, memory, seconds))

    def _examine(self, examine: Examine) -> None:
        handed, adapted = self.trainer.examine(examine, self._client, self.node.memory)
        self.trainer.keep(examine.params, self.node.memory)
        self._tell("examined", exam=examine.exam, handed=dict(handed))
        self._act(self.node.tested(examine.exam, handed, adapted))

    def _tell(self, event: str, **what: Any) -> None:
        self._watch({"time": round(time.time(), 4), "event": event, **what})
