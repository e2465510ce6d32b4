"""The benchmark of a fleet measures what it says it measures."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

pytest.importorskip("grpc")

import polytempo.bench.fleet as fleet
import polytempo.bench.fleet_light as light
from polytempo.bench.fleet_swap import delays
from polytempo.cli import app
from polytempo.network.fleet import fleet_pb2 as pb
from polytempo.network.fleet.reading import Reader, read_from_client
from solving import HAS_COMPILER


def test_a_light_update_is_one_that_the_server_reads():
    numbers = 100_003  # two chunks
    size, frames = light.frames_of(numbers)
    reader = Reader(pb.FromClient, 10**7)
    payload = pb.Payload(id=1, bytes=size)
    upload = pb.Upload(number=3, samples=10, seconds=1.0, payload=payload)
    assert reader.take(pb.FromClient(upload=upload).SerializeToString()) is None
    [*first, last] = [reader.take(frame) for frame in frames]
    assert first == [None] and last is not None
    found = read_from_client(last, numbers, torch.float32)
    assert found.number == 3 and torch.equal(found.vector, torch.full((numbers,), 0.001))


def test_light_clients_do_without_torch():
    script = Path(light.__file__)
    code = f"import runpy, sys; runpy.run_path({str(script)!r}); print('torch' in sys.modules)"
    source = str(Path(fleet.__file__).parents[2])
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env={"PYTHONPATH": source}
    )
    assert done.stdout.strip() == "False", done.stderr


@pytest.mark.parametrize("kind", ["native" if HAS_COMPILER else "torch", "gil"])
def test_pushes_reach_trainings_and_are_measured(kind):
    """Also one that holds the interpreter."""
    found = fleet.measure_swap(kind, repeats=10)
    assert found["swaps"] >= 5
    assert 0 < found["p50_ms"] <= found["p99_ms"]


def test_a_push_that_a_newer_one_overtakes_counts_until_that_one_is_in():
    decided = [(1, 0.0), (2, 1.0), (3, 2.0), (9, 5.0)]
    assert delays(decided, [(1, 0.5), (3, 2.5)]) == [0.5, 1.5, 0.5]


def test_uploads_are_acknowledged_and_counted():
    found = fleet.measure_upload("linear", sync=True, repeats=5)
    assert found["repeats"] >= 5 and found["fsync"]
    assert found["commit_ms"] > 0 and 0 < found["p50_ms"] <= found["p99_ms"] <= found["worst_ms"]
    assert found["megabytes"] == pytest.approx(4e-6 * 7_850)


def test_a_crowd_on_the_command_line(tmp_path, monkeypatch):
    """A crowd that rests asks for about as many updates as it should, and is shown as a table and
    as JSON. (Two of the four loads are enough here.)"""
    monkeypatch.setattr(fleet, "LOADS", fleet.LOADS[::3])
    out = tmp_path / "bench.json"
    orders = ["bench", "fleet-load", "fleet-steady", "--quick", "--clients", "40"]
    done = CliRunner().invoke(app, [*orders, "--minutes", "0.05", "--out", str(out)])
    assert done.exit_code == 0, done.output
    assert "light clients" in done.output and "steady load" in done.output
    found = json.loads(out.read_text())
    assert len(found["fleet-load"]) == 2
    for row in found["fleet-load"]:
        assert row["clients"] == 10 and row["updates"] > 0
        assert 0 < row["fold_cpu_ms"] < row["server_cpu_ms"]
        assert row["memory_mb"] > row["empty_mb"] * 0.9
    [steady] = found["fleet-steady"]
    assert len(steady["fifths_mb"]) == 5 and steady["peak_mb"] >= max(steady["fifths_mb"])


def test_the_median_of_runs_is_shown():
    rows = [{"p50_ms": value, "fsync": True, "model": "linear"} for value in (3.0, 1.0, 2.0)]
    assert fleet.middle(rows) == {"p50_ms": 2.0, "fsync": True, "model": "linear", "runs": 3}
