"""`polytempo strategies`, `partitions`, `devices`, ...: everything that a setting can name, with
its options. One notation serves them all (`core/registry.py`), and so does one page."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import MISSING, fields
from importlib import import_module
from typing import Annotated, Any, NamedTuple, cast

import typer
from rich.markup import escape

from polytempo.cli.console import listing, output
from polytempo.cli.options import Json
from polytempo.core.registry import Options, Registry

Name = Annotated[
    str | None, typer.Argument(help="One of them, for its whole description.", metavar="NAME")
]


class Kind(NamedTuple):
    """What a registry holds, and the setting that names it."""

    title: str
    registry: str  # module:attribute
    setting: str
    example: str


KINDS = {
    "strategies": Kind(
        "Strategies", "strategies:STRATEGIES", "strategy", "pace:omega=2,graph.gamma=0.5"
    ),
    "partitions": Kind(
        "Partitions", "data.partition:PARTITIONS", "partition", "dirichlet:alpha=0.1,balanced=true"
    ),
    "shifts": Kind(
        "Shifts of inputs", "data.shift:SHIFTS", "shift", "rotation:angles=[0,90,180,270]"
    ),
    "devices": Kind(
        "Devices", "simulation.devices:DEVICES", "devices", "two-speed:slow=0.3,factor=5"
    ),
    "networks": Kind("Networks", "simulation.devices:NETWORKS", "network", "uniform:low=5,high=50"),
    "dropouts": Kind(
        "Dropouts", "simulation.dropout:DROPOUTS", "dropout", "leave:at=100,share=0.3"
    ),
    "models": Kind("Models", "models:MODELS", "model", "mlp:hidden=[64,64]"),
    "optimizers": Kind("Optimizers", "core.optimizer:OPTIMIZERS", "optimizer", "adamw:beta1=0.9"),
    "schedules": Kind(
        "Learning-rate schedules",
        "core.schedule:SCHEDULES",
        "lr-schedule",
        "exponential:gamma=0.99,every=10",
    ),
    "problems": Kind("Problems", "training.problem:PROBLEMS", "problem", "regression"),
}


def known(kind: Kind) -> Registry[Any]:
    module, _, attribute = kind.registry.partition(":")
    return cast(Registry[Any], getattr(import_module(f"polytempo.{module}"), attribute))


def describe(registry: Registry[Any], name: str) -> dict[str, Any]:
    """What there is to say of one: options that must be given have no entry in `parameters`."""
    cls = cast(Any, registry[name])
    about = inspect.getdoc(cls) or ""
    return {
        "name": name,
        **{key: getattr(cls, key) for key in ("family", "paper") if hasattr(cls, key)},
        "summary": about.partition("\n")[0],
        "parameters": _defaults(cls),
        "required": [f.name for f in fields(cls) if f.init and _default(f) is MISSING],
        "description": about,
    }


def _default(field: Any) -> Any:
    return field.default if field.default_factory is MISSING else field.default_factory()


def _defaults(cls: Any) -> dict[str, Any]:
    """The options that have a default, with it, including nested ones (`graph.gamma`)."""
    found: dict[str, Any] = {}
    for field in fields(cls):
        value = _default(field)
        if not field.init or value is MISSING:
            continue
        if isinstance(value, Options):
            found[field.name] = cast(Any, value).name
            inner = _defaults(type(value))
            found |= {f"{field.name}.{key}": getattr(value, key, inner[key]) for key in inner}
        else:
            found[field.name] = value
    return found


def _written(row: dict[str, Any]) -> list[str]:
    required = [f"{key}=... (must be given)" for key in row["required"]]
    return required + [f"{key}={_spelled(value)}" for key, value in row["parameters"].items()]


def _spelled(value: Any) -> str:
    """As it is given on the command line."""
    if value is None or isinstance(value, bool):
        return str(value).lower()
    return str(list(value)).replace(" ", "") if isinstance(value, tuple) else str(value)


def _page(kind: Kind, row: dict[str, Any]) -> None:
    """One of them, whole."""
    output.print(f"[bold]{escape(row['name'])}[/]", highlight=False)
    if "paper" in row:
        output.print(f"[dim]{row['family']}; {escape(row['paper'])}[/]", highlight=False)
    output.print(f"\n{escape(row['description'])}\n", highlight=False)
    for line in ("[bold]options and defaults[/]", *map(escape, _written(row) or ["none"])):
        output.print(line, highlight=False)
    output.print(f"\nGive it as --{kind.setting} {escape(_example(row))}", highlight=False)


def _example(row: dict[str, Any]) -> str:
    simple = [(k, v) for k, v in row["parameters"].items() if isinstance(v, int | float | str)]
    given = [f"{key}=..." for key in row["required"]]
    given += [f"{key}={_spelled(value)}" for key, value in simple[:1]]
    return ":".join([row["name"], ",".join(given)]) if given else row["name"]


def _command(name: str) -> Callable[..., None]:
    kind = KINDS[name]

    def command(name: Name = None, as_json: Json = False) -> None:
        registry = known(kind)
        rows = [describe(registry, found) for found in ([name] if name else registry)]
        if as_json:
            output.print_json(data=rows[0] if name else rows)
        elif name:
            _page(kind, rows[0])
        else:
            title = f"{kind.title}: --{kind.setting} NAME or NAME:option=value,option=value"
            table = listing(title, "name", "what it is", "options and defaults", show_lines=True)
            for row in rows:
                about = escape(row["summary"])
                if "paper" in row:
                    about += f"\n[dim]{row['family']}; {escape(row['paper'])}[/]"
                table.add_row(row["name"], about, escape("\n".join(_written(row))) or "-")
            output.print(table)

    command.__doc__ = (
        f"List the {kind.title[0].lower()}{kind.title[1:]} with their options, or describe one.\n\n"
        f"Example: polytempo {name} {kind.example.partition(':')[0]}; "
        f"then polytempo run --{kind.setting} {kind.example}"
    )
    return command


strategies_command, partitions_command, shifts_command = map(
    _command, ("strategies", "partitions", "shifts")
)
devices_command, networks_command, dropouts_command = map(
    _command, ("devices", "networks", "dropouts")
)
models_command, optimizers_command = map(_command, ("models", "optimizers"))
schedules_command, problems_command = map(_command, ("schedules", "problems"))
