"""FedAMP (Huang et al.: Personalized Cross-Silo Federated Learning on Non-IID Data, AAAI 2021), in
its heuristic form: as published, naively asynchronous, and on PACE's machinery."""

from __future__ import annotations

import dataclasses
from typing import Annotated, ClassVar

from pydantic import Field

from polytempo.core.strategy import STRATEGIES
from polytempo.strategies.collaboration import ArrivalGraph, CohortGraph
from polytempo.strategies.estimators import Attention, Graph
from polytempo.strategies.pace import PACE


@STRATEGIES.register("fedamp")
class FedAMP(CohortGraph):
    """Clients keep their own models and are drawn towards a mean of similar ones.

    `u_i = sum_j x_ij w_j` over the cohort, with x of the estimator `fedamp` (HeurFedAMP:
    `graph.self_weight` for oneself, a softmax of `graph.sigma` times the cosine for the others).
    The client starts from its own model w_i and minimises `F_i + (lam/2) ||theta - u_i||^2`. The
    model that counts is the client's own. Both w_i and u_i are sent, so that a client need not
    remember anything: twice the download.

    Under partial participation a row weights the clients of the client's last cohort, and u_i is
    made of their models as they are when the client is started again.
    """

    family: ClassVar[str] = "synchronous, personalised"
    paper: ClassVar[str] = "Huang et al. 2021 (HeurFedAMP)"
    anchored: ClassVar[bool] = True

    graph: Graph = dataclasses.field(default_factory=Attention)
    lam: Annotated[float, Field(ge=0)] = 1.0


@STRATEGIES.register("fedamp-async")
class FedAMPAsync(ArrivalGraph):
    """FedAMP made asynchronous in the naive way: a client's row is estimated when it uploads.

    Our reading of PACE's baseline: the server keeps the uploads as they came, and the mean of them
    is sent as an anchor when the client is started; in between the models in it may change.
    """

    family: ClassVar[str] = "asynchronous, personalised"
    paper: ClassVar[str] = "Liu et al. 2026 (PACE), baseline; our reading"
    anchored: ClassVar[bool] = True

    graph: Graph = dataclasses.field(default_factory=Attention)
    lam: Annotated[float, Field(ge=0)] = 1.0


@STRATEGIES.register("fedamp-pace")
class FedAMPPACE(PACE):
    """PACE with FedAMP's way of estimating the graph (PACE's Table III).

    All but the weights is PACE's: buffered models are mixed on arrival, and the client starts from
    the mixture, with PACE's pull towards it.
    """

    paper: ClassVar[str] = "Liu et al. 2026, plug-in"

    graph: Graph = dataclasses.field(default_factory=Attention)
