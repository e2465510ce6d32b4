"""The solver for small networks: compiled code for a chain of known layers.

Everything but the local steps and the forward pass of evaluations is as in `AutogradSolver`. A
session lays its numbers into our workspace, in our order, for as long as it advances.
"""

from __future__ import annotations

import ctypes
from collections import OrderedDict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from polytempo.core.client_steps import Rows
from polytempo.core.layout import ALL_SHARED, Parts
from polytempo.core.objective import Drift, Objective, Plain, Proximal, Pull
from polytempo.core.optimizer import Adam, AdamW, Sgd
from polytempo.core.schedule import Constant
from polytempo.core.task import Task
from polytempo.data import Federation
from polytempo.native.build import library
from polytempo.training.jobs import PERSONAL, Job
from polytempo.training.problem import Classification, Multilabel, NextToken, Problem, Regression
from polytempo.training.session import Session
from polytempo.training.solvers.autograd import AutogradSolver
from polytempo.training.solvers.native.chain import chain
from polytempo.training.solvers.native.layers import Dense, Unfit
from polytempo.training.solvers.native.places import Floats, up
from polytempo.training.solvers.native.program import Program
from polytempo.training.solvers.vocabulary import Part, Vocabulary

_LOSSES: Mapping[type[Problem], int] = {
    Classification: 0,
    Regression: 1,
    Multilabel: 2,
    NextToken: 3,
}
_OPTIMIZERS: Mapping[type, int] = {Sgd: 0, Adam: 1, AdamW: 2}
_GRADIENT = 3
_MEASURES = {"cosine": 3, "inner": 4, "l1": 5, "l2": 6}
_KERNELS = Path(__file__).parent / "kernels"
_AT_ONCE = 2**24  # numbers: larger shards are made ready batch by batch
_ROOM = 64  # samples that buffers are made for at first
_KEPT = 2**27  # bytes of products of samples that are remembered
_WORTH_KEEPING = 2**16  # bytes of those of one client
_BY_PRODUCTS = (0, 1, 3, 4)  # objectives that a layer in dual form can have


class _Run(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("x", "labels", "targets", "rows", "ends")),
        *((name, ctypes.c_void_p) for name in ("rates", "noise", "offset")),
        *(
            (name, ctypes.c_int64)
            for name in ("steps", "taken", "optimiser", "objective", "masked")
        ),
        *((n, ctypes.c_double) for n in ("momentum", "decay", "beta2", "epsilon", "strength")),
    )


