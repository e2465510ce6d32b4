"""Flower: its simulation on Ray, two actors of one core each, and its FedAvg.

Written as in Flower's PyTorch quickstart: a ClientApp trains, a ServerApp runs the strategy. The
ServerApp's main function waits for blocks, so Ray and its actors are started only once.
"""

import protocol  # first of all: see there

# isort: split

from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from flwr.simulation import run_simulation

import work

client_app = ClientApp()
server_app = ServerApp()


@client_app.train()
def train(message: Message, context: Context) -> Message:
    module = work.lenet()
    module.load_state_dict(message.content["arrays"].to_torch_state_dict())
    work.train(module, work.loader(int(context.node_config["partition-id"])))
    content = {
        "arrays": ArrayRecord(module.state_dict()),
        "metrics": MetricRecord({"num-examples": work.SAMPLES}),
    }
    return Message(content=RecordDict(content), reply_to=message)


def count(replies: list[RecordDict], weighted_by_key: str) -> MetricRecord:
    """The clients of a round that have replied."""
    return MetricRecord({"clients": len(replies)})


@server_app.main()
def main(grid: Grid, context: Context) -> None:
    module = work.initial_model()
    strategy = FedAvg(
        fraction_train=work.COHORT / work.CLIENTS,
        fraction_evaluate=0.0,
        min_available_nodes=work.CLIENTS,
        train_metrics_aggr_fn=count,
    )
    for trainings in protocol.blocks(lambda: work.loss_of(module)):
        result = strategy.start(
            grid, ArrayRecord(module.state_dict()), num_rounds=trainings // work.COHORT
        )
        replies = sum(metrics["clients"] for metrics in result.train_metrics_clientapp.values())
        if replies != trainings:  # Flower goes on without the clients that fail
            raise RuntimeError(f"{replies} of {trainings} clients have replied")
        module.load_state_dict(result.arrays.to_torch_state_dict())


if __name__ == "__main__":
    run_simulation(
        server_app,
        client_app,
        num_supernodes=work.CLIENTS,
        backend_config={
            "init_args": {"num_cpus": work.CORES},
            "client_resources": {"num_cpus": 1, "num_gpus": 0.0},
        },
    )
