"""The reference: federated averaging as one would write it in plain torch, in one process."""

import protocol  # first of all: see there

# isort: split

import random

import torch
from torch.nn.utils import parameters_to_vector, vector_to_parameters

import work


def main() -> None:
    torch.set_num_threads(work.THREADS)
    module = work.initial_model()
    draws = random.Random(0)
    for trainings in protocol.blocks(lambda: work.loss_of(module)):
        for _ in range(trainings // work.COHORT):
            start = parameters_to_vector(module.parameters()).detach()
            total = torch.zeros_like(start)
            for client in draws.sample(range(work.CLIENTS), work.COHORT):
                vector_to_parameters(start.clone(), module.parameters())  # trained in place
                work.train(module, work.loader(client))
                total += parameters_to_vector(module.parameters()).detach()
            vector_to_parameters(total / work.COHORT, module.parameters())


if __name__ == "__main__":
    main()
