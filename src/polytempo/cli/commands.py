"""All commands by name, without loading them: each is imported when it is called.

A command NAME is the function `NAME_command` of its module, or `NAME_group` if it has commands of
its own. Its help line is the first line of that
function's docstring, repeated here so that listing the commands imports nothing; a test compares
the two.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any, NamedTuple

import typer
from typer.core import TyperCommand, TyperGroup
from typer.main import get_command


class Entry(NamedTuple):
    module: str  # of this package
    help: str


COMMANDS = {
    "run": Entry("run", "Run one strategy on a federation, on a simulated clock."),
    "compare": Entry(
        "compare", "Run several strategies on the same federation, devices and seeds."
    ),
    "sweep": Entry(
        "sweep",
        "Run every combination of some values of settings, with several seeds, or search for the "
        "best.",
    ),
    "export": Entry(
        "export", "Write the model of a client to a file that plain torch or safetensors loads."
    ),
    "reproduce": Entry(
        "reproduce", "Rerun a paper's table or figure, and show its numbers next to ours."
    ),
    "view": Entry("view", "Show runs in a web page on this machine, as they go."),
    "data": Entry(
        "data", "List the data sets, get them, or show how one is divided among clients."
    ),
    "strategies": Entry("catalogue", "List the strategies with their options, or describe one."),
    "partitions": Entry("catalogue", "List the partitions with their options, or describe one."),
    "shifts": Entry("catalogue", "List the shifts of inputs with their options, or describe one."),
    "devices": Entry("catalogue", "List the devices with their options, or describe one."),
    "networks": Entry("catalogue", "List the networks with their options, or describe one."),
    "dropouts": Entry("catalogue", "List the dropouts with their options, or describe one."),
    "models": Entry("catalogue", "List the models with their options, or describe one."),
    "optimizers": Entry("catalogue", "List the optimizers with their options, or describe one."),
    "schedules": Entry(
        "catalogue", "List the learning-rate schedules with their options, or describe one."
    ),
    "problems": Entry("catalogue", "List the problems with their options, or describe one."),
    "bench": Entry(
        "bench",
        "Measure speed, alternating with a plain torch loop, and against the machine's limits.",
    ),
    "peer": Entry("peers", "Join a serverless run among peers, on a real network."),
    "peers": Entry("peers", "Run a group of peers on this machine, over real network connections."),
    "server": Entry("fleet", "Conduct a run with clients on other machines."),
    "client": Entry("fleet", "Take part in a run with this machine's data."),
    "fleet": Entry(
        "fleet",
        "Run a server and its clients on this machine, over real connections with mutual TLS.",
    ),
    "admit": Entry(
        "fleet", "Let a client take part (again); a running server notices within a second."
    ),
    "revoke": Entry(
        "fleet", "Let a client take part no longer; a running server cuts it off within a second."
    ),
    "replay": Entry(
        "replay", "Check a fleet's log, or simulate another strategy on the recorded fleet."
    ),
    "certs": Entry("certs", "Create a CA and certificates for servers, clients and peers."),
}


def load(name: str) -> TyperCommand | TyperGroup:
    """The command itself, with its options."""
    module = import_module(f"polytempo.cli.{COMMANDS[name].module}")
    alone = getattr(module, f"{name}_group", None)
    if alone is None:
        alone = typer.Typer(add_completion=False)
        alone.command(name)(getattr(module, f"{name}_command"))
    command = get_command(alone)
    assert isinstance(command, TyperCommand | TyperGroup)
    return command


class Unloaded(TyperCommand):
    """Name and help line of a command. A call first makes a context; there the real command takes
    over."""

    def make_context(
        self, info_name: str | None, args: list[str], parent: Any = None, **extra: Any
    ) -> Any:
        assert self.name is not None
        return load(self.name).make_context(info_name, args, parent, **extra)


class Commands(TyperGroup):
    """The group of all commands."""

    def __init__(self, **options: Any) -> None:
        unloaded = {name: Unloaded(name, help=entry.help) for name, entry in COMMANDS.items()}
        super().__init__(**{**options, "commands": unloaded})
