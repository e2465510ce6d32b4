"""Polytempo's simulator: FedAvg, two worker processes, the solver that `auto` chooses."""

import protocol  # first of all: see there

# isort: split

import torch
from torch.nn.utils import vector_to_parameters

import work
from polytempo import Federation
from polytempo.core.task import Task
from polytempo.simulation import Simulator
from polytempo.strategies import STRATEGIES
from polytempo.training import make_executor


def main() -> None:
    # A federation has test samples too. They are not looked at, except once before the first round.
    clients = [(x, y, x[:1], y[:1]) for x, y in map(work.samples, range(work.CLIENTS))]
    federation = Federation.from_arrays(clients, classes=10)
    module = work.initial_model()
    optimiser = f"sgd:momentum={work.MOMENTUM},weight_decay=0"
    simulator = Simulator(
        federation,
        module,
        STRATEGIES.create("fedavg"),
        concurrency=work.COHORT,
        task=Task(
            epochs=work.EPOCHS, batch_size=work.BATCH, lr=work.LEARNING_RATE, optimizer=optimiser
        ),
        eval_every=10**9,
        adapt_epochs=0,
        backend=make_executor(module, federation, 0, workers=work.CORES),
    )

    def loss() -> float:
        served = work.lenet()
        with torch.no_grad():
            vector_to_parameters(simulator.strategy.serve(0), served.parameters())
        return work.loss_of(served)

    with simulator.backend:
        for trainings in protocol.blocks(loss):
            target = simulator.updates + trainings
            simulator.run(10**9, stop=lambda: simulator.updates >= target)  # noqa: B023
            # Workers have begun the next round: what they have in hand is part of this block, as
            # what the block before had in hand was of that one.
            simulator.backend.drain()


if __name__ == "__main__":
    main()
