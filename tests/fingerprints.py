"""Fingerprints of short runs: did a change of the inside change a single bit?

    python tests/fingerprints.py record before.json     # before the change
    python tests/fingerprints.py compare before.json    # after it: lists what differs

Every strategy runs on digits and on synthetic data, trained by each solver and on worker processes.
A fingerprint covers the history (times, counters, accuracies, losses), the counts of messages and
bytes, the staleness and, bit for bit, the final model of every client. Bits depend on the machine:
record and compare on the same one.
"""

# ruff: noqa: T201  (it speaks to whoever runs it)
from __future__ import annotations

import hashlib
import json
import multiprocessing as mp
import sys
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch

import polytempo as pt

COLUMNS = (
    *("time", "updates", "version", "accuracy", "accuracy_weighted", "accuracy_std"),
    *("accuracy_worst10", "loss", "accuracy_adapted", "dispatch", "upload", "multicast"),
)
SOLVERS: dict[str, dict[str, Any]] = {
    "torch": {"solver": "torch", "backend": "serial"},
    "native": {"solver": "native", "backend": "serial"},
    "processes": {"solver": "torch", "backend": "processes", "workers": 2},
}
DATA: dict[str, dict[str, Any]] = {
    "digits": {"model": "mlp", "lr": 0.05},
    "synthetic": {"model": "linear", "lr": 0.02},
}
EXTRA: dict[str, tuple[str, dict[str, Any]]] = {
    "pace, answered at once": ("pace", {"refill": "same", "concurrency": 10}),
    "pace, multicasts": ("pace:omega=20,latency_ms=3000", {"concurrency": 8, "network": "wifi"}),
    "port, hurried": ("port:bound=1,buffer_size=2", {"concurrency": 6, "epochs": 3}),
    "port, patient": ("port:bound=1,buffer_size=2,requests=false", {"concurrency": 6}),
    "fedbuff, newcomers": ("fedbuff", {"dropout": "join:share=0.3,updates=20"}),
    "casa, leaving": ("casa", {"dropout": "leave:share=0.3,at=2"}),
    "pace, lost updates": ("pace", {"dropout": "drop:probability=0.2"}),
    "ace, half": ("ace", {"bank": "half"}),
    "fedavg, diagnosed": ("fedbuff", {"diagnose": 10}),
    "momentum off": ("fedavg", {"momentum": 0.0, "weight_decay": 0.0, "steps": 7}),
    "adapted always": ("fedavg", {"adapt_always": True}),
}


def _tokens() -> pt.Federation:
    draw = np.random.default_rng(0)
    clients = []
    for client in range(6):
        x = draw.integers(1, 60, size=(40, 12)) + 30 * (client % 2)
        clients.append((x, (x.sum(1) + client) % 3))
    return pt.Federation.from_arrays(clients)


def _normed() -> torch.nn.Module:
    return torch.nn.Sequential(
        torch.nn.Flatten(),
        torch.nn.Linear(64, 24),
        torch.nn.BatchNorm1d(24),
        torch.nn.ReLU(),
        torch.nn.Dropout(0.3),
        torch.nn.Linear(24, 10),
    )


def cases() -> dict[str, tuple[str, str, str, dict[str, Any]]]:
    """By name: strategy, data, solver, settings."""
    found: dict[str, tuple[str, str, str, dict[str, Any]]] = {}
    for data in DATA:
        for solver in SOLVERS:
            for name in pt.STRATEGIES:
                found[f"{name} | {data} | {solver}"] = (name, data, solver, {})
    for label, (name, settings) in EXTRA.items():
        for solver in SOLVERS:
            found[f"{label} | digits | {solver}"] = (name, "digits", solver, settings)
    for name in ("fedavg", "pace", "casa+", "fedac", "ifca-async", "fedsac-pace"):
        for solver in ("torch", "processes"):
            found[f"{name} | tokens | {solver}"] = (name, "tokens", solver, {})
            found[f"{name} | normed | {solver}"] = (name, "normed", solver, {})
    return found


def fingerprint(case: tuple[str, str, str, dict[str, Any]]) -> str:
    strategy, data, solver, settings = case
    torch.set_num_threads(1)
    model: Any
    if data == "tokens":
        fed, model, options = _tokens(), "textcnn", {"lr": 0.05, "epochs": 1, "concurrency": 4}
    elif data == "normed":
        fed = pt.Federation.load("digits", clients=8, limit=400, seed=3)
        model, options = _normed, {"lr": 0.05, "epochs": 1}
    else:
        fed = pt.Federation.load(data, clients=12, limit=600, seed=3)
        options = {key: value for key, value in DATA[data].items() if key != "model"}
        model = DATA[data]["model"]
    updates = 12 if data == "tokens" else 40
    given = {"epochs": 2, "batch_size": 16, "eval_every": 10, "adapt_epochs": 1, "seed": 3}
    if strategy == "p2p":
        given["eval_every"] = 24
        del given["epochs"]  # its local rounds are counted in steps
    result = pt.simulate(
        fed,
        model=model,
        strategy=strategy,
        updates=updates * (3 if strategy == "p2p" else 1),
        **{**given, **options, **settings, **SOLVERS[solver]},
    )
    digest = hashlib.sha256()
    for row in result.history:
        digest.update(repr([row.get(column) for column in COLUMNS]).encode())
    for key in ("messages", "staleness"):
        digest.update(json.dumps(result.summary[key], sort_keys=True).encode())
    for client in range(fed.clients):
        for value in result.model(client).values():
            digest.update(value.contiguous().numpy().tobytes())
    return digest.hexdigest()[:16]


def _safely(item: tuple[str, tuple[str, str, str, dict[str, Any]]]) -> tuple[str, str]:
    name, case = item
    try:
        return name, fingerprint(case)
    except Exception as error:
        return name, f"{type(error).__name__}: {error}"


def main() -> None:
    command, path, *words = sys.argv[1:]
    wanted = {
        name: case
        for name, case in cases().items()
        if not words or any(word in name for word in words)
    }
    found: dict[str, str] = {}
    with ProcessPoolExecutor(2, mp.get_context("spawn")) as pool:
        for number, (name, digest) in enumerate(pool.map(_safely, wanted.items()), start=1):
            found[name] = digest
            print(f"\r{number}/{len(wanted)} ", end="", file=sys.stderr)
    print(file=sys.stderr)
    if command == "record":
        Path(path).write_text(json.dumps(found, indent=1, sort_keys=True) + "\n")
        return
    before = json.loads(Path(path).read_text())
    different = [name for name in sorted(found) if before.get(name) != found[name]]
    for name in different:
        print(f"{name}: {before.get(name, 'not recorded')} -> {found[name]}")
    print(f"{len(found) - len(different)} of {len(found)} are the same")
    sys.exit(bool(different))


if __name__ == "__main__":
    main()
