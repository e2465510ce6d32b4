"""What of a model is trained (`--trainable`): all, its head, what patterns name, or adapters.

    all                          what the module itself trains
    head, norm, '*.bias'         these alone: patterns as for `--personal`, separated by commas
    lora:r=8,alpha=16            the head, and low-rank adapters beside frozen layers

LoRA (Hu et al., 2022) leaves a layer W as it is and adds `alpha / r B A`, with A [r, in] random and
B [out, r] zero at first. The package peft inserts them; which layers it chooses by default is its
own table for known transformers, and all linear layers outside the head for other modules.
"""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field
from torch import nn

from polytempo.core.errors import PolytempoError
from polytempo.core.layout import HEAD, names_of
from polytempo.core.registry import Options, Registry

ADAPTERS: Registry[Lora] = Registry("adapter")
ALL = "all"
_LORA = "*.lora_[AB].*"


@ADAPTERS.register("lora")
class Lora(Options):
    """Low-rank adapters. targets: names (or their ends) of the layers that get one; dropout: of
    what enters an adapter, in training."""

    r: Annotated[int, Field(ge=1)] = 8
    alpha: Annotated[float, Field(gt=0)] = 16
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    targets: tuple[str, ...] = ()

    def insert(self, module: nn.Module) -> None:
        """Give the module its adapters, in place."""
        try:
            from peft import LoraConfig, inject_adapter_in_model
        except ImportError as error:
            raise PolytempoError(
                '--trainable lora needs the package peft: pip install "polytempo[transformers]"'
            ) from error
        head = {name.rpartition(".")[0] for name in names_of(module, HEAD)}
        targets = list(self.targets) or _usual(module) or _linear(module, head)
        config = LoraConfig(
            r=self.r,
            lora_alpha=self.alpha,
            lora_dropout=self.dropout,
            target_modules=targets,
            exclude_modules=sorted(head),
        )
        trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
        try:
            inject_adapter_in_model(config, module)
        except ValueError as error:  # none of these names, or layers of another kind
            raise PolytempoError(
                f"--trainable lora: {type(module).__name__} has no layers {', '.join(targets)} "
                f"that could get an adapter ({' '.join(str(error).split())[:200]}); name others "
                "with lora:targets=[...]"
            ) from error
        for parameter in trained:  # what is frozen is for the layout to say
            parameter.requires_grad_(True)


def insert_adapters(module: nn.Module, trainable: str) -> None:
    """Those that are asked for, if any."""
    if (adapter := _adapter(trainable)) is not None:
        adapter.insert(module)


def trained_parts(trainable: str | None) -> tuple[str, ...] | None:
    """The parts of a model that are trained, as `Parts` names them; None: all."""
    if trainable is None or trainable.strip() == ALL:
        return None
    if _adapter(trainable) is not None:
        return (_LORA, HEAD)
    found = tuple(word.strip() for word in trainable.split(",") if word.strip())
    if not found:
        raise PolytempoError(
            f"--trainable {trainable!r} names nothing; use all, head, a pattern of names, or "
            "lora:r=8,alpha=16"
        )
    return found


def _adapter(trainable: str) -> Lora | None:
    name = trainable.strip().partition(":")[0]
    return ADAPTERS.create(trainable) if name in ADAPTERS else None


def _usual(module: nn.Module) -> list[str]:
    """What peft would choose in a transformer of this kind."""
    from peft.utils.constants import TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING as KNOWN

    config: Any = getattr(getattr(module, "network", None), "config", None)
    return list(KNOWN.get(getattr(config, "model_type", ""), ()))


def _linear(module: nn.Module, head: set[str]) -> list[str]:
    found = [
        name
        for name, layer in module.named_modules()
        if isinstance(layer, nn.Linear) and name not in head
    ]
    if not found:
        raise PolytempoError(
            f"--trainable lora: {type(module).__name__} has no linear layers but its head; use "
            "--trainable head, or a pattern of parameter names"
        )
    return found
