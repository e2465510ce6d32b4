"""A client with a training loop of its own in PyTorch.

python examples/with_torch.py server 127.0.0.1:7500
python examples/with_torch.py client 127.0.0.1:7500 0    # one of these for each client
python examples/with_torch.py client 127.0.0.1:7500 1
"""

import sys

import torch
from sklearn.datasets import load_digits
from torch import nn

import polytempo as pt

CLIENTS = 2


def make():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))


def samples(client):
    x, y = (torch.from_numpy(part) for part in load_digits(return_X_y=True))
    mine = torch.nonzero(y % CLIENTS == client).flatten()[:200]  # digits of its own
    return x[mine].float() / 16, y[mine]


class Client:
    def __init__(self, x, y):
        cut = len(x) * 3 // 4
        self.x, self.y, self.x_test, self.y_test = x[:cut], y[:cut], x[cut:], y[cut:]
        self.module = make()

    def load(self, parameters):
        self.module.load_state_dict({k: torch.from_numpy(v) for k, v in parameters.items()})

    def train(self, parameters, task):
        self.load(parameters)
        optimizer = torch.optim.SGD(self.module.parameters(), lr=task.lr, momentum=0.9)
        for _ in range(task.epochs):
            for rows in torch.randperm(len(self.x)).split(task.batch_size):
                optimizer.zero_grad()
                nn.functional.cross_entropy(self.module(self.x[rows]), self.y[rows]).backward()
                optimizer.step()
        return {name: value.numpy() for name, value in self.module.state_dict().items()}

    def evaluate(self, parameters):
        self.load(parameters)
        return float((self.module(self.x_test).argmax(1) == self.y_test).float().mean())


def serve(out="runs/torch", updates=40, **options):
    options = {"strategy": "pace", "lr": 0.05, "epochs": 2, **options}
    return pt.serve(make(), clients=CLIENTS, updates=updates, out=out, **options)


def join(address, client, out="runs/torch-clients", **options):
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
