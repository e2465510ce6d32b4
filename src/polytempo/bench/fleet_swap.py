"""How soon a model that is pushed to a client in training is swapped in.

Times are compared between processes: both read the system's monotonic clock.
"""

from __future__ import annotations

import multiprocessing
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from multiprocessing.connection import Connection
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import Any, Literal

import torch

from polytempo.bench.fleet_parts import PATIENCE, Light, Spec, files_of, percentiles, serving
from polytempo.core.errors import PolytempoError
from polytempo.core.messages import Dispatch
from polytempo.data import Federation
from polytempo.experiments.config import make_config
from polytempo.experiments.fleet_settings import own_problem, problem_name
from polytempo.experiments.fleet_trainer import SolverTrainer
from polytempo.network.fleet.client import FleetClient
from polytempo.nodes.client import ClientNode, Memory
from polytempo.nodes.star import Examine, Sums

_SILENCE = 3.0  # seconds without a swap: no more models are on their way
Trainer = Literal["native", "torch", "python", "gil"]
TRAINERS: dict[Trainer, str] = {
    "native": "LeNet, compiled code",
    "torch": "LeNet, torch",
    "python": "plain Python, steps of 20 ms",
    "gil": "one C call per step that holds the GIL for 250 ms",
}


def measure_swap(trainer: Trainer, *, repeats: int = 200, epochs: int = 10**6) -> dict[str, Any]:
    """From the server's decision to send a fresh model until the client in training has swapped it
    in, or a newer one that has overtaken it on the way. (Another client's uploads, every fifth of a
    second, are what makes the server decide.)"""
    spec = Spec("lenet", "pace:omega=0", clients=2, epochs=epochs)
    with ExitStack() as stack, serving(spec, ["busy", "other"]) as server:
        spawn = multiprocessing.get_context("spawn")
        over, (mine, theirs) = spawn.Event(), spawn.Pipe()
        folder = server.certs.parent / "busy"
        client = spawn.Process(target=_train, args=(trainer, server.address, folder, over, theirs))
        client.start()
        stack.callback(client.kill)
        _await(mine, "the client does not train")
        light = Light(server, ["other"], rest=0.2)
        stack.callback(light.close)
        light.connected()
        end = time.monotonic() + 0.3 * repeats + 60
        swapped = []
        while (updates := server.figures()["updates"]) < repeats and time.monotonic() < end:
            if mine.poll(0.1):
                swapped.append(mine.recv())
        light.end()
        while mine.poll(_SILENCE):
            swapped.append(mine.recv())
        over.set()
        client.join(PATIENCE)
        server.close()
    seconds = delays(server.multicasts, swapped)
    if len(seconds) < repeats // 2:
        raise PolytempoError(f"only {len(seconds)} of {updates:.0f} multicasts were swapped in")
    row = {"trainer": trainer, "what": TRAINERS[trainer], "swaps": len(seconds)}
    more = {"megabytes": 4e-6 * server.numbers, "overtaken": len(seconds) - len(swapped)}
    return {**row, **more, **percentiles(seconds)}


def delays(
    decided: Sequence[tuple[int, float]], swapped: Sequence[tuple[int, float]]
) -> list[float]:
    """From each decision until that model, or a newer one that has overtaken it, is swapped in."""
    found = []
    for number, begin in decided:
        ends = [end for newer, end in swapped if newer >= number]
        if ends:
            found.append(min(ends) - begin)
    return found


def _await(pipe: Connection, otherwise: str) -> Any:
    if not pipe.poll(PATIENCE):
        raise PolytempoError(f"{otherwise}; is the machine overloaded?")
    return pipe.recv()


def _train(kind: Trainer, address: str, folder: Path, over: Event, pipe: Connection) -> None:
    """The client in training, in a process of its own."""
    torch.set_num_threads(1)
    draws = torch.Generator().manual_seed(0)
    x, y = torch.rand(400, 3, 32, 32, generator=draws), torch.arange(400) % 10
    data = Federation.from_arrays([(x.numpy(), y.numpy())], problem="classification")
    problem = own_problem(make_config({}, "bench"), data)
    trainer: Any
    if kind == "python" or kind == "gil":
        trainer = _Holder(kind)
    else:
        trainer = SolverTrainer(data, problem, solver=kind)

    def watch(event: dict[str, Any]) -> None:
        if event["event"] == "swapped" and event["step"] is not None:
            pipe.send((event["dispatch"], time.monotonic()))
        elif event["event"] == "begun":
            pipe.send("begun")

    client = FleetClient(
        ClientNode("", problem_name(problem), data.samples[0], 5),
        trainer,
        folder,
        address,
        certificates=files_of(folder.parent / "certs", "busy"),
        watch=watch,
    )
    interrupted = threading.Event()

    def wait() -> None:
        over.wait()
        interrupted.set()

    threading.Thread(target=wait, daemon=True).start()
    client.run(interrupted)


class _Holder:
    """A trainer whose steps keep the interpreter to themselves: in plain Python, which lets other
    threads have it every 5 ms, or in a single call of C, which does not."""

    def __init__(self, kind: str) -> None:
        self.plain = kind == "python"
        begin = time.perf_counter()
        sum(range(10**7))
        self.count = int(0.25 * 10**7 / (time.perf_counter() - begin))

    def welcome(self, run: Mapping[str, Any]) -> None:
        pass

    def begin(self, dispatch: Dispatch, client: int, memory: Memory) -> _Holder:
        self.vector = dispatch.params.clone()
        return self

    def advance(self, steps: int) -> bool:
        for _ in range(steps):
            if self.plain:
                end = time.perf_counter() + 0.02
                while time.perf_counter() < end:
                    pass
            else:
                sum(range(self.count))
        return False

    def swap(self, dispatch: Dispatch) -> int:
        self.vector = dispatch.params.clone()
        return 0

    def shorten(self) -> None:
        pass

    def finish(self) -> tuple[torch.Tensor, Memory, Memory]:
        return self.vector, {}, {}

    def examine(self, examine: Examine, client: int, memory: Memory) -> tuple[Sums, Sums | None]:
        return {}, None

    def keep(self, params: torch.Tensor, memory: Memory) -> None:
        pass
