"""Grids of settings: values, or ranges, by the name of the setting, as text and as combinations."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

from polytempo.core.errors import PolytempoError, nearest
from polytempo.core.registry import parse
from polytempo.core.strategy import Strategy
from polytempo.experiments.config import REGISTRIES, RunConfig
from polytempo.experiments.folders import spelled
from polytempo.strategies import STRATEGIES

Grid = Mapping[str, Sequence[Any]]  # or text, as on the command line
Values = dict[str, Any]
_RANGE = re.compile(r"([-+.\deE]+?)\.\.([-+.\deE]+)(:log)?")


@dataclass(frozen=True)
class Range:
    """All values from `low` to `high` (whole numbers, if both are), for a search to choose from;
    `log`: by their logarithm."""

    low: float
    high: float
    log: bool = False

    def __str__(self) -> str:
        return f"{self.low:g}..{self.high:g}" + ":log" * self.log


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
    """The values in a comma-separated list, or one range: `0.001..0.1:log`. Commas within brackets,
    and before a further option of the same thing (`pace:omega=2,reply=fresh,fedavg` is two
    strategies), separate nothing."""
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
    if found := _RANGE.fullmatch(text):
        return _range(name, *found.groups())
    try:
        return json.loads(text)
    except ValueError:
        return text


def _range(name: str, low: str, high: str, log: str | None) -> Range:
    try:
        first, last = (
            int(end) if end.lstrip("+-").isdigit() else float(end) for end in (low, high)
        )
    except ValueError:
        raise PolytempoError(f"grid: {name}={low}..{high}: the ends are not numbers") from None
    if not first < last or (log and first <= 0):
        above = " above 0" if log else ""
        raise PolytempoError(f"grid: {name}={low}..{high}: write the lower end first{above}")
    return Range(first, last, log is not None)


def listed(grid: Grid) -> dict[str, list[Any]]:
    """The values of each setting, checked as far as they can be here."""
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
    found = {
        name: read_values(name, values) if isinstance(values, str) else values
        for name, values in grid.items()
    }
    return {name: list({word(x): x for x in values}.values()) for name, values in found.items()}


def points_of(grid: Grid) -> list[Values]:
    """All combinations."""
    found = listed(grid)
    for name, values in found.items():
        if any(isinstance(value, Range) for value in values):
            raise PolytempoError(
                f"grid: {name} is a range, which only a search can take values from: add "
                "--search 20 (search=20), or list the values"
            )
    return [dict(zip(found, chosen, strict=True)) for chosen in product(*found.values())]


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
