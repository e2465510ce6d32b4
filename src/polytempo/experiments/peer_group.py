"""A group of peers on this machine: one process each, on free ports of the loopback interface."""

from __future__ import annotations

import csv
import json
import subprocess
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from statistics import fmean
from typing import Any

from polytempo.core.errors import PolytempoError
from polytempo.core.metric import MetricInfo
from polytempo.experiments.checkpoint import holds_run
from polytempo.experiments.config import RunConfig, write_config
from polytempo.experiments.local_group import Events, LocalGroup
from polytempo.experiments.peer_settings import networked
from polytempo.experiments.result_folder import can_plot
from polytempo.experiments.rows import write_table
from polytempo.files import replace_text
from polytempo.network.folder import INCARNATION, STATE
from polytempo.network.session import free_ports
from polytempo.report import Line, plot_peers
from polytempo.simulation.each_client import client_row

SEEDS = 2  # peers that all others call first


class Group(LocalGroup):
    """The peers of one run. `watch` is told every event of every peer, by threads of this group."""

    def __init__(
        self,
        config: RunConfig,
        out: Path,
        *,
        tls: bool = False,
        options: Sequence[str] = (),
        watch: Events = lambda event: None,
    ) -> None:
        assert config.clients is not None
        networked(config)  # better said once, here, than by every peer
        self.names = [f"peer-{number}" for number in range(config.clients)]
        self.options = options
        super().__init__(out, watch)
        try:
            self._must_be_new()
            ports = free_ports(len(self.names))
            self.where = [f"{'tls' if tls else 'tcp'}/127.0.0.1:{port}" for port in ports]
            write_config(out / "config.toml", config)
            self.certificates = self.certify(self.names) if tls else None
        except BaseException:
            self._claim.close()
            raise

    def _must_be_new(self) -> None:
        if holds_run(self.out):
            raise PolytempoError(
                f"{self.out} already holds a run; choose another --out, or delete it"
            )
        for name, file in product(self.names, (STATE, INCARNATION)):
            if (self.out / name / file).exists():
                raise PolytempoError(
                    f"{self.out / name} already holds a peer ({file}), which this group would "
                    "resume; choose another --out, or delete it"
                )

    def start(self, number: int) -> subprocess.Popen[str]:
        """Start this peer, for the first time or again."""
        name, here = self.names[number], self.where[number]
        command = ["peer", "--json", "--id", name, "--client", str(number), "--listen", here]
        for seed in self.where[:SEEDS]:
            command += ["--connect", seed] if seed != here else []
        command += ["--config", str(self.out / "config.toml"), "--out", str(self.out / name)]
        return self.launch(name, [*command, *self.options], len(self.names), self.certificates)

    def result(self) -> dict[str, Any]:
        """The figures over all peers, also written to the folder; those of peers that failed are
        missing."""
        found, rows = [], []
        histories: dict[str, list[dict[str, str]]] = {}
        for name in self.names:
            place = self.out / name
            if not (place / "result.json").exists():
                continue
            found.append(json.loads((place / "result.json").read_text(encoding="utf8")))
            with (place / "history.csv").open(encoding="utf8", newline="") as file:
                histories[name] = list(csv.DictReader(file))
            rows += [{"peer": name, **row} for row in histories[name]]
        summary = {
            "strategy": "p2p",
            "complete": len(found) == len(self.names) and all(row["complete"] for row in found),
            **_of_metric(found),
            "messages": sum(result["messages"] for result in found),
            "announcements": sum(result["announcements"] for result in found),
            "fusions": sum(result["fusions"] for result in found),
            "seconds": max((result["seconds"] for result in found), default=0.0),
            "failed": {name: why for name in self.names if (why := self.failure(name))},
            "peers": found,
        }
        replace_text(self.out / "result.json", json.dumps(summary, indent=2) + "\n")
        if rows:
            write_table(self.out / "history.csv", rows)
            write_table(self.out / "clients.csv", _each(found))
            if can_plot():
                self._plot(histories, MetricInfo(**summary["metric"]))
        return summary

    def _plot(self, histories: dict[str, list[dict[str, str]]], metric: MetricInfo) -> None:
        lines: dict[str, Line] = {}
        for name, history in histories.items():
            seconds = [float(row["seconds"]) for row in history]
            lines[name] = seconds, [float(row[metric.name]) for row in history]
        plot_peers(lines, metric, self.out / "peers.png", clock="seconds since the peer began")


def _each(found: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows of clients.csv: a peer's updates are its local rounds."""
    updates = [result["iterations"] // result["local_steps"] for result in found]
    seconds = [r["seconds"] / n if n else None for r, n in zip(found, updates, strict=True)]
    fastest = min((each for each in seconds if each), default=None)
    return [
        client_row(
            MetricInfo(**result["metric"]),
            result["client"],
            name=result["id"],
            samples=result["samples"],
            tested=result["tested"],
            slowdown=took / fastest if took and fastest else None,
            seconds=took,
            updates=done,
            evaluated=done,
            handed=result[result["metric"]["name"]],
        )
        for result, done, took in zip(found, updates, seconds, strict=True)
    ]


def _of_metric(found: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Mean, best and worst over the peers; if all of them failed, nobody knows of what."""
    if not found:
        return {"metric": None}
    metric = MetricInfo(**found[0]["metric"])
    values = [result[metric.name] for result in found]
    return {
        "metric": metric.about,
        metric.name: fmean(values),
        f"{metric.name}_best": metric.best(values),
        f"{metric.name}_worst": metric.worst(values),
    }
