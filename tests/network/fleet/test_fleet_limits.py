"""Rates, memory and admission."""

import asyncio
import json
import time

import pytest

from polytempo.core.errors import PolytempoError
from polytempo.network.fleet.admission import FILE, Admission, admit, revoke
from polytempo.network.fleet.limits import (
    Bucket,
    Budget,
    Keepalive,
    Limits,
    Share,
    limits_of,
)
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
        budget, order = Budget(10, 1.0, 10.0), []

        async def take(name, size):
            await budget.take(share := Share(name, size))
            order.append(name)
            return share

        first = await take("a", 6)
        tasks = [asyncio.create_task(take(*who)) for who in (("b", 8), ("c", 2), ("d", 1))]
        await asyncio.sleep(0)
        assert order == ["a"], "c would fit, and does not overtake b"
        tasks[0].cancel()
        _, *others = await asyncio.gather(*tasks, return_exceptions=True)
        assert order == ["a", "c", "d"] and budget.taken == 9
        for share in (first, *others):
            budget.give_back(share)
        assert budget.taken == 0

    asyncio.run(main())


class Uploads:
    """Clients that upload, on a clock of their own. `lost`: who has lost a turn, in this order."""

    def __init__(self, size, contended=1e6):
        self.now, self.lost = 0.0, []
        self.budget = Budget(size, contended, patience=10.0, clock=lambda: self.now)
        self.under_way, self._tasks = {}, []  # name: its share, and its bytes per second

    async def offer(self, name, size, rate):
        """Begin an upload, or wait for one's turn."""

        async def begin():
            await self.budget.take(share := Share(name, int(size)))
            self.under_way[name] = share, rate

        self._tasks.append(asyncio.create_task(begin()))
        await asyncio.sleep(0)

    async def wait(self, seconds):
        """Time passes, half a second at a time: who is done?"""
        done = []
        for _ in range(round(2 * seconds)):
            self.now += 0.5
            for name, (share, rate) in [*self.under_way.items()]:
                share.missing = max(0, share.missing - int(rate / 2))
                if not share.missing:
                    done.append(name)
                    self.budget.give_back(share, done=True)
                    del self.under_way[name]
            for share in self.budget.too_slow():
                self.lost.append(share.name)
                self.budget.give_back(share)
                del self.under_way[share.name]
            await asyncio.sleep(0)  # for those whose turn has come
        return done


MBIT = 125_000  # bytes per second


def test_while_nobody_waits_nobody_loses_a_turn():
    async def main():
        uploads = Uploads(2**30)
        await uploads.offer("slow line", 45e6, MBIT)
        await uploads.offer("silent", 900e6, 0)
        assert await uploads.wait(3_600) == ["slow line"]
        assert uploads.lost == [] and "silent" in uploads.under_way

    asyncio.run(main())


def test_who_sends_nothing_loses_its_turn_to_one_that_waits():
    """Eleven colluders hold all the memory; they could for size / `slowest`, which is three
    hours. Somebody with a slow line, and somebody with a fast one, are under way meanwhile."""

    async def main():
        uploads = Uploads(11 * 90e6 + 90e6)
        await uploads.offer("slow line", 45e6, MBIT)
        await uploads.offer("fast line", 45e6, 1.1e6)
        for k in range(11):
            await uploads.offer(k, 90e6, 0)
        await uploads.wait(20)
        await uploads.offer("honest", 45e6, 10e6)
        assert await uploads.wait(9.5) == [] and uploads.lost == [], "not yet"
        assert await uploads.wait(5.5) == ["honest"]
        assert uploads.lost in [[k] for k in range(11)], "one colluder makes room enough"
        assert {"slow line", "fast line"} < {*uploads.under_way}

    asyncio.run(main())


def test_who_makes_enough_bytes_per_second_keeps_its_turn():
    async def main():
        uploads = Uploads(90e6)
        await uploads.offer("enough", 90e6, 1e6)
        await uploads.offer("waits", 45e6, 10e6)
        assert await uploads.wait(95) == ["enough", "waits"] and uploads.lost == []

    asyncio.run(main())


def test_small_uploads_do_not_shield_large_ones():
    async def main():
        uploads = Uploads(90e6 + 400)
        await uploads.offer("large", 90e6, 0)
        await uploads.wait(0.5)  # it is not the newest
        for k in range(50):
            await uploads.offer(k, 8, 0)
        await uploads.offer("honest", 45e6, 90e6)
        assert await uploads.wait(11) == ["honest"] and "large" in uploads.lost

    asyncio.run(main())


