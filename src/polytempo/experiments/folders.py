"""Names of folders for runs that were given none: they hold the settings that differ from the
default, so that runs can be told apart."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from polytempo.core.errors import PolytempoError
from polytempo.core.registry import Registry
from polytempo.experiments.config import EXECUTION, REGISTRIES, RunConfig, make_config

RUNS = Path("runs")
_SILENT = (*EXECUTION, "data_dir", "check", "events", "device", "seed")  # the result is the same
_LONG = 100  # characters: the rest of a longer name becomes a hash


def slug(label: str) -> str:
    """A strategy with its options, or several settings, as the name of a folder."""
    name = re.sub(r"[^A-Za-z0-9._+=-]+", "_", label)
    if len(name) <= _LONG:
        return name
    digest = hashlib.blake2b(name.encode(), digest_size=4).hexdigest()
    return f"{name[: _LONG - len(digest) - 1]}-{digest}"


def title(config: RunConfig, begin: str, omit: Collection[str] = ()) -> str:
    """`begin`, the data, and every setting that differs from the default."""
    words = [begin, Path(config.data).name]
    usual, given = make_config({}).settings(), config.settings()
    for name in RunConfig.model_fields:
        value = given.get(name)
        if name in ("strategy", "data", *_SILENT, *omit) or value in (None, usual.get(name)):
            continue
        words.append(f"{name}={spelled(REGISTRIES.get(name), value)}")
    return "-".join(words)


def spelled(registry: Registry[Any] | None, value: Any) -> str:
    """A value as one would write it; of a thing with options, those that are not the default."""
    if not isinstance(value, Mapping) or registry is None:
        return f"{value:g}" if isinstance(value, float) else str(value)
    name = str(value["name"])
    try:
        usual = registry.describe(registry.create(name))
    except PolytempoError:  # it has an option without a default
        usual = {}
    options = [
        f"{key}={_option(inner, usual.get(key))}"
        for key, inner in value.items()
        if key != "name" and inner != usual.get(key)
    ]
    return f"{name}:{','.join(options)}" if options else name


def _option(value: Any, usual: Any) -> str:
    if not isinstance(value, Mapping):
        return str(value)
    before = usual if isinstance(usual, Mapping) and usual.get("name") == value.get("name") else {}
    inner = [f"{key}={x}" for key, x in value.items() if key != "name" and x != before.get(key)]
    return "_".join([str(value.get("name", "")), *inner])


def of_run(config: RunConfig) -> str:
    """What the folder of one run is called."""
    strategy = spelled(REGISTRIES["strategy"], config.strategy)
    return slug(title(config, strategy)) + f"-seed{config.seed}"


@contextmanager
def new_folder(name: str) -> Iterator[Path]:
    """A folder of that name in `runs` that was not there, with a number if it has to be. If nothing
    comes of it, it goes again."""
    folder, number = RUNS / name, 2
    while True:  # several commands may look for one at once
        try:
            folder.mkdir(parents=True)
            break
        except FileExistsError:
            folder, number = RUNS / f"{name}-{number}", number + 1
    try:
        yield folder
    finally:
        if not any(folder.iterdir()):
            folder.rmdir()
            with suppress(OSError):  # there are other runs in it
                RUNS.rmdir()
