"""A client that trains with scikit-learn: `SGDClassifier.partial_fit`.

python examples/with_sklearn.py server 127.0.0.1:7500
python examples/with_sklearn.py client 127.0.0.1:7500 0    # one of these for each client
python examples/with_sklearn.py client 127.0.0.1:7500 1
"""

import sys

import numpy as np
from sklearn.datasets import load_digits
from sklearn.linear_model import SGDClassifier

import polytempo as pt

CLIENTS = 2
BEGINNING = {"coef_": np.zeros((10, 64)), "intercept_": np.zeros(10)}  # names are yours to choose


def samples(client):
    x, y = load_digits(return_X_y=True)
    mine = np.flatnonzero(y % CLIENTS == client)[:200]  # every client has digits of its own
    return x[mine] / 16, y[mine]


class Client:
    def __init__(self, x, y):
        cut = len(x) * 3 // 4
        self.x, self.y, self.x_test, self.y_test = x[:cut], y[:cut], x[cut:], y[cut:]
        self.model = SGDClassifier(loss="log_loss").partial_fit(x[:1], y[:1], classes=range(10))

    def train(self, parameters, task):
        vars(self.model).update(parameters)
        for _ in range(task.epochs):
            self.model.partial_fit(self.x, self.y)
        return {name: getattr(self.model, name) for name in parameters}

    def evaluate(self, parameters):
        vars(self.model).update(parameters)
        return self.model.score(self.x_test, self.y_test)


def serve(out="runs/sklearn", updates=40, **options):
    options = {"strategy": "fedbuff", "epochs": 2, **options}
    return pt.serve(BEGINNING, clients=CLIENTS, updates=updates, out=out, **options)


def join(address, client, out="runs/sklearn-clients", **options):
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
