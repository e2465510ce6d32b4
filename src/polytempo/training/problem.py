"""What is learned: a loss to train by, and metrics that can be merged over batches and clients.

A mean of means is wrong as soon as batches or clients differ in size, and F1 and R2 are not means
at all. So a problem turns each batch into *sums* (`Problem.sums`), sums are added up (`Score`), and
only then does a `Metric` make a figure of them. How a federation was divided into batches, workers
or clients changes nothing.

    classification   scores [samples, classes]        labels [samples]
    multilabel       scores [samples, labels]         0 or 1 [samples, labels]
    regression       numbers [samples(, outputs)]     numbers [samples(, outputs)]
    next-token       scores [samples, length, tokens] tokens [samples, length], 0 is padding
    own              whatever your functions take
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor
from torch.nn import functional

from polytempo.core.errors import PolytempoError
from polytempo.core.metric import Direction, MetricInfo
from polytempo.core.registry import Options, Registry
from polytempo.data import Federation
from polytempo.data.text import PADDING

Sums = Mapping[str, float]
Reduction = Literal["mean", "sum"]
Function = Callable[[Tensor, Tensor], Any]


@dataclass(frozen=True)
class Score:
    """A model on some samples, as sums; those of disjoint samples can be added.

    `Score({})` is the score of no samples, and the start of `sum(scores, Score({}))`.
    """

    sums: Sums

    def __add__(self, other: Score) -> Score:
        keys = {**self.sums, **other.sums}
        return Score({key: self.sums.get(key, 0.0) + other.sums.get(key, 0.0) for key in keys})

    @property
    def total(self) -> float:
        """What means are over: samples, or tokens."""
        return self.sums.get("total", 0.0)


def merged(scores: Iterable[Score]) -> Sums:
    """The sums of all of them together."""
    found: dict[str, float] = {}
    for score in scores:
        for key, value in score.sums.items():
            found[key] = found.get(key, 0.0) + value
    return found


@dataclass(frozen=True)
class Metric(MetricInfo):
    """A figure made of sums; NaN where it is not defined, such as R2 of a single sample."""

    value: Callable[[Sums], float]


@dataclass(frozen=True)
class Mean:
    """That sum over the total; NaN where there are no samples."""

    key: str

    def __call__(self, sums: Sums) -> float:
        return sums[self.key] / sums["total"] if sums.get("total") else math.nan


class Problem(Options, ABC):
    """A loss and the metrics that go with it. The first metric is *the* metric of a run.

    Derive from it (or from a built-in problem) for metrics that are not means over the samples;
    `Problem.of` is enough for a loss and a metric that are.
    """

    name: ClassVar[str]
    targets: ClassVar[str | None] = None  # the `Federation.problem` it is for; None: any

    @property
    @abstractmethod
    def metrics(self) -> tuple[Metric, ...]:
        """The figures that this problem is judged by, the most important one first."""

    @abstractmethod
    def loss(self, outputs: Tensor, targets: Tensor, reduction: Reduction = "mean") -> Tensor:
        """Mean (what is trained on) or sum over what `count` counts."""

    def count(self, targets: Tensor) -> int:
        """What means are over: the samples of a batch, unless a problem says otherwise."""
        return len(targets)

    def sums(self, outputs: Tensor, targets: Tensor) -> dict[str, float]:
        """All that the metrics need of a batch, added up over its samples (under no_grad)."""
        loss = float(self.loss(outputs, targets, "sum"))
        return {"total": float(self.count(targets)), "loss": loss}

    @staticmethod
    def of(
        loss: Function | str,
        metric: Function | str | None = None,
        *,
        name: str | None = None,
        better: Direction | None = None,
        share: bool = False,
    ) -> Problem:
        """A problem made of functions (outputs, targets) of your own, as `Own` describes."""
        return Own(loss, metric, metric_name=name, better=better, share=share)


PROBLEMS: Registry[Problem] = Registry("problem")


@PROBLEMS.register("classification")
class Classification(Problem):
    """One label per sample: cross-entropy, accuracy, top-5 accuracy."""

    targets: ClassVar[str | None] = "classification"

    @property
    def metrics(self) -> tuple[Metric, ...]:
        return (
            Metric("accuracy", "accuracy", "higher", True, Mean("correct")),
            Metric("top5", "top-5 accuracy", "higher", True, Mean("top5")),
        )

    def loss(self, outputs: Tensor, targets: Tensor, reduction: Reduction = "mean") -> Tensor:
        return functional.cross_entropy(outputs, targets, reduction=reduction)

    def sums(self, outputs: Tensor, targets: Tensor) -> dict[str, float]:
        # How many classes come before the true one, equals in order of number: several times as
        # fast as topk. What cannot be compared (NaN) comes before it.
        label, place = targets[:, None], torch.arange(outputs.shape[1], device=outputs.device)
        own = outputs.gather(1, label)
        behind = (outputs < own) | ((outputs == own) & (place >= label))
        return {
            **super().sums(outputs, targets),
            "correct": float((outputs.argmax(1) == targets).sum()),
            "top5": float(((~behind).sum(1) < 5).sum()),
        }


@PROBLEMS.register("multilabel")
class Multilabel(Problem):
    """Any number of labels per sample: binary cross-entropy (mean over the labels), F1 over all
    decisions (micro), share of samples with every label right.

    A label counts as predicted if its score is above 0, which is a probability above one half. F1
    is 0 where no label is present and none was predicted.
    """

    targets: ClassVar[str | None] = "multilabel"

    @property
    def metrics(self) -> tuple[Metric, ...]:
        return (
            Metric("f1", "F1", "higher", True, _f1),
            Metric("exact_match", "exact match", "higher", True, Mean("exact")),
        )

    def loss(self, outputs: Tensor, targets: Tensor, reduction: Reduction = "mean") -> Tensor:
        _same_shape(self.name, outputs, targets)
        given = targets.to(outputs.dtype)
        loss = functional.binary_cross_entropy_with_logits(outputs, given, reduction=reduction)
        return loss if reduction == "mean" else loss / targets.shape[1]

    def sums(self, outputs: Tensor, targets: Tensor) -> dict[str, float]:
        found, true = outputs > 0, targets > 0
        return {
            **super().sums(outputs, targets),
            "tp": float((found & true).sum()),
            "fp": float((found & ~true).sum()),
            "fn": float((~found & true).sum()),
            "exact": float((found == true).all(1).sum()),
        }


@PROBLEMS.register("regression")
class Regression(Problem):
    """One or several numbers per sample: mean squared error, mean absolute error, R2.

    Errors are averaged over the outputs. R2 is the share of the targets' variance, summed over the
    outputs, that is explained; the variance is around the mean of all samples that were merged, so
    that of several clients counts what sets them apart.
    """

    targets: ClassVar[str | None] = "regression"

    @property
    def metrics(self) -> tuple[Metric, ...]:
        return (
            Metric("mse", "mean squared error", "lower", False, Mean("squared")),
            Metric("mae", "mean absolute error", "lower", False, Mean("absolute")),
            Metric("r2", "R²", "higher", False, _r2),
        )

    def loss(self, outputs: Tensor, targets: Tensor, reduction: Reduction = "mean") -> Tensor:
        outputs = _single_output(outputs, targets)
        _same_shape(self.name, outputs, targets)
        loss = functional.mse_loss(outputs, targets.to(outputs.dtype), reduction=reduction)
        return loss if reduction == "mean" else loss / _width(targets)

    def sums(self, outputs: Tensor, targets: Tensor) -> dict[str, float]:
        # In double precision: a variance is the small difference of large sums. And on the CPU, for
        # there are devices that have no doubles (mps).
        outputs = _single_output(outputs, targets).cpu().double()
        targets = targets.cpu().double()
        found = super().sums(outputs, targets)
        width, errors = _width(targets), outputs - targets
        found["squared"] = float(errors.square().sum()) / width
        found["absolute"] = float(errors.abs().sum()) / width
        found["y_squared"] = float(targets.square().sum()) / width
        for output, value in enumerate(targets.reshape(-1, width).sum(0).tolist()):
            found[f"y.{output}"] = value
        return found


@PROBLEMS.register("next-token")
class NextToken(Problem):
    """The token that follows, at every place of a sequence: cross-entropy and accuracy per token.

    Places whose target is 0 (padding) do not count. Perplexity is the exponential of the loss.
    `first`: which of the two is the metric of a run.
    """

    targets: ClassVar[str | None] = "next-token"

    first: Literal["perplexity", "accuracy"] = "perplexity"

    @property
    def metrics(self) -> tuple[Metric, ...]:
        perplexity = Metric("perplexity", "perplexity", "lower", False, _perplexity)
        accuracy = Metric("accuracy", "accuracy per token", "higher", True, Mean("correct"))
        return (accuracy, perplexity) if self.first == "accuracy" else (perplexity, accuracy)

    def loss(self, outputs: Tensor, targets: Tensor, reduction: Reduction = "mean") -> Tensor:
        if outputs.shape[:-1] != targets.shape:
            raise PolytempoError(
                f"next-token: the model outputs {list(outputs.shape)} for targets "
                f"{list(targets.shape)}; expected [samples, length, tokens], as 'gru' does"
            )
        return functional.cross_entropy(
            outputs.flatten(0, 1), targets.flatten(), reduction=reduction, ignore_index=PADDING
        )

    def count(self, targets: Tensor) -> int:
        return int((targets != PADDING).sum())

    def sums(self, outputs: Tensor, targets: Tensor) -> dict[str, float]:
        right = (outputs.argmax(-1) == targets) & (targets != PADDING)
        return {**super().sums(outputs, targets), "correct": float(right.sum())}


@PROBLEMS.register("own")
class Own(Problem):
    """Functions of your own, each called with the outputs of a batch and its targets.

    own:criterion=mymodule:focal_loss,measure=mymodule:kindness
    own:criterion=torch.nn.functional:huber_loss

    criterion: the loss, differentiable; measure: the metric, by default the loss. Either returns
        one value per sample [samples], or one value for the batch, taken as the mean over its
        samples. Both are averaged over samples, so batches and clients merge correctly; a figure
        that is not such an average (F1, R2) needs a class derived from `Problem`.
    metric_name: by default the name of the function.
    better: "higher" or "lower"; by default higher, and lower if the metric is the loss.
    share: the metric lies in 0..1 and is shown in per cent.

    A model with a single output hands it over as [samples], the shape of regression targets.
    """

    criterion: Function | str
    measure: Function | str | None = None
    metric_name: str | None = None
    better: Direction | None = None
    share: bool = False

    @cached_property
    def _loss(self) -> Function:
        return _function(self.criterion, "criterion")

    @cached_property
    def _measure(self) -> Function | None:
        return None if self.measure is None else _function(self.measure, "measure")

    @cached_property
    def metrics(self) -> tuple[Metric, ...]:
        key, usual = ("loss", "lower") if self._measure is None else ("measure", "higher")
        name = str(self.metric_name or getattr(self._measure, "__name__", key))
        name = key if name == "<lambda>" else name
        better: Any = self.better or usual
        return (Metric(name, name.replace("_", " "), better, self.share, Mean(key)),)

    def loss(self, outputs: Tensor, targets: Tensor, reduction: Reduction = "mean") -> Tensor:
        found = self._loss(_single_output(outputs, targets), targets)
        if not isinstance(found, Tensor):
            raise PolytempoError(
                f"the loss {self.criterion} returned a {type(found).__name__}; expected a tensor "
                "that can be differentiated"
            )
        return _reduced(found, len(targets), reduction, f"the loss {self.criterion}")

    def sums(self, outputs: Tensor, targets: Tensor) -> dict[str, float]:
        found = super().sums(outputs, targets)
        if self._measure is not None:
            values = torch.as_tensor(self._measure(_single_output(outputs, targets), targets))
            name = f"the metric {self.measure}"
            found["measure"] = float(_reduced(values.cpu().double(), len(targets), "sum", name))
        return found


def problem_for(
    federation: Federation, given: str | Mapping[str, Any] | Problem | None = None
) -> Problem:
    """What is learned on this federation: as given, by default what its targets are for."""
    problem = PROBLEMS.create(federation.problem if given is None else given)
    if not isinstance(problem, Problem):
        raise PolytempoError(
            f"problem {given!r} made a {type(problem).__name__}; derive it from "
            "polytempo.training.problem:Problem, or use Problem.of(loss, metric)"
        )
    if problem.targets not in (None, federation.problem):
        raise PolytempoError(
            f"problem {problem.name} needs targets for {problem.targets}, but those of "
            f"{federation.name} are for {federation.problem}; use --problem {federation.problem} "
            "or omit it, or load the data with another problem="
        )
    return problem


def _f1(sums: Sums) -> float:
    decided = 2 * sums["tp"] + sums["fp"] + sums["fn"]
    return 2 * sums["tp"] / decided if decided else 0.0


def _r2(sums: Sums) -> float:
    if sums.get("total", 0) < 2:
        return math.nan
    of_output = [value for key, value in sums.items() if key.startswith("y.")]
    mean = sum(value**2 for value in of_output) / len(of_output) / sums["total"]
    variance = sums["y_squared"] - mean
    if variance <= 1e-12 * sums["y_squared"]:  # the targets are all alike: right, or not
        return float(sums["squared"] == 0)
    return 1 - sums["squared"] / variance


def _perplexity(sums: Sums) -> float:
    loss = Mean("loss")(sums)
    return math.inf if loss > 700 else math.exp(loss)


def _width(targets: Tensor) -> int:
    """Numbers per sample."""
    return targets[0].numel() if len(targets) else 1


def _single_output(outputs: Tensor, targets: Tensor) -> Tensor:
    """[samples, 1] as [samples], where targets are: their difference would be a square matrix."""
    return outputs.squeeze(-1) if outputs.shape == (*targets.shape, 1) else outputs


def _same_shape(name: str, outputs: Tensor, targets: Tensor) -> None:
    if outputs.shape != targets.shape:
        raise PolytempoError(
            f"{name}: the model outputs {list(outputs.shape)} for targets {list(targets.shape)}; "
            "expected the same shape: the model must end in Inputs.outputs numbers per sample"
        )


def _reduced(values: Tensor, samples: int, reduction: Reduction, what: str) -> Tensor:
    if values.dim() == 0:
        return values if reduction == "mean" else values * samples
    if values.shape != (samples,):
        raise PolytempoError(
            f"{what} returned shape {list(values.shape)} for {samples} samples; expected one value "
            "per sample, or their mean"
        )
    return values.mean() if reduction == "mean" else values.sum()


def _function(given: Function | str, option: str) -> Function:
    """Your own function: itself, or `module:function`."""
    if not isinstance(given, str):
        return given
    if ":" not in given:
        raise PolytempoError(
            f"problem own: {option}={given!r} is not a function; write {option}=module:function"
        )
    functions: Registry[Any] = Registry("function")
    found = functions[given]
    if not callable(found):
        raise PolytempoError(
            f"problem own: {option}={given!r} is a {type(found).__name__}; "
            "expected a function (outputs, targets)"
        )
    return found
