"""TextCNN (Kim, "Convolutional neural networks for sentence classification", EMNLP 2014)."""

from __future__ import annotations

from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor, nn

from polytempo.core.errors import PolytempoError
from polytempo.core.registry import Options
from polytempo.models.feedforward import Widths
from polytempo.models.spec import MODELS, Inputs

Positive = Annotated[int, Field(ge=1)]
PADDING = 0  # the token that fills short texts; its embedding is zero and is never trained


class _TextCNN(nn.Module):
    def __init__(self, spec: TextCNN, vocabulary: int, classes: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, spec.embedding, padding_idx=PADDING)
        self.convolutions = nn.ModuleList(
            nn.Conv1d(spec.embedding, spec.filters, width) for width in spec.widths
        )
        self.dropout = nn.Dropout(spec.dropout)
        self.output = nn.Linear(len(spec.widths) * spec.filters, classes)
        self.shortest = max(spec.widths)

    def forward(self, tokens: Tensor) -> Tensor:
        missing = max(0, self.shortest - tokens.shape[-1])
        tokens = nn.functional.pad(tokens, (0, missing), value=PADDING)
        words = self.embedding(tokens).transpose(-1, -2)  # [batch, embedding, time]
        peaks = [convolution(words).relu().amax(-1) for convolution in self.convolutions]
        scores: Tensor = self.output(self.dropout(torch.cat(peaks, dim=-1)))
        return scores


@MODELS.register("textcnn")
class TextCNN(Options):
    """Convolutions over word embeddings, each maximised over time (6.4 M for 32,000 words).

    embedding: size of a word's vector
    widths:    how many words each kind of filter sees
    filters:   how many filters of each width
    dropout:   share of the features that training leaves out at each step
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
        if not self.widths:
            raise PolytempoError("model textcnn: widths is empty; give at least one, as in [3,4,5]")
        return _TextCNN(self, inputs.vocabulary, inputs.classes)
