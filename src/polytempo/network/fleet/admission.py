"""Who may take part: a file in the server's folder, which a running server notices.

{"policy": "certified", "admitted": [], "revoked": ["client-7"]}
"""

from __future__ import annotations

import json
import logging
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from polytempo.core.errors import PolytempoError
from polytempo.files import replace_text
from polytempo.network.wire import check_name

Policy = Literal["certified", "listed"]
FILE = "admission.json"
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Rules:
    policy: Policy = "certified"
    admitted: frozenset[str] = frozenset()
    revoked: frozenset[str] = frozenset()


class Admission:
    """The names that a server lets in: with "certified" everybody who has a certificate from the
    authority, with "listed" only those that were admitted; in either case nobody who was revoked.

    The file `admission.json` in `folder`, if there is one, has the last word on the policy.
    """

    def __init__(self, folder: Path, policy: Policy = "certified") -> None:
        self._path, self._default = folder / FILE, _Rules(policy)
        self._rules, self._seen = self._default, self._stamp()
        self._rules = _read(self._path, self._default)
        if policy != "certified" and self._seen is None:
            folder.mkdir(parents=True, exist_ok=True)
            _write(self._path, self._default)

    @property
    def revoked(self) -> frozenset[str]:
        return self._rules.revoked

    def changed(self) -> bool:
        """Look at the file again, if it is another one than before."""
        stamp = self._stamp()
        if stamp == self._seen:
            return False
        self._seen = stamp
        try:
            self._rules = _read(self._path, self._default)
        except PolytempoError as error:  # somebody is editing it: what held until now, still holds
            log.error("%s", error)
            return False
        return True

    def refusal(self, name: str) -> str | None:
        """Why that name is not let in; None if it is."""
        if name in self._rules.revoked:
            return f"{name!r} was revoked"
        if self._rules.policy == "listed" and name not in self._rules.admitted:
            return f"{name!r} is not admitted; on the server: polytempo admit {name}"
        return None

    def _stamp(self) -> tuple[int, int, int] | None:
        try:
            found = self._path.stat()
        except OSError:
            return None
        return found.st_mtime_ns, found.st_size, found.st_ino


def admit(folder: Path, name: str) -> None:
    """Let that client in (again); a running server notices within about a second."""
    rules = _known_server(folder, name)
    admitted, revoked = rules.admitted | {name}, rules.revoked - {name}
    _write(folder / FILE, replace(rules, admitted=admitted, revoked=revoked))


def revoke(folder: Path, name: str) -> None:
    """Let that client in no longer: a running server cuts it off within about a second."""
    rules = _known_server(folder, name)
    admitted, revoked = rules.admitted - {name}, rules.revoked | {name}
    _write(folder / FILE, replace(rules, admitted=admitted, revoked=revoked))


def _known_server(folder: Path, name: str) -> _Rules:
    check_name("client", name)
    if not folder.is_dir():
        raise PolytempoError(f"there is no folder {folder}; give the --out of the server")
    return _read(folder / FILE, _Rules())


def _read(path: Path, default: _Rules) -> _Rules:
    try:
        text = path.read_text(encoding="utf8")
    except FileNotFoundError:
        return default
    try:
        match json.loads(text):
            case {
                "policy": "certified" | "listed" as policy,
                "admitted": [*admitted],
                "revoked": [*revoked],
            } if all(isinstance(name, str) for name in (*admitted, *revoked)):
                return _Rules(policy, frozenset(admitted), frozenset(revoked))
    except ValueError:
        pass
    raise PolytempoError(
        f"{path} cannot be read; expected "
        '{"policy": "certified" or "listed", "admitted": [...], "revoked": [...]}'
    )


def _write(path: Path, rules: _Rules) -> None:
    found = {
        "policy": rules.policy,
        "admitted": sorted(rules.admitted),
        "revoked": sorted(rules.revoked),
    }
    replace_text(path, json.dumps(found, indent=1) + "\n")
