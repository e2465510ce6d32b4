"""What a client of a fleet does with its data by means of Polytempo's own solvers.

A training is the job that the simulator would make of the same dispatch, its random stream
included, so that a deployed client trains what the simulated one would.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor

from polytempo.core.client_steps import ClientStep, with_offset
from polytempo.core.errors import PolytempoError
from polytempo.core.layout import Parts
from polytempo.core.messages import Dispatch
from polytempo.core.objective import Plain
from polytempo.core.privacy import Gaussian, check_private
from polytempo.core.registry import parse
from polytempo.core.task import Task
from polytempo.data import Federation
from polytempo.files import replacing
from polytempo.models import Inputs, build, trained_parts
from polytempo.network.fleet.reading import read_task
from polytempo.nodes.client import Memory
from polytempo.nodes.star import Examine, Sums
from polytempo.training import (
    PERSONAL,
    AutogradSolver,
    Exam,
    Job,
    Problem,
    Session,
    SolverName,
    find_device,
    make_solver,
    try_model,
)

MODEL = "model.safetensors"  # in the client's folder: the model handed last, without frozen parts


class SolverTraining:
    """One local training, step by step."""

    def __init__(self, session: Session) -> None:
        self.session = session

    def advance(self, steps: int) -> bool:
        self.session.advance(steps)
        return self.session.finished

    def swap(self, dispatch: Dispatch) -> int | None:
        session = self.session
        if session.finished:
            return None
        session.swap(dispatch.params, dispatch.vectors, dispatch.task.lr)
        return session.step

    def shorten(self) -> None:
        self.session.stop()

    def finish(self) -> tuple[Tensor, Memory, Memory]:
        return self.session.finish()


class SolverTrainer:
    """A client's data, and the model that the server's welcome describes.

    `data`: a federation of this client alone. `model`: what it trains, if it does not take the
    server's word for it; code is only ever imported if it is named here. `folder`: where the model
    that it is handed is kept. `privacy`: the least that it insists on.
    """

    def __init__(
        self,
        data: Federation,
        problem: Problem,
        *,
        model: str | Mapping[str, Any] | None = None,
        solver: SolverName = "auto",
        device: str = "cpu",
        folder: Path | None = None,
        privacy: Gaussian | None = None,
    ) -> None:
        self.privacy = privacy
        self.data, self.problem, self.model = data, problem, model
        self.name, self.device, self.folder = solver, find_device(device), folder
        self.how = ""  # how trainings are computed: known with the model
        self.task = Task()  # how it adapts; with the steps by which it uses a model
        self.solver: AutogradSolver | None = None
        self._run: Mapping[str, Any] | None = None

    # -- joining -----------------------------------------------------------------------------------

    def welcome(self, run: Mapping[str, Any]) -> None:
        """Build the model of the run, unless it is there already."""
        if self._run == run:
            return
        inputs = self._inputs(run)
        self.data = replace(self.data, outputs=inputs.outputs, **_scale(run))
        trainable = run.get("trainable")  # servers of earlier versions do not say
        module = build(self._model(run), inputs, run["seed"], trainable)
        try_model(module, self.data, self.problem)
        trained = trained_parts(trainable)
        parts = Parts(run["personal"], run["freeze"], run["buffers"], trained)
        solver, how, why = make_solver(
            module, self.data, run["seed"], parts, self.device, self.problem, name=self.name
        )
        ours = zip(solver.layout.shared_names, solver.layout.shared_shapes, strict=True)
        _compare([[name, shape] for name, shape in ours], [entry[:2] for entry in run["layout"]])
        _compare_frozen(solver.layout.frozen_digest, run.get("frozen"))
        self.task = read_task(run["task"])
        self.solver, self.how, self._run = solver, how + why, run

    def _inputs(self, run: Mapping[str, Any]) -> Inputs:
        """What the run's model takes; our data must be such."""
        if run["shape"] is None:  # it was given as parameters
            if self.model is None:
                raise PolytempoError(
                    "the server was given parameters, and does not say what model they belong to; "
                    "join with polytempo.join and your own training code, or give --model here"
                )
            return Inputs.of(self.data)
        shape, outputs, vocabulary = tuple(run["shape"]), run["outputs"], run["vocabulary"]
        if self.data.shape != shape:
            raise PolytempoError(
                f"the server's model takes samples of shape {_times(shape)}, those of "
                f"{self.data.name} have {_times(self.data.shape)}; bring them into that shape"
            )
        if self.data.outputs > outputs:
            raise PolytempoError(
                f"{self.data.name} has {self.data.outputs} labels or outputs, the server's model "
                f"{outputs}; start the server with --outputs {self.data.outputs}, or leave out the "
                "samples that it does not know"
            )
        if (vocabulary is None) != (self.data.vocabulary is None) or (
            vocabulary is not None and int(self.data.x.max()) >= vocabulary
        ):
            raise PolytempoError(
                f"the server's model knows {vocabulary or 'no'} tokens, and {self.data.name} has "
                f"{'numbers' if self.data.vocabulary is None else self.data.vocabulary}"
            )
        if run.get("tokenizer") != self.data.tokenizer:
            raise PolytempoError(
                f"the server's texts are made tokens by the tokenizer {_or_words(run)}, those of "
                f"{self.data.name} by {self.data.tokenizer or 'words'}; give --model with the "
                "files of the server's model"
            )
        return Inputs(shape, outputs, vocabulary, self.data.problem, self.data.tokenizer)

    def _model(self, run: Mapping[str, Any]) -> str | Mapping[str, Any]:
        if self.model is not None:
            return self.model
        found: str | Mapping[str, Any] = run["model"]
        name = parse(found)[0] if isinstance(found, str) else str(found.get("name"))
        if ":" in name or name == "hf":
            raise PolytempoError(
                f"the server's model is code or files of its own, {name!r}, which a client does "
                f"not load on its word; give --model {name} here as well"
            )
        return found

    @property
    def layout_digest(self) -> str:
        """Of the model, once there is one."""
        return "" if self.solver is None else self.solver.layout.digest

    # -- training ----------------------------------------------------------------------------------

    def begin(self, dispatch: Dispatch, client: int, memory: Memory) -> SolverTraining:
        self._insist(dispatch.task)
        stream = ("client", client, "dispatch", dispatch.number)
        job = Job(
            0,
            dispatch.params,
            dispatch.task,
            stream,
            vectors=dispatch.vectors,
            memory=self._remembered(memory),
            secret=secrets.randbits(128),  # the server knows the seed of everything else
        )
        return SolverTraining(self._ready().begin(job))

    def _insist(self, task: Task) -> None:
        """On the privacy that this client was promised."""
        if self.privacy is None:
            return
        check_private(task, "the server")
        asked = [step.noise for step in task.client_steps if isinstance(step, Gaussian)]
        if sum(asked) < self.privacy.noise:
            raise PolytempoError(
                f"the server asks for noise of {sum(asked):g} times the clipping length, and this "
                f"client insists on {self.privacy.noise:g} (--dp): start the server with the same "
                "--dp, or the client without"
            )

    def examine(self, examine: Examine, client: int, memory: Memory) -> tuple[Sums, Sums | None]:
        remembered, steps = self._remembered(memory), self.task.client_steps
        before = self._score(examine.params, remembered, steps)
        if not examine.adapt_epochs:
            return before, None
        plain = with_offset(steps)
        task = replace(
            self.task,
            client_steps=plain,
            objective=Plain(),
            epochs=examine.adapt_epochs,
            steps=None,
            keep_optimizer=False,
        )
        stream = ("adapt", client, "exam", examine.exam)
        kept = {name: v for name, v in remembered.items() if name == PERSONAL}
        job = Job(0, self._in_use(examine.params, remembered), task, stream, memory=kept)
        adapted, _, after = self._ready().carry_out(job)
        return before, self._score(adapted, after, plain)

    def _in_use(self, served: Tensor, memory: Memory) -> Tensor:
        """The model that the client uses when it is served this one."""
        for step in self.task.client_steps:
            served = step.use(served, memory)
        return served

    def _score(self, shared: Tensor, memory: Memory, steps: Sequence[ClientStep]) -> Sums:
        [score] = self._ready().evaluate(Exam(shared, [0], [memory], tuple(steps)))
        return score.sums

    def keep(self, params: Tensor, memory: Memory) -> None:
        if self.folder is None:
            return
        solver, remembered = self._ready(), self._remembered(memory)
        offset = solver.offset(0, with_offset(self.task.client_steps))
        used = self._in_use(params, remembered)
        state = solver.layout.state(used, remembered.get(PERSONAL), offset, frozen=False)
        with replacing(self.folder / MODEL) as partial:
            save_file(state, str(partial))

    def _remembered(self, memory: Memory) -> dict[str, Tensor]:
        """What the client remembers; before its first training, its own part of the model as it
        begins."""
        layout = self._ready().layout
        first = {PERSONAL: layout.initial_personal} if layout.personal else {}
        return {**first, **memory}

    def _ready(self) -> AutogradSolver:
        assert self.solver is not None, "work comes after the welcome"
        return self.solver


