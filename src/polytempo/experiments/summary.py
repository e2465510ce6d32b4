"""The figures of a run, computed from what was counted and measured: what result.json holds."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

from polytempo.core.metric import finite
from polytempo.experiments.result import RunResult
from polytempo.simulation import Engine, Extension, clusters, guards
from polytempo.simulation.metrics import convergence_time, final_value, time_to
from polytempo.training import Problem
from polytempo.training.footprint import peak_memory

SOMETIMES = (*clusters.FIGURES, "diagnosis", "peers", *guards.FIGURES)  # null where there is none
TARGETS = (0.5, 0.6, 0.7, 0.8, 0.9, 0.95)  # of shares that should be high


@dataclass(frozen=True)
class Account:
    """What the figures of a run are made of, whether it was simulated or is a real fleet's."""

    about: str  # its federation
    seed: int
    problem: Problem
    history: list[dict[str, Any]]
    time: float
    real: bool  # seconds, not simulated ones
    updates: int
    messages: Mapping[str, int]
    bytes: Mapping[str, int]
    staleness: Counter[int]
    parameters: int
    wall: Mapping[str, float]
    backend: str
    wasted: int = 0
    memory: float = 0.0  # bytes of workers
    fingerprint: str = ""
    adaptation_time: float | None = None
    stopped: str | None = None  # why it ended early
    extensions: Sequence[Extension] = ()


def summarise(
    simulator: Engine, strategy: Mapping[str, Any], complete: bool, interrupted: bool = False
) -> RunResult:
    """The figures of a simulation as it stands."""
    account = Account(
        about=simulator.federation.description,
        seed=simulator.seed,
        problem=simulator.problem,
        history=simulator.history,
        time=simulator.time,
        real=False,
        updates=simulator.updates,
        messages=simulator.messages,
        bytes=simulator.bytes,
        staleness=simulator.staleness,
        parameters=simulator.layout.size,
        wall=simulator.wall,
        backend=simulator.backend.name,
        wasted=simulator.backend.wasted,
        memory=simulator.backend.worker_memory,
        fingerprint=simulator.fingerprint,
        adaptation_time=simulator.adaptation_time(),
        stopped=simulator.stopped,
        extensions=list(simulator.extensions.values()),
    )
    result = result_of(account, strategy, complete, interrupted)
    result.simulator, result.extensions = simulator, ()  # they are the simulator's
    return result


def result_of(
    run: Account, strategy: Mapping[str, Any], complete: bool, interrupted: bool
) -> RunResult:
    """The figures of a run as it stands."""
    history, metric, stale = run.history, run.problem.metrics[0], run.staleness
    targets = TARGETS if metric.share and metric.better == "higher" else ()
    summary = finite(
        {
            "strategy": strategy["name"],
            "options": {key: value for key, value in strategy.items() if key != "name"},
            "seed": run.seed,
            "complete": complete,
            "stopped": run.stopped,
            "federation": run.about,
            "metric": metric.about,
            **_of_metrics(history, run.problem),
            **dict.fromkeys(SOMETIMES),
            **{k: v for each in run.extensions for k, v in each.figures().items()},
            "simulated_time": None if run.real else run.time,
            **({"seconds": run.time} if run.real else {}),
            "adaptation_time": run.adaptation_time,
            "time_to": {str(target): time_to(history, metric, target) for target in targets},
            "convergence_time": convergence_time(history, metric),
            "arrivals": run.updates,
            "messages": {
                **run.messages,
                **{f"{kind}_bytes": size for kind, size in run.bytes.items()},
            },
            "staleness_mean": sum(k * v for k, v in stale.items()) / stale.total()
            if stale
            else None,  # peers, cohorts and clients alone have none
            "staleness": {str(k): v for k, v in sorted(stale.items())},
            "parameters": run.parameters,
            "wall_seconds": dict(run.wall),
            "backend": run.backend,
            "trained_in_vain": run.wasted,
            "peak_rss_mb": (peak_memory() + run.memory) / 2**20 or None,
            "fingerprint": run.fingerprint,
            "version": version("polytempo"),
        }
    )
    return RunResult(summary, history, None, run.extensions, interrupted)


def _of_metrics(history: Sequence[Mapping[str, Any]], problem: Problem) -> dict[str, float | None]:
    """The metric in all its forms, and the final value of every other."""
    metric, *others = problem.metrics
    name = metric.name
    last: Mapping[str, Any] = history[-1] if history else defaultdict(lambda: None)
    tried = [row[name] for row in history if row["updates"] > 0] or [row[name] for row in history]
    found = {
        name: final_value(history, name),
        f"{name}_best": metric.best(tried) if tried else None,
        **{f"{name}_{form}": last[f"{name}_{form}"] for form in ("weighted", "std", "worst10")},
        f"{name}_adapted": last[f"{name}_adapted"],
        f"{name}_adapted_worst10": last.get(f"{name}_adapted_worst10"),
        **dict.fromkeys(f"{name}_{form}" for form in ("best10", "adapted_std", "newcomers")),
    }
    for other in others:
        pooled = f"{other.name}_weighted"
        found |= {other.name: final_value(history, other.name), pooled: last[pooled]}
    return found
