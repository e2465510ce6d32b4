"""What a client does before and after its local steps, and whenever it uses its model.

A client step is plain data: it travels with the task. It says what it uploads, what it keeps and
what it costs, and is handed the training session in which it takes part. Steps are done in the
order in which the task names them; `before` again when a multicast brings a new model.

    @CLIENT_STEPS.register("mine")
    class Norm(ClientStep):
        '''Uploads the length of the trained model.'''

        @property
        def uploads(self) -> Mapping[str, int]:
            return {"norm": 1}              # its name, and its number of rows

        def after(self, session: Session) -> None:
            session.extras["norm"] = session.trained().norm().reshape(1, 1)
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Annotated, ClassVar, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import Field
from torch import Tensor

from polytempo.core.errors import Refused
from polytempo.core.masks import largest, pack
from polytempo.core.registry import Options, Registry

if TYPE_CHECKING:
    from polytempo.core.task import Task

Rows = NDArray[np.int64]  # numbers of samples


class Session(Protocol):
    """What a step may look at and change in a client's training (`polytempo.training.session`)."""

    task: Task  # what the client is asked to do
    samples: int  # training samples of the client
    received: Tensor  # the model to train, as it travels
    vectors: Mapping[str, Tensor]  # what came with it
    memory: dict[str, Tensor]  # what the client remembers from one training to the next: vectors
    extras: dict[str, Tensor]  # what is uploaded along with the update
    frozen: Tensor | None  # True for trained parameters of the model that are to stay as they are
    held_out: Rows  # samples that are kept out of training (`ClientStep.holds_out`)

    @property
    def parameters(self) -> int:
        """How many numbers of a model are trained: the first ones; the others are buffers."""
        ...

    def begin(self, model: Tensor) -> None:
        """Train this model instead, as if it were the one that was received."""
        ...

    def trained(self) -> Tensor:
        """The model as it is now, as it would travel."""
        ...

    def put(self, model: Tensor) -> None:
        """Make this the model as it is now: before the local steps, where they start; after them,
        what is uploaded. `received` stays as it was."""
        ...

    def train(
        self,
        model: Tensor,
        task: Task,
        name: str,
        *,
        anchor: Tensor | None = None,
        frozen: Tensor | None = None,
    ) -> Tensor:
        """What becomes of another model if it is trained as this task says, apart from the
        session's own: the upload. `name` names its random numbers, `anchor` is what its objective
        refers to (default: the model itself), `frozen` is as above. The task's client steps are
        left out, except for what they add to the outputs. The client's own part is used as it
        is."""
        ...

    def places(self, part: str) -> Tensor:
        """Which numbers of a model, as it travels, belong to that part of it: head, norm, body or a
        pattern of parameter names."""
        ...

    def stream(self, name: str) -> np.random.Generator:
        """Random numbers for that purpose, in this training alone."""
        ...

    def loss(self, model: Tensor, rows: Rows | None = None) -> float:
        """Of that model on the client's training samples, or on some of them, summed."""
        ...

    def features(self) -> Tensor:
        """What enters the last linear layer of the model as it is now, for each training sample."""
        ...

    def targets(self) -> Tensor:
        """Of the client's training samples."""
        ...


class Parting(Protocol):
    """What a step may look at and change when an upload leaves (a session is one)."""

    received: Tensor
    memory: dict[str, Tensor]
    extras: dict[str, Tensor]

    def stream(self, name: str) -> np.random.Generator:
        """Random numbers for that purpose, in this training alone."""
        ...


class Sent(Protocol):
    """What a client was sent (a dispatch is one)."""

    @property
    def params(self) -> Tensor: ...

    @property
    def vectors(self) -> Mapping[str, Tensor]: ...


