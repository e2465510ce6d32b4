"""`--check`: would a strategy resume as it was? Tried out while it runs.

Whatever a strategy must remember is listed in its `state`. An attribute that is missing there has
its initial value after a restart, and the run silently continues wrongly. So, before
each message of the first updates (and of one in many later on), the server is saved and restored
into a *twin* with a fresh strategy, which gets the same message. Both must answer and serve the
same, bit for bit. Since it is done again before each message, a difference shows as soon as what
was forgotten has an effect. The state comes back as it would from a file, so that what a checkpoint
cannot hold is found as well.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from polytempo.core.errors import PolytempoError
from polytempo.core.messages import Action, Dispatch, Update
from polytempo.core.server import Server
from polytempo.core.strategy import Strategy
from polytempo.storage import restored

FIRST, EVERY = 32, 64  # messages of the first 32 updates are tried out, then of one in 64
CLIENTS = 50  # number of clients whose served model is compared
T = TypeVar("T")


class RehearsedServer(Server):
    """A server that tries out before each message whether it could be resumed there."""

    def join(self, clients: Iterable[int]) -> list[Action]:
        return self._both(Server.join, sorted(clients))

    def leave(self, client: int) -> list[Action]:
        return self._both(Server.leave, client)

    def lost(self, client: int) -> list[Action]:
        return self._both(Server.lost, client)

    def receive(self, update: Update) -> list[Action]:
        return self._both(Server.receive, update)

    def _both(self, act: Callable[[Server, T], list[Action]], what: T) -> list[Action]:
        if self.updates >= FIRST and self.updates % EVERY:
            return act(self, what)
        twin, updates = self._twin(), self.updates
        self._ask_twice()
        forgotten = _differing(self.strategy, twin.strategy)
        wrong, cause = _unlike_now(self, twin), None
        if wrong is None:
            actions = act(self, what)
            try:
                theirs = act(twin, what)
            except Exception as error:
                wrong, cause = f"fails with {error!r}, which it does not otherwise", error
            else:
                wrong = _unlike(actions, theirs) or _unlike_now(self, twin)
            if wrong is None:
                return actions
        name = getattr(self.strategy, "name", type(self.strategy).__name__)
        suspects = f", which lacks {', '.join(forgotten)}" if forgotten else ""
        raise PolytempoError(
            f"{name} would not resume as it was: saved and restored after {updates} updates, it "
            f"{wrong}; all that changes from update to update must be in its `state`{suspects} "
            "(a tuple comes back as a list, any mapping as a plain dict)"
        ) from cause

    def _ask_twice(self) -> None:
        """A query changes nothing: asked again, it answers the same."""
        for hook in (self.strategy.model_for, self.strategy.serve):
            for client in range(min(self.context.clients, CLIENTS)):
                if not _same(hook(client), hook(client)):
                    raise PolytempoError(
                        f"{type(self.strategy).__qualname__}.{hook.__name__} answers differently "
                        f"when asked twice for client {client}; only `fold` and other "
                        "notifications may change what is served"
                    )

    def _twin(self) -> Server:
        """As this server would be after a restart."""
        original = getattr(self.strategy, "strategy", self.strategy)  # of a diagnosis
        fresh = dataclasses.replace(original)  # the same options, nothing else
        twin = Server(
            fresh,
            self.context,
            concurrency=self.concurrency,
            refill=self.refill,
            schedule=self.schedule,
            steps=self.steps,
            defence=None if self.defence is None else dataclasses.replace(self.defence),
        )
        twin.load_state_dict(restored(self.state_dict()))
        return twin


def _unlike(actions: Sequence[Action], others: Sequence[Action]) -> str | None:
    """What is wrong with the actions of the twin."""
    heads = [[(type(act), act.client, act.number) for act in each] for each in (actions, others)]
    if heads[0] != heads[1]:
        return "answers in another way"
    for one, other in zip(actions, others, strict=True):
        if isinstance(one, Dispatch) and isinstance(other, Dispatch):
            if not (_same(one.params, other.params) and _same(one.vectors, other.vectors)):
                return f"sends client {one.client} another model"
            if one.task != other.task or one.preempt != other.preempt:
                return f"gives client {one.client} another task"
    return None


def _unlike_now(server: Server, twin: Server) -> str | None:
    """What is wrong with what the twin serves."""
    ours, theirs = server.strategy, twin.strategy
    if (server.updates, server.version) != (twin.updates, twin.version):
        return "changes what it serves at other times"
    for client in range(min(server.context.clients, CLIENTS)):
        if not _same(ours.model_for(client), theirs.model_for(client)):
            return f"would send client {client} another model"
        if not _same(ours.serve(client), theirs.serve(client)):
            return f"serves client {client} another model"
    for what, one, other in (
        ("collaboration graph", ours.collaboration(), theirs.collaboration()),
        ("clusters", ours.clusters(), theirs.clusters()),
        ("similarities", ours.similarity(), theirs.similarity()),
    ):
        if not _same(one, other):
            return f"has another idea of the {what}"
    return None


def _differing(strategy: Strategy, twin: Strategy) -> list[str]:
    """Attributes that are not as they were, and not in the state: some may be of no importance."""
    ours, theirs = vars(getattr(strategy, "strategy", strategy)), vars(twin)
    names = ours.keys() | theirs.keys()
    return sorted(
        name for name in names - set(twin.state) if not _same(ours.get(name), theirs.get(name))
    )


def _same(one: Any, other: Any) -> bool:
    if one is other:
        return True
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return one.shape == other.shape and bool(
            torch.allclose(one, other, rtol=0, atol=0, equal_nan=True)
        )
    if isinstance(one, np.ndarray) and isinstance(other, np.ndarray):
        return np.array_equal(one, other, equal_nan=one.dtype.kind == "f")
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(_same(one[key], other[key]) for key in one)
    if isinstance(one, str) or isinstance(other, str):
        return bool(one == other)
    if isinstance(one, Sequence) and isinstance(other, Sequence):
        return len(one) == len(other) and all(map(_same, one, other))
    if type(one) is type(other) and hasattr(one, "__dict__"):
        return _same(vars(one), vars(other))
    return type(one) is type(other) and bool(one == other)
