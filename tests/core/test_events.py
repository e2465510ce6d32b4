"""The schema of events: what the log holds, and what the documentation says of it."""

import json
import re
from dataclasses import FrozenInstanceError, fields
from pathlib import Path

import pytest

from polytempo.core import events
from polytempo.core.events import KINDS, Event, as_dict, to_json

HEAD = ["n", "time", "updates", "version"]
DOCUMENT = Path(__file__).parents[2] / "docs" / "events.md"


def example(kind: type[Event]) -> Event:
    """One such event: whole numbers count up, other fields are made of their names."""
    made = {"int": lambda k, name: k, "float": lambda k, name: k + 0.5, "str": lambda k, name: name}
    return kind(*(made[field.type](k, field.name) for k, field in enumerate(fields(kind))))


def documented() -> dict[str, dict[str, str]]:
    rows = re.findall(r"^\| `(\w+)` \| (`\w+: .*?) \|", DOCUMENT.read_text("utf8"), re.MULTILINE)
    return {kind: dict(re.findall(r"`(\w+): (\w+)`", keys)) for kind, keys in rows}


def test_the_documentation_lists_every_kind_with_its_fields():
    written = {
        name: {field.name: field.type for field in fields(kind) if field.name not in HEAD}
        for name, kind in KINDS.items()
    }
    assert documented() == written


def test_every_class_of_event_is_a_kind():
    classes = [thing for thing in vars(events).values() if isinstance(thing, type)]
    found = {kind for kind in classes if issubclass(kind, Event)}
    bases = {Event, events.ClientEvent, events.DispatchEvent, events.TicketEvent}
    assert found - bases == set(KINDS.values())
    assert all(kind.__name__.lower() == name == kind.kind for name, kind in KINDS.items())


@pytest.mark.parametrize("kind", KINDS.values(), ids=list(KINDS))
def test_a_line_of_the_log_holds_the_kind_and_every_field(kind):
    event = example(kind)
    found = json.loads(to_json(event))
    assert found == as_dict(event)
    assert found.pop("event") == kind.kind
    assert found == {field.name: getattr(event, field.name) for field in fields(kind)}


@pytest.mark.parametrize("loss", [float("inf"), -float("inf"), float("nan")])
def test_what_json_cannot_say_is_null(loss):
    line = to_json(events.Evaluate(0, 2.5, 9, 8, "perplexity", 1e300, loss))
    assert json.loads(line, parse_constant=pytest.fail)["loss"] is None
    assert '"time": 2.5' in line and '"value": 1e+300' in line


def test_a_line_says_who_before_the_counters():
    line = to_json(events.Upload(31, 2.4, 9, 8, 5, 12, 3, 2))
    assert line == (
        '{"n": 31, "time": 2.4, "event": "upload", "client": 5, "dispatch": 12, "updates": 9, '
        '"version": 8, "staleness": 3, "versions": 2}'
    )


def test_events_cannot_be_changed_and_hold_nothing_else():
    event = example(events.Upload)
    with pytest.raises(FrozenInstanceError):
        event.client = 3
    assert not hasattr(event, "__dict__")
