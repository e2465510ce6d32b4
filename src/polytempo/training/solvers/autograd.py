"""Local training: the lean loop.

One resident model per process, bound to flat parameter and gradient vectors; the client's samples
are rows of one tensor and a batch is one index operation. There is no DataLoader, no optimiser
object and no copy of the model per client.

The order of the samples comes from a stream named by client and dispatch, one permutation for each
epoch, so that training can begin at any step of the schedule: that is what a client does that
receives a multicast half-way (it keeps the steps that it had left).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from polytempo.core.masks import largest, pack
from polytempo.core.parameters import BufferPolicy, ParameterSpace
from polytempo.core.rng import rng, stream_seed
from polytempo.core.task import OBJECTIVES, Task
from polytempo.data import Federation
from polytempo.training.features import last_features, principal_directions
from polytempo.training.solvers.vocabulary import Vocabulary

_EVALUATION_BATCH = 512
_PREPARED_AT_ONCE = 2**24  # numbers: larger shards are made ready for the model batch by batch


@dataclass(frozen=True)
class Job:
    """One local training: everything that its result depends on, besides the client's data."""

    client: int
    params: Tensor
    task: Task
    stream: tuple[str | int, ...]  # names the random stream
    first_step: int = 0  # steps of the schedule that are skipped (done before a multicast)
    last_step: int | None = None  # where an urgent request ends it
    anchor: Tensor | None = None  # what the objective refers to, or models to choose from


@dataclass(frozen=True)
class Score:
    """A model on a client's test split."""

    correct: int
    total: int
    loss: float  # summed over the samples


class Outcome(NamedTuple):
    """What comes of a job: the upload, and what else its task asks for, by name."""

    upload: Tensor
    extras: dict[str, Tensor]


class Solver(Protocol):
    """Carries jobs out in this process. What comes of a job depends on that job alone: not on the
    jobs that it is done together with, nor on what was done before."""

    space: ParameterSpace
    group: int  # it pays to do so many jobs together, if they are of one kind

    def kind(self, job: Job) -> object: ...

    def carry_out(self, jobs: Sequence[Job]) -> list[Outcome]:
        """What comes of each of these jobs, which are of one kind."""
        ...

    def evaluate(self, params: Tensor, clients: Sequence[int]) -> list[Score]:
        """The model on the test split of each of these clients."""
        ...


