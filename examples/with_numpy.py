"""A client in plain numpy: logistic regression by gradient descent.

python examples/with_numpy.py server 127.0.0.1:7500
python examples/with_numpy.py client 127.0.0.1:7500 0    # one of these for each client
python examples/with_numpy.py client 127.0.0.1:7500 1
"""

import sys

import numpy as np
from sklearn.datasets import load_digits

import polytempo as pt

CLIENTS = 2
BEGINNING = {"weight": np.zeros((64, 10)), "bias": np.zeros(10)}


def samples(client):
    """Every client sees digits of its own; the last quarter is for testing."""
    x, y = load_digits(return_X_y=True)
    mine = np.flatnonzero(y % CLIENTS == client)[:200]
    return x[mine] / 16, np.eye(10)[y[mine]]


class Client:
    def __init__(self, x, y):
        cut = len(x) * 3 // 4
        self.x, self.y, self.x_test, self.y_test = x[:cut], y[:cut], x[cut:], y[cut:]

    def train(self, parameters, task):
        for _ in range(task.epochs):
            scores = np.exp(self.x @ parameters["weight"] + parameters["bias"])
            error = (scores / scores.sum(1, keepdims=True) - self.y) / len(self.x)
            parameters["weight"] -= task.lr * self.x.T @ error
            parameters["bias"] -= task.lr * error.sum(0)
            fresh = yield parameters  # between two steps: a model that was pushed, or None
            parameters = parameters if fresh is None else fresh

    def evaluate(self, parameters):
        scores = self.x_test @ parameters["weight"] + parameters["bias"]
        return float((scores.argmax(1) == self.y_test.argmax(1)).mean())


def serve(out="runs/numpy", updates=60, **options):
    options = {"strategy": "pace", "lr": 0.5, "epochs": 20, **options}
    return pt.serve(BEGINNING, clients=CLIENTS, updates=updates, out=out, **options)


def join(address, client, out="runs/numpy-clients", **options):
    trainer = Client(*samples(client))
    count, tested = len(trainer.x), len(trainer.x_test)
    options = {"samples": count, "tested": tested, "out": f"{out}/client-{client}", **options}
    return pt.join(address, trainer, **options)


if __name__ == "__main__":
    what, address, *number = sys.argv[1:]
    if what == "server":
        print(f"accuracy {serve(listen=address).accuracy:.1%}")  # noqa: T201
    else:
        join(address, int(number[0]))
