"""docs/mistakes.md tells the truth: each row is run, its message compared, its state looked at."""

import errno
import os
import re
import sys
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from shutil import copytree
from typing import NamedTuple

import pytest

import polytempo as pt
from polytempo import files
from polytempo.experiments import drive
from polytempo.network.session import free_ports

PAGE = (Path(__file__).parents[2] / "docs" / "mistakes.md").read_text(encoding="utf8")
GIVEN, MINE = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
PORT = "7500"  # that the page has: a free one takes its place


class Row(NamedTuple):
    mistake: str
    given: str
    message: str
    state: str


def rows() -> Iterator[Row]:
    for line in PAGE.splitlines():
        if line.startswith("| ") and not line.startswith("| mistake"):
            cells = [cell.strip() for cell in line.strip("|").split(" | ")]
            mistake, given, message, state = cells
            yield Row(mistake, given.strip("`"), message.strip("`"), state)


ROWS = list(rows())


# -- the reader's folder --------------------------------------------------------------------------


@pytest.fixture(scope="module")
def prepared(polytempo, tmp_path_factory):
    """A run of 12 updates with two checkpoints, certificates, and the files of the page."""
    folder = tmp_path_factory.mktemp("mistakes")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setattr(drive, "CHECKPOINT_SECONDS", -1e9)
        assert polytempo("run", "--updates", 12, "--out", "runs/mine").code == 0
        for name in ("certs", "other"):
            given = ("--server", "server=127.0.0.1", "--clients", "ann")
            assert polytempo("certs", "--out", name, *given).code == 0
    (folder / "mine.py").write_text(MINE)
    return folder


@pytest.fixture
def folder(prepared, tmp_path, monkeypatch):
    place = tmp_path / "reader"
    copytree(prepared, place)
    monkeypatch.chdir(place)
    monkeypatch.setattr(sys, "path", [str(place), *sys.path])
    yield place
    sys.modules.pop("mine", None)


def contents(folder: Path) -> dict[str, bytes | None]:
    return {
        str(path.relative_to(folder)): path.read_bytes() if path.is_file() else None
        for path in sorted(folder.rglob("*"))
        if "__pycache__" not in path.parts
    }


# -- what has happened before ---------------------------------------------------------------------


def damage(path: str) -> None:
    content = bytearray(Path(path).read_bytes())
    content[len(content) // 2] ^= 255
    Path(path).write_bytes(content)


def edited() -> None:
    config = Path("runs/mine/config.toml")
    config.write_text(re.sub(r"(?m)^lr = .*", "lr = 0.2", config.read_text()))


def one_damaged() -> None:
    damage("runs/mine/checkpoint.safetensors")


def both_damaged() -> None:
    damage("runs/mine/checkpoint.safetensors")
    damage("runs/mine/checkpoint.previous.safetensors")


BEFORE: dict[str, Callable[[], None]] = {
    "an edited `config.toml`": edited,
    "a power cut that has damaged the last checkpoint": one_damaged,
    "both checkpoints are damaged": both_damaged,
}


# -- what is the case meanwhile -------------------------------------------------------------------


@contextmanager
def full_disk() -> Iterator[None]:
    def sync(path: Path) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(files, "sync", sync)
        yield


@contextmanager
def tls_server(port: str) -> Iterator[None]:
    grpc = pytest.importorskip("grpc")
    certs = Path("certs")
    secret = grpc.ssl_server_credentials(
        [((certs / "server.key").read_bytes(), (certs / "server.pem").read_bytes())],
        root_certificates=(certs / "ca.pem").read_bytes(),
        require_client_auth=True,
    )
    server = grpc.server(ThreadPoolExecutor(1))
    server.add_secure_port(f"127.0.0.1:{port}", secret)
    server.start()
    try:
        yield
    finally:
        server.stop(None)


def meanwhile(row: Row, port: str) -> AbstractContextManager[None]:
    if row.mistake == "a full disk":
        return full_disk()
    if row.mistake in ("a port that is in use", "a certificate of another authority"):
        return tls_server(port)
    return nullcontext()


# -- the test -------------------------------------------------------------------------------------


def said(row: Row, polytempo: Callable, port: str) -> tuple[int, list[str]]:
    """The exit code, and what is told."""
    if row.given.startswith("polytempo "):
        outcome = polytempo(*row.given.replace(PORT, port).split()[1:])
        assert "Traceback" not in outcome.err
        lines = [line.removeprefix("error: ") for line in outcome.err.splitlines()]
        return outcome.code, [line.replace(port, PORT) for line in lines]
    names: dict[str, object] = {}
    exec(GIVEN, names)
    with warnings.catch_warnings(), pytest.raises(pt.PolytempoError) as caught:
        warnings.simplefilter("ignore")  # x / 0
        eval(row.given, names)
    return 2, [str(caught.value)]


@pytest.mark.parametrize("row", ROWS, ids=[row.mistake for row in ROWS])
def test_the_message_and_the_state_are_those_of_the_page(row, folder, polytempo, interrupt):
    [port] = free_ports(1)
    port = str(port)
    exec(GIVEN, {})  # writes what the page writes
    BEFORE.get(row.mistake, lambda: None)()
    if row.mistake.startswith("Ctrl-C"):
        interrupt(20)
    before = contents(folder)
    with meanwhile(row, port):
        code, lines = said(row, polytempo, port)
    pattern = ".*".join(map(re.escape, row.message.split("...")))
    assert any(re.fullmatch(pattern, line) for line in lines), "\n".join(lines)
    check_state(row, code, before, contents(folder), polytempo)


def check_state(row: Row, code: int, before: dict, after: dict, polytempo: Callable) -> None:
    if "only a" in row.state:
        assert code == 0
    elif row.mistake.startswith("Ctrl-C"):
        assert code == 130
    else:
        assert code == (75 if "Exit code 75" in row.state else 2)
    if row.state.startswith(("Nothing is written", "`runs/mine` is as it was")):
        assert after == before
    if row.state.startswith("`runs/new` holds no result"):
        assert not {"runs/new/result.json", "runs/new/checkpoint.safetensors"} & after.keys()
        assert polytempo("run", "--updates", 4, "--out", "runs/new").code == 0
    if row.state.startswith("`hub` holds a run without updates"):
        assert "hub/journal" in after and "hub/result.json" not in after
    for command in re.findall(r"`polytempo (.*?)`", row.state):
        outcome = polytempo(*command.split())
        assert outcome.code == 0, outcome.err
