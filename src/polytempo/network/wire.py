"""What travels between peers, and the check of everything that comes in.

A message is a header in JSON and, for an exchange, the model as safetensors: nothing that could be
run. Whatever does not fit (another protocol, run or model, wrong sizes, numbers that are not
finite) is `Refused`, and nothing has happened.

Names in a run, as Zenoh keys:

    polytempo/RUN/peer/ID/INCARNATION              stands while that peer lives (liveliness token)
    polytempo/RUN/ticket/ID/INCARNATION/TICKET     stands while it is pending (liveliness token)
    polytempo/RUN/claim/ID/INCARNATION             where it is asked for a ticket (query)
    polytempo/RUN/exchange/ID/INCARNATION          where it is sent a model (query)
"""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import dataclass
from typing import Annotated, Literal

import safetensors.torch
import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from safetensors import SafetensorError
from torch import Tensor

from polytempo.core.errors import PolytempoError, Refused
from polytempo.core.layout import Layout
from polytempo.nodes import Identity, Snapshot, Token

MOST_HEADER = 2_048  # bytes
_NAME = r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}"
_NAMES, _NUMBERS = re.compile(_NAME), re.compile(r"[0-9]{1,15}")
Name = Annotated[str, Field(pattern=f"^{_NAME}$")]
Count = Annotated[int, Field(ge=0, lt=2**53)]


def check_name(what: str, name: str) -> str:
    """A peer's or a run's name must fit into a key."""
    if not _NAMES.fullmatch(name):
        raise PolytempoError(
            f"invalid {what} name {name!r}: use up to 64 letters, digits, dots, hyphens and "
            "underscores, starting with a letter or digit"
        )
    return name


def _are_good(peer: str, *numbers: str) -> bool:
    return bool(_NAMES.fullmatch(peer)) and all(map(_NUMBERS.fullmatch, numbers))


class Header(BaseModel):
    """The small part of a message."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    protocol: Literal[1]
    run: Name
    model: str  # digest of the model's layout
    by: Name
    incarnation: Count
    token: tuple[Name, Count, Count]
    progress: Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)] | None = None
    iteration: Count | None = None


@dataclass(frozen=True)
class Message:
    """A message that was found good."""

    by: Identity
    token: Token
    snapshot: Snapshot | None


class Wire:
    """Writes and reads the messages of one run, whose peers all train one model."""

    def __init__(self, run: str, layout: Layout) -> None:
        self.run = check_name("run", run)
        self.size, self.dtype = layout.size, layout.vector.dtype
        state = layout.module.state_dict()
        shapes = [(name, list(tensor.shape), str(tensor.dtype)) for name, tensor in state.items()]
        text = json.dumps([shapes, layout.shared_names]).encode()
        self.model = hashlib.blake2b(text, digest_size=8).hexdigest()
        self.most_payload = self.size * self.dtype.itemsize + MOST_HEADER

    def key(self, kind: str, *parts: str | int) -> str:
        return "/".join(["polytempo", self.run, kind, *map(str, parts)])

    def parse(self, key: str) -> Identity | Token:
        """Who lives, or who is pending, by the key of a presence token."""
        match key.split("/")[2:]:
            case ["peer", peer, incarnation] if _are_good(peer, incarnation):
                return Identity(peer, int(incarnation))
            case ["ticket", peer, incarnation, ticket] if _are_good(peer, incarnation, ticket):
                return Token(peer, int(incarnation), int(ticket))
        raise Refused(f"the presence token {key!r} does not have a name that a peer would give it")

    def write(
        self, by: Identity, token: Token, snapshot: Snapshot | None = None
    ) -> tuple[bytes, bytes]:
        """Header and payload."""
        header = Header(
            protocol=1,
            run=self.run,
            model=self.model,
            by=by.peer,
            incarnation=by.incarnation,
            token=(token.peer, token.incarnation, token.ticket),
            progress=None if snapshot is None else float(snapshot.progress),
            iteration=None if snapshot is None else snapshot.iteration,
        )
        payload = b""
        if snapshot is not None:
            payload = safetensors.torch.save({"params": snapshot.params.contiguous()})
        return header.model_dump_json(exclude_none=True).encode(), payload

    def read(self, header: bytes, payload: bytes, *, weights: bool) -> Message:
        """Check a message, which must bring weights or must not; `Refused` if anything is wrong."""
        if len(header) > MOST_HEADER:
            raise Refused(f"its header has {len(header)} bytes; at most {MOST_HEADER} are read")
        try:
            found = Header.model_validate_json(header)
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(map(str, first["loc"])) or "header"
            raise Refused(f"{where}: {first['msg']}") from error
        if found.run != self.run:
            raise Refused(f"it belongs to the run {found.run!r}; this is {self.run!r}")
        if found.model != self.model:
            raise Refused("its sender trains a different model; give all peers the same settings")
        by, token = Identity(found.by, found.incarnation), Token(*found.token)
        snapshot = None
        if weights:
            if found.progress is None or found.iteration is None:
                raise Refused("it carries weights without progress and iteration")
            snapshot = Snapshot(self._weights(payload), found.progress, found.iteration)
        elif payload:
            raise Refused(f"it carries {len(payload)} bytes that nobody asked for")
        return Message(by, token, snapshot)

    def _weights(self, payload: bytes) -> Tensor:
        if len(payload) > self.most_payload:
            raise Refused(f"it has {len(payload)} bytes; the model needs {self.most_payload}")
        try:
            tensors = safetensors.torch.load(payload)
        except (SafetensorError, ValueError, KeyError, RuntimeError) as error:
            raise Refused(f"its weights are not in safetensors format: {error}") from error
        if set(tensors) != {"params"}:
            raise Refused(f"it carries {sorted(tensors)}; only 'params' is read")
        params = tensors["params"]
        if params.shape != (self.size,) or params.dtype != self.dtype:
            raise Refused(
                f"its weights are {params.dtype} of shape {tuple(params.shape)}; "
                f"expected {self.dtype} of shape {(self.size,)}"
            )
        # As a server checks an update: NaN and infinity fail too, and mixing stays finite.
        if not float(torch.dot(params, params)) <= min(torch.finfo(self.dtype).max / 16, 1e150):
            raise Refused("its weights are not finite, or too large: its training diverged")
        return params
