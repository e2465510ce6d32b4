"""Where does a fleet break first as it grows? A simulation of its queues, for docs/scale.md.

    python benchmarks/queues.py --out docs/images        # a table, queues.png and queues.json

Stations, each first come first served:

    device -> gateway (ends TLS, admits, reads and checks the update) -> log (group commit: whatever
    waits is written with one fsync) -> fold (in order; for a model per client, each shard of the
    bank does its part, and the update is done when the slowest shard is) -> device

A device trains for a while (log-normal), uploads, and trains again as soon as it is sent a model.
All times come from `polytempo bench fleet` and `polytempo bench server` (FIGURES: those of
docs/scale.md; --figures FILE takes others). Everything is drawn from the seed.

What is left out: the network between the machines, retries, failures, and that a machine under load
is slower than its CPU times say.
"""

from __future__ import annotations

import argparse
import heapq
import json
import math
from collections import deque
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

FIGURES = {
    "network_ms": 0.94,  # CPU per update in gRPC, TLS, reading and checking (0.25 MB each way)
    "node_ms": 0.79,  # CPU per update in the node's thread, without the fold
    "fsync_ms": 0.4,  # one group commit, without its bytes
    "disk_mb_per_s": 450.0,  # of the log
    "update_mb": 0.25,
    "fold_ms": 0.09,  # one model for all (FedAsync)
    "row_us": 7.7,  # of PACE's sweep: per model of 62,006 parameters in the bank
    "shard_ms": 1.0,  # to send an update to a shard and hear back
}
TRAINING_S = 600.0  # median of a device's training, with its wait for power and network
SPREAD = 1.0  # sigma of its logarithm
AT_ONCE = 256  # updates that are written with one fsync, at most


@dataclass(frozen=True)
class Layout:
    """Machines. `cores` of all gateways together; without any, the server does their work itself,
    in the same process as the fold. `buffer`: updates that a gateway averages before it passes one
    on (only for one model for all). `shards`: of the bank (0: one model for all)."""

    name: str
    cores: int = 0
    buffer: int = 1
    shards: int = 0


LAYOUTS = (
    Layout("one server, one model"),
    Layout("one server, PACE", shards=1),
    Layout("8 gateway cores, one model", cores=8),
    Layout("64 gateway cores, 100 updates averaged there", cores=64, buffer=100),
    Layout("64 gateway cores, PACE, 64 shards", cores=64, shards=64),
)
SIZES = (1_000, 10_000, 100_000, 1_000_000)


