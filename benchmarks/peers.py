#!/usr/bin/env python3
"""Polytempo beside other frameworks: the same work in each, in turns, in one run.

    python benchmarks/peers.py --work FOLDER

Makes a virtual environment for each contestant, whose program is the file `with_NAME.py`, and lets
them compete (`contest.py`). README.md says what is compared and what is not.
"""

# ruff: noqa: T201  (it speaks to whoever runs it)
from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from contest import ContestError, Player, contest, summary

HERE = Path(__file__).resolve().parent
TORCH = "torch==2.13.0"
COHORT = 10  # clients in a round: a block is some whole rounds


@dataclass(frozen=True)
class Contestant:
    """`setup`: how it runs here. `environment`: where its packages are; `needs`: what pip installs
    there beside torch. `versions`: the packages that the results name."""

    title: str
    setup: str
    environment: str
    needs: tuple[str, ...]
    versions: tuple[str, ...]
    launcher: tuple[str, ...] = ()  # arguments of Python, before the file


OURS = ("-c", str(HERE.parent / "constraints.txt"), "-e", f"{HERE.parent}[images]")
TWO_RANKS = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")
CONTESTANTS = {
    "plain": Contestant("plain torch loop", "1 process", "polytempo", OURS, ("torch",)),
    "polytempo": Contestant(
        "Polytempo", "2 worker processes", "polytempo", OURS, ("polytempo", "torch")
    ),
    "flower": Contestant(
        *("Flower", "2 Ray actors", "flower"),
        needs=("flwr[simulation]==1.41.0",),
        versions=("flwr", "ray", "torch"),
    ),
    "fedlab": Contestant(
        *("FedLab", "2 client processes", "fedlab"),
        needs=("fedlab==1.3.0",),
        versions=("fedlab", "torch"),
    ),
    "fluke": Contestant(
        *("fluke", "1 process", "fluke"),
        needs=("fluke-fl==0.8.1",),
        versions=("fluke-fl", "torch"),
    ),
    "pfl": Contestant(
        *("pfl-research", "2 processes of torchrun", "pfl"),
        needs=("pfl[pytorch]==0.6.0",),
        versions=("pfl", "torch"),
        launcher=TWO_RANKS,
    ),
}


def install(contestant: Contestant, folder: Path) -> Path:
    """The Python of the contestant's environment, which is made unless it is there. torch comes
    first, on its own, and is then a constraint: no framework brings another one."""
    environment = folder / "environments" / contestant.environment
    python, marker = environment / "bin" / "python", environment / "installed.json"
    wanted = json.dumps([TORCH, *contestant.needs])
    if not marker.exists() or marker.read_text() != wanted:
        print(f"installing {environment}", flush=True)
        subprocess.run([sys.executable, "-m", "venv", "--clear", environment], check=True)
        (environment / "torch.txt").write_text(TORCH + "\n")
        pip = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        subprocess.run([*pip, TORCH], check=True)
        subprocess.run([*pip, "-c", environment / "torch.txt", *contestant.needs], check=True)
        marker.write_text(wanted)
    return python


def versions(python: Path, packages: Sequence[str]) -> dict[str, str]:
    code = "import sys; from importlib.metadata import version as v; print(*map(v, sys.argv[1:]))"
    found = subprocess.run([python, "-c", code, *packages], check=True, stdout=subprocess.PIPE)
    return dict(zip(packages, found.stdout.decode().split(), strict=True))


def surroundings(data: Path, batch: int = 1, threads: int = 1) -> dict[str, str]:
    """A contestant's environment variables: no limit of threads and no search path that happen to
    be set in this shell, no telemetry."""
    dropped = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "PYTHONPATH", "PYTHONHOME")
    kept = {name: value for name, value in os.environ.items() if name not in dropped}
    quiet = {"FLWR_TELEMETRY_ENABLED": "0", "RAY_USAGE_STATS_ENABLED": "0"}
    told = {"PEERS_DATA": str(data), "PEERS_BATCH": str(batch), "PEERS_THREADS": str(threads)}
    return kept | quiet | told


