"""about.json: what a run is, for those who look at its folder before there is a result."""

from __future__ import annotations

import json
import platform
import shlex
import sys
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path

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


def _is_command() -> bool:
    """Whether the run was asked for on the command line, and not from Python."""
    called = Path(sys.argv[0])
    return called.stem == "polytempo" or called.parent.name == "polytempo"
