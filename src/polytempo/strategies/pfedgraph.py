"""pFedGraph (Ye et al.: Personalized Federated Learning with Inferred Collaboration Graphs,
ICML 2023), as published and in the naive asynchronous form that PACE compares with."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from polytempo.core.strategy import STRATEGIES
from polytempo.strategies.collaboration import ArrivalGraph, CohortGraph
from polytempo.strategies.estimators import Graph, Likeness


@STRATEGIES.register("pfedgraph")
class PFedGraph(CohortGraph):
    """Synchronous personalised learning over a graph of similar models.

    The rows of the graph are estimated over each cohort, with cosines above 0.9 counted as 1; each
    client's next model is the mean of the cohort's uploads, weighted by its row.
    """

    family: ClassVar[str] = "synchronous, personalised"
    paper: ClassVar[str] = "Ye et al. 2023"

    graph: Graph = dataclasses.field(default_factory=lambda: Likeness(clip=0.9))


@STRATEGIES.register("pfedgraph-async")
class PFedGraphAsync(ArrivalGraph):
    """pFedGraph made asynchronous in the naive way.

    Means are mixed into means, and no staleness is accounted for: accuracy collapses in the long
    run (PACE, Fig. 4). A baseline, not a recommendation.
    """

    family: ClassVar[str] = "asynchronous, personalised"
    paper: ClassVar[str] = "Liu et al. 2026 (PACE), baseline"
