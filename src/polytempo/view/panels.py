"""What the page is told of a run. Everything is capped, so that thousands of clients and hundreds
of thousands of events cost no more than the caps say; the page names the caps that it has met."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from heapq import nlargest
from typing import Any, Literal, TypeVar

import numpy as np
from numpy.typing import NDArray

from polytempo.core.metric import finite
from polytempo.report.clusters import strips
from polytempo.report.maps import by_cluster
from polytempo.view.activity import FATES, GONE, IDLE, MODELS, MOST, SENDING, STATES, Client
from polytempo.view.folder import Row, RunFolder, numeric

POINTS = 1_000  # of a curve
CELLS = 10_000  # clients in the grid
LATELY = 20  # one in so many clients, those that have uploaded last, are shown as uploading
ROWS = 40  # clients in the timeline
BARS = 2_000  # trainings there
BINS = 40  # of the histogram of staleness
SIDE = 120  # cells of a matrix along one side
LINES, ACROSS = 200, 300  # clients, and columns, of the strips of clusters
Order = Literal["slowest", "stalest", "number"]
Table = dict[str, Any]
Floats = NDArray[np.float64]
T = TypeVar("T")
_NOBODY = Client()


def about(run: RunFolder) -> Table:
    """A run in the list of runs."""
    updates = _updates(run)
    return {
        "name": run.name,
        "strategy": run.strategy,
        "seed": run.seed,
        "status": run.status,
        "updates": updates,
        "planned": run.planned,
        "version": run.version,
    }


def everything(run: RunFolder, order: Order = "slowest") -> Table:
    """A run in full."""
    found = {
        **about(run),
        "folder": str(run.path),
        "events": run.activity.events,
        "reading": run.unread,
        "metric": run.metric.about,
        "deployed": run.deployed,
        "figures": _figures(run),
        "curve": curve(run),
        "clients": grid(run),
        "timeline": timeline(run, order),
        "staleness": staleness(run),
        "messages": messages(run),
        "clusters": clusters(run),
        "diagnosis": diagnosis(run),
        "matrices": {
            name: len(_matrices(arrays))
            for name, arrays in (("graph", run.graph.value), ("similarity", run.similarity.value))
        },
        "notes": notes(run),
        "about": {**run.about.value, "settings": run.config.value},
    }
    known: Table = finite(found)
    return known


def _updates(run: RunFolder) -> int:
    last = run.history[-1].get("updates") if run.history else 0
    return max(run.activity.updates, last if isinstance(last, int) else 0)


def notes(run: RunFolder) -> list[str]:
    """What is missing, and how to get it."""
    found = []
    if run.unread:
        found.append(f"Reading the event log: {run.unread / 2**20:,.0f} MB to go.")
    elif not run.has_events:
        found.append(
            "This run has recorded no events, so there are no clients, no timeline and no "
            "staleness to show. Start a run with --events, or with --live, to see them."
        )
    if run.activity.unreadable:
        found.append(f"{run.activity.unreadable:,} lines of events.jsonl cannot be read.")
    found += [f"{name} cannot be read." for name in run.damaged]
    if run.status == "stopped":
        found.append("The process of this run is gone. Start it again to continue it.")
    return found


def _figures(run: RunFolder) -> dict[str, str]:
    """The figures at the head of a run."""
    metric, activity = run.metric, run.activity
    points = [value for value in curve(run)["value"] if value is not None]
    clock = "time" if run.deployed else "simulated time"
    last = numeric(run.history[-1].get("time")) if run.history else None
    found = {
        f"{metric.name} now": metric.text(points[-1]) if points else "-",
        "best": metric.text(metric.best(points)) if points else "-",
        clock: f"{max(activity.time, last or 0.0):,.1f} s",
        "models sent": f"{_sent(run):,}",
    }
    size = sum(v for k, v in _told(run).items() if k.endswith("_bytes"))
    if size:
        found["bytes"] = _bytes(size)
    if any(counts := _stale(run)):
        mean = sum(k * v for k, v in counts.items()) / counts.total()
        found["mean staleness"] = f"{mean:.1f}"
    if activity.counts["drop"]:
        found["trainings lost"] = f"{activity.counts['drop']:,}"
    return found


def _told(run: RunFolder) -> dict[str, float]:
    """Messages and bytes by kind, as the run's result has them (None before its end)."""
    found = run.result.value.get("messages")
    if not isinstance(found, Mapping):
        return {}
    return {str(k): n for k, v in found.items() if (n := numeric(v)) is not None}


def _sent(run: RunFolder) -> int:
    if run.has_events:
        return run.activity.messages if run.communicates else 0
    last = numeric(run.history[-1].get("messages")) if run.history else None
    return int(last or 0)


