"""A run as one of a method whose clients fine-tune what they are handed."""

import pytest

from polytempo import simulate
from polytempo.strategies import STRATEGIES

SETTINGS = {"model": "linear", "strategy": "fedavg", "lr": 0.05, "backend": "serial"}


def test_fine_tuning_takes_as_long_as_the_slowest_client(small):
    options = {"devices": "two-speed:factor=5,jitter=0", "adapt_epochs": 3, "eval_every": 8}
    result = simulate(small, updates=24, adapt_always=True, **SETTINGS, **options)
    engine = result.simulator
    later = max(
        3 * samples * factor * engine.devices.unit
        for samples, factor in zip(small.samples, engine.factors, strict=True)
    )
    assert result.adaptation_time == pytest.approx(later)
    tuned = result.fine_tuned()
    assert tuned.strategy == "fedavg + fine-tuning"
    assert tuned.simulated_time == pytest.approx(result.simulated_time + later)
    adapted = [row["accuracy_adapted"] for row in result.history[1:]]
    assert len(adapted) == 3 and [row["accuracy"] for row in tuned.history] == adapted
    assert tuned.value == tuned.accuracy == pytest.approx(sum(adapted) / 3)
    assert tuned.accuracy_best == max(adapted)
    assert tuned.accuracy_worst10 == result.history[-1]["accuracy_adapted_worst10"] <= adapted[-1]
    first = result.history[1]
    assert tuned.time_to(first["accuracy_adapted"]) == pytest.approx(first["time"] + later)
    assert result.strategy == "fedavg"  # which is left as it is


def test_a_run_without_adaptation_has_no_fine_tuned_form(small):
    result = simulate(small, updates=8, adapt_epochs=0, **SETTINGS)
    assert result.adaptation_time is None and result.fine_tuned() is None


def test_methods_made_for_fine_tuning_say_so():
    found = {name for name in STRATEGIES if STRATEGIES[name].to_fine_tune}
    assert found == {"fedbabu", "fedbabu-async", "per-fedavg", "per-fedavg-async"}
