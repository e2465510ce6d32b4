"""What a model is made from, and the table of known models."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from torch import nn

from polytempo.core.errors import PolytempoError
from polytempo.core.registry import Registry


class Described(Protocol):
    """Data, as far as a model has to know them: a federation."""

    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def outputs(self) -> int: ...
    @property
    def vocabulary(self) -> int | None: ...
    @property
    def problem(self) -> str: ...
    @property
    def tokenizer(self) -> str | None: ...


@dataclass(frozen=True)
class Inputs:
    """What the data demand of a model.

    shape:      of one sample: (features,), (channels, height, width), or (length,) for tokens
    outputs:    how many numbers the last layer outputs: classes, labels, predicted numbers; for
                next-token, of every token of a sample
    vocabulary: how many different tokens there are (0 is padding), or None if the data are numbers
    problem:    "classification", "multilabel", "regression" or "next-token"
    tokenizer:  digest of the tokenizer that has made the tokens, or None if they are words
    """

    shape: tuple[int, ...]
    outputs: int
    vocabulary: int | None = None
    problem: str = "classification"
    tokenizer: str | None = None

    @classmethod
    def of(cls, data: Described) -> Inputs:
        """What these data demand."""
        return cls(data.shape, data.outputs, data.vocabulary, data.problem, data.tokenizer)

    @property
    def classes(self) -> int:
        """The outputs, by the name that they have in classification."""
        return self.outputs

    def __post_init__(self) -> None:
        if any(side < 1 for side in self.shape) or self.outputs < 1:
            raise PolytempoError(
                f"a model cannot be made for samples of shape {self.shape} and {self.outputs} "
                "outputs; both must be positive, so check the data"
            )
        if self.vocabulary is not None and self.vocabulary < 2:
            raise PolytempoError(
                f"a vocabulary of {self.vocabulary} leaves no words; it needs at least 2 "
                "(token 0 is padding), or None for data that are not text"
            )


@runtime_checkable
class ModelSpec(Protocol):
    """The options of a model, from which `build` makes the module."""

    def build(self, inputs: Inputs) -> nn.Module: ...


MODELS: Registry[ModelSpec] = Registry("model")


def for_tokens(inputs: Inputs) -> str:
    """The model for tokens that fits the problem."""
    return "gru" if inputs.problem == "next-token" else "textcnn"


def require_numbers(name: str, inputs: Inputs) -> None:
    """Refuse tokens: a word's number is a name, not a quantity."""
    if inputs.vocabulary is not None:
        raise PolytempoError(
            f"model {name!r} takes numbers, but the data are tokens "
            f"(vocabulary {inputs.vocabulary}); use {for_tokens(inputs)!r}"
        )


def require_image(name: str, inputs: Inputs, smallest: int) -> tuple[int, int, int]:
    """The channels, height and width of an image that is large enough."""
    require_numbers(name, inputs)
    if len(inputs.shape) != 3 or min(inputs.shape[1:]) < smallest:
        raise PolytempoError(
            f"model {name!r} takes images (channels, height, width) of at least "
            f"{smallest}x{smallest}, but a sample has shape {inputs.shape}; use 'mlp' or 'linear'"
        )
    channels, height, width = inputs.shape
    return channels, height, width
