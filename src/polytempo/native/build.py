"""Compiling C++ at first use, once for a text, a compiler and a CPU.

Libraries are kept under the user's cache folder (`POLYTEMPO_CACHE`, else `~/.cache/polytempo`). The
name of one is a hash of everything that it depends on, so nothing there ever goes stale; the folder
may be deleted at any time.
"""

from __future__ import annotations

import ctypes
import hashlib
import importlib.util
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path

_FLAGS = "-O3 -std=c++17 -shared -fPIC -fno-math-errno"


class NoCompiler(Exception):
    """Why nothing can be compiled here."""


def library(text: str, headers: Path | None = None) -> ctypes.CDLL:
    """The C++ text, compiled and loaded. `headers`: the folder of what it includes."""
    compiler, flags = find_compiler(), _flags()
    name = hashlib.sha256(
        "\n".join([text, _read(headers), *_identity(compiler), *flags, _cpu()]).encode()
    ).hexdigest()[:20]
    folder = cache_folder()
    found = folder / f"{name}.so"
    if not found.exists():
        include = [] if headers is None else [f"-I{headers}"]
        _compile(text, [*compiler, *flags, *include], found)
    try:
        return ctypes.CDLL(str(found))
    except OSError as error:
        raise NoCompiler(f"{found} cannot be loaded ({error}); delete it") from error


def find_compiler() -> list[str]:
    """The C++ compiler: `POLYTEMPO_CXX`, one on the path, or that of the package ziglang."""
    named = os.environ.get("POLYTEMPO_CXX")
    if named is not None:
        command = named.split()
        if not command or shutil.which(command[0]) is None:
            raise NoCompiler(f"POLYTEMPO_CXX={named!r} is not a command here")
        return command
    for name in ("c++", "g++", "clang++"):
        if shutil.which(name) is not None:
            return [name]
    if importlib.util.find_spec("ziglang") is not None:
        return [sys.executable, "-m", "ziglang", "c++"]
    raise NoCompiler('no C++ compiler: install one, or pip install "polytempo[native]"')


def cache_folder() -> Path:
    """Where compiled libraries are kept."""
    named = os.environ.get("POLYTEMPO_CACHE")
    try:
        base = Path(named) if named else Path.home() / ".cache" / "polytempo"
        folder = base / "native"
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    except (OSError, RuntimeError):  # the latter where there is no home
        return _own_folder()
    return folder if os.access(folder, os.W_OK) else _own_folder()


@cache
def _own_folder() -> Path:
    """For this process, where there is no home to write to."""
    return Path(tempfile.mkdtemp(prefix="polytempo-native-"))


def _flags() -> list[str]:
    machine = "-mcpu=native" if platform.machine() in ("arm64", "aarch64") else "-march=native"
    return [*_FLAGS.split(), machine, *os.environ.get("POLYTEMPO_CXXFLAGS", "").split()]


@cache
def _read(headers: Path | None) -> str:
    return "\n".join(x.read_text() for x in sorted(headers.glob("*.hpp"))) if headers else ""


def _identity(compiler: list[str]) -> list[str]:
    """The compiler as it is now: an upgrade makes it another one."""
    path = Path(shutil.which(compiler[0]) or compiler[0]).resolve()
    facts = path.stat()
    return [*compiler, str(path), str(facts.st_size), str(facts.st_mtime_ns)]


@cache
def _cpu() -> str:
    """What the instructions that may be used depend on: machines may share a cache folder."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return f"{platform.machine()} {platform.processor()}"
    return "\n".join(
        sorted({x for x in lines if x.startswith(("model name", "flags", "Features"))})
    )


def _compile(text: str, command: list[str], target: Path) -> None:
    try:
        with tempfile.TemporaryDirectory(dir=target.parent) as room:
            code, made = Path(room, "code.cpp"), Path(room, "code.so")
            code.write_text(text, encoding="utf8")
            full = [*command, str(code), "-o", str(made), "-lm"]
            done = subprocess.run(full, capture_output=True, text=True, timeout=300, check=False)
            if done.returncode != 0:
                said = (done.stderr.strip() or done.stdout.strip()).splitlines()
                raise NoCompiler(f"{command[0]} failed: {said[0] if said else 'no message'}")
            os.replace(made, target)  # others may be doing the same
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NoCompiler(f"{command[0]} did not compile: {error}") from error
