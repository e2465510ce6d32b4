"""What a fleet has come to: its exams as a history, each client's last scores, and its figures."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import numpy as np

from polytempo.core.errors import PolytempoError
from polytempo.core.privacy import Gaussian
from polytempo.experiments.summary import Account
from polytempo.nodes.exams import Exam
from polytempo.nodes.server import ServerNode
from polytempo.nodes.star import Sums
from polytempo.simulation import Extension
from polytempo.simulation.clusters import CLIENTS, DRAWN, stacked
from polytempo.simulation.each_client import client_row, score_row, spread_over
from polytempo.simulation.guards import defended, spent
from polytempo.simulation.metrics import models_sent, over_clients
from polytempo.training import Problem, Score

Row = dict[str, Any]


@dataclass
class History:
    """The exams of a node as rows, one for each that somebody has answered. Scores come in until
    the next exam, and later: a row that has not changed is not computed again."""

    node: ServerNode
    problem: Problem
    _known: dict[int, tuple[tuple[int, int], Row | None]] = field(default_factory=dict)

    @property
    def rows(self) -> list[Row]:
        return [row for exam in list(self.node.exams) if (row := self._row(exam)) is not None]

    def _row(self, exam: Exam) -> Row | None:
        answered = len(exam.handed), len(exam.adapted)
        if self._known.get(exam.number, (None,))[0] != answered:
            self._known[exam.number] = answered, self._made(exam)
        return self._known[exam.number][1]

    def _made(self, exam: Exam) -> Row | None:
        means = self._means(exam.handed)
        if means is None:
            return None
        name = self.problem.metrics[0].name
        adapted = self._means(exam.adapted)
        return {
            "time": exam.time,
            "updates": exam.updates,
            "version": exam.version,
            **means,
            f"{name}_adapted": None if adapted is None else adapted[name],
            **exam.sent,
            "messages": models_sent(exam.sent),
            "clients": len(exam.handed),
        }

    def _means(self, found: Mapping[int, Sums]) -> dict[str, float | None] | None:
        """Over those that have answered; None if that is nobody yet."""
        scores = [Score(sums) for _, sums in sorted(dict(found).items())]
        try:
            return over_clients(scores, self.problem) if scores else None
        except PolytempoError:  # nobody has a sample, or the metric is not defined for anybody
            return None


def each_score(node: ServerNode, problem: Problem) -> list[Row]:
    """A row for each client and exam that it has answered, in order of time."""
    metric = problem.metrics[0]
    return [
        score_row(
            metric,
            exam.time,
            exam.updates,
            client,
            node.roster[client],
            metric.value(sums),
            metric.value(exam.adapted[client]) if client in exam.adapted else None,
        )
        for exam in node.exams
        for client, sums in sorted(exam.handed.items())
    ]


def each_client(node: ServerNode, problem: Problem) -> list[Row]:
    """A row for each client: what it has done, and its last scores."""
    metric = problem.metrics[0]
    last = {row["client"]: row for row in each_score(node, problem)}
    seconds = {client: median(found) for client, found in node.deadlines.past.items() if found}
    fastest = min(seconds.values(), default=0.0)
    rows = []
    for client, called in enumerate(node.roster):
        updates, staleness = node.shares.get(client, (0, 0))
        took, score = seconds.get(client), last.get(client, {})
        row = client_row(
            metric,
            client,
            name=called,
            samples=node.samples[client],
            tested=node.exams.tested[client],
            slowdown=took / fastest if took and fastest else None,
            seconds=took,
            updates=updates,
            staleness=staleness / updates if updates and node.server.lets_stale else None,
            evaluated=score.get("updates"),
            handed=score.get(metric.name),
            adapted=score.get(f"{metric.name}_adapted"),
        )
        rows.append(row)
    return rows


class Outlook(Extension):
    """Who is in which cluster, how alike clients are, who learns from whom: as the server sees it
    now. And each client by itself."""

    name = "outlook"

    def __init__(self, node: ServerNode, problem: Problem) -> None:
        self.node, self.problem = node, problem

    def figures(self) -> dict[str, Any]:
        figures: dict[str, Any] = dict(
            spread_over(each_client(self.node, self.problem), self.problem.metrics[0])
        )
        if (found := self.node.server.strategy.clusters()) is not None:
            held = found[found >= 0]
            figures |= {"clusters": len(np.unique(held)), "unclustered": len(found) - len(held)}
        if (private := self._spent()) is not None:
            figures["privacy"] = private[0]
        if (defence := self.node.server.defence) is not None:
            figures["defence"] = defended(defence)
        return figures

    def _spent(self) -> tuple[dict[str, Any], list[Row]] | None:
        """Of their privacy, by clients: as if every training had ended in an upload that somebody
        has read."""
        for step in self.node.server.steps:
            if isinstance(step, Gaussian) and self.node.roster:
                counts = [self.node.trainings[client] for client in range(len(self.node.roster))]
                return spent(step, counts)
        return None

    def tables(self) -> dict[str, Sequence[Mapping[str, Any]]]:
        clients, scores = (of(self.node, self.problem) for of in (each_client, each_score))
        private = self._spent()
        return {
            "clients": clients,
            "clients_history": scores,
            "privacy": [] if private is None else private[1],
        }

    def arrays(self) -> dict[str, dict[str, Any]]:
        """similarity.npz and graph.npz, as in the folder of a simulation, but of now alone."""
        node, strategy = self.node, self.node.server.strategy
        if len(node.samples) > CLIENTS:
            return {}
        found = {"similarity": strategy.similarity(), "graph": strategy.collaboration()}
        return {
            name: stacked([(node.updates, node.time, np.array(matrix, dtype=np.float32))])
            for name, matrix in found.items()
            if matrix is not None
        }

    def plots(self) -> dict[str, dict[str, Any]]:
        node, strategy = self.node, self.node.server.strategy
        clients = len(node.samples)
        found: dict[str, dict[str, Any]] = {}
        if clients > DRAWN:
            return found
        lines: dict[str, tuple[list[float], list[float]]] = {}
        for row in each_score(node, self.problem):
            times, values = lines.setdefault(row["name"], ([], []))
            times.append(row["time"])
            values.append(row[self.problem.metrics[0].name])
        alike = strategy.similarity()
        if alike is not None and clients <= CLIENTS and np.isfinite(alike).sum() > clients:
            found["similarity"] = {"matrices": [(node.updates, node.time, np.array(alike))]}
        if (graph := strategy.collaboration()) is not None:
            found["graph"] = {"weights": graph}
        found = {name: {**given, "groups": None} for name, given in found.items()}
        if lines:
            about = {"metric": self.problem.metrics[0], "clock": "time (s)", "who": "client"}
            found["clients"] = {"peers": dict(sorted(lines.items())), **about}
        return found


def account_of(
    node: ServerNode, history: History, about: str, wall: Mapping[str, float]
) -> Account:
    """What the figures of a fleet are made of."""
    return Account(
        about=about,
        seed=node.server.context.seed,
        problem=history.problem,
        history=history.rows,
        time=node.exams[-1].time if node.over and node.exams else node.time,
        real=True,
        updates=node.updates,
        messages=node.messages,
        bytes=node.bytes,
        staleness=node.staleness if node.server.lets_stale else Counter(),
        parameters=len(node.server.context.initial),
        wall=wall,
        backend=f"by {len(node.names)} clients",
        extensions=[Outlook(node, history.problem)],
    )
