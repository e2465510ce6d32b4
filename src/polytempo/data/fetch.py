"""`polytempo data get`: download a data set, or take the archives that one has, check them, and
write our own file of it into the data folder.

Downloads are kept in the folder `downloads` only until they are converted. What came is remembered
in `downloads.json` with its SHA-256, so that a later download of a file whose publisher gives no
hash is compared with the first.
"""

from __future__ import annotations

import datetime
import json
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from polytempo.core.errors import PolytempoError, nearest
from polytempo.data.download import Arrived, Report, Unavailable, download, matches
from polytempo.data.official import Arrays
from polytempo.data.origin import ORIGINS, Origin
from polytempo.data.source import canonical, data_folder
from polytempo.data.stored import at_hand, convert, lying, write
from polytempo.files import Claim, replace_text

RECORD = "downloads.json"


@dataclass(frozen=True)
class Got:
    """A data set that is in the data folder now; `new` if it was not before.

    remarks: what could not be checked, or is not as expected.
    """

    name: str
    path: Path
    new: bool
    samples: int | None = None
    remarks: tuple[str, ...] = ()


def known_name(name: str) -> str:
    """The name as we write it: uci-har and uci_har are one."""
    found = canonical(name)
    if found not in ORIGINS:
        raise PolytempoError(
            f"{name!r} cannot be downloaded{nearest(found, ORIGINS)}; `polytempo data` lists all"
        )
    return found


def get(
    name: str,
    *,
    data_dir: str | Path | None = None,
    files: Sequence[Path] = (),
    urls: Sequence[str] = (),
    force: bool = False,
    report: Report = lambda file, done, total: None,
) -> Got:
    """Make sure that a data set is in the data folder.

    files: archives or folders of the publisher's that are here already, instead of a download.
    urls: where to download from instead: a folder (ending in /) with files of the official names,
        or the address of each file.
    force: get it again, and replace our own file of it.
    report: is told of progress: file, bytes there, bytes in all (0 while converting).
    """
    name = known_name(name)
    origin, folder = ORIGINS[name], data_folder(data_dir)
    addresses = _addresses(name, origin, urls)
    if origin.needs and not at_hand(origin.needs, folder):
        if files:
            raise PolytempoError(
                f"{name} needs {origin.needs} too, which is not in {folder}; first: polytempo data "
                f"get {origin.needs}"
            )
        get(origin.needs, data_dir=data_dir, urls=urls, report=report)
    # Asked to convert files, only one of our own will do.
    there = lying(folder, origin.own) if files else at_hand(name, folder)
    if there and not force:
        return Got(name, there[0], new=False)
    path = folder / origin.own[0][0]
    with Claim(folder / "downloads", "another --data-dir"):
        if files:
            remarks = _unofficial(origin, files)
            arrays = _converted(name, origin, files, report)
            write(path, arrays)
        else:
            arrived = _download(name, origin, addresses, folder, report)
            remarks = [
                f"{each.path.name}: its publisher gives no hash; SHA-256 {each.sha256} is kept in "
                f"{RECORD} for comparison"
                for each in arrived
                if each.checked is None
            ]
            try:
                arrays = _converted(name, origin, [each.path for each in arrived], report)
            except PolytempoError:
                _discard(arrived)  # of no use, and not to be used again
                raise
            write(path, arrays)
            _remember(folder, name, arrived)
            _discard(arrived)
    samples = sum(len(arrays[key]) for key in arrays if key[:2] == "y_") or None
    if samples and origin.samples and samples != origin.samples:
        remarks.append(f"{samples:,} samples; the official data set has {origin.samples:,}")
    return Got(name, path, True, samples, tuple(remarks))


def _addresses(name: str, origin: Origin, urls: Sequence[str]) -> list[Sequence[str]]:
    """Where to look for each of the files."""
    for url in urls:
        if not url.startswith(("http://", "https://")):
            raise PolytempoError(
                f"{url!r} is not an http:// or https:// address; for a file on this machine use "
                "--from"
            )
    if not urls:
        return [remote.urls for remote in origin.remotes]
    if all(url.endswith("/") for url in urls):
        return [[url + remote.file for url in urls] for remote in origin.remotes]
    if len(urls) != len(origin.remotes):
        raise PolytempoError(
            f"{name} has {len(origin.remotes)} files, but --url was given {len(urls)} times; give "
            f"it once for each of {', '.join(remote.file for remote in origin.remotes)}, or for a "
            "folder with all of them, ending in /"
        )
    return [[url] for url in urls]


def _converted(name: str, origin: Origin, paths: Sequence[Path], report: Report) -> Arrays:
    report(f"converting {name}", 0, 0)
    return convert(name, origin, paths)


def _discard(arrived: Sequence[Arrived]) -> None:
    for each in arrived:
        each.path.unlink()


def _unofficial(origin: Origin, files: Sequence[Path]) -> list[str]:
    """What is not the very file of the publisher, though it has its name."""
    digests = {remote.file: remote.digest for remote in origin.remotes}
    remarks = []
    for path in files:
        digest = digests.get(path.name) if path.is_file() else None
        if digest and not matches(path, digest):
            remarks.append(f"{path} differs from the official file ({digest})")
    return remarks


def _download(
    name: str, origin: Origin, addresses: list[Sequence[str]], folder: Path, report: Report
) -> list[Arrived]:
    arrived = []
    for remote, urls in zip(origin.remotes, addresses, strict=True):
        before = _record(folder).get(name, {}).get(remote.file)
        digest = remote.digest or (f"sha256:{before['sha256']}" if before else None)
        try:
            arrived.append(download(remote, urls, folder / "downloads", report, digest))
        except Unavailable as error:
            changed = (
                f"; it was downloaded before, on {before['date']}: if the publisher has changed it "
                f"since, remove {folder / RECORD}"
                if before and not remote.digest
                else ""
            )
            having = " ".join(f"--from {shlex.quote(each.file)}" for each in origin.remotes)
            raise PolytempoError(
                f"{remote.file} could not be downloaded: {error}{changed}; check the connection, "
                "name another address with --url, or get the file in another way, then run: "
                f"polytempo data get {name} {having}"
            ) from error
    return arrived


def _record(folder: Path) -> dict[str, Any]:
    path = folder / RECORD
    try:
        found: dict[str, Any] = json.loads(path.read_text(encoding="utf8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise PolytempoError(f"{path} cannot be read: {error}; remove it") from error
    return found


def _remember(folder: Path, name: str, arrived: Sequence[Arrived]) -> None:
    came = {
        each.path.name: {
            "url": each.url,
            "bytes": each.size,
            "sha256": each.sha256,
            "checked": each.checked,
            "date": datetime.date.today().isoformat(),
        }
        for each in arrived
    }
    text = json.dumps({**_record(folder), name: came}, indent=2)
    replace_text(folder / RECORD, text + "\n")
