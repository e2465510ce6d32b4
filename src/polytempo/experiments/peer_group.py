"""A group of peers on this machine: one process each, on free ports of the loopback interface."""

from __future__ import annotations

import csv
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from itertools import product
from pathlib import Path
from statistics import fmean
from typing import Any

from polytempo.core.errors import PolytempoError
from polytempo.core.metric import MetricInfo
from polytempo.experiments.config import RunConfig, write_config
from polytempo.experiments.peer_settings import networked
from polytempo.experiments.result import can_plot, write_table
from polytempo.experiments.run import holds_run
from polytempo.files import Claim, replace_text
from polytempo.network.certificates import LOCAL, make_certificates
from polytempo.network.folder import INCARNATION, STATE
from polytempo.network.session import free_ports
from polytempo.report import Line, plot_peers
from polytempo.training.executors.processes import cores

SEEDS = 2  # peers that all others call first
_PATIENCE = 60.0  # seconds for a pairing under way and the last evaluation, after a signal


class Group:
    """Starts the peers, passes on what they report, and ends them all. From the beginning to the
    end of `with`, nobody else writes to the folder.

    `watch` is told every event of every peer, by threads of this group.
    """

    def __init__(
        self,
        config: RunConfig,
        out: Path,
        *,
        tls: bool = False,
        options: Sequence[str] = (),
        watch: Callable[[dict[str, Any]], None] = lambda event: None,
    ) -> None:
        assert config.clients is not None
        networked(config)  # better said once, here, than by every peer
        self.names = [f"peer-{number}" for number in range(config.clients)]
        self.out, self.watch, self.options = out, watch, options
        self.certificates = out / "certificates" if tls else None
        self.processes: dict[str, subprocess.Popen[str]] = {}
        self._readers: list[threading.Thread] = []
        self._asked = False  # to end
        self._claim = Claim(out)
        try:
            self._must_be_new()
            ports = free_ports(len(self.names))
            self.where = [f"{'tls' if tls else 'tcp'}/127.0.0.1:{port}" for port in ports]
            write_config(out / "config.toml", config)
            if self.certificates is not None:
                make_certificates(self.certificates, dict.fromkeys(self.names, LOCAL))
        except BaseException:
            self._claim.close()
            raise

    def __enter__(self) -> Group:
        return self

    def __exit__(self, *_: object) -> None:
        """Whatever happened, no peer is left that writes to the folder."""
        try:
            self.stop()
            self.wait()
        finally:
            self._claim.close()

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
        command = [sys.executable, "-m", "polytempo", "peer", "--json"]
        command += ["--id", name, "--client", str(number), "--listen", here]
        for seed in self.where[:SEEDS]:
            command += ["--connect", seed] if seed != here else []
        command += ["--config", str(self.out / "config.toml"), "--out", str(self.out / name)]
        if self.certificates is not None:
            for option, file in (("ca", "ca.pem"), ("cert", f"{name}.pem"), ("key", f"{name}.key")):
                command += [f"--{option}", str(self.certificates / file)]
        threads = str(max(1, cores() // len(self.names)))
        with (self.out / f"{name}.log").open("a") as log:
            process = subprocess.Popen(
                [*command, *self.options],
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                env={**os.environ, "OMP_NUM_THREADS": threads},
                start_new_session=True,  # Ctrl-C comes to us alone, and we pass it on
            )
        self.processes[name] = process
        reader = threading.Thread(target=self._read, args=(process,), daemon=True)
        reader.start()
        self._readers.append(reader)
        return process

    def _read(self, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        for line in process.stdout:
            if line.endswith("}\n"):  # a kill may leave half a line
                self.watch(json.loads(line))

    def wait(self, interrupted: Callable[[], bool] = lambda: False) -> None:
        """Until all have ended; after an interrupt they are asked to. Those that were asked and do
        not are killed."""
        for process in [*self.processes.values()]:
            while process.poll() is None:
                if interrupted() and not self._asked:
                    self.stop()
                try:
                    process.wait(_PATIENCE if self._asked else 0.2)
                except subprocess.TimeoutExpired:
                    if self._asked:
                        process.kill()
        for reader in self._readers:
            reader.join(_PATIENCE)

    def stop(self) -> None:
        """Ask all peers to finish what is under way and end."""
        self._asked = True
        for process in self.processes.values():
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)

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
            "failed": {name: self._failure(name) for name in self.names if self._failure(name)},
            "peers": found,
        }
        replace_text(self.out / "result.json", json.dumps(summary, indent=2) + "\n")
        if rows:
            write_table(self.out / "history.csv", rows)
            if can_plot():
                self._plot(histories, MetricInfo(**summary["metric"]))
        return summary

    def _plot(self, histories: dict[str, list[dict[str, str]]], metric: MetricInfo) -> None:
        lines: dict[str, Line] = {}
        for name, history in histories.items():
            seconds = [float(row["seconds"]) for row in history]
            lines[name] = seconds, [float(row[metric.name]) for row in history]
        plot_peers(lines, metric, self.out / "peers.png", clock="seconds since the peer began")

    def _failure(self, name: str) -> str | None:
        """What a peer said when it failed."""
        code = self.processes[name].returncode
        if code in (0, 130):  # 130: it was asked to stop
            return None
        said = (self.out / f"{name}.log").read_text(encoding="utf8").splitlines()
        return f"{name} ended with code {code}: {said[-1] if said else 'it said nothing'}"


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