def services(layout: Layout, clients: int, figures: dict[str, float]) -> dict[str, float]:
    """Seconds that an update takes at each station, and how many of it work side by side."""
    ms = {name: value / 1e3 for name, value in figures.items()}
    fold = ms["fold_ms"]
    if layout.shards:
        rows = -(-clients // layout.shards)
        apart = ms["shard_ms"] if layout.shards > 1 else 0.0
        fold = 1e-6 * figures["row_us"] * rows + apart
    inside = 0.0 if layout.cores else ms["network_ms"]
    return {
        "gateway": ms["network_ms"],
        "fold": fold + ms["node_ms"] + inside,  # all that comes after the log
        "strategy": fold,
        "network": inside,
        "node": ms["node_ms"],
        "byte": figures["update_mb"] / figures["disk_mb_per_s"],
        "fsync": ms["fsync_ms"],
    }


def capacity(layout: Layout, clients: int, figures: dict[str, float]) -> dict[str, float]:
    """Updates of devices per second that gateways and server bear. One thread of the server writes
    the log and folds; it is called by what takes more of its time."""
    found = services(layout, clients, figures)
    each = found["byte"] + found["fsync"] / AT_ONCE
    shares = {"log": each, **{name: found[name] for name in ("strategy", "network", "node")}}
    busy = max(shares, key=shares.__getitem__)
    return {
        "gateways": layout.cores / found["gateway"] if layout.cores else math.inf,
        busy: layout.buffer / (each + found["fold"]),
    }


def simulate(
    layout: Layout,
    clients: int,
    figures: dict[str, float],
    *,
    updates: int = 20_000,
    seed: int = 0,
    training: float = TRAINING_S,
) -> dict[str, Any]:
    """So many updates of devices, once the queues have had the time to fill."""
    draws = np.random.default_rng([seed, clients, updates])
    times = services(layout, clients, figures)
    # In a fleet that is much larger than what is looked at, arrivals are Poisson; where devices
    # wait for the server, it is what it bears that counts. Devices are kept one by one, so both
    # come out right: a device that waits does not upload again.
    # Whoever is found in training at some moment is likely to be in a long one (sigma squared).
    sample = training * np.exp(SPREAD * draws.standard_normal(clients) + SPREAD**2)
    asked = clients / (training * math.exp(SPREAD**2 / 2))
    bears = capacity(layout, clients, figures)
    most = min(bears.values())
    # Those that wait already, where more is asked for than is borne: the last has just come.
    waiting = max(0, int(clients * (1 - most / asked)))
    offsets = draws.random(clients) * sample
    offsets[:waiting] = -draws.random(waiting) * waiting / most
    order = np.argsort(offsets)
    first = zip(offsets[order].tolist(), order.tolist(), strict=True)  # in order: time, device
    upcoming = next(first, (math.inf, -1))
    events: list[tuple[float, int]] = []  # further uploads, a heap
    gateways = [0.0] * max(1, layout.cores)
    log_free = fold_free = 0.0
    batch: deque[tuple[float, list[tuple[float, int]]]] = deque()  # at the log: when, who is in it
    partial: list[tuple[float, int]] = []
    delays: list[float] = []
    warm = updates // 2
    begin, first_done = 0.0, 0
    last = 0.0

    def commit(now: float) -> None:
        """Write what waits once the disk is free: one fsync for all that is there by then."""
        nonlocal log_free, fold_free, last, begin, first_done
        while batch and max(log_free, batch[0][0]) <= now:
            start = max(log_free, batch[0][0])
            written = [batch.popleft()]
            while batch and batch[0][0] <= start and len(written) < AT_ONCE:
                written.append(batch.popleft())
            log_free = start + times["fsync"] + len(written) * times["byte"]
            fold_free = max(fold_free, log_free)
            for _, members in written:
                fold_free += times["fold"]
                for uploaded, device in members:
                    delays.append(fold_free - uploaded)
                    if len(delays) == max(1, warm):
                        begin, first_done = fold_free, len(delays)
                    last = fold_free
                    pause = training * math.exp(SPREAD * draws.standard_normal())
                    heapq.heappush(events, (fold_free + pause, device))
            log_free = max(log_free, fold_free)  # one thread writes and folds, batch by batch

    while len(delays) < warm + updates:
        coming = min(upcoming[0], events[0][0] if events else math.inf)
        if batch and max(log_free, batch[0][0]) <= coming:
            commit(max(log_free, batch[0][0]))
            continue
        if upcoming[0] == coming:
            (now, device), upcoming = upcoming, next(first, (math.inf, -1))
        else:
            now, device = heapq.heappop(events)
        done = now
        if layout.cores:
            done = max(now, heapq.heappop(gateways)) + times["gateway"]
            heapq.heappush(gateways, done)
        partial.append((now, device))
        if len(partial) >= layout.buffer:
            batch.append((done, partial))
            partial = []
    seen = np.array(delays[warm:])
    took = last - begin
    return {
        "layout": layout.name,
        "clients": clients,
        "asked_per_s": asked,
        "updates_per_s": (len(delays) - first_done) / took,
        "p50_s": float(np.percentile(seen, 50)),
        "p99_s": float(np.percentile(seen, 99)),
        "capacity_per_s": most,
        "first_to_break": min(bears, key=bears.__getitem__),
    }


def table(rows: list[dict[str, Any]]) -> str:
    lines = [
        "| layout | devices | asked for, per s | done, per s | p50 | p99 | most per s | limit |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        lines.append(
            f"| {row['layout']} | {row['clients']:,} | {row['asked_per_s']:,.1f} | "
            f"{row['updates_per_s']:,.1f} | {_time(row['p50_s'])} | {_time(row['p99_s'])} | "
            f"{row['capacity_per_s']:,.1f} | {row['first_to_break']} |"
        )
    return "\n".join(lines)


def _time(seconds: float) -> str:
    return f"{1e3 * seconds:,.0f} ms" if seconds < 1 else f"{seconds:,.0f} s"


def plot(rows: list[dict[str, Any]], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 4.5))
    for layout in LAYOUTS:
        found = [row for row in rows if row["layout"] == layout.name]
        sizes = [row["clients"] for row in found]
        axes.plot(sizes, [row["p99_s"] for row in found], marker="o", label=layout.name)
    axes.axhline(60, color="grey", linewidth=0.8, linestyle=":")
    axes.set(xscale="log", yscale="log", xlabel="devices")
    axes.set_ylabel("upload to acknowledgement, p99, seconds")
    axes.set_title(f"Queues of a growing fleet, a training of {TRAINING_S / 60:.0f} minutes")
    axes.legend(fontsize=8)
    axes.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, help="folder for queues.png and queues.json")
    parser.add_argument("--figures", type=Path, help="JSON with other figures than docs/scale.md's")
    parser.add_argument("--updates", type=int, default=20_000)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    figures = {**FIGURES, **(json.loads(given.figures.read_text()) if given.figures else {})}
    rows = []
    for layout in LAYOUTS:
        for clients in SIZES:
            found = simulate(layout, clients, figures, updates=given.updates, seed=given.seed)
            rows.append(found)
    print(table(rows))  # noqa: T201
    if given.out:
        given.out.mkdir(parents=True, exist_ok=True)
        found = {"figures": figures, "layouts": [asdict(one) for one in LAYOUTS], "rows": rows}
        (given.out / "queues.json").write_text(json.dumps(found, indent=1) + "\n")
        plot(rows, given.out / "queues.png")


__all__ = ["capacity", "simulate"]
if __name__ == "__main__":
    main()
