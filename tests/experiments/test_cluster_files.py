"""Clusters and newcomers, from the command line to the files."""

import csv

import numpy as np
import pytest

from polytempo.experiments import result_folder
from polytempo.experiments.result_folder import read_result

GIVEN = (
    *("--data", "synthetic:samples=30", "--clients", 12, "--concurrency", 12, "--refill", "same"),
    *("--updates", 120, "--eval-every", 10, "--epochs", 1, "--batch-size", 10, "--lr", 0.05),
    *("--model", "linear", "--adapt-epochs", 0),
)


def test_a_run_says_who_was_in_which_cluster_and_when(polytempo, tmp_path, monkeypatch):
    pytest.importorskip("matplotlib")
    monkeypatch.setattr(result_folder, "can_plot", lambda: True)
    folder = tmp_path / "run"
    found = polytempo("run", "--strategy", "casa", *GIVEN, "--out", folder, "--json").json
    assert found["clusters"] >= 1
    assert 0 < found["cluster_purity"] <= 1 and -0.5 <= found["cluster_ari"] <= 1
    last = read_result(folder).history[-1]
    assert last["clusters"] == found["clusters"]
    with (folder / "clusters.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    now = {row["client"]: row["cluster"] for row in rows}
    assert len(set(now.values()) - {"-1"}) == found["clusters"]
    assert [int(row["updates"]) for row in rows] == sorted(int(row["updates"]) for row in rows)
    with np.load(folder / "similarity.npz") as kept:
        assert kept["matrices"].shape == (len(kept["updates"]), 12, 12)
        assert kept["updates"][-1] == 120
    assert (folder / "clusters.png").exists() and (folder / "similarity.png").exists()
    assert "adjusted Rand index" in (folder / "report.html").read_text()


def test_a_comparison_shows_clusters_if_somebody_has_any(polytempo, tmp_path):
    outcome = polytempo("compare", "casa", "fedasync", *GIVEN, "--out", tmp_path / "both")
    assert outcome.code == 0, outcome.err
    with (tmp_path / "both" / "summary.csv").open(newline="") as file:
        casa, fedasync = csv.DictReader(file)
    assert float(casa["clusters"]).is_integer()
    assert float(casa["cluster_ari"]) <= 1 and 0 < float(casa["cluster_purity"]) <= 1
    assert fedasync["clusters"] == fedasync["cluster_ari"] == ""
    assert "rand index" in outcome.out
    outcome = polytempo("compare", "fedasync", *GIVEN, "--out", tmp_path / "both")
    with (tmp_path / "both" / "summary.csv").open(newline="") as file:
        [fedasync] = csv.DictReader(file)
    assert "clusters" not in fedasync


def test_newcomers_are_reported_apart(polytempo, tmp_path):
    given = ("--strategy", "fedasync", *GIVEN, "--dropout", "join:updates=60,share=0.25")
    found = polytempo("run", *given, "--out", tmp_path / "run", "--check", "--json").json
    rows = read_result(tmp_path / "run").history
    values = [row["accuracy_newcomers"] for row in rows]
    assert [value is None for value in values] == [row["updates"] < 60 for row in rows]
    assert found["accuracy_newcomers"] == pytest.approx(np.mean(values[-3:]))
    outcome = polytempo("run", *given, "--out", tmp_path / "shown")
    assert "accuracy, newcomers" in outcome.out


def test_runs_without_either_do_not_speak_of_them(finished):
    folder, outcome = finished
    assert "newcomers" not in outcome.out and "clusters" not in outcome.out
    assert "clusters" not in read_result(folder).history[-1]


@pytest.mark.parametrize(
    ("alias", "same"),
    [("casa-default", "two-speed"), ("casa-a", "uniform"), ("casa-b", "severe")],
)
def test_the_scenarios_of_casa_have_names(alias, same):
    from polytempo.simulation import DEVICES

    one, other = DEVICES.create(alias), DEVICES.create(same)
    assert one.factors(10, 3) == other.factors(10, 3)
