"""Learning-rate schedules: pure functions of a count, and what a server does with one."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from polytempo import Context, PolytempoError, Server, Task, Update
from polytempo.core.schedule import LEAST, SCHEDULES
from polytempo.strategies import FedAsync

EVERY = ["constant", "exponential", "steps:at=[3,8]", "cosine:updates=50"]


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        ("constant", {0: 1.0, 10_000: 1.0}),
        ("exponential:gamma=0.99,every=10", {0: 1.0, 9: 1.0, 10: 0.99, 29: 0.99**2, 30: 0.99**3}),
        ("steps:at=[3,8],gamma=0.5", {0: 1.0, 2: 1.0, 3: 0.5, 7: 0.5, 8: 0.25, 99: 0.25}),
        ("steps:at=[2]", {1: 1.0, 2: 0.1}),
        ("cosine:updates=10,floor=0.2", {0: 1.0, 5: 0.6, 10: 0.2, 11: 0.2, 500: 0.2}),
    ],
)
def test_factors_worked_out_by_hand(spec, expected):
    schedule = SCHEDULES.create(spec)
    assert {t: schedule.factor(t) for t in expected} == pytest.approx(expected)


@given(st.sampled_from(EVERY), st.integers(0, 10**7))
def test_a_factor_never_rises_and_never_reaches_zero(spec, t):
    schedule = SCHEDULES.create(spec)
    assert 1.0 == schedule.factor(0) >= schedule.factor(t) >= schedule.factor(t + 1) >= LEAST


@pytest.mark.parametrize("spec", EVERY)
def test_a_schedule_is_described_by_its_table(spec):
    schedule = SCHEDULES.create(spec)
    assert SCHEDULES.create(SCHEDULES.describe(schedule)) == schedule


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("steps", "'at' is required"),
        ("cosine", "'updates' is required"),
        ("exponential:gamma=0", "gamma"),
        ("exponential:every=0", "every"),
        ("steps:at=[0]", "at"),
        ("cosine:updates=5,floor=0", "floor"),
        ("linear", "no learning-rate schedule is called 'linear'"),
    ],
)
def test_a_mistake_is_named(spec, message):
    with pytest.raises(PolytempoError, match=message):
        SCHEDULES.create(spec)


def test_the_rate_that_is_sent_follows_the_updates_folded_and_comes_back_with_the_update():
    """A task keeps the rate that it was sent with, whatever the schedule says when it is done."""

    class Spy(FedAsync):
        def fold(self, update, staleness):
            rates.append((update.client, update.task.lr))
            return super().fold(update, staleness)

    rates: list[tuple[int, float]] = []
    schedule = SCHEDULES.create("steps:at=[1,3],gamma=0.5")
    context = Context(torch.zeros(4), [10] * 3, Task(lr=0.8), seed=0)
    server = Server(Spy(), context, refill="same", schedule=schedule)
    sent = {action.client: action for action in server.join(range(3))}

    def send_back(client):
        [sent[client]] = server.receive(Update(client, sent[client].number, torch.ones(4), 10))
        return sent[client].task.lr

    assert [action.task.lr for action in sent.values()] == [0.8] * 3
    assert [send_back(client) for client in (0, 0, 1)] == [0.4, 0.4, 0.2]
    assert send_back(2) == 0.2
    assert rates == [(0, 0.8), (0, 0.4), (1, 0.8), (2, 0.8)]
    assert context.task.lr == 0.8  # the rate that was set
    assert math.isclose(server.strategy.task(0).lr, 0.8)  # a strategy need not know


def test_what_was_sent_is_kept_over_a_checkpoint():
    schedule = SCHEDULES.create("exponential:gamma=0.5,every=1")
    context = Context(torch.zeros(4), [10] * 2, Task(lr=0.8), seed=0)

    def build():
        return Server(FedAsync(), context, refill="same", schedule=schedule)

    server = build()
    sent = {action.client: action for action in server.join(range(2))}
    server.receive(Update(0, sent[0].number, torch.ones(4), 10))
    again = build()
    again.load_state_dict(server.state_dict())
    assert {c: [o.task.lr for o in sents] for c, sents in again.open.items()} == {
        0: [0.4],
        1: [0.8],
    }