class AutogradSolver:
    """Trains and evaluates any module, by autograd, one job at a time."""

    group = 1

    def __init__(
        self, module: nn.Module, federation: Federation, seed: int, buffers: BufferPolicy = "share"
    ) -> None:
        self.space = ParameterSpace(module, buffers)
        self.federation = federation
        self.seed, self.buffers = seed, buffers
        self._vocabulary = Vocabulary.of(self.space) if federation.vocabulary else None

    def kind(self, job: Job) -> object:
        return job.task

    def carry_out(self, jobs: Sequence[Job]) -> list[Outcome]:
        if jobs[0].task.choose:  # what they choose need not be of one kind any more
            return [self._choose(job) for job in jobs]
        uploads = self.train_group(jobs)
        return [Outcome(up, self.extras(job, up)) for job, up in zip(jobs, uploads, strict=True)]

    def _choose(self, job: Job) -> Outcome:
        """The job on the model that the client chooses."""
        choice = self.choice(job)
        params = self._candidates(job)[choice]
        chosen = replace(job, params=params, anchor=None, task=replace(job.task, choose=0))
        [(upload, extras)] = self.carry_out([chosen])
        return Outcome(upload, {"choice": torch.tensor([[choice]]), **extras})

    def train_group(self, jobs: Sequence[Job]) -> list[Tensor]:
        """The upload of each of these jobs, which are of one kind, on the model that it brings."""
        return [self.train(job) for job in jobs]

    def train(self, job: Job) -> Tensor:
        space, task = self.space, job.task
        shard = self.federation.train[job.client]
        x, y = self.federation.x[shard], self.federation.y[shard]
        space.load(job.params)
        isotropic = type(task.objective) in OBJECTIVES and task.objective.isotropic
        whole_vectors = isotropic and task.sparsity is None
        if self._vocabulary is not None and whole_vectors and job.anchor is None:
            with self._vocabulary.restricted(x, job.params) as part:
                found = self._descend(job, part.theta, part.grad, part.renamed, y)
                trained = part.widen(found)
        else:
            theta = space.vector[: space.parameters]
            trained = self._descend(job, theta, space.grad, x, y).clone()
        if task.upload == "gradient":
            return functional.pad(trained, (0, space.size - space.parameters))
        whole = torch.cat([trained, space.vector[space.parameters :]])
        return whole - job.params if task.upload == "delta" else whole

    def _descend(self, job: Job, theta: Tensor, grad: Tensor, x: Tensor, y: Tensor) -> Tensor:
        """Take the job's steps on `theta`, of which the module's parameters are views, as those of
        their gradients are of `grad`. Returns `theta`, or `grad` if that is to be uploaded."""
        task = job.task
        anchor = theta.clone() if job.anchor is None else job.anchor[: len(theta)]
        momentum: Tensor | None = None  # empty at each dispatch and each multicast
        frozen = ~self.mask(job)[: len(theta)] if task.sparsity else None
        whole = x.numel() <= _PREPARED_AT_ONCE
        if whole:
            x = self._inputs(x)
        train_mode(self.space.module, task, len(y))
        with torch.random.fork_rng(devices=[]):
            for step, rows in batches(job, len(y), self.seed):
                # Dropout layers draw from torch's global stream: name that one too.
                stream = stream_seed(self.seed, *job.stream, "step", step)
                torch.default_generator.manual_seed(stream % 2**63)
                grad.zero_()
                batch = x[rows] if whole else self._inputs(x[rows])
                loss = functional.cross_entropy(self.space.module(batch), y[rows])
                torch.autograd.backward(loss)
                with torch.no_grad():
                    task.objective.add_gradient(theta, anchor, grad)
                    if task.weight_decay:
                        grad.add_(theta, alpha=task.weight_decay)
                    if frozen is not None:
                        grad.masked_fill_(frozen, 0.0)
                    if task.upload == "gradient":
                        return grad
                    if not task.momentum:
                        momentum = grad
                    elif momentum is None:
                        momentum = grad.clone()
                    else:
                        momentum.mul_(task.momentum).add_(grad)
                    theta.sub_(momentum, alpha=task.lr)
        return theta

    def mask(self, job: Job) -> Tensor:
        """The numbers of the model that the job may change; all that are no parameters are."""
        mask = torch.ones(self.space.size, dtype=torch.bool)
        trained = self.space.parameters
        mask[:trained] = largest(job.params[:trained], job.task.sparsity or 0.0)
        return mask

    @torch.inference_mode()
    def choice(self, job: Job) -> int:
        """Which of the models that the job brings has the least loss on the training samples."""
        shard = self.federation.train[job.client]
        losses = []
        for params in self._candidates(job):
            self.space.load(params)
            losses.append(self._score(shard).loss)
        return int(np.argmin(np.nan_to_num(losses, nan=np.inf)))

    def _candidates(self, job: Job) -> list[Tensor]:
        others = () if job.anchor is None else job.anchor
        return [job.params, *others]

    @torch.inference_mode()
    def extras(self, job: Job, upload: Tensor) -> dict[str, Tensor]:
        """What the job's task wants beside this upload of it."""
        found: dict[str, Tensor] = {}
        if job.task.sparsity is not None:
            found["mask"] = pack(self.mask(job))
        if job.task.basis:
            trained = {"model": upload, "delta": job.params + upload, "gradient": job.params}
            self.space.load(trained[job.task.upload])
            self.space.module.eval()
            x = self.federation.x[self.federation.train[job.client]]
            parts = [x[k : k + _EVALUATION_BATCH] for k in range(0, len(x), _EVALUATION_BATCH)]
            features = [last_features(self.space.module, self._inputs(part)) for part in parts]
            found["basis"] = principal_directions(torch.cat(features), job.task.basis)
        return found

    def evaluate(self, params: Tensor, clients: Sequence[int]) -> list[Score]:
        """The model on the test split of each of these clients."""
        self.space.load(params)
        return [self._score(self.federation.test[client]) for client in clients]

    def _score(self, shard: slice) -> Score:
        """The model that is loaded, on these samples."""
        x, y = self.federation.x[shard], self.federation.y[shard]
        return score(self.space.module, x, y, self._inputs)

    def _inputs(self, x: Tensor) -> Tensor:
        inputs = self.federation.prepare(x)
        return inputs.to(self.space.vector.dtype) if inputs.is_floating_point() else inputs


@torch.inference_mode()
def score(module: nn.Module, x: Tensor, y: Tensor, inputs: Callable[[Tensor], Tensor]) -> Score:
    """The module on these samples; `inputs` makes a batch of them ready for it."""
    module.eval()
    correct, loss = 0, 0.0
    for part in range(0, len(y), _EVALUATION_BATCH):
        labels = y[part : part + _EVALUATION_BATCH]
        logits = module(inputs(x[part : part + _EVALUATION_BATCH]))
        correct += int((logits.argmax(1) == labels).sum())
        loss += float(functional.cross_entropy(logits, labels, reduction="sum"))
    return Score(correct, len(y), loss)


def train_mode(module: nn.Module, task: Task, samples: int) -> None:
    """Get the module ready to train on so many samples. One sample alone has no statistics: where
    batches are of one, batch normalisation uses those that came with the model, and keeps them."""
    module.train()
    if min(samples, task.batch_size) == 1:
        for layer in module.modules():
            if isinstance(layer, nn.modules.batchnorm._BatchNorm):
                layer.eval()


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
