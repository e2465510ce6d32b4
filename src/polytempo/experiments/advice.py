"""A word to the user at the end of a run that has come to nothing."""

from __future__ import annotations

import numpy as np

from polytempo.data import Federation
from polytempo.experiments.config import RunConfig
from polytempo.experiments.result import RunResult
from polytempo.simulation import Simulator
from polytempo.training.problem import Classification

NEAR = 0.02  # so little above the level of a constant is no learning
RISEN = 2.0  # a loss that is so many times its first value has been driven up


def advice(result: RunResult, config: RunConfig) -> str | None:
    """What to try, if the models are no better than one answer for all samples."""
    engine = result.simulator
    if not isinstance(engine, Simulator) or not isinstance(engine.problem, Classification):
        return None
    one = engine.strategy.single_model
    level = constant_level(engine.federation, one)
    if engine.updates == 0 or level > 0.9 or not result.value <= level + NEAR:
        return None
    whom = "the same label for everybody" if one else "each client's commonest label"
    first, last = (result.history[place]["loss"] for place in (0, -1))
    if one and engine.version == 0:
        why = "the server has not taken a step yet: its method waits for more uploads. Try"
        what = f"more --updates (now {config.updates})"
    elif last > RISEN * first:
        why = f"the loss has risen from {first:.3g} to {last:.3g}. Try a smaller --lr"
        what = f"(now {config.lr:g})"
    else:
        why = "the models have hardly learned. Try a larger --lr"
        what = (
            f"(now {config.lr:g}), a smaller --batch-size ({config.batch_size}), more --updates "
            "or --epochs"
        )
    return (
        f"{result.metric.text(result.value)} is no better than always predicting {whom} "
        f"({result.metric.text(level)}): {why} {what}"
    )


def constant_level(federation: Federation, one: bool) -> float:
    """The accuracy, mean over clients, of the best single label for all (`one`), or of each
    client's commonest one."""
    y, labels = federation.y.numpy(), federation.outputs
    tested = [
        np.bincount(y[federation.test[client]], minlength=labels) for client in federation.tested
    ]
    shares = np.array([counts / counts.sum() for counts in tested])
    if one:
        return float(shares.mean(0).max())
    train = [
        np.bincount(y[federation.train[client]], minlength=labels) for client in federation.tested
    ]
    return float(np.mean([share[own.argmax()] for share, own in zip(shares, train, strict=True)]))
