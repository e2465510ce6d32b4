"""Fast training of stacks: fully connected layers with ReLU between them.

Three things make it fast.

1. The gradient is written out by hand, and the products that it is made of are added straight into
   the momentum. There is no autograd graph, and the large matrices are allocated once.
2. Several clients train in one go, as batches of matrices: the overhead of a step is paid once for
   all of them. (Large models gain little from that and are trained few at a time.)
3. Where a client has few samples X of many features, its first layer is trained in *dual* form. All
   gradients of the layer are combinations of the samples, and weight decay or a pull towards the
   received W0 only scale, so that at any time W = alpha W0 + C^T X. We train C and alpha, and the
   activations of all samples Z = X W^T with them: Z starts as X W0^T and is updated as if it were
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

from polytempo.core.layout import ALL_SHARED, Parts
from polytempo.core.objective import Plain, is_known
from polytempo.core.optimizer import Adam, AdamW, Moments, Sgd
from polytempo.core.schedule import Constant
from polytempo.core.task import Task
from polytempo.data import Federation
from polytempo.training.jobs import Job
from polytempo.training.problem import Classification, Problem
from polytempo.training.session import Session
from polytempo.training.solvers.autograd import AutogradSolver

_TOGETHER = 2**21  # parameters of all models that are trained in one go, if there are several
_MOST = 16  # models that are
_KEPT = 2**27  # bytes of products of samples that are remembered
_CLASSIFICATION = Classification()


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
        self,
        module: nn.Module,
        federation: Federation,
        seed: int,
        parts: Parts = ALL_SHARED,
        device: str = "cpu",
        problem: Problem | None = None,
    ) -> None:
        super().__init__(module, federation, seed, parts, device, problem)
        self._features, *self._widths = _widths(module)
        self.group = max(1, min(_MOST, _TOGETHER // self.layout.trainable))
        places = {id(parameter): place for parameter, place in self.layout.trained}
        self._places = [(places[id(p)], p.shape) for p in module.parameters()]
        self._grams: OrderedDict[int, Tensor] = OrderedDict()

    @staticmethod
    def fits(
        module: nn.Module, parts: Parts = ALL_SHARED, problem: Problem = _CLASSIFICATION
    ) -> bool:
        """Whether this is a stack that can be trained here, all of it."""
        trained = not parts.frozen and all(p.requires_grad for p in module.parameters())
        return type(problem) is Classification and trained and bool(_widths(module))

    def kind(self, job: Job) -> object:
        """Jobs with the same task, and matrices of the same shape, can be done together."""
        return job.task, self._rows(job), self._knows(job), self._dual(job), "anchor" in job.vectors

    def _knows(self, job: Job) -> bool:
        """Whether the job asks for nothing but what is computed here; others go to autograd."""
        task = job.task
        return (
            is_known(task.objective)
            and type(task.optimizer) in (Sgd, Adam, AdamW)
            and (type(task.objective) is Plain or not self.layout.personal)
            and (task.upload != "gradient" or not self.layout.personal)
            and type(task.schedule) is Constant
            and not (task.keep_optimizer or job.swaps)
        )

    def train(self, sessions: Sequence[Session]) -> None:
        for masked in (False, True):  # apart: they are not trained alike
            some = [session for session in sessions if (session.frozen is not None) == masked]
            if not some:
                continue
            job = some[0].job
            if not self._knows(job) or (masked and type(job.task.optimizer) is not Sgd):
                super().train(some)
            else:
                self._train(some, masked)

    @torch.no_grad()
    def _train(self, sessions: Sequence[Session], masked: bool) -> None:
        sessions = sorted(sessions, key=lambda each: each.step - each.last)  # longest first
        job = sessions[0].job
        jobs, task = [session.job for session in sessions], job.task
        received = [session.vector for session in sessions]
        samples = 0 if masked else self._dual(job)
        layout = StackLayout(samples or self._features, self._widths, samples > 0)
        models = self._load(received, layout, samples > 0)
        plan = BatchPlan(self.federation, sessions, self._rows(jobs[0]), samples)
        points = [self._points(job.client) for job in jobs]
        if samples:
            grams = [self._gram(job.client, samples) for job in jobs]
            weights = [self._views(whole)[0][0] for whole in received]
            found = Dual(task, layout, plan, models, points, grams, weights).run()
        else:
            pulled = type(task.objective) is not Plain and "anchor" in job.vectors
            sent = [job.vectors["anchor"] for job in jobs] if pulled else []
            anchors = self._load(sent, layout, False) if sent else models.clone()
            direct = Direct(task, layout, plan, models, anchors, points)
            if masked:
                kept = [self._kept(session) for session in sessions]
                direct.kept = self._load(kept, layout, False)
            found = direct.run()
        for k, session in enumerate(sessions):
            whole = self._unload(found[k], layout, points[k], received[k], samples > 0)
            if task.upload == "gradient":
                session.gradient = whole
            else:
                session.vector = whole
            session.step = session.last

    def _kept(self, session: Session) -> Tensor:
        """0 for parameters that stay as they are, 1 for others."""
        kept = torch.ones_like(session.vector)
        if session.frozen is not None:
            kept[: len(session.frozen)][session.frozen] = 0
        return kept

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
        """The weights and biases in a vector of all numbers."""
        found = [vector[place].view(shape) for place, shape in self._places]
        return found[0::2], found[1::2]

    def _points(self, client: int) -> Tensor:
        """The client's samples, as the first layer takes them."""
        return self.inputs(self.federation.x[self.federation.train[client]]).flatten(1)

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
        sgd = type(task.optimizer) is Sgd  # others leave the space that the samples span
        if not (sgd and task.objective.linear) or "anchor" in job.vectors:
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
        self, federation: Federation, sessions: Sequence[Session], rows: int, padded: int
    ) -> None:
        self.rows = rows
        self.steps = [session.last - session.step for session in sessions]
        places = np.zeros((self.steps[0], len(sessions), rows), dtype=np.int64)
        shares = np.zeros((*places.shape, 1))
        labels = np.zeros((*places.shape, 1), dtype=np.int64)
        begin = 0
        for k, session in enumerate(sessions):
            y = federation.y[federation.train[session.job.client]].numpy()
            places[:, k] = begin  # any sample of the client's own will do
            for step in range(self.steps[k]):
                batch = session.rows(session.step + step).numpy()
                places[step, k, : len(batch)] = batch + begin
                shares[step, k, : len(batch)] = 1 / len(batch)
                labels[step, k, : len(batch), 0] = y[batch]
            begin += padded or len(y)
        self.places, self.labels = torch.from_numpy(places), torch.from_numpy(labels)
        self.shares = torch.from_numpy(shares)


