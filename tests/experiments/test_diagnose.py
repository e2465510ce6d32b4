"""`--diagnose` from the command line to the files."""

import json

import pytest


def test_from_the_command_line(polytempo, tmp_path):
    shown = polytempo(
        *("run", "--strategy", "fedbuff:buffer_size=2", "--clients", "5", "--updates", "24"),
        *("--diagnose", "8", "--limit", "200", "--out", tmp_path / "run"),
    ).out
    found = json.loads((tmp_path / "run" / "result.json").read_text())["diagnosis"]
    assert set(found) >= {"noise", "bias", "delay", "error", "influence"}
    assert found["measurements"] == 3
    assert sum(found["influence"]) == pytest.approx(1)
    worst = max(("noise", "bias", "delay"), key=found.__getitem__)
    assert f"what hurts  {worst} {found[worst]:.2g}, " in shown
    lines = (tmp_path / "run" / "diagnosis.csv").read_text().splitlines()
    assert lines[0].startswith("updates,time,noise,bias,delay")
    assert len(lines) == 4