class NativeSolver(AutogradSolver):
    """Trains and evaluates chains of known layers, by compiled code, one job at a time."""

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
        if device != "cpu":
            raise Unfit(f"it is for CPUs, not {device}")
        if type(self.problem) not in _LOSSES:
            raise Unfit(f"{self.problem.name} is not one of its problems")
        try:
            layers = chain(module, federation.shape, federation.vocabulary is not None)
        except Unfit as error:
            raise Unfit(f"{type(module).__name__}: {error}") from error
        self.program = Program(layers, self.layout, _LOSSES[type(self.problem)])
        if (self.program.gated is not None) != (type(self.problem) is NextToken):
            raise Unfit(f"{type(module).__name__}: it is not known for {self.problem.name}")
        if self.program.filters is not None:
            embedding = self.program.filters.embedding
            if self.program.table.hole is None and bool(embedding[0].any()):
                raise Unfit(f"{type(module).__name__}: padding has a vector that is not zero")
            self.vocabulary = Vocabulary.of(self.layout, embedding)
        self._library = library(self.program.text, _KERNELS)
        _declare(self._library)
        self._net = ctypes.addressof(self.program.net)
        self._room, self._space = 0, 0
        self.work = _aligned(5 * self.program.size).reshape(5, -1)
        self.work[0] = self.program.base
        self._served = self.program.base.copy()
        self._train_samples = _Samples(self)
        self._test_samples = _Samples(self)
        self._targets = self._as_targets()
        self._grams: OrderedDict[int, Floats] = OrderedDict()  # the most recent one comes last
        self._gram_bytes = 0
        self._dual_room = _aligned(0)
        self._check()

    def _check(self) -> None:
        """Take one step, and one look, by compiled code and by autograd: a compiler that is broken,
        or a layer that is not what it seems, must not spoil a run."""
        client = next((c for c, count in enumerate(self.federation.samples) if count), None)
        if client is None:
            return
        own = {PERSONAL: self.layout.initial_personal} if self.layout.personal else {}
        task = Task(steps=1, batch_size=4, lr=1.0, optimizer=Sgd(momentum=0.0, weight_decay=0.0))
        job = Job(client, self.layout.read(), task, ("check",), memory=own)
        start = self.layout.vector.clone()
        try:
            steps = []
            for session in (NativeSession(self, job), Session(self, job)):
                session.advance()
                steps.append(session.vector - start)
            self.load(job.params, own.get(PERSONAL))
            begin = self.federation.train[client].start
            few = slice(begin, begin + min(4, self.federation.samples[client]))
            with torch.inference_mode():
                looks = [self.outputs(few), super().outputs(few)]
        finally:
            self.layout.load_whole(start)
        for what, (mine, exact) in (("first step", steps), ("output", looks)):
            apart, length = float((mine - exact).norm()), float(exact.norm())
            if not apart <= 0.01 * length + 1e-6:
                raise Unfit(f"its {what} is off by {apart:.2g} of {length:.2g}: please report this")

    def __del__(self) -> None:
        if getattr(self, "_space", 0):
            self._library.release(self._net, self._space)

    def begin(self, job: Job) -> Session:
        return NativeSession(self, job)

    def load(self, shared: Tensor, personal: Tensor | None = None) -> None:
        super().load(shared, personal)
        self.spread(self.layout.vector, self._served)

    def outputs(self, shard: slice, rows: Rows | None = None) -> Tensor:
        if not self._padding_is_zero(self.layout.vector):
            return super().outputs(shard, rows)
        samples = self._test_samples
        x = samples.of(shard) if rows is None else samples.some(shard, rows)
        if self.program.filters:
            self.program.know(self.program.table.rows)
        self._make_room(_ROOM)
        count = shard.stop - shard.start if rows is None else len(rows)
        length = self.program.net.recurrent.length
        found = torch.empty(count, *[length] * bool(length), self.program.outputs)
        self._library.infer(
            self._space,
            self._net,
            _at(self._served),
            x,
            count,
            _at(found),
        )
        return found

    def _as_targets(self) -> Tensor:
        """The targets as compiled code takes them, which does not check them again."""
        y, outputs = self.y, self.program.outputs
        rows = self.program.table.rows or self.program.net.recurrent.tokens
        if self.program.tokens and not _all_below(self.x, rows):
            raise Unfit(f"tokens are not all among the {rows} that it knows")
        if type(self.problem) in (Classification, NextToken):
            if not _all_below(y, outputs):
                raise Unfit(f"labels are not all among its {outputs} outputs")
            return y.to(torch.int64).contiguous()
        if y.numel() != len(y) * outputs:
            raise Unfit(f"a sample has {y[0].numel()} targets, for {outputs} outputs")
        return y.to(torch.float32).reshape(len(y), -1).contiguous()

    def _padding_is_zero(self, vector: Tensor) -> bool:
        """Filters over words take it for granted that the vector of padding is."""
        hole = self.program.table.hole
        if hole is None:
            return True
        return not bool(vector[hole.start : hole.start + self.program.table.numbers].any())

    def _make_room(self, samples: int) -> None:
        if samples > self._room:
            if self._room:
                self._library.release(self._net, self._space)
            self._room = samples
            self._space = self._library.space(self._net, samples)

    def spread(self, vector: Tensor, to: Floats, part: Part | None = None) -> None:
        """Numbers in the order of the layout (or of a part of the model with the client's words
        alone), or the first of them, in our order."""
        program, hole = self.program, self.program.table.hole
        vector = vector.to(torch.float32).contiguous()
        if hole is None or len(vector) <= hole.start:
            self._library.spread(len(vector), _at(program.place), _at(vector), _at(to))
            return
        words = program.table.rows if part is None else len(part.words)
        end = hole.start + words * program.table.numbers
        rows, after = vector[hole.start : end], vector[end:]
        self._library.spread(hole.start, _at(program.place), _at(vector), _at(to))
        to[program.table.rest] = 0 if part is None else float(after[-1])
        if part is not None:
            after = after[:-1]
        self._library.spread(len(after), _at(program.place[hole.start :]), _at(after), _at(to))
        program.table.vectors(to, words)[:] = rows.view(words, -1).numpy()

    def gather(self, numbers: Floats, part: Part | None = None) -> Tensor:
        """The opposite."""
        program, hole = self.program, self.program.table.hole
        if hole is None:
            found = torch.empty(len(program.place))
            self._library.gather(len(found), _at(program.place), _at(numbers), _at(found))
            return found
        words = program.table.rows if part is None else len(part.words)
        rows = words * program.table.numbers
        found = torch.empty(len(program.place) + rows + (part is not None))
        after, place = found[hole.start + rows :], program.place[hole.start :]
        self._library.gather(hole.start, _at(program.place), _at(numbers), _at(found))
        self._library.gather(len(place), _at(place), _at(numbers), _at(after))
        into = found[hole.start : hole.start + rows].view(words, -1).numpy()
        into[:] = program.table.vectors(numbers, words)
        if part is not None:
            found[-1] = float(numbers[program.table.rest])
        return found

    def loader(self, kind: torch.dtype) -> Any:
        """What lays samples out."""
        library = self._library
        return library.load_bytes if kind == torch.uint8 else library.load_numbers

    # -- a session's steps -------------------------------------------------------------------------

    def knows(self, session: Session) -> bool:
        """Whether the session asks for nothing but what is computed here."""
        task = session.task
        return (
            _objective(task.objective) is not None
            and type(task.optimizer) in _OPTIMIZERS
            and not (task.upload == "gradient" and self.layout.personal)
            and (session.offset is None or self.program.gated is None)
            and self._padding_is_zero(session.vector)
        )

    def descend(self, session: NativeSession, until: int) -> None:
        """Take the steps up to that one, on one and the same received model."""
        task, work = session.task, self.work
        kind, strength = _objective(task.objective) or (0, 0.0)
        part = session.part()
        if self.program.filters:
            self.program.know(self.program.table.rows if part is None else len(part.words))
        used = self.program.used
        work[0, :used] = self.program.base[:used]  # a training that diverged leaves NaN in padding
        self.spread(session.vector if part is None else part.theta, work[0], part)
        if kind:
            anchor = session.vectors.get("anchor", session.received)[: self.layout.parameters]
            self.spread(anchor if part is None else part.anchor, work[2], part)
        still = session.still()
        if still is not None:
            self.spread(_mask(still), work[4])
        optimizer: Any = task.optimizer
        adam = isinstance(optimizer, Adam)
        run = _Run(
            taken=session.load_moments(part),
            optimiser=_GRADIENT if task.upload == "gradient" else _OPTIMIZERS[type(optimizer)],
            objective=kind,
            masked=still is not None,
            momentum=1 - optimizer.beta1 if adam else optimizer.momentum,
            # that of AdamW is not a part of the gradient
            decay=0.0
            if task.upload == "gradient" and type(optimizer) is AdamW
            else optimizer.weight_decay,
            beta2=optimizer.beta2 if adam else 0.0,
            epsilon=optimizer.epsilon if adam else 0.0,
            strength=strength,
        )
        shard = self.federation.train[session.job.client]
        samples: _Samples = self._train_samples
        if part is not None:
            samples = _Samples(self, part.renamed)
            shard = slice(0, len(part.renamed))
        large = (shard.stop - shard.start) * self.program.inputs > _AT_ONCE
        if self.program.noise or large:
            for step in range(session.step, until):
                noise = self._noise(session, step)
                self._train(session, run, range(step, step + 1), samples, shard, large, noise)
        else:
            steps = range(session.step, until)
            dual = session.alone(until) and self._dual(session, kind, steps)
            self._train(session, run, steps, samples, shard, large, None, dual)
        if task.upload == "gradient":
            gradient = self.gather(work[1], part)
            session.gradient = gradient if part is None else part.widen(gradient)
        elif part is None:
            session.vector = self.gather(work[0])
        else:
            part.theta.copy_(self.gather(work[0], part))
            session.vector[: self.layout.parameters] = part.widen(part.theta)
        session.step = until
        session.keep_moments(part, run.taken)

    def _train(
        self,
        session: Session,
        run: _Run,
        steps: range,
        samples: _Samples,
        shard: slice,
        large: bool,
        noise: Tensor | None,
        dual: bool = False,
    ) -> None:
        rows, ends = session.batches(steps)
        task, targets = session.task, self._targets[self.federation.train[session.job.client]]
        if type(task.schedule) is Constant:
            rates = np.full(len(steps), task.lr)
        else:
            rates = np.array([task.rate(step) for step in steps])
        if large:  # one batch alone is made ready
            x, targets = samples.some(shard, rows), targets[rows]
            rows = np.arange(len(rows))
        else:
            x = samples.of(shard)
        self._make_room(min(session.samples, task.batch_size + 1))  # one sample may join a batch
        run.x, run.labels, run.targets = x, targets.data_ptr(), targets.data_ptr()
        run.rows, run.ends, run.rates = rows.ctypes.data, ends.ctypes.data, rates.ctypes.data
        run.noise = None if noise is None else noise.data_ptr()
        run.offset = None if session.offset is None else session.offset.data_ptr()
        run.steps = len(steps)
        given = self._space, self._net, _at(self.work), ctypes.addressof(run)
        if dual:
            client, outputs = session.job.client, up(self.program.batch_layers[0].outputs)
            if len(self._dual_room) < 5 * len(targets) * outputs:
                self._dual_room = _aligned(5 * len(targets) * outputs)
            gram = self._gram(client, x, len(targets))
            self._library.train_dual(*given, len(targets), _at(gram), _at(self._dual_room))
        else:
            self._library.train(*given)
        run.taken += run.steps

    def _dual(self, session: Session, kind: int, steps: range) -> bool:
        """Whether the dual form of the first layer can be used, and takes less arithmetic."""
        first, task, samples = self.program.batch_layers[0], session.task, session.samples
        if (
            self.program.stages
            or self.program.tokens
            or not isinstance(first.layer, Dense)
            or not first.trained
            or type(task.optimizer) is not Sgd
            or kind not in _BY_PRODUCTS
            or "anchor" in session.vectors
            or session.still() is not None
            or task.keep_optimizer
            or task.upload in ("gradient", "path")
        ):
            return False
        seen = len(steps) * min(samples, task.batch_size)
        direct = 2 * seen * first.inputs * first.outputs
        dual = samples * (seen * first.outputs + first.inputs * (2 * first.outputs + samples))
        return dual < 0.8 * direct

    def _gram(self, client: int, samples: int, count: int) -> Floats:
        """The products of the client's samples with each other, which are kept if there are many:
        few are computed again sooner than found."""
        gram = self._grams.get(client)
        if gram is not None:
            self._grams.move_to_end(client)
            return gram
        gram = _aligned(count * up(count))
        self._library.gram(count, self.program.inputs, samples, _at(gram))
        if gram.nbytes >= _WORTH_KEEPING:
            self._grams[client] = gram
            self._gram_bytes += gram.nbytes
            while len(self._grams) > 1 and self._gram_bytes > _KEPT:
                self._gram_bytes -= self._grams.popitem(last=False)[1].nbytes
        return gram

    def _noise(self, session: Session, step: int) -> Tensor | None:
        """What dropout layers multiply by at that step: the numbers that torch's would draw."""
        if not self.program.noise:
            return None
        samples = len(session.rows(step))
        with self.own_randomness():
            self.set_randomness(*session.job.stream, "step", step)
            return torch.cat(
                [
                    torch.empty(samples * numbers).bernoulli_(1 - share).div_(1 - share)
                    for numbers, share in self.program.noise
                ]
            )


