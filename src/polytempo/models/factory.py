"""From what the user wrote to a module with reproducible weights."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from polytempo.core.errors import PolytempoError
from polytempo.core.registry import parse
from polytempo.core.rng import stream_seed
from polytempo.models.adapters import insert_adapters
from polytempo.models.randomness import own_torch_randomness
from polytempo.models.spec import MODELS, Inputs, ModelSpec, for_tokens

Model = str | Mapping[str, Any] | ModelSpec | Callable[..., nn.Module]


def build(model: Model, inputs: Inputs, seed: int, trainable: str | None = None) -> nn.Module:
    """The module that `model` describes, for data like `inputs`.

    model:  a name with options ("mlp:hidden=[64,64]"), a table, an options object, "auto", or a
            factory of your own (a callable, or "module:name"). A factory that needs one argument
            is given `inputs`; one that needs none is called without.
    seed:   decides the initial weights, bit for bit; the global random state is left as it was
    trainable: "lora:r=8,alpha=16" adds adapters (what is trained is for `core.layout` to say)
    """
    with own_torch_randomness():
        # Only the CPU's generator: torch.manual_seed would also reseed every GPU, unforked.
        torch.default_generator.manual_seed(stream_seed(seed, "model") % 2**63)
        made = _make(model, inputs)
        if trainable is not None and isinstance(made, nn.Module):
            insert_adapters(made, trainable)
    if not isinstance(made, nn.Module):
        raise PolytempoError(
            f"model {_called(model)} made a {type(made).__name__}; it must make a torch.nn.Module"
        )
    if next(made.parameters(), None) is None:
        raise PolytempoError(
            f"model {_called(model)} has no parameters, so there is nothing to train; "
            "give it at least one layer"
        )
    return made


def automatic(inputs: Inputs) -> str:
    """The model that "auto" stands for."""
    if inputs.vocabulary is not None:
        return for_tokens(inputs)
    image = len(inputs.shape) == 3 and min(inputs.shape[1:]) >= 28
    return "lenet" if image else "mlp"


def _make(model: Model, inputs: Inputs) -> object:
    made: object
    if isinstance(model, str | Mapping):
        made = _from_name(model, inputs)
    elif isinstance(model, nn.Module):
        raise PolytempoError(
            f"model {_called(model)} is a finished module; give what makes one: its class, or a "
            "function such as lambda: copy.deepcopy(module)"
        )
    elif isinstance(model, ModelSpec) and not isinstance(model, type):
        made = model
    elif callable(model):
        made = _call(model, {}, inputs, _called(model))
    else:
        raise PolytempoError(
            f"model {model!r} is a {type(model).__name__}; "
            f"give a name ({', '.join(MODELS)}), a table or a function that makes a module"
        )
    if isinstance(made, ModelSpec) and not isinstance(made, nn.Module):
        return made.build(inputs)
    return made


def _from_name(model: str | Mapping[str, Any], inputs: Inputs) -> object:
    name, given = parse(model) if isinstance(model, str) else (str(model.get("name")), dict(model))
    if name == "auto":
        name = automatic(inputs)
        given = {key: value for key, value in given.items() if key != "name"} | {"name": name}
        return MODELS.create(given)
    if name.startswith("hf:"):
        given.pop("name", None)
        return MODELS.create({**given, "name": "hf", "path": name.removeprefix("hf:")})
    if ":" not in name:
        return MODELS.create(model)
    maker: Any = MODELS[name]
    if isinstance(maker, type) and hasattr(maker, "build") and not issubclass(maker, nn.Module):
        return MODELS.create(model)  # an options class of the user's own
    given.pop("name", None)
    return _call(maker, given, inputs, repr(name))


def _call(factory: Any, given: dict[str, Any], inputs: Inputs, called: str) -> object:
    """Call a user's factory, with `inputs` if it needs an argument that was not given."""
    try:
        signature = inspect.signature(factory)
        arguments = signature.bind_partial(**given).arguments
    except (TypeError, ValueError) as error:
        raise PolytempoError(
            f"model {called} cannot be called: {error}; give a function that makes a module"
        ) from error
    needed = [
        parameter
        for parameter in signature.parameters.values()
        if parameter.default is parameter.empty
        and parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
        and parameter.name not in arguments
    ]
    if not needed:
        return factory(**given)
    if len(needed) > 1 or needed[0].kind is inspect.Parameter.KEYWORD_ONLY:
        raise PolytempoError(
            f"model {called} needs {', '.join(parameter.name for parameter in needed)}; "
            "a factory takes no arguments, or one positional argument, the Inputs; "
            "wrap it in a function that fills in the rest"
        )
    if needed[0].kind is inspect.Parameter.POSITIONAL_ONLY:
        return factory(inputs, **given)
    return factory(**{needed[0].name: inputs}, **given)


def _called(model: object) -> str:
    """How an error names the model: what the user wrote, or the name of the function or class."""
    if isinstance(model, str | Mapping):
        return repr(model)
    return str(getattr(model, "__qualname__", type(model).__qualname__))
