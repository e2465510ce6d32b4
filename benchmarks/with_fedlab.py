"""FedLab: its cross-process scenario, a server and two processes that train half the clients each,
with its own FedAvg handler and serial trainer."""

import protocol  # first of all: see there

# isort: split

import multiprocessing
import socket

import torch

import work

work.let_torchvision_load()
from fedlab.contrib.algorithm.fedavg import (  # noqa: E402
    FedAvgSerialClientTrainer,
    FedAvgServerHandler,
)
from fedlab.contrib.dataset.basic_dataset import FedDataset  # noqa: E402
from fedlab.core.client.manager import PassiveClientManager  # noqa: E402
from fedlab.core.network import DistNetwork  # noqa: E402
from fedlab.core.server.manager import SynchronousServerManager  # noqa: E402

SHARE = work.CLIENTS // work.CORES  # clients of one process


class Clients(FedDataset):
    """The data of one process's clients."""

    def __init__(self, first: int) -> None:
        super().__init__()
        self.first = first

    def get_dataloader(self, id, batch_size, type="train"):
        return work.loader(self.first + id)


class Trainer(FedAvgSerialClientTrainer):
    """FedLab's trainer has one optimiser for all clients, without momentum: each is to have its own
    momentum, from nought."""

    def train(self, model_parameters, train_loader):
        self.optimizer = work.sgd(self.model)
        return super().train(model_parameters, train_loader)


def network(port: int, rank: int) -> DistNetwork:
    return DistNetwork(("127.0.0.1", port), work.CORES + 1, rank)


def clients(port: int, rank: int) -> None:
    torch.set_num_threads(1)
    trainer = Trainer(work.lenet(), SHARE)
    trainer.setup_dataset(Clients((rank - 1) * SHARE))
    trainer.setup_optim(work.EPOCHS, work.BATCH, work.LEARNING_RATE)
    PassiveClientManager(network(port, rank), trainer).run()


def main() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    context = multiprocessing.get_context("spawn")
    for rank in range(1, work.CORES + 1):
        context.Process(target=clients, args=(port, rank), daemon=True).start()
    torch.set_num_threads(1)
    handler = FedAvgServerHandler(work.initial_model(), 0, work.COHORT / work.CLIENTS)
    manager = SynchronousServerManager(network(port, 0), handler)
    # what the manager's `run` does, its rounds in several parts
    manager.setup()
    for trainings in protocol.blocks(lambda: work.loss_of(handler.model)):
        handler.global_round += trainings // work.COHORT
        manager.main_loop()
    manager.shutdown()


if __name__ == "__main__":
    main()
