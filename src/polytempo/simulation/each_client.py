"""Every client by itself: what it has, how it trains, how good its model is. A row has the same
columns whether the run was simulated, among peers, or a fleet's (`client_row`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from polytempo.core import events
from polytempo.core.metric import MetricInfo, finite
from polytempo.core.strategy import State
from polytempo.simulation.extension import Extension, Row
from polytempo.training import Score

if TYPE_CHECKING:
    from polytempo.simulation.engine import Engine

LISTED = 100_000  # clients; of more there is no table
FOLLOWED = 2_000  # clients; of more there is no history
Floats = NDArray[np.float64]
_COUNTS = ("updates", "staleness", "since", "busy")  # arrays, by client


def client_row(
    metric: MetricInfo,
    client: int,
    *,
    name: str,
    samples: int,
    updates: int,
    group: int | None = None,
    tested: int | None = None,
    slowdown: float | None = None,
    seconds: float | None = None,
    staleness: float | None = None,
    evaluated: int | None = None,
    handed: float | None = None,
    adapted: float | None = None,
) -> dict[str, Any]:
    """A row of clients.csv; docs/folder.md explains the columns."""
    row = {
        "client": client,
        "name": name,
        "group": group,
        "samples": samples,
        "tested": tested,
        "slowdown": slowdown,
        "seconds": seconds,
        "updates": updates,
        "staleness": staleness,
        "evaluated_at": evaluated,
        metric.name: handed,
        f"{metric.name}_adapted": adapted,
    }
    found: dict[str, Any] = finite(row)
    return found


def score_row(
    metric: MetricInfo,
    time: float,
    evaluated: int,
    client: int,
    name: str,
    handed: float | None,
    adapted: float | None,
) -> dict[str, Any]:
    """A row of clients_history.csv: one client at one evaluation."""
    row = {"time": time, "updates": evaluated, "client": client, "name": name}
    found: dict[str, Any] = finite(row | {metric.name: handed, f"{metric.name}_adapted": adapted})
    return found


def spread_over(rows: Sequence[Row], metric: MetricInfo) -> dict[str, float | None]:
    """How unequal clients are, beyond what the history says: the best tenth of what they are
    handed, and the deviation after fine-tuning."""
    handed = known(rows, metric.name)
    adapted = known(rows, f"{metric.name}_adapted")
    ordered = np.sort(handed) if metric.better == "lower" else np.sort(handed)[::-1]
    return {
        f"{metric.name}_best10": float(ordered[: max(1, len(handed) // 10)].mean())
        if len(handed)
        else None,
        f"{metric.name}_adapted_std": float(adapted.std()) if len(adapted) else None,
    }


def known(rows: Sequence[Row], column: str) -> Floats:
    """The values of that column, of the clients that have one."""
    return np.array([row[column] for row in rows if row[column] is not None], dtype=np.float64)


class EachClient(Extension):
    """Counts what every client does, and keeps its scores."""

    name = "clients"

    def __init__(self, engine: Engine) -> None:
        clients = engine.federation.clients
        self.engine = engine
        self.updates = np.zeros(clients, dtype=np.int64)
        self.staleness = np.zeros(clients, dtype=np.int64)  # summed over updates
        self.since = np.zeros(clients)  # when what it trains was sent, or began
        self.busy = np.zeros(clients)  # seconds of all trainings that have counted
        self.when: list[tuple[float, int]] = []  # time and updates of the run at evaluations
        self.scores: list[Floats] = []  # the metric then, [2, clients]: handed, adapted

    # -- what happens --------------------------------------------------------------------------

    def happened(self, event: events.Event) -> None:
        match event:
            case events.Dispatch(client=client):
                self.since[client] = event.time
            case events.Join(client=client) | events.Return(client=client):
                if self.engine.strategy.engine == "peers":  # who restarts its local round
                    self.since[client] = event.time
            case events.Upload(client=client, staleness=staleness):
                self.staleness[client] += staleness
                self._trained(client, event.time)
            case events.Train(client=client):
                self._trained(client, event.time)

    def _trained(self, client: int, now: float) -> None:
        self.updates[client] += 1
        self.busy[client] += now - self.since[client]
        self.since[client] = now

    def evaluated(self, scores: Mapping[int, Score]) -> dict[str, Any]:
        if len(self.updates) > FOLLOWED:  # the last evaluation alone
            self.when, self.scores = [], []
        self.when.append((self.engine.time, self.engine.updates))
        self.scores.append(np.full((2, len(self.updates)), np.nan))
        self._note(0, scores)
        return {}

    def adapted(self, scores: Mapping[int, Score]) -> None:
        self._note(1, scores)

    def _note(self, which: int, scores: Mapping[int, Score]) -> None:
        for client, score in scores.items():
            if score.total:
                self.scores[-1][which, client] = self.engine.metric.value(score.sums)

    # -- what there is to show -----------------------------------------------------------------

    def rows(self) -> list[dict[str, Any]]:
        """A row for each client, as it stands."""
        engine, federation = self.engine, self.engine.federation
        if federation.clients > LISTED:
            return []
        groups = None if federation.groups is None else federation.groups.tolist()
        nothing = np.full((2, federation.clients), np.nan)
        handed, adapted = (self.scores[-1] if self.scores else nothing).tolist()
        return [
            client_row(
                engine.metric,
                client,
                name=federation.name_of(client),
                group=None if groups is None else groups[client],
                samples=samples,
                tested=federation.test[client].stop - federation.test[client].start,
                slowdown=engine.factors[client],
                seconds=float(self.busy[client]) / updates if updates else None,
                updates=updates,
                staleness=int(self.staleness[client]) / updates
                if updates and engine.staleness  # else there is none
                else None,
                evaluated=self.when[-1][1] if handed[client] == handed[client] else None,
                handed=handed[client],
                adapted=adapted[client],
            )
            for client, (samples, updates) in enumerate(
                zip(federation.samples, self.updates.tolist(), strict=True)
            )
        ]

    def figures(self) -> dict[str, Any]:
        return spread_over(self.rows(), self.engine.metric)

    def tables(self) -> dict[str, Sequence[Row]]:
        return {"clients": self.rows(), "clients_history": self._scores()}

    def _scores(self) -> list[dict[str, Any]]:
        metric, name_of = self.engine.metric, self.engine.federation.name_of
        return [
            score_row(metric, *when, client, name_of(client), *values)
            for when, scores in zip(self.when, self.scores, strict=True)
            for client, values in enumerate(scores.T.tolist())
            if values[0] == values[0]  # was tested
        ]

    # -- checkpoints ---------------------------------------------------------------------------

    def state_dict(self) -> State:
        scores = np.stack(self.scores) if self.scores else np.zeros((0, 2, len(self.updates)))
        counts = {name: getattr(self, name) for name in _COUNTS}
        return {**counts, "when": [list(pair) for pair in self.when], "scores": scores}

    def load_state_dict(self, state: State) -> None:
        for name in _COUNTS:
            setattr(self, name, state[name])
        self.when = [(time, round_) for time, round_ in state["when"]]
        self.scores = list(state["scores"])
