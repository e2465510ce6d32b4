"""Why is a run bad? The error of the server's steps, taken apart (ACE, Sec. 3.3).

A method with a single model moves it by `-eta u`, where u should be the gradient of the mean loss
`F = (1/n) sum_i F_i`. The error `u - grad F(w)` is the sum of three:

    A = u - ubar                    sampling noise: mini-batches instead of all of a client's data
    B = ubar - grad F(w_stale)      bias: some clients count more than others, or drift apart in
                                    several local steps
    C = grad F(w_stale) - grad F(w) delay: gradients were taken at models of the past

with ubar what u would be if clients took every step on all of their data, and `grad F(w_stale)` the
mean over all clients of the exact gradient at the model behind each client's latest upload.

The strategy itself says what ubar and eta are, so this works for all of them: *shadows* of the
strategy run alongside it, objects of the same class that get the same calls with other numbers.
One is given such exact uploads: its steps are `-eta ubar`. One lives in n dimensions, where
client i's gradient is the i-th unit vector: its steps say with which weight each client counts, and
their sum is eta. Nothing of this touches the run.

A strategy whose weights depend on the uploads (PORT), or that is not linear in them (ASAFL, FedAC),
is described approximately; if a probe of twice the size does not take a step of twice the length,
eta is chosen such that u fits the stale gradient best.
"""

from __future__ import annotations

import dataclasses
import time as wall
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
from torch import Tensor

from polytempo.core.bank import PLAIN_STORAGE, FloatArray, ModelBank
from polytempo.core.errors import PolytempoError
from polytempo.core.messages import Dispatch, InFlights, Staleness, Update
from polytempo.core.objective import Plain
from polytempo.core.strategy import State, Strategy
from polytempo.simulation.extension import Extension, Row
from polytempo.strategies.fedac import effective_steps
from polytempo.training import Job

if TYPE_CHECKING:
    from polytempo.simulation.simulator import Simulator

TERMS = ("noise", "bias", "delay", "error", "gradient")  # squared lengths


