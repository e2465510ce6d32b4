"""Processes of the command on this machine, one for each member of a group."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Self

from polytempo.files import Claim
from polytempo.network.certificates import LOCAL, make_certificates
from polytempo.training.executors.processes import cores

_PATIENCE = 60.0  # seconds for what is under way, after a signal
Events = Callable[[dict[str, Any]], None]


class LocalGroup:
    """Starts the members, passes on what they report, and ends them all. From the beginning to the
    end of `with`, nobody else writes to the folder.

    `watch` is told every event of every member, by threads of this group.
    """

    def __init__(self, out: Path, watch: Events) -> None:
        self.out, self.watch = out, watch
        self.processes: dict[str, subprocess.Popen[str]] = {}
        self._readers: list[threading.Thread] = []
        self._asked = False  # to end
        self._claim = Claim(out)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Whatever happened, no member is left that writes to the folder."""
        try:
            self.stop()
            self.wait()
        finally:
            self._claim.close()

    def certify(self, names: Sequence[str], clients: Sequence[str] = ()) -> Path:
        """Certificates of these members, valid on this machine, and of clients, to whom nobody
        connects; those that are there stay."""
        folder = self.out / "certificates"
        wanted = {**dict.fromkeys(names, LOCAL), **dict.fromkeys(clients, ())}
        new = {n: where for n, where in wanted.items() if not (folder / f"{n}.pem").exists()}
        if new:
            make_certificates(folder, new)
        return folder

    def launch(
        self, name: str, command: Sequence[str], sharing: int, certificates: Path | None
    ) -> subprocess.Popen[str]:
        """Start a member, for the first time or again; so many share the processors."""
        command = [sys.executable, "-m", "polytempo", *command]
        if certificates is not None:
            for option, file in (("ca", "ca.pem"), ("cert", f"{name}.pem"), ("key", f"{name}.key")):
                command += [f"--{option}", str(certificates / file)]
        threads = str(max(1, cores() // sharing))
        with (self.out / f"{name}.log").open("a") as log:
            process = subprocess.Popen(
                command,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                env={**os.environ, "OMP_NUM_THREADS": threads},
                start_new_session=True,  # Ctrl-C comes to us alone, and we pass it on
            )
        self.processes[name] = process
        reader = threading.Thread(target=self._read, args=(name, process), daemon=True)
        reader.start()
        self._readers.append(reader)
        return process

    def _read(self, name: str, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        for line in process.stdout:
            if line.endswith("}\n"):  # a kill may leave half a line
                self.watch({"member": name, **json.loads(line)})

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
        """Ask all members to finish what is under way and end."""
        self._asked = True
        for process in self.processes.values():
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)

    def failure(self, name: str) -> str | None:
        """What a member said when it failed."""
        code = self.processes[name].returncode
        if code in (0, 130):  # 130: it was asked to stop
            return None
        said = (self.out / f"{name}.log").read_text(encoding="utf8").splitlines()
        return f"{name} ended with code {code}: {said[-1] if said else 'it said nothing'}"
