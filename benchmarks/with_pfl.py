"""pfl-research: its simulated backend and FederatedAveraging, on two processes that `torchrun`
starts (as its guide to distributed simulations does), which divide every cohort."""

import protocol  # first of all: see there

# isort: split

import functools

import torch
from pfl.aggregate.simulate import SimulatedBackend
from pfl.algorithm.base import NNAlgorithmParams
from pfl.algorithm.federated_averaging import FederatedAveraging
from pfl.callback.base import TrainingProcessCallback
from pfl.data.federated_dataset import FederatedDataset
from pfl.data.pytorch import PyTorchTensorDataset
from pfl.data.sampling import MinimizeReuseUserSampler
from pfl.hyperparam.base import NNTrainHyperParams
from pfl.metrics import Metrics, Weighted
from pfl.model.pytorch import PyTorchModel
from torch import Tensor, nn

import work


class LeNet(nn.Module):
    """pfl asks the model for its loss and its metrics."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = work.initial_model()

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        self.train()
        return nn.functional.cross_entropy(self.layers(x), y)

    @torch.no_grad()
    def metrics(self, x: Tensor, y: Tensor) -> dict[str, Weighted]:
        total = nn.functional.cross_entropy(self.layers(x), y, reduction="sum")
        return {"loss": Weighted(total.item(), len(y))}


class Turns(TrainingProcessCallback):
    """Waits before every block of rounds; one run does them all. The first process hears of a block
    and tells the other."""

    def __init__(self, module: LeNet) -> None:
        self.blocks = protocol.blocks(lambda: work.loss_of(module.layers))
        self.rounds = 0

    def on_train_begin(self, *, model: PyTorchModel) -> Metrics:
        self.wait()
        return Metrics()

    def after_central_iteration(
        self, aggregate_metrics: Metrics, model: PyTorchModel, *, central_iteration: int
    ) -> tuple[bool, Metrics]:
        self.rounds -= 1
        if self.rounds == 0:
            self.wait()
        return self.rounds == 0, Metrics()

    def wait(self) -> None:
        first = torch.distributed.get_rank() == 0
        rounds = torch.tensor(next(self.blocks, 0) // work.COHORT if first else 0)
        torch.distributed.broadcast(rounds, 0)
        self.rounds = int(rounds)


def main() -> None:
    torch.set_num_threads(1)
    module = LeNet()
    users = FederatedDataset(
        lambda client: PyTorchTensorDataset(work.samples(client), user_id=str(client)),
        MinimizeReuseUserSampler(list(range(work.CLIENTS))),
    )
    model = PyTorchModel(
        module,
        functools.partial(torch.optim.SGD, momentum=work.MOMENTUM),
        torch.optim.SGD(module.parameters(), lr=1.0),
    )
    FederatedAveraging().run(
        NNAlgorithmParams(
            central_num_iterations=10**9,
            evaluation_frequency=10**9,  # before the first round only
            train_cohort_size=work.COHORT,
            val_cohort_size=0,
        ),
        SimulatedBackend(training_data=users, val_data=users),
        model,
        NNTrainHyperParams(
            local_num_epochs=work.EPOCHS,
            local_learning_rate=work.LEARNING_RATE,
            local_batch_size=work.BATCH,
        ),
        callbacks=[Turns(module)],
    )


if __name__ == "__main__":
    main()
