"""Training a text model on the words that the client has.

Of a table of 32,000 words a client uses a few thousand, yet plain training moves all of it at every
step. The rows of words that a client does not have see no gradient of the loss; weight decay, and a
pull towards the received model, only scale them, all by the same factor. So we train the rows of
the client's own words, and with them *one number* that stands for all other rows: it starts as
their norm, and its final ratio to that is the factor. Lengths and angles of the whole vector come
out right, which is all that an isotropic objective looks at.

A module says that it can be treated so by naming the layer in an attribute `token_table`: tokens
must serve for nothing but to look up rows there, with token 0 as padding. Then words can be
renumbered, and nothing changes. A subclass may do something else with tokens, so it does not
inherit the attribute: it has to say the same again.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from polytempo.core.layout import Layout

_PADDING = 0


@dataclass(frozen=True)
class Part:
    """A model with the words of one client."""

    theta: Tensor  # parameters before the table, its rows in use, parameters after it, the rest
    grad: Tensor
    anchor: Tensor  # theta as it was at first
    renamed: Tensor  # the client's samples, in the new numbers of the words
    words: Tensor  # the old numbers
    received: Tensor  # all parameters, as they came
    rest: float  # norm of the rows that are not in use
    table: slice  # of all parameters
    width: int  # of a row

    def widen(self, values: Tensor) -> Tensor:
        """`theta`, or `grad`, for the whole model."""
        begin, end = self.table.start, self.table.start + len(self.words) * self.width
        rows = values[begin:end].view(-1, self.width)
        whole = self.received * (float(values[-1]) / self.rest if self.rest else 0.0)
        whole[:begin] = values[:begin]
        whole[self.table].view(-1, self.width)[self.words] = rows
        whole[self.table.stop :] = values[end:-1]
        return whole


@dataclass(frozen=True)
class Vocabulary:
    """The table of words in the model that `layout` holds."""

    layout: Layout
    table: slice
    width: int

    @classmethod
    def of(cls, layout: Layout, weight: Tensor | None = None) -> Vocabulary | None:
        """Of this table, or the one that the module names. None if it names none, or does not train
        it, or some of the module stays with the clients."""
        name = {**vars(type(layout.module)), **vars(layout.module)}.get("token_table")
        if weight is None and name:
            weight = layout.module.get_parameter(f"{name}.weight")
        for parameter, place in layout.trained if not layout.personal else ():
            if parameter is weight:
                return cls(layout, place, parameter.shape[1])
        return None

    def part(self, tokens: Tensor, params: Tensor) -> Part:
        """The model `params` with the words of `tokens` alone."""
        padded = torch.cat([tokens.new_tensor([_PADDING]), tokens.flatten()])
        words, numbers = torch.unique(padded, return_inverse=True)  # padding stays number 0
        received = params[: self.layout.parameters]
        rows = received[self.table].view(-1, self.width)
        # on the CPU, for there are devices that have no doubles (mps)
        squares = torch.linalg.vecdot(rows, rows).cpu().double()
        squares[words.cpu()] = 0
        rest = squares.sum().sqrt().to(received.dtype).to(received.device)
        before, after = received[: self.table.start], received[self.table.stop :]
        theta = torch.cat([before, rows[words].flatten(), after, rest[None]])
        renamed = numbers[1:].view_as(tokens)
        return Part(
            theta=theta,
            grad=torch.zeros_like(theta),
            anchor=theta.clone(),
            renamed=renamed,
            words=words,
            received=received,
            rest=float(rest),
            table=self.table,
            width=self.width,
        )

    @contextmanager
    def bound(self, part: Part) -> Iterator[None]:
        """Within this context the module is that part of a model."""
        shrunk = self.table.stop - self.table.start - len(part.words) * self.width
        self._bind(part.theta, part.grad, shrunk)
        try:
            yield
        finally:
            self._bind(self.layout.vector, self.layout.grad, 0)

    def _bind(self, theta: Tensor, grad: Tensor, shrunk: int) -> None:
        """Make the parameters views of `theta`, in which the table is so much shorter."""
        for parameter, place in self.layout.trained:
            begin = place.start - (shrunk if place.start > self.table.start else 0)
            size = place.stop - place.start - (shrunk if place == self.table else 0)
            shape = (-1, self.width) if place == self.table else parameter.shape
            parameter.grad = None  # it would have to be of the old shape
            parameter.data = theta[begin : begin + size].view(shape)
            parameter.grad = grad[begin : begin + size].view(shape)