class Descent:
    """Several models on their way; how the first layer is trained is up to the subclass."""

    def __init__(
        self, task: Task, layout: StackLayout, plan: BatchPlan, models: Tensor, anchors: Tensor
    ) -> None:
        self.task, self.layout, self.plan = task, layout, plan
        self.theta, self.anchor = models, anchors
        self.kept: Tensor | None = None  # 0 for parameters that stay as they are, 1 for others

    def enter(self, theta: Tensor, places: Tensor, out: Tensor) -> None:
        """The first layer's activations, without bias, of the samples at these places."""
        raise NotImplementedError

    def leave(self, total: Tensor, keep: float, places: Tensor, error: Tensor) -> None:
        """Add the gradient of the first layer, given the error of its activations, to `keep` times
        the total."""
        raise NotImplementedError

    def pull(self, theta: Tensor, total: Tensor) -> None:
        """Add the gradient of the objective, and weight decay, to the total."""
        raise NotImplementedError

    def run(self) -> Tensor:
        """Take all steps; the models that come out, or the gradients of the first step."""
        task, plan, layout, optimizer = self.task, self.plan, self.layout, self.task.optimizer
        last = len(layout.pairs) - 1
        shares = plan.shares.to(self.theta.dtype)
        count = len(self.theta)
        values = [self.theta.new_empty(count, plan.rows, outputs) for _, outputs in layout.pairs]
        minus_one = self.theta.new_full((count, plan.rows, 1), -1.0)
        everybody = optimizer.begin(self.theta)
        active = 0
        for step in range(plan.steps[0]):
            now = sum(steps > step for steps in plan.steps)  # the others have done theirs
            if now != active:
                active = now
                theta, moments = self.theta[:active], _first(everybody, active)
                total, keep = optimizer.accumulator(moments)
                (weights, biases), (pushes, shifts) = layout.views(theta), layout.views(total)
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
            total[:, layout.weights :].mul_(keep)
            for number in range(last, 0, -1):
                before = out[number - 1]
                pushes[number].baddbmm_(error.mT, before, beta=keep)
                shifts[number].add_(error.sum(1, keepdim=True))
                back = torch.bmm(error, weights[number])
                error = torch.ops.aten.threshold_backward(back, before, 0)
            shifts[0].add_(error.sum(1, keepdim=True))
            self.leave(total, keep, places, error)
            if type(task.objective) is Plain:
                optimizer.regularise(theta, total)
            else:
                self.pull(theta, total)
            if self.kept is not None:
                total.mul_(self.kept[:active])
            if task.upload == "gradient":
                return total
            optimizer.descend(theta, moments, task.lr)
        return self.theta


