"""`--diagnose` from the command line to the files."""

import pytest


def test_from_the_command_line(polytempo, tmp_path):
    found = polytempo(
        *("run", "--strategy", "fedbuff:buffer_size=2", "--clients", "5", "--rounds", "24"),
        *("--diagnose", "8", "--limit", "200", "--out", tmp_path / "run", "--json"),
    ).json
    assert set(found["diagnosis"]) >= {"noise", "bias", "delay", "error", "influence"}
    assert found["diagnosis"]["measurements"] == 3
    assert sum(found["diagnosis"]["influence"]) == pytest.approx(1)
    lines = (tmp_path / "run" / "diagnosis.csv").read_text().splitlines()
    assert lines[0].startswith("round,time,noise,bias,delay")
    assert len(lines) == 4
