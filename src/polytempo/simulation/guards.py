"""What a run says of privacy, attacks and defences."""

from __future__ import annotations

import importlib.util
from collections import Counter
from collections.abc import Mapping, Sequence
from statistics import median
from typing import TYPE_CHECKING, Any

from polytempo.core import events
from polytempo.core.attacks import ATTACKS, Attack
from polytempo.core.defences import DEFENCES, Defence
from polytempo.core.errors import PolytempoError
from polytempo.core.privacy import Gaussian
from polytempo.core.strategy import State
from polytempo.simulation.extension import Extension, Row

if TYPE_CHECKING:
    from polytempo.simulation.engine import Engine

FIGURES = ("privacy", "attack", "defence")
# Of Rényi divergences, from near 1 to about 1,000: epsilon is the least over them.
ORDERS = tuple(1 + 10 ** (x / 50) for x in range(-150, 151))


def require_accountant(mechanism: Gaussian) -> None:
    """Better before a run than after it."""
    if mechanism.noise and importlib.util.find_spec("opacus") is None:
        raise PolytempoError(
            '--dp needs Opacus, to account for privacy: pip install "polytempo[privacy]"'
        )


def epsilon(mechanism: Gaussian, uploads: int) -> float | None:
    """What a client has spent with so many uploads; None: there is no noise, so no bound."""
    if not mechanism.noise:
        return None if uploads else 0.0
    from opacus.accountants.analysis import rdp

    if not uploads:
        return 0.0
    # A rate of 1: no amplification by sampling, since the server knows who has sent what.
    spent = rdp.compute_rdp(
        q=1.0, noise_multiplier=mechanism.multiplier(), steps=uploads, orders=ORDERS
    )
    return float(rdp.get_privacy_spent(orders=ORDERS, rdp=spent, delta=mechanism.delta)[0])


def spent(
    mechanism: Gaussian, uploads: Sequence[int]
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Figures over clients that have uploaded so often each, and a row for each."""
    known = {count: epsilon(mechanism, count) for count in set(uploads)}
    each = [known[count] for count in uploads]
    bounded = [found for found in each if found is not None]
    unbounded = len(bounded) < len(each)
    figures = {
        "epsilon_max": None if unbounded else max(bounded),
        "epsilon_median": None if unbounded else median(bounded),
        "delta": mechanism.delta,
        "clip": mechanism.clip,
        "noise": mechanism.noise,
        "uploads_max": max(uploads),
    }
    rows = [
        {"client": client, "uploads": count, "epsilon": found}
        for client, (count, found) in enumerate(zip(uploads, each, strict=True))
    ]
    return figures, rows


class Account(Extension):
    """How much privacy each client has spent: by its uploads, those that got lost included."""

    name = "privacy"

    def __init__(self, mechanism: Gaussian, clients: int) -> None:
        self.mechanism, self.clients = mechanism, clients
        self.uploads: Counter[int] = Counter()
        require_accountant(mechanism)

    def happened(self, event: events.Event) -> None:
        if isinstance(event, events.Upload | events.Drop):
            self.uploads[event.client] += 1

    def _spent(self) -> tuple[dict[str, Any], list[dict[str, Any]]]:
        return spent(self.mechanism, [self.uploads[client] for client in range(self.clients)])

    def figures(self) -> dict[str, Any]:
        return {"privacy": self._spent()[0]}

    def tables(self) -> dict[str, Sequence[Row]]:
        return {"privacy": self._spent()[1]}

    def state_dict(self) -> State:
        return {"uploads": [list(pair) for pair in self.uploads.items()]}

    def load_state_dict(self, state: State) -> None:
        self.uploads = Counter(dict(state["uploads"]))


class Attackers(Extension):
    """Who attacks. (Whose models are tested is the engine's business: those of others.)"""

    name = "attack"

    def __init__(self, engine: Engine, attack: Attack) -> None:
        self.engine, self.attack = engine, attack

    def figures(self) -> dict[str, Any]:
        found = sorted(self.engine.attackers)
        share = len(found) / self.engine.federation.clients
        return {"attack": {**ATTACKS.describe(self.attack), "share": share, "clients": found}}


class Defended(Extension):
    """How often the defence has stepped in."""

    name = "defence"

    def __init__(self, defence: Defence) -> None:
        self.defence = defence

    def figures(self) -> dict[str, Any]:
        return {"defence": defended(self.defence)}


def defended(defence: Defence) -> Mapping[str, Any]:
    """What it is, and how many uploads it has changed."""
    counts = {"uploads": defence.uploads, "changed": defence.changed}
    return {**DEFENCES.describe(defence), **counts}
