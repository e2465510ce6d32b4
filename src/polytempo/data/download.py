"""Files from the web: resumed after an interruption, checked, and under their own name only when
they are whole.

What has arrived is in `FILE.part`; next to it, `FILE.part.json` says from where and which version.
The rest is asked for only if the server can tell that it is still the same file (If-Range), or if
the hash of the whole is known.
"""

from __future__ import annotations

import hashlib
import http.client
import json
import shutil
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from polytempo.core.errors import PolytempoError
from polytempo.data.origin import Remote, megabytes
from polytempo.files import replace_text, writing

CHUNK = 1 << 18
TIMEOUT = 30.0  # seconds without a byte
TRIES = 4  # connections in a row that may break without a byte
Report = Callable[[str, int, int], None]  # file, bytes there, bytes in all


class Unavailable(Exception):
    """An address does not give the file; another may."""


@dataclass(frozen=True)
class Arrived:
    """A file that was downloaded. `checked`: the kind of hash that agreed, if one was known."""

    path: Path
    url: str
    size: int
    sha256: str
    checked: str | None


def download(
    remote: Remote, urls: Sequence[str], folder: Path, report: Report, digest: str | None
) -> Arrived:
    """The file, from the first address that has it. `digest`: what its hash must be, if known."""
    target = folder / remote.file
    if target.is_file():  # from a call that ended before it was used
        try:
            return _checked(target, urls[0], digest)
        except Unavailable:
            target.unlink()
    failures = []
    for url in urls:
        try:
            _fetch(remote, url, target, digest, report)
            return _checked(target, url, digest)
        except Unavailable as error:
            target.unlink(missing_ok=True)
            failures.append(f"{url} {error}")
    raise Unavailable("; ".join(failures))


def matches(path: Path, digest: str) -> bool:
    """Whether a file has this hash, `md5:...` or `sha256:...`."""
    kind, _, expected = digest.partition(":")
    return _hash(path, kind) == expected


def _hash(path: Path, kind: str) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, kind).hexdigest()


def _checked(path: Path, url: str, digest: str | None) -> Arrived:
    if digest and not matches(path, digest):
        kind, _, expected = digest.partition(":")
        raise Unavailable(
            f"has another content ({kind.upper()} {_hash(path, kind)}, expected {expected})"
        )
    checked = digest.partition(":")[0] if digest else None
    return Arrived(path, url, path.stat().st_size, _hash(path, "sha256"), checked)


def _fetch(remote: Remote, url: str, target: Path, digest: str | None, report: Report) -> None:
    part = target.with_name(target.name + ".part")
    note = target.with_name(target.name + ".part.json")
    idle, before = 0, _there(part)
    while not _transfer(remote, url, part, note, digest, report):
        idle = idle + 1 if _there(part) <= before else 0
        before = _there(part)
        if idle == TRIES:
            raise Unavailable(
                f"broke off after {before:,} bytes, {TRIES} times more; the same command resumes "
                "there"
            )
    part.replace(target)
    note.unlink(missing_ok=True)


def _there(part: Path) -> int:
    return part.stat().st_size if part.is_file() else 0


def _transfer(
    remote: Remote, url: str, part: Path, note: Path, digest: str | None, report: Report
) -> bool:
    """One connection: add what comes. True if the file is whole now, False if it broke off."""
    headers = {"User-Agent": "polytempo", "Accept-Encoding": "identity"}
    start = _there(part)
    version = _version(note, url)
    if start and (version or digest):
        headers["Range"] = f"bytes={start}-"
        if version:
            headers["If-Range"] = version
    try:
        request = urllib.request.Request(url, headers=headers)
        with urllib.request.urlopen(request, timeout=TIMEOUT) as response:
            return _receive(remote, url, response, part, note, report)
    except urllib.error.HTTPError as error:
        if error.code == 416:  # nothing follows what we have: that is all, or another file
            if error.headers.get("Content-Range", "").rpartition("/")[2] == str(start):
                return True
            part.unlink()
            return False
        raise Unavailable(f"does not give it ({error.code} {error.reason})") from error
    except urllib.error.URLError as error:
        raise Unavailable(f"cannot be reached ({error.reason})") from error
    except ValueError as error:
        raise Unavailable(f"sent an answer that makes no sense ({error})") from error
    except (OSError, http.client.HTTPException):
        return False


def _receive(
    remote: Remote, url: str, response: Any, part: Path, note: Path, report: Report
) -> bool:
    start, length = 0, response.headers.get("Content-Length")
    if response.status == 206:
        # The server counts from the byte that we asked for, or we cannot use it.
        span = str(response.headers.get("Content-Range"))  # bytes START-END/TOTAL
        start = int(span.removeprefix("bytes ").partition("-")[0])
        if start != _there(part):
            raise Unavailable(f"sent bytes from {start:,} on, asked for {_there(part):,}")
    total = None if length is None else start + int(length)
    size = total or max(remote.size, start)
    with writing(part):
        if (free := shutil.disk_usage(part.parent).free) < size - start:
            raise PolytempoError(
                f"{remote.file} needs {megabytes(size - start)}, but {part.parent} has "
                f"{megabytes(free)} left; free some space or choose another folder with --data-dir"
            )
        # The note first: bytes of two versions are never joined.
        tag = response.headers.get("ETag") or response.headers.get("Last-Modified") or ""
        version = "" if tag.startswith("W/") else tag
        replace_text(note, json.dumps({"url": url, "version": version}))
        file = part.open("ab" if start else "wb")
    with file:
        at = start
        while True:
            report(remote.file, at, max(size, at))
            try:
                chunk = response.read(CHUNK)
            except (OSError, http.client.HTTPException):
                return False
            if not chunk:
                return total is None or at == total
            with writing(part):
                file.write(chunk)
            at += len(chunk)


def _version(note: Path, url: str) -> str:
    """What the server called the version that we have a part of; "" if it did not, or if the part
    is from elsewhere."""
    try:
        held = json.loads(note.read_text(encoding="utf8"))
        return str(held["version"]) if held["url"] == url else ""
    except (OSError, ValueError, KeyError, TypeError):
        return ""  # no note, or a damaged one: as if there were none
