"""A fleet on this machine: a server and its clients, one process each, with mutual TLS."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from polytempo.core.errors import PolytempoError
from polytempo.experiments.checkpoint import holds_run
from polytempo.experiments.config import RunConfig, write_config
from polytempo.experiments.fleet_settings import for_fleet
from polytempo.experiments.local_group import Events, LocalGroup
from polytempo.experiments.result import RunResult
from polytempo.experiments.result_folder import can_plot, read_result
from polytempo.experiments.run import run
from polytempo.files import replace_text
from polytempo.network.session import free_ports
from polytempo.report import plot_curves
from polytempo.simulation.devices import DEVICES, TwoSpeed

SERVER = "server"
_LAST_WORDS = 60.0  # seconds that the others have to end by themselves once the run is over
_READY = 180.0  # seconds in which all must be ready


class Fleet(LocalGroup):
    """`slow`: which clients are slower, and by how much. `pause`: seconds that a device of usual
    speed takes a break after each step, so that real work is not over before it is noticed.

    Clients make ready, and connect together once all are and the server listens: else the first
    would have done most of the work before the last has loaded its libraries.
    """

    def __init__(
        self,
        config: RunConfig,
        out: Path,
        *,
        slow: TwoSpeed | None = None,
        pause: float = 0.0,
        options: Sequence[str] = (),
        watch: Events = lambda event: None,
    ) -> None:
        assert config.clients is not None
        for_fleet(config)  # better said once, here, than by the server
        self.config, self.options, self._own_watch = config, options, watch
        self.clients = [f"client-{number}" for number in range(config.clients)]
        factors = (
            [1.0] * config.clients if slow is None else slow.factors(config.clients, config.seed)
        )
        self.pauses = [pause * factor for factor in factors]
        self._ready = {name: threading.Event() for name in (SERVER, *self.clients)}
        self._go = out / "go"  # the file that they wait for
        super().__init__(out, self._heard)
        try:
            if holds_run(out) and not (out / SERVER).exists():
                raise PolytempoError(
                    f"{out} holds a run of another kind; choose another --out, or delete it"
                )
            self.where = f"127.0.0.1:{free_ports(1)[0]}"
            write_config(out / "config.toml", config)
            self.certificates = self.certify([SERVER], self.clients)
        except BaseException:
            self._claim.close()
            raise

    def _heard(self, event: dict[str, Any]) -> None:
        if event["event"] in ("ready", "listening"):
            self._ready[event["member"]].set()
        self._own_watch(event)

    @property
    def _sharing(self) -> int:
        return len(self.clients) + 1

    def start_server(self) -> None:
        command = [SERVER, "--json", "--listen", self.where]
        command += ["--config", str(self.out / "config.toml"), "--out", str(self.out / SERVER)]
        self.launch(SERVER, [*command, *self.options], self._sharing, self.certificates)

    def start_client(self, number: int) -> None:
        name = self.clients[number]
        command = ["client", "--json", "--connect", self.where, "--client", str(number)]
        command += ["--config", str(self.out / "config.toml"), "--out", str(self.out / name)]
        command += ["--pause", str(self.pauses[number]), "--after", str(self._go)]
        self.launch(name, command, self._sharing, self.certificates)

    def carry_out(self, interrupted: Callable[[], bool] = lambda: False) -> None:
        """From nothing to the end."""
        self._go.unlink(missing_ok=True)
        self.start_server()
        for number in range(len(self.clients)):
            self.start_client(number)
        self._wait_for_all(interrupted)
        self._go.touch()
        server = self.processes[SERVER]
        while server.poll() is None and not interrupted() and self._anybody():
            time.sleep(0.1)
        # Clients may be done before the server has drawn its plots.
        orderly = server.poll() == 0 or (server.poll() is None and self._anybody_done())
        end = time.monotonic() + (_LAST_WORDS if orderly and not interrupted() else 0.0)
        while time.monotonic() < end and any(p.poll() is None for p in self.processes.values()):
            time.sleep(0.05)
        self.stop()
        self.wait()

    def _anybody(self) -> bool:
        return any(self.processes[name].poll() is None for name in self.clients)

    def _anybody_done(self) -> bool:
        return any(self.processes[name].poll() == 0 for name in self.clients)

    def _wait_for_all(self, interrupted: Callable[[], bool]) -> None:
        end = time.monotonic() + _READY
        for name, ready in self._ready.items():
            while not ready.wait(0.1) and self.processes[name].poll() is None:
                if interrupted() or time.monotonic() > end or self.processes[SERVER].poll():
                    return

    # -- what has come of it -----------------------------------------------------------------------

    def result(self) -> RunResult:
        """As the server has left it, with what every client and process has to say."""
        found = read_result(self.out / SERVER)
        found.summary["clients"] = found.clients
        found.summary["failed"] = self.failed()
        replace_text(self.out / "result.json", json.dumps(found.summary, indent=2) + "\n")
        return found

    def failed(self) -> dict[str, str]:
        return {name: why for name in self.processes if (why := self.failure(name)) is not None}


def simulated(config: RunConfig, slow: TwoSpeed | None, folder: Path) -> RunResult:
    """The same federation in the simulator, with devices that are as unequal."""
    if holds_run(folder):
        return read_result(folder)
    devices = DEVICES.describe(slow) if slow is not None else {"name": "equal"}
    return run(config.model_copy(update={"devices": devices}), folder)


def plot_beside(fleet: RunResult, simulator: RunResult, path: Path) -> None:
    """Both against the number of updates: their clocks are different ones."""
    if can_plot() and fleet.history and simulator.history:
        curves = {"fleet": [fleet.curve()], "simulator": [simulator.curve()]}
        plot_curves(curves, fleet.metric, path, x="updates")
