"""A model meets its data for the first time."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from polytempo.core.errors import PolytempoError
from polytempo.data import Federation
from polytempo.models.randomness import own_torch_randomness
from polytempo.training.problem import Classification, Problem, problem_for

_WRONG = (RuntimeError, ValueError, TypeError, IndexError)


def try_model(module: nn.Module, federation: Federation, problem: Problem | None = None) -> None:
    """Show the module two samples: a shape that it cannot take, or outputs that the problem cannot
    judge, are the user's to mend, and better now than in the middle of a run."""
    problem, about = problem_for(federation, problem), f"model {type(module).__name__}"
    inputs, targets = federation.prepare(federation.x[:2]), federation.y[:2]
    if inputs.is_floating_point():
        inputs = inputs.to(next(module.parameters()).dtype)
    training = module.training
    with torch.no_grad(), own_torch_randomness():
        try:
            outputs: object = module.eval()(inputs)
        except _WRONG as error:
            raise PolytempoError(
                f"{about} cannot take samples of shape {list(federation.shape)} (a batch of "
                f"{list(inputs.shape)}): {_line(error)}; change its first layer, or the data"
            ) from error
        finally:
            module.train(training)
        if not isinstance(outputs, Tensor):
            raise PolytempoError(
                f"{about} returns a {type(outputs).__name__}; return a tensor of outputs"
            )
        wanted, found = [len(targets), federation.outputs], list(outputs.shape)
        if isinstance(problem, Classification) and not (
            len(found) == 2 and found[0] == wanted[0] and found[1] >= wanted[1]
        ):
            raise PolytempoError(
                f"{about} outputs {found} for {wanted[0]} samples of {wanted[1]} labels; expected "
                f"{wanted}: a score for each label"
            )
        try:
            problem.sums(outputs, targets)
        except _WRONG as error:
            raise PolytempoError(
                f"{about} outputs {found} for targets of shape {list(targets.shape)}, which "
                f"{problem.name} cannot judge: {_line(error)}"
            ) from error


def _line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0]
