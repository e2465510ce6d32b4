"""Memory and time per update as the number of clients grows, each size in a process of its own."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

CLIENTS = (100, 1_000, 10_000)


def measure_scale(clients: int, *, workers: int, updates: int = 300) -> dict[str, Any]:
    """PACE on the synthetic federation, with models of LeNet's size (62,000 parameters)."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "polytempo", "run", "--json", "--out", f"{folder}/run"]
        settings = {
            "strategy": "pace",
            "data": "synthetic",
            "clients": clients,
            "model": "mlp:hidden=1440",
            "updates": updates,
            "eval-every": updates,
            "adapt-epochs": 0,
            "workers": workers,
        }
        for key, value in settings.items():
            command += [f"--{key}", str(value)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(f"{' '.join(command)}\n{done.stderr}")
        result = json.loads(Path(folder, "run", "result.json").read_text())
    wall = result["wall_seconds"]
    return {
        "clients": clients,
        "parameters": result["parameters"],
        "updates": updates,
        "peak_mb": result["peak_rss_mb"],
        "training_ms": 1e3 * wall["training"] / updates,
        "server_ms": 1e3 * wall["server"] / updates,
        "evaluation_s": wall["evaluation"],
        "total_s": wall["total"],
    }
