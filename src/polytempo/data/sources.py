"""From what a user names to a pool of samples, and the list of what can be named."""

from __future__ import annotations

import dataclasses
import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import polytempo.data.files
import polytempo.data.hub
import polytempo.data.shakespeare
import polytempo.data.synthetic
import polytempo.data.synthetic_targets  # noqa: F401  (these five register the sources)
from polytempo.core.errors import PolytempoError
from polytempo.core.registry import parse
from polytempo.data.npz import read_npz
from polytempo.data.origin import ORIGINS
from polytempo.data.pool import Pool
from polytempo.data.source import SOURCES, Request, canonical, data_folder
from polytempo.data.stored import is_here, remedy


@dataclass(frozen=True)
class DatasetInfo:
    """One line of the list of data sets. `where` says where it comes from, or what to do.

    users: how many people (or hospitals) the samples belong to, by nature.
    download: about how many bytes `polytempo data get` fetches; None if there is nothing to get.
    """

    name: str
    available: bool
    description: str
    samples: int | None
    classes: int | None
    where: str
    problem: str
    users: int | None = None
    download: int | None = None
    licence: str | None = None
    page: str | None = None


def available(data_dir: str | Path | None = None) -> list[DatasetInfo]:
    """The known data sets, and whether their files are at hand."""
    return [_info(name, data_folder(data_dir)) for name in SOURCES]


def _info(name: str, folder: Path) -> DatasetInfo:
    source: Any = SOURCES[name]
    # An option (synthetic has one for classes) is not a fact about the data set.
    chosen = {field.name for field in dataclasses.fields(source)}
    facts = {key: value for key, value in vars(source).items() if key not in chosen}
    origin = ORIGINS.get(name)
    at_hand, where = True, "built in"
    if origin is not None:
        at_hand = is_here(name, folder)
        where = str(folder) if at_hand else remedy(name, folder)
    if name == "hub":
        name, at_hand = "hub:owner/dataset", _installed("datasets")
        where = "the Hugging Face hub" if at_hand else 'pip install "polytempo[hub]"'
    return DatasetInfo(
        name=name,
        available=at_hand,
        description=facts.get("description", ""),
        samples=facts.get("samples"),
        classes=facts.get("classes"),
        where=where,
        problem=facts.get("problem", "classification"),
        users=facts.get("users"),
        download=origin.size if origin else None,
        licence=origin.licence if origin else None,
        page=origin.page if origin else None,
    )


def _installed(package: str) -> bool:
    try:
        return importlib.util.find_spec(package) is not None
    except ValueError:  # a module put in place by hand, without a spec
        return True


def is_path(name: str | Path) -> bool:
    """Whether this names a file or folder of the user's own, not a known data set."""
    if isinstance(name, Path):
        return True
    if canonical(name) in SOURCES or name.startswith("hub:"):
        return False
    return name.endswith(".npz") or "/" in name.partition(":")[0] or Path(name).is_dir()


def open_pool(
    name: str | Path | Mapping[str, Any], request: Request, problem: str | None = None
) -> Pool:
    """The samples of the data set that `name` describes; `problem` says what its targets are for,
    where that is the user's to say."""
    if not isinstance(name, Mapping):
        if is_path(name):
            return read_npz(name, problem=problem)
        name, options = parse(str(name))
        name = {"name": name, **options}
    table = dict(name)
    kind, colon, dataset = str(table.get("name", "")).partition(":")
    if kind == "hub" and colon:
        table = {**table, "name": "hub", "dataset": dataset}
    elif "name" in table:
        table["name"] = canonical(str(table["name"]))
    pool = SOURCES.create(table)(request)
    if problem not in (None, pool.problem):
        raise PolytempoError(
            f"problem={problem!r}, but the targets of {pool.name} are for {pool.problem}; omit it, "
            "or give the samples other targets with Federation.from_pool"
        )
    return pool