class Diagnosis(Extension):
    """Runs the shadows alongside the strategy, and measures.

    `rows` holds a measurement for the first step after every N arrivals, `influence` each
    client's share in all steps so far.
    """

    name = "diagnosis"

    def __init__(self, simulator: Simulator, every: int) -> None:
        self.simulator, self.every = simulator, every
        self.strategy: Strategy = simulator.strategy
        if not self.strategy.single_model:
            raise PolytempoError(
                f"--diagnose needs a strategy with one model for all; {self.strategy.name} has one "
                "per client"
            )
        context = dataclasses.replace(simulator.server.context, storage=PLAIN_STORAGE)
        self.clients = context.clients
        unit = torch.zeros(self.clients, dtype=torch.float64)
        task = self.strategy.task(0)
        if task.upload != "gradient":
            task.plain_sgd("--diagnose")
        if task.extras:
            raise PolytempoError(
                f"--diagnose does not know what clients of {self.strategy.name} upload beside "
                f"their models ({', '.join(task.extras)}); use it with another strategy "
                "(descant: hold_out=0)"
            )
        self.exact = self._shadow(context)
        self.probe, self.double = (
            self._shadow(dataclasses.replace(context, initial=unit)) for _ in range(2)
        )
        self.gradients = ModelBank(self.clients, torch.zeros_like(context.initial))
        self.anchors: dict[int, list[Tensor]] = {}  # what the shadows would have sent along
        self.rows: list[dict[str, Any]] = []
        self.arrivals = 0

    def _shadow(self, context: Any) -> Strategy:
        shadow = dataclasses.replace(self.strategy)  # the same options, nothing else
        shadow.setup(context)
        return shadow

    @property
    def shadows(self) -> tuple[Strategy, Strategy, Strategy]:
        return self.exact, self.probe, self.double

    @property
    def everybody(self) -> tuple[Strategy, ...]:
        return self.strategy, *self.shadows

    def stand_in(self) -> Strategy:
        """What the server is given in place of the strategy."""
        return cast(Strategy, Shadowed(self))

    # -- measuring ------------------------------------------------------------------------------

    def started(self) -> None:
        """Everybody's gradient at the initial model."""
        self._set_gradients(self.strategy.model_for(0))

    @property
    def influence(self) -> FloatArray:
        """Each client's share in how far the model was moved, all steps together."""
        moved = -self.probe.model_for(0).numpy()
        total = moved.sum()
        return np.asarray(moved / total if total else np.zeros(self.clients), dtype=np.float64)

    def _other_uploads(self, update: Update) -> list[Tensor]:
        """What the shadows get in place of this update."""
        client, samples = update.client, self.simulator.federation.samples[update.client]
        job = self.simulator.flights[client].job
        task = job.task
        whole = dataclasses.replace(  # as many steps, each on all data
            task, batch_size=max(2, samples), steps=task.total_steps(samples)
        )
        anchors = self.anchors.pop(client)
        noiseless = dataclasses.replace(
            job,
            task=whole,
            stream=("exact", client, self.arrivals),
            vectors={"anchor": anchors[0]} if anchors else {},
        )
        self.simulator.backend.expect(noiseless, -1.0)
        [gradient] = self._exact_gradients([client], job.params)
        self.gradients.set(client, gradient)
        exact = self.simulator.backend.train(noiseless)
        units = []
        for k, size in ((1, 1.0), (2, 2.0)):
            unit = torch.zeros(self.clients, dtype=torch.float64)
            unit[client] = size
            if anchors:
                task.objective.add_gradient(torch.zeros_like(unit), anchors[k], unit)
            units.append(unit)
        if task.upload in ("gradient", "path"):
            return [exact, *units]
        reach = task.lr * effective_steps(task, samples)  # where a gradient of 1 leads
        units = [-reach * unit for unit in units]
        if task.upload == "delta":
            return [exact, *units]
        away = exact - self.strategy.model_for(0)
        return [
            shadow.model_for(0) + move
            for shadow, move in zip(self.shadows, (away, *units), strict=True)
        ]

    def fold(self, update: Update, staleness: Staleness) -> bool:
        with self._aside():
            uploads = self._other_uploads(update)
        self.arrivals += 1
        given = [update, *(dataclasses.replace(update, vector=vector) for vector in uploads)]
        return self.step(lambda strategy, k: strategy.fold(given[k], staleness))

    def step(self, call: Callable[[Strategy, int], bool]) -> bool:
        """Call the strategy and its shadows, and measure if a measurement is due."""
        everybody = self.everybody
        before = [strategy.model_for(0) for strategy in everybody]
        changed, *_ = [call(strategy, k) for k, strategy in enumerate(everybody)]
        last = self.rows[-1]["updates"] if self.rows else 0
        if changed and self.arrivals // self.every > last // self.every:
            steps = [
                model - strategy.model_for(0)
                for model, strategy in zip(before, everybody, strict=True)
            ]
            with self._aside():
                self._measure(before[0], *steps)
        return changed

    def _measure(
        self, model: Tensor, step: Tensor, exact: Tensor, probe: Tensor, double: Tensor
    ) -> None:
        stale = self.gradients.weighted_sum(np.full(self.clients, 1 / self.clients)).double()
        gradients = self._exact_gradients(range(self.clients), model)
        current = torch.stack([gradient.double() for gradient in gradients]).mean(0)
        eta = float(probe.sum())
        if abs(float(double.sum()) - 2 * eta) > 1e-6 * abs(eta):
            eta = float(exact.double() @ stale / (stale @ stale).clamp_min(1e-30))
        if not eta:
            return
        u, ubar = step.double() / eta, exact.double() / eta
        self.rows.append(
            {
                "updates": self.arrivals,
                "time": self.simulator.time,
                "noise": float((u - ubar).square().sum()),
                "bias": float((ubar - stale).square().sum()),
                "delay": float((stale - current).square().sum()),
                "error": float((u - current).square().sum()),
                "gradient": float(current.square().sum()),
                "step": eta,
            }
        )

    def _set_gradients(self, model: Tensor) -> None:
        for client, gradient in enumerate(self._exact_gradients(range(self.clients), model)):
            self.gradients.set(client, gradient)

    def _exact_gradients(self, clients: Sequence[int], model: Tensor) -> list[Tensor]:
        """The gradient of each client's loss (weight decay included) over all of its data."""
        simulator = self.simulator
        jobs = []
        for client in clients:
            task = dataclasses.replace(
                simulator.server.context.task,
                batch_size=max(2, simulator.federation.samples[client]),
                objective=Plain(),
                upload="gradient",
            )
            stream, memory = ("diagnose", client, self.arrivals), simulator.own_part(client)
            jobs.append(Job(client, model, task, stream, memory=memory))
        for job in jobs:
            simulator.backend.expect(job, -1.0)  # ahead of all training
        return [simulator.backend.train(job) for job in jobs]

    def _aside(self) -> _Aside:
        return _Aside(self.simulator.wall)

    # -- what there is to show ------------------------------------------------------------------

    def figures(self) -> dict[str, Any]:
        """Means over the measurements, and the clients' shares of influence."""
        if not self.rows:
            return {}
        means = {term: sum(row[term] for row in self.rows) / len(self.rows) for term in TERMS}
        rest = {"influence": self.influence.tolist(), "measurements": len(self.rows)}
        return {"diagnosis": means | rest}

    def tables(self) -> dict[str, Sequence[Row]]:
        return {"diagnosis": self.rows}

    def plots(self) -> dict[str, dict[str, Any]]:
        if not self.rows:
            return {}
        return {"diagnosis": {"rows": self.rows, "influence": self.influence.tolist()}}

    # -- checkpoints ----------------------------------------------------------------------------

    def state_dict(self) -> State:
        return {
            "shadows": {str(k): shadow.state_dict() for k, shadow in enumerate(self.shadows)},
            "gradients": self.gradients.state_dict(),
            "anchors": {str(client): anchors for client, anchors in self.anchors.items()},
            "rows": self.rows,
            "arrivals": self.arrivals,
        }

    def load_state_dict(self, state: State) -> None:
        for k, shadow in enumerate(self.shadows):
            shadow.load_state_dict(state["shadows"][str(k)])
        self.gradients.load_state_dict(state["gradients"])
        self.anchors = {int(client): anchors for client, anchors in state["anchors"].items()}
        self.rows, self.arrivals = list(state["rows"]), state["arrivals"]