def _scale(run: Mapping[str, Any]) -> dict[str, Any]:
    """Mean and deviation of the run's images, where the server knows them."""
    if run["scale"] is None:
        return {}
    mean, std = run["scale"]
    return {"mean": tuple(mean), "std": tuple(std)}


def _compare(ours: list[list[Any]], theirs: list[list[Any]]) -> None:
    """Two layouts must be the same; the first difference is named."""
    for mine, other in zip(ours, theirs, strict=False):
        if mine != other:
            raise PolytempoError(
                f"the client's model has {mine[0]} of shape {_times(mine[1])} where the server's "
                f"has {other[0]} of shape {_times(other[1])}; give both the same --model"
            )
    if len(ours) != len(theirs):
        raise PolytempoError(
            f"the client's model has {len(ours)} shared tensors, the server's {len(theirs)}; give "
            "both the same --model, --personal and --freeze"
        )


def _compare_frozen(ours: str, theirs: str | None) -> None:
    """What never travels must be the same from the start."""
    if theirs is not None and ours != theirs:
        raise PolytempoError(
            f"the frozen part of the client's model has digest {ours or 'none'}, that of the "
            f"server's {theirs or 'none'}: the same names and shapes, but other weights; give both "
            "the files of the same pre-trained model"
        )


def _or_words(run: Mapping[str, Any]) -> str:
    return run.get("tokenizer") or "of words"


def _times(shape: Any) -> str:
    return "x".join(map(str, shape)) or "()"
