"""Local training: the lean loop.

One resident model per process, bound to flat parameter and gradient vectors; the client's samples
are rows of one tensor and a batch is one index operation. There is no DataLoader, no optimiser
object and no copy of the model per client.

The order of the samples comes from a stream named by client and dispatch, one permutation for each
epoch, so that training can begin at any step of the schedule: that is what a client does that
receives a multicast half-way (it keeps the steps that it had left).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from polytempo.core.parameters import BufferPolicy, ParameterSpace
from polytempo.core.rng import rng, stream_seed
from polytempo.core.task import Plain, Task
from polytempo.data import Federation

_EVALUATION_BATCH = 512


@dataclass(frozen=True)
class Job:
    """One local training: everything that its result depends on, besides the client's data."""

    client: int
    params: Tensor
    task: Task
    stream: tuple[str | int, ...]  # names the random stream
    first_step: int = 0  # steps of the schedule that are skipped (done before a multicast)
    last_step: int | None = None  # where an urgent request ends it


@dataclass(frozen=True)
class Score:
    """A model on a client's test split."""

    correct: int
    total: int
    loss: float  # summed over the samples


class Trainer:
    """Trains and evaluates flat vectors on the shards of a federation."""

    def __init__(
        self, module: nn.Module, federation: Federation, seed: int, buffers: BufferPolicy = "share"
    ) -> None:
        self.space = ParameterSpace(module, buffers)
        self.federation = federation
        self.seed = seed
        self._momentum = torch.empty_like(self.space.grad)

    def train(self, job: Job) -> Tensor:
        """Carry the job out; returns what its task wants uploaded."""
        space, task = self.space, job.task
        shard = self.federation.train[job.client]
        x, y = self.federation.x[shard], self.federation.y[shard]
        theta, grad = space.vector[: space.parameters], space.grad
        anchor = job.params[: space.parameters]
        plain = isinstance(task.objective, Plain)
        fresh = True  # the momentum buffer: empty at each dispatch and each multicast
        space.load(job.params)
        space.module.train()
        with torch.random.fork_rng(devices=[]):
            for step, rows in batches(job, len(y), self.seed):
                # Dropout layers draw from torch's global stream: name that one too.
                stream = stream_seed(self.seed, *job.stream, "step", step)
                torch.default_generator.manual_seed(stream % 2**63)
                grad.zero_()
                loss = functional.cross_entropy(self._forward(x[rows]), y[rows])
                torch.autograd.backward(loss)
                with torch.no_grad():
                    if not plain:
                        task.objective.add_gradient(theta, anchor, grad)
                    if task.weight_decay:
                        grad.add_(theta, alpha=task.weight_decay)
                    if task.upload == "gradient":
                        return functional.pad(grad, (0, space.size - space.parameters))
                    direction = grad
                    if task.momentum:
                        direction = self._momentum
                        if fresh:
                            direction.copy_(grad)
                        else:
                            direction.mul_(task.momentum).add_(grad)
                        fresh = False
                    theta.sub_(direction, alpha=task.lr)
        return space.read() - job.params if task.upload == "delta" else space.read()

    @torch.inference_mode()
    def evaluate(self, params: Tensor, clients: Sequence[int]) -> list[Score]:
        """The model on the test split of each of these clients."""
        self.space.load(params)
        self.space.module.eval()
        scores = []
        for client in clients:
            shard = self.federation.test[client]
            correct, loss = 0, 0.0
            x, y = self.federation.x[shard], self.federation.y[shard]
            for part in range(0, len(y), _EVALUATION_BATCH):
                labels = y[part : part + _EVALUATION_BATCH]
                logits = self._forward(x[part : part + _EVALUATION_BATCH])
                correct += int((logits.argmax(1) == labels).sum())
                loss += float(functional.cross_entropy(logits, labels, reduction="sum"))
            scores.append(Score(correct, len(y), loss))
        return scores

    def _forward(self, x: Tensor) -> Tensor:
        inputs = self.federation.prepare(x)
        if inputs.is_floating_point():
            inputs = inputs.to(self.space.vector.dtype)
        logits: Tensor = self.space.module(inputs)
        return logits


def batches(job: Job, samples: int, seed: int) -> Iterator[tuple[int, Tensor]]:
    """The job's steps and the samples of each: one named permutation an epoch, cut in batches."""
    task = job.task
    last = task.total_steps(samples) if job.last_step is None else job.last_step
    per_epoch, shuffled = task.batches(samples), -1
    for step in range(job.first_step, last):
        epoch, position = divmod(step, per_epoch)
        if epoch != shuffled:
            shuffled = epoch
            order = rng(seed, *job.stream, "epoch", epoch).permutation(samples)
            rows = torch.from_numpy(order)
        start = position * task.batch_size
        end = samples if position == per_epoch - 1 else start + task.batch_size
        yield step, rows[start:end]
