"""A server and its clients over the loopback interface, with mutual TLS: how soon a pushed model is
swapped in, how soon an update is acknowledged, what a crowd of clients costs, and whether memory
stays flat.

The server is a process of its own (`fleet_parts.py`); pushed models are in `fleet_swap.py`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from statistics import median
from typing import Any

import numpy as np

from polytempo.bench.fleet_parts import (
    PATIENCE,
    Light,
    Served,
    Spec,
    percentiles,
    rss_mb,
    serving,
)
from polytempo.bench.fleet_swap import TRAINERS, measure_swap
from polytempo.core.errors import PolytempoError

# Model, strategy, and how long each of 1,000 clients rests between two uploads: without a rest, the
# most that there is; with one, a load that the server can bear.
LOADS = (
    ("linear", "fedasync", 0.0),
    ("lenet", "fedasync", 0.0),
    ("lenet", "fedasync", 20.0),
    ("lenet", "pace", 60.0),
)


# -- an update is acknowledged -----------------------------------------------------------------


def measure_upload(model: str, *, sync: bool, repeats: int = 50) -> dict[str, Any]:
    """From the first byte of an update to its acknowledgement, one client."""
    with ExitStack() as stack, serving(Spec(model, sync=sync), ["one"]) as server:
        light = Light(server, ["one"], rest=0.0)
        stack.callback(light.close)
        light.connected()
        _arrive(server, 3)
        light.begin()
        before = server.figures()
        _arrive(server, before["updates"] + repeats + 1)  # the last may not be acknowledged yet
        latencies, after = light.end(), server.figures()
    commits = after["commits"] - before["commits"]
    return {
        "model": model,
        "megabytes": 4e-6 * server.numbers,
        "fsync": sync,
        "repeats": len(latencies),
        "commit_ms": 1e3 * (after["commit_seconds"] - before["commit_seconds"]) / commits,
        **percentiles(latencies),
    }


def _arrive(server: Served, updates: float) -> None:
    end = time.monotonic() + PATIENCE
    while server.figures()["updates"] < updates:
        if time.monotonic() > end:
            raise PolytempoError("updates do not arrive; is the machine overloaded?")
        time.sleep(0.02)


# -- a crowd -----------------------------------------------------------------------------------


@contextmanager
def crowd(spec: Spec, rest: float, processes: int = 4) -> Iterator[tuple[Served, list[Light], Any]]:
    """A server with light clients, all connected; and how that went."""
    names = [f"light-{number}" for number in range(spec.clients)]
    with ExitStack() as stack, serving(spec, names) as server:
        empty = server.figures()["rss_mb"]
        lights = []
        for part in range(min(processes, spec.clients)):
            lights.append(Light(server, names[part::processes], rest))
            stack.callback(lights[-1].close)
        took = max(light.connected() for light in lights)
        yield server, lights, {"connect_s": took, "empty_mb": empty}


def measure_load(
    model: str,
    strategy: str,
    *,
    clients: int = 1_000,
    rest: float = 0.0,
    seconds: float = 20.0,
) -> dict[str, Any]:
    """Clients that upload again as soon as they are sent work (or after a rest of about so many
    seconds): what the server does in a second, and what it costs."""
    with crowd(Spec(model, strategy, clients), rest) as (server, lights, how):
        time.sleep(min(5.0, seconds / 2) + rest)  # everybody's first training is over
        for light in lights:
            light.begin()
        before, begin = server.figures(), time.perf_counter()
        time.sleep(seconds)
        after, took = server.figures(), time.perf_counter() - begin
        latencies = [found for light in lights for found in light.end()]
    updates = after["updates"] - before["updates"]
    each = {key: (after[key] - before[key]) / updates * 1e3 for key in ("cpu", "node_cpu")}
    return {
        "model": model,
        "megabytes": 4e-6 * server.numbers,
        "strategy": strategy,
        "clients": clients,
        "rest_s": rest,
        "seconds": took,
        "connect_s": how["connect_s"],
        "updates": updates,
        "updates_per_s": updates / took,
        "server_cpu_ms": each["cpu"],
        "node_cpu_ms": each["node_cpu"],
        "fold_cpu_ms": (after["fold_cpu"] - before["fold_cpu"]) / updates * 1e3,
        "cores_busy": (after["cpu"] - before["cpu"]) / took,
        "per_commit": updates / (after["commits"] - before["commits"]),
        "memory_mb": after["rss_mb"],
        "empty_mb": how["empty_mb"],
        "lost_connections": sum(light.lost for light in lights),
        **percentiles(latencies),
    }


# -- steady load -------------------------------------------------------------------------------


def measure_steady(
    model: str = "lenet",
    strategy: str = "fedasync",
    *,
    clients: int = 1_000,
    rest: float = 20.0,
    minutes: float = 10.0,
) -> dict[str, Any]:
    """Memory of the server, sampled every second, under a load that stays the same. A checkpoint is
    made every 20 seconds, or three times if the whole is shorter."""
    every = min(20.0, 20 * minutes)
    with crowd(Spec(model, strategy, clients, every=every), rest) as (server, lights, how):
        time.sleep(min(1.5 * rest, 30 * minutes))
        for light in lights:
            light.begin()
        assert server.process.pid is not None
        before, begin = server.figures(), time.perf_counter()
        samples = []
        while (now := time.perf_counter() - begin) < 60 * minutes:
            samples.append((now, rss_mb(server.process.pid)))
            time.sleep(min(1.0, 3 * minutes))
        after = server.figures()
        latencies = [found for light in lights for found in light.end()]
    times, memory = np.array(samples).T
    slope = float(np.polyfit(times / 60, memory, 1)[0])
    parts = [float(np.median(part)) for part in np.array_split(memory, 5)]
    return {
        "model": model,
        "strategy": strategy,
        "clients": clients,
        "rest_s": rest,
        "minutes": minutes,
        "updates": after["updates"] - before["updates"],
        "updates_per_s": (after["updates"] - before["updates"]) / (60 * minutes),
        "server_cpu_ms": (after["cpu"] - before["cpu"])
        / (after["updates"] - before["updates"])
        * 1e3,
        "empty_mb": how["empty_mb"],
        "lost_connections": sum(light.lost for light in lights),
        "fifths_mb": parts,
        "peak_mb": float(memory.max()),
        "mb_per_minute": slope,
        **percentiles(latencies),
    }


# -- all of it -------------------------------------------------------------------------------------


def middle(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Of several runs of one measurement: the median of each figure, and the runs."""
    first = rows[0]
    found = {
        key: median(row[key] for row in rows)
        if isinstance(value, float | int) and not isinstance(value, bool)
        else value
        for key, value in first.items()
    }
    return {**found, "runs": len(rows)}


