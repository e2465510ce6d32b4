"""Phases, events and what they hold as tables that name their kind, to be saved and read again."""

from __future__ import annotations

from dataclasses import fields, is_dataclass
from typing import Any

from polytempo.nodes import protocol

_KINDS: dict[str, Any] = {
    kind.__name__: kind
    for kind in (
        *(protocol.Identity, protocol.Token, protocol.Snapshot, protocol.Fusion),
        *(protocol.Idle, protocol.Pending, protocol.Claiming, protocol.Granted),
        *(protocol.Exchanging, protocol.Appeared, protocol.Vanished, protocol.Gone),
        *(protocol.Claimed, protocol.ClaimAnswered, protocol.Exchanged),
        *(protocol.ExchangeAnswered, protocol.DeadlinePassed),
    )
}


def spell(value: Any) -> Any:
    """A table of the value's kind and its parts; numbers, texts and tensors as they are."""
    kind = type(value).__name__
    if kind not in _KINDS:
        return value
    names = [part.name for part in fields(value)] if is_dataclass(value) else value._fields
    return {kind: {name: spell(getattr(value, name)) for name in names}}


def read(value: Any) -> Any:
    """What was spelled."""
    if not isinstance(value, dict):
        return value
    [(kind, parts)] = value.items()
    return _KINDS[kind](**{name: read(part) for name, part in parts.items()})
