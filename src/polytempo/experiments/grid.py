"""Grids of settings: values by the name of the setting, as text and as combinations."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from itertools import product
from typing import Any

from polytempo.core.errors import PolytempoError, nearest
from polytempo.core.registry import parse
from polytempo.core.strategy import Strategy
from polytempo.experiments.config import REGISTRIES, RunConfig
from polytempo.experiments.folders import spelled
from polytempo.strategies import STRATEGIES

Grid = Mapping[str, Sequence[Any]]
Values = dict[str, Any]


def read_grid(texts: Sequence[str], option: str = "--grid") -> dict[str, list[Any]]:
    """`lr=0.01,0.05`: a setting, or an option of one (`strategy.alpha=0.1,0.5`), and its values."""
    grid: dict[str, list[Any]] = {}
    for text in texts:
        name, equals, rest = text.partition("=")
        if not equals or not name.strip() or not rest.strip():
            raise PolytempoError(f"{option} {text}: write it as setting=value,value")
        name = name.strip().replace("-", "_")
        grid.setdefault(name, []).extend(read_values(name, rest))
    return grid


def read_values(name: str, text: str) -> list[Any]:
    """The values in a comma-separated list. Commas within brackets, and before a further option of
    the same thing (`pace:omega=2,reply=fresh,fedavg` is two strategies), separate nothing."""
    pieces: list[str] = []
    depth = 0
    for piece in text.split(","):
        more = "=" in piece and ":" not in piece.partition("=")[0] and name in REGISTRIES
        if pieces and (depth or more):
            pieces[-1] += f",{piece}"
        else:
            pieces.append(piece)
        depth += piece.count("[") - piece.count("]")
    return [_value(name, piece.strip()) for piece in pieces]


def _value(name: str, text: str) -> Any:
    if name in REGISTRIES:
        return text
    if text == "none":
        return None
    try:
        return json.loads(text)
    except ValueError:
        return text


def points_of(grid: Grid) -> list[Values]:
    """All combinations."""
    if not grid:
        raise PolytempoError("nothing to vary: give a grid such as --grid lr=0.01,0.05")
    for name, values in grid.items():
        outer = name.partition(".")[0]
        if outer not in RunConfig.model_fields:
            near = nearest(outer, RunConfig.model_fields)
            raise PolytempoError(f"grid: unknown setting {outer!r}{near}")
        if outer == "seed":
            raise PolytempoError("grid: seeds are not part of it; give --seeds 3")
        if "." in name and outer not in REGISTRIES:
            raise PolytempoError(f"grid: {name}: {outer} has no options")
        if not values:
            raise PolytempoError(f"grid: {name} has no values")
    listed = [list({word(value): value for value in values}.values()) for values in grid.values()]
    return [dict(zip(grid, chosen, strict=True)) for chosen in product(*listed)]


def with_values(settings: Mapping[str, Any], values: Mapping[str, Any]) -> dict[str, Any]:
    """The settings at a point of the grid."""
    found = dict(settings)
    for name, value in values.items():
        outer, _, option = name.partition(".")
        if not option:
            found[name] = STRATEGIES.describe(value) if isinstance(value, Strategy) else value
    for name, value in values.items():
        outer, _, option = name.partition(".")
        if option:
            spec = found.get(outer) or RunConfig.model_fields[outer].default
            if spec is None:
                raise PolytempoError(f"grid: {name}: give {outer} itself, too")
            if isinstance(spec, str):
                called, options = parse(spec)
                spec = {"name": called, **options}
            found[outer] = {**spec, option: value}
    return found


def word(value: Any) -> str:
    """A value as a person writes it."""
    if isinstance(value, Strategy):
        value = STRATEGIES.describe(value)
        return spelled(STRATEGIES, value)
    return "none" if value is None else f"{value:g}" if isinstance(value, float) else str(value)


def label_of(values: Mapping[str, Any]) -> str:
    return " ".join(f"{name}={word(value)}" for name, value in values.items())