def _bytes(size: float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if size < 1000:
            return f"{size:.3g} {unit}"
        size /= 1000
    return f"{size:,.3g} TB"


# -- curves ----------------------------------------------------------------------------------------


def curve(run: RunFolder) -> Table:
    """The metric at each evaluation: as the history has it, and as events tell what the history
    does not have yet."""
    name = run.metric.name
    points: dict[tuple[float, int], tuple[Any, ...]] = {}
    for point in run.activity.points if run.activity.metric == name else ():
        points[point.time, point.updates] = (point.messages, point.value, point.loss, None, None)
    columns = ("messages", name, "loss", f"{name}_worst10", f"{name}_adapted")
    for row in run.history:
        time, updates = numeric(row.get("time")), row.get("updates")
        if time is not None and isinstance(updates, int):
            points[time, updates] = tuple(numeric(row.get(column)) for column in columns)
    ordered = sorted(points)
    kept = thin(ordered, POINTS)
    found: Table = {"time": [time for time, _ in kept], "updates": [updates for _, updates in kept]}
    for place, column in enumerate(("messages", "value", "loss", "worst10", "adapted")):
        found[column] = [points[key][place] for key in kept]
    return {**found, "left_out": len(ordered) - len(kept)}


def thin(items: Sequence[T], most: int) -> list[T]:
    """At most so many of them, evenly spread, the first and the last among them."""
    if len(items) <= most:
        return list(items)
    return [items[int(k)] for k in np.linspace(0, len(items) - 1, most).round()]


# -- clients ---------------------------------------------------------------------------------------


def grid(run: RunFolder) -> Table | None:
    """Every client: what it does, its last staleness, its updates, its metric."""
    activity = run.activity
    if not run.has_events and not run.each.value:
        return None
    clients = run.number_of_clients
    shown = range(min(clients, CELLS))
    nobody = Client(GONE) if run.deployed else _NOBODY
    known = [activity.clients.get(number, nobody) for number in shown]
    states = [client.state for client in known]
    if run.status == "finished":  # what was under way then has come to nothing
        states = [GONE if state == GONE else IDLE for state in states]
    else:
        latest = nlargest(max(1, clients // LATELY), shown, key=lambda k: known[k].sent)
        for k in latest:
            if known[k].sent >= 0 and states[k] != GONE:
                states[k] = SENDING
    each = {row["client"]: row for row in run.each.value if isinstance(row.get("client"), int)}
    values = [numeric(each.get(k, {}).get(run.metric.name)) for k in shown]
    names = [each.get(k, {}).get("name") for k in shown]
    everybody = Counter(states)
    for number in range(len(states), min(clients, MOST)):  # those that are not drawn
        everybody[activity.clients.get(number, nobody).state] += 1
    return {
        "states": STATES,
        "counts": [everybody[k] for k in range(len(STATES))],
        "state": "".join(str(state) for state in states),
        "updates": [client.updates for client in known],
        "staleness": [client.staleness if client.updates else None for client in known]
        if any(_stale(run))
        else None,
        "value": values if any(value is not None for value in values) else None,
        "names": names
        if any(name not in (None, k) for k, name in zip(shown, names, strict=True))
        else None,
        "total": clients,
    }


def timeline(run: RunFolder, order: Order) -> Table | None:
    """Who trained when: the latest trainings of some clients, the slowest ones by default."""
    activity = run.activity
    trained = {
        number: client
        for number, client in activity.clients.items()
        if client.trainings or client.dispatch is not None
    }
    if not trained:
        return None

    def pace(number: int) -> float:
        client = trained[number]
        under_way = 0.0 if client.since is None else activity.time - client.since
        return client.busy / client.trainings if client.trainings else under_way

    def stale(number: int) -> float:
        client = trained[number]
        return client.stale / client.updates if client.updates else 0.0

    keys = {
        "slowest": lambda number: (-pace(number), number),
        "stalest": lambda number: (-stale(number), -pace(number), number),
        "number": lambda number: (number,),
    }
    ordered = sorted(trained, key=keys[order])
    chosen = ordered[:ROWS]
    rows = {number: row for row, number in enumerate(chosen)}
    bars = activity.bars(set(chosen), BARS)
    return {
        "clients": chosen,
        "seconds": [pace(number) for number in chosen],
        "row": [rows[bar[0]] for bar in bars],
        "start": [round(bar[1], 6) for bar in bars],
        "end": [round(bar[2], 6) for bar in bars],
        "staleness": [bar[3] if run.lets_stale else 0 for bar in bars],
        "fate": [bar[4] for bar in bars],
        "fates": FATES,
        "trained": len(ordered),
        "over": activity.over,
        "capped": len(bars) >= BARS or activity.over > len(activity.trainings),
    }


def _stale(run: RunFolder) -> Counter[int]:
    return run.activity.staleness if run.lets_stale else Counter()


def staleness(run: RunFolder) -> Table | None:
    """How many updates had which staleness, in bins of whole numbers; None if all were fresh."""
    counts = _stale(run)
    if not any(counts):
        return None
    width = 1 + max(counts) // BINS
    bins: Counter[int] = Counter()
    for value, count in counts.items():
        bins[value // width] += count
    last = max(counts) // width
    return {
        "width": width,
        "start": [k * width for k in range(last + 1)],
        "count": [bins[k] for k in range(last + 1)],
    }


def messages(run: RunFolder) -> Table | None:
    """Models sent so far, by kind: at evaluations, and now; and bytes, where they are known."""
    activity, told = run.activity, _told(run)
    kinds = [kind for kind in MODELS if activity.counts[kind] or told.get(kind)]
    if not kinds or not run.communicates:
        return None
    points: Iterable[tuple[float, tuple[int, ...]]] = [
        *activity.sent,
        (activity.time, activity.sent_now()),
    ]
    if not run.has_events:
        points = [
            (time, tuple(int(numeric(row.get(kind)) or 0) for kind in MODELS))
            for row in thin(run.history, POINTS)
            if (time := numeric(row.get("time"))) is not None
        ]
    found = list(points)
    return {
        "time": [time for time, _ in found],
        "kinds": {
            kind: [counts[place] for _, counts in found]
            for place, kind in enumerate(MODELS)
            if kind in kinds
        },
        "bytes": {kind: told.get(f"{kind}_bytes") for kind in kinds},
    }


# -- clusters, matrices, diagnosis -----------------------------------------------------------------


def clusters(run: RunFolder) -> Table | None:
    """The cluster of each client over the run, by updates: rows of a picture."""
    clients, updates = run.number_of_clients, _updates(run)
    changes = [
        (row["updates"], 0.0, row["client"], row["cluster"])
        for row in run.clusters.value
        if all(isinstance(row.get(key), int) for key in ("updates", "client", "cluster"))
        and 0 <= row["client"] < clients
    ]
    if not changes or updates < 1 or clients > CELLS:
        return None
    cells = strips(changes, clients, updates)
    cells = cells[:, np.linspace(0, cells.shape[1] - 1, min(ACROSS, cells.shape[1])).astype(int)]
    order = np.argsort(cells[:, -1], kind="stable")
    order = np.array(thin(order.tolist(), LINES))
    return {
        "clients": order.tolist(),
        "cells": cells[order].tolist(),
        "updates": updates,
        "number": len(np.unique(cells[:, -1][cells[:, -1] >= 0])),
        "left_out": clients - len(order),
    }


def matrix(run: RunFolder, which: Literal["graph", "similarity"], number: int) -> Table | None:
    """One of the matrices that were kept over the run (-1: the last), clients who work together
    side by side. Large ones are averaged over blocks of clients."""
    arrays = (run.graph if which == "graph" else run.similarity).value
    kept = _matrices(arrays)
    if not len(kept):
        return None
    number = number % len(kept) if number < len(kept) else len(kept) - 1
    last, cells = (np.array(kept[k], dtype=np.float64) for k in (-1, number))
    order = by_cluster(np.nan_to_num(last))
    cells = cells[np.ix_(order, order)]
    np.fill_diagonal(cells, np.nan)  # what clients keep of themselves would drown all else
    block = -(-len(cells) // SIDE)
    found: Table = finite(
        {
            "clients": order[::block].tolist(),
            "cells": _blocks(cells, block).tolist(),
            "block": block,
            "number": number,
            "of": len(kept),
            "updates": _entry(arrays, "updates", number),
            "time": _entry(arrays, "times", number),
        }
    )
    return found


def _matrices(arrays: Mapping[str, NDArray[Any]]) -> NDArray[Any]:
    """[kept, clients, clients], or empty if that is not what is there."""
    found = arrays.get("matrices")
    if found is None or found.ndim != 3 or found.shape[1] != found.shape[2] or not found.size:
        return np.zeros((0, 0, 0))
    return found if np.issubdtype(found.dtype, np.floating) else np.zeros((0, 0, 0))


def _entry(arrays: Mapping[str, NDArray[Any]], name: str, number: int) -> float | None:
    found = arrays.get(name)
    return None if found is None or len(found) <= number else numeric(found[number].item())


def _blocks(cells: Floats, block: int) -> Floats:
    """Means over square blocks; NaN where nothing is known."""
    if block == 1:
        return cells
    starts = np.arange(0, len(cells), block)
    known = np.isfinite(cells)

    def summed(values: Floats) -> Floats:
        rows = np.add.reduceat(values, starts, axis=0)
        return np.add.reduceat(rows, starts, axis=1)

    sums, counts = summed(np.where(known, cells, 0.0)), summed(known.astype(np.float64))
    with np.errstate(invalid="ignore", divide="ignore"):
        return sums / counts


def diagnosis(run: RunFolder) -> Table | None:
    """What makes the server's steps wrong, over the run."""
    terms = ("noise", "bias", "delay", "gradient")
    rows: list[Row] = [
        row for row in run.diagnosis.value if numeric(row.get("updates")) is not None
    ]
    if not rows:
        return None
    kept = thin(rows, POINTS)
    return {key: [numeric(row.get(key)) for row in kept] for key in ("updates", *terms)}
