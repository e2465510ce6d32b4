"""fluke: its FedAVG, client and data loader. It trains in one process: its parallel mode is for
several GPUs."""

import protocol  # first of all: see there

# isort: split

import torch

import work

work.let_torchvision_load()
from fluke import DDict, FlukeENV  # noqa: E402
from fluke.algorithms.fedavg import FedAVG  # noqa: E402
from fluke.data import DataSplitter, DummyDataContainer, FastDataLoader  # noqa: E402
from fluke.utils import FederationObserver  # noqa: E402


class Turns(FederationObserver):
    """Waits before every block of rounds; one run does them all."""

    def __init__(self, algorithm: FedAVG) -> None:
        self.blocks = protocol.blocks(lambda: work.loss_of(algorithm.server.model))
        self.rounds = 0

    def start_round(self, round: int, global_model: object) -> None:
        if self.rounds == 0:
            self.rounds = next(self.blocks, 0) // work.COHORT
            if self.rounds == 0:
                raise SystemExit
        self.rounds -= 1


def main() -> None:
    torch.set_num_threads(work.THREADS)
    environment = FlukeENV()
    environment.set_seed(0)
    environment.set_eval_cfg(server=False)
    loaders = [
        FastDataLoader(*work.samples(client), num_labels=10, batch_size=work.BATCH, shuffle=True)
        for client in range(work.CLIENTS)
    ]
    container = DummyDataContainer(loaders, [None] * work.CLIENTS, None, num_classes=10)
    settings = DDict(
        model=work.initial_model(),
        client=DDict(
            batch_size=work.BATCH,
            local_epochs=work.EPOCHS,
            loss="CrossEntropyLoss",
            optimizer=DDict(name="SGD", lr=work.LEARNING_RATE, momentum=work.MOMENTUM),
            scheduler=DDict(name="StepLR", step_size=1, gamma=1),
            persistency=False,  # momentum starts from nought in every training
        ),
        server=DDict(weighted=True),
    )
    algorithm = FedAVG(work.CLIENTS, DataSplitter(container), settings)
    algorithm.set_callbacks(Turns(algorithm))
    algorithm.run(n_rounds=10**9, eligible_perc=work.COHORT / work.CLIENTS)


if __name__ == "__main__":
    main()
