"""What is published: it builds from the sources, is whole, holds nothing else, and runs."""

import csv
import json
import os
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf8"))["project"]
PACKAGE = ROOT / "src" / "polytempo"
FILES = {
    path.relative_to(ROOT / "src").as_posix()
    for path in PACKAGE.rglob("*")
    if path.is_file() and "__pycache__" not in path.parts
}


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """A source archive of a copy of the sources, and a wheel that was built from that archive."""
    tree = tmp_path_factory.mktemp("sources")
    for name in ("pyproject.toml", "MANIFEST.in", "README.md", "LICENSE", "CHANGELOG.md"):
        shutil.copy(ROOT / name, tree)
    shutil.copy(ROOT / "CITATION.cff", tree)
    shutil.copytree(PACKAGE, tree / "src" / "polytempo")
    leftovers = [
        "tests/test_it.py",
        "src/polytempo/core/__pycache__/old.pyc",
        "build/lib/polytempo/old.py",
    ]
    for leftover in leftovers:  # what a working folder has
        (tree / leftover).parent.mkdir(parents=True, exist_ok=True)
        (tree / leftover).write_text("")
    out = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", out, tree]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    [wheel], [source] = out.glob("*.whl"), out.glob("*.tar.gz")
    return wheel, source


@pytest.fixture(scope="module")
def unpacked(built, tmp_path_factory):
    folder = tmp_path_factory.mktemp("wheel")
    with zipfile.ZipFile(built[0]) as wheel:
        wheel.extractall(folder)
    return folder


def polytempo(unpacked: Path, folder: Path, *arguments: str) -> str:
    """The command as the wheel's entry point starts it, in an empty folder."""
    start = (
        f"import polytempo; assert polytempo.__file__.startswith({str(unpacked)!r});"
        "import sys; from importlib.metadata import entry_points;"
        "[command] = entry_points(group='console_scripts', name='polytempo');"
        "sys.argv[0] = 'polytempo'; sys.exit(command.load()())"
    )
    done = subprocess.run(
        [sys.executable, "-c", start, *arguments],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(unpacked), "PYTHONDONTWRITEBYTECODE": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_wheel_holds_the_package_and_nothing_else(built):
    wheel, _ = built
    assert wheel.name == f"polytempo-{PROJECT['version']}-py3-none-any.whl"
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if not name.endswith("/")}
    assert {name for name in names if ".dist-info/" not in name} == FILES
    assert {Path(name).suffix for name in FILES} >= {".hpp", ".cpp", ".toml", ".proto", ".js"}
    assert any(name.endswith("/licenses/LICENSE") for name in names)


def test_the_source_archive_holds_what_it_takes_and_no_more(built):
    _, source = built
    with tarfile.open(source) as archive:
        names = {m.name.partition("/")[2] for m in archive.getmembers() if m.isfile()}
    inside = {name.removeprefix("src/") for name in names if name.startswith("src/polytempo/")}
    assert inside == FILES
    assert {"LICENSE", "README.md", "CHANGELOG.md", "CITATION.cff", "pyproject.toml"} <= names
    assert not [name for name in names if name.startswith(("tests/", "build/"))]


def test_the_wheel_alone_tells_its_version(unpacked, tmp_path):
    assert polytempo(unpacked, tmp_path, "--version").strip() == PROJECT["version"]
    assert not list(tmp_path.iterdir())


def test_the_wheel_alone_runs(unpacked, tmp_path):
    small = ["--clients", "4", "--limit", "80", "--updates", "8", "--adapt-epochs", "1"]
    arguments = ["run", "--strategy", "pace", "--data", "digits", *small, "--workers", "1"]
    polytempo(unpacked, tmp_path, *arguments, "--out", "runs/first")
    result = json.loads((tmp_path / "runs/first/result.json").read_text())
    assert result["complete"] and result["version"] == PROJECT["version"]
    with open(tmp_path / "runs/first/clients.csv", newline="") as table:
        assert len(list(csv.DictReader(table))) == 4


def test_the_wheel_alone_knows_the_experiments_of_the_papers(unpacked, tmp_path):
    shown = polytempo(unpacked, tmp_path, "reproduce")
    for table in ("pace/table2", "casa/table1", "ace/fig2", "p2p/table1"):
        assert table in shown


def test_every_extra_is_described():
    page = (ROOT / "docs" / "install.md").read_text(encoding="utf8")
    for extra in PROJECT["optional-dependencies"]:
        assert f"| `{extra}` |" in page, extra
