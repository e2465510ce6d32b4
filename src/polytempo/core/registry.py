"""Things that a user names: strategies, partitioners, device models, networks, models.

One notation serves them all, on the command line, in TOML files and in Python:

    pace                              the name alone, all defaults
    pace:omega=2,reply=fresh          with options ("none" for no value)
    topk:0.01                         a number alone is the first option
    {"name": "pace", "omega": 2}      the same as a table
    pace:graph=fedamp,graph.sigma=5   options of an option that has some
    mypackage.mymodule:MyStrategy     a user's own class (options may follow after a colon)

Options are the fields of a pydantic dataclass, so they are typed and checked wherever the object
is made; a mistake becomes a one-line error that names the nearest option.
"""

from __future__ import annotations

import dataclasses
import importlib
import json
import operator
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Generic, TypeVar, cast, dataclass_transform

import pydantic
from pydantic.dataclasses import dataclass as pydantic_dataclass

from polytempo.core.errors import PolytempoError, nearest

T = TypeVar("T")
C = TypeVar("C", bound=type)


@dataclass_transform(field_specifiers=(dataclasses.field, pydantic.Field))
class Options:
    """Base of everything that has options: its subclasses are dataclasses that check their fields
    and refuse unknown ones."""

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        config = pydantic.ConfigDict(extra="forbid", arbitrary_types_allowed=True)
        pydantic_dataclass(config=config)(cls)  # completes the class in place


def parse(spec: str) -> tuple[str, dict[str, Any]]:
    """Split `name:key=value,...` into the name and its options."""
    name, colon, rest = spec.strip().partition(":")
    if colon and "=" not in rest.split(":", 1)[0]:  # module:Class, options may follow
        attribute, _, rest = rest.partition(":")
        name = f"{name}:{attribute}"
    found: dict[str, Any] = {}
    decoder = json.JSONDecoder()
    while rest.strip():
        key, equals, rest = rest.partition("=")
        rest = rest.lstrip()
        try:  # a JSON value (number, true, quoted text, list) ends where JSON says
            value, end = decoder.raw_decode(rest)
            if rest[end:].lstrip()[:1] not in ("", ","):
                raise ValueError("something follows")
            _, comma, rest = rest[end:].partition(",")
        except ValueError:  # plain text ends at the next comma
            text, comma, rest = rest.partition(",")
            value = text.strip()
        if not equals or not key.strip() or "," in key or (comma and not rest.strip()):
            raise PolytempoError(
                f"{spec!r}: cannot be read; write options as name:key=value,key=value"
            )
        found[key.strip().replace("-", "_")] = value
    return name, found


def explain(error: pydantic.ValidationError, known: Iterator[str] | list[str]) -> str:
    """The first complaint of a pydantic error, in one line that says what to do."""
    first = error.errors()[0]
    where = ".".join(str(part) for part in first["loc"])
    if first["type"] == "unexpected_keyword_argument":
        return f"unknown option {where!r}{nearest(where, known)}"
    if first["type"] in ("missing", "missing_argument"):
        return f"the option {where!r} is required: write {where}=..."
    if first["type"] == "tuple_type":
        return f"{where} is a list: write {where}=[{first['input']}]"
    return f"{where}: {first['msg']}, got {first['input']!r}" if where else first["msg"]


def default_of(maker: Any, option: str) -> Any:
    """The default of that option of a class; MISSING if there is none, or no such option."""
    for field in dataclasses.fields(maker) if dataclasses.is_dataclass(maker) else ():
        if field.name == option and field.init:
            if field.default_factory is not dataclasses.MISSING:
                return field.default_factory()
            return field.default
    return dataclasses.MISSING


def option_names(maker: Any) -> list[str]:
    """The options of a class, those of its options included (`graph.sigma`)."""
    names = []
    for field in dataclasses.fields(maker) if dataclasses.is_dataclass(maker) else ():
        default = default_of(maker, field.name)
        inner = option_names(type(default)) if isinstance(default, Options) else []
        names += [field.name] * field.init + [f"{field.name}.{key}" for key in inner]
    return names


