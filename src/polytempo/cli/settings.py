"""The settings of a run as command-line options: they are declared in `RunConfig` alone."""

from __future__ import annotations

import inspect
import types
import typing
from collections.abc import Callable
from typing import Annotated, Any

import typer

from polytempo.experiments.config import RunConfig


def with_settings(*names: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command options for these settings of a run, passed on as the mapping `settings`."""

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        own = inspect.signature(command, eval_str=True).parameters
        mine = [p for name, p in own.items() if name != "settings"]
        options = [_option(name) for name in names]

        def wrapper(**given: Any) -> None:
            settings = {name: given.pop(name) for name in names}
            given["settings"] = {k: v for k, v in settings.items() if v not in (None, [])}
            command(**given)

        signature = inspect.Signature([*mine, *options])
        wrapper.__signature__ = signature  # type: ignore[attr-defined]
        wrapper.__annotations__ = {p.name: p.annotation for p in signature.parameters.values()}
        wrapper.__doc__ = command.__doc__
        wrapper.__name__ = command.__name__
        return wrapper

    return decorate


def _option(name: str) -> inspect.Parameter:
    field = RunConfig.model_fields[name]
    kind = _plain(field.annotation)
    flag = "--" + name.replace("_", "-")
    if kind is bool:
        flag += "/--no-" + name.replace("_", "-")
    default = "" if field.default is None or field.default is False else f" \\[{field.default}]"
    metavar = "" if kind is bool else None
    option = typer.Option(
        flag, help=f"{field.description}{default}", show_default=False, metavar=metavar
    )
    return inspect.Parameter(
        name,
        inspect.Parameter.KEYWORD_ONLY,
        default=None,
        annotation=Annotated[kind | None, option],
    )


def _plain(annotation: Any) -> Any:
    """The type that the command line reads: bool, int, float, a list of texts, else text."""
    found = list(typing.get_args(annotation)) or [annotation]
    if isinstance(annotation, types.UnionType) or typing.get_origin(annotation) is typing.Union:
        found = [typing.get_args(a)[0] if typing.get_origin(a) is Annotated else a for a in found]
    for kind in (bool, int, float):
        if kind in found:
            return kind
    return list[str] if any(typing.get_origin(each) is list for each in found) else str