class NativeSession(Session):
    """A session whose steps are taken by compiled code, where that knows how. However it is split
    up, the bits are the same, but for a first layer in dual form, which a training done in one go
    may have: that differs by rounding."""

    solver: NativeSolver

    def _descend(self, until: int) -> None:
        if self.solver.knows(self):
            self.solver.descend(self, until)
        else:
            super()._descend(until)

    def alone(self, until: int) -> bool:
        """Whether nothing is left of steps before these, and nobody asks for their moments."""
        ahead = self._swaps[0].step if self._swaps else self.last
        return self._moments is None and until == ahead

    def part(self) -> Part | None:
        """The model with the client's own words alone, if these suffice."""
        vocabulary = self.solver.vocabulary
        if vocabulary is None or not self._words_suffice():
            return None
        if self._part is None:
            self._part = vocabulary.part(self.shard()[0], self.received)
        return self._part

    def load_moments(self, part: Part | None) -> int:
        """Lay the moments of the optimiser into the workspace; how many steps they are made of."""
        work, moments = self.solver.work, self._moments
        for name, row in _MOMENTS[type(self.task.optimizer)].items():
            work[row, : self.solver.program.used] = 0
            if moments is not None:
                self.solver.spread(moments[name], work[row], part)
        return 0 if moments is None or "count" not in moments else int(moments["count"])

    def keep_moments(self, part: Part | None, taken: int) -> None:
        """Take them out again, if anybody will want them."""
        wanted = self.task.keep_optimizer or self.task.upload == "path" or not self.finished
        if self.task.upload == "gradient" or not wanted:
            return
        moments = self.task.optimizer.begin(self.vector if part is None else part.theta)
        for name, row in _MOMENTS[type(self.task.optimizer)].items():
            moments[name] = self.solver.gather(self.solver.work[row], part)
        if "count" in moments:
            moments["count"].fill_(taken)
        self._moments = moments