class ClientStep(Options):
    """Base of the steps: each of its parts does nothing."""

    name: ClassVar[str] = ""
    tells: ClassVar[bool] = True  # False: what it uploads says nothing about the client's data
    offset_in_use: ClassVar[bool] = True  # False: what it adds to the outputs is for training alone

    @property
    def uploads(self) -> Mapping[str, int]:
        """What it uploads: names, and the number of rows of each."""
        return {}

    @property
    def keeps(self) -> tuple[str, ...]:
        """What it keeps in the client's memory: the names. Each is a vector of floats, of one
        length for all clients, and absent until the step has stored it there."""
        return ()

    @property
    def holds_out(self) -> float:
        """The share of the client's training samples that it needs kept out of training."""
        return 0.0

    @property
    def cost(self) -> float:
        """What the work of the training is multiplied by."""
        return 1.0

    def work(self, task: Task, samples: int) -> float:
        """Samples that it pushes through the model in addition to the training, given the task of
        which it is a step and the client's training samples."""
        return 0.0

    def before(self, session: Session) -> None:
        """A model has come, and no local step has been taken on it."""

    def after(self, session: Session) -> None:
        """All local steps have been taken."""

    def leaving(self, parting: Parting, moved: Tensor) -> Tensor:
        """What leaves the client in place of `moved`: how far it has moved the model that it
        received, or the gradient that it uploads."""
        return moved

    def trained_from(self, sent: Sent, extras: Mapping[str, Tensor]) -> Tensor | None:
        """For the server: the model of these that a client has trained, given what it uploaded
        along with it; None: the usual one."""
        return None

    def offset(self, targets: Tensor, outputs: int) -> Tensor | None:
        """What is added to the model's outputs whenever this client trains or (`offset_in_use`)
        uses it, given the targets of its training samples and the number of outputs; None:
        nothing."""
        return None

    def use(self, served: Tensor, memory: Mapping[str, Tensor]) -> Tensor:
        """The model, as it travels, that the client uses when it is served this one. (`memory` has
        what the step keeps once the client has been trained.)"""
        return served

    def answer(self, outputs: Tensor, features: Tensor, known: tuple[Tensor, Tensor]) -> Tensor:
        """What takes the place of the model's outputs for some samples when the client uses it,
        given their features (what enters the last linear layer). `known`: features and targets of
        the client's training samples."""
        return outputs


def in_use(steps: Iterable[ClientStep]) -> tuple[ClientStep, ...]:
    """Those of the steps that have a say in how a client uses its model."""
    steps = tuple(steps)
    added = with_offset(steps)
    plain = ClientStep.use, ClientStep.answer
    return tuple(s for s in steps if s in added or (type(s).use, type(s).answer) != plain)


def with_offset(steps: Iterable[ClientStep]) -> tuple[ClientStep, ...]:
    """Those that add to its outputs in use, which any further training must take into account."""
    return tuple(
        step for step in steps if step.offset_in_use and type(step).offset is not ClientStep.offset
    )


def with_leaving(steps: Iterable[ClientStep]) -> tuple[ClientStep, ...]:
    """Those that change what is uploaded."""
    return tuple(step for step in steps if type(step).leaving is not ClientStep.leaving)


CLIENT_STEPS: Registry[ClientStep] = Registry("client step", ClientStep)


@CLIENT_STEPS.register("basis")
class Basis(ClientStep):
    """After training, `directions` principal directions of the client's features (what enters the
    last linear layer) are uploaded as `basis` (FedSaC)."""

    directions: Annotated[int, Field(ge=1)]

    @property
    def uploads(self) -> Mapping[str, int]:
        return {"basis": self.directions}

    def after(self, session: Session) -> None:
        session.extras["basis"] = principal_directions(session.features(), self.directions)


