"""Rates, memory and admission."""

import asyncio
import json
import time

import pytest

from polytempo.core.errors import PolytempoError
from polytempo.network.fleet.admission import FILE, Admission, admit, revoke
from polytempo.network.fleet.limits import Bucket, Budget, Keepalive, Limits, limits_of
from polytempo.network.fleet.security import check_address


def test_a_bucket_gives_a_burst_and_then_its_rate():
    bucket = Bucket(rate=100.0, burst=3)
    assert [bucket.take() for _ in range(3)] == [0.0] * 3
    assert 0 < bucket.take() <= 0.01
    assert 0 < bucket.take() <= 0.02
    time.sleep(0.1)
    assert bucket.full and bucket.take() == 0.0


def test_a_budget_is_first_come_first_served():
    async def main():
        budget, order = Budget(10), []

        async def take(name, size):
            await budget.take(size)
            order.append(name)

        await take("a", 6)
        tasks = [asyncio.create_task(take(*who)) for who in (("b", 8), ("c", 2), ("d", 1))]
        await asyncio.sleep(0)
        assert order == ["a"], "c would fit, and does not overtake b"
        tasks[0].cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        assert order == ["a", "c", "d"] and budget.taken == 9
        budget.give_back(9)
        assert budget.taken == 0

    asyncio.run(main())


def test_limits_are_settings_with_the_usual_ones_as_defaults():
    assert limits_of({}) == Limits()
    found = limits_of({"messages": 20, "memory": 4e9, "ping_after": 20, "ping_timeout": 2.5})
    assert found == Limits(messages=20.0, memory=4 * 10**9, keepalive=Keepalive(20_000, 2_500))
    assert type(found.memory) is int and type(found.messages) is float


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"message": 3}, "unknown limit 'message'.*messages"),
        ({"keepalive": 3}, "unknown limit 'keepalive'"),
        ({"connections": 0}, "connections = 0: give a number above 0"),
        ({"connections": 1.5}, "connections = 1.5: give a whole number"),
        ({"memory": float("inf")}, "memory = inf"),
        ({"slowest": "fast"}, "slowest = 'fast'"),
        ({"waiting": True}, "waiting = True"),
    ],
)
def test_what_is_no_limit_is_said(given, said):
    with pytest.raises(PolytempoError, match=said):
        limits_of(given)


def test_admission_is_a_file_that_anybody_can_read(tmp_path):
    admission = Admission(tmp_path)
    assert admission.refusal("a") is None and not admission.changed()
    revoke(tmp_path, "a")
    assert admission.refusal("a") is None, "until it is looked at"
    assert admission.changed() and "revoked" in admission.refusal("a")
    assert json.loads((tmp_path / FILE).read_text()) == {
        "policy": "certified",
        "admitted": [],
        "revoked": ["a"],
    }
    admit(tmp_path, "a")
    assert admission.changed() and admission.refusal("a") is None
    assert not admission.changed()


def test_a_list_survives_a_restart(tmp_path):
    Admission(tmp_path, "listed")
    admit(tmp_path, "a")
    again = Admission(tmp_path)
    assert again.refusal("a") is None and "polytempo admit b" in again.refusal("b")


@pytest.mark.parametrize("text", ["", "{}", '{"policy": "none", "admitted": [], "revoked": []}'])
def test_a_damaged_file_is_an_error_at_the_start_and_ignored_later(tmp_path, text):
    admission = Admission(tmp_path)
    revoke(tmp_path, "a")
    assert admission.changed()
    (tmp_path / FILE).write_text(text)
    assert not admission.changed() and admission.refusal("a") is not None
    with pytest.raises(PolytempoError, match=r"cannot be read; expected"):
        Admission(tmp_path)


@pytest.mark.parametrize("name", ["", "../x", "a/b", "a" * 65, "a b"])
def test_a_name_is_a_name(tmp_path, name):
    with pytest.raises(PolytempoError, match="invalid client name"):
        admit(tmp_path, name)


@pytest.mark.parametrize("address", ["", "127.0.0.1", ":7448", "host:99999", "tls/host:1", "a b:1"])
def test_an_address_is_host_and_port(address):
    with pytest.raises(PolytempoError, match="HOST:PORT"):
        check_address("--listen", address, secure=True)


def test_addresses():
    assert check_address("--listen", "[::1]:7448", secure=False) == ("::1", 7448)
    assert check_address("--connect", "host.example:7448", secure=True) == ("host.example", 7448)
    for address in ("host.example:1", "10.0.0.1:1", "0.0.0.0:1"):
        with pytest.raises(PolytempoError, match="without certificates"):
            check_address("--connect", address, secure=False)
