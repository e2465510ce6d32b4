"""Aggregation Decision Makers: does a peer want to communicate after this local round?"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

import numpy as np
from pydantic import Field

from polytempo.core.registry import Options, Registry


@dataclass(frozen=True)
class Occasion:
    """What a decision maker may look at when a local round has ended."""

    peers: int  # K, this one included
    rounds: int  # local rounds since the last pairing, this one included
    progress: float  # share of the target iterations that is done
    somebody_pends: bool  # some other peer is known to be pending
    stream: np.random.Generator  # of this decision alone


class Decision(Options):
    """Base of the decision makers. They keep no state: all that they go by is in the occasion."""

    name: ClassVar[str] = ""

    def communicate(self, occasion: Occasion) -> bool:
        """Whether to look for a partner now."""
        raise NotImplementedError


DECISIONS: Registry[Decision] = Registry("decision maker", Decision)


@DECISIONS.register("uniform")
class AtRandom(Decision):
    """Yes with probability `rate` / K: at the paper's rate of 2, one pair per round on average."""

    rate: Annotated[float, Field(ge=0)] = 2.0

    def communicate(self, occasion: Occasion) -> bool:
        return bool(occasion.stream.random() * occasion.peers < self.rate)


@DECISIONS.register("every")
class Every(Decision):
    """Yes when `rounds` local rounds have passed since the last pairing."""

    rounds: Annotated[int, Field(ge=1)] = 1

    def communicate(self, occasion: Occasion) -> bool:
        return occasion.rounds >= self.rounds


@DECISIONS.register("always")
class Always(Decision):
    """Yes after each local round."""

    def communicate(self, occasion: Occasion) -> bool:
        return True


@DECISIONS.register("never")
class NeverPair(Decision):
    """Local training alone: asks nobody, is never pending, so nobody asks it either."""

    def communicate(self, occasion: Occasion) -> bool:
        return False
