"""A local training under way: the only place where local steps are taken by autograd.

A session begins with a job, advances by a number of steps, has a new model swapped in at a step
boundary, and is finished when its result is asked for. The simulator's workers run it to the end, a
deployed client stops between two steps, a peer's training is one session after another with what it
remembers in between, adaptation is a session on a copy. However it is split up, the bits are the
same.

The order of the samples comes from a stream named by client and dispatch, one permutation per
epoch, so that training can begin at any step of the schedule, as it does for a client that receives
a multicast half-way (it keeps the steps that it had left).

There is one module for all sessions of a process. A session has its own vector of all numbers and
lays it into the module for as long as it advances.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from polytempo.core.client_steps import ClientStep, Rows, with_offset
from polytempo.core.errors import PolytempoError
from polytempo.core.objective import is_known
from polytempo.core.optimizer import Moments, Sgd
from polytempo.core.rng import rng
from polytempo.core.task import Task
from polytempo.training.features import last_features
from polytempo.training.jobs import OPTIMIZER, PERSONAL, Job, Outcome
from polytempo.training.solvers.vocabulary import Part

if TYPE_CHECKING:
    from polytempo.training.solvers.autograd import AutogradSolver

_AT_ONCE = 2**24  # numbers: larger shards are made ready for the model batch by batch


class Session:
    """The training that a job describes; `core.client_steps.Session` is what its steps see.

    `step`: the next step to take; `last`: where the training ends. `vector`: all numbers of the
    model that change, as `Layout.join` orders them. `gradient`: what is uploaded, if no step is
    taken.
    """

    def __init__(self, solver: AutogradSolver, job: Job) -> None:
        self.solver, self.job, self.task = solver, job, job.task
        self.samples = solver.federation.samples[job.client]
        self.step = job.first_step
        total, self._own_steps = (
            f(self.samples) for f in (job.task.total_steps, job.task.own_steps)
        )
        self.last = total if job.last_step is None else job.last_step
        self.memory = {name: vector.clone() for name, vector in job.memory.items()}
        self.extras: dict[str, Tensor] = {}
        self.gradient: Tensor | None = None
        self.frozen: Tensor | None = None
        self.offset = solver.offset(job.client, job.task.client_steps)  # added to the outputs
        self._moments: Moments | None = self._kept_moments()
        self._swaps = list(job.swaps)
        self._data: tuple[Tensor, Tensor] | None = None
        self._order: tuple[int, Rows] | None = None
        self.held_out = self._hold_out()
        self._receive(job.params, job.vectors)

    # -- beginning ---------------------------------------------------------------------------------

    def swap(self, params: Tensor, vectors: Mapping[str, Tensor], lr: float | None = None) -> None:
        """Continue from this model, at this learning rate (None: as before). The client's own part
        stays."""
        own = self.solver.layout.split(self.vector)[1]
        if len(own):
            self.memory[PERSONAL] = own
        if lr is not None:
            self.task = replace(self.task, lr=lr)
        self._receive(params, vectors)

    def _receive(self, params: Tensor, vectors: Mapping[str, Tensor]) -> None:
        self.vectors, self.frozen = vectors, None
        self.begin(params)
        for step in self.task.client_steps:
            self._take_part(step, step.before)

    def begin(self, model: Tensor) -> None:
        self.received = model
        self.vector = self.solver.layout.join(model, self.memory.get(PERSONAL))
        self._part: Part | None = None
        self._elsewhere = False  # whether training starts from another model than the received one
        self._counters: list[Tensor] | None = None
        if not self.task.keep_optimizer:
            self._moments = None

    def _kept_moments(self) -> Moments | None:
        kept = self.task.optimizer.kept if self.task.keep_optimizer else ()
        if not kept or not all(OPTIMIZER + name in self.memory for name in kept):
            return None
        device = self.solver.device
        moments = {name: self.memory[OPTIMIZER + name].to(device, copy=True) for name in kept}
        return self.task.optimizer.begin(moments[kept[0]]) | moments

    def _hold_out(self) -> Rows:
        """The samples that its steps keep out of training: for the same share always the same ones,
        wherever the client trains."""
        share = max((step.holds_out for step in self.task.client_steps), default=0.0)
        if not 0 <= share <= 0.5:
            raise PolytempoError(
                f"a client step holds out {share:g} of the samples; expected a share from 0 to 0.5"
            )
        if not (count := int(share * self.samples)):
            return np.zeros(0, dtype=np.int64)
        return rng(self.solver.seed, "held out").permutation(self.samples)[:count]

    # -- client steps ------------------------------------------------------------------------------

    def _take_part(self, step: ClientStep, part: Callable[[Session], None]) -> None:
        """What the step does now, and a look at what it leaves in the memory."""
        who, known = step.name or type(step).__name__, {*self.memory, *step.keeps}
        for name in step.keeps:
            if name == PERSONAL or name.startswith(OPTIMIZER):
                raise PolytempoError(
                    f"client step {who} keeps {name!r}, a name for what the client keeps in any "
                    "case; choose another"
                )
        part(self)
        for name, value in self.memory.items():
            if name not in known:
                raise PolytempoError(
                    f"client step {who} stored {name!r} in the memory without saying that it keeps "
                    "it; name it in its property `keeps`"
                )
            if (found := _not_a_vector(value)) is not None:
                raise PolytempoError(
                    f"client step {who} keeps {name!r} as {found}; expected a vector of floats "
                    "that is not empty: store value.float().flatten()"
                )

    @property
    def parameters(self) -> int:
        return self.solver.layout.parameters

    def trained(self) -> Tensor:
        return self.solver.layout.split(self.vector)[0].cpu()

    def put(self, model: Tensor) -> None:
        layout = self.solver.layout
        self.vector = layout.join(model, layout.split(self.vector)[1])
        self._part, self._elsewhere = None, True

    def train(
        self,
        model: Tensor,
        task: Task,
        name: str,
        *,
        anchor: Tensor | None = None,
        frozen: Tensor | None = None,
    ) -> Tensor:
        own = self.solver.layout.split(self.vector)[1].cpu()
        task = replace(
            task,
            client_steps=with_offset(self.task.client_steps),
            keep_optimizer=False,
            own_epochs=0 if len(own) else None,
        )
        job = Job(
            self.job.client,
            model,
            task,
            (*self.job.stream, name),
            vectors={} if anchor is None else {"anchor": anchor},
            memory={PERSONAL: own} if len(own) else {},
        )
        session = self.solver.begin(job)
        session.frozen, session.held_out = frozen, self.held_out
        session.advance()
        return session.finish().upload

    def places(self, part: str) -> Tensor:
        return self.solver.layout.places(part)

    @torch.inference_mode()
    def loss(self, model: Tensor, rows: Rows | None = None) -> float:
        self.solver.load(model, self.memory.get(PERSONAL))
        shard = self.solver.federation.train[self.job.client]
        return self.solver.score(shard, self.offset, rows=rows).sums["loss"]

    @torch.inference_mode()
    def features(self) -> Tensor:
        layout = self.solver.layout
        layout.load_whole(self.vector)
        layout.module.eval()
        x, _ = self.shard()
        at_once = self.solver.at_once
        parts = [x[k : k + at_once] for k in range(0, len(x), at_once)]
        found = [last_features(layout.module, self.solver.inputs(part)) for part in parts]
        return torch.cat(found).cpu()

    def targets(self) -> Tensor:
        return self.shard()[1].cpu()

    def stream(self, name: str) -> np.random.Generator:
        secret = self.job.secret
        return rng(self.solver.seed if secret is None else secret, *self.job.stream, name)

    def shard(self) -> tuple[Tensor, Tensor]:
        """The client's training samples, as they are stored."""
        return self.solver.samples(self.solver.federation.train[self.job.client])

    # -- training ----------------------------------------------------------------------------------

    @property
    def finished(self) -> bool:
        return self.step >= self.last

    def rows(self, step: int) -> Tensor:
        """The samples of that step's batch."""
        return torch.from_numpy(self.batches(range(step, step + 1))[0])

    def batches(self, steps: range) -> tuple[Rows, Rows]:
        """The samples of these steps' batches, one after the other, and where each batch ends: one
        named permutation per epoch, cut into batches."""
        per_epoch, size = self.task.batches(self.samples), self.task.batch_size
        rows, ends, count = [], [], 0
        for epoch in range(steps.start // per_epoch, (steps.stop - 1) // per_epoch + 1):
            first, last = (
                min(max(step - epoch * per_epoch, 0), per_epoch)
                for step in (steps.start, steps.stop)
            )
            here = np.arange(first + 1, last + 1) * size
            if last == per_epoch:  # what is left joins the last batch
                here[-1] = self.samples
            begin = first * size
            rows.append(self._order_of(epoch)[begin : here[-1]])
            ends.append(here + (count - begin))
            count += len(rows[-1])
        if len(rows) == 1:
            return rows[0], ends[0]
        return np.concatenate(rows), np.concatenate(ends)

    def _order_of(self, epoch: int) -> Rows:
        if self._order is None or self._order[0] != epoch:
            stream = rng(self.solver.seed, *self.job.stream, "epoch", epoch)
            order = stream.permutation(self.samples)
            if len(self.held_out):  # others in their places: there are as many steps as ever
                out = np.isin(order, self.held_out)
                order[out] = stream.choice(order[~out], len(self.held_out), replace=False)
            self._order = epoch, order
        return self._order[1]

    def stop(self) -> None:
        """The epoch in progress is the last (an urgent request)."""
        self.last = min(self.last, self.task.end_of_epoch(self.step, self.samples))

    def advance(self, steps: int | None = None) -> int:
        """Take this many steps, or all that are left; returns how many were taken."""
        begin = self.step
        until = self.last if steps is None else min(self.last, begin + steps)
        while self.step < until:
            if self._swaps and self._swaps[0].step <= self.step:
                _, params, vectors, lr = self._swaps.pop(0)
                self.swap(params, vectors, lr)
            ahead = self._swaps[0].step if self._swaps else until
            if self.step < self._own_steps:
                ahead = min(ahead, self._own_steps)
            self._descend(min(until, ahead))
            if self.step == self._own_steps and not self.task.keep_optimizer:
                self._moments = None  # the other part of the model begins its own training
        return self.step - begin

    def still(self) -> Tensor | None:
        """True for each trained number, the client's own ones last, that stays as it is in the
        steps to come: a client step has frozen it, or its turn is another. None: all move."""
        layout, alternate = self.solver.layout, self.task.own_epochs is not None
        if self.frozen is None and not alternate:
            return None
        still = torch.zeros(layout.trainable, dtype=torch.bool)
        if self.frozen is not None:
            still[: layout.parameters] = self.frozen
        if alternate and self.step < self._own_steps:
            still[: layout.parameters] = True
        elif alternate:
            still[layout.parameters :] = True
        return still

    def _descend(self, until: int) -> None:
        """Take the steps up to that one, on one and the same received model."""
        task, solver, still = self.task, self.solver, self.still()
        x, y = self._samples()
        with self._bound(x) as (theta, grad, anchor, x), solver.own_randomness():
            shared, shared_grad = theta[: len(anchor)], grad[: len(anchor)]
            frozen = None if still is None else still.to(theta.device)
            as_it_was = theta if frozen is None else theta[frozen]
            while self.step < until:
                # Dropout layers draw from torch's global stream: name that one too.
                solver.set_randomness(*self.job.stream, "step", self.step)
                grad.zero_()
                rows = self.rows(self.step)
                batch = solver.inputs(x[rows])
                outputs = solver.layout.module(batch)
                outputs = outputs if self.offset is None else outputs + self.offset
                loss = solver.problem.loss(outputs, y[rows])
                torch.autograd.backward(loss)
                with torch.no_grad():
                    task.objective.add_gradient(shared, anchor, shared_grad)
                    task.optimizer.regularise(theta, grad)
                    if frozen is not None:
                        grad.masked_fill_(frozen, 0.0)
                    if task.upload == "gradient":
                        self._upload_gradient(theta, grad)
                        self.step = until
                    else:
                        self._moments = self._moments or task.optimizer.begin(theta)
                        task.optimizer.step(theta, grad, self._moments, task.rate(self.step))
                        if frozen is not None:  # decoupled weight decay has moved them
                            theta[frozen] = as_it_was
                        self.step += 1

    def _upload_gradient(self, theta: Tensor, grad: Tensor) -> None:
        """The shared part moves by what the server makes of the gradient. The client's own part
        is nobody else's business: it takes its step at once."""
        layout, optimizer = self.solver.layout, self.task.optimizer
        whole = grad if self._part is None else self._part.widen(grad)
        shared = whole[: layout.parameters].clone()
        self.gradient = functional.pad(shared, (0, layout.size - layout.parameters))
        own = slice(layout.parameters, layout.trainable)
        if layout.personal:
            self._moments = self._moments or optimizer.begin(theta[own])
            optimizer.step(theta[own], grad[own], self._moments, self.task.rate(self.step))

    def _mean_gradient(self, way: Tensor) -> Tensor:
        """Of all steps that have been taken since the model was received."""
        optimizer, trained = self.task.optimizer, self.solver.layout.parameters
        assert isinstance(optimizer, Sgd) and self._moments is not None, "the server has seen to it"
        momentum = self._moments["momentum"][:trained].cpu()
        taken = self.step - self.job.first_step
        found = optimizer.mean_gradient(way[:trained], momentum, taken, self.task.lr)
        return functional.pad(found, (0, len(way) - trained))

    def _samples(self) -> tuple[Tensor, Tensor]:
        """The client's training samples, ready for the model if they are not too many."""
        if self._data is None:
            x, y = self.shard()
            self._data = (self.solver.inputs(x) if x.numel() <= _AT_ONCE else x), y
        return self._data

    @contextmanager
    def _bound(self, x: Tensor) -> Iterator[tuple[Tensor, Tensor, Tensor, Tensor]]:
        """Within this context the module is the model of this session: all its trained numbers,
        their gradient, the anchor of the shared ones, and the samples to feed it with."""
        solver, layout, vocabulary = self.solver, self.solver.layout, self.solver.vocabulary
        layout.load_whole(self.vector, self._counters)
        layout.train(min(self.samples, self.task.batch_size))
        if vocabulary is not None and self._words_suffice():
            if self._part is None:
                self._part = vocabulary.part(x, self.received.to(solver.device))
            with vocabulary.bound(self._part):
                yield self._part.theta, self._part.grad, self._part.anchor, self._part.renamed
            layout.vector[: layout.parameters] = self._part.widen(self._part.theta)
        else:
            anchor = self.vectors.get("anchor", self.received)[: layout.parameters]
            theta = layout.vector[: layout.trainable]
            yield theta, layout.grad, anchor.to(theta.device), x
        self.vector, self._counters = layout.vector.clone(), layout.counters()

    def _words_suffice(self) -> bool:
        """Whether words that the client does not have can be left out of the training."""
        return (
            is_known(self.task.objective)
            and self.task.objective.isotropic
            and type(self.task.optimizer) is Sgd
            and not self.task.keep_optimizer
            and self.still() is None
            and not self._elsewhere
            and self.task.upload != "path"
            and "anchor" not in self.vectors
        )

    # -- the end -----------------------------------------------------------------------------------

    def finish(self) -> Outcome:
        """What has come of the training."""
        if self._moments is not None:
            trained = self.vector[: self.solver.layout.trainable]
            self.task.optimizer.end(trained, self._moments)
        for step in self.task.client_steps:
            self._take_part(step, step.after)
        shared, own = (part.cpu() for part in self.solver.layout.split(self.vector))
        if len(own):
            self.memory[PERSONAL] = own
        if self.task.keep_optimizer and self._moments is not None:
            for name in self.task.optimizer.kept:
                self.memory[OPTIMIZER + name] = self._moments[name].cpu()
        upload = shared
        if self.task.upload == "delta":
            upload = shared - self.received
        elif self.task.upload == "gradient":
            assert self.gradient is not None, "a gradient is what the one step of the task finds"
            upload = self.gradient.cpu()
        elif self.task.upload == "path":
            upload = self._mean_gradient(shared - self.received)
        upload = self.task.leaving(self, upload)
        return Outcome(upload, self.extras, self.memory)


def _not_a_vector(value: object) -> str | None:
    """What it is, if that is nothing that a client can keep."""
    if not isinstance(value, Tensor):
        return f"a {type(value).__name__}"
    fine = value.dim() == 1 and len(value) > 0 and value.is_floating_point()
    return None if fine else f"{value.dtype} of shape {list(value.shape)}"
