"""FedSaC (Yan et al.: Balancing Similarity and Complementarity for Federated Learning, ICML 2024):
as published, naively asynchronous, and on PACE's machinery."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from polytempo.core.strategy import STRATEGIES
from polytempo.strategies.collaboration import ArrivalGraph, CohortGraph
from polytempo.strategies.estimators import Complement, Graph
from polytempo.strategies.pace import PACE


@STRATEGIES.register("fedsac")
class FedSaC(CohortGraph):
    """pFedGraph that prefers clients whose models are alike but whose features differ.

    With its model each client uploads `graph.k` principal directions of its features (what enters
    the last layer, over its training samples). The overlap of two clients is the cosine of the mean
    principal angle between the spaces that these span, from a singular value decomposition: it does
    not depend on signs or rotations of the bases.
    """

    family: ClassVar[str] = "synchronous, personalised"
    paper: ClassVar[str] = "Yan et al. 2024"

    graph: Graph = dataclasses.field(default_factory=Complement)


@STRATEGIES.register("fedsac-async")
class FedSaCAsync(ArrivalGraph):
    """FedSaC made asynchronous in the naive way; of each client its last basis counts."""

    family: ClassVar[str] = "asynchronous, personalised"
    paper: ClassVar[str] = "Liu et al. 2026 (PACE), baseline"

    graph: Graph = dataclasses.field(default_factory=Complement)


@STRATEGIES.register("fedsac-pace")
class FedSaCPACE(PACE):
    """PACE with FedSaC's way of estimating the graph (PACE's Table III)."""

    paper: ClassVar[str] = "Liu et al. 2026, plug-in"

    graph: Graph = dataclasses.field(default_factory=Complement)
