"""`--check` finds strategies that would not resume as they were."""

from collections import Counter, deque
from typing import ClassVar

import pytest
import torch
from torch import nn

from polytempo import PolytempoError, Strategy, Task
from polytempo.simulation import DROPOUTS, Simulator
from polytempo.strategies import STRATEGIES


class Momentum(Strategy):
    """A server with momentum, whose `state` is for the tests below to choose."""

    name: ClassVar[str] = "momentum"
    state: ClassVar[tuple[str, ...]] = ("model", "velocity")

    def setup(self, context):
        super().setup(context)
        self.model, self.velocity = context.initial, torch.zeros_like(context.initial)

    def model_for(self, client):
        return self.model

    def fold(self, update, staleness):
        self.velocity = 0.9 * self.velocity + 0.1 * (update.vector - self.model)
        self.model = self.model + self.velocity
        return True


class NoVelocity(Momentum):
    state: ClassVar = ("model",)


class NoModel(Momentum):
    state: ClassVar = ("velocity",)


class Buffered(Momentum):
    """What is forgotten has no effect before the fifth update."""

    state: ClassVar = ("model",)

    def setup(self, context):
        super().setup(context)
        self.waiting = deque()
        self.used = 0

    def fold(self, update, staleness):
        self.waiting.append(update.vector)
        self.used += 1
        if len(self.waiting) < 5:
            return False
        self.model = torch.stack(list(self.waiting)).mean(0)
        self.waiting.clear()
        return True


class Cached(Momentum):
    """Has a cache that is not in its state, and need not be."""

    def fold(self, update, staleness):
        self.cache = update.vector
        return super().fold(update, staleness)


class InPlace(Momentum):
    """Changes the model that clients are training."""

    def fold(self, update, staleness):
        self.model += 0.1 * (update.vector - self.model)
        return True


class Counted(Momentum):
    """Remembers who has reported in something that does not outlive a file as it is."""

    state: ClassVar = ("model", "velocity", "reports")
    kind: ClassVar[type]

    def setup(self, context):
        super().setup(context)
        self.reports = self.kind()


class InASet(Counted):
    kind: ClassVar = set

    def fold(self, update, staleness):
        self.reports.add(update.client)
        return super().fold(update, staleness)


class InACounter(Counted):
    kind: ClassVar = Counter

    def fold(self, update, staleness):
        self.reports[str(update.client)] += 1
        return super().fold(update, staleness)


def run(strategy, small, updates=20, **options):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        module = nn.Linear(12, 4)
    task = Task(epochs=1, batch_size=8, lr=0.05)
    simulator = Simulator(small, module, strategy, task=task, adapt_epochs=0, seed=0, **options)
    simulator.run(updates)
    return simulator


@pytest.mark.parametrize(
    ("strategy", "updates", "words"),
    [
        (NoVelocity(), 1, ["velocity", "another model"]),
        (NoModel(), 1, ["model", "another model"]),
        (Buffered(), 4, ["waiting", "another model"]),
    ],
)
def test_what_the_state_lacks_is_named_as_soon_as_it_has_an_effect(small, strategy, updates, words):
    with pytest.raises(PolytempoError) as caught:
        run(strategy, small, check=True)
    text = str(caught.value)
    assert "\n" not in text
    assert "would not resume as it was" in text
    assert f"restored after {updates} updates" in text
    before, _, lacking = text.partition("which lacks ")
    assert words[0] in lacking.partition(" (")[0].split(", ")
    assert words[1] in before
    run(strategy, small)  # nobody looks, and nobody complains


def test_what_a_checkpoint_cannot_hold_is_named(small):
    with pytest.raises(
        PolytempoError, match="state/strategy/reports cannot be saved: it is of type set"
    ):
        run(InASet(), small, check=True)


def test_what_comes_back_as_something_else_is_found_where_it_fails(small):
    words = r"restored after 0 updates, it fails with KeyError\(.*any mapping as a plain dict"
    with pytest.raises(PolytempoError, match=words) as caught:
        run(InACounter(), small, check=True)
    assert isinstance(caught.value.__cause__, KeyError)


@pytest.mark.parametrize("strategy", [Momentum(), Cached()])
def test_a_state_that_is_complete_passes_and_changes_nothing(small, strategy):
    checked = run(strategy, small, updates=80, check=True)
    assert checked.updates == 80
    assert checked.fingerprint == run(strategy, small, updates=80).fingerprint


@pytest.mark.parametrize("strategy", ["fedbuff:buffer_size=3", "pace:omega=20", "casa", "fedavg"])
def test_runs_with_losses_multicasts_and_newcomers_pass(small, strategy):
    for dropout in ("drop:probability=0.3", "leave:at=2", "join:share=0.3,updates=10"):
        given = {"check": True, "dropout": DROPOUTS.create(dropout)}
        checked = run(STRATEGIES.create(strategy), small, updates=40, **given)
        assert checked.updates > 0


def test_with_a_diagnosis_it_is_the_strategy_that_is_restored(small):
    run(STRATEGIES.create("fedbuff:buffer_size=3"), small, check=True, diagnose=5)
    with pytest.raises(PolytempoError, match="velocity"):
        run(type("Single", (NoVelocity,), {"single_model": True})(), small, check=True, diagnose=5)


def test_a_model_that_is_changed_while_clients_train_it_is_noticed_without_a_check(small):
    with pytest.raises(PolytempoError, match="InPlace changed a model in place after sending it"):
        run(InPlace(), small, concurrency=3)
    run(InPlace(), small, concurrency=1)  # where nobody trains it, it may
