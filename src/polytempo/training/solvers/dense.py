"""Fast training of stacks: fully connected layers with ReLU between them.

Three things make it fast.

1. The gradient is written out by hand, and the products that it is made of are added straight into
   the momentum. There is no autograd graph, and the large matrices are allocated once.
2. Several clients train in one go, as batches of matrices: what a step costs beside its arithmetic
   is paid once for all of them. (Large models gain little by that and are trained few at a time.)
3. Where a client has few samples X of many features, its first layer is trained in *dual* form. All
   gradients of the layer are combinations of the samples, and weight decay or a pull towards the
   received W0 only scale, so that at any time W = alpha W0 + C^T X. We train C and alpha, and the
   activations of all samples Z = X W^T beside them: Z begins as X W0^T and goes on as if it were
   parameters too, with X X^T, computed once, times the gradient of C, which is the error itself
   in the rows of the batch.

The results equal those of `AutogradSolver` up to rounding (in float32 to about 1e-6), and are bit
for bit the same whatever jobs are done together: the matrices of a client have a shape and an
alignment that depend on its own job alone.
"""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor, nn

from polytempo.core.parameters import BufferPolicy
from polytempo.core.task import OBJECTIVES, Plain, Task
from polytempo.data import Federation
from polytempo.training.solvers.autograd import AutogradSolver, Job, batches

_TOGETHER = 2**21  # parameters of all models that are trained in one go, if there are several
_MOST = 16  # models that are
_KEPT = 2**27  # bytes of products of samples that are remembered


class StackLayout:
    """Where the parameters of a stack stand in a row of numbers: all weights, all biases, alpha.

    `inputs` are those of the first layer; of one in dual form, the number of samples: C stands in
    the place of its weights, and Z after it.
    """

    def __init__(self, inputs: int, widths: Sequence[int], dual: bool) -> None:
        self.pairs = list(itertools.pairwise([inputs, *widths]))
        self.first = inputs * widths[0]
        self.rest = 2 * self.first if dual else self.first  # where the second layer begins
        others = sum(inputs * outputs for inputs, outputs in self.pairs[1:])
        self.weights = self.rest + others
        self.alpha = self.weights + sum(widths)
        self.stride = _round_up(self.alpha + 1)

    def views(self, models: Tensor) -> tuple[list[Tensor], list[Tensor]]:
        """Weights [models, outputs, inputs] and biases [models, 1, outputs] of every layer."""
        weights, biases, place, end = [], [], 0, self.weights
        for inputs, outputs in self.pairs:
            weight = models[:, place : place + inputs * outputs]
            weights.append(weight.view(-1, outputs, inputs))
            biases.append(models[:, end : end + outputs].unsqueeze(1))
            place, end = max(self.rest, place + inputs * outputs), end + outputs
        return weights, biases


