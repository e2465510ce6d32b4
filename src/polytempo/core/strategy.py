"""The contract of a strategy: one algorithm's arithmetic and nothing else.

A strategy opens no socket, reads no clock, starts no thread and draws no global random number. It
is told of updates, and says what each client is to be handed. Whatever it must remember between
two updates is listed in `state`, so that every strategy can be saved and resumed.

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

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from polytempo.core.bank import PLAIN_STORAGE, FloatArray, Storage
from polytempo.core.messages import InFlight, Staleness, Update
from polytempo.core.registry import Options, Registry
from polytempo.core.rng import rng
from polytempo.core.task import Task

IntArray = NDArray[np.int64]
Refill = Literal["idle", "same", "cohort"]
Kind = Literal["server", "peers"]  # of engine: clients around a server, or peers among each other
State = dict[str, Any]  # nested, with string keys; tensors, numpy arrays and JSON values


@dataclass(frozen=True)
class Context:
    """What a strategy is told before the first update."""

    initial: Tensor  # the model that everybody starts from
    samples: Sequence[int]  # training samples of each client
    task: Task  # the local solver's settings, with a plain objective
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
    all_slots: ClassVar[bool] = False  # every client trains all the time, unless refill is set
    single_model: ClassVar[bool] = False  # everybody is handed the same model
    communicates: ClassVar[bool] = True  # False: nothing travels (local training alone)
    state: ClassVar[tuple[str, ...]] = ()  # attributes that change from update to update

    def setup(self, context: Context) -> None:
        """Prepare for a run. Called once, before anything else."""
        self.context = context

    def rounds_of_run(self, given: int, clients: int) -> int:
        """How many rounds a run has that was given so many."""
        return given

    def task(self, client: int) -> Task:
        """How the client is to train."""
        return self.context.task

    def model_for(self, client: int) -> Tensor:
        """The model that the client would be handed now. Never modified in place afterwards."""
        raise NotImplementedError

    def anchor_for(self, client: int) -> Tensor | None:
        """What is sent along for the objective of the client's task to refer to, if that is not
        the model that it receives."""
        return None

    def revision(self, client: int) -> int | None:
        """A number that changes whenever `model_for(client)` does; None: not known, so it is
        looked at anew."""
        return None

    def reply_to(self, client: int) -> Tensor:
        """The model with which a client is answered at once, right after its update was folded."""
        return self.model_for(client)

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

    def refresh(self, in_flight: Sequence[InFlight]) -> Sequence[int]:
        """Clients in training that are to be sent a fresh model now (multicast)."""
        return ()

    def urgent(self, in_flight: Sequence[InFlight]) -> Sequence[int]:
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


def _pack(value: Any) -> Any:
    return value.state_dict() if hasattr(value, "state_dict") else value


STRATEGIES: Registry[Strategy] = Registry("strategy", Strategy)
