"""The command `polytempo`. It only talks to the user: the work is done in the layers below.

Nothing heavy is imported here: a command's module is loaded when the command is called
(`polytempo.cli.commands`), so that `polytempo --help` answers at once.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from polytempo.cli.commands import Commands
from polytempo.cli.console import complain, output, warn
from polytempo.core.errors import PolytempoError


def _version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        output.print(version("polytempo"), highlight=False)
        raise typer.Exit


app = typer.Typer(
    cls=Commands,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


@app.callback()
def options_of_all(
    show: Annotated[
        bool,
        typer.Option(
            "--version", help="Print the version.", callback=_version, is_eager=True, metavar=""
        ),
    ] = False,
) -> None:
    """Asynchronous, personalised federated learning: simulate it, compare it, trust it."""


def _renamed(error: Exception) -> str | None:
    """For an option that has another name now: which."""
    from polytempo.experiments.config import RENAMED

    option = str(getattr(error, "option_name", ""))
    new = RENAMED.get(option.removeprefix("--"))
    return f"{option} is now called --{new}" if new else None


def _naming_the_value(error: Exception, message: str) -> str:
    """For a value that is none of its option's: which. (Typer says only what it should be.)"""
    found: list[dict[str, object]] = getattr(error.__cause__, "errors", list)()
    if not found or "input" not in found[0]:
        return message
    what, _, _ = message.partition(", unable to parse")
    return what.replace("value for", f"value {found[0]['input']!r} for", 1)


def _shown(usual: Callable[..., None]) -> Callable[..., None]:
    """What we warn the user of is a line like others; warnings of libraries are shown as usual."""

    def show(message: Warning | str, category: type[Warning], filename: str, *rest: Any) -> None:
        if category is UserWarning and Path(__file__).parents[1] in Path(filename).parents:
            warn(str(message))
        else:
            usual(message, category, filename, *rest)

    return show


def main() -> None:
    """Entry point: a user's mistake becomes a one-line message, not a traceback."""
    sys.path.insert(0, "")  # so that module:Class finds the user's module in this folder
    try:
        with warnings.catch_warnings():
            warnings.showwarning = _shown(warnings.showwarning)
            code = app(prog_name="polytempo", standalone_mode=False)
    except PolytempoError as error:
        complain(str(error))
        code = 2
    except (typer.Abort, KeyboardInterrupt):
        code = 130
    except Exception as error:
        if not hasattr(error, "format_message"):
            raise
        # What the command line itself could not read (its class differs between versions of typer).
        message = error.format_message()
        if not message:  # `polytempo` alone: its help was shown
            sys.exit(2)
        where = getattr(getattr(error, "ctx", None), "command_path", "polytempo")
        what = _renamed(error) or _naming_the_value(error, message.rstrip("."))
        complain(f"{what}; see {where} --help")
        code = 2
    sys.exit(code)