class DenseSolver(AutogradSolver):
    """Trains an `nn.Sequential` of Flatten, Linear and ReLU; evaluates as `AutogradSolver` does."""

    def __init__(
        self, module: nn.Module, federation: Federation, seed: int, buffers: BufferPolicy = "share"
    ) -> None:
        super().__init__(module, federation, seed, buffers)
        self._features, *self._widths = _widths(module)
        self.group = max(1, min(_MOST, _TOGETHER // self.space.parameters))
        self._grams: OrderedDict[int, Tensor] = OrderedDict()

    @staticmethod
    def fits(module: nn.Module) -> bool:
        """Whether this is a stack that can be trained here."""
        return bool(_widths(module)) and all(p.requires_grad for p in module.parameters())

    def kind(self, job: Job) -> object:
        """Jobs with the same task, and matrices of the same shape, can be done together."""
        if type(job.task.objective) not in OBJECTIVES:
            return job.task
        return job.task, self._rows(job), self._dual(job), job.anchor is None

    def train(self, job: Job) -> Tensor:
        [trained] = self.train_group([job])
        return trained

    @torch.no_grad()
    def train_group(self, jobs: Sequence[Job]) -> list[Tensor]:
        if type(jobs[0].task.objective) not in OBJECTIVES:  # which the general way knows to call
            with torch.enable_grad():
                return [super(DenseSolver, self).train(job) for job in jobs]
        schedules = [
            [rows for _, rows in batches(job, self.federation.samples[job.client], self.seed)]
            for job in jobs
        ]
        order = sorted(range(len(jobs)), key=lambda k: -len(schedules[k]))  # longest first
        jobs, schedules = [jobs[k] for k in order], [schedules[k] for k in order]
        samples, task = self._dual(jobs[0]), jobs[0].task
        layout = StackLayout(samples or self._features, self._widths, samples > 0)
        models = self._load([job.params for job in jobs], layout, samples > 0)
        plan = BatchPlan(self.federation, jobs, schedules, self._rows(jobs[0]), samples)
        points = [self._points(job.client) for job in jobs]
        if samples:
            grams = [self._gram(job.client, samples) for job in jobs]
            received = [self._views(job.params)[0][0] for job in jobs]
            found = Dual(task, layout, plan, models, points, grams, received).run()
        else:
            sent = [job.anchor for job in jobs if job.anchor is not None]
            anchors = self._load(sent, layout, False) if sent else models.clone()
            direct = Direct(task, layout, plan, models, anchors, points)
            if task.sparsity:
                masks = [self.mask(job).to(models.dtype) for job in jobs]
                direct.kept = self._load(masks, layout, False)
            found = direct.run()
        results = []
        for k in np.argsort(order):
            whole = self._unload(found[k], layout, points[k], jobs[k].params, samples > 0)
            results.append(whole - jobs[k].params if task.upload == "delta" else whole)
        return results

    def _load(self, vectors: Sequence[Tensor], layout: StackLayout, dual: bool) -> Tensor:
        """Flat vectors in the layout, one in each row; in dual form, C = 0 and alpha = 1."""
        models = vectors[0].new_zeros(len(vectors), layout.stride)
        weights, biases = layout.views(models)
        for k, vector in enumerate(vectors):
            theirs = self._views(vector)
            for number in range(dual, len(weights)):
                weights[number][k] = theirs[0][number]
            for mine, bias in zip(biases, theirs[1], strict=True):
                mine[k] = bias
        models[:, layout.alpha] = float(dual)
        return models

    def _unload(
        self, row: Tensor, layout: StackLayout, points: Tensor, received: Tensor, dual: bool
    ) -> Tensor:
        """A row of the layout as a flat vector."""
        vector = torch.empty_like(received)
        (weights, biases), mine = layout.views(row[None]), self._views(vector)
        for number in range(dual, len(weights)):
            mine[0][number].copy_(weights[number][0])
        for target, bias in zip(mine[1], biases, strict=True):
            target.copy_(bias[0, 0])
        if dual:
            combination = row[: layout.first].view(-1, self._widths[0])[: len(points)]
            torch.mul(self._views(received)[0][0], row[layout.alpha], out=mine[0][0])
            mine[0][0].addmm_(combination.T, points)
        return vector

    def _views(self, vector: Tensor) -> tuple[list[Tensor], list[Tensor]]:
        """The weights and biases in a flat vector."""
        found = [vector[place].view(parameter.shape) for parameter, place in self.space.trained]
        return found[0::2], found[1::2]

    def _points(self, client: int) -> Tensor:
        """The client's samples, as the first layer takes them."""
        return self._inputs(self.federation.x[self.federation.train[client]]).flatten(1)

    def _gram(self, client: int, samples: int) -> Tensor:
        """The products of the client's samples with each other, padded with zeros."""
        gram = self._grams.pop(client, None)
        if gram is None:
            points = self._points(client)
            gram = points.new_zeros(samples, samples)
            gram[: len(points), : len(points)] = points @ points.T
        self._grams[client] = gram  # the most recent one comes last
        while len(self._grams) > 1 and sum(g.nbytes for g in self._grams.values()) > _KEPT:
            self._grams.popitem(last=False)
        return gram

    def _rows(self, job: Job) -> int:
        """The largest batch of the job, rounded up; a lone last sample may have joined it."""
        samples, size = self.federation.samples[job.client], job.task.batch_size
        return _round_up(size + 1 if samples % size == 1 else min(size, samples))

    def _dual(self, job: Job) -> int:
        """The number of samples, rounded up so that many clients have the same, if the dual form
        takes less arithmetic; else 0."""
        task = job.task
        if not task.objective.linear or job.anchor is not None or task.sparsity is not None:
            return 0
        samples, outputs = self.federation.samples[job.client], self._widths[0]
        steps = job.task.total_steps(samples) * min(samples, job.task.batch_size)
        direct = 2 * steps * self._features * outputs
        dual = samples * (steps * outputs + self._features * (2 * outputs + samples))
        return _round_up(samples, 64) if dual < 0.8 * direct else 0


class BatchPlan:
    """What the jobs have to do, step by step.

    `places` [steps, models, rows] are the samples of each batch among all samples of the group,
    `labels` theirs, and `shares` theirs in the loss: 0 where a batch has no such row. `padded` is
    the room that each client takes among the samples, if not just its own.
    """

    def __init__(
        self,
        federation: Federation,
        jobs: Sequence[Job],
        schedules: Sequence[Sequence[Tensor]],
        rows: int,
        padded: int,
    ) -> None:
        self.rows = rows
        self.steps = [len(schedule) for schedule in schedules]
        places = np.zeros((self.steps[0], len(jobs), rows), dtype=np.int64)
        shares = np.zeros((*places.shape, 1))
        labels = np.zeros((*places.shape, 1), dtype=np.int64)
        begin = 0
        for k, (job, schedule) in enumerate(zip(jobs, schedules, strict=True)):
            shard = federation.train[job.client]
            y = federation.y[shard].numpy()
            places[:, k] = begin  # any sample of the client's own will do
            for step, batch in enumerate(schedule):
                places[step, k, : len(batch)] = batch.numpy() + begin
                shares[step, k, : len(batch)] = 1 / len(batch)
                labels[step, k, : len(batch), 0] = y[batch.numpy()]
            begin += padded or len(y)
        self.places, self.labels = torch.from_numpy(places), torch.from_numpy(labels)
        self.shares = torch.from_numpy(shares)


class Descent:
    """Several models on their way; how the first layer is trained is up to the subclass."""

    def __init__(
        self, task: Task, layout: StackLayout, plan: BatchPlan, models: Tensor, anchors: Tensor
    ) -> None:
        self.task, self.layout, self.plan = task, layout, plan
        self.theta, self.anchor, self.momentum = models, anchors, torch.zeros_like(models)
        self.kept: Tensor | None = None  # 0 for parameters that stay as they are, 1 for others

    def enter(self, theta: Tensor, places: Tensor, out: Tensor) -> None:
        """The first layer's activations, without bias, of the samples at these places."""
        raise NotImplementedError

    def leave(self, momentum: Tensor, places: Tensor, error: Tensor) -> None:
        """Go on with the first layer's momentum, given the error of its activations."""
        raise NotImplementedError

    def pull(self, theta: Tensor, momentum: Tensor) -> None:
        """Add the gradient of the objective, and weight decay, to the momentum."""
        raise NotImplementedError

    def run(self) -> Tensor:
        """Take all steps; the models that come out, or the gradients of the first step."""
        task, plan, layout = self.task, self.plan, self.layout
        last = len(layout.pairs) - 1
        shares = plan.shares.to(self.theta.dtype)
        count = len(self.theta)
        values = [self.theta.new_empty(count, plan.rows, outputs) for _, outputs in layout.pairs]
        minus_one = self.theta.new_full((count, plan.rows, 1), -1.0)
        active = 0
        for step in range(plan.steps[0]):
            now = sum(steps > step for steps in plan.steps)  # the others have done theirs
            if now != active:
                active = now
                theta, momentum = self.theta[:active], self.momentum[:active]
                (weights, biases), (pushes, shifts) = layout.views(theta), layout.views(momentum)
                out = [value[:active] for value in values]
            places = plan.places[step, :active]
            self.enter(theta, places, out[0])
            out[0].add_(biases[0])
            for number in range(1, last + 1):
                before = out[number - 1].relu_()
                torch.baddbmm(biases[number], before, weights[number].mT, out=out[number])
            error = torch.softmax(out[last], -1)
            error.scatter_add_(2, plan.labels[step, :active], minus_one[:active])
            error.mul_(shares[step, :active])
            momentum[:, layout.weights :].mul_(task.momentum)
            for number in range(last, 0, -1):
                before = out[number - 1]
                pushes[number].baddbmm_(error.mT, before, beta=task.momentum)
                shifts[number].add_(error.sum(1, keepdim=True))
                back = torch.bmm(error, weights[number])
                error = torch.ops.aten.threshold_backward(back, before, 0)
            shifts[0].add_(error.sum(1, keepdim=True))
            self.leave(momentum, places, error)
            if type(task.objective) is not Plain:
                self.pull(theta, momentum)
            elif task.weight_decay:
                momentum.add_(theta, alpha=task.weight_decay)
            if self.kept is not None:
                momentum.mul_(self.kept[:active])
            if task.upload == "gradient":
                return self.momentum
            theta.sub_(momentum, alpha=task.lr)
        return self.theta


class Direct(Descent):
    """The first layer is trained as it is."""

    def __init__(
        self,
        task: Task,
        layout: StackLayout,
        plan: BatchPlan,
        models: Tensor,
        anchors: Tensor,
        points: Sequence[Tensor],
    ) -> None:
        super().__init__(task, layout, plan, models, anchors)
        self.points = points[0] if len(points) == 1 else torch.cat(list(points))
        self.inputs = models.new_empty(len(models), plan.rows, layout.pairs[0][0])

    def enter(self, theta: Tensor, places: Tensor, out: Tensor) -> None:
        x = self.inputs[: len(theta)]
        torch.index_select(self.points, 0, places.view(-1), out=x.flatten(0, 1))
        torch.bmm(x, self.layout.views(theta)[0][0].mT, out=out)

    def leave(self, momentum: Tensor, places: Tensor, error: Tensor) -> None:
        push = self.layout.views(momentum)[0][0]
        push.baddbmm_(error.mT, self.inputs[: len(momentum)], beta=self.task.momentum)

    def pull(self, theta: Tensor, momentum: Tensor) -> None:
        self.task.objective.add_gradient(theta, self.anchor[: len(theta)], momentum)
        momentum.add_(theta, alpha=self.task.weight_decay)


class Dual(Descent):
    """The first layer is trained in dual form."""

    def __init__(
        self,
        task: Task,
        layout: StackLayout,
        plan: BatchPlan,
        models: Tensor,
        points: Sequence[Tensor],
        grams: Sequence[Tensor],
        received: Sequence[Tensor],  # W0
    ) -> None:
        self.samples, self.outputs = layout.pairs[0]
        self.grams = grams[0] if len(grams) == 1 else torch.cat(list(grams))
        self.combination = slice(0, layout.first)  # C, of a row
        self.activations = slice(layout.first, layout.rest)  # Z
        for z, x, weight in zip(
            self._part(models, self.activations), points, received, strict=True
        ):
            torch.matmul(x, weight.T, out=z[: len(x)])
        super().__init__(task, layout, plan, models, models.clone())
        self.square = torch.stack([w.square().sum(dtype=torch.float64) for w in received])
        self.fixed = self.anchor[:, layout.rest : layout.alpha]
        self.aa = _products(self.fixed, self.fixed) + self.square
        self.own = -self.samples * torch.arange(len(models))[:, None]  # from places to own samples

    def _part(self, models: Tensor, part: slice) -> Tensor:
        """C or Z, or its momentum [models, samples, outputs]."""
        return models[:, part].view(-1, self.samples, self.outputs)

    def enter(self, theta: Tensor, places: Tensor, out: Tensor) -> None:
        self.rows = self.own[: len(theta)] + places
        activations = self._part(theta, self.activations)
        for mine, rows, found in zip(activations, self.rows, out, strict=True):
            torch.index_select(mine, 0, rows, out=found)

    def leave(self, momentum: Tensor, places: Tensor, error: Tensor) -> None:
        near = self.grams.index_select(0, places.view(-1)).view(*places.shape, self.samples)
        push = self._part(momentum, self.activations)
        push.baddbmm_(near.mT, error, beta=self.task.momentum)
        momentum[:, self.combination].mul_(self.task.momentum)
        combination = self._part(momentum, self.combination)
        for mine, rows, errors in zip(combination, self.rows, error, strict=True):
            mine.index_add_(0, rows, errors)

    def pull(self, theta: Tensor, momentum: Tensor) -> None:
        layout, count = self.layout, len(theta)
        anchor, square = self.anchor[:count, layout.first :], self.square[:count]
        others, alpha = theta[:, layout.rest : layout.alpha], theta[:, layout.alpha].double()
        c, z = theta[:, self.combination], theta[:, self.activations]
        shared = _products(c, anchor[:, : layout.rest - layout.first])  # with Z at the beginning
        tt = _products(others, others) + _products(c, z) + alpha * (alpha * square + shared)
        ta = _products(others, self.fixed[:count]) + alpha * square + shared
        u, v = self.task.objective.coefficients(tt, ta, self.aa[:count])
        momentum.addcmul_(theta, (u[:, None] + self.task.weight_decay).to(theta.dtype))
        momentum[:, layout.first :].addcmul_(anchor, v[:, None].to(theta.dtype))  # C began as 0


def _products(a: Tensor, b: Tensor) -> Tensor:
    """The scalar product of each model's numbers."""
    products = [float(torch.dot(x, y)) for x, y in zip(a, b, strict=True)]
    return torch.tensor(products, dtype=torch.float64)


def _widths(module: nn.Module) -> list[int]:
    """Features, units of each layer, classes; empty if the module is no stack, or might compute
    anything else than a stack does (subclasses, hooks, a layer that is used twice)."""
    if type(module) is not nn.Sequential:
        return []
    layers = list(module)
    if layers and type(layers[0]) is nn.Flatten and layers[0].start_dim == 1:
        layers = layers[1:]
    dense = [layer for layer in layers[0::2] if type(layer) is nn.Linear]
    between = [layer for layer in layers[1::2] if type(layer) is nn.ReLU]
    if len(dense) != len(between) + 1 or len(dense) + len(between) != len(layers):
        return []
    if len(set(map(id, dense))) < len(dense) or any(layer.bias is None for layer in dense):
        return []
    hooks = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    if any(getattr(part, hook) for part in module.modules() for hook in hooks):
        return []
    return [dense[0].in_features, *(layer.out_features for layer in dense)]


def _round_up(number: int, to: int = 16) -> int:
    """To a multiple of 16: rows of matrices then begin at multiples of 64 bytes, and a client's
    sums come out the same wherever in memory they are taken."""
    return -(-number // to) * to
