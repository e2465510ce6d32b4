"""A small recurrent network that predicts the next token at every place of a sequence."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field
from torch import Tensor, nn

from polytempo.core.errors import PolytempoError
from polytempo.core.registry import Options
from polytempo.models.spec import MODELS, Inputs

Positive = Annotated[int, Field(ge=1)]
PADDING = 0  # stands behind the end of a sequence; its embedding is zero and is never trained


class RecurrentNetwork(nn.Module):
    def __init__(self, spec: GRU, vocabulary: int, outputs: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, spec.embedding, padding_idx=PADDING)
        self.recurrent = nn.GRU(spec.embedding, spec.hidden, batch_first=True)
        self.output = nn.Linear(spec.hidden, outputs)

    def forward(self, tokens: Tensor) -> Tensor:
        states, _ = self.recurrent(self.embedding(tokens))
        scores: Tensor = self.output(states)
        return scores


@MODELS.register("gru")
class GRU(Options):
    """Embedding, one layer of gated recurrent units, linear: scores [batch, length, tokens].

    embedding: size of a token's vector
    hidden:    number of recurrent units
    """

    embedding: Positive = 32
    hidden: Positive = 128

    def build(self, inputs: Inputs) -> nn.Module:
        if inputs.problem != "next-token" or inputs.vocabulary is None:
            tokens = inputs.vocabulary is not None
            raise PolytempoError(
                f"model 'gru' predicts the next token, but the problem is {inputs.problem} on "
                f"{'tokens' if tokens else 'numbers'}; use {'textcnn' if tokens else 'mlp'!r}"
            )
        return RecurrentNetwork(self, inputs.vocabulary, inputs.outputs)