class _Samples:
    """Samples as the compiled code takes them. The buffer is kept: fresh pages cost a tenth of a
    training."""

    def __init__(self, solver: NativeSolver, x: Tensor | None = None) -> None:
        self._solver, self._x = solver, solver.x if x is None else x
        self._buffer = _aligned(0)
        self._held: tuple[int, int] | None = None
        federation, channels = solver.federation, solver.federation.shape[0]
        scale, shift = np.ones(channels), np.zeros(channels)
        if federation.x.dtype == torch.uint8:
            mean, std = np.zeros(channels), np.ones(channels)
            if federation.mean is not None and federation.std is not None:
                mean, std = np.array(federation.mean), np.array(federation.std)
            scale, shift = 1 / (255 * std), -mean / std
        self._scale, self._shift = scale.astype(np.float32), shift.astype(np.float32)

    def of(self, shard: slice) -> int:
        """The address of these samples, until others are asked for."""
        bounds = shard.start, shard.stop
        if self._held != bounds:
            self._place = self._load(self._x[shard])
            self._held = bounds
        return self._place

    def some(self, shard: slice, rows: Rows) -> int:
        """Of these samples of a shard."""
        self._held = None
        return self._load(self._x[shard][torch.from_numpy(rows)])

    def _load(self, x: Tensor) -> int:
        program, count = self._solver.program, len(x)
        if program.tokens:
            self._kept = x.to(torch.int32).contiguous()
            return self._kept.data_ptr()
        if not program.stages:
            ready = self._solver.inputs(x).flatten(1)
            if ready.shape[1] == program.inputs and ready.is_contiguous():
                self._kept = ready
                return ready.data_ptr()
            self._reserve(count * program.inputs)
            rows = self._buffer[: count * program.inputs].reshape(count, -1)
            rows[:, : ready.shape[1]] = ready.numpy()
            return self._buffer.ctypes.data
        if x.dtype not in (torch.uint8, torch.float32):
            x = self._solver.inputs(x)
        x = x.contiguous()
        self._reserve(count * program.inputs)
        loader = self._solver.loader(x.dtype)
        loader(count, _at(x), _at(self._scale), _at(self._shift), _at(self._buffer))
        return self._buffer.ctypes.data

    def _reserve(self, numbers: int) -> None:
        if len(self._buffer) < numbers + 64:  # vectors may begin at the last number
            self._buffer = _aligned(numbers + 64)


