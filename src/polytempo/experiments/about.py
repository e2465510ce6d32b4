"""about.json: what a run is, for those who look at its folder before there is a result."""

from __future__ import annotations

import json
import platform
import shlex
import sys
from collections.abc import Mapping
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

from polytempo.core.metric import MetricInfo
from polytempo.files import replace_text


def write_about(folder: Path, metric: MetricInfo, federation: str) -> None:
    """Written when a run begins, and again when it is resumed."""
    found = {
        "metric": metric.about,
        "federation": federation,
        "command": shlex.join(["polytempo", *sys.argv[1:]]) if _is_command() else None,
        "began": datetime.now(UTC).isoformat(timespec="seconds"),
        "versions": {
            "polytempo": version("polytempo"),
            "python": platform.python_version(),
            **{name: version(name) for name in ("torch", "numpy")},
        },
        "machine": f"{platform.system()} {platform.machine()}",
    }
    replace_text(folder / "about.json", json.dumps(found, indent=2) + "\n")


def read_about(folder: Path) -> dict[str, Any]:
    """Empty in a folder of before there were such files."""
    try:
        found = json.loads((folder / "about.json").read_text(encoding="utf8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def origin(about: Mapping[str, Any]) -> dict[str, str]:
    """What a report says of when and with what a run was made."""
    versions = ", ".join(f"{name} {of}" for name, of in about.get("versions", {}).items())
    rows = {"began": about.get("began"), "versions": versions, "machine": about.get("machine")}
    return {name: str(value) for name, value in rows.items() if value}


def _is_command() -> bool:
    """Whether the run was asked for on the command line, and not from Python."""
    called = Path(sys.argv[0])
    return called.stem == "polytempo" or called.parent.name == "polytempo"
