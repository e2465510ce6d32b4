"""The server of a fleet, or one client of it, from the settings of a run: what `polytempo server`
and `polytempo client` do.

Strategy, model, task and initial weights are those of the simulator with the same settings; what is
different is that clients are elsewhere, and time is real.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from polytempo.core import events
from polytempo.core.errors import PolytempoError
from polytempo.experiments.about import write_about
from polytempo.experiments.callbacks import Callbacks, Run
from polytempo.experiments.config import RunConfig, write_config
from polytempo.experiments.fleet_plan import (
    Undertaking,
    continued,
    make_node,
    one_order,
    save_beginning,
)
from polytempo.experiments.fleet_result import History, Outlook, Row, account_of, each_client
from polytempo.experiments.fleet_settings import (
    AUTO,
    own_problem,
    own_samples,
    problem_name,
)
from polytempo.experiments.fleet_trainer import SolverTrainer
from polytempo.experiments.jobs import Report
from polytempo.experiments.result import RunResult
from polytempo.experiments.result_folder import write_arrays, write_result
from polytempo.experiments.rows import write_table
from polytempo.experiments.summary import result_of
from polytempo.files import Claim, replace_text
from polytempo.network.fleet.admission import Admission, Policy
from polytempo.network.fleet.client import GIVE_UP, FleetClient, Unreachable
from polytempo.network.fleet.limits import Limits
from polytempo.network.fleet.metrics import MetricsServer
from polytempo.network.fleet.server import DEFAULT_LIMITS, FleetServer
from polytempo.network.fleet.store import JOURNAL, Store
from polytempo.network.session import Certificates
from polytempo.nodes.client import ClientNode
from polytempo.nodes.plan import Patience
from polytempo.nodes.server import ServerNode
from polytempo.training import Problem

WRITE_SECONDS = 5.0  # between two writes of history.csv and clients.csv
SHOW_SECONDS = 0.1  # between two looks at the progress
Say = Callable[[dict[str, Any]], None]  # is told what happens: a dictionary with the key "event"


def nobody(event: dict[str, Any]) -> None:
    """Is told, and does not listen."""


# -- the server ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Site:
    """Where a server listens, whom it lets in, how long it waits for a client in training, where
    its metrics are to be had (None: nowhere), how many clients it waits for before it begins, and
    what they may take."""

    listen: str
    certificates: Certificates | None = None
    policy: Policy = "certified"
    patience: Patience = AUTO
    metrics: str | None = None
    wait_for: int = 1
    limits: Limits = DEFAULT_LIMITS


class Watch:
    """Watches a server: its progress for people, its tables on disk, its logs."""

    def __init__(
        self,
        node: ServerNode,
        problem: Problem,
        folder: Path,
        report: Report,
        say: Say,
        callbacks: Callbacks,
    ) -> None:
        self.node, self.problem, self.folder = node, problem, folder
        self.callbacks = callbacks
        self.history = History(node, problem)
        self._report, self._say = report, say
        self._shown = self._written = 0.0
        self._told = self._logged = 0  # rows of the history

    def __call__(self, event: events.Event) -> None:
        found = events.as_dict(event)
        if "client" in found:
            found["name"] = self.node.roster[found["client"]]
        self._say(found)
        self.callbacks.event(event)
        now = time.monotonic()
        if now > self._shown + SHOW_SECONDS:
            self._shown = now
            self.show()
        if now > self._written + WRITE_SECONDS:
            self.write()
            self._written = time.monotonic()

    def show(self) -> None:
        node, metric = self.node, self.problem.metrics[0]
        rows = self.history.rows
        value = metric.text(rows[-1][metric.name] if rows else None)
        state = f"t={node.time:,.1f}s  {len(node.here)} clients  {metric.name} {value}"
        if node.gathering:
            state = f"waiting for clients: {len(node.here)} of {node.server.wait_for} are there"
        self._report(node.updates, node.plan.updates, state)
        for row in rows[self._told :]:
            self._say({"event": "evaluated", **row})
        self._told = len(rows)
        self.log(rows[:-1])  # clients still answer the last exam

    def log(self, rows: Sequence[Row]) -> None:
        """Tell the callbacks of those that they do not know. (Their answers end simulations.)"""
        for row in rows[self._logged :]:
            self.callbacks.evaluated(row)
            self._logged += 1

    def write(self) -> None:
        """What can be looked at while the run goes on."""
        if rows := self.history.rows:
            write_table(self.folder / "history.csv", rows)
        if clients := each_client(self.node, self.problem):
            write_table(self.folder / "clients.csv", clients)
        write_arrays(self.folder, Outlook(self.node, self.problem), durable=False)


def conduct(
    what: Undertaking,
    out: Path,
    site: Site,
    *,
    report: Report = lambda done, updates, state: None,
    say: Say = nobody,
    interrupted: threading.Event | None = None,
) -> RunResult:
    """Conduct a run with whoever joins, until it is over or interrupted; the same call in the same
    folder resumes it."""
    began = time.monotonic()
    with ExitStack() as stack:
        stack.enter_context(Claim(out))
        stack.enter_context(one_order())
        what = continued(what, out)
        config, node = what.config, make_node(what, site.patience, site.wait_for)
        everybody = Callbacks(config.callbacks())
        beginning = Run(config.settings(), what.problem.metrics[0], out)
        stack.enter_context(everybody.during(beginning))
        if not (out / JOURNAL).exists():  # what a resumed run depends on is there before the run
            write_config(out / "config.toml", config)
            save_beginning(out, what)
        watch = Watch(node, what.problem, out, report, say, everybody)
        server = FleetServer(
            node,
            Store(out),
            site.listen,
            certificates=site.certificates,
            admission=Admission(out, site.policy),
            limits=site.limits,
            watch=watch,
        )
        stack.callback(server.close)
        if node.updates > config.updates:
            raise PolytempoError(
                f"{out} has already folded {node.updates} updates; ask for more --updates than "
                f"{config.updates}"
            )
        write_config(out / "config.toml", config)  # perhaps for more updates than before
        write_about(out, what.problem.metrics[0], what.about)
        if site.metrics is not None:
            stack.callback(MetricsServer(server, site.metrics).close)
        say({"event": "listening", "address": server.address})
        complete = server.run(interrupted or threading.Event())
        watch.show()
        watch.log(watch.history.rows)
        wall = {"total": time.monotonic() - began}
        account = account_of(node, watch.history, what.about, wall)
        asked = interrupted is not None and interrupted.is_set()
        result = result_of(account, config.strategy_table, complete, asked)
        write_result(out, result, config.settings())
        everybody.end(result)
        say({"event": "finished", "result": result.summary})
    return result


# -- a client --------------------------------------------------------------------------------------


def run_client(
    config: RunConfig,
    out: Path,
    connect: str,
    *,
    name: str,
    client: int | None = None,
    own_model: bool = False,
    certificates: Certificates | None = None,
    pause: float = 0.0,
    after: Path | None = None,
    give_up_after: float = GIVE_UP,
    say: Say = nobody,
    interrupted: threading.Event | None = None,
) -> dict[str, Any]:
    """Take part until the run is over, or interrupted; the same call in the same folder resumes.
    `own_model`: train the model of the settings, whatever the server says. `after`: connect once
    this file is there. `give_up_after`: seconds without a server; then `Unreachable`."""
    data = own_samples(config, name, client)
    problem = own_problem(config, data)
    trainer = SolverTrainer(
        data,
        problem,
        model=config.model if own_model else None,
        solver=config.solver,
        device=config.device,
        folder=out,
        privacy=config.make("dp"),
    )
    node = ClientNode("", problem_name(problem), data.samples[0], _tested(data.test[0]))
    return take_part(
        node,
        trainer,
        out,
        connect,
        about=data.description,
        name=name,
        certificates=certificates,
        pause=pause,
        after=after,
        give_up_after=give_up_after,
        say=say,
        interrupted=interrupted,
    )


def take_part(
    node: ClientNode,
    trainer: Any,
    out: Path,
    connect: str,
    *,
    about: str,
    name: str | None,
    certificates: Certificates | None = None,
    pause: float = 0.0,
    after: Path | None = None,
    give_up_after: float = GIVE_UP,
    say: Say = nobody,
    interrupted: threading.Event | None = None,
) -> dict[str, Any]:
    """A client with any trainer; returns what its result.json holds."""
    began = time.monotonic()
    interrupted = interrupted or threading.Event()
    driver = FleetClient(
        node,
        trainer,
        out,
        connect,
        certificates=certificates,
        name=name,
        watch=say,
        pause=pause,
        give_up_after=give_up_after,
    )
    say({"event": "ready"})
    while after is not None and not after.exists() and not interrupted.wait(0.05):
        pass
    reason, unreachable = None, None
    try:
        reason = driver.run(interrupted)
    except Unreachable as error:
        unreachable = error
    summary = {
        "client": node.client,
        "data": about,
        "samples": node.samples,
        "tested": node.test_samples,
        "complete": reason is not None,
        "reason": reason if unreachable is None else str(unreachable),
        "acknowledged": node.acknowledged,
        "trained": getattr(trainer, "how", ""),
        "seconds": time.monotonic() - began,
    }
    out.mkdir(parents=True, exist_ok=True)  # nothing is there of one that never got through
    replace_text(out / "result.json", json.dumps(summary, indent=2) + "\n")
    if unreachable is not None:
        raise unreachable
    return summary


def _tested(part: slice) -> int:
    count: int = part.stop - part.start
    return count