_MOMENTS: Mapping[type, Mapping[str, int]] = {
    Sgd: {"momentum": 1},
    Adam: {"first": 1, "second": 3},
    AdamW: {"first": 1, "second": 3},
}


def _objective(objective: Objective) -> tuple[int, float] | None:
    """The number of an objective in step.hpp, and its strength; None if it is not one of these."""
    if type(objective) is Plain:
        return 0, 0.0
    if type(objective) is Proximal:
        return (1 if objective.power == 2 else 2), objective.mu
    if type(objective) is Pull:
        return _MEASURES[objective.measure], objective.strength
    return (7, 0.0) if type(objective) is Drift else None


def _mask(frozen: Tensor) -> Tensor:
    """All bits where a number may move, none where it is frozen."""
    return (~frozen).to(torch.int32).neg().view(torch.float32)


def _declare(library: ctypes.CDLL) -> None:
    """The functions of network.hpp."""
    number, address = ctypes.c_long, ctypes.c_void_p
    library.space.restype = address
    for name, given in {
        "space": [address, number],
        "release": [address, address],
        "train": [address] * 4,
        "train_dual": [*[address] * 4, number, address, address],
        "gram": [number, number, address, address],
        "infer": [*[address] * 4, number, address],
        "spread": [number, *[address] * 3],
        "gather": [number, *[address] * 3],
        "load_bytes": [number, *[address] * 4],
        "load_numbers": [number, *[address] * 4],
    }.items():
        if hasattr(library, name):
            getattr(library, name).argtypes = given


def _all_below(values: Tensor, bound: int) -> bool:
    """Whether they are numbers of things of which there are so many."""
    return not len(values) or (int(values.min()) >= 0 and int(values.max()) < bound)


def _at(array: Tensor | NDArray[Any]) -> int:
    """Its address."""
    return array.data_ptr() if isinstance(array, Tensor) else array.ctypes.data


def _aligned(numbers: int) -> Floats:
    """Zeros that begin at a multiple of 64 bytes."""
    room = np.zeros(numbers + 16, np.float32)
    return room[-(room.ctypes.data // 4) % 16 :][:numbers]