class Registry(Generic[T]):
    """The named implementations of one kind of thing."""

    def __init__(self, kind: str, base: type | None = None) -> None:
        self.kind = kind
        self.base = base  # what a class of the user's own must derive from
        self._known: dict[str, Callable[..., T]] = {}

    def register(self, name: str) -> Callable[[C], C]:
        """Class decorator: make the class known by `name`."""

        def add(cls: C) -> C:
            cls.name = name  # type: ignore[attr-defined]
            self._known[name] = cls
            return cls

        return add

    def __iter__(self) -> Iterator[str]:
        return iter(sorted(self._known))

    def __getitem__(self, name: str) -> Callable[..., T]:
        if name in self._known:
            return self._known[name]
        if ":" in name:
            try:
                return cast(Callable[..., T], self._import(name))
            except PolytempoError:
                if name.partition(":")[0] not in self._known:
                    raise
                raise PolytempoError(
                    f"{self.kind} {name!r}: write options as name:key=value,key=value"
                ) from None
        raise PolytempoError(f"no {self.kind} is called {name!r}{nearest(name, self._known)}")

    def _import(self, name: str) -> Any:
        module, _, attribute = name.partition(":")
        try:
            return operator.attrgetter(attribute)(importlib.import_module(module))
        except (ImportError, AttributeError) as error:
            raise PolytempoError(
                f"{self.kind} {name!r} cannot be imported: {error}; is its folder on PYTHONPATH?"
            ) from error

    def create(self, spec: str | Mapping[str, Any] | T) -> T:
        """The object that `spec` describes (an object is returned as it is)."""
        if isinstance(spec, str):
            name, given = self._numbered(*parse(spec))
        elif isinstance(spec, Mapping):
            given = dict(spec)
            if "name" not in given:
                raise PolytempoError(f"a {self.kind} table needs the key 'name': {dict(spec)!r}")
            name = str(given.pop("name"))
        else:
            return self._finished(spec)
        maker = self[name]
        if self.base and not (isinstance(maker, type) and issubclass(maker, self.base)):
            raise PolytempoError(
                f"invalid {self.kind} {name!r}: derive it from {self.base.__module__}:"
                f"{self.base.__qualname__}"
            )
        given = {key: None if value == "none" else value for key, value in given.items()}
        given = self._nested(name, maker, given)
        try:
            return maker(**given)
        except pydantic.ValidationError as error:
            message = explain(error, option_names(maker))
            raise PolytempoError(f"{self.kind} {name}: {message}") from error
        except TypeError as error:  # a user's class that is not an options dataclass
            raise PolytempoError(f"{self.kind} {name}: {error}") from error

    def _finished(self, thing: T) -> T:
        """What is given is the object itself."""
        if isinstance(thing, type):
            name = thing.__qualname__
            raise PolytempoError(f"{self.kind} {name} is a class; give an object: {name}()")
        if self.base and not isinstance(thing, self.base):
            raise PolytempoError(
                f"expected a {self.kind} or the name of one, got {type(thing).__name__}"
            )
        return thing

    def _numbered(self, name: str, given: dict[str, Any]) -> tuple[str, dict[str, Any]]:
        """`topk:0.01` reads as `topk:share=0.01`."""
        known, _, value = name.partition(":")
        options = option_names(self._known.get(known))
        try:
            return (known, {options[0]: float(value), **given}) if options else (name, given)
        except ValueError:
            return name, given

    def _nested(self, name: str, maker: Any, given: Mapping[str, Any]) -> dict[str, Any]:
        """`graph.sigma` becomes the entry `sigma` of the table `graph`, of the one that is given
        or of the default's. (In TOML it is a table from the start, but one without a name.)"""
        found = {key: value for key, value in given.items() if "." not in key}
        for key, value in found.items():
            default = default_of(maker, key)
            if isinstance(value, Mapping) and "name" not in value and isinstance(default, Options):
                found[key] = {**self.describe(cast(T, default)), **value}
        for key in given.keys() - found.keys():
            outer, _, inner = key.partition(".")
            table = found.get(outer, default_of(maker, outer))
            if isinstance(table, str):
                inner_name, options = parse(table)
                table = {"name": inner_name, **options}
            elif isinstance(table, Options):
                table = self.describe(cast(T, table))
            if not isinstance(table, Mapping):
                near = nearest(key, option_names(maker))
                raise PolytempoError(f"{self.kind} {name}: unknown option {key!r}{near}")
            found[outer] = {**table, inner: given[key]}
        return found

    def _spelled(self, value: Any) -> Any:
        return self.describe(cast(T, value)) if isinstance(value, Options) else value

    def describe(self, thing: T) -> dict[str, Any]:
        """The table from which `create` makes an equal object, in another process too: a class of
        the user's own is named by its module, since it may not be registered there."""
        cls = type(thing)
        name = f"{cls.__module__}:{cls.__qualname__}"
        if cls.__module__.startswith("polytempo."):
            name = cls.__dict__.get("name", name)
        found: dict[str, Any] = {"name": name}
        if dataclasses.is_dataclass(thing):
            for field in dataclasses.fields(thing):
                value = getattr(thing, field.name)
                if isinstance(value, tuple):
                    value = [self._spelled(item) for item in value]
                else:
                    value = self._spelled(value)
                if field.init and not (value is None and field.default is None):
                    found[field.name] = "none" if value is None else value  # TOML has no null
        return found