class Shadowed:
    """Stands in for the strategy at the server: answers its queries, and passes every notification
    on, to the shadows too."""

    def __init__(self, diagnosis: Diagnosis) -> None:
        self.diagnosis, self.strategy = diagnosis, diagnosis.strategy

    def __getattr__(self, name: str) -> Any:
        return getattr(self.strategy, name)

    def dispatched(self, dispatch: Dispatch) -> None:
        client, shadows = dispatch.client, self.diagnosis.shadows
        self.strategy.dispatched(dispatch)
        sent = [
            dataclasses.replace(
                dispatch, params=shadow.model_for(client), vectors=shadow.vectors_for(client)
            )
            for shadow in shadows
        ]
        anchors = [each.vectors["anchor"] for each in sent if "anchor" in each.vectors]
        self.diagnosis.anchors[client] = anchors
        for shadow, theirs in zip(shadows, sent, strict=True):
            shadow.dispatched(theirs)

    def fold(self, update: Update, staleness: Staleness) -> bool:
        return self.diagnosis.fold(update, staleness)

    def close_cohort(self) -> bool:
        return self.diagnosis.step(lambda strategy, k: strategy.close_cohort())

    def lost(self, client: int) -> None:
        self.diagnosis.anchors.pop(client, None)
        for strategy in self.diagnosis.everybody:
            strategy.lost(client)

    def left(self, client: int) -> None:
        self.diagnosis.anchors.pop(client, None)
        for strategy in self.diagnosis.everybody:
            strategy.left(client)

    def training(self, in_flight: InFlights) -> None:
        for strategy in self.diagnosis.everybody:
            strategy.training(in_flight)


class _Aside:
    """Time spent here counts as evaluation, not as the server's."""

    def __init__(self, clock: dict[str, float]) -> None:
        self.clock = clock

    def __enter__(self) -> None:
        self.begin = wall.perf_counter()

    def __exit__(self, *error: object) -> None:
        spent = wall.perf_counter() - self.begin
        self.clock["server"] -= spent
        self.clock["evaluation"] += spent
