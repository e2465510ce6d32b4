"""A linear model by hand, for derivations of whole runs."""

import numpy as np


def gradient(theta, x, y):
    """Of the mean cross-entropy of a linear model, at (weights, biases) in one vector."""
    weights, biases = theta[:-4].reshape(4, -1), theta[-4:]
    scores = x @ weights.T + biases
    p = np.exp(scores - scores.max(1, keepdims=True))
    p /= p.sum(1, keepdims=True)
    p[np.arange(len(y)), y] -= 1
    return np.concatenate([(p.T @ x / len(y)).ravel(), p.mean(0)])