@CLIENT_STEPS.register("choose")
class Choose(ClientStep):
    """The client is sent `models` models, the first as usual, the others along with it as
    `candidate 1` and so on. It trains the one whose loss on its training samples is least, and
    uploads which one it was as `choice` (IFCA). Choosing takes no simulated time."""

    models: Annotated[int, Field(ge=2)]

    @property
    def uploads(self) -> Mapping[str, int]:
        return {"choice": 1}

    def before(self, session: Session) -> None:
        names = (f"candidate {number}" for number in range(1, self.models))
        models = [session.received, *(session.vectors[name] for name in names)]
        losses = [session.loss(model) for model in models]
        choice = int(np.argmin(np.nan_to_num(losses, nan=np.inf)))
        session.begin(models[choice])
        session.extras["choice"] = torch.tensor([[choice]])

    def trained_from(self, sent: Sent, extras: Mapping[str, Tensor]) -> Tensor:
        choice = extras["choice"]
        if choice.shape != (1, 1) or not 0 <= int(choice) < self.models:
            raise Refused(f"a client chose model {choice.tolist()} of {self.models}")
        return sent.vectors[f"candidate {int(choice)}"] if int(choice) else sent.params


@CLIENT_STEPS.register("mask")
class Mask(ClientStep):
    """This `share` of the parameters, the smallest of the received model, stays as it is, and the
    training takes less time in proportion; which ones do not is uploaded as `mask`, in bits
    (CASA+). With 0, a mask that drops nothing is uploaded all the same."""

    tells: ClassVar[bool] = False  # the received model says it all

    share: Annotated[float, Field(ge=0, lt=1)]

    @property
    def uploads(self) -> Mapping[str, int]:
        return {"mask": 1}

    @property
    def cost(self) -> float:
        return 1 - self.share

    def before(self, session: Session) -> None:
        mask = torch.ones(len(session.received), dtype=torch.bool)
        trained = session.parameters
        mask[:trained] = largest(session.received[:trained], self.share)
        session.frozen = ~mask[:trained]
        session.extras["mask"] = pack(mask)


@CLIENT_STEPS.register("prior")
class Prior(ClientStep):
    """The client's own label prior: the logarithm of how frequent each label is among its training
    samples is added to the model's outputs, in training and in use. What the model itself learns is
    then what tells labels apart, whoever has many or few of them; and the client, which knows its
    labels, need not learn them. Label counts never leave the client.

    `smoothing` is added to each count, so that a label that the client does not have is unlikely,
    not impossible. For problems other than classification it does nothing."""

    smoothing: Annotated[float, Field(gt=0)] = 0.1

    def offset(self, targets: Tensor, outputs: int) -> Tensor | None:
        if not are_labels(targets):
            return None
        counts = torch.bincount(targets.cpu(), minlength=outputs).double() + self.smoothing
        return (counts / counts.sum()).log().float()


@CLIENT_STEPS.register("line")
class Line(ClientStep):
    """A line of the client's own above the shared model: it never leaves the client.

    With G the model that it is sent and m its line (0 at first), the client trains from
    `G + s m` to theta, where `s = share^2`. The line becomes the mean of `theta - G` over about the
    last `memory` trainings. What is uploaded is the way from G to the half-space of all x with
    `<x, d> >= <theta, d>`, where `d = theta - G - s m` is what this training has added:
    `max(0, 1 + s <m, d> / |d|^2) d`. So the line goes on where it was, while the shared model
    learns what was added, as far as it lacks it. In use the client adds `share m` to the model that
    it is served. (It starts from less than that, so that the shared model learns more of what lines
    could hold; where all of the line is good, it starts from all of it.) Statistics (of batch
    normalisation) have no line.

    With `hold_out`, that share of the client's samples is not trained on. What a part of the line
    (`SHARES`) adds to their summed loss under the received model is uploaded as `line.losses`: it
    is for the server to find the share that is best for everybody."""

    share: Annotated[float, Field(ge=0, le=1)] = 0.8
    memory: Annotated[int, Field(ge=1)] = 4
    hold_out: Annotated[float, Field(ge=0, le=0.5)] = 0.0

    @property
    def holds_out(self) -> float:
        return self.hold_out

    @property
    def keeps(self) -> tuple[str, ...]:
        return ("line", "line.share", "line.trainings")

    @property
    def uploads(self) -> Mapping[str, int]:
        return {"line.losses": 1} if self.hold_out else {}

    def work(self, task: Task, samples: int) -> float:
        return (1 + len(SHARES)) * int(self.hold_out * samples) / 3  # forward passes

    @property
    def _start(self) -> float:
        return self.share**2

    def before(self, session: Session) -> None:
        if "line" in session.memory:
            session.put(session.received + self._start * session.memory["line"])

    def after(self, session: Session) -> None:
        trained = session.parameters
        line = session.memory.get("line", torch.zeros_like(session.received))
        trainings = session.memory.get("line.trainings", torch.zeros(1)) + 1
        if self.hold_out:
            session.extras["line.losses"] = self._losses(session, line)
        moved = session.trained() - session.received
        way = moved - self._start * line  # d; of statistics, all that they have moved
        way[:trained] *= way_left(-self._start * line[:trained], way[:trained])
        session.put(session.received + way)
        moved[trained:] = 0
        session.memory["line"] = torch.lerp(line, moved, 1 / min(float(trainings), self.memory))
        session.memory["line.share"] = torch.tensor([self.share])
        session.memory["line.trainings"] = trainings

    def _losses(self, session: Session, line: Tensor) -> Tensor:
        held = session.held_out
        if not len(held):
            return torch.zeros(1, len(SHARES))
        without = session.loss(session.received, held)
        losses = [session.loss(session.received + share * line, held) for share in SHARES]
        most = 9 * abs(without)  # a line may lead far astray
        added = [loss - without if loss == loss else most for loss in losses]
        return torch.tensor([[max(-most, min(most, each)) for each in added]])

    def use(self, served: Tensor, memory: Mapping[str, Tensor]) -> Tensor:
        return served + memory["line.share"] * memory["line"] if "line" in memory else served