def measure_fleet(
    parts: Sequence[str],
    clients: int,
    minutes: float,
    repeats: int,
    quick: bool = False,
    watch: Callable[[str], None] = lambda now: None,
) -> dict[str, list[dict[str, Any]]]:
    """The parts of `polytempo bench fleet`."""
    found: dict[str, list[dict[str, Any]]] = {part: [] for part in parts}

    def add(part: str, measure: Callable[..., dict[str, Any]], *args: Any, **options: Any) -> None:
        rows = []
        for number in range(repeats):
            again = f", {number + 1} of {repeats}" if repeats > 1 else ""
            watch(f"{part}, {', '.join(map(str, (*args, *options.values())))}{again}")
            rows.append(measure(*args, **options))
        found[part].append(middle(rows))

    if "fleet-swap" in parts:
        for trainer in TRAINERS:
            add("fleet-swap", measure_swap, trainer, repeats=20 if quick else 100)
    if "fleet-upload" in parts:
        for model, times in (("lenet", 100), ("resnet18", 12)):
            for sync in (True, False):
                often = max(3, times // 5) if quick else times
                add("fleet-upload", measure_upload, model, sync=sync, repeats=often)
    if "fleet-load" in parts:
        for model, strategy, rest in LOADS:
            seconds = 5.0 if quick else 20.0
            add(
                "fleet-load",
                measure_load,
                *(model, strategy),
                clients=clients,
                rest=rest * clients / 1_000,
                seconds=seconds,
            )
    if "fleet-steady" in parts:
        watch(f"fleet-steady, {minutes:g} minutes")
        rest = 20 * clients / 1_000  # 50 updates per second
        found["fleet-steady"].append(measure_steady(clients=clients, rest=rest, minutes=minutes))
    return found
