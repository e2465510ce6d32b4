"""Wall time of an update, end to end: training, server and evaluation, against a plain loop."""

from __future__ import annotations

from statistics import median
from typing import Any

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from polytempo.bench.cases import CASES, Case
from polytempo.bench.machine import gemm_gflops, seconds
from polytempo.bench.plain import PlainFedAsync, PlainLoop
from polytempo.bench.server import BANKS
from polytempo.core.bank import Storage
from polytempo.core.events import Upload
from polytempo.core.task import Task
from polytempo.data import Federation
from polytempo.models import Inputs, build
from polytempo.native.sweep import compiled_sweep, on_threads
from polytempo.simulation import Simulator
from polytempo.strategies import STRATEGIES
from polytempo.training import Job, make_executor
from polytempo.training.executors.processes import cores

# Ours, without a pull, and the plain loop that does the same arithmetic.
STRATEGIES_AND_LOOPS: dict[str, tuple[str, type[PlainLoop]]] = {
    "pace": ("pace:lam=0", PlainLoop),
    "fedasync": ("fedasync:rho=0", PlainFedAsync),
}


ARRIVALS = 200  # of one turn of ours; all clients are evaluated at its end


def measure_training(
    name: str,
    strategy: str = "pace",
    *,
    workers: int,
    repeats: int = 3,
    arrivals: int = ARRIVALS,
    bank: str = "memory",
) -> dict[str, Any]:
    """Take turns: a number of updates by us, some of the same clients by the plain loop, and again;
    who begins changes from turn to turn. The plain loop does its share with one thread, and with as
    many as we have workers.

    Both evaluate all clients at the end of a turn, which counts as a part of these updates. Both
    servers are in their steady state: ours has folded as many updates before the first turn, theirs
    one of every client. Figures are medians over the turns.
    """
    case = CASES[name]
    federation = case.federation()
    ours_spec, loop = STRATEGIES_AND_LOOPS[strategy]
    simulator = _simulator(case, ours_spec, federation, workers, bank)
    order: list[int] = []
    simulator.observers.append(
        lambda event: order.append(event.client) if isinstance(event, Upload) else None
    )
    plain = loop(case.plain(), federation, case.lr, case.batch_size)
    flops = _flops(case, plain.module, federation)
    turns = []

    def ours() -> float:
        order.clear()
        target = simulator.server.updates + arrivals
        return seconds(lambda: simulator.run(target)) / arrivals

    def theirs() -> dict[str, float]:
        some, found = order[: case.plain_trainings], {}
        for threads in dict.fromkeys((1, workers)):
            torch.set_num_threads(threads)
            found[str(threads)] = seconds(lambda: plain.run(some)) / len(some)
            found[str(threads)] += seconds(plain.evaluate_all) / arrivals
        torch.set_num_threads(1)
        return found

    with simulator.backend:
        ours()  # warm up
        for client in range(federation.clients):
            job = Job(client, simulator.context.initial, simulator.context.task, ("warm up",))
            plain.fold(client, simulator.backend.carry_out(job).upload)
        plain.run([0])
        for turn in range(repeats):
            before = dict(simulator.wall)
            mine, plains = (ours(), theirs()) if turn % 2 else (theirs(), ours())[::-1]
            spent = {key: (simulator.wall[key] - before[key]) / arrivals for key in before}
            turns.append((mine, plains, gemm_gflops(), spent))
    threads = list(turns[0][1])
    ratios = {key: [plains[key] / mine for mine, plains, *_ in turns] for key in threads}
    return {
        "case": name,
        "strategy": strategy,
        "bank": bank,
        "batch_size": case.batch_size,
        "workers": workers,
        "backend": simulator.backend.name,
        "arrivals": arrivals,
        "repeats": repeats,
        "parameters": simulator.layout.size,
        "plain_ms": {key: 1e3 * median(plains[key] for _, plains, *_ in turns) for key in threads},
        "ours_ms": 1e3 * median(mine for mine, *_ in turns),
        "ratio": {key: median(each) for key, each in ratios.items()},
        "ratios": ratios,
        "waiting_for_training_ms": 1e3 * median(s["training"] for *_, s in turns),
        "server_ms": 1e3 * median(s["server"] for *_, s in turns),
        "evaluation_ms": 1e3 * median(s["evaluation"] for *_, s in turns),
        "gflop_per_update": 1e-9 * flops,
        "share_of_gemm": median(1e-9 * flops / (o * workers * gemm) for o, _, gemm, _ in turns),
        "trained_in_vain": simulator.backend.wasted,
    }


def _simulator(
    case: Case, strategy: str, federation: Federation, workers: int, bank: str
) -> Simulator:
    module = build(case.model, Inputs.of(federation), 0)
    return Simulator(
        federation,
        module,
        STRATEGIES.create(strategy),
        task=Task(lr=case.lr, batch_size=case.batch_size),
        eval_every=10**9,  # the end of each turn is evaluated anyhow
        adapt_epochs=0,
        storage=Storage(BANKS[bank], kernel=compiled_sweep, spread=on_threads(cores())),
        backend=make_executor(module, federation, 0, workers=workers),
    )


def _flops(case: Case, module: nn.Module, federation: Federation) -> float:
    """Operations of the matrix products in one plain training of a client of mean size."""
    x = federation.prepare(federation.x[:64])
    with FlopCounterMode(display=False) as counter:
        loss = nn.functional.cross_entropy(module(x), torch.zeros(64, dtype=torch.int64))
        torch.autograd.backward(loss)
    module.zero_grad()
    samples = sum(federation.samples) / federation.clients
    return float(counter.get_total_flops()) / 64 * samples * 5