def machine() -> dict[str, Any]:
    info = Path("/proc/cpuinfo").read_text().splitlines()
    names = [line.partition(":")[2].strip() for line in info if line.startswith("model name")]
    return {
        "processor": names[0] if names else platform.processor(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "system": platform.platform(),
        "python": platform.python_version(),
        "load_before": os.getloadavg()[0],
    }


def table(contestants: Mapping[str, Any], setting: Mapping[str, Any]) -> str:
    """The figures of one batch size, in Markdown."""
    heads = ["", "version", "runs as", "ms per training", "from - to", "CPU ms"]
    heads += ["times the plain loop", "loss"]
    lines = [f"**Batch {setting['batch']}**", "", _row(heads), "|---" * len(heads) + "|"]
    for name, found in setting["medians"].items():
        who = contestants[name]
        lines.append(
            _row(
                (
                    who["title"],
                    next(iter(who["versions"].values())),
                    who["setup"],
                    f"{1e3 * found['wall']:.1f}",
                    f"{1e3 * found['fastest']:.1f} - {1e3 * found['slowest']:.1f}",
                    f"{1e3 * found['cpu']:.1f}",
                    f"{found['speedup']:.2f}" if "speedup" in found else "",
                    f"{setting['losses'][name]:.3f}",
                )
            )
        )
    return "\n".join(lines)


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def arguments(given: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Polytempo beside other frameworks, in turns.")
    add = parser.add_argument
    where = "folder for environments, data and logs (about 8 GB), which the next run uses again"
    add("--work", type=Path, required=True, metavar="FOLDER", help=where)
    add("--only", nargs="+", choices=CONTESTANTS, default=list(CONTESTANTS), help="contestants")
    add("--batch", nargs="+", type=int, default=[64, 10], help="batch sizes")
    add("--threads", type=int, default=1, help="of contestants that have one process")
    add("--turns", type=int, default=5, help="blocks of each contestant")
    add("--block", type=int, default=20, help="client trainings in a block")
    out = "file for the results, JSON (default: in the folder); tables go beside it, as .md"
    add("--out", type=Path, metavar="FILE", help=out)
    chosen = parser.parse_args(given)
    if chosen.block < 1 or chosen.block % COHORT:
        parser.error(f"--block {chosen.block}: a multiple of {COHORT}, the clients of a round")
    for name in ("turns", "threads"):
        if getattr(chosen, name) < 1:
            parser.error(f"--{name} {getattr(chosen, name)}: at least 1")
    if not Path("/proc/self/stat").exists():
        parser.error("processor times are read from /proc, which only Linux has")
    return chosen


def main(given: Sequence[str] | None = None) -> None:
    chosen = arguments(given)
    folder = chosen.work.resolve()
    logs, data = folder / "logs", folder / "data"
    for made in (logs, data):
        made.mkdir(parents=True, exist_ok=True)
    ours = install(CONTESTANTS["polytempo"], folder)
    playing = {name: who for name, who in CONTESTANTS.items() if name in chosen.only}
    pythons = {name: install(who, folder) for name, who in playing.items()}
    subprocess.run([ours, HERE / "make_data.py"], env=surroundings(data), check=True)
    contestants = {
        name: {
            "title": who.title,
            "setup": who.setup,
            "versions": versions(pythons[name], who.versions),
        }
        for name, who in playing.items()
    }
    result: dict[str, Any] = {
        "date": time.strftime("%Y-%m-%d %H:%M"),
        "machine": machine(),
        "data": "CIFAR-10" if os.environ.get("POLYTEMPO_DATA") else "made up",
        "turns": chosen.turns,
        "block": chosen.block,
        "threads": chosen.threads,
        "contestants": contestants,
        "settings": [],
    }
    for batch in chosen.batch:
        with ExitStack() as stack:
            players = []
            for name, who in playing.items():
                command = [str(pythons[name]), *who.launcher, str(HERE / f"with_{name}.py")]
                log = logs / f"{name}-{batch}.log"
                player = Player(name, command, log, surroundings(data, batch, chosen.threads))
                players.append(stack.enter_context(player))
            blocks = contest(
                players, chosen.turns, chosen.block, lambda now: print(now, flush=True)
            )
            losses = {player.name: player.loss() for player in players}
        result["settings"].append(
            {
                "batch": batch,
                "medians": summary(blocks, chosen.block),
                "losses": losses,
                "blocks": blocks,
            }
        )
    out = chosen.out or folder / f"peers-{time.strftime('%Y%m%d-%H%M')}.json"
    out.write_text(json.dumps(result, indent=1) + "\n")
    tables = "\n\n".join(table(contestants, setting) for setting in result["settings"])
    out.with_suffix(".md").write_text(tables + "\n")
    print(f"\n{tables}\n\nAll figures: {out}")


if __name__ == "__main__":
    try:
        main()
    except ContestError as error:
        sys.exit(str(error))
