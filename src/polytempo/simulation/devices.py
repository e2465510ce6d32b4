"""How long things take in the simulated world: local training, and messages.

All times are virtual, in seconds, drawn from streams that are named by client and dispatch. They
never depend on how long the simulation itself takes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from polytempo.core.errors import PolytempoError
from polytempo.core.registry import Options, Registry
from polytempo.core.rng import rng
from polytempo.data import Federation

Positive = Annotated[float, Field(gt=0)]
Fraction = Annotated[float, Field(ge=0, le=1)]


def _in_order(low: float, high: float) -> None:
    if low > high:
        raise PolytempoError(f"low must not be above high, got low={low:g}, high={high:g}")


# -- devices: seconds of local training ---------------------------------------------------------


class Devices(Options):
    """Base of the device models: `unit` seconds per sample, times the device's factor, times a
    jitter of up to `jitter` drawn at each dispatch."""

    unit: Positive = 0.001
    jitter: Annotated[float, Field(ge=0)] = 0.1

    def factors(self, clients: int, seed: int) -> Sequence[float]:
        """How many times slower than the fastest each device is."""
        return [1.0] * clients

    def factors_among(self, federation: Federation, seed: int) -> Sequence[float]:
        """The same for the clients of a federation, where it depends on their data."""
        return self.factors(federation.clients, seed)

    def seconds(self, factor: float, work: float, stream: np.random.Generator) -> float:
        """Duration of one local training of `work` samples on a device of that factor."""
        return work * self.unit * factor * (1 + self.jitter * float(stream.random()))


DEVICES: Registry[Devices] = Registry("device model", Devices)


@DEVICES.register("equal")
class Equal(Devices):
    """All devices alike."""


class SomeSlow(Devices):
    """Base: a share `slow` of the devices is slower than the others.

    `by_label`: they are not drawn, but chosen by their data: those whose commonest label comes
    last, so that slow devices hold labels that fast ones hardly have.
    """

    slow: Fraction = 0.3
    by_label: bool = False

    @property
    def slower(self) -> float:
        """How many times slower."""
        raise NotImplementedError

    def factors(self, clients: int, seed: int) -> Sequence[float]:
        return self._factors(rng(seed, "devices").permutation(clients))

    def factors_among(self, federation: Federation, seed: int) -> Sequence[float]:
        if not self.by_label:
            return self.factors(federation.clients, seed)
        order = rng(seed, "devices").permutation(federation.clients)
        commonest = federation.label_counts().argmax(axis=1)
        return self._factors(order[np.argsort(-commonest[order], kind="stable")])

    def _factors(self, order: NDArray[np.int64]) -> list[float]:
        """The first in this order are slow."""
        factors = np.ones(len(order))
        factors[order[: round(self.slow * len(order))]] = self.slower
        return [float(f) for f in factors]


@DEVICES.register("two-speed")
class TwoSpeed(SomeSlow):
    """A share `slow` of the devices, chosen at random, is `factor` times slower (PACE, CASA).

    `by_label`: they are chosen by their data: those whose commonest label comes last.
    """

    factor: Positive = 5.0

    @property
    def slower(self) -> float:
        return self.factor


@DEVICES.register("severe")
class Severe(TwoSpeed):
    """30% of the devices are ten times slower (CASA's scenario B)."""

    factor: Positive = 10.0


@DEVICES.register("uniform")
class UniformSpeed(Devices):
    """Factors uniform between `low` and `high` (CASA's scenario A)."""

    low: Positive = 1.0
    high: Positive = 5.0

    def __post_init__(self) -> None:
        _in_order(self.low, self.high)

    def factors(self, clients: int, seed: int) -> Sequence[float]:
        return [float(f) for f in rng(seed, "devices").uniform(self.low, self.high, clients)]


@DEVICES.register("casa-default")
class CasaDefault(TwoSpeed):
    """CASA's usual scenario: 30% of the devices are five times slower."""


@DEVICES.register("casa-a")
class CasaA(UniformSpeed):
    """CASA's scenario A: factors uniform between 1 and 5."""


@DEVICES.register("casa-b")
class CasaB(Severe):
    """CASA's scenario B: 30% of the devices are ten times slower."""


@DEVICES.register("boards")
class Boards(Devices):
    """Jetson TX2, Jetson Nano and Raspberry Pi, as measured by CASA: 1, 1.8125 and 11.625."""

    def factors(self, clients: int, seed: int) -> Sequence[float]:
        return [float(f) for f in rng(seed, "devices").choice([1.0, 1.8125, 11.625], clients)]


@DEVICES.register("exponential")
class Exponential(Devices):
    """Each training lasts Exponential(mean `beta`) seconds, whatever the work (ACE)."""

    beta: Positive = 5.0

    def seconds(self, factor: float, work: float, stream: np.random.Generator) -> float:
        return float(stream.exponential(self.beta))


@DEVICES.register("mixed-exponential")
class MixedExponential(SomeSlow):
    """Each training lasts Exponential seconds, whatever the work: with a mean of `fast` for most
    clients, of `beta` for a share `slow` of them. Those report rarely, all the time: the imbalance
    that ACE is about, and that delays drawn alike for all do not have."""

    slow: Fraction = 0.2
    fast: Positive = 0.5
    beta: Positive = 5.0

    @property
    def slower(self) -> float:
        return self.beta / self.fast

    def seconds(self, factor: float, work: float, stream: np.random.Generator) -> float:
        return float(stream.exponential(self.fast if factor == 1 else self.beta))


# -- networks: seconds of a message -------------------------------------------------------------


class Network(Options):
    """Base: messages take no time."""

    def bandwidths(self, clients: int, seed: int) -> Sequence[float]:
        """Bytes per second of each client's link, both ways."""
        return [float("inf")] * clients


NETWORKS: Registry[Network] = Registry("network", Network)


@NETWORKS.register("instant")
class Instant(Network):
    """Messages take no time."""


@NETWORKS.register("uniform")
class Links(Network):
    """Each client's link has a bandwidth drawn uniformly between two values, in Mbit/s."""

    low: Positive
    high: Positive

    def __post_init__(self) -> None:
        _in_order(self.low, self.high)

    def bandwidths(self, clients: int, seed: int) -> Sequence[float]:
        drawn = rng(seed, "network").uniform(self.low, self.high, clients)
        return [float(mbit) * 1e6 / 8 for mbit in drawn]


@NETWORKS.register("wifi")
class WiFi(Links):
    """150 to 600 Mbit/s."""

    low: Positive = 150.0
    high: Positive = 600.0


@NETWORKS.register("4g")
class FourG(Links):
    """20 to 100 Mbit/s."""

    low: Positive = 20.0
    high: Positive = 100.0


@NETWORKS.register("5g")
class FiveG(Links):
    """50 to 1000 Mbit/s."""

    low: Positive = 50.0
    high: Positive = 1000.0
