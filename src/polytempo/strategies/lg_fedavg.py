"""LG-FedAvg (Liang et al.: Think Locally, Act Globally, 2020): a personal body."""

from __future__ import annotations

from typing import ClassVar

from polytempo.core.strategy import STRATEGIES
from polytempo.strategies.fedavg import FedAvg
from polytempo.strategies.fedbuff import FedBuff


@STRATEGIES.register("lg-fedavg")
class LGFedAvg(FedAvg):
    """FedAvg of the head; everything below it, the representation, stays with its client.

    Short for `fedavg --personal body`. The paper begins with a common model from some updates of
    FedAvg, then splits it; here the split is there from the start, so a short run has little in
    common. It sends the least of all these methods: the last linear layer.
    """

    family: ClassVar[str] = "synchronous, personalised"
    paper: ClassVar[str] = "Liang et al. 2020"
    personal: ClassVar[tuple[str, ...]] = ("body",)


@STRATEGIES.register("lg-fedavg-async")
class LGFedAvgAsync(FedBuff):
    """LG-FedAvg on arrival: heads are folded as in FedBuff, and the body stays with its client."""

    family: ClassVar[str] = "asynchronous, personalised"
    paper: ClassVar[str] = "Liang et al. 2020, asynchronous"
    personal: ClassVar[tuple[str, ...]] = ("body",)