@CLIENT_STEPS.register("gap")
class Gap(ClientStep):
    """Tells how much the received model has learned by heart: that share of the client's samples is
    not trained on, and its summed losses on them, and on as many of the others, are uploaded as
    `gap.losses`."""

    hold_out: Annotated[float, Field(gt=0, le=0.5)]

    @property
    def holds_out(self) -> float:
        return self.hold_out

    @property
    def uploads(self) -> Mapping[str, int]:
        return {"gap.losses": 1}

    def work(self, task: Task, samples: int) -> float:
        return 2 * int(self.hold_out * samples) / 3  # forward passes

    def after(self, session: Session) -> None:
        held = session.held_out
        others = np.setdiff1d(np.arange(session.samples), held)
        others = session.stream("gap").choice(others, len(held), replace=False)
        losses = [session.loss(session.received, rows) for rows in (held, others) if len(rows)]
        known = len(losses) == 2 and bool(np.isfinite(losses).all())
        session.extras["gap.losses"] = torch.tensor([losses if known else [0.0, 0.0]])


SHARES = (0.25, 0.5, 0.75, 1.0)  # of a line, that are compared with none of it


def are_labels(targets: Tensor) -> bool:
    """One of several, for each sample."""
    return targets.dim() == 1 and not targets.is_floating_point()


def way_left(gone: Tensor, proposed: Tensor) -> float:
    """The part of a proposed way that is left for somebody who has gone another: as many times
    `proposed` as lead from `gone` to the half-space beyond its end; 0 if that is reached already,
    or nothing is proposed."""
    square = float(proposed.dot(proposed))
    return max(0.0, 1 - float(gone.dot(proposed)) / square) if square > 0 else 0.0


def principal_directions(features: Tensor, count: int) -> Tensor:
    """An orthonormal basis [count, features] of the directions in which the samples vary most.

    Rows are zero where the samples vary in fewer directions. The basis as such is not unique
    (signs, rotations among equal variances); the space that it spans is what counts. Features that
    are not finite have a basis of NaN, for the server to refuse.
    """
    centred = features.double() - features.double().mean(0)
    if not bool(centred.isfinite().all()):
        return features.new_full((count, features.shape[1]), torch.nan)
    _, sizes, directions = torch.linalg.svd(centred, full_matrices=False)
    basis = centred.new_zeros(count, centred.shape[1])
    found = int((sizes[:count] > 1e-7 * max(float(sizes[0]), 1e-30)).sum())
    basis[:found] = directions[:found]
    return basis.to(features.dtype)