def _first(moments: Moments, models: int) -> Moments:
    """Those of the first `models` models; what is not a matrix belongs to all."""
    return {name: each[:models] if each.ndim == 2 else each for name, each in moments.items()}


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

    def leave(self, total: Tensor, keep: float, places: Tensor, error: Tensor) -> None:
        push = self.layout.views(total)[0][0]
        push.baddbmm_(error.mT, self.inputs[: len(total)], beta=keep)

    def pull(self, theta: Tensor, total: Tensor) -> None:
        self.task.objective.add_gradient(theta, self.anchor[: len(theta)], total)
        self.task.optimizer.regularise(theta, total)


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

    def leave(self, total: Tensor, keep: float, places: Tensor, error: Tensor) -> None:
        near = self.grams.index_select(0, places.view(-1)).view(*places.shape, self.samples)
        push = self._part(total, self.activations)
        push.baddbmm_(near.mT, error, beta=keep)
        total[:, self.combination].mul_(keep)
        combination = self._part(total, self.combination)
        for mine, rows, errors in zip(combination, self.rows, error, strict=True):
            mine.index_add_(0, rows, errors)

    def pull(self, theta: Tensor, total: Tensor) -> None:
        layout, count = self.layout, len(theta)
        anchor, square = self.anchor[:count, layout.first :], self.square[:count]
        others, alpha = theta[:, layout.rest : layout.alpha], theta[:, layout.alpha].double()
        c, z = theta[:, self.combination], theta[:, self.activations]
        shared = _products(c, anchor[:, : layout.rest - layout.first])  # with Z at the beginning
        tt = _products(others, others) + _products(c, z) + alpha * (alpha * square + shared)
        ta = _products(others, self.fixed[:count]) + alpha * square + shared
        u, v = self.task.objective.coefficients(tt, ta, self.aa[:count])
        factor = u[:, None] + self.task.optimizer.weight_decay
        total.addcmul_(theta, factor.to(theta.dtype))
        total[:, layout.first :].addcmul_(anchor, v[:, None].to(theta.dtype))  # C began as 0


def _products(a: Tensor, b: Tensor) -> Tensor:
    """The scalar product of each model's numbers."""
    products = [float(torch.dot(x, y)) for x, y in zip(a, b, strict=True)]
    return torch.tensor(products, dtype=torch.float64)


def _widths(module: nn.Module) -> list[int]:
    """Features, units of each layer, classes; empty if the module is not a stack, or might compute
    something other than a stack does (subclasses, hooks, a layer that is used twice)."""
    if type(module) is not nn.Sequential:
        return []
    layers = list(module)
    if layers and type(layers[0]) is nn.Flatten and layers[0].start_dim == 1:
        layers = layers[1:]
    dense = [layer for layer in layers[0::2] if type(layer) is nn.Linear]
    between = [layer for layer in layers[1::2] if type(layer) is nn.ReLU]
    if len(dense) != len(between) + 1 or len(dense) + len(between) != len(layers):
        return []
    if any(layer.bias is None for layer in dense):
        return []
    if len(list(module.parameters())) < 2 * len(dense):  # a layer or a weight is used twice
        return []
    hooks = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    if any(getattr(part, hook) for part in module.modules() for hook in hooks):
        return []
    return [dense[0].in_features, *(layer.out_features for layer in dense)]


def _round_up(number: int, to: int = 16) -> int:
    """To a multiple of 16: rows of matrices then begin at multiples of 64 bytes, and a client's
    sums come out the same wherever in memory they are taken."""
    return -(-number // to) * to
