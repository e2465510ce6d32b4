"""TextCNN (Kim, "Convolutional neural networks for sentence classification", EMNLP 2014)."""

from __future__ import annotations

from typing import Annotated, Any

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from polytempo.core.errors import PolytempoError
from polytempo.core.registry import Options
from polytempo.models.feedforward import Widths
from polytempo.models.spec import MODELS, Inputs

Positive = Annotated[int, Field(ge=1)]
PADDING = 0  # the token that fills short texts; its embedding is zero and is never trained


class _Peaks(torch.autograd.Function):
    """The maximum over time of a convolution that was multiplied out for every word.

    `table[u, k * filters + f]` is what word u at place k of a window adds to filter f. A window is
    the sum of `width` entries, and only the window that wins has a gradient: so going back means
    adding one number to `width` entries for each text and filter.
    """

    @staticmethod
    def forward(ctx: Any, table: Tensor, words: Tensor, width: int) -> Tensor:
        windows = words.unfold(1, width, 1) * width + torch.arange(width)  # [batch, time, width]
        batch, time, _ = windows.shape
        filters = table.shape[1] // width
        entries = table.reshape(-1, filters)
        sums = nn.functional.embedding_bag(windows.reshape(-1, width), entries, mode="sum")
        peaks, winners = sums.view(batch, time, filters).max(1)
        ctx.save_for_backward(windows, winners)
        ctx.size = table.shape
        return peaks

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        windows, winners = ctx.saved_tensors
        batch, filters = grad.shape
        shape = (batch, filters, windows.shape[2])
        entries = windows.gather(1, winners[:, :, None].expand(shape))
        places = entries * filters + torch.arange(filters)[:, None]
        table = grad.new_zeros(ctx.size)
        table.view(-1).scatter_add_(0, places.view(-1), grad[:, :, None].expand(shape).reshape(-1))
        return table, None, None


class TextNetwork(nn.Module):
    """Computes what `relu(conv1d(embedding(tokens))).amax(-1)` does, in another order: each
    different word of the batch meets each filter once, and padding beyond the longest text is not
    looked at."""

    token_table = "embedding"  # tokens serve for nothing but to look up rows of this layer

    def __init__(self, spec: TextCNN, vocabulary: int, outputs: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, spec.embedding, padding_idx=PADDING)
        self.convolutions = nn.ModuleList(
            nn.Conv1d(spec.embedding, spec.filters, width) for width in spec.widths
        )
        self.dropout = nn.Dropout(spec.dropout)
        self.output = nn.Linear(len(spec.widths) * spec.filters, outputs)
        self.widths = spec.widths

    def forward(self, tokens: Tensor) -> Tensor:
        widest = max(self.widths)
        ends = (tokens != PADDING).any(0).nonzero()
        longest = int(ends[-1]) + 1 if len(ends) else 0
        # one window of nothing but padding stands for all of them
        tokens = tokens[:, : longest + widest]
        missing = max(0, widest - tokens.shape[-1])
        tokens = nn.functional.pad(tokens, (0, missing), value=PADDING)
        words, places = torch.unique(tokens, return_inverse=True)
        vectors = self.embedding(words)
        peaks = []
        for convolution, width in zip(self.convolutions, self.widths, strict=True):
            assert isinstance(convolution, nn.Conv1d)
            filters = convolution.weight.permute(1, 2, 0).flatten(1)  # [embedding, width * filters]
            highest = _Peaks.apply(vectors @ filters, places, width)  # type: ignore[no-untyped-call]
            peaks.append(highest + convolution.bias)
        scores: Tensor = self.output(self.dropout(torch.cat(peaks, dim=-1).relu()))
        return scores


@MODELS.register("textcnn")
class TextCNN(Options):
    """Convolutions over word embeddings, each maximised over time (6.4 M for 32,000 words).

    embedding: size of a word's vector
    widths:    how many words each kind of filter sees
    filters:   how many filters of each width
    dropout:   fraction of the features that training drops at each step
    """

    embedding: Positive = 192
    widths: Widths = (3, 4, 5)
    filters: Positive = 100
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.5

    def build(self, inputs: Inputs) -> nn.Module:
        if inputs.vocabulary is None or len(inputs.shape) != 1:
            raise PolytempoError(
                f"model 'textcnn' takes sequences of tokens, but a sample has shape {inputs.shape} "
                f"and the vocabulary is {inputs.vocabulary}; use 'mlp' or 'linear'"
            )
        if inputs.problem == "next-token":
            raise PolytempoError(
                "model 'textcnn' judges a text as a whole, but the problem is next-token; use 'gru'"
            )
        if not self.widths:
            raise PolytempoError("model textcnn: widths is empty; give at least one, as in [3,4,5]")
        return TextNetwork(self, inputs.vocabulary, inputs.outputs)
