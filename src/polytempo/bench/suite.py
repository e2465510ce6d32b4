"""All measurements of `polytempo bench`, one after the other."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from importlib.metadata import version
from typing import Any

import torch

from polytempo.bench.bookkeeping import SIZES as BOOKS
from polytempo.bench.bookkeeping import measure_bookkeeping
from polytempo.bench.cases import CASES
from polytempo.bench.clusters import CLIENTS as CLUSTERED
from polytempo.bench.clusters import PARAMETERS, growth, measure_clusters
from polytempo.bench.engine import CROWD, CROWDS, SPEEDS, UPDATES, measure_crowd, measure_engine
from polytempo.bench.machine import machine
from polytempo.bench.scale import CLIENTS, measure_scale
from polytempo.bench.server import BANKS, SIZES, measure_server
from polytempo.bench.training import ARRIVALS, measure_training
from polytempo.network.session import require_network

FLEET = ("fleet-swap", "fleet-upload", "fleet-load", "fleet-steady")  # all four: "fleet"
PARTS = (*CASES, "engine", "server", "clusters", "scale", "exchange", "fleet", *FLEET)


def run_bench(
    parts: Sequence[str],
    *,
    workers: int,
    repeats: int = 5,
    quick: bool = False,
    clients: int = 1_000,
    minutes: float = 10.0,
    watch: Callable[[str], None] = lambda now: None,
) -> dict[str, Any]:
    """Measure these parts; `watch` is told what is measured next. `clients`, `minutes`: of a fleet.

    `quick`: fewer updates and smaller sizes, for a first look; the figures are rougher, and those
    of training contain more evaluation.
    """
    if "exchange" in parts:
        require_network()
    fleet = FLEET if "fleet" in parts else tuple(part for part in FLEET if part in parts)
    if fleet:
        require_network("grpc", "google.protobuf", "cryptography")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        watch("machine")
        found: dict[str, Any] = {
            "date": time.strftime("%Y-%m-%d %H:%M"),
            "version": version("polytempo"),
            "quick": quick,
            "machine": machine(),
            "training": [],
            "engine": [],
            "crowd": [],
            "server": [],
            "bookkeeping": [],
            "clusters": [],
            "scale": [],
            "exchange": [],
            **{part: [] for part in FLEET},
        }
        for name in (part for part in parts if part in CASES):
            case = CASES[name]
            for strategy, bank in itertools.product(case.strategies, case.banks):
                watch(f"{name}, {strategy}, bank {bank}")
                measured = measure_training(
                    name,
                    strategy,
                    workers=workers,
                    repeats=repeats,
                    arrivals=20 if quick else ARRIVALS,
                    bank=bank,
                )
                found["training"].append(measured)
        for strategy in SPEEDS if "engine" in parts else ():
            watch(f"engine, {strategy}")
            updates = UPDATES // 5 if quick else UPDATES
            found["engine"].append(measure_engine(strategy, updates=updates, repeats=repeats))
        for strategy in CROWDS if "engine" in parts else ():
            size = [count // 50 if quick else count for count in CROWD]
            watch(f"engine, {strategy}, {size[0]} clients")
            found["crowd"].append(measure_crowd(strategy, *size))
        for clients, parameters, uploads in SIZES if "server" in parts else ():
            for bank in BANKS if not quick or uploads * parameters <= 10**7 else ():
                watch(f"server, {clients} clients, bank {bank}")
                found["server"].append(measure_server(clients, parameters, uploads, bank))
        for clients, concurrency, arrivals in BOOKS if "server" in parts else ():
            if not quick or clients <= 20_000:
                watch(f"server, {clients} clients, concurrency {concurrency}")
                found["bookkeeping"].append(measure_bookkeeping(clients, concurrency, arrivals))
        for parameters in PARAMETERS if "clusters" in parts else ():
            rows = []
            for clients in CLUSTERED[:2] if quick else CLUSTERED:
                watch(f"clusters, {clients} clients x {parameters} parameters")
                rows.append(measure_clusters(clients, parameters))
                exponent = growth(rows[-2:]) if len(rows) > 1 else None
                found["clusters"].append({**rows[-1], "exponent": exponent})
        for clients in CLIENTS if "scale" in parts else ():
            if not quick or clients <= 1_000:
                watch(f"{clients} clients")
                found["scale"].append(measure_scale(clients, workers=workers))
        if "exchange" in parts:
            from polytempo.bench.exchange import PARAMETERS as EXCHANGED
            from polytempo.bench.exchange import measure_exchange

            for parameters in EXCHANGED:
                for tls in (False, True):
                    watch(f"exchange of {4e-6 * parameters:.2g} MB" + " with TLS" * tls)
                    times = 5 if quick else 20
                    found["exchange"].append(measure_exchange(parameters, tls=tls, repeats=times))
        if fleet:
            from polytempo.bench.fleet import measure_fleet

            few = max(10, clients // 10) if quick else clients
            short = min(0.5, minutes) if quick else minutes
            found |= measure_fleet(fleet, few, short, 1 if quick else repeats, quick, watch)
        return found
    finally:
        torch.set_num_threads(threads)