def test_who_has_lost_a_turn_waits_behind_those_who_have_not():
    async def main():
        uploads = Uploads(100)
        await uploads.offer("evil", 100, 0)
        await uploads.offer("a", 100, 200)
        await uploads.wait(10)
        assert uploads.lost == ["evil"] and [*uploads.under_way] == ["a"]
        await uploads.offer("evil", 100, 200)
        await uploads.offer("b", 100, 200)
        assert await uploads.wait(1.5) == ["a", "b", "evil"]
        await uploads.offer("b", 100, 200)
        await uploads.offer("evil", 100, 200)
        await uploads.offer("a", 100, 200)
        assert await uploads.wait(1.5) == ["b", "evil", "a"], "an update of it was in: forgiven"

    asyncio.run(main())


def test_more_colluders_than_places_cost_an_honest_client_two_looks():
    """They come back at once, each time. Until all of them have lost a turn, it may be more."""

    async def main():
        uploads = Uploads(1000)
        for k in range(30):
            await uploads.offer(k, 100, 0)
        for again in range(40):
            await uploads.offer("honest", 50, 100)
            begin, lost = uploads.now, len(uploads.lost)
            while not await uploads.wait(0.5):
                for name in uploads.lost[lost:]:
                    await uploads.offer(name, 100, 0)
                lost = len(uploads.lost)
                # The first time 20 are in line before it, and every fourth turn is for others.
                most = 21.0 if again else 28 * 10.5 + 1
                assert uploads.now - begin <= most, f"upload {again} has to wait"

    asyncio.run(main())


def test_those_who_have_lost_a_turn_are_not_starved():
    """Others offer again and again, so that there is always one of them in line."""

    async def main():
        uploads, done = Uploads(100), []
        await uploads.offer("slow", 100, 5)
        await uploads.offer("a", 100, 200)
        await uploads.wait(10)
        assert uploads.lost == ["slow"]
        await uploads.offer("slow", 100, 50)
        await uploads.offer("b", 100, 200)
        for _ in range(40):
            done += (new := await uploads.wait(0.5))
            for name in new:
                if name != "slow":
                    await uploads.offer(name, 100, 200)
        assert done.count("slow") == 1 and len(done) > 20
        assert done.index("slow") <= 4

    asyncio.run(main())


def test_silent_ones_lose_their_turns_even_if_others_have_theirs():
    """Nine of ten places are held by colluders; through the tenth a long line moves on."""

    async def main():
        uploads = Uploads(1000, contended=10.0)
        for k in range(9):
            await uploads.offer(k, 100, 0)
        for k in range(60):
            await uploads.offer(f"honest {k}", 100, 20)  # five seconds each
        done = []
        while len(done) < 60:
            done += await uploads.wait(1)
            assert uploads.now < 120, "one after another it would be 300 s"
        assert {*uploads.lost} <= {*range(9)}

    asyncio.run(main())


def test_who_gives_up_a_turn_that_others_wait_for_waits_behind_them():
    async def main():
        uploads = Uploads(100)
        await uploads.offer("evil", 100, 0)
        await uploads.offer("a", 100, 200)
        await uploads.wait(9)
        uploads.budget.give_back(uploads.under_way.pop("evil")[0])
        await uploads.offer("evil", 100, 0)
        await uploads.offer("b", 100, 200)
        assert await uploads.wait(1.5) == ["a", "b"]

    asyncio.run(main())


def test_nobody_loses_a_turn_in_vain():
    async def main():
        uploads = Uploads(1000, contended=1.0)
        await uploads.offer("fast enough", 900, 2)
        await uploads.offer("slow", 100, 0)
        await uploads.offer("large", 500, 0)
        await uploads.wait(60)
        assert uploads.lost == [] and "slow" in uploads.under_way

    asyncio.run(main())


def test_where_all_are_slow_nearly_all_uploads_come_to_an_end():
    """Ten places, a hundred honest clients with 45 MB and a line of 1 Mbit/s, all at once: whoever
    loses its turn has hardly begun."""

    async def main():
        uploads = Uploads(10 * 45e6)
        for name in range(100):
            await uploads.offer(name, 45e6, MBIT)
        done, lost = [], 0
        for _ in range(720):
            done += await uploads.wait(5)
            for name in uploads.lost[lost:]:
                await uploads.offer(name, 45e6, MBIT)
            lost = len(uploads.lost)
        assert len(done) >= 80, "undisturbed it would be 100"

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
