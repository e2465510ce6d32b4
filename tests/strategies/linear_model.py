"""A linear model by hand, for derivations of whole runs."""

import numpy as np

from polytempo import Task
from polytempo.core.rng import rng


def gradient(theta, x, y):
    """Of the mean cross-entropy of a linear model, at (weights, biases) in one vector."""
    weights, biases = theta[:-4].reshape(4, -1), theta[-4:]
    scores = x @ weights.T + biases
    p = np.exp(scores - scores.max(1, keepdims=True))
    p /= p.sum(1, keepdims=True)
    p[np.arange(len(y)), y] -= 1
    return np.concatenate([(p.T @ x / len(y)).ravel(), p.mean(0)])


def schedule(task: Task, stream: tuple[str | int, ...], samples: int) -> list[np.ndarray]:
    """The samples of every batch that a client trains on: one permutation for each epoch, named by
    client and dispatch, cut in batches; a lone last sample joins the batch before it."""
    found: list[np.ndarray] = []
    cuts = list(range(task.batch_size, samples, task.batch_size))
    if samples % task.batch_size == 1:
        cuts = cuts[:-1]
    while len(found) < task.total_steps(samples):
        order = rng(0, *stream, "epoch", len(found) // (len(cuts) + 1)).permutation(samples)
        found += np.split(order, cuts)
    return found[: task.total_steps(samples)]
