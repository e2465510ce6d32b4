"""The contract of a strategy: one algorithm's arithmetic and nothing else.

A strategy opens no socket, reads no clock, starts no thread and draws no global random number.
Whatever it must remember between two updates is listed in `state`, so that every strategy can be
saved and resumed. It has two short lists of hooks:

Notifications say what has happened, and may change it.
    setup(context)          once, before anything else
    enrolled(client)        in a fleet: its number of samples is known from now on
    fold(update, staleness) an update is in
    lost(client)            what the client was training will never come
    left(client)            the client is gone
    close_cohort()          a synchronous round is complete
    training(in_flight)     after each of these: who is in training now, before others are started
    dispatched(dispatch)    a model was sent, multicasts included

Queries are pure: asked once, often or never, they change nothing.
    model_for(client)       what it is sent to train
    serve(client)           what it would use: evaluated, adapted, handed to the user
    reply_to(client)        what it is sent right after its update
    task(client)            how it is to train
    vectors_for(client)     what else it is sent
    refresh(in_flight), urgent(in_flight)    whom to send a fresh model, whom to hurry
    revision(client), collaboration(), clusters(), similarity()    for evaluation and plots

To add one, write a class like this and register it:

    @STRATEGIES.register("mine")
    class Mine(Strategy):
        '''One line on what it is.'''

        mixing: float = 0.5                  # an option: `--strategy mine:mixing=0.3`
        state: ClassVar = ("model",)

        def setup(self, context: Context) -> None:
            super().setup(context)
            self.model = context.initial

        def model_for(self, client: int) -> Tensor:
            return self.model

        def fold(self, update: Update, staleness: Staleness) -> bool:
            self.model = torch.lerp(self.model, update.vector, self.mixing)
            return True
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from polytempo.core.bank import PLAIN_STORAGE, FloatArray, Storage
from polytempo.core.errors import PolytempoError
from polytempo.core.messages import Dispatch, InFlights, Staleness, Update
from polytempo.core.registry import Options, Registry
from polytempo.core.rng import rng
from polytempo.core.task import Task

IntArray = NDArray[np.int64]
Refill = Literal["idle", "same", "cohort"]
# Of engine: clients around a server, peers among each other, or what both are compared with.
Kind = Literal["server", "peers", "reference"]
State = dict[str, Any]  # nested, with string keys; tensors, numpy arrays and JSON values


def copied(part: Any) -> Any:
    """A copy of a state, or of a part of it, that changes no more."""
    match part:
        case Tensor():
            return part.detach().clone(memory_format=torch.contiguous_format)
        case np.ndarray():
            return part.copy()
        case dict():
            return {key: copied(value) for key, value in part.items()}
        case list() | tuple():
            return [copied(value) for value in part]
    return part


@dataclass(frozen=True)
class Context:
    """What a strategy is told before the first update."""

    initial: Tensor  # the model that everybody starts from
    samples: Sequence[int]  # training samples of each client
    task: Task  # the local solver's settings, with a plain objective and the rate before a schedule
    seed: int
    storage: Storage = PLAIN_STORAGE  # how a model per client is kept
    tensors: Sequence[int] = ()  # how long the trained tensors are that a model begins with

    @property
    def clients(self) -> int:
        return len(self.samples)

    def shares(self) -> FloatArray:
        """p: relative sample sizes over all clients."""
        sizes = np.asarray(self.samples, dtype=np.float64)
        return np.asarray(sizes / sizes.sum(), dtype=np.float64)

    def another_initial(self, number: int) -> Tensor:
        """The initial model as it might have been drawn another time: numbers change places within
        each trained tensor, so that every layer keeps its scale and nothing else is shared. (If it
        is not known where tensors end, within the whole model.)"""
        stream = rng(self.seed, "initial", number)
        model = self.initial.clone()
        begin = 0
        for length in self.tensors or [len(model)]:
            order = torch.from_numpy(stream.permutation(length)) + begin
            model[begin : begin + length] = self.initial[order]
            begin += length
        return model


class Strategy(Options):
    """Base of all strategies. Override `setup`, `model_for`, `fold`; the rest has defaults."""

    name: ClassVar[str]
    family: ClassVar[str] = "own"
    paper: ClassVar[str] = ""
    engine: ClassVar[Kind] = "server"  # what it runs on
    refill: ClassVar[Refill] = "idle"  # who is started when a slot falls free, unless overridden
    all_train: ClassVar[bool] = False  # every client trains all the time, unless refill is set
    single_model: ClassVar[bool] = False  # everybody is handed the same model
    personal: ClassVar[tuple[str, ...]] = ()  # what stays with its client, unless a run says more
    to_fine_tune: ClassVar[bool] = False  # what is served is for clients to fine-tune, not to use
    communicates: ClassVar[bool] = True  # False: nothing travels (local training alone)
    state: ClassVar[tuple[str, ...]] = ()  # attributes that change from update to update

    # -- notifications -------------------------------------------------------------------------

    def setup(self, context: Context) -> None:
        """Prepare for a run. Called once, before anything else."""
        self.context = context

    def enrolled(self, client: int) -> None:
        """The client, unknown before, has enrolled in a fleet: `context.samples` has its number of
        samples from now on. (In a simulation all are known from the beginning.)"""

    def updates_of_run(self, given: int, clients: int) -> int:
        """How many updates a run has if this many were asked for."""
        return given

    def fold(self, update: Update, staleness: Staleness) -> bool:
        """Take an update in. Returns whether what is served has changed (a new version)."""
        raise NotImplementedError

    def lost(self, client: int) -> None:
        """What the client was training will never come; it may be handed a model again."""

    def left(self, client: int) -> None:
        """The client is gone, with what it may have been training. It counts as gone until it is
        handed a model again, which need not happen."""
        self.lost(client)

    def close_cohort(self) -> bool:
        """All clients of a synchronous round have answered or are lost. Returns as `fold` does."""
        return False

    def training(self, in_flight: InFlights) -> None:
        """An update was folded or lost, or a client has left: these are in training now, before
        anybody else is started."""

    def dispatched(self, dispatch: Dispatch) -> None:
        """This was sent (with `preempt`, to a client that is in training already)."""

    # -- queries: pure -------------------------------------------------------------------------

    def model_for(self, client: int) -> Tensor:
        """What the client would be sent to train now. Never modified in place afterwards."""
        raise NotImplementedError

    def serve(self, client: int) -> Tensor:
        """What the client would use now: the model that is evaluated and adapted. It differs from
        `model_for` in methods that train one model and serve another, such as its moving average.
        With `single_model`, one object for all as long as it does not change."""
        return self.model_for(client)

    def reply_to(self, client: int) -> Tensor:
        """The model with which a client is answered at once, right after its update was folded."""
        return self.model_for(client)

    def task(self, client: int) -> Task:
        """How the client is to train. (The schedule of the run changes the learning rate of what is
        sent: an update's own `task` has the one that its client used.)"""
        return self.context.task

    def vectors_for(self, client: int) -> Mapping[str, Tensor]:
        """What else the client is sent, by name (`Dispatch.vectors`). Never modified in place
        afterwards."""
        return {}

    def revision(self, client: int) -> int | None:
        """A number that changes whenever `serve(client)` does; None: not known, so it is looked at
        again."""
        return None

    def refresh(self, in_flight: InFlights) -> Sequence[int]:
        """Clients in training that are to be sent a fresh model now (multicast)."""
        return ()

    def urgent(self, in_flight: InFlights) -> Sequence[int]:
        """Clients in training that are to stop at their next epoch boundary and report."""
        return ()

    def collaboration(self) -> FloatArray | None:
        """W[i, j]: how much client i learns from client j, where the method has such a graph."""
        return None

    def clusters(self) -> IntArray | None:
        """The number of each client's cluster, where the method has clusters; -1: in none yet."""
        return None

    def similarity(self) -> FloatArray | None:
        """S[i, j]: how alike clients i and j are, where the method measures it; NaN: not known."""
        return None

    # -- checkpoints ---------------------------------------------------------------------------

    def state_dict(self) -> State:
        """What must be remembered: tensors, arrays, JSON values, and objects with a state."""
        return {key: _pack(getattr(self, key)) for key in self.state}

    def load_state_dict(self, state: State) -> None:
        """Continue from `state`; `setup` has been called with the same context."""
        for key in self.state:
            current = getattr(self, key)
            if hasattr(current, "load_state_dict"):
                current.load_state_dict(state[key])
            else:
                setattr(self, key, state[key])


def as_model(strategy: Strategy, hook: str, model: object, like: Tensor) -> Tensor:
    """The model that a hook of the strategy has returned; it must be a vector like all others."""
    if isinstance(model, Tensor) and model.shape == like.shape:
        return model
    found = f"a tensor of {list(model.shape)}" if isinstance(model, Tensor) else repr(model)
    raise PolytempoError(
        f"{type(strategy).__qualname__}.{hook} returned {found}; return the model as one vector of "
        f"shape {list(like.shape)}, like context.initial"
    )


def prepared(strategy: Strategy) -> None:
    """What `setup` must have done."""
    name = type(strategy).__qualname__
    if not hasattr(strategy, "context"):
        raise PolytempoError(f"{name}.setup must call super().setup(context)")
    for key in strategy.state:
        if not hasattr(strategy, key):
            raise PolytempoError(
                f"the `state` of {name} names {key!r}, which it does not have; set it in `setup`, "
                "or correct the name"
            )


def _pack(value: Any) -> Any:
    return value.state_dict() if hasattr(value, "state_dict") else value


STRATEGIES: Registry[Strategy] = Registry("strategy", Strategy)
